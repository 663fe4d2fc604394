"""Values that the user's code gives for state and for output, checked one by one against their types.

They are checked where they are given, so that a wrong one is an error of its row, and not of the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import UTC, date, datetime, time, timedelta
from types import MappingProxyType
from typing import Any

import polars as pl

from millstream.kernels.errors.user_code import UnusableRowError

Conversion = Callable[[Any], Any]
"""Returns a value as its column keeps it, or raises an error that says why it cannot."""

# polars would parse texts as these.
_PLAIN: Mapping[type[pl.DataType], type] = {
    pl.String: str,
    pl.Binary: bytes,
    pl.Boolean: bool,
    pl.Date: date,
    pl.Time: time,
    pl.Duration: timedelta,
}


def conversion(dtype: pl.DataType, what: str) -> Conversion:
    """Return the conversion of values to a type; ``what`` names their place in errors. None stays None."""
    if dtype.is_integer():
        return _whole(dtype, what)
    if dtype == pl.Float64():
        return _float(what)
    plain = _PLAIN.get(type(dtype))
    if plain is not None:
        return _instance(plain, dtype, what)
    if isinstance(dtype, pl.Datetime) and dtype.time_zone is not None:
        return _instant(dtype, what)
    return _any(dtype, what)


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
        if type(value) is int:
            return float(value)
        raise refused(value, pl.Float64(), what)

    return convert


def _instance(plain: type, dtype: pl.DataType, what: str) -> Conversion:
    def convert(value: Any) -> Any:
        if value is None or type(value) is plain:
            return value
        raise refused(value, dtype, what)

    return convert


def _instant(dtype: pl.Datetime, what: str) -> Conversion:
    def convert(value: Any) -> Any:
        if value is None:
            return None
        if isinstance(value, datetime) and value.tzinfo is not None:
            return value.astimezone(UTC)
        raise refused(value, dtype, what)

    return convert


def _any(dtype: pl.DataType, what: str) -> Conversion:
    """Return the conversion to a type for which polars itself is asked: dates, decimals, lists, structs."""

    def convert(value: Any) -> Any:
        if value is None:
            return None
        try:
            return pl.Series([thawed(value)], dtype=dtype, strict=True).to_list()[0]
        except (TypeError, ValueError, OverflowError, pl.exceptions.PolarsError) as error:
            raise refused(value, dtype, what) from error

    return convert


def frozen(value: Any) -> Any:
    """Return a nested value so that it cannot be changed in place, which would not be noticed."""
    if isinstance(value, dict):
        return MappingProxyType({name: frozen(item) for name, item in value.items()})
    return tuple(map(frozen, value)) if isinstance(value, list) else value


def thawed(value: Any) -> Any:
    """Return a nested value as polars takes it."""
    if isinstance(value, Mapping):
        return {name: thawed(item) for name, item in value.items()}
    return [*map(thawed, value)] if isinstance(value, (list, tuple)) else value
