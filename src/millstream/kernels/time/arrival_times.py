"""When records arrived, as the log says, and which event times cannot be believed in view of that.

The time of arrival is the record's timestamp in the log. Where it is the event time (processing
time), it never goes back within a partition: a record counts as having arrived when the latest one
before it did, if its own timestamp is earlier. So a backlog that is read again, however fast, falls
into the same windows.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import numpy as np
import polars as pl
import pyarrow as pa

from millstream.durations import format_us
from millstream.kernels.arrays import Int64s
from millstream.kernels.frames import TIME
from millstream.kernels.time.watermarks import WatermarkRule

_PUNCTUATION = "__punctuation"
_ONLY = "__only"
YEAR_1_S = -62_135_596_800  # since 1970
YEAR_10000_S = 253_402_300_800
NO_TIME = "no event time, or none in the years 1 to 9999"
_START = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass
class ArrivalTimes:
    """The times of arrival in one split, in the order of the log.

    ``latest_ms`` is the largest timestamp so far. ``monotonic``: a record's time is never before that
    of one before it.
    """

    latest_ms: int
    monotonic: bool

    def of_batch(self, batch: pa.RecordBatch) -> Int64s:
        """Return the times of the batch's records."""
        stamps_ms: Int64s = batch.column("timestamp").cast(pa.int64()).to_numpy()
        if self.monotonic and len(stamps_ms):
            stamps_ms = np.maximum(np.maximum.accumulate(stamps_ms), self.latest_ms)
            self.latest_ms = int(stamps_ms[-1])
        return stamps_ms * np.int64(1000)


def invalid_event_times(
    timed: pl.DataFrame, arrived_us: Int64s, rule: WatermarkRule
) -> list[tuple[int, str]]:
    """Find the rows without a time, and those whose time is too far in the future; say why."""
    found: dict[int, str] = {}
    if timed[TIME].null_count():
        only = rule.marks.punctuation_only
        timeless = pl.col(TIME).is_null() & (True if only is None else ~only.fill_null(value=False))
        found = dict.fromkeys(_rows(timed, timeless), NO_TIME)
    if rule.future_max_us is None:
        return sorted(found.items())
    limit_us = pl.Series(arrived_us) + rule.future_max_us
    spoken = {"event time": timed[TIME]}
    if rule.marks.punctuation is not None:
        marked = timed.select(rule.marks.punctuation.alias(_PUNCTUATION))
        spoken["punctuation"] = epoch_us(marked[_PUNCTUATION])
    for what, times in spoken.items():
        for at in (times > limit_us).fill_null(value=False).arg_true().to_list():
            found.setdefault(at, _reason(what, times[at], int(arrived_us[at]), rule.future_max_us))
    return sorted(found.items())


def epoch_us(times: pl.Series) -> pl.Series:
    """Return datetimes as microseconds since 1970 UTC; null where the year is not 1 to 9999.

    Beyond these years times can be neither written down in the usual ways nor, some of them, counted
    in microseconds at all.
    """
    unit = times.dtype.time_unit if isinstance(times.dtype, pl.Datetime) else "us"
    counted = times.to_physical()
    per_s = {"ms": 1_000, "us": 1_000_000, "ns": 1_000_000_000}[unit]
    first, end = YEAR_1_S * per_s, YEAR_10000_S * per_s
    low, high = counted.min(), counted.max()
    if isinstance(low, int) and isinstance(high, int) and (low < first or high >= end):
        counted = counted.set((counted < first) | (counted >= end), None)
    if unit == "us":
        return counted
    return counted * 1000 if unit == "ms" else counted // 1000


def _rows(timed: pl.DataFrame, condition: pl.Expr) -> list[int]:
    return timed.select(condition.alias(_ONLY))[_ONLY].arg_true().to_list()


def _reason(what: str, at_us: int, arrived_us: int, future_max_us: int) -> str:
    return (
        f"the {what} {_iso_text(at_us)} is later than the record's arrival, {_iso_text(arrived_us)}, by "
        f"more than {format_us(future_max_us)} (future_max)"
    )


def _iso_text(at_us: int) -> str:
    try:
        return (_START + timedelta(microseconds=at_us)).isoformat()
    except OverflowError:  # past the year 9999, which is just the kind of time that comes here
        return f"{at_us} µs after 1970"
