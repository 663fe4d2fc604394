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
    from millstream.pipeline import (
        App,
        Stream,
        Topic,
        after_count,
        calendar,
        count,
        count_window,
        hopping,
        mean,
        session,
        sliding,
        sum,
        tumbling,
        watermark,
    )
    from millstream.record import Record
    from millstream.views.reading import View, view

__version__ = "0.1.0"

__all__ = [
    "App",
    "ConfigError",
    "ConflictError",
    "CorruptionError",
    "EventLog",
    "FencedError",
    "JobFailedError",
    "MillstreamError",
    "OffsetOutOfRangeError",
    "Record",
    "RetriableError",
    "Stream",
    "Topic",
    "UserCodeError",
    "View",
    "__version__",
    "after_count",
    "calendar",
    "connect",
    "count",
    "count_window",
    "hopping",
    "mean",
    "session",
    "sliding",
    "sum",
    "tumbling",
    "view",
    "watermark",
]

# Where each name that is not loaded yet lives. Type checkers read the imports above instead.
_HOMES = {
    "App": "millstream.pipeline",
    "EventLog": "millstream.client",
    "Record": "millstream.record",
    "Stream": "millstream.pipeline",
    "Topic": "millstream.pipeline",
    "View": "millstream.views.reading",
    "after_count": "millstream.pipeline",
    "calendar": "millstream.pipeline",
    "connect": "millstream.client",
    "count": "millstream.pipeline",
    "count_window": "millstream.pipeline",
    "hopping": "millstream.pipeline",
    "mean": "millstream.pipeline",
    "session": "millstream.pipeline",
    "sliding": "millstream.pipeline",
    "sum": "millstream.pipeline",
    "tumbling": "millstream.pipeline",
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
