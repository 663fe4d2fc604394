"""The columns of a bulk send: converted to one form, sliced and taken without copying values."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import pyarrow as pa

from millstream.client.tables import rows_to_json, to_arrow
from millstream.errors import ConfigError
from millstream.log.decoding import ALL_COLUMNS, SCHEMA

if TYPE_CHECKING:
    from numpy.typing import NDArray


TableInput: TypeAlias = Any
"""A table of polars, pandas or Arrow. None of them is imported for its type."""


class RecordColumns(NamedTuple):
    """Equally long columns of records; arguments of ``split_columns``."""

    timestamps_ms: NDArray[np.int64]
    keys: pa.Array | None
    values: pa.Array
    headers: pa.Array | None = None

    def slice(self, start: int, length: int) -> RecordColumns:
        """Return ``length`` rows from ``start`` on."""
        times = self.timestamps_ms[start : start + length]
        keys, headers = (
            None if column is None else column.slice(start, length)
            for column in (self.keys, self.headers)
        )
        return RecordColumns(times, keys, self.values.slice(start, length), headers)

    def take(self, rows: NDArray[np.int64]) -> RecordColumns:
        """Return these rows, in this order."""
        places = pa.array(rows)
        keys, headers = (
            None if column is None else column.take(places) for column in (self.keys, self.headers)
        )
        return RecordColumns(self.timestamps_ms[rows], keys, self.values.take(places), headers)


def as_columns(
    table: TableInput | None,
    *,
    rows: TableInput | None = None,
    key: str | None = None,
    values: Any,
    keys: Any,
    timestamps_ms: Any,
    headers: Any,
    clock_ms: Callable[[], int],
) -> RecordColumns:
    """Return the columns given as a table or one by one, checked.

    Raises:
        ConfigError: values are missing, or a column has another type or length than it may.
    """
    singly = any(column is not None for column in (values, keys, timestamps_ms, headers))
    if (table is not None) + (rows is not None) + singly > 1:
        raise ConfigError("of a table, rows and single columns two were given; give one of them")
    if key is not None and rows is None:
        raise ConfigError(f"key is {key!r}, and no rows were given; give rows=, or keys=")
    if rows is not None:
        values, keys = rows_to_json(rows, key)
    if table is not None:
        values, keys, timestamps_ms, headers = _of_table(to_arrow(table, "the table"))
    if values is None:
        raise ConfigError(
            "no values were given; give a table with a value column, values=, or rows="
        )
    payload = _binary("values", values)
    count = len(payload)
    named = None if keys is None else _binary("keys", keys)
    extra = None if headers is None else _headers(headers)
    times = np.full(count, clock_ms(), np.int64) if timestamps_ms is None else _times(timestamps_ms)
    for what, column in (("keys", named), ("timestamps_ms", times), ("headers", extra)):
        if column is not None and len(column) != count:
            raise ConfigError(f"{what} has {len(column)} rows, values has {count}; give as many")
    return RecordColumns(times, named, payload, extra)


def _of_table(table: pa.Table) -> list[Any]:
    names = set(table.schema.names)
    if "value" not in names or not names <= set(ALL_COLUMNS):
        raise ConfigError(
            f"the table has the columns {sorted(names)}; it must have value, and may have key, "
            "timestamp, headers and offset (which is not used). To send each row as a JSON object, "
            "give it as rows="
        )
    columns = ("value", "key", "timestamp", "headers")
    return [table[name] if name in names else None for name in columns]


def _array(what: str, column: Any) -> pa.Array:
    if isinstance(column, pa.ChunkedArray):
        return column.combine_chunks()
    if isinstance(column, pa.Array):
        return column
    try:
        return pa.array(column)
    except (pa.ArrowInvalid, pa.ArrowTypeError, TypeError) as error:
        raise ConfigError(f"{what} cannot be made an Arrow column: {error}") from error


def _binary(what: str, column: Any) -> pa.Array:
    array = _array(what, column)
    kind = array.type
    if pa.types.is_null(kind):
        return pa.nulls(len(array), pa.binary())
    if not (
        pa.types.is_binary(kind)
        or pa.types.is_string(kind)
        or pa.types.is_large_binary(kind)
        or pa.types.is_large_string(kind)
        or pa.types.is_binary_view(kind)
        or pa.types.is_string_view(kind)
    ):
        raise ConfigError(f"{what} is a column of {kind}; give binary or string")
    try:
        array = array.cast(pa.binary())
    except pa.ArrowInvalid as error:
        raise ConfigError(f"{what} holds more than 2 GiB: {error}; send it in parts") from error
    if isinstance(array, pa.ChunkedArray):
        array = array.combine_chunks()
    return array


def _times(column: Any) -> NDArray[np.int64]:
    array = _array("timestamps_ms", column)
    if pa.types.is_timestamp(array.type):
        array = array.cast(pa.timestamp("ms", array.type.tz), safe=False).view(pa.int64())
    if not pa.types.is_integer(array.type) or array.null_count:
        raise ConfigError(
            f"timestamps_ms is a column of {array.type} with {array.null_count} nulls; give whole "
            "milliseconds or Arrow timestamps, without nulls"
        )
    return np.asarray(array.cast(pa.int64()))


def _headers(column: Any) -> pa.Array:
    array = _array("headers", column)
    kind = SCHEMA.field("headers").type
    try:
        return array.cast(kind)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise ConfigError(
            f"headers is a column of {array.type}; give lists of structs with key (text) and value "
            "(binary), as a read returns them"
        ) from error
