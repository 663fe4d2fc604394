"""The words for windows and for when their panes fire: tumbling, hopping, calendar, after_count."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Literal, get_args
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from millstream.choices import choose, did_you_mean
from millstream.durations import Duration, describe_us, to_us, unit_named
from millstream.errors import ConfigError
from millstream.kernels.emission import AfterCount, AfterTime, EachBatch, Firing
from millstream.kernels.local_calendar import Calendar
from millstream.kernels.windows import Hopping, Tumbling

Weekday = Literal["monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday"]
FiringWord = Duration | AfterCount | None  # "each" and "batch" are strings, as durations are

_WEEKDAYS = get_args(Weekday)
_SPAN = re.compile(r"\s*(\d+)\s*([a-zA-Z]+)\s*")
_MINUTES = {"minute": 1, "hour": 60}
_MONTHS = {"month": 1, "quarter": 3, "year": 12}


def tumbling(size: Duration, *, offset: Duration = "0 seconds") -> Tumbling:
    """Windows of one size, side by side: ``[k·size, (k+1)·size)``, shifted by ``offset``, in UTC.

    The offset may be negative: ``"-30 minutes"``.
    """
    size_us = _above_zero(size, "tumbling's size")
    return Tumbling(size_us, _signed_us(offset, "tumbling's offset") % size_us)


def hopping(
    size: Duration,
    slide: Duration,
    *,
    offset: Duration = "0 seconds",
    allow_gaps: bool = False,
) -> Hopping:
    """Windows of one size, one begun every ``slide``: ``[k·slide, k·slide + size)``, in UTC.

    An event is in about size/slide windows. Events are kept in pieces as long as the greatest common
    divisor of size and slide: the rounder their ratio, the less is kept.

    Args:
        size: How long a window is.
        slide: How far apart windows begin; it need not divide the size.
        offset: Shifts the windows; may be negative.
        allow_gaps: Allow a slide above the size. Events between two windows are then in none; the
            ledger counts them as filtered.
    """
    size_us, slide_us = _above_zero(size, "hopping's size"), _above_zero(slide, "hopping's slide")
    if slide_us > size_us and not allow_gaps:
        raise ConfigError(
            f"hopping's slide of {describe_us(slide_us)} is above its size of "
            f"{describe_us(size_us)}, so events between two windows would be in none. Give a slide "
            "up to the size, or allow_gaps=True."
        )
    return Hopping(size_us, slide_us, _signed_us(offset, "hopping's offset") % slide_us)


def calendar(span: str, *, tz: str, week_start: Weekday = "monday") -> Calendar:
    """Windows as the clocks of a time zone show them: days of 23 or 25 hours where they change.

    Args:
        span: ``"1 day"``, ``"1 week"``, ``"1 month"``, ``"1 quarter"``, ``"1 year"``, several months
            that divide a year, or minutes or hours that divide a day (they begin anew at midnight).
        tz: The IANA name of the time zone, such as ``"America/New_York"``.
        week_start: The day on which weeks begin.

    An hour that clocks show twice is two windows: results tell windows by instants, in UTC.
    """
    unit, count = _span(span)
    try:
        ZoneInfo(tz)
    except (ZoneInfoNotFoundError, ValueError, TypeError) as error:
        raise ConfigError(
            f'calendar\'s tz is {tz!r}. Give an IANA name, such as "Europe/Berlin" or "UTC".'
        ) from error
    choose("calendar's week_start", week_start, _WEEKDAYS)
    return Calendar(unit, count, tz, _WEEKDAYS.index(week_start))


def _span(span: str) -> tuple[Literal["minute", "day", "week", "month"], int]:
    found = _SPAN.fullmatch(span) if isinstance(span, str) else None
    count, said = (int(found[1]), found[2]) if found else (0, "")
    name = unit_named(said) or said.lower().removesuffix("s")
    if name in ("day", "week") and count == 1:
        return ("day" if name == "day" else "week"), 1
    if name in _MINUTES and count and 1440 % (count * _MINUTES[name]) == 0:
        return "minute", count * _MINUTES[name]
    if name in _MONTHS and count and 12 % (count * _MONTHS[name]) == 0:
        return "month", count * _MONTHS[name]
    raise ConfigError(
        f'calendar\'s span is {span!r}. Give "1 day", "1 week", minutes or hours that divide a day, '
        'or months that divide a year ("1 month", "1 quarter", "1 year").'
    )


def after_count(count: int) -> AfterCount:
    """Fire a pane with every ``count``-th event of a window and key, in the order of arrival.

    That order is the partition's: events of one key in several partitions are counted as they happen
    to be read.
    """
    if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count < 1 << 31:
        raise ConfigError(f"after_count's count is {count!r}. Give a whole number from 1.")
    return AfterCount(count)


def firing(word: FiringWord, what: str) -> Firing | None:
    """Read when panes fire: "each" event, each "batch", a duration of running time, a count.

    Raises:
        ConfigError: it is none of these, or a duration of less than a millisecond.
    """
    if word is None or isinstance(word, AfterCount):
        return word
    if word == "each":
        return AfterCount(1)
    if word == "batch":
        return EachBatch()
    near = did_you_mean(word, ("each", "batch")) if isinstance(word, str) else ""
    if isinstance(word, timedelta) or (isinstance(word, str) and not near):
        delay_ms = to_us(word, what=f'{what} (besides "each", "batch" and after_count)') // 1000
        if delay_ms:
            return AfterTime(delay_ms)
    raise ConfigError(
        f'{what} is {word!r}. Give "each", "batch", a duration from a millisecond, '
        f"ms.after_count(n), or None for no such panes.{near}"
    )


def _above_zero(duration: Duration, what: str) -> int:
    duration_us = to_us(duration, what=what)
    if duration_us == 0:
        raise ConfigError(f"{what} is 0. Give one above zero, such as '1 minute'.")
    return duration_us


def _signed_us(duration: Duration, what: str) -> int:
    if isinstance(duration, timedelta) and duration < timedelta(0):
        return -to_us(-duration, what=what)
    if isinstance(duration, str) and duration.strip().startswith("-"):
        return -to_us(duration.strip()[1:], what=what)
    return to_us(duration, what=what)
