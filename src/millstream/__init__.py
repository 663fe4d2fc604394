"""Millstream: a durable event log, and stream processing over it, in one install.

The log is the truth; everything else is a fold over it. Start with :func:`connect` for the log and
with :class:`App` for a pipeline. Names load when they are first used, so that ``import millstream``
is cheap and needs neither pyspark nor a Java.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from millstream.errors import (
    ConfigError,
    ConflictError,
    CorruptionError,
    FencedError,
    JobFailedError,
    MillstreamError,
    OffsetOutOfRangeError,
    RetriableError,
    UserCodeError,
)

if TYPE_CHECKING:
    from millstream.client import EventLog, connect
    from millstream.kernels.loss import expected_loss
    from millstream.pipeline import (
        App,
        Stream,
        Topic,
        UserAggregate,
        Windowed,
        after_count,
        aggregate,
        bloom,
        calendar,
        count,
        count_window,
        device_time,
        distinct,
        first,
        frequent_items_sketch,
        hll_sketch,
        hopping,
        kll_sketch,
        last,
        list,
        max,
        max_by,
        mean,
        min,
        min_by,
        processing_time,
        quantile,
        quantiles,
        session,
        set,
        sliding,
        stddev,
        sum,
        top_k,
        tumbling,
        variance,
        watermark,
    )
    from millstream.record import Record
    from millstream.views import panels
    from millstream.views.dataset import Dataset, dataset
    from millstream.views.fed import PartialOutputWarning
    from millstream.views.foreach import ForeachContext
    from millstream.views.reading import View, view
    from millstream.views.server.serving import serve

__version__ = "0.1.0"

__all__ = [
    "App",
    "ConfigError",
    "ConflictError",
    "CorruptionError",
    "Dataset",
    "EventLog",
    "FencedError",
    "ForeachContext",
    "JobFailedError",
    "MillstreamError",
    "OffsetOutOfRangeError",
    "PartialOutputWarning",
    "Record",
    "RetriableError",
    "Stream",
    "Topic",
    "UserAggregate",
    "UserCodeError",
    "View",
    "Windowed",
    "__version__",
    "after_count",
    "aggregate",
    "bloom",
    "calendar",
    "connect",
    "count",
    "count_window",
    "dataset",
    "device_time",
    "distinct",
    "expected_loss",
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
    "panels",
    "processing_time",
    "quantile",
    "quantiles",
    "serve",
    "session",
    "set",
    "sliding",
    "stddev",
    "sum",
    "top_k",
    "tumbling",
    "variance",
    "view",
    "watermark",
]

# Where each name that is not loaded yet lives. Type checkers read the imports above instead.
_HOMES = {
    "App": "millstream.pipeline",
    "Dataset": "millstream.views.dataset",
    "EventLog": "millstream.client",
    "ForeachContext": "millstream.views.foreach",
    "PartialOutputWarning": "millstream.views.fed",
    "Record": "millstream.record",
    "Stream": "millstream.pipeline",
    "Topic": "millstream.pipeline",
    "UserAggregate": "millstream.pipeline",
    "View": "millstream.views.reading",
    "Windowed": "millstream.pipeline",
    "bloom": "millstream.pipeline",
    "connect": "millstream.client",
    "count": "millstream.pipeline",
    "device_time": "millstream.pipeline",
    "expected_loss": "millstream.kernels.loss",
    "dataset": "millstream.views.dataset",
    "after_count": "millstream.pipeline",
    "calendar": "millstream.pipeline",
    "hopping": "millstream.pipeline",
    "mean": "millstream.pipeline",
    "panels": "millstream.views",
    "processing_time": "millstream.pipeline",
    "aggregate": "millstream.pipeline",
    "distinct": "millstream.pipeline",
    "first": "millstream.pipeline",
    "frequent_items_sketch": "millstream.pipeline",
    "hll_sketch": "millstream.pipeline",
    "kll_sketch": "millstream.pipeline",
    "last": "millstream.pipeline",
    "list": "millstream.pipeline",
    "max": "millstream.pipeline",
    "max_by": "millstream.pipeline",
    "min": "millstream.pipeline",
    "min_by": "millstream.pipeline",
    "quantile": "millstream.pipeline",
    "quantiles": "millstream.pipeline",
    "set": "millstream.pipeline",
    "stddev": "millstream.pipeline",
    "count_window": "millstream.pipeline",
    "serve": "millstream.views.server.serving",
    "session": "millstream.pipeline",
    "sliding": "millstream.pipeline",
    "sum": "millstream.pipeline",
    "top_k": "millstream.pipeline",
    "tumbling": "millstream.pipeline",
    "variance": "millstream.pipeline",
    "view": "millstream.views.reading",
    "watermark": "millstream.pipeline",
}

if not TYPE_CHECKING:  # a checker that saw this would take every misspelt name for a good one

    def __getattr__(name: str) -> object:
        """Load a public name on its first use, and keep it."""
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(import_module(_HOMES[name]), name)
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        """Name what is public, loaded or not."""
        return sorted({*globals(), *__all__})
