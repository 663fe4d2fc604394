"""The Spark session of this process: the Java, the JVM, its settings, and the workers' parent process."""
