"""Reads the log: columnar, without locks, in any process.

A reader maps ``state.mm`` to see how far each partition is committed, and reads segment files up to there. It
takes no lock and needs no owner: a folder without one reads the same. It checks every batch that it reads,
and that no offset is missing between them.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import pyarrow as pa

from millstream.choices import choose
from millstream.errors import (
    ConfigError,
    CorruptionError,
    OffsetOutOfRangeError,
)
from millstream.log import aborted, seal
from millstream.log.aborted import AbortedTransactions
from millstream.log.archive import SUFFIX as ARCHIVE_SUFFIX
from millstream.log.archive import UNREADABLE, ArchiveFile, open_fitting
from millstream.log.batch import (
    OFFSET_MAX,
)
from millstream.log.control import ControlDb
from millstream.log.decoding import (
    COLUMNS,
    Block,
    count_by_headers,
    decode,
    decode_parts,
    select_schema,
)
from millstream.log.files import DISK, Files, numbered, size_of
from millstream.log.owner import read_format
from millstream.log.producers import AbortedTransaction
from millstream.log.removed_tombstones import Removals, removals_of
from millstream.log.retention import PartitionContents
from millstream.log.segment import (
    ReadBudget,
    segment_name,
    segment_offsets,
)
from millstream.log.segment_reader import BatchPosition, SegmentReader
from millstream.log.signal import signal_of
from millstream.log.state_file import STATE_NAME, PartitionState, StateFile, check_same_folder
from millstream.log.topics import (
    TopicMetadata,
    catalog_of,
    check_topic_id,
    no_partition,
    partition_folder,
    unknown_topic,
)
from millstream.record import TopicInfo, TopicPartition

Isolation = Literal["read_committed", "read_uncommitted"]
BLOCK_BYTES = 16 << 20
_PUBLISH_S_MAX = (
    5.0  # between a partition's place in the catalog and its state: a moment, if nothing is damaged
)
_LOOKED_THROUGH_BYTES = 4 << 20  # at a time, for a timestamp
_log = logging.getLogger(__name__)


def check_isolation(isolation: Isolation) -> Isolation:
    """Return the isolation level, checked.

    Raises:
        ConfigError: it is neither of the two.
    """
    return choose("isolation", isolation, get_args(Isolation))


def check_range(name: TopicPartition, bounds: tuple[int, int], start: int, end: int) -> None:
    """Check that a partition holds [start, end); ``bounds`` are the offsets that can be read.

    Raises:
        OffsetOutOfRangeError: some of it is gone or not committed; it has the bounds.
    """
    low, high = bounds
    if low <= start < end <= high:
        return
    if start < low:
        gone = min(low, end)
        raise OffsetOutOfRangeError(
            f"offsets [{start}, {gone}) of {name} are gone, {gone - start} in all: they were "
            f"removed by retention, or on request. It holds [{low}, {high}); read on from {low}",
            start=low,
            end=high,
        )
    raise OffsetOutOfRangeError(
        f"offsets [{start}, {end}) of {name} cannot be read: it holds [{low}, {high}); read within these",
        start=low,
        end=high,
    )


class LogReader:
    """Reads a log folder, while its owner appends or without one. One thread at a time.

    Cheap to open; can be pickled (the copy opens the folder when it is first used).

    Args:
        folder: The log folder. A folder that is not a log yet has no topics; it becomes visible
            when an owner has made it one.
        isolation: ``read_committed`` returns no record of an open or aborted transaction, so it ends at the
            first record of the oldest open one; ``read_uncommitted`` returns all.
        topic_ids: The ids of topics in which its user has positions; see :meth:`pinned`.
        files: The file system; only tests give another one.
        control: The content of control.db; only tests give another one.
    """

    def __init__(
        self,
        folder: Path | str,
        *,
        isolation: Isolation = "read_committed",
        topic_ids: Mapping[str, str] | None = None,
        files: Files = DISK,
        control: ControlDb | None = None,
    ) -> None:
        self.folder = Path(folder)
        self._isolation = check_isolation(isolation)
        self._topic_ids = dict(topic_ids or {})
        self._files = files
        self._given_control = control
        self._state: StateFile | None = None
        self._topics: dict[str, TopicMetadata] = {}
        self._catalog_version = -1

    def __getstate__(self) -> dict[str, Any]:
        return {
            "folder": self.folder,
            "isolation": self._isolation,
            "topic_ids": self._topic_ids,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def close(self) -> None:
        """Close the mapping; the reader opens it again when it is used."""
        if self._state is not None:
            self._state.close()
        self._state, self._catalog_version = None, -1

    def pinned(self, topic_ids: Mapping[str, str]) -> LogReader:
        """Return a reader for positions in the topics with these ids, by name.

        Every call about a topic with another id raises TopicRecreatedError.
        """
        return LogReader(
            self.folder,
            isolation=self._isolation,
            topic_ids={**self._topic_ids, **topic_ids},
            files=self._files,
            control=self._given_control,
        )

    # -- what there is ------------------------------------------------------------------------

    def topic_id(self, topic: str) -> str:
        """Return the id that distinguishes a topic from a later one of its name.

        Raises:
            UnknownTopicError: there is no such topic.
        """
        return self._topic(topic).topic_id

    def topics(self) -> dict[str, TopicInfo]:
        """Return the topics that exist now, by name; empty for a folder that is no log yet.

        Raises:
            ConfigError: the folder is of another format version, or parts of two were mixed.
        """
        self._refresh()
        return {name: topic.info for name, topic in self._topics.items()}

    def offsets(self, topic: str) -> list[tuple[int, int]]:
        """Return for each partition ``[log start, end)``: what can be read now.

        Some of these offsets may have no record: markers of transactions, aborted records, records
        that compaction removed.

        Raises:
            UnknownTopicError: there is no such topic.
        """
        found = self._topic(topic)
        states = [self._partition_state(found, number) for number in range(len(found.slots))]
        return [(state.log_start, self._end(state)) for state in states]

    def removed_tombstones(self, topic: str) -> Removals:
        """Return which tombstones compaction removed, by partition.

        What was read before this call may lack these, and no others.

        Raises:
            UnknownTopicError: there is no such topic.
        """
        topic_id = self._topic(topic).topic_id
        if self._given_control is not None:
            return removals_of(self._given_control, topic_id)
        with closing(ControlDb.open(self.folder, write=False)) as control:
            return removals_of(control, topic_id)

    def partition_count(self, topic: str) -> int:
        """Return how many partitions a topic has.

        Raises:
            UnknownTopicError: there is no such topic.
        """
        return len(self._topic(topic).slots)

    def high_watermark(self, topic: str, partition: int) -> int:
        """Return the offset after the last durable record, whether committed or not.

        Raises:
            UnknownTopicError, ConfigError: there is no such topic or partition.
        """
        return self._partition_state(self._topic(topic), partition).high_watermark

    def end_offset(self, topic: str, partition: int) -> int:
        """Return the offset after the last record that can be read.

        Raises:
            UnknownTopicError, ConfigError: there is no such topic or partition.
        """
        return self._end(self._partition_state(self._topic(topic), partition))

    def bounds(self, topic: str, partition: int) -> tuple[int, int]:
        """Return ``[log start, end)`` of one partition; see :meth:`offsets`.

        Raises:
            UnknownTopicError, ConfigError: there is no such topic or partition.
        """
        state = self._partition_state(self._topic(topic), partition)
        return self._bounds(state)

    def settings(self, topic: str) -> dict[str, str]:
        """Return every setting of a topic, under Kafka's names.

        Raises:
            UnknownTopicError: there is no such topic.
        """
        return self._topic(topic).config.settings()

    def contents(self, topic: str, partition: int) -> PartitionContents:
        """Return what the partition holds, by its seals.

        Raises:
            UnknownTopicError, ConfigError: there is no such topic or partition.
        """
        found = self._topic(topic)
        state = self._partition_state(found, partition)
        folder = partition_folder(self.folder, found, partition)
        paths = [folder / segment_name(base) for base in segment_offsets(self._files.names(folder))]
        seals = [seal.read_any(self._files, path) for path in paths[:-1]]
        active_bytes = size_of(self._files, paths[-1]) if paths else 0
        return PartitionContents(
            TopicPartition(topic, partition),
            found.config,
            state.log_start,
            state.last_stable_offset,
            [one for one in seals if one is not None],
            active_bytes,
        )

    def _bounds(self, state: PartitionState) -> tuple[int, int]:
        return state.log_start, self._end(state)

    def _end(self, state: PartitionState) -> int:
        if self._isolation == "read_committed":
            return state.last_stable_offset
        return state.high_watermark

    def wait(self, topic: str, seen: Sequence[int], timeout_s: float) -> bool:
        """Return True as soon as an end is past ``seen`` or a partition was added, False after ``timeout_s``.

        At once if the owner is in this process, within about 2 ms otherwise (see ``signal``).

        Raises:
            UnknownTopicError: there is no such topic, or no longer.
        """

        def passed() -> bool:
            ends = [end for _, end in self.offsets(topic)]
            return len(ends) > len(seen) or any(
                end > known for end, known in zip(ends, seen, strict=True)
            )

        return signal_of(self.folder).wait_until(passed, timeout_s)

    # -- reading ------------------------------------------------------------------------------

    def read(
        self,
        topic: str,
        partition: int,
        start: int,
        end: int,
        *,
        columns: Sequence[str] = COLUMNS,
        bytes_max: int = BLOCK_BYTES,
        tally: Callable[[int], None] | None = None,
    ) -> Iterator[pa.RecordBatch]:
        """Yield the records with offsets in [start, end), in offset order.

        Schema: ``offset`` int64, ``timestamp`` timestamp[ms, UTC], ``key`` and ``value`` binary; of these the
        requested ``columns``, in that order. Other columns are not decoded.

        Args:
            bytes_max: Soft limit in log bytes for one Arrow record batch; small record batches of the log are
                joined up to it.
            tally: Called for each block with the number of its records, by the headers of the log's batches;
                once all has been read, the sum is the number of records that must have been yielded.

        Raises:
            OffsetOutOfRangeError: some of [start, end) is gone or not committed; seek to the range
                [error.start, error.end).
            CorruptBatchError: some of [start, end) is damaged. The records before it have been
                yielded; those after it can be read from ``error.end`` on.
            UnknownTopicError, ConfigError: there is no such topic, partition or column.
        """
        select_schema(columns)
        found = self._topic(topic)
        state = self._partition_state(found, partition)
        if start == end:
            return
        check_range(TopicPartition(topic, partition), self._bounds(state), start, end)
        for block in self._blocks(found, partition, start, end, bytes_max):
            given = 0
            for batch in decode_parts(block, start, end, columns):
                if batch.num_rows:
                    given += batch.num_rows
                    yield batch
            if tally is not None:
                said = count_by_headers(block, start, end)
                tally(given if said is None else said)

    def archives(self, topic: str, partition: int, start: int, end: int) -> Iterator[ArchiveFile]:
        """Yield the archives of closed segments with offsets in [start, end), in their order.

        Each is open until the next one is requested, and matches its segment. They hold committed records, so
        a reader of uncommitted ones gets none.

        Raises:
            OffsetOutOfRangeError, UnknownTopicError, ConfigError: as for :meth:`read`.
        """
        found = self._topic(topic)
        state = self._partition_state(found, partition)
        if start == end or self._isolation != "read_committed":
            return
        check_range(TopicPartition(topic, partition), self._bounds(state), start, end)
        folder = partition_folder(self.folder, found, partition)
        names = self._files.names(folder)
        bases = segment_offsets(names)
        first = bases[max(bisect_right(bases, start) - 1, 0)] if bases else 0
        for base in numbered(names, ARCHIVE_SUFFIX):
            if not first <= base < end:
                continue
            try:
                archive = open_fitting(self._files, folder / segment_name(base), base)
            except FileNotFoundError:
                continue  # it was just removed
            except UNREADABLE as error:
                _log.warning(
                    "%s is not read: %s; the records come from their segment. Remove it, and archive "
                    "again",
                    (folder / segment_name(base)).with_suffix(ARCHIVE_SUFFIX),
                    error,
                )
                continue
            if archive is not None:
                with archive:
                    yield archive

    def offset_for_time(self, topic: str, partition: int, timestamp_ms: int) -> int:
        """Return the first offset whose timestamp is ``timestamp_ms`` or later.

        The high watermark if there is none. Uses the index; reads one interval of a segment.

        Raises:
            UnknownTopicError, ConfigError: there is no such topic or partition.
        """
        found = self._topic(topic)
        state = self._partition_state(found, partition)
        end = self._end(state)
        start = self._segment_for_time(found, partition, timestamp_ms, state.log_start)
        if start >= end:
            return end
        for block in self._blocks(found, partition, start, end, _LOOKED_THROUGH_BYTES):
            if all(header.max_timestamp_ms < timestamp_ms for _, header in block.batches):
                continue
            batch = decode(block, start, end, ("offset", "timestamp"))
            times = np.asarray(batch["timestamp"].cast(pa.int64()))
            if (times >= timestamp_ms).any():
                return int(batch["offset"][int(np.argmax(times >= timestamp_ms))].as_py())
        return end

    def _segment_for_time(
        self, topic: TopicMetadata, partition: int, timestamp_ms: int, log_start: int
    ) -> int:
        """Return an offset before which every timestamp is lower, from seals and one index."""
        folder = partition_folder(self.folder, topic, partition)
        bases = segment_offsets(self._files.names(folder))
        for base in bases[:-1]:
            found = seal.read_any(self._files, folder / segment_name(base))
            if found is None or found.max_timestamp_ms >= timestamp_ms:
                break
        else:
            base = bases[-1] if bases else 0
        segment = SegmentReader(self._files, folder / segment_name(base), base)
        return max(segment.offset_before(timestamp_ms), log_start)

    def _blocks(
        self,
        topic: TopicMetadata,
        partition: int,
        start: int,
        end: int,
        block_bytes: int,
        *,
        room: ReadBudget | None = None,
        known: BatchPosition | None = None,
    ) -> Iterator[Block]:
        """Yield the batches that hold [start, end), from one segment after the other.

        Where ``room`` is full, nothing more is read. ``known`` is a hint. Retention may remove a segment
        during the lookup, and compaction may merge it into the one before it: then the folder is listed
        again.
        """
        folder = partition_folder(self.folder, topic, partition)
        names = self._files.names(folder)
        hides = self._isolation == "read_committed"
        aborted_ranges = AbortedTransactions(
            self._aborted(folder, names, start, end) if hides else ()
        )
        offset, vanished = start, -1
        room = room or ReadBudget(start, OFFSET_MAX)
        while offset < end and not room.full:
            bases = segment_offsets(names)
            later = bisect_right(bases, offset)
            base = bases[later - 1] if later else offset
            following = min(end, bases[later]) if later < len(bases) else end
            segment = SegmentReader(self._files, folder / segment_name(base), base)
            try:
                for block in segment.blocks(offset, following, block_bytes, room, known):
                    offset = block.batches[-1][1].next_offset
                    yield _without_aborted(block, aborted_ranges) if aborted_ranges else block
                offset = max(offset, following)
            except FileNotFoundError as error:
                self._check_gone(topic, partition, offset, end)
                if vanished == offset:
                    raise CorruptionError(
                        f"{folder} holds no segment with offset {offset}, which was committed; "
                        "restore the missing file from a backup"
                    ) from error
                vanished = offset
                names = self._files.names(folder)

    def _check_gone(self, topic: TopicMetadata, partition: int, start: int, end: int) -> None:
        """Raise the error if the topic was deleted, or the records removed, since the read began."""
        check_topic_id(topic.name, topic.topic_id, self._topic(topic.name).topic_id)
        state = self._partition_state(topic, partition)
        if start < state.log_start:
            check_range(TopicPartition(topic.name, partition), self._bounds(state), start, end)

    def _aborted(
        self, folder: Path, names: Sequence[str], start: int, end: int
    ) -> list[AbortedTransaction]:
        """Return the aborted transactions with records in [start, end); call it before reading these.

        Their markers lie behind ``start``, and are all there: nothing at or after the last stable offset is
        read.
        """
        bases = numbered(names, aborted.SUFFIX)
        first = max(bisect_right(bases, start) - 1, 0)
        return [
            found
            for base in bases[first:]
            for found in aborted.read_all(self._files, folder / segment_name(base))
            if found.first_offset < end and found.last_offset >= start
        ]

    # -- the mapped state and the catalog -----------------------------------------------------

    def _partition_state(self, topic: TopicMetadata, partition: int) -> PartitionState:
        if not 0 <= partition < len(topic.slots):
            raise no_partition(topic.name, partition, len(topic.slots))
        assert self._state is not None
        slot = topic.slots[partition]
        state = self._state.partition(slot, topic.topic_id, partition)
        return state or self._state_about_to_come(self._state, topic, partition)

    def _state_about_to_come(
        self, mapped: StateFile, topic: TopicMetadata, partition: int
    ) -> PartitionState:
        """Wait for a partition whose owner has committed it to the catalog and publishes it now."""
        found: list[PartitionState] = []

        def published() -> bool:
            state = mapped.partition(topic.slots[partition], topic.topic_id, partition)
            found.extend([state] if state else [])
            return bool(found)

        if not signal_of(self.folder).wait_until(published, _PUBLISH_S_MAX):
            raise CorruptionError(
                f"{self.folder / STATE_NAME} has no whole entry for {topic.name}/{partition}; "
                "open the folder for writing once, to have it recovered"
            )
        return found[0]

    def _topic(self, name: str) -> TopicMetadata:
        self._refresh()
        topic = self._topics.get(name)
        if topic is None:
            raise unknown_topic(name, self._topics)
        check_topic_id(name, self._topic_ids.get(name), topic.topic_id)
        return topic

    def _refresh(self) -> None:
        if self._state is None and not self._open():
            return
        assert self._state is not None
        header = self._state.header()
        if header is None or header.catalog_version == self._catalog_version:
            return
        with catalog_of(self.folder, self._given_control) as catalog:
            self._topics = catalog.topics()
        self._catalog_version = header.catalog_version

    def _open(self) -> bool:
        """Map state.mm; False while the folder is not a log yet."""
        try:
            directory_id = read_format(self.folder, self._files)
            if directory_id is None or not self._files.exists(self.folder / STATE_NAME):
                return False
            state = StateFile(self.folder, self._files, write=False)
        except (OSError, ValueError) as error:  # ValueError: the owner is making the file right now
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(
                f"the log {self.folder} cannot be read: {error}; check the folder's rights, or try "
                "again if it is just being made"
            ) from error
        header = state.header()
        if header is None:
            state.close()
            return False
        check_same_folder(header, directory_id, self.folder)
        self._state = state
        return True


def _without_aborted(block: Block, ranges: AbortedTransactions) -> Block:
    """Return the block without the batches of aborted transactions."""
    return block._replace(batches=[one for one in block.batches if not ranges.covers(one[1])])
