"""One partition as its owner sees it: a row of segments, of which the last one grows.

Offsets are given out here, by one writer, and never twice: a batch that could not be written takes
its offsets back before anybody has seen them. ``write`` puts batches into the file, ``sync`` makes
them durable, ``publish`` shows them to readers; ``group_commit`` calls the three in that order.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from millstream.errors import DiskFullError, SyncFailedError
from millstream.log.batch import EncodedBatch
from millstream.log.files import Files
from millstream.log.segment import Segment
from millstream.log.state_file import PartitionState, StateFile
from millstream.record import TopicPartition


class Partition:
    """The writing end of a partition. Not thread-safe: ``group_commit`` holds the lock."""

    def __init__(
        self,
        files: Files,
        folder: Path,
        name: TopicPartition,
        *,
        active: Segment,
        log_start: int,
        log_end_offset: int,
        segment_bytes_max: int,
    ) -> None:
        self._files = files
        self._folder = folder
        self.name = name
        self._active = active
        self._log_start = log_start
        self.log_end_offset = log_end_offset
        self._segment_bytes_max = segment_bytes_max
        self._dirty = False
        self.closed = False

    def write(self, batches: Sequence[EncodedBatch], leader_epoch: int) -> int:
        """Put batches at the end of the partition; return the offset of the first.

        All of them or none, in one segment.

        Raises:
            DiskFullError: none was written; the partition is as before.
            SyncFailedError: the disk failed; do not write again.
        """
        first = self.log_end_offset
        size = sum(batch.size for batch in batches)
        if self._active.size and self._active.size + size > self._segment_bytes_max:
            self._roll()
        self.log_end_offset = self._active.append(batches, first, leader_epoch)
        self._dirty = True
        return first

    def room(self) -> int:
        """Bytes that still fit into the growing segment."""
        return self._segment_bytes_max - self._active.size

    def sync(self) -> None:
        """Return when everything written is on stable storage. OSError: never call it again."""
        if self._dirty:
            self._active.sync()
            self._dirty = False

    def publish(self, state: StateFile, slot: int, topic_id: str) -> None:
        """Show readers everything written so far. Only after :meth:`sync` has returned."""
        assert not self._dirty, "a high watermark above what is synced"
        end = self.log_end_offset
        published = PartitionState(self._log_start, end, end, end)
        state.publish(slot, topic_id, self.name.partition, published)

    def close(self) -> None:
        """Let go of the files; nothing may be written from here on."""
        self.closed = True
        self._active.close()

    def _roll(self) -> None:
        """Begin a new segment.

        1. Sync the full one. A crash leaves it as the last segment, with a torn tail at worst.
        2. Create the next one and sync the folder (see :meth:`Segment.create`). A crash leaves an
           empty last segment. Since step 1 came first, only the last segment can have a torn tail.
        """
        try:
            self.sync()
        except OSError as error:
            raise SyncFailedError(
                f"the disk failed to keep {self._active.path} ({error}); nothing more is accepted. "
                "Check the disk, then open the folder again: it will be verified"
            ) from error
        try:
            fresh = Segment.create(self._files, self._folder, self.log_end_offset)
        except OSError as error:
            raise DiskFullError(
                f"no new segment could be made in {self._folder}: {error}; nothing was appended. "
                "Make room on the disk, then send again"
            ) from error
        self._active.close()
        self._active = fresh
