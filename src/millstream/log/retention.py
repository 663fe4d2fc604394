"""Which segments may be removed by age or size, and which groups have not yet read what is removed next.

Only whole sealed segments are removed, from the oldest on, and never past the last stable offset. The age of
a segment is that of its largest timestamp, so records written today about last year are old. A clock that
jumps forward must not empty a topic at once: by age, a pass removes a tenth of the segments at most (one at the least), and
the owner's clock advances with monotonic time and ``CLOCK_SLACK_MS``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from millstream.log.config import FOREVER, TopicConfig
from millstream.log.seal import Seal
from millstream.record import TopicPartition

PASS_SHARE = 10  # by age, a pass removes one in so many segments, but at least one
CLOCK_SLACK_MS = 60_000
RISK_MARGIN = 0.8  # a group is at risk when it has not read what would go at this share of a limit


@dataclass(frozen=True, slots=True)
class RetentionRisk:
    """A group that is about to lose records, or has lost some, because it reads too slowly.

    ``records_at_risk`` are those that the group has not read and retention removes next;
    ``records_lost`` are gone already. Read faster, or keep records for longer.
    """

    group: str
    topic: str
    partition: int
    committed_offset: int
    log_start: int
    records_at_risk: int
    records_lost: int

    def __str__(self) -> str:
        where = f"group {self.group!r} in {self.topic}/{self.partition}"
        if self.records_lost:
            return (
                f"{where} has lost {self.records_lost} records: it had read up to offset "
                f"{self.committed_offset}, and the log now begins at {self.log_start}. Read the "
                "rest faster, or raise the topic's retention"
            )
        return (
            f"{where} is about to lose {self.records_at_risk} records that it has not read: "
            f"retention removes offsets from {self.log_start} on next. Read faster, or raise the "
            "topic's retention"
        )


class BoundedClock:
    """A wall clock that advances with monotonic time, and is at most ``CLOCK_SLACK_MS`` ahead of it.

    After a jump forward it shows what it would have shown without; a jump back it follows.
    """

    def __init__(self, now_ms: int, running_ms: int) -> None:
        self._difference_ms = now_ms - running_ms

    def read(self, now_ms: int, running_ms: int) -> int:
        """Return the bounded time."""
        return min(now_ms, running_ms + self._difference_ms + CLOCK_SLACK_MS)


@dataclass(frozen=True, slots=True)
class PartitionContents:
    """The contents of a partition, as retention needs them: its sealed segments, oldest first."""

    name: TopicPartition
    config: TopicConfig
    log_start: int
    last_stable_offset: int
    sealed: Sequence[Seal]
    active_bytes: int

    @property
    def size_bytes(self) -> int:
        """Bytes in all segments."""
        return sum(seal.size for seal in self.sealed) + self.active_bytes


def start_after_retention(holding: PartitionContents, now_ms: int, *, share: float = 1.0) -> int:
    """Return the log start once everything beyond the limits is removed.

    Args:
        share: The share of the limits to apply; below 1, it includes what is removed soon.
    """
    config = holding.config
    if not config.deletes:
        return holding.log_start
    start, size = holding.log_start, holding.size_bytes
    for seal in holding.sealed:
        if seal.next_offset > holding.last_stable_offset:
            break
        too_much = config.retention_bytes != FOREVER and (
            size - seal.size >= config.retention_bytes * share
        )
        if not too_much and not _too_old(seal.max_timestamp_ms, config, now_ms, share):
            break
        size -= seal.size
        start = max(start, seal.next_offset)
    return start


def start_after_pass(holding: PartitionContents, now_ms: int) -> int:
    """Return the log start after one pass, which removes only a limited share by age."""
    goal = start_after_retention(holding, now_ms)
    limit_bytes = holding.config.retention_bytes
    allowed = max(1, (len(holding.sealed) + 1) // PASS_SHARE)
    start, size = holding.log_start, holding.size_bytes
    for seal in holding.sealed:
        if seal.next_offset > goal:
            break
        size -= seal.size
        if limit_bytes == FOREVER or size < limit_bytes:
            if not allowed:
                break
            allowed -= 1
        start = max(start, seal.next_offset)
    return start


def first_safe_offset(holding: PartitionContents, now_ms: int) -> int:
    """Return the first offset that is neither removed nor about to be."""
    soon = start_after_retention(holding, now_ms, share=RISK_MARGIN)
    return max(soon, holding.log_start)


def risks(
    committed: Mapping[TopicPartition, Mapping[str, int]],
    holdings: Iterable[PartitionContents],
    now_ms: int,
) -> list[RetentionRisk]:
    """Return the groups that have lost records or are about to, by their ``committed`` offsets."""
    found = []
    for holding in holdings:
        safe, start = first_safe_offset(holding, now_ms), holding.log_start
        for group, offset in committed.get(holding.name, {}).items():
            if offset >= safe:
                continue
            found.append(
                RetentionRisk(
                    group,
                    holding.name.topic,
                    holding.name.partition,
                    offset,
                    start,
                    records_at_risk=safe - max(offset, start),
                    records_lost=max(start - offset, 0),
                )
            )
    return found


def _too_old(latest_ms: int, config: TopicConfig, now_ms: int, share: float) -> bool:
    if config.retention_ms == FOREVER:
        return False
    return latest_ms < now_ms - config.retention_ms * share
