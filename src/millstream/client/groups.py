"""The committed offsets and the lag of groups."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from millstream.client.reader import Reader
from millstream.errors import UnknownTopicError
from millstream.log.groups import CommittedOffset, Offsets
from millstream.log.unread import count_unread
from millstream.record import TopicPartition


@dataclass(frozen=True, slots=True)
class Lag:
    """How far a group is behind in one partition, in records and against retention.

    ``behind`` counts the records from ``committed_offset`` to ``end_offset``, without markers of transactions
    and aborted records. Far from the end it counts offsets. ``at_risk`` of them are removed by retention
    next, ``lost`` were removed before the group had read them.
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


class GroupOffsetStore(Protocol):
    """Where the offsets of groups are stored."""

    def committed(self, group: str) -> Mapping[TopicPartition, CommittedOffset]:
        """Return what a group has committed; empty for an unknown group."""

    def commit(self, group: str, offsets: Offsets, *, reader: Any, now_ms: int) -> None:
        """Store how far a group has read; durable when this returns."""


def lag_of(
    groups: Mapping[str, Mapping[TopicPartition, CommittedOffset]],
    reader: Reader,
    at_risk: Callable[[TopicPartition, int], int],
) -> list[Lag]:
    """Return the lag of groups, by group, topic and partition.

    Args:
        at_risk: Returns how many of the records from an offset of a partition on retention removes next.
    """
    bounds: dict[str, list[tuple[int, int]]] = {}
    rows = []
    for group, committed in sorted(groups.items()):
        for name, found in committed.items():
            try:
                if name.topic not in bounds:
                    bounds[name.topic] = reader.offsets(name.topic)
                start, end = bounds[name.topic][name.partition]
                behind = count_unread(reader, *name, max(found.offset, start), end)
                risk = at_risk(name, found.offset)
            except UnknownTopicError:
                continue  # deleted since the group's offsets were read
            rows.append(
                Lag(
                    group,
                    *name,
                    committed_offset=found.offset,
                    log_start=start,
                    end_offset=end,
                    behind=behind,
                    at_risk=min(behind, risk),
                    lost=max(start - found.offset, 0),
                )
            )
    return rows
