"""The source's offsets: how far each partition is read, the running clock, and who is idle.

An offset of the source is all that a batch depends on besides the log, so a batch that is run again
is the same batch: what it reads, what time it is, and which partitions count as idle.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from millstream.kernels.plan import SourcePlan
from millstream.kernels.watermarks import PartitionProgress, idle_partitions

Ends = Mapping[str, Sequence[int]]  # topic → high watermark per partition


@dataclass(frozen=True)
class SourceOffset:
    """Where the source stands. ``clock_ms`` is the time for which the job has run, in all."""

    clock_ms: int
    topics: Mapping[str, tuple[PartitionProgress, ...]]
    idle: Mapping[str, frozenset[int]]  # source name → partitions

    def to_json(self) -> dict[str, Any]:
        """Give plain values, for Spark's offset log."""
        return {
            "clock_ms": self.clock_ms,
            "topics": {
                topic: [[at.offset, at.active_ms] for at in progress]
                for topic, progress in sorted(self.topics.items())
            },
            "idle": {name: sorted(numbers) for name, numbers in sorted(self.idle.items())},
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> SourceOffset:
        return cls(
            values["clock_ms"],
            {
                topic: tuple(PartitionProgress(*at) for at in progress)
                for topic, progress in values["topics"].items()
            },
            {name: frozenset(numbers) for name, numbers in values["idle"].items()},
        )

    def offsets(self, topic: str) -> list[int]:
        """Give the next offset to read, per partition."""
        return [at.offset for at in self.topics[topic]]


def next_offset(
    start: SourceOffset,
    ends: Ends,
    sources: Sequence[SourcePlan],
    *,
    clock_ms: int,
    rows_max: int,
) -> SourceOffset:
    """Say where the next batch ends; ``start`` itself when there is nothing to do.

    A batch is due when there are records, or when a partition has become idle, as that may move a
    watermark.
    """
    goals = _share(start, ends, rows_max)
    topics = {
        topic: tuple(
            PartitionProgress(goal, clock_ms if goal > at.offset else at.active_ms)
            for at, goal in zip(_padded(start, topic, len(goals[topic])), goals[topic], strict=True)
        )
        for topic in goals
    }
    idle = {
        source.name: idle_partitions(
            topics[source.topic],
            [
                end > at.offset
                for at, end in zip(topics[source.topic], ends[source.topic], strict=True)
            ],
            clock_ms,
            source.rule.idle_ms,
        )
        for source in sources
    }
    moved = any(list(goals[topic]) != start.offsets(topic) for topic in goals)
    newly_idle = any(idle[name] - start.idle.get(name, frozenset()) for name in idle)
    return SourceOffset(clock_ms, topics, idle) if moved or newly_idle else start


def _padded(start: SourceOffset, topic: str, count: int) -> list[PartitionProgress]:
    """Give the progress of every partition, those added since ``start`` included."""
    known = list(start.topics[topic])
    return known + [PartitionProgress(0, start.clock_ms)] * (count - len(known))


def _share(start: SourceOffset, ends: Ends, rows_max: int) -> dict[str, list[int]]:
    """Divide at most ``rows_max`` records among the partitions, in proportion to what waits."""
    behind = {
        topic: [
            max(0, end - at.offset)
            for at, end in zip(_padded(start, topic, len(ends[topic])), ends[topic], strict=True)
        ]
        for topic in ends
    }
    total = sum(sum(waiting) for waiting in behind.values())
    goals: dict[str, list[int]] = {}
    for topic, waiting in behind.items():
        progress = _padded(start, topic, len(waiting))
        goals[topic] = [
            at.offset + (count if total <= rows_max else -(-count * rows_max // total))
            for at, count in zip(progress, waiting, strict=True)
        ]
    return goals


@dataclass(frozen=True)
class Split:
    """A range ``[start, end)`` of one partition, as one source reads it in a task."""

    source: int
    partition: int
    number: int
    start: int
    end: int


def divide(
    start: SourceOffset,
    end: SourceOffset,
    sources: Sequence[SourcePlan],
    *,
    tasks: int,
    rows_min: int,
) -> list[list[Split]]:
    """Divide a batch's records into at most ``tasks`` tasks of about the same size.

    A batch of up to ``rows_min`` records is one task: a second would cost more than it saves.
    There is always one task, as the time must be told even when there is nothing to read.
    """
    ranges = [
        (index, partition, before.offset, after.offset)
        for index, source in enumerate(sources)
        for partition, (before, after) in enumerate(
            zip(
                _padded(start, source.topic, len(end.topics[source.topic])),
                end.topics[source.topic],
                strict=True,
            )
        )
        if after.offset > before.offset
    ]
    total = sum(after - before for *_, before, after in ranges)
    count = 1 if total <= rows_min else tasks
    goal = max(1, -(-total // count))
    divided: list[list[Split]] = [[]]
    room = goal
    for index, partition, before, after in ranges:
        at, number = before, 0
        while at < after:
            if room == 0:
                divided.append([])
                room = goal
            stop = min(after, at + room)
            divided[-1].append(Split(index, partition, number, at, stop))
            room -= stop - at
            at, number = stop, number + 1
    return divided
