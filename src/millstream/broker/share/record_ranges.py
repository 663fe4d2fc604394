"""The records in an interval of a partition, and the batches that deliver them to a share group.

A share group acquires and acknowledges records offset by offset. So the broker must know which offsets are
records: markers, offsets removed by compaction and records of aborted transactions are not.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from millstream.log.aborted import AbortedTransactions
from millstream.log.batch import CONTROL, BatchHeader, read_header
from millstream.log.batch_reader import BatchReader
from millstream.log.decoding import Block, decode
from millstream.log.reader import Isolation
from millstream.record import TopicPartition


class FoundBatch(NamedTuple):
    """A batch as stored, and the offsets of its records as half-open ranges."""

    data: bytes
    ranges: list[tuple[int, int]]


class FetchedInterval(NamedTuple):
    """The batches with records in [start, end)."""

    start: int
    end: int
    batches: list[FoundBatch]

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """The offsets of all records."""
        return [one for batch in self.batches for one in batch.ranges]


def read_interval(
    reader: BatchReader,
    name: TopicPartition,
    start: int,
    *,
    isolation: Isolation,
    bytes_max: int,
    first_whole: bool,
) -> FetchedInterval:
    """Return the records from ``start`` on; the interval is empty at the end of the partition.

    Raises:
        OffsetOutOfRangeError: ``start`` is not between log start and end.
        CorruptBatchError: the batch that holds ``start`` is damaged.
        UnknownTopicError, ConfigError: there is no such topic or partition.
    """
    found = reader.fetch(
        *name, start, isolation=isolation, bytes_max=bytes_max, first_whole=first_whole
    )
    aborted = AbortedTransactions(found.aborted)
    batches = [
        FoundBatch(part[at : at + header.size], list(_ranges(part, at, header, start)))
        for part in map(bytes, found.parts)
        for at, header in _headers(part)
        if not header.attributes & CONTROL and not aborted.covers(header)
    ]
    return FetchedInterval(start, found.next_offset, batches)


def _headers(part: bytes) -> Iterator[tuple[int, BatchHeader]]:
    """Yield the position and header of each batch; the reader has checked them."""
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
    if len(offsets):  # compaction has removed records of the batch
        breaks = np.flatnonzero(np.diff(offsets) > 1) + 1
        for part in np.split(offsets, breaks):
            yield int(part[0]), int(part[-1]) + 1
