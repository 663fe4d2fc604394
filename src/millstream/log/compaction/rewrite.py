"""Writes a cleaned segment: what a plan retains, byte for byte where nothing changes.

Every offset remains in exactly one batch. A batch keeps its base offset, its last offset delta, its
producer and sequence, its leader epoch and its codec, with fewer records or none. Batches of which
only the offsets are retained become one filler together.

A filler's timestamp is -1, Kafka's value for none: it has no record for a lookup by time, and must not keep
its segment from retention by age. A batch that remains for its producer keeps its timestamp, because
producers expire by it; a lookup skips it, as it looks at records in the end.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Self

import numpy as np

from millstream.errors import CorruptBatchError
from millstream.log.batch import (
    COMPRESSION_MASK,
    DELETE_HORIZON,
    HEADER_BYTES,
    LOG_APPEND_TIME,
    BatchHeader,
    EncodedBatch,
    damaged,
    finish,
)
from millstream.log.boundaries import BatchBodies, find_records
from millstream.log.compaction.plan import BatchPlan, BatchRetention
from millstream.log.compression import COMPRESSIONS, compress, decompress
from millstream.log.decoding import Block
from millstream.log.files import Files, NewFile
from millstream.log.markers import FILLER_OFFSETS_MAX, encode_filler
from millstream.log.varint import Bytes, Int64s, read_varints, varint_columns

if TYPE_CHECKING:
    from numpy.typing import NDArray

_WRITE_BYTES = 4 * 1024 * 1024


class CleanedSegmentFile:
    """A file that will replace a segment. Leaving the context closes it."""

    def __init__(self, files: Files, path: Path) -> None:
        self.path = path
        self._file = NewFile(files, path)
        self._parts: list[bytes] = []
        self._size = 0
        self._gone = (0, 0, 0)  # base offset and number of offsets for a filler, and leader epoch

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.__exit__(*error)

    @property
    def size(self) -> int:
        """Bytes written or about to be."""
        return self._file.size + self._size

    def add(self, block: Block, batch_plans: Iterable[BatchPlan]) -> None:
        """Write what the plans retain of a block."""
        start = end = 0  # a run of batches that remain whole is written at once
        for batch_plan in batch_plans:
            at, header = batch_plan.at, batch_plan.header
            if batch_plan.retention is BatchRetention.WHOLE and end == at and start < end:
                end += header.size
                continue
            self._put(block.data[start:end])
            start = end = at
            if batch_plan.retention is BatchRetention.OFFSETS:
                self._leave_out(header)
                continue
            self._fill()
            if batch_plan.retention is BatchRetention.WHOLE:
                end = at + header.size
            else:
                made = _rewritten(block, batch_plan)
                self._put(made.prefix(header.base_offset, header.leader_epoch) + made.tail)
        self._put(block.data[start:end])

    def finish(self) -> None:
        """Return when everything is on stable storage."""
        self._fill()
        self._write()
        self._file.sync()

    def _leave_out(self, header: BatchHeader) -> None:
        base, count, leader_epoch = self._gone
        more = header.last_offset_delta + 1
        if count and count + more > FILLER_OFFSETS_MAX:
            self._fill()
            count = 0
        if not count:
            base, leader_epoch = header.base_offset, header.leader_epoch
        self._gone = (base, count + more, leader_epoch)

    def _fill(self) -> None:
        base, count, leader_epoch = self._gone
        if count:
            filler = encode_filler(count)
            self._gone = (0, 0, 0)
            self._put(filler.prefix(base, leader_epoch) + filler.tail)

    def _put(self, data: bytes) -> None:
        self._parts.append(data)
        self._size += len(data)
        if self._size >= _WRITE_BYTES:
            self._write()

    def _write(self) -> None:
        self._file.write(b"".join(self._parts))
        self._parts, self._size = [], 0


def _rewritten(block: Block, batch_plan: BatchPlan) -> EncodedBatch:
    """Return a batch with fewer records, none, or another base timestamp."""
    header = batch_plan.header
    if batch_plan.keep is None:
        # Without records it is in no transaction, so no marker has to remain for it.
        return encode_filler(
            header.last_offset_delta + 1,
            max_timestamp_ms=header.max_timestamp_ms,
            producer=header.producer,
        )
    body = _Body(block, batch_plan.at, header)
    keep, attributes, base_ms = batch_plan.keep, header.attributes, header.base_timestamp_ms
    latest_ms = header.max_timestamp_ms  # is every record's timestamp with log-append time
    if not attributes & LOG_APPEND_TIME:
        latest_ms = base_ms + int(body.time_deltas[keep].max())
    if batch_plan.horizon_ms is None:
        records = body.records(keep)
    else:
        shift_ms = 0 if attributes & LOG_APPEND_TIME else base_ms - batch_plan.horizon_ms
        records = body.shifted_records(keep, shift_ms)
        attributes, base_ms = attributes | DELETE_HORIZON, batch_plan.horizon_ms
    made = finish(
        records,
        records=int(keep.sum()),
        timestamps_ms=(base_ms, latest_ms),
        count=header.last_offset_delta + 1,
        attributes=attributes & ~COMPRESSION_MASK,
        producer=header.producer,
    )
    return compress(made, COMPRESSIONS[attributes & COMPRESSION_MASK])


class _Body:
    """The records of one batch, not compressed, and where each of them begins and ends."""

    def __init__(self, block: Block, at: int, header: BatchHeader) -> None:
        place = (block.path, block.position + at, header.base_offset)
        data = decompress(
            block.data[at + HEADER_BYTES : at + header.size],
            header.attributes & COMPRESSION_MASK,
            path=block.path,
            position=block.position + at,
            offset=header.base_offset,
        )

        def misfit(what: str, _: int) -> CorruptBatchError:
            return damaged(*place, f"{what} does not fit into its batch")

        self._view: Bytes = np.frombuffer(data, np.uint8)
        starts, stops, counts = (
            np.array([number], np.int64) for number in (0, len(data), header.record_count)
        )
        bodies = BatchBodies(data, self._view, starts, stops, counts)
        self._begins, self._ends = find_records(bodies, misfit)
        self.time_deltas, self._rest = read_varints(self._view, self._begins + 1)

    def records(self, keep: NDArray[np.bool_]) -> bytes:
        """Return these records as they are."""
        sizes = np.diff(self._ends, prepend=0)
        return self._view[np.repeat(keep, sizes)].tobytes()

    def shifted_records(self, keep: NDArray[np.bool_], shift_ms: int) -> bytes:
        """Return these records with ``shift_ms`` added to their timestamp deltas."""
        begins, rests, ends = self._begins[keep], self._rest[keep], self._ends[keep]
        times, time_sizes = varint_columns(self.time_deltas[keep] + shift_ms)
        sizes, size_sizes = varint_columns(1 + time_sizes + ends - rests)
        fronts = np.concatenate([sizes, self._view[begins][:, None], times], axis=1)
        one = np.ones((len(begins), 1), bool)
        used = np.concatenate([_up_to(size_sizes, sizes), one, _up_to(time_sizes, times)], axis=1)
        # Where a record's front comes from the columns made here, and the rest from the old bytes.
        lengths = np.stack([used.sum(axis=1), ends - rests], axis=1).reshape(-1)
        is_rest = np.repeat(np.tile([False, True], len(begins)), lengths)
        out = np.empty(len(is_rest), np.uint8)
        out[~is_rest] = fronts[used]
        gaps = np.stack([rests - np.append(0, ends[:-1]), ends - rests], axis=1).reshape(-1)
        out[is_rest] = self._view[: ends[-1]][np.repeat(np.tile([False, True], len(ends)), gaps)]
        return out.tobytes()


def _up_to(sizes: Int64s, cells: Bytes) -> NDArray[np.bool_]:
    return np.arange(cells.shape[1]) < sizes[:, None]
