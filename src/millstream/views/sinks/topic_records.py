"""From rows to the records of a topic: keys, values and timestamps, by column.

A value is a JSON object with the row's columns. What JSON lacks becomes text: datetimes as RFC 3339
in UTC, dates as ``2026-01-31``, decimals with all their digits, durations as ISO 8601 (``PT1.5S``),
bytes as base64. A number that is not finite becomes null. Or one column of text or bytes is the
value, as it is.

A retraction has ``_diff`` -1 beside its columns (as a header where a column is the value). In a compacted
topic, which keeps the last record of a key, it is a tombstone instead.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import polars as pl
import pyarrow as pa

from millstream.kernels.column_types import of_one_zero
from millstream.kernels.frames import DIFF, SPLIT, TIME
from millstream.kernels.plan import TopicSinkSpec
from millstream.views.retractions import DIFF_COLUMN, split_upserts_and_deletes

_SLICE_ROWS = 50_000


@dataclass(frozen=True)
class TopicRecords:
    """Columns of records, as ``FolderProducer.send_many`` takes them; null values are tombstones."""

    values: pa.Array
    keys: pa.Array | None
    timestamps_ms: pa.Array
    headers: pa.Array | None = None


def records_in_order(
    rows: pl.DataFrame, spec: TopicSinkSpec, *, compacted: bool, replaces: bool
) -> Iterator[TopicRecords]:
    """Yield the records of a batch's rows in the order in which a topic gets them; of many, a slice at a time."""
    if SPLIT not in rows.columns and TIME in rows.columns:
        # Rows of a source are in the log's order; those of an operator are in the order of buckets.
        rows = rows.sort(TIME, maintain_order=True)
    # Of a compacted topic, the batch is consolidated as a whole.
    for some in [rows] if compacted else rows.iter_slices(_SLICE_ROWS):
        yield from to_records(some, spec, compacted=compacted, replaces=replaces)


def record_keys(rows: pl.DataFrame, spec: TopicSinkSpec) -> pa.Array | None:
    """Return the keys of the records that rows become; None if records have none."""
    return None if spec.key is None else _keys(rows, spec.key)


def to_records(
    rows: pl.DataFrame, spec: TopicSinkSpec, *, compacted: bool, replaces: bool = False
) -> list[TopicRecords]:
    """Return the records that a batch's rows become, to be written in this order."""
    if TIME not in rows.columns:
        rows = rows.with_columns(pl.lit(time.time_ns() // 1000).alias(TIME))
    if not compacted or spec.key is None:
        return [_records(rows, spec)] if rows.height else []
    kept, gone = split_upserts_and_deletes(rows, (spec.key,), replaces=replaces)
    out = []
    if gone is not None and gone.height:
        last_ms = int(rows[TIME].sort()[-1]) // 1000
        times = pa.array([last_ms] * gone.height, pa.int64())
        out.append(TopicRecords(pa.nulls(gone.height, pa.binary()), _keys(gone, spec.key), times))
    return [*out, _records(kept, spec)] if kept.height else out


def _records(rows: pl.DataFrame, spec: TopicSinkSpec) -> TopicRecords:
    keys = record_keys(rows, spec)
    times = rows[TIME] // 1000
    if isinstance(spec.value, str):
        headers = _diff_headers(rows[DIFF]) if DIFF in rows.columns else None
        return TopicRecords(_bytes(rows[spec.value]), keys, times.to_arrow(), headers)
    columns = {name: to_json_types(rows[name]) for name in spec.value}
    if DIFF in rows.columns:
        columns[DIFF_COLUMN] = rows[DIFF].cast(pl.Int8)
    objects = pl.DataFrame(columns).to_struct("value").struct.json_encode()
    return TopicRecords(_bytes(objects), keys, times.to_arrow())


def _keys(rows: pl.DataFrame, key: str) -> pa.Array:
    column = of_one_zero(rows[key])  # one key has one spelling
    return _bytes(column if column.dtype == pl.Binary else to_json_types(column).cast(pl.String))


def _bytes(column: pl.Series) -> pa.Array:
    return column.cast(pl.Binary).to_arrow().cast(pa.large_binary())


def _diff_headers(diffs: pl.Series) -> pa.Array:
    return pa.array([[{"key": DIFF_COLUMN, "value": b"%d" % diff}] for diff in diffs])


def to_json_types(column: pl.Series) -> pl.Series:
    """Return a column with what JSON lacks turned into text, within lists and structs too."""
    # A number for the name meanwhile: polars takes a name such as "^a.*$" for a pattern.
    plain = column.alias("0").to_frame().select(_plain(pl.col("0"), column.dtype))
    return plain.to_series().alias(column.name)


def _plain(value: pl.Expr, dtype: pl.DataType) -> pl.Expr:
    if isinstance(dtype, pl.Array):
        value, dtype = value.arr.to_list(), pl.List(_type(dtype.inner))
    if isinstance(dtype, pl.List):
        return value.list.eval(_plain(pl.element(), _type(dtype.inner)))
    if isinstance(dtype, pl.Struct):
        numbers = [str(number) for number in range(len(dtype.fields))]
        numbered = value.struct.rename_fields(numbers)
        fields = [
            _plain(numbered.struct.field(number), _type(field.dtype)).alias(field.name)
            for number, field in zip(numbers, dtype.fields, strict=True)
        ]
        return pl.when(value.is_null()).then(None).otherwise(pl.struct(fields))
    has_json = dtype in (pl.Boolean, pl.Null) or (dtype.is_numeric() and not dtype.is_decimal())
    return value if has_json else _text(value, dtype)


def _text(value: pl.Expr, dtype: pl.DataType) -> pl.Expr:
    if isinstance(dtype, pl.Datetime):
        if dtype.time_zone not in (None, "UTC"):
            value = value.dt.convert_time_zone("UTC")
        return value.dt.strftime("%Y-%m-%dT%H:%M:%S%.fZ")
    if isinstance(dtype, pl.Duration):
        return value.dt.to_string("iso")
    if isinstance(dtype, pl.Binary):
        return value.bin.encode("base64")
    return value.cast(pl.String)


def _type(dtype: object) -> pl.DataType:
    assert isinstance(dtype, pl.DataType), "a frame's types are instances"
    return dtype
