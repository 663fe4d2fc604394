"""Notifies readers of commits: at once in this process, soon in others.

The owner wakes a condition variable that all readers of the folder in its process share. Readers in other
processes poll the mapped state file every 0.2 to 2 milliseconds: a poll costs a few microseconds, needs no
file handle, and leaves nothing behind when a process dies.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias
from weakref import WeakValueDictionary

from millstream.record import TopicPartition

_POLL_FIRST_S = 0.0002
_POLL_LAST_S = 0.002
_POLL_GROWTH = 1.1
_RECHECK_S = 0.5  # the owner may leave this process between two polls

CommitListener: TypeAlias = Callable[[Sequence[TopicPartition]], None]
_signals: WeakValueDictionary[str, CommitSignal] = WeakValueDictionary()
_signals_lock = threading.Lock()


class CommitSignal:
    """One per folder and process."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._owners = 0
        self._listeners: list[CommitListener] = []

    def notify(self, changed: Sequence[TopicPartition] = ()) -> None:
        """Wake every waiting reader of this process.

        Args:
            changed: The partitions that were committed to; none if it was the catalog.
        """
        with self._condition:
            self._condition.notify_all()
        for listener in self._listeners:
            listener(changed)

    @contextmanager
    def subscribe(self, listener: CommitListener) -> Iterator[None]:
        """Call ``listener`` with what changed at every commit of this process, within the context.

        It runs in the committing thread, which waits for it: it must be fast and raise nothing.
        """
        with self._condition:
            self._listeners = [*self._listeners, listener]
        try:
            yield
        finally:
            with self._condition:
                self._listeners = [one for one in self._listeners if one is not listener]

    @contextmanager
    def writer_active(self) -> Iterator[None]:
        """Mark this process as the one that commits to the folder, within the context."""
        with self._condition:
            self._owners += 1
        try:
            yield
        finally:
            with self._condition:
                self._owners -= 1
            self.notify()

    def wait_until(self, true: Callable[[], bool], timeout_s: float) -> bool:
        """Return True as soon as ``true()`` holds, False after ``timeout_s``."""
        deadline = time.monotonic() + timeout_s
        pause = _POLL_FIRST_S
        while True:
            with self._condition:
                if true():
                    return True
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                if self._owners:
                    self._condition.wait(min(left, _RECHECK_S))
                    continue
            time.sleep(min(left, pause))
            pause = min(pause * _POLL_GROWTH, _POLL_LAST_S)


def signal_of(folder: Path) -> CommitSignal:
    """Return the signal of a folder in this process."""
    with _signals_lock:
        return _signals.setdefault(os.path.realpath(folder), CommitSignal())


def _renew_locks() -> None:
    # Another thread of the parent may have held a lock at the fork; no thread would release it here.
    global _signals, _signals_lock
    _signals, _signals_lock = WeakValueDictionary(), threading.Lock()


os.register_at_fork(after_in_child=_renew_locks)
