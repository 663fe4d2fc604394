"""The committed offsets and fences of a folder, for any process; they are in control.db."""

from __future__ import annotations

import threading
from pathlib import Path

from millstream.errors import UnknownTopicError
from millstream.log.control import ControlDb
from millstream.log.groups import (
    CommittedOffset,
    Offsets,
    check_offsets,
    committed_offsets,
    delete_fences,
    delete_offsets,
    fence_of,
    fences_from,
    group_names,
    put_offsets,
)
from millstream.log.reader import LogReader
from millstream.record import TopicPartition


class FolderGroups:
    """Reads and commits the offsets of groups. Thread-safe; opens control.db when first used."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._control: ControlDb | None = None

    def commit(self, group: str, offsets: Offsets, *, reader: LogReader, now_ms: int) -> None:
        """Store how far a group has read; durable when this returns.

        Raises:
            UnknownTopicError, ConfigError: there is no such topic or partition, or an offset is
                not possible; nothing was stored.
            TopicRecreatedError: a topic is not the one that the reader is pinned to; nothing was
                stored.
        """
        check_offsets(group, offsets)
        topic_ids = {name.topic: reader.topic_id(name.topic) for name in offsets}
        pinned = reader.pinned(topic_ids)
        for name in offsets:
            pinned.end_offset(*name)
        try:
            with self._opened().commit() as connection:
                put_offsets(connection, group, offsets, topic_ids=topic_ids, now_ms=now_ms)
        except UnknownTopicError:
            for name in offsets:
                pinned.end_offset(*name)  # deleted since: this raises the error
            raise

    def committed(self, group: str) -> dict[TopicPartition, CommittedOffset]:
        """Return what a group has committed; empty for an unknown group or folder."""
        return committed_offsets(self._opened(), group) if self._exists() else {}

    def names(self) -> list[str]:
        """Return every group that has committed something, sorted."""
        return group_names(self._opened()) if self._exists() else []

    def delete(self, group: str, topic: str | None = None) -> int:
        """Delete what a group has committed, of one topic or of all; return how many offsets."""
        return delete_offsets(self._opened(), group, topic) if self._exists() else 0

    def fence(self, writer: str) -> int | None:
        """Return the batch id that the fence of ``writer`` is at; None if it has none."""
        return fence_of(self._opened(), writer) if self._exists() else None

    def fences(self, prefix: str) -> dict[str, int]:
        """Return the batch ids of the fences of all writers whose names begin with ``prefix``."""
        return fences_from(self._opened(), prefix) if self._exists() else {}

    def delete_fences(self, prefix: str) -> int:
        """Delete the fences of all writers whose names begin with ``prefix``; return how many."""
        return delete_fences(self._opened(), prefix) if self._exists() else 0

    def close(self) -> None:
        """Close control.db."""
        with self._lock:
            control, self._control = self._control, None
        if control is not None:
            control.close()

    def _exists(self) -> bool:
        return (self._folder / "FORMAT").exists()

    def _opened(self) -> ControlDb:
        with self._lock:
            if self._control is None:
                self._control = ControlDb.open(self._folder, write=True)
            return self._control
