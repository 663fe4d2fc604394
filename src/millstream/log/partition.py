"""One partition as its owner sees it: a row of segments, of which the last one grows.

Offsets are assigned here, by one writer, and never twice: the offsets of a batch that could not be written
are taken back before anybody has seen them. ``reserve`` decides about a batch, ``write`` puts the reserved
ones into the file, ``sync`` makes them durable, ``publish`` shows them to readers; ``group_commit`` calls the
four in that order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from millstream.errors import (
    ConfigError,
    DiskFullError,
    EndMovedError,
    OffsetOutOfRangeError,
    RecordTooLargeError,
    SyncFailedError,
)
from millstream.log.batch import CONTROL, EncodedBatch, read_header
from millstream.log.config import TopicConfig
from millstream.log.files import Files
from millstream.log.markers import is_commit
from millstream.log.producers import ProducerStates
from millstream.log.retention import PartitionContents
from millstream.log.seal import Seal
from millstream.log.segment import Segment, remove_segment, segment_name
from millstream.log.state_file import PartitionState, StateFile
from millstream.record import TopicPartition


class SealedSegment(NamedTuple):
    """A segment that no longer grows."""

    base_offset: int
    seal: Seal

    @property
    def name(self) -> str:
        """Its file name."""
        return segment_name(self.base_offset)


class Partition:
    """The writing end of a partition. Not thread-safe: ``group_commit`` holds the lock.

    Args:
        sealed: The segments before the growing one, in the order of offsets.
        producers: What is known of producers at ``log_end_offset``.
    """

    def __init__(
        self,
        files: Files,
        folder: Path,
        name: TopicPartition,
        *,
        sealed: Sequence[SealedSegment],
        active: Segment,
        log_start: int,
        log_end_offset: int,
        producers: ProducerStates,
        config: TopicConfig,
        clock_ms: Callable[[], int],
        running_ms: Callable[[], int],
    ) -> None:
        self._files = files
        self.folder = folder
        self.name = name
        self.sealed = list(sealed)
        self._active = active
        self.log_start = log_start
        self.log_end_offset = log_end_offset
        self.producers = producers
        self.config = config
        self._clock_ms = clock_ms
        self._running_ms = running_ms
        self._began_ms: int | None = (
            None  # when this process wrote the first record of the growing segment
        )
        self._reserved_end = log_end_offset
        self.dirty = False
        self.closed = False

    # -- appending ----------------------------------------------------------------------------

    def reserve(self, batch: EncodedBatch, expected_end: int | None = None) -> int | None:
        """Assign offsets to a batch and return None; or return its offset if it is there already.

        Args:
            expected_end: Where the partition must end now, with what is reserved.

        Raises:
            EndMovedError: it ends elsewhere.
            ProducerFencedError, OutOfOrderSequenceError: see ``producers``.
            ConfigError: the topic is compacted and a record has no key; a batch holds nothing.
            RecordTooLargeError: the batch is larger than the topic allows.
        """
        self._check_allowed(batch)
        if batch.producer.producer_id >= 0 and not batch.attributes & CONTROL:
            known = self.producers.duplicate_of(self.name, batch)
            if known is not None:
                return known
            self._check_end(expected_end)
            self.producers.add(
                base_offset=self._reserved_end,
                count=batch.count,
                attributes=batch.attributes,
                producer=batch.producer,
                used_ms=self._clock_ms(),
            )
        else:
            self._check_end(expected_end)
        self._reserved_end += batch.count
        return None

    def _check_end(self, expected: int | None) -> None:
        if expected is not None and expected != self._reserved_end:
            raise EndMovedError(
                f"{self.name} ends at offset {self._reserved_end}, not at {expected}: nothing was "
                "appended. Read on, and decide again",
                end=self._reserved_end,
            )

    def write(self, batches: Sequence[EncodedBatch], leader_epoch: int) -> int:
        """Put the reserved batches at the end of the partition; return the offset of the first.

        All of them or none, in one segment.

        Raises:
            DiskFullError: none was written; the partition is as before.
            SyncFailedError: the disk failed; do not write again.
        """
        first = self.log_end_offset
        try:
            if self._should_roll(batches):
                self.roll()
            began_ms = self._began_ms if self._active.size else self._running_ms()
            end = self._active.append(batches, first, leader_epoch)
            self._began_ms = began_ms
        except DiskFullError:
            self.producers.rollback()
            self._reserved_end = first
            raise
        assert end == self._reserved_end, "what was reserved is what is written"
        self.log_end_offset = end
        self.dirty = True
        self._note_markers(batches, first)
        self.producers.commit()
        return first

    def room(self) -> int:
        """Bytes that still fit into the growing segment."""
        return self.config.segment_bytes - self._active.size

    def sync(self) -> None:
        """Return when everything written is on stable storage. OSError: never call it again."""
        if self.dirty:
            self._active.sync()
            self.dirty = False

    def publish(self, state: StateFile, slot: int, topic_id: str) -> None:
        """Show readers everything written so far. Only after :meth:`sync` has returned."""
        assert not self.dirty, "a high watermark above what is synced"
        end = self.log_end_offset
        stable = self.producers.last_stable(end)
        published = PartitionState(self.log_start, stable, end, end)
        state.publish(slot, topic_id, self.name.partition, published)

    def _check_allowed(self, batch: EncodedBatch) -> None:
        if batch.count < 1:
            # It would have the offset of the batch after it, which then could not be read.
            raise ConfigError(
                f"a batch of {batch.count} offsets was sent to topic {self.name.topic!r}; send one "
                "record at least"
            )
        if batch.unkeyed and self.config.compacts:
            raise ConfigError(
                f"a record without a key was sent to topic {self.name.topic!r}, which keeps the "
                "last record of each key; give every record a key, or set cleanup to delete"
            )
        if batch.count == 1 and batch.size > self.config.max_message_bytes + 128:
            raise RecordTooLargeError(
                f"a record of {batch.size:,} bytes is larger than the "
                f"{self.config.max_message_bytes:,} that topic {self.name.topic!r} allows; send a "
                "reference to it, or raise max.message.bytes"
            )

    def _should_roll(self, batches: Sequence[EncodedBatch]) -> bool:
        active = self._active
        if not active.size:
            return False
        size = sum(batch.size for batch in batches)
        latest = max(batch.max_timestamp_ms for batch in batches)
        too_old = active.first_ms is not None and (
            latest - active.first_ms >= self.config.segment_ms
        )
        # Offsets in the index are 32 bits wide, counted from the segment's first.
        too_far = self._reserved_end - active.base_offset >= 1 << 32
        return active.size + size > self.config.segment_bytes or too_old or too_far

    def _note_markers(self, batches: Sequence[EncodedBatch], offset: int) -> None:
        """Remove transactions that have just ended from the open ones, and record the aborted ones."""
        ranges = []
        for batch in batches:
            if batch.attributes & CONTROL:
                data = batch.prefix(offset, 0) + batch.tail
                commit = is_commit(data, 0, read_header(data, 0))
                if commit is not None:
                    aborted = self.producers.end_transaction(batch.producer, offset, commit=commit)
                    ranges += [aborted] if aborted else []
            offset += batch.count
        if ranges:
            self._active.append_aborted(ranges)

    def check_holds(self, before_offset: int) -> None:
        """Check that the records to delete exist.

        Raises:
            OffsetOutOfRangeError: ``before_offset`` is above the log end offset.
        """
        if before_offset > self.log_end_offset:
            raise OffsetOutOfRangeError(
                f"records of {self.name} below {before_offset} cannot "
                f"be deleted: it ends at {self.log_end_offset}; give an offset up to that",
                start=self.log_start,
                end=self.log_end_offset,
            )

    # -- segments -----------------------------------------------------------------------------

    def roll(self) -> None:
        """Close the growing segment and begin another.

        1. Sync the full one. A crash leaves it as the last segment, with a torn tail at worst.
        2. Create the next one and sync the folder (see :meth:`Segment.create`). A crash leaves an
           empty last segment. Since step 1 came first, only the last segment can have a torn tail.
        3. Seal the full one. A crash leaves no seal: it is rebuilt from the segment.

        Raises:
            DiskFullError: there is no room for another segment; nothing has changed.
            SyncFailedError: the disk failed; do not write again.
        """
        try:
            self.sync()
        except OSError as error:
            raise SyncFailedError(
                f"the disk failed to keep {self._active.path} ({error}); nothing more is accepted. "
                "Check the disk, then open the folder again: it will be verified"
            ) from error
        try:
            fresh = Segment.create(self._files, self.folder, self.log_end_offset)
        except OSError as error:
            raise DiskFullError(
                f"no new segment could be made in {self.folder}: {error}; nothing was appended. "
                "Make room on the disk, then send again"
            ) from error
        full, self._active = self._active, fresh
        self.sealed.append(SealedSegment(full.base_offset, self._seal(full)))
        full.close()

    def roll_if_old(self, now_ms: int) -> bool:
        """Close the growing segment if its first record was appended longer ago than ``segment.ms``.

        Records may be older than their arrival, so their timestamps count only where the arrival is not
        known: in the segment that a new owner finds, whose timestamps are compared with ``now_ms``.
        """
        if not self._active.size or self._age_ms(now_ms) < self.config.segment_ms:
            return False
        self.roll()
        return True

    def _age_ms(self, now_ms: int) -> int:
        if self._began_ms is not None:
            return self._running_ms() - self._began_ms
        first_ms = self._active.first_ms
        return 0 if first_ms is None else now_ms - first_ms

    def drop_below_start(self) -> int:
        """Remove the sealed segments that are below the log start; return how many.

        OSError: some could not be removed; call it again later.
        """
        dropped = 0
        while self.has_below_start:
            remove_segment(self._files, self.folder, self.sealed[0].base_offset)
            del self.sealed[0]  # only now: what could not be removed is retried
            dropped += 1
        return dropped

    @property
    def has_below_start(self) -> bool:
        """Whether a sealed segment is below the log start, and is still there."""
        return bool(self.sealed) and self.sealed[0].seal.next_offset <= self.log_start

    @property
    def active_base(self) -> int:
        """The first offset of the growing segment."""
        return self._active.base_offset

    @property
    def active_size(self) -> int:
        """Bytes in the growing segment."""
        return self._active.size

    def contents(self) -> PartitionContents:
        """Return what retention needs to know."""
        return PartitionContents(
            self.name,
            self.config,
            self.log_start,
            self.producers.last_stable(self.log_end_offset),
            [one.seal for one in self.sealed if one.seal.next_offset > self.log_start],
            self._active.size,
        )

    @property
    def files(self) -> Files:
        """The file system that the partition is on."""
        return self._files

    def path_of(self, segment: SealedSegment) -> Path:
        """Return the .log file of a sealed segment."""
        return self.folder / segment.name

    def close(self, *, seal: bool = False) -> None:
        """Close the files; nothing may be written from here on.

        With ``seal``, the growing segment gets a seal, so that the next owner need not read it. Everything
        must be synced.
        """
        self.closed = True
        if seal and not self.dirty:
            self._seal(self._active)
        self._active.close()

    def _seal(self, segment: Segment) -> Seal:
        # Batches reserved and not yet written belong to the next segment.
        producers = self.producers.committed()
        # A seal is a copy of what the segment says: a disk without room for it fails nothing.
        with suppress(OSError):
            return segment.seal(self.log_end_offset, producers)
        return segment.facts(self.log_end_offset, producers)
