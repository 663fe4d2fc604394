"""A thread pool that accepts work as long as the program runs.

A pool of ``concurrent.futures`` accepts none once the program's main thread has ended, although other
threads of the program may go on for hours, and send records.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, ParamSpec, Self, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class Threads:
    """Up to ``count`` threads that run the submitted calls in order; started when needed."""

    def __init__(self, count: int, name: str) -> None:
        self._count, self._name = count, name
        self._work: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._changed = threading.Condition()
        self._free = 0  # threads that are in no call; of those that were just started, too
        self._threads: list[threading.Thread] = []
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def submit(self, call: Callable[P, R], *args: P.args, **named: P.kwargs) -> Future[R]:
        """Run a call in a thread; the future has its result, or its exception."""
        future: Future[R] = Future()
        with self._changed:
            if self._closed:
                raise RuntimeError(f"{self._name} is closed")
            if len(self._work) >= self._free and len(self._threads) < self._count:
                self._start()
            self._work.append((future, lambda: call(*args, **named)))
            self._changed.notify()
        return future

    def close(self, *, wait_s: float | None = None) -> bool:
        """Return when all submitted calls are done, and the threads have ended; or, after a time, False."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        ends = None if wait_s is None else time.monotonic() + wait_s
        for thread in self._threads:
            thread.join(None if ends is None else max(0.0, ends - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _start(self) -> None:
        number = len(self._threads)
        thread = threading.Thread(target=self._run, name=f"{self._name}_{number}", daemon=True)
        thread.start()
        self._free += 1
        self._threads.append(thread)

    def _run(self) -> None:
        while (submitted := self._next()) is not None:
            _run_call(*submitted)
            del submitted  # its arguments may be large, and the wait long
            with self._changed:
                self._free += 1

    def _next(self) -> tuple[Future[Any], Callable[[], Any]] | None:
        with self._changed:
            self._changed.wait_for(lambda: self._work or self._closed)
            if not self._work:
                return None
            self._free -= 1
            return self._work.popleft()


def _run_call(future: Future[Any], call: Callable[[], Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = call()
    except BaseException as error:  # noqa: BLE001 - the future raises it
        future.set_exception(error)
    else:
        future.set_result(result)
