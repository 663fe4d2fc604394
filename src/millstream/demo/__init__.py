"""The demo that `millstream demo ads` runs: a real week of advertising, with a known answer.

`ads_events.py` makes the events and the order in which they arrive, `feed.py` writes them into the
log, `ads_pipeline.py` is the pipeline, and `oracle.py` computes the answer another way. The data,
`ads_week.parquet`, comes with its licence and attribution beside it.
"""
