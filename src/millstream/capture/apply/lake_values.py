"""Captured values as Arrow's, and back: the types that Parquet, Delta, Iceberg, DuckDB and Spark share.

Types that not all of them have are text: times of day, intervals, UUIDs, JSON, and decimals of unknown or too many
digits. A value that its type cannot hold (a date of infinity, a decimal NaN) is refused, with its column: a column may
be kept as text instead.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Collection, Iterator, Sequence
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa

from millstream.capture.apply.applied_table import AppliedTable, Row
from millstream.capture.apply.captured_types import CapturedType, Kind, text_of
from millstream.errors import ConfigError

_Convert = Callable[[Any], Any]
_TYPES: dict[Kind, pa.DataType] = {
    "int16": pa.int32(),  # Iceberg and Delta's tools widen 16 bits
    "int32": pa.int32(),
    "int64": pa.int64(),
    "uint64": pa.decimal128(20, 0),
    "float32": pa.float32(),
    "float64": pa.float64(),
    "boolean": pa.bool_(),
    "bytes": pa.binary(),
    "date": pa.date32(),
    "timestamp": pa.timestamp("us"),
    "timestamptz": pa.timestamp("us", "UTC"),
}


def lake_type(kind: CapturedType) -> pa.DataType:
    """Return the Arrow type of a column."""
    if (
        kind.is_narrow_decimal
        and kind.scale is not None
        and 0 <= kind.scale <= (kind.precision or 0)
    ):
        return pa.decimal128(kind.precision, kind.scale)
    if kind.kind == "array" and kind.element is not None:
        return pa.list_(lake_type(kind.element))
    return _TYPES.get(kind.kind, pa.string())


class LakeColumns:
    """The columns of a table in a lake: its schema, and rows into it and out of it.

    ``as_text`` are the names of columns (``schema.table.column``) that are kept as text.
    """

    def __init__(self, table: AppliedTable, as_text: Collection[str] = ()) -> None:
        self.table = table
        self.kinds = {
            name: CapturedType("text", kind.native)
            if f"{table.collection}.{name}" in as_text
            else kind
            for name, kind in table.columns
        }
        self.schema = pa.schema(
            [
                pa.field(name, lake_type(kind), nullable=name not in table.key)
                for name, kind in self.kinds.items()
            ]
        )

    def key_schema(self) -> pa.Schema:
        """Return the schema of keys alone."""
        return pa.schema([self.schema.field(name) for name in self.table.key])

    def encode(self, rows: Sequence[Row], schema: pa.Schema | None = None) -> pa.Table:
        """Return rows, or keys, as a table.

        Raises:
            ConfigError: a value does not fit its type.
        """
        columns = [
            self._column(field, [row[field.name] for row in rows])
            for field in (schema or self.schema)
        ]
        return pa.table(columns, schema=schema or self.schema)

    def _column(self, field: pa.Field, values: list[Any]) -> pa.Array:
        convert = _encoder(self.kinds[field.name], field.type)
        try:
            converted = [None if value is None else convert(value) for value in values]
            return pa.array(converted, field.type)
        except (ValueError, TypeError, ArithmeticError, pa.ArrowException) as error:
            name = f"{self.table.collection}.{field.name}"
            raise ConfigError(
                f"{name} has a value that {field.type} cannot hold: {error}. Correct it in the source; or keep the column "
                f"as text, from the beginning in a new folder: add ?text={name} to the target's URL."
            ) from error

    def decode(self, batch: pa.RecordBatch | pa.Table) -> Iterator[Row]:
        """Yield rows in captured values. Columns that the batch lacks are null."""
        names = [name for name in self.kinds if name in batch.schema.names]
        missing = dict.fromkeys(name for name in self.kinds if name not in batch.schema.names)
        decoders = [
            (name, _decoder(self.kinds[name], batch.schema.field(name).type)) for name in names
        ]
        columns = [batch.column(name).to_pylist() for name in names]
        for values in zip(*columns, strict=True):
            row = {
                name: None if value is None else decode(value)
                for (name, decode), value in zip(decoders, values, strict=True)
            }
            yield {**missing, **row}


# ── values in ─────────────────────────────────────────────────────────────────────────────────


def _encoder(kind: CapturedType, arrow: pa.DataType) -> _Convert:
    if pa.types.is_string(arrow):
        return text_of
    if pa.types.is_decimal(arrow):
        return Decimal
    if pa.types.is_floating(arrow):
        return float
    if pa.types.is_list(arrow) and kind.element is not None:
        element = _encoder(kind.element, arrow.value_type)
        return lambda value: [None if one is None else element(one) for one in _one_level(value)]
    return _ENCODERS.get(kind.kind, _same)


def _one_level(value: Any) -> list[Any]:
    if not isinstance(value, list) or any(isinstance(one, list) for one in value):
        raise ValueError(f"an array of several dimensions: {json.dumps(value)[:80]}")
    return value


def _same(value: Any) -> Any:
    return value


def _instant(value: str) -> datetime:
    found = datetime.fromisoformat(value)
    return found.astimezone(UTC) if found.tzinfo else found.replace(tzinfo=UTC)


def _local_time(value: str) -> datetime:
    found = datetime.fromisoformat(value)
    if found.tzinfo is not None:
        raise ValueError(f"a time zone in {value!r}")
    return found


_ENCODERS: dict[Kind, _Convert] = {
    "bytes": base64.b64decode,
    "date": date.fromisoformat,
    "timestamp": _local_time,
    "timestamptz": _instant,
}


# ── values out ────────────────────────────────────────────────────────────────────────────────


def _decoder(kind: CapturedType, arrow: pa.DataType) -> _Convert:
    if pa.types.is_list(arrow) or pa.types.is_large_list(arrow):
        element = _decoder(kind.element or kind, arrow.value_type)
        return lambda value: [None if one is None else element(one) for one in value]
    if kind.kind == "json" or pa.types.is_string(arrow) or pa.types.is_large_string(arrow):
        return _same
    if kind.kind == "uint64":
        return int
    return _DECODERS.get(kind.kind, _same)


def _float_out(value: float) -> float | str:
    if value != value:  # noqa: PLR0124 - NaN
        return "NaN"
    if value in (float("inf"), float("-inf")):
        return "Infinity" if value > 0 else "-Infinity"
    return value


def _float32_out(value: float) -> float | str:
    """Return the number with the fewest digits that is the same four bytes, as captures write it."""
    found = _float_out(value)
    return found if isinstance(found, str) else float(str(np.float32(found)))


def _time_out(value: datetime) -> str:
    text = value.replace(tzinfo=None).isoformat()
    return text.rstrip("0") if "." in text else text


_DECODERS: dict[Kind, _Convert] = {
    "bytes": lambda value: base64.b64encode(value).decode(),
    "date": lambda value: value.isoformat(),
    "timestamp": _time_out,
    "timestamptz": lambda value: _time_out(value) + "Z",
    "decimal": lambda value: format(value, "f"),
    "float32": _float32_out,
    "float64": _float_out,
}
