"""Durations as people write them: ``"10 minutes"``, ``"1h30m"``, ``"5 min"`` or a timedelta."""

from __future__ import annotations

import re
from datetime import timedelta

from millstream.choices import did_you_mean
from millstream.errors import ConfigError

Duration = str | timedelta

_UNITS_US = {
    "microsecond": 1,
    "millisecond": 1_000,
    "second": 1_000_000,
    "minute": 60_000_000,
    "hour": 3_600_000_000,
    "day": 86_400_000_000,
    "week": 604_800_000_000,
}
_US_MAX = 2**62
# A large M is often a month, which is no duration; so letters alone are small.
_LETTERS = {"us": "microsecond", "µs": "microsecond", "ms": "millisecond", "s": "second"} | {
    "m": "minute",
    "h": "hour",
    "d": "day",
    "w": "week",
}
_SHORT = {"usec": "microsecond", "msec": "millisecond", "sec": "second", "min": "minute"} | {
    "hr": "hour",
    "wk": "week",
}
_PART = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Zµ]+)\s*")


def to_us(duration: Duration, *, what: str) -> int:
    """Return a duration in microseconds. ``what`` names it in the error.

    Raises:
        ConfigError: it is neither a timedelta nor numbers with units, or it is negative.
    """
    if isinstance(duration, timedelta):
        microseconds = round(duration / timedelta(microseconds=1))
    elif isinstance(duration, str) and re.fullmatch(f"(?:{_PART.pattern})+", duration):
        parts: list[tuple[str, str]] = _PART.findall(duration)
        exact = sum(_part_us(number, unit, what) for number, unit in parts)
        microseconds = round(exact) if exact < _US_MAX else -1
    else:
        raise _error(duration, what)
    if microseconds < 0:
        raise _error(duration, what)
    return microseconds


def to_signed_us(duration: Duration, *, what: str) -> int:
    """Return a duration in microseconds that may be below zero: ``"-5 seconds"``.

    Raises:
        ConfigError: it is neither a timedelta nor numbers with units, with or without a sign.
    """
    positive: Duration | None = None
    if isinstance(duration, timedelta) and duration < timedelta(0):
        positive = -duration
    elif isinstance(duration, str) and duration.lstrip().startswith("-"):
        positive = duration.lstrip()[1:]
    if positive is None:
        return to_us(duration, what=what)
    try:
        return -to_us(positive, what=what)
    except ConfigError as error:
        raise _error(duration, what) from error


def _part_us(number: str, unit: str, what: str) -> float:
    name = unit_named(unit)
    if name is None:
        raise _error(f"{number} {unit}", what, did_you_mean(unit, _UNITS_US))
    return float(number) * _UNITS_US[name]


def unit_named(unit: str) -> str | None:
    """Return the unit that a word stands for, such as ``minute`` for ``mins``; None if for none."""
    word = unit.lower().removesuffix("s")
    found = _LETTERS.get(unit) or _SHORT.get(word) or word
    return found if found in _UNITS_US else None


def _error(seen: object, what: str, near: str = "") -> ConfigError:
    return ConfigError(
        f'{what} is {seen!r}. Give a timedelta, or a number and a unit such as "30 seconds", '
        '"10 minutes", "1h30m", "5 min", "7 days" (units: microseconds to weeks).'
        f"{near}"
    )


def format_us(duration_us: int) -> str:
    """Format a duration in the largest units that state it exactly: ``1 hour 30 minutes``.

    Weeks are said of whole weeks only: 30 days are not ``4 weeks 2 days``. Below zero there is a minus in front.
    """
    if duration_us < 0:
        return f"-{format_us(-duration_us)}"
    parts: list[str] = []
    for unit, size_us in sorted(_UNITS_US.items(), key=lambda item: -item[1]):
        if unit == "week" and duration_us % size_us:
            continue
        count, duration_us = divmod(duration_us, size_us)
        if count:
            parts.append(f"{count} {unit}{'s' if count > 1 else ''}")
    return " ".join(parts) or "0 seconds"
