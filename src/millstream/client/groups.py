"""How far groups have read, and how far they are behind."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from millstream.errors import UnknownTopicError
from millstream.log.control import ControlDb
from millstream.log.groups import (
    CommittedOffset,
    Offsets,
    check_offsets,
    committed_offsets,
    fence_of,
    fences_from,
    forget_fences,
    forget_offsets,
    group_names,
    put_offsets,
)
from millstream.log.reader import LogReader
from millstream.log.retention import risks
from millstream.log.unread import count_unread
from millstream.record import TopicPartition


@dataclass(frozen=True, slots=True)
class Lag:
    """How far a group is behind in one partition, in records and against retention.

    ``behind`` counts the records from ``committed_offset`` to ``end_offset``; markers of transactions
    and what was aborted are none. Far from the end it counts offsets. ``at_risk`` of them are
    removed by retention next, ``lost`` were removed before the group had read them.
    """

    group: str
    topic: str
    partition: int
    committed_offset: int
    log_start: int
    end_offset: int
    behind: int
    at_risk: int
    lost: int

    @property
    def state(self) -> str:
        """``ok``, ``at risk`` or ``lost``."""
        if self.lost:
            return "lost"
        return "at risk" if self.at_risk else "ok"


class GroupOffsets:
    """Reads and commits the offsets of groups, from any process; opens control.db when first used."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._control: ControlDb | None = None

    def commit(self, group: str, offsets: Offsets, *, reader: LogReader, now_ms: int) -> None:
        """Note how far a group has read; durable when this returns.

        Raises:
            UnknownTopicError, ConfigError: there is no such topic or partition, or an offset is
                not possible; nothing was noted.
            TopicRecreatedError: a topic is not the one that the reader is pinned to; nothing was
                noted.
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
                pinned.end_offset(*name)  # deleted since: this says so
            raise

    def committed(self, group: str) -> dict[TopicPartition, CommittedOffset]:
        """Return what a group has committed; empty for an unknown group or folder."""
        return committed_offsets(self._opened(), group) if self._exists() else {}

    def names(self) -> list[str]:
        """Return every group that has committed something, sorted."""
        return group_names(self._opened()) if self._exists() else []

    def forget(self, group: str, topic: str | None = None) -> int:
        """Forget what a group has committed, of one topic or of all; return how many offsets."""
        return forget_offsets(self._opened(), group, topic) if self._exists() else 0

    def fence(self, writer: str) -> int | None:
        """Return the batch id at which the fence of ``writer`` stands; None if it has none."""
        return fence_of(self._opened(), writer) if self._exists() else None

    def fences(self, prefix: str) -> dict[str, int]:
        """Return where the fences stand of all writers whose names begin with ``prefix``."""
        return fences_from(self._opened(), prefix) if self._exists() else {}

    def forget_fences(self, prefix: str) -> int:
        """Forget the fences of all writers whose names begin with ``prefix``; return how many."""
        return forget_fences(self._opened(), prefix) if self._exists() else 0

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


def lag_of(
    groups: Mapping[str, Mapping[TopicPartition, CommittedOffset]], reader: LogReader, now_ms: int
) -> list[Lag]:
    """Return how far groups are behind, by group, topic and partition."""
    rows = []
    for group, committed in sorted(groups.items()):
        for name, found in committed.items():
            try:
                start, end = reader.offsets(name.topic)[name.partition]
                holding = reader.holding(*name)
                behind = count_unread(reader, *name, max(found.offset, start), end)
            except UnknownTopicError:
                continue  # deleted between the two looks
            risk = risks({name: {group: found.offset}}, [holding], now_ms)
            rows.append(
                Lag(
                    group,
                    *name,
                    committed_offset=found.offset,
                    log_start=start,
                    end_offset=end,
                    behind=behind,
                    at_risk=min(behind, risk[0].records_at_risk) if risk else 0,
                    lost=max(start - found.offset, 0),
                )
            )
    return rows
