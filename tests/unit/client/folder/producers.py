"""Producers of a folder for tests: their settings and, beside these, a clock and a file system."""

from __future__ import annotations

from typing import Any

from millstream.client.folder.producer import FolderProducer
from millstream.client.producer import ProducerSettings
from millstream.log.writer import LogWriter

_ARGUMENTS = ("spill_folder", "files", "clock_ms", "on_close")


def folder_producer(log: LogWriter, **given: Any) -> FolderProducer:
    """Return a producer with these settings of ``EventLog.producer`` and arguments of its constructor."""
    arguments = {name: given.pop(name) for name in _ARGUMENTS if name in given}
    return FolderProducer(log, ProducerSettings(**given), **arguments)
