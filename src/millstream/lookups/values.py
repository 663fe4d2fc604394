"""Values of JSON and SQL as columns of declared types, read by the rules of a topic's values (docs/types.md)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from decimal import Context, Decimal
from math import isinf
from typing import Any

import polars as pl

from millstream.errors import ConfigError
from millstream.kernels.decode.decode_error import DecodeError
from millstream.kernels.decode.fields import Field, ListOf, Scalar, ScalarKind, Shape, StructOf
from millstream.kernels.decode.row_reader import RowReader

_READER = RowReader()
_EXACT = Context(prec=100)  # the usual one has 28 digits; a column of decimals has up to 38
_FLOAT32_MAX = 3.4028235677973366e38  # what is not below it is rounded to infinity
_KINDS: dict[str, ScalarKind] = {
    **dict.fromkeys(["Int8", "Int16", "Int32", "Int64", "UInt8", "UInt16", "UInt32"], "int"),
    **dict.fromkeys(["Float32", "Float64"], "float"),
    "Boolean": "bool",
    "String": "str",
    "Datetime": "datetime",
    "Date": "date",
    "Time": "time",
    "Duration": "timedelta",
    "Decimal": "decimal",
    "Binary": "bytes",
}


def shape_of(name: str, dtype: pl.DataType, what: str) -> Shape:
    """Return how values of a column are read.

    Raises:
        ConfigError: they are not.
    """
    if isinstance(dtype, pl.List):
        return ListOf(shape_of(name, _made(dtype.inner), what), null=True)
    if isinstance(dtype, pl.Struct):
        return StructOf(
            tuple(field_of(inner.name, _made(inner.dtype), what) for inner in dtype.fields)
        )
    kind = _KINDS.get(type(dtype).__name__)
    if kind is None:
        raise ConfigError(
            f"{what} declares the column {name!r} as {dtype}, which it cannot read. Declare it as "
            "pl.String or pl.Int64, and cast it after the step."
        )
    return Scalar(kind)


def _made(dtype: Any) -> pl.DataType:
    return dtype if isinstance(dtype, pl.DataType) else dtype()


def field_of(name: str, dtype: pl.DataType, what: str, wire: str = "") -> Field:
    """Return a field that may be missing or null; ``wire`` is its name in the object."""
    arrow = pl.Series(dtype=dtype).to_arrow().type
    return Field(name, arrow, required=False, wire=wire, shape=shape_of(name, dtype, what))


def member(field: Field, value: Any) -> Any:
    """Return the plain value of a field of an object.

    Raises:
        DecodeError: it does not fit.
    """
    return _READER.read((field,), value)[field.name]


def column(name: str, dtype: pl.DataType, values: Sequence[Any]) -> pl.Series:
    """Return plain values as a column.

    Raises:
        DecodeError: one does not fit into the type.
    """
    if dtype.is_nested() or isinstance(dtype, (pl.Decimal, pl.Datetime, pl.Float32)):
        values = [_fitted(name, each, dtype) for each in values]
    try:
        return pl.Series(name, values, dtype, strict=True)
    except (TypeError, ValueError, OverflowError, pl.exceptions.PolarsError):
        raise DecodeError(f"column {name!r} has a value that does not fit into {dtype}") from None


def _fitted(name: str, value: Any, dtype: pl.DataType) -> Any:
    """Return a plain value as polars takes it without changing it, or as an error: polars cuts in silence."""
    if value is None:
        return None
    if isinstance(dtype, pl.List):
        inner = _made(dtype.inner)
        return [_fitted(name, each, inner) for each in value]
    if isinstance(dtype, pl.Struct):
        types = {field.name: _made(field.dtype) for field in dtype.fields}
        return {own: _fitted(name, each, types[own]) for own, each in value.items()}
    if isinstance(dtype, pl.Decimal):
        return _scaled(name, value, dtype)
    if isinstance(dtype, pl.Datetime) and dtype.time_zone is None:
        return value.replace(tzinfo=None)
    if isinstance(dtype, pl.Float32) and abs(value) > _FLOAT32_MAX and not isinf(value):
        raise DecodeError(f"column {name!r} has a value that does not fit into {dtype}")
    return value


def _scaled(name: str, value: Decimal, dtype: pl.Decimal) -> Decimal:
    rounded = _EXACT.quantize(value, Decimal(1).scaleb(-dtype.scale))
    if rounded != value:
        raise DecodeError(
            f"column {name!r} has a value with more than {dtype.scale} decimal places"
        )
    return rounded


def at_path(value: Any, path: Sequence[str]) -> Any:
    """Follow names, and positions in lists, into a JSON value; null where there is none.

    Raises:
        DecodeError: a name is given twice, or is to be in what has no names: such a body is not what was declared.
    """
    for step in path:
        if value is None:
            return None
        if isinstance(value, Mapping):
            if step in getattr(value, "names", ()):
                raise DecodeError("is given twice", shown=False).within(step)
            value = value.get(step)
        elif isinstance(value, list) and step.isdecimal():
            value = value[int(step)] if int(step) < len(value) else None
        else:
            raise DecodeError(f"{step!r} is to be in a value that is no object", shown=False)
    return value
