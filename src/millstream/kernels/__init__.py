"""Operators as pure functions over Arrow tables: (state, batch, clock) → (new state, outputs).

Nothing here knows Spark, files or the network; the same kernel runs inside Spark in production and
in process in tests. Read `plan.py` for what a job is made of, `ingest.py` and `stage.py` for how a batch
runs through it, `windows/final.py` for an operator, `state/sorted_runs.py` for state and
`time/watermarks.py` for time.
"""
