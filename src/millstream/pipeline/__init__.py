"""Pipelines as declared: App, Topic, Stream, and their plan.

A pipeline is declared with :class:`~millstream.pipeline.app.App`, checked while it is declared,
compiled into a plan (:mod:`millstream.pipeline.compile`) and run on Spark, or in process by
:mod:`millstream.testing`.
"""

from millstream.pipeline.app import App
from millstream.pipeline.dedup_words import bloom
from millstream.pipeline.device_clock import device_time
from millstream.pipeline.functions import count, mean, sum, tumbling  # noqa: A004
from millstream.pipeline.streams import Stream, Topic
from millstream.pipeline.time_words import processing_time, watermark

__all__ = [
    "App",
    "Stream",
    "Topic",
    "bloom",
    "count",
    "device_time",
    "mean",
    "processing_time",
    "sum",
    "tumbling",
    "watermark",
]
