"""Whole record batches as they are on disk, for callers that decode them themselves: Kafka's clients.

They include what a ``LogReader`` leaves out (records of aborted transactions, markers), together with what a
client needs to leave it out.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from millstream.errors import CorruptBatchError, OffsetOutOfRangeError
from millstream.log import seal
from millstream.log.aborted import FetchedAborts
from millstream.log.control import ControlDb
from millstream.log.decoding import Block, decode
from millstream.log.files import DISK, Files
from millstream.log.producers import AbortedTransaction
from millstream.log.reader import Isolation, LogReader
from millstream.log.segment import ReadBudget, segment_name, segment_offsets
from millstream.log.segment_reader import BatchPosition
from millstream.log.state_file import PartitionState
from millstream.log.topics import TopicMetadata, partition_folder

_BLOCK_BYTES = 1 << 20
_SEARCH_BYTES = 4 << 20
_PLACES_MAX = 10_000


class FetchedBatches(NamedTuple):
    """Batches in the order of offsets; the next ones begin at ``next_offset``.

    ``parts`` are views of what was read, so that what is only sent on is not copied. ``aborted`` are
    the aborted transactions that have records or their markers among them. If they have ``ended``, what
    follows must not go into the same response; see ``aborted.AbortedRanges``.
    """

    parts: list[memoryview]
    size: int
    next_offset: int
    aborted: list[AbortedTransaction]
    ended: bool = False


class OffsetAndTimestamp(NamedTuple):
    """The offset of a record, and its timestamp."""

    offset: int
    timestamp_ms: int


class BatchReader(LogReader):
    """Reads batches without decoding them. One thread at a time."""

    def __init__(
        self, folder: Path | str, *, files: Files = DISK, control: ControlDb | None = None
    ) -> None:
        super().__init__(folder, isolation="read_uncommitted", files=files, control=control)
        self._ended: dict[
            tuple[str, int], BatchPosition
        ] = {}  # where reading of each partition stopped

    def state(self, topic: str, partition: int) -> PartitionState:
        """Return the offsets up to which a partition can be read.

        Raises:
            UnknownTopicError, ConfigError: there is no such topic or partition.
        """
        return self._partition_state(self._topic(topic), partition)

    def fetch(
        self,
        topic: str,
        partition: int,
        start: int,
        *,
        isolation: Isolation,
        bytes_max: int,
        first_whole: bool = True,
    ) -> FetchedBatches:
        """Return the batches from the one that holds ``start``, up to ``bytes_max`` bytes of them.

        Args:
            isolation: Decides where the end is. With ``read_committed``, too, batches of aborted transactions
                are among them, and ``aborted`` lists these.
            first_whole: Return one batch at least, however large.

        Raises:
            OffsetOutOfRangeError: ``start`` is not between log start and end.
            CorruptBatchError: the batch that holds ``start`` is damaged. (Damage behind it ends
                what is returned.)
            UnknownTopicError, ConfigError: there is no such topic or partition.
        """
        found = self._topic(topic)
        state = self._partition_state(found, partition)
        end = state.last_stable_offset if isolation == "read_committed" else state.high_watermark
        if not state.log_start <= start <= state.high_watermark:
            raise OffsetOutOfRangeError(
                f"offset {start} of {topic}/{partition} does not exist: it holds "
                f"[{state.log_start}, {state.high_watermark}); read within these",
                start=state.log_start,
                end=state.high_watermark,
            )
        if start >= end or bytes_max <= 0:
            return FetchedBatches([], 0, start, [])
        ranges: list[AbortedTransaction] = []
        if isolation == "read_committed":  # before the records: see ``aborted``
            folder = partition_folder(self.folder, found, partition)
            ranges = self._aborted(folder, self._files.names(folder), start, end)
        room = ReadBudget(start, bytes_max, first_whole=first_whole)
        return self._gather(found, partition, (start, end), room, FetchedAborts(ranges))

    def _gather(
        self,
        topic: TopicMetadata,
        partition: int,
        wanted: tuple[int, int],
        room: ReadBudget,
        telling: FetchedAborts,
    ) -> FetchedBatches:
        parts: list[memoryview] = []
        size, reached, ended = 0, wanted[0], False
        name = (topic.topic_id, partition)
        if len(self._ended) > _PLACES_MAX:  # topics come and go
            self._ended.clear()
        blocks = self._blocks(
            topic, partition, *wanted, _BLOCK_BYTES, room=room, known=self._ended.get(name)
        )
        try:
            for block in blocks:
                first = stop = block.batches[0][0]
                for at, header in block.batches:
                    if not room.has(header):
                        break
                    ended = not telling.admit(header)
                    if ended:
                        break
                    room.take(header.size)
                    stop, reached = at + header.size, header.next_offset
                if stop > first:
                    parts.append(memoryview(block.data)[first:stop])
                    size += stop - first
                    self._ended[name] = BatchPosition(block.path, reached, block.position + stop)
                if room.full or ended:
                    break
        except CorruptBatchError:
            if not parts:
                raise
        return FetchedBatches(
            parts, size, reached, telling.transactions, ended or telling.awaits_marker
        )

    def first_since(
        self, topic: str, partition: int, timestamp_ms: int
    ) -> OffsetAndTimestamp | None:
        """Return the first record whose timestamp is ``timestamp_ms`` or later; None: there is none.

        Raises:
            UnknownTopicError, ConfigError: there is no such topic or partition.
        """
        found = self._topic(topic)
        state = self._partition_state(found, partition)
        end = state.high_watermark
        start = self._segment_for_time(found, partition, timestamp_ms, state.log_start)
        if start >= end:
            return None
        for block in self._blocks(found, partition, start, end, _SEARCH_BYTES):
            if all(header.max_timestamp_ms < timestamp_ms for _, header in block.batches):
                continue
            for offset, time_ms in _offsets_and_times(block, start, end):
                if time_ms >= timestamp_ms:
                    return OffsetAndTimestamp(offset, time_ms)
        return None

    def latest(self, topic: str, partition: int) -> OffsetAndTimestamp | None:
        """Return the first record that has the largest timestamp of all; None: there are no records.

        Raises:
            UnknownTopicError, ConfigError: there is no such topic or partition.
        """
        found = self._topic(topic)
        state = self._partition_state(found, partition)
        time_ms = max(self._times(found, partition, state), default=-1)
        first = self.first_since(topic, partition, time_ms)
        if first is not None and first.timestamp_ms == time_ms:
            return first
        # Batches emptied by compaction, and markers, have timestamps, too.
        start, end = state.log_start, state.high_watermark
        return max(
            (
                OffsetAndTimestamp(offset, time_ms)
                for block in self._blocks(found, partition, start, end, _SEARCH_BYTES)
                for offset, time_ms in _offsets_and_times(block, start, end)
            ),
            key=lambda one: (one.timestamp_ms, -one.offset),
            default=None,
        )

    def _times(self, topic: TopicMetadata, partition: int, state: PartitionState) -> Iterator[int]:
        """Yield the largest timestamp of each sealed segment, and of each batch in the others."""
        folder = partition_folder(self.folder, topic, partition)
        bases = segment_offsets(self._files.names(folder))
        for base, following in zip(bases, [*bases[1:], state.high_watermark], strict=True):
            sealed = seal.read_any(self._files, folder / segment_name(base))
            if sealed is not None and base >= state.log_start:
                yield sealed.max_timestamp_ms
                continue
            start, end = max(base, state.log_start), min(following, state.high_watermark)
            if start < end:
                for block in self._blocks(topic, partition, start, end, _SEARCH_BYTES):
                    yield from (header.max_timestamp_ms for _, header in block.batches)


def _offsets_and_times(block: Block, start: int, end: int) -> Iterator[tuple[int, int]]:
    batch = decode(block, start, end, ("offset", "timestamp"))
    times = np.asarray(batch["timestamp"].cast(pa.int64())).tolist()
    yield from zip(batch["offset"].to_pylist(), times, strict=True)
