"""The columns of a bulk send: brought to one form, sliced and picked from without copying values."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa

from millstream.errors import ConfigError

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Columns(NamedTuple):
    """Equally long columns of records; arguments of ``split_columns``."""

    timestamps_ms: NDArray[np.int64]
    keys: pa.Array | None
    values: pa.Array

    def slice(self, start: int, length: int) -> Columns:
        """Return ``length`` rows from ``start`` on."""
        keys = None if self.keys is None else self.keys.slice(start, length)
        times = self.timestamps_ms[start : start + length]
        return Columns(times, keys, self.values.slice(start, length))

    def take(self, rows: NDArray[np.int64]) -> Columns:
        """Return these rows, in this order."""
        keys = None if self.keys is None else self.keys.take(pa.array(rows))
        return Columns(self.timestamps_ms[rows], keys, self.values.take(pa.array(rows)))


def as_columns(
    table: pa.Table | pa.RecordBatch | None,
    values: Any,
    keys: Any,
    timestamps_ms: Any,
    clock_ms: Callable[[], int],
) -> Columns:
    """Return the columns given as a table or one by one, checked.

    Raises:
        ConfigError: values are missing, or a column has another type or length than it may.
    """
    if table is not None:
        names = set(table.schema.names)
        if values is not None or keys is not None or timestamps_ms is not None:
            raise ConfigError("a table and single columns were given; give the one or the other")
        if "value" not in names or not names <= {"offset", "timestamp", "key", "value"}:
            raise ConfigError(
                f"the table has the columns {sorted(names)}; it must have value, and may have key, "
                "timestamp and offset (which is not used)"
            )
        values = table["value"]
        keys = table["key"] if "key" in names else None
        timestamps_ms = table["timestamp"] if "timestamp" in names else None
    if values is None:
        raise ConfigError("no values were given; give a table with a value column, or values=")
    payload = _binary("values", values)
    named = None if keys is None else _binary("keys", keys)
    if timestamps_ms is None:
        times = np.full(len(payload), clock_ms(), np.int64)
    else:
        times = _times(timestamps_ms)
    for what, length in (
        ("keys", len(payload if named is None else named)),
        ("timestamps_ms", len(times)),
    ):
        if length != len(payload):
            raise ConfigError(f"{what} has {length} rows, values has {len(payload)}; give as many")
    return Columns(times, named, payload)


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
