"""The polars types of columns: one table decides which are allowed, and where.

A type that a place does not support is refused where the pipeline is declared. Two values are one
key where they are equal: NaN is equal to NaN, -0.0 to 0.0, null to null; text is compared byte by
byte, so two spellings of one letter in Unicode are two keys, and the empty text is a key like any
other.
"""

from __future__ import annotations

from dataclasses import dataclass

import polars as pl

from millstream.errors import ConfigError


@dataclass(frozen=True)
class ColumnType:
    """What columns of one type may be.

    ``column``: rows of a stream may have them. ``key``: they may be keys (of windows, ids, budgets,
    views, topics, folders of datasets), and be compared in aggregates. ``kind`` is how views keep
    them; None: not at all. ``instead`` says what to do where the type is refused.
    """

    column: bool = True
    key: bool = True
    kind: str | None = None
    instead: str = ""


_WHOLE = ColumnType(kind="int")
_FLOAT = ColumnType(kind="float")
_NO_WIDE = ColumnType(column=False, key=False, instead="Cast it to pl.Int64 or pl.Decimal(38, 0)")
_NO_CODES = ColumnType(column=False, key=False, instead="Cast it to pl.String")
_NESTED = ColumnType(
    key=False, kind="json", instead="Make a plain column of it first, with with_columns"
)

TYPES: dict[str, ColumnType] = {
    "Boolean": ColumnType(kind="bool"),
    **dict.fromkeys(["Int8", "Int16", "Int32", "Int64", "UInt8", "UInt16", "UInt32"], _WHOLE),
    "UInt64": ColumnType(instead="Cast it to pl.Int64, or to pl.Decimal(20, 0) for 2^63 and more"),
    **dict.fromkeys(["Int128", "UInt128"], _NO_WIDE),
    "Float16": ColumnType(column=False, key=False, instead="Cast it to pl.Float32"),
    **dict.fromkeys(["Float32", "Float64"], _FLOAT),
    "Decimal": ColumnType(kind="decimal"),
    "String": ColumnType(kind="str"),
    **dict.fromkeys(["Categorical", "Enum"], _NO_CODES),
    "Binary": ColumnType(kind="bytes"),
    "Date": ColumnType(kind="date"),
    "Time": ColumnType(instead="Cast it to pl.String or to pl.Duration"),
    "Datetime": ColumnType(kind="datetime"),
    "Duration": ColumnType(kind="duration"),
    **dict.fromkeys(["List", "Array", "Struct"], _NESTED),
    "Null": ColumnType(key=False, instead="Cast it to the type that its values will have"),
}
"""By the name of the type; what is not here is refused everywhere."""

_UNKNOWN = ColumnType(
    column=False, key=False, instead="Cast it to a plain type, a list or a struct"
)
_TOO_FINE = ColumnType(instead='Say .dt.cast_time_unit("us"): views keep microseconds')


def column_type(dtype: pl.DataType) -> ColumnType:
    """Return what columns of a type may be; of a nested one, as far as what it holds lets them."""
    within = [column_type(inner) for inner in _inner(dtype)]
    found = TYPES.get(type(dtype).__name__, _UNKNOWN)
    if isinstance(dtype, pl.Datetime | pl.Duration) and dtype.time_unit == "ns":
        found = _TOO_FINE
    return next((each for each in within if not each.column), found)


def _inner(dtype: pl.DataType) -> list[pl.DataType]:
    if isinstance(dtype, pl.Struct):
        types = [field.dtype for field in dtype.fields]
    else:
        types = [dtype.inner] if isinstance(dtype, pl.List | pl.Array) else []
    return [each if isinstance(each, pl.DataType) else each() for each in types]


def check_column(name: str, dtype: pl.DataType) -> None:
    """Make sure that rows of a stream may have a column.

    Raises:
        ConfigError: its values are not kept the same in every process, or cannot be sent at all.
    """
    rule = column_type(dtype)
    if not rule.column:
        raise ConfigError(
            f"The column {name!r} is a {dtype}, which rows of a stream cannot hold. {rule.instead}."
        )


def check_key(name: str, dtype: pl.DataType, what: str) -> None:
    """Make sure that a column may be a key; ``what`` says of what."""
    rule = column_type(dtype)
    if not rule.key:
        raise ConfigError(
            f"{what} names {name!r}, a {dtype}, which cannot be a key. {rule.instead}."
        )


def one_zero(value: pl.Expr, dtype: pl.DataType) -> pl.Expr:
    """Make -0.0 into 0.0, which are equal, so that it does not matter which came first."""
    if not dtype.is_float():
        return value
    # Adding 0, which would do it, polars leaves out.
    return pl.when(value.ne_missing(0)).then(value).otherwise(pl.lit(0, dtype))


def of_one_zero(column: pl.Series) -> pl.Series:
    """Return a column in which -0.0 is 0.0."""
    return column.set(column == 0, 0.0) if column.dtype.is_float() else column


def view_kind(dtype: pl.DataType) -> str:
    """Return the kind in which views keep values of a type.

    Raises:
        ConfigError: they do not.
    """
    rule = column_type(dtype)
    if rule.kind is None:
        raise ConfigError(f"A view cannot keep a column of the type {dtype}. {rule.instead}.")
    if isinstance(dtype, pl.Decimal):
        return f"decimal({dtype.precision or 38},{dtype.scale})"
    return rule.kind
