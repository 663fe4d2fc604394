"""Pipelines as declared: App, Topic, Stream, and their plan.

A pipeline is declared with :class:`~millstream.pipeline.app.App`, checked while it is declared,
compiled into a plan (:mod:`millstream.pipeline.compile`) and run on Spark, or in process by
:mod:`millstream.testing`.
"""

from millstream.pipeline.app import App
from millstream.pipeline.functions import count, mean, sum, watermark  # noqa: A004
from millstream.pipeline.session_words import count_window, session, sliding
from millstream.pipeline.streams import Stream, Topic
from millstream.pipeline.window_words import after_count, calendar, hopping, tumbling

__all__ = [
    "App",
    "Stream",
    "Topic",
    "after_count",
    "calendar",
    "count",
    "count_window",
    "hopping",
    "mean",
    "session",
    "sliding",
    "sum",
    "tumbling",
    "watermark",
]
