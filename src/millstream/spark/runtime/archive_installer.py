"""Installs the class archive that Spark's JVM writes as it ends.

A program of its own, as the one that used Spark may have ended. It uses the standard library only, and ends
after the JVM.

    python -I archive_installer.py PID NEW PATH
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from pathlib import Path

_WAIT_S = 120.0  # writing takes ten to twenty seconds
_POLL_S = 0.1


def await_end(pid: int, wait_s: float = _WAIT_S) -> None:
    """Wait until a process has ended, and end it if it does not."""
    deadline = time.monotonic() + wait_s
    with contextlib.suppress(ProcessLookupError):
        while time.monotonic() < deadline:
            os.kill(pid, 0)
            time.sleep(_POLL_S)
        os.kill(pid, signal.SIGKILL)


def install_archive(new: Path, path: Path) -> bool:
    """Install a complete archive, or remove an incomplete one; return whether it was complete.

    A JVM writes the header last: while it writes, or if it was killed, the file begins with zeros.

    A crash leaves:

    1. before the sync: the new file, which a later session removes
    2. before the rename: the same; a file that a power cut may damage is never in use
    3. after it: the new archive, or the one before if the folder was not synced
    """
    with contextlib.suppress(FileNotFoundError):
        with new.open("rb") as file:
            whole = any(file.read(4))
            if whole:
                os.fsync(file.fileno())
        if not whole:
            new.unlink()
            return False
        new.replace(path)
        _sync_folder(path.parent)
        return True
    return False


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def main() -> None:
    """Wait for the JVM and install its file; see the module for the arguments."""
    # A service manager that ends the program that used Spark sends these to all its processes.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    pid, new, path = sys.argv[1:]
    await_end(int(pid))
    install_archive(Path(new), Path(path))


if __name__ == "__main__":
    main()
