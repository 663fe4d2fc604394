"""Futures of records: one send result for a whole batch, and a light future for each record in it.

A batch is appended or rejected as a whole, so the result of a record follows from its index in the batch and
the result of the batch. A future holds only these two; completing a batch of ten thousand records costs one
assignment. Only a future that is given a callback, or to ``concurrent.futures.wait`` or ``asyncio``, becomes
a full ``Future`` with a lock of its own.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from typing import Any

from millstream.record import RecordMetadata

_FUTURE_ATTRIBUTES = frozenset(
    vars(Future())
)  # attributes that a light future gets only when one is used


class SendResult:
    """The result of the records of one batch. Thread-safe.

    Settled once, by :meth:`set_appended` or :meth:`set_failed`; before that, its first records may have
    been dropped.
    """

    __slots__ = ("_dropped", "_dropped_by", "_error", "_place", "_waiters", "_watched", "lock")

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._place: RecordMetadata | None = None
        self._error: BaseException | None = None
        self._dropped = 0
        self._dropped_by: BaseException | None = None
        self._waiters: list[threading.Lock] = []  # each held until a result is known
        self._watched: list[SendFuture] = []

    def result_of(self, index: int) -> RecordMetadata | BaseException | None:
        """Return (partition, offset) of a record, or why it has none; None: still in flight."""
        if index < self._dropped:
            return self._dropped_by
        place = self._place
        if place is None:
            return self._error
        return RecordMetadata(place.partition, place.offset + index - self._dropped)

    def wait(self, index: int, timeout_s: float | None) -> RecordMetadata | BaseException:
        """Return as :meth:`result_of`, but wait until it is known.

        Raises:
            TimeoutError: it is not known yet.
        """
        end_s = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            with self.lock:
                found = self.result_of(index)
                if found is not None:
                    return found
                waiter = threading.Lock()
                waiter.acquire()
                self._waiters.append(waiter)
            left_s = -1 if end_s is None else max(end_s - time.monotonic(), 0)
            if not waiter.acquire(timeout=left_s):
                self._stop_waiting(waiter)
                raise TimeoutError

    def _stop_waiting(self, waiter: threading.Lock) -> None:
        with self.lock:
            if waiter in self._waiters:
                self._waiters.remove(waiter)

    def set_appended(self, partition: int, offset: int) -> None:
        """Settle: the records are in ``partition`` from ``offset`` on, without those dropped."""
        with self.lock:
            self._place = RecordMetadata(partition, offset)
        self.notify()

    def set_failed(self, error: BaseException) -> None:
        """Settle: none of the records was appended."""
        with self.lock:
            self._error = error
        self.notify()

    def drop(self, count: int, error: BaseException) -> None:
        """Note that the first ``count`` remaining records will not be appended.

        Call :meth:`notify` afterwards, without holding a lock.
        """
        with self.lock:
            self._dropped_by = error
            self._dropped += count

    def attach(self, future: SendFuture) -> None:
        """Settle ``future`` as a full Future as soon as its result is known, which may be now."""
        with self.lock:
            known = self.result_of(future.index) is not None
            if not known:
                self._watched.append(future)
        if known:
            self._settle(future)

    def notify(self) -> None:
        """Wake the waiters, and run the callbacks, of records whose result is known."""
        with self.lock:
            waiters, self._waiters = self._waiters, []
            watched, self._watched = self._watched, []
            known = [future for future in watched if self.result_of(future.index) is not None]
            self._watched = [future for future in watched if self.result_of(future.index) is None]
        for waiter in waiters:  # a bare lock: a woken thread waits for no other lock
            waiter.release()
        for future in known:
            self._settle(future)

    def _settle(self, future: SendFuture) -> None:
        found = self.result_of(future.index)
        if isinstance(found, BaseException):
            future.set_exception(found)
        else:
            assert found is not None, "only what is known is settled"
            future.set_result(found)


class SendFuture(Future[RecordMetadata]):
    """The future of one record: (partition, offset). It cannot be cancelled.

    The attributes of ``Future`` are made when one is first used: see ``__getattr__``.
    """

    __slots__ = ("index", "send_result")

    def __init__(
        self, send_result: SendResult, index: int
    ) -> None:  # deliberately not that of Future
        self.send_result = send_result
        self.index = index

    def result(self, timeout: float | None = None) -> RecordMetadata:
        found = self.send_result.result_of(self.index)
        if found is None:
            found = self.send_result.wait(self.index, timeout)
        if isinstance(found, BaseException):
            # Many futures share the error: its traceback must not grow with each of them.
            raise found.with_traceback(None)
        return found

    def exception(self, timeout: float | None = None) -> BaseException | None:
        found = self.send_result.result_of(self.index)
        if found is None:
            found = self.send_result.wait(self.index, timeout)
        return found if isinstance(found, BaseException) else None

    def done(self) -> bool:
        return self.send_result.result_of(self.index) is not None

    def running(self) -> bool:
        return not self.done()

    def cancel(self) -> bool:
        return False

    def cancelled(self) -> bool:
        return False

    def __repr__(self) -> str:
        found = self.send_result.result_of(self.index)
        return f"<SendFuture {'pending' if found is None else found!r}>"

    def __getattr__(self, name: str) -> Any:
        if name not in _FUTURE_ATTRIBUTES:
            raise AttributeError(f"{type(self).__name__!r} has no attribute {name!r}")
        self._become_full_future()
        return object.__getattribute__(self, name)

    def _become_full_future(self) -> None:
        with self.send_result.lock:
            if "_state" in self.__dict__:
                return
            super().__init__()
            self.set_running_or_notify_cancel()
        self.send_result.attach(self)


class BulkFuture:
    """The future of a ``send_many``: counts its appended rows. Thread-safe."""

    def __init__(self, rows: int) -> None:
        self.future: Future[int] = Future()
        self.future.set_running_or_notify_cancel()  # what is in flight cannot be cancelled
        self._rows = rows
        self._left = rows
        self._failed = False
        self._lock = threading.Lock()

    def add_appended(self, rows: int) -> None:
        """Note that so many more rows were appended."""
        with self._lock:
            self._left -= rows
            finished = self._left == 0 and not self._failed
        if finished:
            self.future.set_result(self._rows)

    def fail(self, error: BaseException) -> None:
        """Note that some rows were not appended; only the first error counts."""
        with self._lock:
            first, self._failed = not self._failed, True
        if first:
            self.future.set_exception(error)
