"""Pipelines as declared: App, Topic, Stream, and their plan.

A pipeline is declared with :class:`~millstream.pipeline.app.App`, checked while it is declared,
compiled into a plan (:mod:`millstream.pipeline.compile`) and run on Spark, or in process by
:mod:`millstream.testing`.
"""

from millstream.kernels.aggregates import UserAggregate
from millstream.pipeline.aggregate_words import (
    aggregate,
    count,
    distinct,
    first,
    frequent_items_sketch,
    hll_sketch,
    kll_sketch,
    last,
    list,  # noqa: A004
    max,  # noqa: A004
    max_by,
    mean,
    min,  # noqa: A004
    min_by,
    quantile,
    quantiles,
    set,  # noqa: A004
    stddev,
    sum,  # noqa: A004
    top_k,
    variance,
)
from millstream.pipeline.app import App
from millstream.pipeline.dedup_words import bloom
from millstream.pipeline.device_clock import device_time
from millstream.pipeline.session_words import count_window, session, sliding
from millstream.pipeline.streams import Stream
from millstream.pipeline.time_words import processing_time, watermark
from millstream.pipeline.topic import Topic
from millstream.pipeline.window_words import after_count, calendar, hopping, tumbling
from millstream.pipeline.windowed import Windowed

__all__ = [
    "App",
    "Stream",
    "Topic",
    "UserAggregate",
    "Windowed",
    "after_count",
    "aggregate",
    "bloom",
    "calendar",
    "count",
    "count_window",
    "device_time",
    "distinct",
    "first",
    "frequent_items_sketch",
    "hll_sketch",
    "hopping",
    "kll_sketch",
    "last",
    "list",
    "max",
    "max_by",
    "mean",
    "min",
    "min_by",
    "processing_time",
    "quantile",
    "quantiles",
    "session",
    "set",
    "sliding",
    "stddev",
    "sum",
    "top_k",
    "tumbling",
    "variance",
    "watermark",
]
