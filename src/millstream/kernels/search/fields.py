"""The fields that queries name, and how the values of columns are compared.

All ordered values are compared as whole numbers of 64 bits that have the same order: floats by their bits,
decimals by their digits, dates and times by what polars stores. So a range is always two whole numbers, both
included, and is exact for every type.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from decimal import MAX_PREC, Context, Decimal, InvalidOperation
from typing import Literal, NamedTuple

import numpy as np
import polars as pl

from millstream.kernels.arrays import Float64s, Int64s

FieldKind = Literal["text", "number", "boolean", "date", "datetime", "point"]

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1
_UNSIGNED_OFFSET = 2**63
_DECIMAL_DIGITS_MAX = 18  # more do not fit into 64 bits
_US = timedelta(microseconds=1)
_EXACT = Context(prec=MAX_PREC)  # the one of Python rounds to 28 digits
_DAY = re.compile(r"\d{4}-\d{2}-\d{2}")
_TIME = re.compile(r"\d{4}-\d{2}-\d{2}[Tt ][^.,]*(?:[.,]\d{1,6}(?!\d).*)?")
_FIRST_DAY, _FIRST_TIME = date(1970, 1, 1), datetime(1970, 1, 1, tzinfo=UTC)


class Interval(NamedTuple):
    """Whole numbers from ``low`` to ``high``, both included; none if ``low`` is above ``high``."""

    low: int
    high: int

    def stored(self) -> Interval:
        """Return the same as far as a column has such numbers."""
        low, high = max(self.low, INT64_MIN), min(self.high, INT64_MAX)
        return Interval(low, high) if low <= high else NOTHING


NOTHING = Interval(1, 0)


@dataclass(frozen=True)
class SearchField:
    """A field as queries name it, the columns that it is, and how they are compared.

    ``columns`` is one column, or the latitude and longitude of a point. ``analyzer`` makes terms of text, and
    ``stemmer`` names the release of the library that it needs.
    """

    name: str
    columns: tuple[str, ...]
    kind: FieldKind
    dtype: pl.DataType
    analyzer: str = ""
    stemmer: str = ""

    def interval(self, text: str) -> Interval:
        """Return the values that a text stands for: one number, or the time of a whole day.

        Raises:
            ValueError: it is no value of the field; the message says what would be.
        """
        if self.kind == "number":
            return _number(text, self.dtype)
        if self.kind == "boolean":
            return _boolean(text)
        return _date(text) if self.kind == "date" else _datetime(text)

    def numbers(self, column: pl.Series) -> Int64s:
        """Return the values of a column as numbers of the same order; of nulls, and NaN, any number."""
        dtype = self.dtype
        if dtype.is_float():
            floats = column.cast(pl.Float64).fill_null(0.0).to_numpy() + 0.0  # of -0.0, 0.0
            return _sortable(floats)
        if isinstance(dtype, pl.Decimal):
            scaled = column.cast(pl.Decimal(38, dtype.scale)) * Decimal(10**dtype.scale)
            return scaled.cast(pl.Decimal(38, 0)).cast(pl.Int64).fill_null(0).to_numpy()
        if dtype == pl.UInt64:
            whole = column.fill_null(0).to_numpy() ^ np.uint64(_UNSIGNED_OFFSET)
            return whole.view(np.int64)
        if isinstance(dtype, pl.Datetime):
            column = column.dt.cast_time_unit("us")
        return column.to_physical().cast(pl.Int64).fill_null(0).to_numpy()


def kind_of(dtype: pl.DataType) -> FieldKind | None:
    """Return how a column of a type is compared; None: it is no field."""
    if dtype == pl.String:
        return "text"
    if dtype == pl.Boolean:
        return "boolean"
    if dtype == pl.Date:
        return "date"
    if isinstance(dtype, pl.Datetime):
        return "datetime"
    if isinstance(dtype, pl.Decimal):
        return "number" if (dtype.precision or 38) <= _DECIMAL_DIGITS_MAX else None
    return "number" if dtype.is_numeric() else None


def _sortable(floats: Float64s) -> Int64s:
    """Return whole numbers in the order of floats: their bits, of negative ones the other way round."""
    bits: Int64s = np.ascontiguousarray(floats, np.float64).view(np.int64)
    return np.where(bits < 0, bits ^ np.int64(INT64_MAX), bits)


def _number(text: str, dtype: pl.DataType) -> Interval:
    try:
        value = Decimal(text)
    except InvalidOperation:
        raise ValueError(f"{text!r} is not a number. Write one, such as 900 or -1.5") from None
    if not value.is_finite():
        raise ValueError(f"{text!r} is not a number. Leave a bound open with *: [900 TO *]")
    if dtype.is_float():
        as_float = np.array([float(value) + 0.0])
        if dtype == pl.Float32:
            with np.errstate(over="ignore"):
                as_float = as_float.astype(np.float32).astype(np.float64)
        found = int(_sortable(as_float)[0])
        return Interval(found, found)
    scale = dtype.scale if isinstance(dtype, pl.Decimal) else 0
    least, most = (_whole(value, scale, way) for way in (math.ceil, math.floor))
    if dtype == pl.UInt64:
        least, most = least - _UNSIGNED_OFFSET, most - _UNSIGNED_OFFSET
    return Interval(least, most)


def _whole(value: Decimal, scale: int, way: object) -> int:
    if not value:
        return 0
    if value.adjusted() > 40:  # far outside, and a huge exponent would take for ever
        return INT64_MAX * 4 if value > 0 else INT64_MIN * 4
    if value.adjusted() < -100:
        value = Decimal("1e-50").copy_sign(value)
    assert callable(way)
    return int(way(value.scaleb(scale, _EXACT)))


def _boolean(text: str) -> Interval:
    if text not in ("true", "false"):
        raise ValueError(f"{text!r} is neither true nor false")
    found = int(text == "true")
    return Interval(found, found)


def _date(text: str) -> Interval:
    days = (_day(text) - _FIRST_DAY).days
    return Interval(days, days)


def _day(text: str) -> date:
    if not _DAY.fullmatch(text):
        raise ValueError(f"{text!r} is not a date. Write it as 2026-01-31")
    try:
        return date.fromisoformat(text)
    except ValueError as error:
        raise ValueError(f"{text!r} is not a date: {error}") from None


def _datetime(text: str) -> Interval:
    """Return a point in time, or a whole day; without an offset it is UTC."""
    if _DAY.fullmatch(text):
        start = _date(text).low * 86_400_000_000
        return Interval(start, start + 86_400_000_000 - 1)
    wrong = ValueError(
        f"{text!r} is not a time, to the microsecond. Write it as 2026-01-31 or 2026-01-31T12:00:00Z"
    )
    if not _TIME.fullmatch(text):  # such as 20260131, of which Python makes midnight
        raise wrong
    try:
        found = datetime.fromisoformat(text)
        found = found.replace(tzinfo=UTC) if found.tzinfo is None else found
        point = (found - _FIRST_TIME) // _US
    except (ValueError, OverflowError):
        raise wrong from None
    return Interval(point, point)
