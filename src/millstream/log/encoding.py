"""From rows and Arrow columns to record batches.

Two ways in, one format out: a few records go through plain Python (a batch of one costs a few
microseconds), many go through NumPy and Arrow without a Python object per record. Null keys, null
values (tombstones) and empty ones stay what they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from millstream.errors import RecordTooLargeError
from millstream.log.batch import BATCH_BYTES_MAX, RECORD_BYTES_MAX, EncodedBatch, seal
from millstream.log.varint import Bytes, Int64s, encode_varint, varint_columns

ROWS_BY_HAND_MAX = 24  # measured: above this many records the columns are quicker
_RECORD_OVERHEAD = 32  # varints, attributes and header count of one record, rounded up
_NULL = encode_varint(-1)


class Row(NamedTuple):
    """One record before it has an offset."""

    timestamp_ms: int
    key: bytes | None
    value: bytes | None

    @property
    def size(self) -> int:
        """Bytes it takes at most in a batch."""
        return _RECORD_OVERHEAD + len(self.key or b"") + len(self.value or b"")


def encode_rows(rows: Sequence[Row]) -> EncodedBatch:
    """Return one batch of these records, in this order.

    Raises:
        RecordTooLargeError: a record is larger than 64 MiB; send a reference to it instead.
    """
    if len(rows) > ROWS_BY_HAND_MAX:
        return encode_columns(
            np.array([row.timestamp_ms for row in rows], np.int64),
            pa.array([row.key for row in rows], pa.binary()),
            pa.array([row.value for row in rows], pa.binary()),
        )
    base = rows[0].timestamp_ms
    parts: list[bytes] = []
    for delta, (timestamp_ms, key, value) in enumerate(rows):
        record = b"".join(
            (
                b"\0",
                encode_varint(timestamp_ms - base),
                encode_varint(delta),
                _NULL if key is None else encode_varint(len(key)) + key,
                _NULL if value is None else encode_varint(len(value)),
                value or b"",
                b"\0",
            )
        )
        check_record_size(len(record))
        parts += (encode_varint(len(record)), record)
    latest = base if len(rows) == 1 else max(row.timestamp_ms for row in rows)
    return seal(0, (base, latest), len(rows), b"".join(parts))


def encode_columns(timestamps_ms: Int64s, keys: pa.Array | None, values: pa.Array) -> EncodedBatch:
    """Return one batch of the records in these columns (binary Arrow arrays, equally long).

    Raises:
        RecordTooLargeError: a record is larger than 64 MiB; send a reference to it instead.
    """
    count = len(values)
    if keys is not None and keys.null_count == count:
        keys = None
    key_lengths, value_lengths = _lengths(keys, count), _lengths(values, count)
    time_column = varint_columns(timestamps_ms - timestamps_ms[0])
    delta_column = varint_columns(np.arange(count, dtype=np.int64))
    key_column, value_column = varint_columns(key_lengths), varint_columns(value_lengths)
    lengths = 2 + time_column[1] + delta_column[1] + key_column[1] + value_column[1]
    lengths += np.maximum(key_lengths, 0) + np.maximum(value_lengths, 0)
    check_record_size(int(lengths.max()))
    # The byte that ends a record (no headers) leads the next one: one gather less per record.
    front = [_constant(count), varint_columns(lengths), _constant(count), time_column, delta_column]
    filled = pc.fill_null(values, b"") if values.null_count else values
    if keys is None:
        joined = [_binary([*front, key_column, value_column]), filled]
    else:
        named = pc.fill_null(keys, b"") if keys.null_count else keys
        joined = [_binary([*front, key_column]), named, _binary([value_column]), filled]
    records = pc.binary_join_element_wise(*joined, pa.scalar(b""))
    first, last = np.frombuffer(records.buffers()[1], np.int32)[[0, count]]
    body = memoryview(records.buffers()[2])[int(first) + 1 : int(last)]
    times = (int(timestamps_ms[0]), int(timestamps_ms.max()))
    return seal(0, times, count, b"".join((body, b"\0")))


def split_columns(
    timestamps_ms: Int64s, keys: pa.Array | None, values: pa.Array, *, bytes_max: int
) -> Iterator[EncodedBatch]:
    """Yield these records as batches of about ``bytes_max`` bytes; a larger record goes alone."""
    count = len(values)
    sizes = np.full(count, _RECORD_OVERHEAD, np.int64)
    for column in (keys, values):
        if column is not None:
            sizes += np.maximum(_lengths(column, count), 0)
    ends = np.cumsum(sizes)
    start = 0
    while start < count:
        before = ends[start - 1] if start else 0
        limit = min(bytes_max, BATCH_BYTES_MAX)
        stop = max(start + 1, int(np.searchsorted(ends, before + limit, side="right")))
        length = stop - start
        part = None if keys is None else keys.slice(start, length)
        yield encode_columns(timestamps_ms[start:stop], part, values.slice(start, length))
        start = stop


def check_record_size(size: int) -> None:
    """Refuse a record that no batch may hold.

    Raises:
        RecordTooLargeError: it is larger than 64 MiB; send a reference to it instead.
    """
    if size > RECORD_BYTES_MAX:
        raise RecordTooLargeError(
            f"a record of {size:,} bytes is larger than the {RECORD_BYTES_MAX:,} allowed; "
            "store it elsewhere and send a reference to it"
        )


def _lengths(column: pa.Array | None, count: int) -> Int64s:
    """Return the length of every value of a binary column; -1 for null."""
    if column is None:
        return np.full(count, -1, np.int64)
    offsets = np.frombuffer(column.buffers()[1], np.int32)
    lengths = np.diff(offsets[column.offset : column.offset + count + 1]).astype(np.int64)
    if column.null_count:
        lengths[np.asarray(column.is_null())] = -1
    return lengths


def _constant(count: int) -> tuple[Bytes, Int64s]:
    return np.zeros((count, 1), np.uint8), np.ones(count, np.int64)


def _binary(columns: list[tuple[Bytes, Int64s]]) -> pa.Array:
    """Return, row by row, the used bytes of several varint columns put together."""
    count = len(columns[0][1])
    matrix = np.concatenate([cells for cells, _ in columns], axis=1)
    lengths = np.sum([used for _, used in columns], axis=0)
    if int(lengths.sum()) != matrix.size:
        used = np.concatenate(
            [np.arange(cells.shape[1]) < used[:, None] for cells, used in columns], axis=1
        )
        matrix = matrix[used]
    offsets = np.zeros(count + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    flat = pa.py_buffer(np.ascontiguousarray(matrix))
    return pa.Array.from_buffers(pa.binary(), count, [None, pa.py_buffer(offsets), flat])
