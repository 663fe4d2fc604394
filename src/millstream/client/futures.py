"""Futures of records: one outcome for a whole batch, and a light future for each record in it.

A batch is appended or refused as one, so what became of a record is known from its place in the
batch and the outcome of the batch. A future holds these two and nothing else; telling a batch of
ten thousand records costs one assignment. Only a future that is given a callback, or to
``concurrent.futures.wait`` or ``asyncio``, becomes a whole ``Future`` with a lock of its own.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from typing import Any

from millstream.record import Place

_PARTS_OF_FUTURE = frozenset(vars(Future()))  # what a light future does not have until it must


class Outcome:
    """What became of the records of one batch. Thread-safe.

    Settled once, by :meth:`appended` or :meth:`failed`; before that, its first records may have
    been dropped.
    """

    __slots__ = ("_dropped", "_dropped_by", "_error", "_place", "_waiters", "_watched", "lock")

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._place: Place | None = None
        self._error: BaseException | None = None
        self._dropped = 0
        self._dropped_by: BaseException | None = None
        self._waiters: list[threading.Lock] = []  # each held, until there is news
        self._watched: list[SendFuture] = []

    def of(self, index: int) -> Place | BaseException | None:
        """Return (partition, offset) of a record, or why it has none; None: not known yet."""
        if index < self._dropped:
            return self._dropped_by
        place = self._place
        if place is None:
            return self._error
        return Place(place.partition, place.offset + index - self._dropped)

    def wait(self, index: int, timeout_s: float | None) -> Place | BaseException:
        """Return as :meth:`of`, but wait until it is known.

        Raises:
            TimeoutError: it is not known yet.
        """
        end_s = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            with self.lock:
                found = self.of(index)
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

    def appended(self, partition: int, offset: int) -> None:
        """Settle: the records lie in ``partition``, from ``offset`` on, without those dropped."""
        with self.lock:
            self._place = Place(partition, offset)
        self.tell()

    def failed(self, error: BaseException) -> None:
        """Settle: none of the records was appended."""
        with self.lock:
            self._error = error
        self.tell()

    def drop(self, count: int, error: BaseException) -> None:
        """Note of the first ``count`` records that are left that they will not be appended.

        Call :meth:`tell` afterwards, without holding a lock.
        """
        with self.lock:
            self._dropped_by = error
            self._dropped += count

    def watch(self, future: SendFuture) -> None:
        """Settle ``future`` as a whole Future as soon as its outcome is known, which may be now."""
        with self.lock:
            known = self.of(future.index) is not None
            if not known:
                self._watched.append(future)
        if known:
            self._settle(future)

    def tell(self) -> None:
        """Wake who waits, and run the callbacks, of the records whose outcome is known."""
        with self.lock:
            waiters, self._waiters = self._waiters, []
            watched, self._watched = self._watched, []
            known = [future for future in watched if self.of(future.index) is not None]
            self._watched = [future for future in watched if self.of(future.index) is None]
        for waiter in waiters:  # a bare lock: who wakes has no other to wait for
            waiter.release()
        for future in known:
            self._settle(future)

    def _settle(self, future: SendFuture) -> None:
        found = self.of(future.index)
        if isinstance(found, BaseException):
            future.set_exception(found)
        else:
            assert found is not None, "only what is known is settled"
            future.set_result(found)


class SendFuture(Future[Place]):
    """The future of one record: (partition, offset). It cannot be cancelled.

    What ``Future`` keeps is made when something first asks for it: see ``__getattr__``.
    """

    __slots__ = ("index", "outcome")

    def __init__(self, outcome: Outcome, index: int) -> None:  # on purpose not Future's
        self.outcome = outcome
        self.index = index

    def result(self, timeout: float | None = None) -> Place:
        found = self.outcome.of(self.index)
        if found is None:
            found = self.outcome.wait(self.index, timeout)
        if isinstance(found, BaseException):
            # Many futures share the error: its traceback must not grow with each of them.
            raise found.with_traceback(None)
        return found

    def exception(self, timeout: float | None = None) -> BaseException | None:
        found = self.outcome.of(self.index)
        if found is None:
            found = self.outcome.wait(self.index, timeout)
        return found if isinstance(found, BaseException) else None

    def done(self) -> bool:
        return self.outcome.of(self.index) is not None

    def running(self) -> bool:
        return not self.done()

    def cancel(self) -> bool:
        return False

    def cancelled(self) -> bool:
        return False

    def __repr__(self) -> str:
        found = self.outcome.of(self.index)
        return f"<SendFuture {'pending' if found is None else found!r}>"

    def __getattr__(self, name: str) -> Any:
        if name not in _PARTS_OF_FUTURE:
            raise AttributeError(f"{type(self).__name__!r} has no attribute {name!r}")
        self._become_whole()
        return object.__getattribute__(self, name)

    def _become_whole(self) -> None:
        with self.outcome.lock:
            if "_state" in self.__dict__:
                return
            super().__init__()
            self.set_running_or_notify_cancel()
        self.outcome.watch(self)


class WholeFuture:
    """The future of a ``send_many``: counts its batches home. Thread-safe."""

    def __init__(self, rows: int) -> None:
        self.future: Future[int] = Future()
        self.future.set_running_or_notify_cancel()  # what is on its way cannot be called back
        self._rows = rows
        self._left = rows
        self._failed = False
        self._lock = threading.Lock()

    def count(self, rows: int) -> None:
        """Note that so many more rows were appended."""
        with self._lock:
            self._left -= rows
            finished = self._left == 0 and not self._failed
        if finished:
            self.future.set_result(self._rows)

    def fail(self, error: BaseException) -> None:
        """Note that some rows were not; only the first error counts."""
        with self._lock:
            first, self._failed = not self._failed, True
        if first:
            self.future.set_exception(error)
