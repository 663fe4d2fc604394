"""Values that the user's code gives for state and for output, checked one by one against their types.

They are checked where they are given, so that a wrong one is an error of its row, and not of the batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from types import MappingProxyType
from typing import Any

import polars as pl
import pyarrow as pa

from millstream.kernels.errors.user_code import UnusableRowError

Conversion = Callable[[Any], Any]
"""Returns a value as its column keeps it, or raises an error that says why it cannot."""


def conversion(dtype: pl.DataType, what: str) -> Conversion:
    """Return the conversion of values to a type; ``what`` names their place in errors. None stays None.

    A value comes out as it will be read again from its column, so that it is the same before a batch ends and after.
    Nothing is parsed: polars alone would take texts for times and numbers.
    """
    if dtype.is_integer():
        return _whole(dtype, what)
    if dtype == pl.Float64():
        return _float(what)
    plain = _PLAIN.get(type(dtype))
    if plain is not None:
        return _instance(*plain, dtype, what)
    if isinstance(dtype, pl.Struct):
        return _struct(dtype, what)
    if isinstance(dtype, (pl.List, pl.Array)):
        return _list(dtype, what)
    return _rounded(dtype, what)


def key_conversion(dtype: pl.DataType, what: str) -> Conversion:
    """Return the conversion of the keys of a map, which are to be found again."""
    convert = conversion(dtype, what)
    if not dtype.is_float():
        return convert

    def of_number(value: Any) -> Any:
        number = convert(value)
        if number is not None and math.isnan(number):
            raise UnusableRowError(f"{what} is NaN, which is equal to no key, not even to itself")
        return number

    return of_number


def refused(value: Any, dtype: pl.DataType, what: str) -> UnusableRowError:
    """Return the error of a value that its type cannot hold."""
    return UnusableRowError(f"{what} is {value!r}, and is declared as {dtype}")


def _whole(dtype: pl.DataType, what: str) -> Conversion:
    bounds = (pl.Series([], dtype=dtype).lower_bound(), pl.Series([], dtype=dtype).upper_bound())
    low, high = (int(bound.item()) for bound in bounds)

    def convert(value: Any) -> Any:
        if value is None or (type(value) is int and low <= value <= high):
            return value
        raise refused(value, dtype, what)

    return convert


def _float(what: str) -> Conversion:
    def convert(value: Any) -> Any:
        if value is None or type(value) is float:
            return value
        if type(value) is int and _is_float(value):
            return float(value)
        raise refused(value, pl.Float64(), what)

    return convert


def _is_float(number: int) -> bool:
    """Return whether a whole number is one of the floats, which from 2^53 on only some are."""
    try:
        return float(number) == number
    except OverflowError:
        return False


def _instance(
    plain: type, is_kept: Callable[[Any], bool] | None, dtype: pl.DataType, what: str
) -> Conversion:
    def convert(value: Any) -> Any:
        if value is None or (type(value) is plain and (is_kept is None or is_kept(value))):
            return value
        raise refused(value, dtype, what)

    return convert


def _is_unicode(text: str) -> bool:
    """Return whether a text can be stored: half of a surrogate pair, as JSON may have it, cannot."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_local(clock: time) -> bool:
    """Return whether a time of day has no zone, which its column would not keep."""
    return clock.tzinfo is None


# The type of Python's for a type, and what says whether its column keeps a value.
_PLAIN: Mapping[type[pl.DataType], tuple[type, Callable[[Any], bool] | None]] = {
    pl.String: (str, _is_unicode),
    pl.Binary: (bytes, None),
    pl.Boolean: (bool, None),
    pl.Date: (date, None),
    pl.Time: (time, _is_local),
}


def _struct(dtype: pl.Struct, what: str) -> Conversion:
    fields = [(one.name, conversion(_instance_of(one.dtype), what)) for one in dtype.fields]
    names = {name for name, _ in fields}

    def convert(value: Any) -> Any:
        if value is None:
            return None
        if not isinstance(value, Mapping) or value.keys() != names:
            raise refused(value, dtype, what)
        return {name: of_field(value[name]) for name, of_field in fields}

    return convert


def _list(dtype: pl.List | pl.Array, what: str) -> Conversion:
    of_item = conversion(_instance_of(dtype.inner), what)
    size = dtype.size if isinstance(dtype, pl.Array) else None

    def convert(value: Any) -> Any:
        if value is None:
            return None
        if not isinstance(value, (list, tuple)) or size not in (None, len(value)):
            raise refused(value, dtype, what)
        return [of_item(item) for item in value]

    return convert


def _instance_of(dtype: Any) -> pl.DataType:
    """Return the type of what a nested type holds: that may be a class of polars instead of an instance."""
    return pl.Series([], dtype=dtype).dtype


def _rounded(dtype: pl.DataType, what: str) -> Conversion:
    """Return the conversion to a type that may round: decimals, short floats, instants and durations by their unit."""

    def convert(value: Any) -> Any:
        if value is None:
            return None
        if not _is_like(value, dtype):
            raise refused(value, dtype, what)
        try:
            rounded = pl.Series([value], dtype=dtype, strict=True).to_list()[0]
        except (TypeError, ValueError, OverflowError, pl.exceptions.PolarsError) as error:
            raise refused(value, dtype, what) from error
        if dtype.is_float() and not _is_rounded(value, rounded):
            raise refused(value, dtype, what)
        return rounded

    return convert


def _is_rounded(value: float, rounded: float) -> bool:
    """Return whether a short float stands for a number: a whole number itself, and another one unless it is too large."""
    if isinstance(value, int):
        return rounded == value
    return math.isinf(rounded) == math.isinf(value)


def _is_like(value: Any, dtype: pl.DataType) -> bool:
    """Return whether a value is of Python's type for a type of polars."""
    if isinstance(dtype, pl.Datetime):
        aware = isinstance(value, datetime) and value.tzinfo is not None
        return isinstance(value, datetime) and aware == (dtype.time_zone is not None)
    if isinstance(dtype, pl.Duration):
        return isinstance(value, timedelta)
    if isinstance(value, Decimal) and not value.is_finite():
        return False  # polars panics over NaN
    numbers = (Decimal, int) if isinstance(dtype, pl.Decimal) else (float, int)
    return isinstance(value, numbers) and not isinstance(value, bool)


def column_of(name: str, values: Sequence[Any], dtype: pl.DataType) -> pl.Series:
    """Return a column of values that :func:`conversion` returned."""
    if not dtype.is_nested():
        return pl.Series(name, values, dtype, strict=True)
    # polars makes a column of each of the lists first, which takes ten times as long.
    arrow = pl.Series([], dtype=dtype).to_arrow().type
    return pl.Series(name, pa.array(values, arrow)).cast(dtype)


def frozen(value: Any) -> Any:
    """Return a nested value so that it cannot be changed in place, which would not be noticed."""
    if isinstance(value, dict):
        return MappingProxyType({name: frozen(item) for name, item in value.items()})
    return tuple(map(frozen, value)) if isinstance(value, list) else value
