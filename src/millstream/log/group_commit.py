"""Group commit: what an acknowledgement means, and why many of them cost one sync.

Appends from any number of threads gather in a queue. One thread at a time takes all of them and commits them;
the others wait, and appends that arrive meanwhile are the next group. A commit is

1. Write every batch to its segment. A crash leaves a torn tail: recovery cuts what is not whole.
2. One fdatasync for each segment written to. A crash leaves whole batches that were not acknowledged:
   recovery keeps them.
3. Publish the high watermarks in state.mm. A crash leaves records that readers may have seen and
   that were not acknowledged: they are durable, and remain.
4. Acknowledge. Now the records survive the loss of power; not the loss of the disk.

The durability of an append says which step it waits for:

===========  ================================  ===============================================
durability   acknowledged                      an acknowledged record survives
===========  ================================  ===============================================
synced       after step 3 (the default)        the loss of power
written      after step 1; synced at once in   the death of the process; what was acknowledged
             the background                    within the last sync may be lost with the power
periodic     after step 1; synced every        the same, with up to a second of records
             ``SYNC_EVERY_S``                  at stake, for fewer syncs
===========  ================================  ===============================================

Readers see a record after step 3 in every case: what is seen is never lost.

A sync that failed is never retried: the kernel may have dropped the dirty pages, so that the
next one would succeed without them. The log stops, and is verified when it is opened again.

Source: Rebello et al., "Can Applications Recover from fsync Failures?", USENIX ATC 2020.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, get_args

from millstream.errors import (
    DiskFullError,
    MillstreamError,
    SyncFailedError,
    UnknownTopicError,
)
from millstream.log.batch import EncodedBatch
from millstream.log.partition import Partition
from millstream.metrics.histogram import SYNC_TIMES
from millstream.record import TopicPartition
from millstream.threads import Threads

Durability = Literal["synced", "written", "periodic"]
DURABILITIES: tuple[str, ...] = get_args(Durability)
SYNC_EVERY_S = 1.0


class PendingAppend:
    """One batch in flight to one partition; ``offset`` or ``error`` is set when it is done.

    The same object goes from a producer, a client of the owner or the broker to the disk. ``partition`` is
    known in the owner's process only; :meth:`LogWriter.commit` sets it where it is not given.
    With ``expected_end``, the batch is appended at this offset or not at all; with ``topic_id``, to the topic
    with this id or not at all.
    """

    __slots__ = (
        "batch",
        "done",
        "error",
        "expected_end",
        "name",
        "offset",
        "partition",
        "topic_id",
    )

    def __init__(
        self,
        name: TopicPartition,
        batch: EncodedBatch,
        partition: Partition | None = None,
        *,
        expected_end: int | None = None,
        topic_id: str | None = None,
    ) -> None:
        self.name = name
        self.expected_end = expected_end
        self.topic_id = topic_id
        self.partition = partition
        self.batch = batch
        self.offset = -1
        self.error: MillstreamError | None = None
        self.done = False


@dataclass(slots=True)
class _WriteRun:
    """Batches that are written together: all of them or none.

    Those in ``again`` repeat batches of it, at the given offsets, so they share its result.
    """

    fresh: list[PendingAppend] = field(default_factory=list)
    again: list[tuple[PendingAppend, int]] = field(default_factory=list)


class GroupCommit:
    """Commits appends of many threads together.

    Args:
        leader_epoch: Stamped into every batch.
        admit: Called with each batch before it is written; raises to reject it.
        publish: Called with the partitions just synced; makes their records visible.
        stop: Called once when the disk failed; marks the folder for the next opening.
        sync_threads: How many segments are synced at the same time.
        background: A thread syncs what was only written; without it, call :meth:`sync`.
    """

    def __init__(
        self,
        *,
        leader_epoch: int,
        admit: Callable[[EncodedBatch], None],
        publish: Callable[[Iterable[Partition]], None],
        stop: Callable[[MillstreamError], None],
        sync_threads: int = 4,
        background: bool = True,
    ) -> None:
        self._leader_epoch = leader_epoch
        self._admit = admit
        self._publish = publish
        self._stop = stop
        self._unsynced: dict[int, Partition] = {}  # by id(); written, but not synced
        self._syncer = _Syncer(self.sync) if background else None
        self._queue: list[PendingAppend] = []
        self._queue_lock = threading.Lock()
        self._commit_lock = threading.Lock()
        self.failure: MillstreamError | None = None  # why nothing more is accepted
        self.healthy = True  # no sync has failed
        SYNC_TIMES.begin()
        self._pool = Threads(sync_threads, "millstream-sync") if sync_threads > 1 else None

    def append(self, appends: Sequence[PendingAppend], durability: Durability = "synced") -> None:
        """Return when every append is as durable as asked, or has failed with its ``error`` set.

        The batches for one partition keep their order; after one fails as the disk is full, so do those after
        it.
        """
        if durability == "synced":
            with self._queue_lock:
                self._queue += appends
            with self._commit_lock:
                # Whoever held the lock before may have committed ours along with its own.
                if not all(append.done for append in appends):
                    self._commit()
            return
        with self._commit_lock:
            self._commit_group(appends, sync=False)
            waiting = bool(self._unsynced)
        if waiting and self._syncer is not None:
            self._syncer.wake(at_once=durability == "written")

    def sync(self) -> None:
        """Return when everything written so far is durable and visible.

        Raises:
            SyncFailedError: the disk failed; nothing more is accepted.
        """
        with self._commit_lock:
            if self._unsynced:
                self._commit_group((), sync=True)
            self.check_open()

    def exclusively(self, action: Callable[[], None], *, synced: bool = False) -> None:
        """Run ``action`` while nothing is being committed; with ``synced``, after a sync of all."""
        with self._commit_lock:
            if synced and self._unsynced:
                self._commit_group((), sync=True)
                self.check_open()
            try:
                action()
            except SyncFailedError as error:
                self._fail(error)
                raise

    @contextmanager
    def stopping(self) -> Iterator[None]:
        """Accept nothing more if a sync in the block fails."""
        try:
            yield
        except SyncFailedError as error:
            with self._commit_lock:
                self._fail(error)
            raise

    def close(self, reason: MillstreamError) -> None:
        """Sync what was written, and refuse every append from now on, for ``reason``.

        Raises:
            SyncFailedError: records that were acknowledged when they were written may be lost.
        """
        if self._syncer is not None:
            self._syncer.stop()
        with self._commit_lock:
            healthy = self.failure is None
            if self._unsynced and healthy:
                self._commit_group((), sync=True)
            failed = self.failure if healthy else None
            self.failure = self.failure or reason
        if self._pool is not None:
            self._pool.close()
        if failed is not None:
            raise failed

    def disable(self, reason: MillstreamError) -> None:
        """Refuse everything in a forked child, whatever its parent's threads were doing."""
        self._queue_lock, self._commit_lock = threading.Lock(), threading.Lock()
        self._queue, self._pool, self._syncer, self.failure = [], None, None, reason

    def _commit(self) -> None:
        with self._queue_lock:
            group, self._queue = self._queue, []
        self._commit_group(group, sync=True)

    def _commit_group(self, group: Sequence[PendingAppend], *, sync: bool) -> None:
        try:
            self.check_open()
            for partition in self._write(group):
                self._unsynced[id(partition)] = partition
            if sync:
                synced = [one for one in self._unsynced.values() if not one.closed]
                self._sync(synced)
                self._unsynced.clear()
                self._publish(synced)
        except MillstreamError as error:
            self._fail(error)
            for append in group:
                append.error = append.error or error
        except BaseException as error:
            self.failure = SyncFailedError(f"a commit was interrupted ({error!r}); open it again")
            self.healthy = False
            for append in group:
                append.error = append.error or self.failure
            raise
        finally:
            for append in group:
                append.done = True

    def _fail(self, error: MillstreamError) -> None:
        """Accept nothing more, and mark the folder; only the first failure counts."""
        if self.failure is None:
            self.failure, self.healthy = error, False
            self._stop(error)

    def check_open(self) -> None:
        """Raise the reason if nothing more is accepted."""
        if self.failure is not None:
            raise self.failure

    def _write(self, group: Sequence[PendingAppend]) -> list[Partition]:
        """Write a group; return the partitions that were written to."""
        by_partition: dict[int, list[PendingAppend]] = {}
        for append in group:
            by_partition.setdefault(id(append.partition), []).append(append)
        written = []
        for appends in by_partition.values():
            partition = appends[0].partition
            assert partition is not None, "the writer has looked it up"
            before = partition.log_end_offset
            self._write_partition(partition, appends)
            if partition.log_end_offset > before:
                written.append(partition)
        return written

    def _write_partition(self, partition: Partition, appends: Sequence[PendingAppend]) -> None:
        if partition.closed:  # its files are gone, and their handles may be reused by now
            for append in appends:
                append.error = UnknownTopicError(
                    f"topic {partition.name.topic!r} was deleted while records were on their way "
                    "to it; create it, or send elsewhere"
                )
            return
        run = _WriteRun()
        room = partition.room()
        for place, append in enumerate(appends):
            if run.fresh and room < append.batch.size:
                if not self._write_run(partition, run, appends[place:]):
                    return
                run, room = _WriteRun(), partition.room()
            try:
                self._admit(append.batch)
                known = partition.reserve(append.batch, append.expected_end)
            except MillstreamError as error:
                append.error = error  # the others are not affected
                continue
            if known is None:
                run.fresh.append(append)
                room -= append.batch.size
            elif known < partition.log_end_offset:
                append.offset = known
            else:  # it was sent twice, and the first one is not written yet
                run.again.append((append, known))
        if run.fresh:
            self._write_run(partition, run, ())

    def _write_run(
        self, partition: Partition, run: _WriteRun, behind: Sequence[PendingAppend]
    ) -> bool:
        """Write reserved batches together; False if the disk is full, for the batches behind them, too."""
        try:
            offset = partition.write([append.batch for append in run.fresh], self._leader_epoch)
        except DiskFullError as error:
            for append in (*run.fresh, *(append for append, _ in run.again), *behind):
                append.error = error
            return False
        for append in run.fresh:
            append.offset = offset
            offset += append.batch.count
        for append, known in run.again:
            append.offset = known
        return True

    def _sync(self, partitions: Sequence[Partition]) -> None:
        began_s = time.monotonic()
        try:
            if self._pool is None or len(partitions) < 2:
                for partition in partitions:
                    partition.sync()
            else:
                _all_of(self._pool, [partition.sync for partition in partitions])
            if partitions:
                SYNC_TIMES.add(time.monotonic() - began_s)
        except OSError as error:
            raise SyncFailedError(
                f"the disk failed to keep what was written ({error}); nothing more is accepted. "
                "Check the disk, then open the folder again: it will be verified"
            ) from error


def _all_of(pool: Threads, syncs: Sequence[Callable[[], None]]) -> None:
    """Make all of these at the same time, one of them here; raise the first error once all have ended."""
    others = [pool.submit(one) for one in syncs[1:]]
    try:
        syncs[0]()
    finally:
        wait(others)
    for one in others:
        one.result()


class _Syncer:
    """The thread that syncs batches that were acknowledged before their sync."""

    def __init__(self, sync: Callable[[], None]) -> None:
        self._sync = sync
        self._changed = threading.Condition()
        self._due_s: float | None = None
        self._stopped = False
        self._thread: threading.Thread | None = None

    def wake(self, *, at_once: bool) -> None:
        """Schedule a sync: now, or within ``SYNC_EVERY_S``."""
        due_s = time.monotonic() + (0 if at_once else SYNC_EVERY_S)
        with self._changed:
            if self._thread is None and not self._stopped:
                self._thread = threading.Thread(
                    target=self._run, name="millstream-syncer", daemon=True
                )
                self._thread.start()
            if self._due_s is None or due_s < self._due_s:
                self._due_s = due_s
                self._changed.notify()

    def stop(self) -> None:
        """End the thread; the caller syncs the rest."""
        with self._changed:
            self._stopped = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._stopped and (self._due_s is None or self._due_s > time.monotonic()):
                    left = None if self._due_s is None else self._due_s - time.monotonic()
                    self._changed.wait(left)
                if self._stopped:
                    return
                self._due_s = None
            try:
                self._sync()
            except MillstreamError:
                return  # the failure is kept by the group commit, and refuses every append
