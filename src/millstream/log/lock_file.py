"""A lock file: one process at a time holds ``flock`` on it, and its content says which.

The kernel releases the lock exactly when the process dies, so it has no timeout: a stopped process still
holds it. The handle is neither inherited by programs that the process starts (O_CLOEXEC) nor kept by a
forked child (closed at the fork, so that the lock ends with its process).
"""

from __future__ import annotations

import os
import threading
import weakref
from contextlib import suppress
from pathlib import Path

from millstream.log.files import Files, read_whole, write_whole

_held: weakref.WeakSet[LockFile] = weakref.WeakSet()
_taking = threading.Lock()  # a fork waits until a lock that is being taken is in ``_held``


class LockFile:
    """The lock on a file, until :meth:`release` or the end of the process.

    Raises:
        BlockingIOError: another process (or another object here) holds it; see :func:`lock_holder`.
        OSError: the file cannot be made or locked.
    """

    def __init__(self, path: Path, files: Files) -> None:
        self._files = files
        with _taking:
            self._handle: int | None = files.lock(path)
            _held.add(self)
        with suppress(OSError):  # only information: who holds the lock
            files.truncate(self._handle, 0)
            write_whole(files, self._handle, f"{os.getpid()}\n".encode("ascii"), 0)

    @property
    def held(self) -> bool:
        """Whether this process still holds the lock; False in a forked child."""
        return self._handle is not None

    def release(self) -> None:
        """Let the next process take the lock. Calling it again does nothing."""
        handle, self._handle = self._handle, None
        if handle is not None:
            # A forked child may not have closed its copy yet, and as long as it has one, closing the
            # handle here would not release the lock.
            self._files.unlock(handle)
            self._files.close(handle)

    def close_in_child(self) -> None:
        """Close a copy of the handle in a forked child; the parent keeps the lock."""
        handle, self._handle = self._handle, None
        if handle is not None:
            self._files.close(handle)


def _close_in_child() -> None:
    # A flock belongs to the open file, which parent and child share: if the child kept its copy,
    # the file would remain locked after the parent's death.
    _taking.release()
    for lock in list(_held):
        lock.close_in_child()


os.register_at_fork(
    before=_taking.acquire, after_in_parent=_taking.release, after_in_child=_close_in_child
)


def lock_holder(path: Path, files: Files) -> str:
    """Return the process id of the last that took the lock; "unknown" where the file does not say."""
    with suppress(OSError):
        return read_whole(files, path).decode("ascii", "replace").strip() or "unknown"
    return "unknown"
