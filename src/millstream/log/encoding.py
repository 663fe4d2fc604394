"""From rows and Arrow columns to record batches.

Two ways in, one format out: a few records go through plain Python (a batch of one costs a few
microseconds), many go through NumPy and Arrow without a Python object per record. Null and empty keys and
values stay distinct: a null value is a tombstone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import repeat
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from millstream.errors import RecordTooLargeError
from millstream.log.batch import BATCH_BYTES_MAX, RECORD_BYTES_MAX, EncodedBatch, finish
from millstream.log.varint import (
    WORD_BYTES,
    WORD_NUMBER_MAX,
    Int64s,
    Uint64s,
    encode_varint,
    varint_words,
)
from millstream.record import Headers

if TYPE_CHECKING:
    from numpy.typing import NDArray

RECORDS_BY_HAND_MAX = 400  # measured: above this many records the columns are quicker
_RECORD_OVERHEAD = 32  # varints, attributes and header count of one record, rounded up
_HEADER_OVERHEAD = 10  # the two lengths of one header, rounded up
_NULL = encode_varint(-1)


class SimpleRecord(NamedTuple):
    """One record before it has an offset."""

    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    headers: Headers = ()

    @property
    def size(self) -> int:
        """Bytes it takes at most in a batch."""
        size = _RECORD_OVERHEAD + len(self.key or b"") + len(self.value or b"")
        return size + sum(
            _HEADER_OVERHEAD + len(key.encode()) + len(value or b"") for key, value in self.headers
        )


def encode_records(rows: Sequence[SimpleRecord]) -> EncodedBatch:
    """Return one batch of these records, in this order.

    Raises:
        RecordTooLargeError: a record is larger than 64 MiB; send a reference to it instead.
    """
    if len(rows) > RECORDS_BY_HAND_MAX:
        timestamps_ms, keys, values, headers = zip(*rows, strict=True)
        if not any(headers):
            return encode_columns(
                np.array(timestamps_ms, np.int64),
                pa.array(keys, pa.binary()),
                pa.array(values, pa.binary()),
            )
    return _encode_by_hand(rows)


def _encode_by_hand(rows: Sequence[SimpleRecord]) -> EncodedBatch:
    base = rows[0].timestamp_ms
    parts: list[bytes] = []
    for delta, (timestamp_ms, key, value, pairs) in enumerate(rows):
        record = b"".join(
            (
                b"\0",
                encode_varint(timestamp_ms - base),
                encode_varint(delta),
                _NULL if key is None else encode_varint(len(key)) + key,
                _NULL if value is None else encode_varint(len(value)),
                value or b"",
                _encode_headers(pairs) if pairs else b"\0",
            )
        )
        check_record_size(len(record))
        parts += (encode_varint(len(record)), record)
    latest = base if len(rows) == 1 else max(row.timestamp_ms for row in rows)
    return finish(
        b"".join(parts),
        records=len(rows),
        timestamps_ms=(base, latest),
        unkeyed=any(row.key is None for row in rows),
    )


def _encode_headers(headers: Headers) -> bytes:
    parts = [encode_varint(len(headers))]
    for key, value in headers:
        name = key.encode()
        parts += (encode_varint(len(name)), name)
        parts += (_NULL,) if value is None else (encode_varint(len(value)), value)
    return b"".join(parts)


def encode_columns(
    timestamps_ms: Int64s, keys: pa.Array | None, values: pa.Array, headers: pa.Array | None = None
) -> EncodedBatch:
    """Return one batch of the records in these columns (binary Arrow arrays, equally long).

    Args:
        headers: Lists of key and value, as ``decoding`` returns them; None for no headers.

    Raises:
        RecordTooLargeError: a record is larger than 64 MiB; send a reference to it instead.
    """
    count = len(values)
    span = (int(timestamps_ms[0]), int(timestamps_ms.max()))
    wide = span[1] - int(timestamps_ms.min()) >= WORD_NUMBER_MAX
    if wide or (headers is not None and len(headers.flatten())):
        return _encode_by_hand(_rows(timestamps_ms, keys, values, headers))
    if keys is not None and keys.null_count == count:
        keys = None
    key_lengths, value_lengths = _lengths(keys, count), _lengths(values, count)
    times = varint_words(timestamps_ms - timestamps_ms[0])
    deltas = varint_words(np.arange(count, dtype=np.int64))
    key_sizes, value_sizes = varint_words(key_lengths), varint_words(value_lengths)
    lengths = 2 + times[1] + deltas[1] + key_sizes[1] + value_sizes[1]
    lengths += np.maximum(key_lengths, 0) + np.maximum(value_lengths, 0)
    check_record_size(int(lengths.max()))
    # The byte that ends a record (no headers) leads the next one: one gather less per record. The
    # last one leads a row of nothing else.
    words, widths = varint_words(lengths)
    front = [(words << np.uint64(8), widths + 2), times, deltas]
    if keys is None:
        joined = [_binary([*front, key_sizes, value_sizes], b"\0"), _with_row(values)]
    else:
        joined = [
            _binary([*front, key_sizes], b"\0"),
            _with_row(keys),
            _binary([value_sizes], b""),
            _with_row(values),
        ]
    records = pc.binary_join_element_wise(*joined, pa.scalar(b""))
    first, last = np.frombuffer(records.buffers()[1], np.int32)[[0, count + 1]]
    body = records.buffers()[2].slice(int(first) + 1, int(last - first) - 1)
    unkeyed = keys is None or keys.null_count > 0
    return finish(body, records=count, timestamps_ms=span, unkeyed=unkeyed)


def split_columns(
    timestamps_ms: Int64s,
    keys: pa.Array | None,
    values: pa.Array,
    headers: pa.Array | None = None,
    *,
    bytes_max: int,
) -> Iterator[EncodedBatch]:
    """Yield these records as batches of about ``bytes_max`` bytes; a larger record goes alone."""
    count = len(values)
    if headers is not None and len(headers.flatten()):
        rows = _rows(timestamps_ms, keys, values, headers)
        sizes = np.array([row.size for row in rows], np.int64)
        for start, stop in _cuts(sizes, bytes_max):
            yield encode_records(rows[start:stop])
        return
    sizes = np.full(count, _RECORD_OVERHEAD, np.int64)
    for column in (keys, values):
        if column is not None:
            sizes += np.maximum(_lengths(column, count), 0)
    for start, stop in _cuts(sizes, bytes_max):
        part = None if keys is None else keys[start:stop]
        yield encode_columns(timestamps_ms[start:stop], part, values[start:stop])


def _cuts(sizes: Int64s, bytes_max: int) -> Iterator[tuple[int, int]]:
    """Yield [start, stop) of batches of records of these sizes."""
    ends = np.cumsum(sizes)
    start, limit = 0, min(bytes_max, BATCH_BYTES_MAX)
    while start < len(sizes):
        before = ends[start - 1] if start else 0
        stop = max(start + 1, int(np.searchsorted(ends, before + limit, side="right")))
        yield start, stop
        start = stop


def _rows(
    timestamps_ms: Int64s, keys: pa.Array | None, values: pa.Array, headers: pa.Array | None
) -> list[SimpleRecord]:
    pairs = (
        tuple((header["key"], header["value"]) for header in of_record or ())
        for of_record in (repeat(()) if headers is None else headers.to_pylist())
    )
    named = repeat(None) if keys is None else keys.to_pylist()
    columns = (timestamps_ms.tolist(), named, values.to_pylist(), pairs)
    return [SimpleRecord(*row) for row in zip(*columns, strict=False)]


def check_record_size(size: int) -> None:
    """Reject a record that no batch can hold.

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


def _with_row(column: pa.Array) -> pa.Array:
    """Return the column with its nulls and one more row empty, without copying its bytes."""
    filled = pc.fill_null(column, b"") if column.null_count else column
    _, places, data = filled.buffers()
    offsets = np.frombuffer(places, np.int32)[filled.offset : filled.offset + len(filled) + 1]
    return _binary_array(np.append(offsets, offsets[-1]), data or pa.py_buffer(b""))


def _binary_array(offsets: NDArray[np.int32], data: pa.Buffer) -> pa.Array:
    return pa.Array.from_buffers(pa.binary(), len(offsets) - 1, [None, pa.py_buffer(offsets), data])


def _binary(columns: list[tuple[Uint64s, Int64s]], last: bytes) -> pa.Array:
    """Return, row by row, the bytes of several columns of short words put together; then ``last``.

    Every word is written whole, in order, at its start; the next one overwrites what lies behind its end.
    """
    columns = _merged(columns)
    words = np.stack([words for words, _ in columns], axis=1).ravel()
    widths = np.stack([widths for _, widths in columns], axis=1).ravel()
    ends = np.cumsum(widths)
    size = int(ends[-1])
    flat = np.empty(size + WORD_BYTES, np.uint8)
    np.ndarray(size + 1, "<u8", flat, strides=(1,))[ends - widths] = words
    flat[size : size + len(last)] = list(last)
    rows = ends[len(columns) - 1 :: len(columns)]
    offsets = np.concatenate([[0], rows, [size + len(last)]]).astype(np.int32)
    return _binary_array(offsets, pa.py_buffer(flat))


def _merged(columns: list[tuple[Uint64s, Int64s]]) -> list[tuple[Uint64s, Int64s]]:
    """Return the same bytes in as few columns as fit into words."""
    merged = [columns[0]]
    widest = int(columns[0][1].max())
    for words, widths in columns[1:]:
        width = int(widths.max())
        widest += width
        if widest <= WORD_BYTES:
            before, used = merged[-1]
            merged[-1] = before | words << (used << 3).view(np.uint64), used + widths
        else:
            merged.append((words, widths))
            widest = width
    return merged
