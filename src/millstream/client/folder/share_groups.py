"""Share groups of a folder, described for any process: members, progress, records in flight.

The broker coordinates them (docs/broker.md); this only reads.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from millstream.log.control import ControlDb
from millstream.log.reader import LogReader
from millstream.log.share_state import (
    ShareMember,
    ShareState,
    share_members,
    share_names,
    share_states,
)

_DONE = ("acknowledged", "archived")
_UNDELIVERABLE = ("rejected", "exhausted")


@dataclass(frozen=True, slots=True)
class SharePartitionProgress:
    """The progress of a share group in one partition.

    ``behind`` counts the offsets from ``start_offset`` on that are not done; ``in_flight`` of them
    were delivered, up to ``delivery_count_max`` times. ``undeliverable`` are to be dead-lettered.
    """

    group: str
    topic: str
    partition: int
    start_offset: int
    end_offset: int
    behind: int
    in_flight: int
    delivery_count_max: int
    undeliverable: int


@dataclass(frozen=True, slots=True)
class ShareGroupDescription:
    """A share group: its members, as its broker last stored them, and its progress."""

    name: str
    members: list[ShareMember]
    partitions: list[SharePartitionProgress]

    @property
    def state(self) -> str:
        """``Stable`` with members, else ``Empty``."""
        return "Stable" if self.members else "Empty"


def share_groups(folder: Path, only: str | None = None) -> list[ShareGroupDescription]:
    """Return the share groups of a folder, or the one of a name, by name."""
    if not (folder / "FORMAT").exists():
        return []
    control, reader = ControlDb.open(folder, write=True), LogReader(folder)
    try:
        states = share_states(control)
        return [
            ShareGroupDescription(
                name,
                share_members(control, name),
                [
                    _progress(name, place.topic, place.partition, state, reader)
                    for place, state in states.get(name, {}).items()
                ],
            )
            for name in share_names(control)
            if only in (None, name)
        ]
    finally:
        reader.close()
        control.close()


def _progress(
    group: str, topic: str, partition: int, state: ShareState, reader: LogReader
) -> SharePartitionProgress:
    end = reader.high_watermark(topic, partition)

    def records(*states: str) -> int:
        return sum(one.end - one.first for one in state.spans if one.state in states)

    counts = [one.delivery_count for one in state.spans if one.state not in _DONE]
    return SharePartitionProgress(
        group,
        topic,
        partition,
        start_offset=state.start,
        end_offset=end,
        behind=max(end - state.start - records(*_DONE), 0),
        in_flight=records("available"),
        delivery_count_max=max(counts, default=0),
        undeliverable=records(*_UNDELIVERABLE),
    )
