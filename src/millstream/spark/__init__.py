"""The engine on Apache Spark, and the only package that imports pyspark.

Spark moves frames and keeps checkpoints; it decides nothing. Start with ``job.py``: a run of an app as one
streaming query. ``data_source.py`` is the source and ``sink.py`` the sink, as Spark calls them; what they do is in the
package ``millstream.engine``.
``runtime/`` starts and ends Spark: every name that is private to Spark, or lives in its JVM, is in
``runtime/internals.py`` and ``runtime/local_file_system.py``, and nowhere else.
"""
