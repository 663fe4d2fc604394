"""Takes over what Spark's JVM has written of its classes, once it has ended.

A program of its own, as the one that used Spark need not be there any more: it takes the standard
library alone, and ends with the JVM.

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
    """Put a whole archive in its place and remove one that is not; return whether it was whole.

    A JVM writes the header last: while it writes, and where it was killed, the file begins with zeros.

    A crash leaves:

    1. before the sync: the new file, which a later session removes
    2. before the rename: the same; what a power cut might take of a file is never in use
    3. after it: the archive; as it was before, where the folder's sync is missing
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
    """Wait for the JVM and take over its file, as the program's arguments say."""
    # What ends the program that used Spark, a service's manager say, sends these to all that is left.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    pid, new, path = sys.argv[1:]
    await_end(int(pid))
    install_archive(Path(new), Path(path))


if __name__ == "__main__":
    main()
