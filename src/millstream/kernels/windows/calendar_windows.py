"""Calendar windows: days, weeks, months and parts of days as the clocks of a time zone show them.

A window begins at an instant at which the local clock shows a multiple of the unit, and ends at the
next. So a day has 23 or 25 hours where clocks change, and an hour that the clocks show twice is two
windows. A boundary that the clocks skip falls on the instant of the change.

Source: the rules are those of ``zoneinfo`` (the IANA time zone database) with PEP 495's folds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from functools import lru_cache
from typing import ClassVar, Literal
from zoneinfo import ZoneInfo

import numpy as np
import polars as pl

from millstream.kernels.arrays import Int64s

Unit = Literal["minute", "day", "week", "month"]
_DAY_US = 86_400_000_000
_NOMINAL_US = {"minute": 60_000_000, "day": _DAY_US, "week": 7 * _DAY_US, "month": 28 * _DAY_US}
_DAYS = (-718_000, 2_931_000)  # the years 5 to 9994: what lies beyond is in one far window each
_FAR = np.array([-3 * 2**61, 3 * 2**61], np.int64)
_ORIGIN = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)


@dataclass(frozen=True)
class Calendar:
    """Windows of ``count`` units of local time, side by side.

    ``minute``: the count divides a day; windows start over at midnight. ``day`` and ``week``: the
    count is 1; a week begins on ``week_start`` (0 is Monday). ``month``: the count divides a year.
    """

    unit: Unit
    count: int
    tz: str
    week_start: int = 0
    window_key: ClassVar[tuple[str, ...]] = ("window_start",)

    @property
    def slide_us(self) -> int:
        return _NOMINAL_US[self.unit] * self.count

    @property
    def tiled(self) -> bool:
        return True

    def slices(self, times: pl.Series) -> pl.Series:
        found = times.to_numpy()
        boundaries = self._boundaries(found)
        at = np.searchsorted(boundaries, found, side="right") - 1
        return pl.Series(times.name, boundaries[at])

    def first(self, slices: Int64s) -> Int64s:
        return slices

    def counts(self, slices: Int64s) -> Int64s:
        return np.ones(len(slices), np.int64)

    def starts(self, labels: Int64s) -> Int64s:
        return labels

    def ends(self, labels: Int64s) -> Int64s:
        boundaries = self._boundaries(labels)
        result: Int64s = boundaries[np.searchsorted(boundaries, labels, side="right")]
        return result

    def count_ended(self, slices: Int64s, reached: Int64s) -> Int64s:
        return (self.ends(slices) <= reached).astype(np.int64)

    def latest_end(self, time_us: int) -> int:
        return int(self.ends(np.array([time_us], np.int64))[0])

    def end_at_or_before(self, time_us: int) -> int:
        return int(self.slices(pl.Series([time_us]))[0])

    def __str__(self) -> str:
        return f"calendar({self.count} {self.unit}{'s' if self.count > 1 else ''}, {self.tz})"

    def _boundaries(self, times: Int64s) -> Int64s:
        """List, in order, the boundaries around the times: of each, the last before and the next."""
        days = np.unique(np.clip(times // _DAY_US, *_DAYS))
        return np.unique(np.concatenate([_FAR, *(_around_day(self, int(day)) for day in days)]))

    def around(self, day: date) -> Iterator[datetime]:
        """Yield local times: all boundaries from before a day to after it."""
        first, last = day - timedelta(days=1), day + timedelta(days=2)
        if self.unit == "minute":
            midnight = datetime(first.year, first.month, first.day)  # noqa: DTZ001 - local time
            for number in range(4 * 1440 // self.count):
                yield midnight + timedelta(minutes=number * self.count)
            return
        at = self._period(first)
        while at <= last:
            yield datetime(at.year, at.month, at.day)  # noqa: DTZ001 - local time
            at = self._next(at)
        yield datetime(at.year, at.month, at.day)  # noqa: DTZ001 - local time

    def _period(self, day: date) -> date:
        if self.unit == "week":
            return day - timedelta(days=(day.weekday() - self.week_start) % 7)
        if self.unit == "month":
            return date(day.year, (day.month - 1) // self.count * self.count + 1, 1)
        return day

    def _next(self, at: date) -> date:
        if self.unit == "month":
            months = at.year * 12 + at.month - 1 + self.count
            return date(months // 12, months % 12 + 1, 1)
        return at + timedelta(days=7 if self.unit == "week" else 1)


@lru_cache(maxsize=4096)
def _around_day(windows: Calendar, day: int) -> Int64s:
    """Return the boundaries, as instants, from before a day (counted from 1970, UTC) to after it."""
    zone = ZoneInfo(windows.tz)
    local = windows.around((_ORIGIN + timedelta(days=day)).date())
    last = None if windows.unit == "minute" else 1  # a day begins when its midnight first comes
    return np.unique(
        np.array([t for at in local for t in local_instants(at, zone)[:last]], np.int64)
    )


def local_instants(at: datetime, zone: ZoneInfo) -> list[int]:
    """Return the instants at which a zone's clocks show a local time: one or two.

    A time that they skip gives the instant of the change.
    """
    once, again = (at.replace(tzinfo=zone, fold=fold).astimezone(UTC) for fold in (0, 1))
    if once == again:
        return [(once - _ORIGIN) // _MICROSECOND]
    if once.astimezone(zone).replace(tzinfo=None) == at:
        return [(once - _ORIGIN) // _MICROSECOND, (again - _ORIGIN) // _MICROSECOND]
    return [_change(again, once, zone)]


def _change(before: datetime, after: datetime, zone: ZoneInfo) -> int:
    """Find the instant in (before, after] at which a zone's offset changes."""
    low, high = ((t - _ORIGIN) // timedelta(seconds=1) for t in (before, after))
    offset = before.astimezone(zone).utcoffset()
    while high - low > 1:
        middle = (low + high) // 2
        there = (_ORIGIN + timedelta(seconds=middle)).astimezone(zone)
        low, high = (middle, high) if there.utcoffset() == offset else (low, middle)
    return high * 1_000_000
