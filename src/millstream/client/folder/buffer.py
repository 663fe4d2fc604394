"""The producer batches in flight, in the order of their sends, bounded in bytes.

A producer batch is *queued* until the sender thread, or the thread that moves it to disk, *takes* it;
then it is *moving* until it needs no room any more, and has its result. Queued and moving batches together
are *in flight* and never take more than the limit, unless a single record does. Per partition only the last
batch accepts records, so the order within a partition is the order of the batches.

It does not handle overload: it reports that there is no room; see ``overload``.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable

from millstream.client.folder.producer_batch import BulkBatch, OpenBatch, ProducerBatch
from millstream.client.futures import SendFuture
from millstream.errors import MillstreamError
from millstream.record import Headers, TopicPartition

PRODUCER_BATCH_BYTES_MAX = 1 << 20


class ProducerBuffer:
    """Producer batches in flight. Thread-safe; hold ``changed`` to read and act atomically.

    Args:
        limit_bytes: How much may be in flight.
        linger_s: How long a batch may wait for more records, at most. It waits for a quarter of the duration
            of the last commit, and no longer once as many records are queued as were in flight when that
            ended: then every thread that waited for it has sent again.
    """

    def __init__(self, *, limit_bytes: int, linger_s: float) -> None:
        self.limit_bytes = limit_bytes
        # The sender takes half at most, so that the other half can be queued, or dropped.
        self._take_bytes = max(limit_bytes // 2, 1)
        self.batch_bytes = min(PRODUCER_BATCH_BYTES_MAX, max(limit_bytes // 4, 1))
        self._linger_s = linger_s
        self._gather_s = linger_s
        self._expected_records = math.inf
        self._committed_s = 0.0
        self._lock = threading.Lock()
        self.changed = threading.Condition(self._lock)
        self._queue: deque[ProducerBatch] = deque()
        self._open: dict[tuple[str, int], OpenBatch] = {}
        self._queued_bytes = 0
        self._moving_bytes = 0
        self._unreported_batches = 0  # moving, or appended and not reported yet
        self._first_queued_s = 0.0
        self._urgent = 0  # how many threads wait for something here
        self._flushing = 0  # how many of them in a flush, and since when
        self._flushing_since_s = 0.0
        self.dropped = 0
        self.refusal: BaseException | None = None  # why nothing is accepted now
        self.unreported: MillstreamError | None = None  # the error that the next flush raises
        self.first_failure: MillstreamError | None = None  # since it was last set to None
        self.failure: BaseException | None = None  # why nothing will be accepted any more
        self.reported = False  # and whether a caller got that error
        self.giving_up = False  # records in flight need not be sent any more
        self.closing = False

    # -- putting in ---------------------------------------------------------------------------

    def add_record(  # noqa: PLR0917 - called for every record, where keyword arguments cost time
        self,
        name: tuple[str, int],
        timestamp_ms: int,
        key: bytes | None,
        value: bytes | None,
        headers: Headers,
        size: int,
    ) -> SendFuture | None:
        """Accept one record of ``size`` bytes; None if there is no room.

        Raises:
            MillstreamError: nothing is accepted now, or any more.
        """
        with self._lock:
            queued = self._queued_bytes
            in_flight_bytes = queued + self._moving_bytes
            if self.refusal is not None:
                self._refuse()
            if in_flight_bytes and in_flight_bytes + size > self.limit_bytes:
                return None
            batch = self._open.get(name)
            if batch is None or batch.size + size > self.batch_bytes:
                batch = self._open[name] = OpenBatch(TopicPartition(*name))
                self._queue.append(batch)
            future = SendFuture(batch.send_result, batch.next_index)
            batch.add(timestamp_ms, key, value, headers, size)
            self._queued_bytes = queued + size
            if not queued:
                self._first_queued_s = time.monotonic()
                self.changed.notify_all()
            elif queued < PRODUCER_BATCH_BYTES_MAX <= queued + size or (
                batch.count == self._expected_records
            ):
                self.changed.notify_all()
        return future

    def add_batch(self, batch: BulkBatch) -> bool:
        """Accept an encoded batch; False if there is no room.

        Raises:
            MillstreamError: nothing is accepted now, or any more.
        """
        with self._lock:
            self._refuse()
            if not self.fits(batch.size):
                return False
            self._open.pop(batch.name, None)  # later records must not go before it
            if not self._queue:
                self._first_queued_s = time.monotonic()
            self._queue.append(batch)
            self._queued_bytes += batch.size
            self.changed.notify_all()
        return True

    def fits(self, size: int) -> bool:
        """Return whether there is room for ``size`` bytes; one record alone always has room."""
        in_flight_bytes = self._queued_bytes + self._moving_bytes
        return not in_flight_bytes or in_flight_bytes + size <= self.limit_bytes

    @property
    def pending_bytes(self) -> int:
        """Bytes queued and moving."""
        return self._queued_bytes + self._moving_bytes

    @property
    def busy(self) -> bool:
        """Whether there are records whose futures are not complete."""
        return bool(self._queue) or self._unreported_batches > 0

    def check(self) -> None:
        """Raise the error if nothing is accepted now."""
        with self._lock:
            self._refuse()

    def _refuse(self) -> None:
        if self.refusal is not None:
            self.reported = self.reported or self.refusal is self.failure
            # The same error is raised many times: its traceback must not grow.
            raise self.refusal.with_traceback(None)

    # -- waiting ------------------------------------------------------------------------------

    def wait(self, until: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Hurry the sender, and wait; return the last result of ``until``. Called locked."""
        end_s = None if timeout_s is None else time.monotonic() + timeout_s
        self._urgent += 1
        self.changed.notify_all()
        try:
            while not until():
                left_s = None if end_s is None else end_s - time.monotonic()
                if left_s is not None and left_s <= 0:
                    return False
                self.changed.wait(left_s)
            return True
        finally:
            self._urgent -= 1

    def wait_for_room(self, size: int, timeout_s: float) -> bool:
        """Return whether there is room for ``size`` bytes, after waiting if need be.

        Raises:
            MillstreamError: the producer has failed.
        """
        with self._lock:
            found = self.wait(lambda: self.fits(size) or self.refusal is not None, timeout_s)
            self._refuse()
            return found

    def flush(self, settled: Callable[[], bool]) -> None:
        """Hurry the sender; return when ``settled``.

        Raises:
            MillstreamError: records sent since the last flush were not appended, or the producer has failed.
        """
        with self._lock:
            if not self._flushing:
                self._flushing_since_s = time.monotonic()
            self._flushing += 1
            try:
                self.wait(lambda: self.failure is not None or settled())
            finally:
                self._flushing -= 1
            error, self.unreported = self.unreported, None
            if self.failure is not None:
                self.reported = True
                raise self.failure.with_traceback(None)
        if error is not None:
            raise error

    def flush_waited_s(self) -> float:
        """Return for how long a thread has been waiting in a flush; infinity if the producer gives up."""
        if self.closing or self.giving_up:
            return math.inf
        return time.monotonic() - self._flushing_since_s if self._flushing else 0.0

    @property
    def has_waiters(self) -> bool:
        """Whether a thread waits for records in flight."""
        return bool(self._urgent) or self.closing

    # -- taking out; the sender ---------------------------------------------------------------

    def wait_due(self, unless: Callable[[], bool] = lambda: False) -> bool:
        """Wait until queued batches are due; False once there are none and never will be.

        Returns early if ``unless`` returns True.
        """
        with self._lock:
            while not unless():
                if self._queue:
                    due_s = self._due_s() - time.monotonic()
                    if (
                        due_s <= 0
                        or self._queued_bytes >= PRODUCER_BATCH_BYTES_MAX
                        or self.has_waiters
                    ):
                        return True
                    self.changed.wait(due_s)
                elif self.closing:
                    return False
                else:
                    self.changed.wait()
            return True

    def _due_s(self) -> float:
        """Return when queued batches are due; see ``linger_s``. Called locked."""
        if self._queued_records() >= self._expected_records:
            return 0.0
        since_s = max(self._first_queued_s, self._committed_s)
        return since_s + min(self._linger_s, self._gather_s)

    def _queued_records(self) -> int:
        return sum(batch.count for batch in self._queue)

    def record_commit(self, batches: Iterable[ProducerBatch], took_s: float) -> None:
        """Adapt the time to wait for more records to the duration of a commit."""
        with self._lock:
            self._gather_s = took_s / 4
            self._committed_s = time.monotonic()
            moved = sum(batch.count for batch in batches)
            self._expected_records = moved + self._queued_records()

    def pause(self, pause_s: float) -> None:
        """Wait ``pause_s``, or less if a thread begins to wait for records in flight."""
        end_s = time.monotonic() + pause_s
        with self._lock:
            waiting = self._urgent + self.closing
            while self._urgent + self.closing <= waiting:
                left_s = end_s - time.monotonic()
                if left_s <= 0:
                    return
                self.changed.wait(left_s)

    def drain(self, *, everything: bool = False) -> list[ProducerBatch]:
        """Take queued batches, in order; half of the limit, or one batch, if not ``everything``."""
        taken: list[ProducerBatch] = []
        size = 0
        with self._lock:
            while self._queue:
                if taken and not everything and size + self._queue[0].size > self._take_bytes:
                    break
                batch = self._queue.popleft()
                taken.append(batch)
                size += batch.size
                if self._open.get(batch.name) is batch:
                    del self._open[batch.name]
            self._queued_bytes -= size
            self._moving_bytes += size
            self._unreported_batches += len(taken)
        return taken

    def requeue(self, batches: Collection[ProducerBatch]) -> None:
        """Return taken batches to the front of the queue."""
        size = sum(batch.size for batch in batches)
        with self._lock:
            self._queue.extendleft(reversed(list(batches)))
            self._queued_bytes += size
            self._moving_bytes -= size
            self._unreported_batches -= len(batches)
            self.changed.notify_all()

    def release(self, batches: Iterable[ProducerBatch]) -> None:
        """Release the room of moving batches. Then complete them, and call :meth:`mark_reported`."""
        size = sum(batch.size for batch in batches)
        with self._lock:
            self._moving_bytes -= size
            self.changed.notify_all()

    def mark_reported(self, batches: Collection[ProducerBatch]) -> None:
        """Count batches as complete."""
        with self._lock:
            self._unreported_batches -= len(batches)
            self.changed.notify_all()

    # -- what is not appended -----------------------------------------------------------------

    def drop_oldest(self, size: int, error: MillstreamError) -> bool:
        """Drop queued records until ``size`` bytes fit; False, and none is dropped, if they never do.

        Raises:
            MillstreamError: the producer has failed.
        """
        hit: list[ProducerBatch] = []
        with self._lock:
            self._refuse()
            if self._moving_bytes and self._moving_bytes + size > self.limit_bytes:
                return False
            while not self.fits(size):
                hit.append(self._queue[0])
                self._drop_from(self._queue[0], size, error)
        for batch in hit:  # callbacks of futures run here, and may send
            if isinstance(batch, OpenBatch):
                batch.send_result.notify()
            else:
                batch.failed(error)
        return True

    def _drop_from(self, batch: ProducerBatch, size: int, error: MillstreamError) -> None:
        before, left = batch.size, 0
        if isinstance(batch, OpenBatch):
            over = self._queued_bytes + self._moving_bytes + size - self.limit_bytes
            count = batch.drop_oldest(over, error)
            left = batch.size
        else:
            count = batch.count
        if not left:
            self._queue.popleft()
            if self._open.get(batch.name) is batch:
                del self._open[batch.name]
        self._queued_bytes -= before - left
        self._note(error, count)

    def record_failure(self, error: MillstreamError, *, dropped: int = 0) -> None:
        """Note that records were not appended; ``dropped`` of them as there was no room."""
        with self._lock:
            self._note(error, dropped)

    def _note(self, error: MillstreamError, dropped: int) -> None:
        self.dropped += dropped
        self.unreported = self.unreported or error
        self.first_failure = self.first_failure or error

    def discard(self, error: BaseException) -> None:
        """Fail every queued batch with ``error``."""
        batches = self.drain(everything=True)
        self.release(batches)
        for batch in batches:
            batch.failed(error)
        self.mark_reported(batches)

    def fail(self, error: BaseException) -> None:
        """Reject every later record with ``error``, and fail every queued batch."""
        with self._lock:
            self.failure = self.refusal = self.failure or error
            self.changed.notify_all()
        self.discard(error)

    def refuse(self, error: MillstreamError) -> None:
        """Reject every later record with ``error``; records in flight continue."""
        with self._lock:
            self.refusal = self.failure or error
            self.changed.notify_all()

    def close(self) -> None:
        """Let the sender end once nothing is queued."""
        with self._lock:
            self.closing = True
            self.changed.notify_all()

    def disable(self, error: MillstreamError) -> None:
        """Reject every record in a forked child, whatever the parent's threads were doing."""
        self._lock = threading.Lock()
        self.changed = threading.Condition(self._lock)
        self.failure = self.refusal = error
