"""Operators as pure functions over Arrow tables: (state, batch, clock) → (new state, outputs).

Nothing here knows Spark, files or the network; the same kernel runs inside Spark in production and
in process in tests. Read :mod:`plan` for what a job is made of, :mod:`ingest` and :mod:`stage` for
how a batch runs through it, :mod:`kernels/windows/final.py` for an operator, :mod:`sorted_runs` for state
and :mod:`watermarks` for time.
"""
