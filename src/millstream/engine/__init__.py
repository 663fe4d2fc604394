"""What runs an app, and does not depend on where its work is done.

Start with ``job.py``: a run from start to end, on any engine. ``source/`` plans and reads batches, ``stages/`` runs
stateful operators, ``batch_runner.py`` commits. ``local_engine.py`` is the engine without a JVM; the one on Spark is
the package ``millstream.spark``.
"""
