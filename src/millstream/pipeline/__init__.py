"""Pipelines as declared: App, Topic, Stream, and their plan.

A pipeline is declared with :class:`~millstream.pipeline.app.App`, checked while it is declared,
compiled into a plan (:mod:`millstream.pipeline.compile`) and run on Spark, or in process by
:mod:`millstream.testing`.
"""

from millstream.pipeline.app import App
from millstream.pipeline.dedup_words import bloom
from millstream.pipeline.functions import count, mean, sum, tumbling, watermark  # noqa: A004
from millstream.pipeline.streams import Stream, Topic

__all__ = ["App", "Stream", "Topic", "bloom", "count", "mean", "sum", "tumbling", "watermark"]
