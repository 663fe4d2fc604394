"""The engine on Apache Spark, and the only package that imports pyspark.

Spark moves frames and keeps checkpoints; it decides nothing. Start reading at ``session.py``: how a
session is started and ended. Every name that Spark calls private, or that lives in its JVM, is in
``internals.py`` and nowhere else.
"""
