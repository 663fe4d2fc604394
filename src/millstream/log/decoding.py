"""From record batches to Arrow columns, many batches at once.

Compressed batches are decompressed first. Then the records of all batches are found
(``boundaries``), every field is read as a column and every key and value gathered in one copy. Only the
requested columns are decoded: offsets alone come from the headers of the batches. A batch with a wrong count
or length gives CorruptBatchError; every position is checked against the record that it belongs to.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pyarrow as pa

from millstream.choices import choose
from millstream.errors import ConfigError, CorruptBatchError
from millstream.log.batch import (
    COMPRESSION_MASK,
    CONTROL,
    HEADER_BYTES,
    LOG_APPEND_TIME,
    RECORD_BYTES_MIN,
    BatchHeader,
    damaged,
)
from millstream.log.boundaries import LENGTH_BYTES_MAX, BatchBodies, find_records
from millstream.log.compression import decompress
from millstream.log.markers import NO_TIMESTAMP_MS
from millstream.log.varint import Bytes, Int64s, read_varint, read_varints

if TYPE_CHECKING:
    from numpy.typing import NDArray

COLUMNS = ("offset", "timestamp", "key", "value")
ALL_COLUMNS = (*COLUMNS, "headers")
_HEADER_FIELDS = (pa.field("key", pa.string(), nullable=False), pa.field("value", pa.binary()))
SCHEMA = pa.schema(
    [
        pa.field("offset", pa.int64(), nullable=False),
        pa.field("timestamp", pa.timestamp("ms", "UTC"), nullable=False),
        pa.field("key", pa.binary()),
        pa.field("value", pa.binary()),
        pa.field("headers", pa.list_(pa.struct(_HEADER_FIELDS)), nullable=False),
    ]
)
_FEW_RECORDS = 40  # up to this many it is faster to check them one by one
_TIMES = 1 << 63  # a timestamp has 64 bits, and a batch adds two such numbers
DECODED_BYTES_MAX = 64 * 1024 * 1024  # decompressed batches are decoded together up to this


class Block(NamedTuple):
    """Whole record batches back to back, as read from a file; ``batches`` says where each is."""

    data: bytes
    batches: Sequence[tuple[int, BatchHeader]]
    path: str
    position: int


class _Decompressed(NamedTuple):
    """Batches without compression, and where each came from; body i is at [starts[i], stops[i])."""

    data: bytes
    starts: list[int]
    stops: list[int]
    batches: Sequence[tuple[int, BatchHeader]]


def select_schema(columns: Sequence[str]) -> pa.Schema:
    """Return the schema of these columns, in this order.

    Raises:
        ConfigError: a column is not one of offset, timestamp, key, value, headers.
    """
    for name in columns:
        choose("a column of a log", name, ALL_COLUMNS)
    return pa.schema([SCHEMA.field(name) for name in columns])


def decode(block: Block, start: int, end: int, columns: Sequence[str] = COLUMNS) -> pa.RecordBatch:
    """Return the records of ``block`` with offsets in [start, end), in offset order.

    Raises:
        CorruptBatchError: a count or a length in a batch cannot be, or its records cannot be
            decompressed. Not retriable.
        ConfigError: a column is unknown, or the keys or values take more than 2 GiB when
            decompressed; read fewer bytes at a time, or use decode_parts.
    """
    parts = list(decode_parts(block, start, end, columns))
    if len(parts) > 1:
        parts = pa.Table.from_batches(parts).combine_chunks().to_batches()
    if len(parts) > 1:
        raise ConfigError(
            f"the batches at byte {block.position} of {block.path} take more than 2 GiB when "
            "decompressed, which is too much for one table; read fewer bytes at a time"
        )
    if parts:
        return parts[0]
    schema = select_schema(columns)
    return pa.RecordBatch.from_arrays([pa.nulls(0, field.type) for field in schema], schema=schema)


def decode_parts(
    block: Block, start: int, end: int, columns: Sequence[str] = COLUMNS
) -> Iterator[pa.RecordBatch]:
    """Yield the records of ``block`` with offsets in [start, end), in offset order.

    All at once if no batch is compressed, else of about PART_BYTES_MAX decompressed bytes at a time
    (one batch, if that alone is larger). Nothing for a block without records.

    Raises:
        CorruptBatchError: a count or a length in a batch cannot be, or its records cannot be
            decompressed. Not retriable.
        ConfigError: a column is unknown.
    """
    schema = select_schema(columns)
    for part in _parts(block):
        records = _Records(block, part)
        first, last = part.batches[0][1], part.batches[-1][1]
        reaches_out = first.base_offset < start or last.next_offset > end
        if reaches_out and not records.narrow(start, end):
            continue
        arrays = records.columns(columns)
        batch = pa.RecordBatch.from_arrays([arrays[name] for name in columns], schema=schema)
        if reaches_out and not records.dense:
            offsets = arrays.get("offset")
            if offsets is None:
                offsets = records.columns(("offset",))["offset"]
            # Arrow's own way to an array of NumPy imports pandas, which takes half a second.
            numbers = np.frombuffer(offsets.buffers()[1], np.int64, len(offsets))
            low, high = np.searchsorted(numbers, [start, end])
            batch = batch.slice(int(low), int(high - low))
        yield batch


def count_by_headers(block: Block, start: int, end: int) -> int | None:
    """Return how many records with offsets in [start, end) there are by the headers of the batches.

    None if they do not say: a batch reaches beyond the range, and compaction has removed some of its records.
    """
    said = 0
    for _, header in block.batches:
        if header.attributes & CONTROL or not header.record_count:
            continue
        low, high = header.base_offset, header.next_offset
        if start <= low and high <= end:
            said += header.record_count
        elif header.record_count == high - low:
            said += max(0, min(high, end) - max(low, start))
        else:
            return None
    return said


class CheckedRecords(NamedTuple):
    """The result of checking every record."""

    unkeyed: bool
    max_timestamp_ms: int


def check_records(block: Block, *, plain_bytes_max: int | None = None) -> CheckedRecords:
    """Check every record of ``block`` against its batch, whichever client encoded it.

    A batch that passes can be decoded without an error, and its n-th record has the n-th offset.

    Args:
        plain_bytes_max: How many bytes one batch may be when decompressed.

    Raises:
        RecordTooLargeError: a batch is more than that; send fewer records in one.
        CorruptBatchError: a count or a length in a batch cannot be, or its records cannot be
            decompressed. Not retriable.
    """
    facts = []
    for part in _parts(block, plain_bytes_max):
        records = _Records(block, part)
        few = sum(header.record_count for _, header in part.batches) <= _FEW_RECORDS
        facts.append(records.check_one_by_one() if few else records.check())
    return CheckedRecords(
        any(one.unkeyed for one in facts),
        max((one.max_timestamp_ms for one in facts), default=NO_TIMESTAMP_MS),
    )


def _parts(block: Block, plain_bytes_max: int | None = None) -> Iterator[_Decompressed]:
    """Yield the batches that have records for a reader, decompressed."""
    batches = [
        (at, header)
        for at, header in block.batches
        if header.record_count and not header.attributes & CONTROL
    ]
    if not batches:
        return
    if not any(header.attributes & COMPRESSION_MASK for _, header in batches):
        starts = [at + HEADER_BYTES for at, _ in batches]
        yield _Decompressed(
            block.data, starts, [at + header.size for at, header in batches], batches
        )
        return
    bodies: list[bytes] = []
    size = 0
    for number, (at, header) in enumerate(batches):
        body = _body(block, at, header, plain_bytes_max)
        if bodies and size + len(body) > DECODED_BYTES_MAX:
            yield _joined(bodies, batches[number - len(bodies) : number])
            bodies, size = [], 0
        bodies.append(body)
        size += len(body)
    yield _joined(bodies, batches[-len(bodies) :])


def _joined(bodies: list[bytes], batches: Sequence[tuple[int, BatchHeader]]) -> _Decompressed:
    stops = np.cumsum([len(body) for body in bodies]).tolist()
    return _Decompressed(b"".join(bodies), [0, *stops[:-1]], stops, batches)


def _body(block: Block, at: int, header: BatchHeader, plain_bytes_max: int | None) -> bytes:
    """Return the records of a batch without compression, at least as many bytes as they must be."""
    position, offset = block.position + at, header.base_offset
    body = decompress(
        block.data[at + HEADER_BYTES : at + header.size],
        header.attributes & COMPRESSION_MASK,
        path=block.path,
        position=position,
        offset=offset,
        bytes_max=plain_bytes_max,
    )
    if header.record_count * RECORD_BYTES_MIN > len(body):
        fault = f"record count is {header.record_count} in {len(body)} decompressed bytes"
        raise damaged(block.path, position, offset, fault)
    return body


def _check_record(data: bytes, at: int, end: int, number: int) -> tuple[bool, int, int]:
    """Return for the record at ``at``: whether it has no key, its timestamp delta, where it ends.

    Raises:
        ValueError: it is not record ``number`` of a batch, or does not end before ``end``.
    """
    length, begin = read_varint(data, at, min(end, at + LENGTH_BYTES_MAX))
    stop = begin + length
    if length < RECORD_BYTES_MIN - 1 or stop > end:
        raise ValueError
    delta, at = read_varint(data, begin + 1, stop)
    offset_delta, at = read_varint(data, at, stop)
    key, at = read_varint(data, at, stop)
    value, at = read_varint(data, at + max(key, 0), stop)
    at += max(value, 0)
    if offset_delta != number or key < -1 or value < -1 or at >= stop:
        raise ValueError
    if data[at] or at + 1 != stop:
        _read_headers(data, at, stop)
    return key < 0, delta, stop


class _Records:
    """The records of a part as columns of positions into its bytes."""

    def __init__(self, block: Block, part: _Decompressed) -> None:
        self._block = block
        self._part = part
        self._bytes: Bytes = np.frombuffer(part.data, np.uint8)
        self._heads = [header for _, header in part.batches]
        self._counts: Int64s = np.array([h.record_count for h in self._heads], np.int64)
        self.dense = all(h.record_count == h.last_offset_delta + 1 for h in self._heads)
        self._wanted = slice(0, int(self._counts.sum()))

    def narrow(self, start: int, end: int) -> bool:
        """Leave out records outside [start, end) where their offsets are known.

        Return whether any may be left.
        """
        if not self.dense:
            return True
        low, high = np.searchsorted(self._dense_offsets(), [start, end])
        self._wanted = slice(int(low), int(high))
        return bool(high > low)

    def columns(self, names: Sequence[str]) -> dict[str, pa.Array]:
        if set(names) <= {"offset"} and self.dense:
            return {"offset": _int64_array(self._dense_offsets())}
        at, ends = (bounds[self._wanted] for bounds in self._bounds())
        out = {}
        time_deltas, at = read_varints(self._bytes, at + 1)
        offset_deltas, at = read_varints(self._bytes, at)
        limit = self._repeat([h.last_offset_delta for h in self._heads])
        self._check((offset_deltas >= 0) & (offset_deltas <= limit), "an offset delta")
        if "offset" in names:
            base = self._repeat([h.base_offset for h in self._heads])
            out["offset"] = _int64_array(base + offset_deltas)
        if "timestamp" in names:
            out["timestamp"] = self._timestamps(time_deltas)
        depth = max(map(ALL_COLUMNS.index, names), default=0)  # each is found by those before it
        if depth >= 2:
            lengths, at = self._field(at, ends)
            if "key" in names:
                out["key"] = self._gather(at, lengths)
        if depth >= 3:
            lengths, at = self._field(at + np.maximum(lengths, 0), ends)
            if "value" in names:
                out["value"] = self._gather(at, lengths)
        if depth == 4:
            out["headers"] = self._headers_column(at + np.maximum(lengths, 0), ends)
        return out

    def check_one_by_one(self) -> CheckedRecords:
        """Do as :meth:`check` does; faster for few records."""
        unkeyed, latest = False, NO_TIMESTAMP_MS
        for number, (start, stop, header) in enumerate(
            zip(self._part.starts, self._part.stops, self._heads, strict=True)
        ):
            at = start
            try:
                for record in range(header.record_count):
                    no_key, delta, at = _check_record(self._part.data, at, stop, record)
                    unkeyed |= no_key
                    time_ms = header.base_timestamp_ms + delta
                    if not -_TIMES <= time_ms < _TIMES:
                        raise self._misfit("a timestamp", number)
                    latest = max(latest, time_ms)
            except ValueError:
                raise self._misfit("a record", number) from None
            if at != stop:
                raise self._misfit("the end of the last record", number)
        return CheckedRecords(unkeyed, latest)

    def check(self) -> CheckedRecords:
        """Check every field of every record, without gathering them."""
        at, ends = self._bounds()
        time_deltas, at = read_varints(self._bytes, at + 1)
        offset_deltas, at = read_varints(self._bytes, at)
        firsts = np.repeat(np.cumsum(self._counts) - self._counts, self._counts)
        self._check(offset_deltas == np.arange(len(firsts)) - firsts, "an offset delta")
        keys, at = self._field(at, ends)
        values, at = self._field(at + np.maximum(keys, 0), ends)
        self._headers(at + np.maximum(values, 0), ends)
        bases = self._repeat([h.base_timestamp_ms for h in self._heads])
        times = bases + time_deltas  # which overflows at 64 bits, and then has another sign
        self._check(((bases ^ times) & (time_deltas ^ times)) >= 0, "a timestamp")
        return CheckedRecords(bool((keys < 0).any()), max(int(times.max()), NO_TIMESTAMP_MS))

    def _bounds(self) -> tuple[Int64s, Int64s]:
        starts, stops = (np.array(x, np.int64) for x in (self._part.starts, self._part.stops))
        bodies = BatchBodies(self._part.data, self._bytes, starts, stops, self._counts)
        return find_records(bodies, self._misfit)

    def _field(self, at: Int64s, ends: Int64s) -> tuple[Int64s, Int64s]:
        """Return the lengths of the keys or values at ``at``, and where their bytes begin."""
        lengths, at = read_varints(self._bytes, at)
        self._check((lengths >= -1) & (lengths <= ends - at), "a key or value length")
        return lengths, at

    def _repeat(self, per_batch: Sequence[int]) -> Int64s:
        repeated: Int64s = np.repeat(np.array(per_batch, np.int64), self._counts)
        return repeated[self._wanted]

    def _dense_offsets(self) -> Int64s:
        total = int(self._counts.sum())
        before = np.cumsum(self._counts) - self._counts
        bases = np.array([h.base_offset for h in self._heads], np.int64)
        offsets: Int64s = np.arange(total) + np.repeat(bases - before, self._counts)
        return offsets[self._wanted]

    def _timestamps(self, deltas: Int64s) -> pa.Array:
        appended = [bool(h.attributes & LOG_APPEND_TIME) for h in self._heads]
        times = self._repeat([h.base_timestamp_ms for h in self._heads]) + deltas
        if any(appended):
            latest = self._repeat([h.max_timestamp_ms for h in self._heads])
            times = np.where(self._repeat(appended) != 0, latest, times)
        return _int64_array(times).view(pa.timestamp("ms", "UTC"))

    def _headers_column(self, at: Int64s, ends: Int64s) -> pa.Array:
        """Return the headers of every record; only records that have some are looked at one by one."""
        counts, keys, values = self._headers(at, ends)
        pairs = pa.StructArray.from_arrays(
            [_binary_array(keys, pa.string()), _binary_array(values, pa.binary())],
            fields=_HEADER_FIELDS,
        )
        places = pa.py_buffer(np.cumsum(counts, dtype=np.int32))
        kind = SCHEMA.field("headers").type
        return pa.Array.from_buffers(kind, len(at), [None, places], children=[pairs])

    def _headers(
        self, at: Int64s, ends: Int64s
    ) -> tuple[NDArray[np.int32], list[bytes], list[bytes | None]]:
        """Return how many headers each record has (behind a 0), and their keys and values."""
        self._check(at < ends, "a number of headers")
        counts = np.zeros(len(at) + 1, np.int32)
        keys: list[bytes] = []
        values: list[bytes | None] = []
        present = np.flatnonzero((self._bytes[at] != 0) | (at + 1 != ends))
        for row, start, end in zip(
            present.tolist(), at[present].tolist(), ends[present].tolist(), strict=True
        ):
            try:
                found = _read_headers(self._part.data, start, end)
            except ValueError:
                raise self._misfit("a header", self._batch_of(row)) from None
            counts[row + 1] = len(found)
            keys += [key for key, _ in found]
            values += [value for _, value in found]
        return counts, keys, values

    def _check(self, holds: NDArray[np.bool_], what: str) -> None:
        if not holds.all():
            raise self._misfit(what, self._batch_of(int(np.argmin(holds))))

    def _batch_of(self, record: int) -> int:
        record += self._wanted.start
        return int(np.searchsorted(np.cumsum(self._counts), record, "right"))

    def _misfit(self, what: str, batch: int) -> CorruptBatchError:
        at, header = self._part.batches[batch]
        fault = f"{what} does not fit into its batch"
        return damaged(self._block.path, self._block.position + at, header.base_offset, fault)

    def _gather(self, at: Int64s, lengths: Int64s) -> pa.Array:
        """Copy the bytes at these ascending places into one binary array; -1 becomes null."""
        count = len(at)
        absent = lengths < 0
        if absent.all():
            return pa.nulls(count, pa.binary())
        # An array whose odd elements are the gaps between the values is over the block as it
        # is; taking the even elements makes Arrow do the copying.
        offsets = np.empty(2 * count, np.int32)
        offsets[0::2] = at
        offsets[1::2] = at + np.maximum(lengths, 0)
        data = pa.py_buffer(self._part.data)
        both = pa.Array.from_buffers(
            pa.binary(), 2 * count - 1, [None, pa.py_buffer(offsets), data]
        )
        values = both.take(_int64_array(np.arange(0, 2 * count, 2, dtype=np.int64)))
        if not absent.any():
            return values
        present = pa.py_buffer(np.packbits(~absent, bitorder="little"))
        return pa.Array.from_buffers(pa.binary(), count, [present, *values.buffers()[1:]])


def _int64_array(numbers: Int64s) -> pa.Array:
    # Not pa.array(): it imports pandas where that is installed, which takes longer than most reads.
    return pa.Array.from_buffers(pa.int64(), len(numbers), [None, pa.py_buffer(numbers)])


def _binary_array(parts: Sequence[bytes | None], kind: pa.DataType) -> pa.Array:
    offsets = np.zeros(len(parts) + 1, np.int32)
    np.cumsum([len(part or b"") for part in parts], out=offsets[1:])
    absent = np.array([part is None for part in parts], bool)
    present = pa.py_buffer(np.packbits(~absent, bitorder="little")) if absent.any() else None
    data = pa.py_buffer(b"".join(part or b"" for part in parts))
    return pa.Array.from_buffers(kind, len(parts), [present, pa.py_buffer(offsets), data])


def _read_headers(data: bytes, at: int, end: int) -> list[tuple[bytes, bytes | None]]:
    """Return the headers of the record that ends at ``end``: keys in UTF-8, values as they are.

    Raises:
        ValueError: they are not what these bytes can hold, or do not fill them.
    """
    count, at = read_varint(data, at, end)
    if count < 0:
        raise ValueError
    found: list[tuple[bytes, bytes | None]] = []
    for _ in range(count):
        length, at = read_varint(data, at, end)
        if not 0 <= length <= end - at:
            raise ValueError
        key = data[at : at + length].decode("utf-8", "replace").encode()
        length, at = read_varint(data, at + length, end)
        if not -1 <= length <= end - at:
            raise ValueError
        found.append((key, None if length < 0 else data[at : at + length]))
        at += max(length, 0)
    if at != end:
        raise ValueError
    return found
