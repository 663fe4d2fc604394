"""The demo that `millstream demo ads` runs: a real week of advertising, or a made-up one, and its results.

`ads_week.py` and `ads_generated.py` have the events, `ads_disorder.py` makes them late, repeated and out
of order, `feed.py` writes them into the log, `ads_pipeline.py` is the pipeline, and `ads_expected.py`
computes the same independently; `ads_run.py` puts them together, and `ads_chaos.py` attacks them. Then
`live_run.py` lets events go on: `live_events.py` has them, `live_pipeline.py` is the process that is killed,
`live_watch.py` looks at it from outside, and `live_story.py` has the figures of the end. The data,
`ads_week.parquet`, comes with its licence and attribution beside it.
"""
