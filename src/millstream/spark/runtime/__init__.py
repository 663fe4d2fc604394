"""The Spark session of this process: a Java, the JVM, its settings, and what the JVM is given beside them."""
