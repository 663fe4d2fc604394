"""Tables of polars, pandas or Arrow: as columns of a log, or row by row as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from millstream.choices import did_you_mean
from millstream.client.json_values import ENCODER
from millstream.errors import ConfigError

if TYPE_CHECKING:
    import polars as pl


def to_arrow(given: Any, what: str) -> pa.Table:
    """Return a table of polars, pandas or Arrow as Arrow's. Of pandas' indexes those with a name are
    columns.

    Raises:
        ConfigError: it is none of these, or has a column that Arrow cannot take.
    """
    if isinstance(given, pa.Table):
        return given
    if isinstance(given, pa.RecordBatch):
        return pa.Table.from_batches([given])
    try:
        if type(given).__module__.partition(".")[0] == "pandas":
            named = given.reset_index() if any(given.index.names) else given
            return pa.Table.from_pandas(named, preserve_index=False)
        if hasattr(given, "__arrow_c_stream__"):
            return pa.table(given)
    except (pa.ArrowInvalid, pa.ArrowTypeError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"{what} cannot be made an Arrow table: {error}") from error
    raise ConfigError(
        f"{what} is a {type(given).__name__}; give a DataFrame of polars or pandas, or an Arrow table"
    )


def rows_to_json(given: Any, key: str | None) -> tuple[pa.Array, pa.Array | None]:
    """Return the rows of a table as JSON objects, and the keys in the column ``key``.

    Raises:
        ConfigError: there is no such column, its values are no keys, or a value cannot be JSON.
    """
    import polars as pl  # noqa: PLC0415 - not for those who send records

    table = _in_microseconds(to_arrow(given, "rows"))
    if len(set(table.column_names)) != table.num_columns or not table.num_columns:
        raise ConfigError(f"rows has the columns {table.column_names}; give each another name")
    for field in table.schema:
        if "decimal256" in str(field.type):  # polars would panic
            raise ConfigError(
                f"rows has {field}, with more digits than 38; cast it, or leave it out"
            )
    try:
        frame = pl.DataFrame(pl.from_arrow(table))
    except (pl.exceptions.PolarsError, TypeError, ValueError) as error:
        raise ConfigError(f"rows cannot be read: {error}") from error
    keys = None if key is None else _keys(frame, key)
    if all(_is_plain(dtype) for dtype in frame.dtypes):
        values = frame.select(value=pl.struct(pl.all()).struct.json_encode())
        return values["value"].to_arrow().cast(pa.binary()), keys
    try:
        rows = frame.rows(named=True)
    except (ValueError, OverflowError) as error:
        raise ConfigError(
            f"rows has a value that Python has not ({error}); times go from the year 1 to 9999"
        ) from error
    return pa.array([_object(row) for row in rows], pa.binary()), keys


def _in_microseconds(table: pa.Table) -> pa.Table:
    """Return a table whose times have microseconds, as Python's have.

    Raises:
        ConfigError: some have nanoseconds.
    """
    schema = pa.schema([field.with_type(_coarser(field.type)) for field in table.schema])
    if schema.equals(table.schema):
        return table
    try:
        return table.cast(schema)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise ConfigError(
            f"rows has times with nanoseconds, and events have microseconds ({error}); round them"
        ) from error


def _coarser(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_timestamp(kind) and kind.unit == "ns":
        found = pa.timestamp("us", kind.tz)
    elif pa.types.is_duration(kind) and kind.unit == "ns":
        found = pa.duration("us")
    elif pa.types.is_time64(kind):
        found = pa.time64("us")
    elif pa.types.is_large_list(kind):
        found = pa.large_list(kind.value_field.with_type(_coarser(kind.value_type)))
    elif pa.types.is_list(kind):
        found = pa.list_(kind.value_field.with_type(_coarser(kind.value_type)))
    elif pa.types.is_struct(kind):
        found = pa.struct([field.with_type(_coarser(field.type)) for field in kind])
    else:
        found = kind
    return found


def _is_plain(dtype: pl.DataType) -> bool:
    """Whether polars writes the type as Python does; it would write a float NaN as null."""
    import polars as pl  # noqa: PLC0415 - as above

    return dtype in (pl.String, pl.Boolean) or (dtype.is_integer() and dtype != pl.Int128)


def _object(row: Mapping[str, Any]) -> bytes:
    try:
        return ENCODER.encode(row).encode()
    except (TypeError, ValueError) as error:
        raise ConfigError(f"the row {row!r:.200} cannot be sent: {error}") from error


def _keys(frame: pl.DataFrame, key: str) -> pa.Array:
    import polars as pl  # noqa: PLC0415 - as above

    if not isinstance(key, str):
        raise ConfigError(f"key is {key!r}; give the name of a column of rows")
    if key not in frame.columns:
        raise ConfigError(
            f"key is {key!r}; rows has the columns {', '.join(frame.columns)}."
            f"{did_you_mean(key, frame.columns)}"
        )
    column = frame[key]
    if column.dtype.is_integer():
        column = column.cast(pl.String)
    if column.dtype not in (pl.String, pl.Binary):
        raise ConfigError(
            f"key is {key!r}, a column of {column.dtype}; give text, bytes or whole numbers"
        )
    return column.to_arrow().cast(pa.binary())
