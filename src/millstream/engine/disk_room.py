"""Says in one sentence that a job's disk is full, whatever was being written."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from millstream.errors import DiskFullError

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def translate_full_disk(folder: Path) -> Iterator[None]:
    """Turn the error of any write that found no room, or no quota, into one of ours.

    Runs of state, frames, plans of batches and the checkpoint are written in many places. None of them has to tell a
    full disk from another failure: what was written of a batch that is not committed counts for nothing.

    Raises:
        DiskFullError: there was no room.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        raise DiskFullError(
            f"{error.filename or folder} could not be written: {error.strerror or error}. What is committed stands, and the batch "
            "that was begun counts for nothing. Make room on the disk, then run again"
        ) from error
