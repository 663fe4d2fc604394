"""Group commit: what an acknowledgement means, and why many of them cost one sync.

Appends from any number of threads gather in a queue. One thread at a time takes all that is there
and commits it; the others wait, and what gathers meanwhile is the next group. A commit is

1. Write every batch to its segment. A crash leaves a torn tail: recovery cuts what is not whole.
2. One fdatasync for each segment written to. A crash leaves whole batches that nobody was told of:
   recovery keeps them.
3. Publish the high watermarks in state.mm. A crash leaves records that readers may have seen and
   whose producers were not told: they are durable, and stay.
4. Acknowledge. Now the records survive the loss of power; not the loss of the disk.

A sync that failed is never tried again: the kernel may have dropped the dirty pages, so that the
next one would succeed without them. The log stops, and is verified when it is opened again.

Source: Rebello et al., "Can Applications Recover from fsync Failures?", USENIX ATC 2020.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

from millstream.errors import (
    DiskFullError,
    MillstreamError,
    SyncFailedError,
    UnknownTopicError,
)
from millstream.log.batch import EncodedBatch
from millstream.log.partition import Partition


class PendingAppend:
    """One batch on its way into one partition; ``offset`` or ``error`` is set when it is done."""

    __slots__ = ("batch", "done", "error", "offset", "partition")

    def __init__(self, partition: Partition, batch: EncodedBatch) -> None:
        self.partition = partition
        self.batch = batch
        self.offset = -1
        self.error: MillstreamError | None = None
        self.done = False


class GroupCommit:
    """Commits appends of many threads together.

    Args:
        leader_epoch: Stamped into every batch.
        publish: Called with the partitions just synced; makes their records visible.
        stop: Called once when the disk failed; leaves word for the next opening.
        sync_threads: How many segments are synced at the same time.
    """

    def __init__(
        self,
        *,
        leader_epoch: int,
        publish: Callable[[Iterable[Partition]], None],
        stop: Callable[[MillstreamError], None],
        sync_threads: int = 4,
    ) -> None:
        self._leader_epoch = leader_epoch
        self._publish = publish
        self._stop = stop
        self._queue: list[PendingAppend] = []
        self._queue_lock = threading.Lock()
        self._commit_lock = threading.Lock()
        self.failure: MillstreamError | None = None  # why nothing more is accepted
        self._pool = (
            ThreadPoolExecutor(sync_threads, "millstream-sync") if sync_threads > 1 else None
        )

    def append(self, appends: Sequence[PendingAppend]) -> None:
        """Return when every append is durable and visible, or has failed with its ``error`` set.

        The batches for one partition keep their order; after one fails, so do those behind it.
        """
        with self._queue_lock:
            self._queue += appends
        with self._commit_lock:
            # Whoever held the lock before may have committed ours along with its own.
            if not all(append.done for append in appends):
                self._commit()

    def exclusively(self, action: Callable[[], None]) -> None:
        """Run ``action`` while nothing is being committed."""
        with self._commit_lock:
            action()

    def close(self, reason: MillstreamError) -> None:
        """Refuse every append from now on, for ``reason``."""
        with self._commit_lock:
            self.failure = self.failure or reason
        if self._pool is not None:
            self._pool.shutdown()

    def disable(self, reason: MillstreamError) -> None:
        """Refuse everything in a forked child, whatever its parent's threads were doing."""
        self._queue_lock, self._commit_lock = threading.Lock(), threading.Lock()
        self._queue, self._pool, self.failure = [], None, reason

    def _commit(self) -> None:
        with self._queue_lock:
            group, self._queue = self._queue, []
        try:
            self._check()
            written = self._write(group)
            self._sync(written)
            self._publish(written)
        except MillstreamError as error:
            if self.failure is None:
                self.failure = error
                self._stop(error)
            for append in group:
                append.error = append.error or error
        except BaseException as error:
            self.failure = SyncFailedError(f"a commit was interrupted ({error!r}); open it again")
            for append in group:
                append.error = append.error or self.failure
            raise
        finally:
            for append in group:
                append.done = True

    def _check(self) -> None:
        if self.failure is not None:
            raise self.failure

    def _write(self, group: Sequence[PendingAppend]) -> list[Partition]:
        """Write a group; return the partitions that took something."""
        by_partition: dict[int, list[PendingAppend]] = {}
        for append in group:
            by_partition.setdefault(id(append.partition), []).append(append)
        written = []
        for appends in by_partition.values():
            partition = appends[0].partition
            before = partition.log_end_offset
            self._write_partition(partition, appends)
            if partition.log_end_offset > before:
                written.append(partition)
        return written

    def _write_partition(self, partition: Partition, appends: Sequence[PendingAppend]) -> None:
        if partition.closed:  # its files are gone, and their handles may be others' by now
            for append in appends:
                append.error = UnknownTopicError(
                    f"topic {partition.name.topic!r} was deleted while records were on their way "
                    "to it; create it, or send elsewhere"
                )
            return
        start = 0
        while start < len(appends):
            stop = start + _fitting(appends[start:], partition.room())
            run = appends[start:stop]
            try:
                offset = partition.write([append.batch for append in run], self._leader_epoch)
            except DiskFullError as error:
                for append in appends[start:]:
                    append.error = error
                return
            for append in run:
                append.offset = offset
                offset += append.batch.count
            start = stop

    def _sync(self, partitions: Sequence[Partition]) -> None:
        try:
            if self._pool is None or len(partitions) < 2:
                for partition in partitions:
                    partition.sync()
            else:
                list(self._pool.map(Partition.sync, partitions))
        except OSError as error:
            raise SyncFailedError(
                f"the disk failed to keep what was written ({error}); nothing more is accepted. "
                "Check the disk, then open the folder again: it will be verified"
            ) from error


def _fitting(appends: Sequence[PendingAppend], room: int) -> int:
    """Return how many of the appends go into ``room`` bytes, but at least one."""
    for count, append in enumerate(appends):
        room -= append.batch.size
        if room < 0:
            return max(count, 1)
    return len(appends)
