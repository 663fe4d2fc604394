"""From record batches to Arrow columns, many batches at once.

The records of all batches in a block are found first (the only step that may touch a record in
Python), then every field is read as a column and every key and value gathered in one copy. What is
not asked for is not decoded: offsets alone come from the headers. A batch whose counts or lengths
lie gives CorruptBatchError; every position is checked against the record that it belongs to.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, cast

import numpy as np
import pyarrow as pa

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
from millstream.log.varint import Bytes, Int64s, read_varints

COLUMNS = ("offset", "timestamp", "key", "value")
SCHEMA = pa.schema(
    [
        pa.field("offset", pa.int64(), nullable=False),
        pa.field("timestamp", pa.timestamp("ms", "UTC"), nullable=False),
        pa.field("key", pa.binary()),
        pa.field("value", pa.binary()),
    ]
)
_LANES_MIN = 200  # with fewer batches side by side, hopping record by record is quicker
_RUN_MIN = 12  # equal lengths in a row before the rest is looked at as a run


class Block(NamedTuple):
    """Whole record batches back to back, as read from a file; ``batches`` says where each is."""

    data: bytes
    batches: Sequence[tuple[int, BatchHeader]]
    path: str
    position: int


def select_schema(columns: Sequence[str]) -> pa.Schema:
    """Return the schema of these columns, in the order asked for.

    Raises:
        ConfigError: a column is not one of offset, timestamp, key, value.
    """
    for name in columns:
        if name not in COLUMNS:
            raise ConfigError(f"no column {name!r} in a log; choose from {', '.join(COLUMNS)}")
    return pa.schema([SCHEMA.field(name) for name in columns])


def decode(block: Block, start: int, end: int, columns: Sequence[str] = COLUMNS) -> pa.RecordBatch:
    """Return the records of ``block`` with offsets in [start, end), in offset order.

    Raises:
        CorruptBatchError: a count or a length in a batch cannot be. Not retriable.
        ConfigError: a batch is compressed, or a column unknown.
    """
    schema = select_schema(columns)
    kept = [
        (at, header)
        for at, header in block.batches
        if header.record_count and not header.attributes & CONTROL
    ]
    for _, header in kept:
        if header.attributes & COMPRESSION_MASK:
            raise ConfigError(
                f"the batch at offset {header.base_offset} of {block.path} is compressed "
                "(attribute bits 0 to 2); write it again without compression to read it here"
            )
    if not kept:
        empty = [pa.nulls(0, field.type) for field in schema]
        return pa.RecordBatch.from_arrays(empty, schema=schema)
    arrays = _Records(block, kept).columns(columns)
    batch = pa.RecordBatch.from_arrays([arrays[name] for name in columns], schema=schema)
    first, last = kept[0][1], kept[-1][1]
    if first.base_offset >= start and last.next_offset <= end:
        return batch
    offsets = arrays.get("offset")
    if offsets is None:
        offsets = _Records(block, kept).columns(("offset",))["offset"]
    low, high = np.searchsorted(np.asarray(offsets), [start, end])
    return batch.slice(int(low), int(high - low))


class _Records:
    """The records of some batches as columns of positions into one block."""

    def __init__(self, block: Block, batches: Sequence[tuple[int, BatchHeader]]) -> None:
        self._block = block
        self._bytes: Bytes = np.frombuffer(block.data, np.uint8)
        self._headers = batches
        self._counts: Int64s = np.array([header.record_count for _, header in batches], np.int64)

    def columns(self, names: Sequence[str]) -> dict[str, pa.Array]:
        dense = all(
            header.record_count == header.last_offset_delta + 1 for _, header in self._headers
        )
        if set(names) <= {"offset"} and dense:
            return {"offset": _int64_array(self._dense_offsets())}
        starts, ends = self._bounds()
        time_deltas, at = read_varints(self._bytes, starts + 1)
        offset_deltas, at = read_varints(self._bytes, at)
        limit = self._repeat([header.last_offset_delta for _, header in self._headers])
        self._check(((offset_deltas >= 0) & (offset_deltas <= limit)).all(), "an offset delta")
        out = {}
        if "offset" in names:
            base = self._repeat([header.base_offset for _, header in self._headers])
            out["offset"] = _int64_array(base + offset_deltas)
        if "timestamp" in names:
            out["timestamp"] = self._timestamps(time_deltas)
        if "key" in names or "value" in names:
            key_lengths, at = read_varints(self._bytes, at)
            self._check_field(at, key_lengths, ends)
            if "key" in names:
                out["key"] = self._gather(at, key_lengths)
        if "value" in names:
            lengths, at = read_varints(self._bytes, at + np.maximum(key_lengths, 0))
            self._check_field(at, lengths, ends)
            out["value"] = self._gather(at, lengths)
        return out

    def _repeat(self, per_batch: Sequence[int]) -> Int64s:
        return cast("Int64s", np.repeat(np.array(per_batch, np.int64), self._counts))

    def _dense_offsets(self) -> Int64s:
        total = int(self._counts.sum())
        before = np.cumsum(self._counts) - self._counts
        bases = np.array([header.base_offset for _, header in self._headers], np.int64)
        return cast(
            "Int64s", np.arange(total, dtype=np.int64) + np.repeat(bases - before, self._counts)
        )

    def _timestamps(self, deltas: Int64s) -> pa.Array:
        appended = [bool(header.attributes & LOG_APPEND_TIME) for _, header in self._headers]
        times = self._repeat([header.base_timestamp_ms for _, header in self._headers]) + deltas
        if any(appended):
            latest = self._repeat([header.max_timestamp_ms for _, header in self._headers])
            times = np.where(np.repeat(np.array(appended), self._counts), latest, times)
        return _int64_array(times).view(pa.timestamp("ms", "UTC"))

    def _bounds(self) -> tuple[Int64s, Int64s]:
        """Return where each record begins (after its length) and ends."""
        counts = self._counts
        if len(counts) >= _LANES_MIN and int(counts.sum()) >= _LANES_MIN * int(counts.max()):
            return self._bounds_side_by_side()
        parts: list[tuple[Int64s, Int64s]] = []
        for at, header in self._headers:
            found = _hop(
                self._block.data,
                self._bytes,
                at + HEADER_BYTES,
                at + header.size,
                header.record_count,
            )
            if found is None:
                raise self._misfit("a record length", at, header)
            parts.append(found)
        if len(parts) == 1:
            return parts[0]
        return np.concatenate([s for s, _ in parts]), np.concatenate([e for _, e in parts])

    def _bounds_side_by_side(self) -> tuple[Int64s, Int64s]:
        """Find the n-th record of every batch in one step; quick for many small batches."""
        starts = np.empty(int(self._counts.sum()), np.int64)
        ends = np.empty_like(starts)
        slot = np.cumsum(self._counts) - self._counts
        at = np.array([place + HEADER_BYTES for place, _ in self._headers], np.int64)
        stop = np.array([place + header.size for place, header in self._headers], np.int64)
        left = self._counts
        while len(left):
            lengths, begin = read_varints(self._bytes, at)
            at = begin + lengths
            fits = (lengths >= RECORD_BYTES_MIN - 1) & (lengths <= stop - begin)
            self._check(fits.all(), "a record length")
            starts[slot], ends[slot] = begin, at
            more = left > 1
            self._check((at[~more] == stop[~more]).all(), "the end of the last record")
            if more.all():
                slot, left = slot + 1, left - 1
            else:
                slot, left, at, stop = slot[more] + 1, left[more] - 1, at[more], stop[more]
        return starts, ends

    def _check_field(self, at: Int64s, lengths: Int64s, ends: Int64s) -> None:
        self._check(((lengths >= -1) & (lengths < ends - at + 1)).all(), "a key or value length")

    def _check(self, holds: object, what: str) -> None:
        if not holds:
            raise self._misfit(what, *self._headers[0])

    def _misfit(self, what: str, at: int, header: BatchHeader) -> CorruptBatchError:
        fault = f"{what} does not fit into its batch"
        return damaged(self._block.path, self._block.position + at, header.base_offset, fault)

    def _gather(self, at: Int64s, lengths: Int64s) -> pa.Array:
        """Copy the bytes at these ascending places into one binary array; -1 becomes null."""
        count = len(at)
        absent = lengths < 0
        if absent.all():
            return pa.nulls(count, pa.binary())
        # An array whose odd elements are the gaps between the values lies over the block as it
        # is; taking the even elements makes Arrow do the copying.
        offsets = np.empty(2 * count, np.int32)
        offsets[0::2] = at
        offsets[1::2] = at + np.maximum(lengths, 0)
        data = pa.py_buffer(self._block.data)
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


def _hop(data: bytes, view: Bytes, at: int, stop: int, count: int) -> tuple[Int64s, Int64s] | None:
    """Return begin and end of ``count`` records between ``at`` and ``stop``; None if they lie.

    Lengths are followed one by one until several in a row are equal; then the whole run of that
    length is found in one step, because each length of a run proves where the next one is.
    """
    places: list[int] = []
    runs: list[Int64s] = []
    append = places.append
    last, equal, found = -1, 0, 0
    while found < count:
        if at >= stop:
            return None
        append(at)
        found += 1
        first = data[at]
        if first < 128:
            width, size = 1, 1 + (first >> 1)
        elif at + 1 < stop and (second := data[at + 1]) < 128:
            width, size = 2, 2 + ((second << 6) | (first & 127) >> 1)
        else:
            width, size = _long_length(data, at)
        at += size
        if size != last:
            last, equal = size, 0
            continue
        equal += 1
        if equal >= _RUN_MIN:
            run = _run(view, at, min(count - found, (stop - at) // size), size, width)
            runs += (np.array(places, np.int64), run)
            places, equal = [], 0
            append = places.append
            at += size * len(run)
            found += len(run)
    if at != stop:
        return None
    lengths, begins = read_varints(view, np.concatenate([*runs, np.array(places, np.int64)]))
    ends = begins + lengths
    return (begins, ends) if bool((lengths >= RECORD_BYTES_MIN - 1).all()) else None


def _long_length(data: bytes, at: int) -> tuple[int, int]:
    """Return the width of a record length of up to five bytes, and the size that it gives."""
    folded = 0
    for width, byte in enumerate(data[at : at + 5]):
        folded |= (byte & 127) << 7 * width
        if byte < 128:
            return width + 1, width + 1 + (folded >> 1)
    return 1, 1  # no length: a record too short to be one, which the caller refuses


def _run(view: Bytes, at: int, count_max: int, size: int, width: int) -> Int64s:
    """Return the places from ``at`` on where records of the same size as the last one begin."""
    pieces: list[Int64s] = []
    model = view[at - size : at - size + width]
    step = 64
    while count_max > 0:
        places = at + size * np.arange(min(step, count_max), dtype=np.int64)
        same = view[places] == model[0]
        for byte in range(1, width):
            same &= view[places + byte] == model[byte]
        length = len(places) if same.all() else int(np.argmin(same))
        pieces.append(places[:length])
        if length < len(places):
            break
        at, count_max, step = at + size * length, count_max - length, step * 8
    return np.concatenate(pieces) if pieces else np.empty(0, np.int64)
