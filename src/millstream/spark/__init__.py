"""The engine on Apache Spark, and the only package that imports pyspark.

Spark moves frames and keeps checkpoints; it decides nothing. Start reading at ``spark/runtime/session.py``: how a
session is started and ended. Every name that Spark calls private, or that lives in its JVM, is in
``spark/runtime/internals.py`` and nowhere else.
"""
