"""The reader of a log in a folder: the log's own, with the calls of ``client.reader``."""

from __future__ import annotations

from pathlib import Path

from millstream.client.reader import Reader
from millstream.log.reader import Isolation, LogReader


def folder_reader(folder: Path | str, isolation: Isolation = "read_committed") -> Reader:
    """Return a reader of the log in a folder; it takes no lock and needs no owner."""
    return LogReader(folder, isolation=isolation)
