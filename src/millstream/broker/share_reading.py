"""Which records there are in a stretch of a partition, and the batches that bring them to a share group.

A share group is told offset by offset what it is given, and says of each what became of it. So it must be
known here what is a record at all: markers, what compaction removed, and records of transactions that
were taken back are not.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from millstream.log.aborted import AbortedRanges
from millstream.log.batch import CONTROL, BatchHeader, read_header
from millstream.log.batches import BatchReader
from millstream.log.decoding import Block, decode
from millstream.log.reader import Isolation
from millstream.record import TopicPartition


class FoundBatch(NamedTuple):
    """A batch as it lies on disk, and the offsets of its records as half-open ranges."""

    data: bytes
    ranges: list[tuple[int, int]]


class Stretch(NamedTuple):
    """What there is in [start, reached). ``log_start`` is where the partition begins."""

    start: int
    reached: int
    batches: list[FoundBatch]

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """The offsets of all records."""
        return [one for batch in self.batches for one in batch.ranges]


def read_stretch(
    reader: BatchReader,
    name: TopicPartition,
    start: int,
    *,
    isolation: Isolation,
    bytes_max: int,
    first_whole: bool,
) -> Stretch:
    """Return the records from ``start`` on; the stretch is empty at the end of the partition.

    Raises:
        OffsetOutOfRangeError: ``start`` is not between log start and end.
        CorruptBatchError: the batch that holds ``start`` is damaged.
        UnknownTopicError, ConfigError: there is no such topic or partition.
    """
    found = reader.take(
        *name, start, isolation=isolation, bytes_max=bytes_max, first_whole=first_whole
    )
    aborted = AbortedRanges(found.aborted)
    batches = [
        FoundBatch(part[at : at + header.size], list(_ranges(part, at, header, start)))
        for part in map(bytes, found.parts)
        for at, header in _headers(part)
        if not header.attributes & CONTROL and not aborted.cover(header)
    ]
    return Stretch(start, found.next_offset, batches)


def _headers(part: bytes) -> Iterator[tuple[int, BatchHeader]]:
    """Yield where each batch begins, and its header; they were checked when they were read."""
    at = 0
    while at < len(part):
        header = read_header(part, at)
        yield at, header
        at += header.size


def _ranges(data: bytes, at: int, header: BatchHeader, start: int) -> Iterator[tuple[int, int]]:
    """Yield the offsets of the records of a batch from ``start`` on."""
    first, end = max(header.base_offset, start), header.next_offset
    if header.record_count == end - header.base_offset:
        yield first, end
        return
    block = Block(data[at : at + header.size], [(0, header)], "", 0)
    offsets = np.asarray(decode(block, first, end, ("offset",))["offset"])
    if len(offsets):  # compaction has removed some of the batch
        breaks = np.flatnonzero(np.diff(offsets) > 1) + 1
        for part in np.split(offsets, breaks):
            yield int(part[0]), int(part[-1]) + 1
