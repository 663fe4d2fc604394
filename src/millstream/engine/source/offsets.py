"""The source's offsets: the offset of each partition, the running clock, idle and lagging partitions.

A source offset is all that a batch depends on besides the log, so a repeated batch is the same batch: what
it reads, what time it is, and which partitions are idle.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from millstream.engine.source.alignment import (
    EventTimes,
    PartitionKey,
    align_event_times,
    divide_proportionally,
)
from millstream.errors import ConfigError, TopicRecreatedError
from millstream.kernels.plan import JobPlan, SourcePlan
from millstream.kernels.time.watermarks import PartitionProgress, SourceTime, idle_partitions

EndOffsets = Mapping[str, Sequence[int]]  # topic → high watermark per partition
_TRICKLE = 100  # partitions that wait for others share one such part of a batch


@dataclass(frozen=True)
class SourceOffset:
    """A source offset.

    ``clock_ms`` is the time for which the job has run, in all; ``wall_ms`` the wall clock just before the
    planner read the log's end offsets. ``idle`` are the idle partitions, by source; ``behind`` those that
    had unread records after the batch, by topic. ``topic_ids`` are the ids of the topics: a topic that is
    deleted and created again has another one. ``removals`` are, of the topics of tables, the last removals of
    tombstones when each partition began to be read: see ``missed_deletions``.
    """

    clock_ms: int
    topics: Mapping[str, tuple[PartitionProgress, ...]]
    idle: Mapping[str, frozenset[int]]
    behind: Mapping[str, frozenset[int]] = field(default_factory=dict)
    wall_ms: int = 0
    topic_ids: Mapping[str, str] = field(default_factory=dict)
    removals: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return plain values, for Spark's offset log."""
        return {
            "clock_ms": self.clock_ms,
            "topics": {
                topic: [[at.offset, at.active_ms, at.arrived_ms] for at in progress]
                for topic, progress in sorted(self.topics.items())
            },
            "idle": _as_lists(self.idle),
            "behind": _as_lists(self.behind),
            "wall_ms": self.wall_ms,
            "topic_ids": dict(sorted(self.topic_ids.items())),
            "removals": {topic: list(last) for topic, last in sorted(self.removals.items())},
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
            {name: frozenset(numbers) for name, numbers in values["behind"].items()},
            values["wall_ms"],
            values["topic_ids"],
            {topic: tuple(last) for topic, last in values.get("removals", {}).items()},
        )

    def check_topics(self, topic_ids: Mapping[str, str]) -> None:
        """Make sure that these are offsets of the existing topics.

        Raises:
            TopicRecreatedError: one of them was deleted and created again.
        """
        for topic, topic_id in topic_ids.items():
            known = self.topic_ids.get(topic)
            if known == topic_id:
                continue
            at = ", ".join(
                f"{number}: {offset}" for number, offset in enumerate(self.offsets(topic))
            )
            raise TopicRecreatedError(
                f"topic {topic!r} was deleted and created again: its id was {known}, and is {topic_id}. "
                f"The old one had been read up to offset, by partition, {at}, which means nothing in "
                "the new. Reset the app (`millstream reset`) to read the new one from its start; a "
                "query of your own needs another checkpoint"
            )

    def offsets(self, topic: str) -> list[int]:
        """Return the next offset to read, per partition."""
        return [at.offset for at in self.topics[topic]]

    def with_arrival_times(self, topic: str, arrived_ms: Sequence[int]) -> SourceOffset:
        """Return the offset with the largest timestamp before each partition's offset."""
        progress = tuple(
            replace(at, arrived_ms=max(at.arrived_ms, ms))
            for at, ms in zip(self.topics[topic], arrived_ms, strict=True)
        )
        return replace(self, topics={**self.topics, topic: progress})

    def time_of(self, source: SourcePlan) -> SourceTime:
        """Return the planned part of a source's time, for a batch that ends at this offset."""
        return SourceTime(
            (),
            len(self.topics[source.topic]),
            self.idle.get(source.name, frozenset()),
            self.clock_ms,
            self.behind.get(source.topic, frozenset()),
            self.wall_ms * 1000,
            self.quiet_ms(source),
        )

    def quiet_ms(self, source: SourcePlan) -> int:
        """Return for how much running time an idle source has had no records; 0 if it is not idle."""
        progress = self.topics[source.topic]
        if len(self.idle.get(source.name, ())) < len(progress):
            return 0
        return self.clock_ms - max(at.active_ms for at in progress)


def _as_lists(numbers: Mapping[str, frozenset[int]]) -> dict[str, list[int]]:
    return {name: sorted(found) for name, found in sorted(numbers.items())}


@dataclass(frozen=True)
class LogSnapshot:
    """What the planner reads before a batch: clocks first, then end offsets.

    So all that was in the log by ``wall_ms`` is below the ``ends``.
    """

    clock_ms: int
    wall_ms: int
    ends: EndOffsets
    event_times: EventTimes = field(default_factory=dict)
    paces: Mapping[PartitionKey, float] = field(default_factory=dict)


def next_offset(
    start: SourceOffset,
    look: LogSnapshot,
    sources: Sequence[SourcePlan],
    *,
    rows_max: int,
    heartbeat_ms: int | None = None,
    beats: bool = True,
) -> SourceOffset:
    """Return where the next batch ends; ``start`` itself if no batch is due.

    A batch is due when there are records; when a partition has become idle, as that may advance a
    watermark; and, with ``beats``, when the interval that the operators (``heartbeat_ms``) or a source's
    rule ask for has passed since the last batch.
    """
    goals = _allocate(start, look, sources, rows_max)
    topics = {
        topic: tuple(
            replace(at, offset=goal, active_ms=look.clock_ms if goal > at.offset else at.active_ms)
            for at, goal in zip(_padded(start, topic, len(goals[topic])), goals[topic], strict=True)
        )
        for topic in goals
    }
    behind = {
        topic: frozenset(
            number
            for number, (goal, end) in enumerate(zip(goals[topic], look.ends[topic], strict=True))
            if end > goal
        )
        for topic in goals
    }
    idle = {source.name: _idle(source, topics, behind, look.clock_ms) for source in sources}
    moved = any(list(goals[topic]) != start.offsets(topic) for topic in goals)
    newly_idle = any(idle[name] - start.idle.get(name, frozenset()) for name in idle)
    beat = beats and look.clock_ms >= start.clock_ms + _heartbeat_ms(start, sources, heartbeat_ms)
    if not (moved or newly_idle or beat):
        return start
    wall_ms = max(start.wall_ms, look.wall_ms)
    return replace(
        start, clock_ms=look.clock_ms, topics=topics, idle=idle, behind=behind, wall_ms=wall_ms
    )


def _heartbeat_ms(
    start: SourceOffset, sources: Sequence[SourcePlan], operators_ms: int | None
) -> float:
    """Return the interval of batches without records: the smallest that operators or sources ask for.

    A source counts unless all its partitions are idle; with ``idle_advance`` it always counts.
    """
    wanted = [operators_ms] + [
        source.rule.heartbeat_ms
        for source in sources
        if source.rule.idle_advance
        or len(start.idle.get(source.name, ())) < len(start.topics[source.topic])
    ]
    return min((ms for ms in wanted if ms is not None), default=math.inf)


def _idle(
    source: SourcePlan,
    topics: Mapping[str, tuple[PartitionProgress, ...]],
    behind: Mapping[str, frozenset[int]],
    clock_ms: int,
) -> frozenset[int]:
    progress = topics[source.topic]
    waits = [number in behind[source.topic] for number in range(len(progress))]
    return idle_partitions(progress, waits, clock_ms, source.rule.idle_ms)


def _padded(start: SourceOffset, topic: str, count: int) -> list[PartitionProgress]:
    """Return the progress of every partition, with those added since ``start``."""
    known = list(start.topics[topic])
    return known + [PartitionProgress(0, start.clock_ms)] * (count - len(known))


def _allocate(
    start: SourceOffset, look: LogSnapshot, sources: Sequence[SourcePlan], rows_max: int
) -> dict[str, list[int]]:
    """Divide at most ``rows_max`` records among the partitions, in proportion to their unread records.

    What rows are looked up in comes first: else a row might not find what arrived long before it. If there are
    more of the others than the batch can hold, partitions that are too far apart in event time are aligned.
    """
    progress = {t: _padded(start, t, len(ends)) for t, ends in look.ends.items()}
    waiting = {
        (topic, number): end - at.offset
        for topic, ends in look.ends.items()
        for number, (at, end) in enumerate(zip(progress[topic], ends, strict=True))
        if end > at.offset
    }
    levels = {source.topic: source.looked_up for source in sources}
    taken_first: dict[PartitionKey, int] = {}
    for level in sorted({*levels.values()} - {0}, reverse=True):
        first = {at: count for at, count in waiting.items() if levels[at[0]] == level}
        taken_first |= divide_proportionally(first, max(0, rows_max - sum(taken_first.values())))
    waiting = {at: count for at, count in waiting.items() if not levels[at[0]]}
    taken = divide_proportionally(waiting, max(0, rows_max - sum(taken_first.values())))
    times_us = _times(waiting, look.event_times, sources)
    if (
        taken != waiting
        and _is_misaligned(times_us, sources)
        and times_us.keys() <= look.paces.keys()
    ):
        taken |= _align({at: waiting[at] for at in times_us}, times_us, look.paces, taken)
    taken |= taken_first
    return {
        topic: [at.offset + taken.get((topic, n), 0) for n, at in enumerate(progress[topic])]
        for topic in look.ends
    }


def _align(
    waiting: Mapping[PartitionKey, int],
    times_us: Mapping[PartitionKey, int],
    paces: Mapping[PartitionKey, float],
    proportional: Mapping[PartitionKey, int],
) -> dict[PartitionKey, int]:
    """Divide the proportional share of these partitions so that they reach the same event time.

    Each gets a trickle at least: it is slowed and never stopped, however wrong the times are.
    """
    rows_max = sum(proportional[at] for at in waiting)
    trickle = divide_proportionally(waiting, -(-rows_max // _TRICKLE))
    goals = align_event_times(waiting, times_us, paces, max(0, rows_max - sum(trickle.values())))
    return {at: min(waiting[at], goals[at] + trickle[at]) for at in waiting}


def _times(
    behind: Collection[PartitionKey], event_times: EventTimes, sources: Sequence[SourcePlan]
) -> dict[PartitionKey, int]:
    """Return the event times of the partitions to align: with unread records and a known time.

    Partitions that are read to their end delay no other.
    """
    aligned = {s.topic for s in sources if s.rule.align_us is not None}
    return {
        (topic, number): event_times[topic][number]
        for topic, number in behind
        if topic in aligned and number in event_times.get(topic, {})
    }


def _is_misaligned(times_us: Mapping[PartitionKey, int], sources: Sequence[SourcePlan]) -> bool:
    """Return whether a partition is further ahead of the slowest than its source allows."""
    allowed = {s.topic: us for s in sources if (us := s.rule.align_us) is not None}
    slowest_us = min(times_us.values(), default=0)
    return any(at_us > slowest_us + allowed[topic] for (topic, _), at_us in times_us.items())


@dataclass(frozen=True)
class Split:
    """A range ``[start, end)`` of one partition, as one source reads it in a task.

    ``arrived_ms`` is the largest timestamp before it, where that is kept.
    """

    source: int
    partition: int
    number: int
    start: int
    end: int
    arrived_ms: int = 0


def divide(
    start: SourceOffset,
    end: SourceOffset,
    sources: Sequence[SourcePlan],
    *,
    tasks: int,
    rows_min: int,
) -> list[list[Split]]:
    """Divide a batch's records into at most ``tasks`` tasks of about the same size.

    A batch of up to ``rows_min`` records is one task: a second would cost more than it saves. There is
    always one task, as it reports the time even if there is nothing to read. With processing time a
    partition is not cut: the latest arrival before the cut is not known.
    """
    ranges = [
        (index, partition, before, after.offset)
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
    total = sum(after - before.offset for *_, before, after in ranges)
    count = 1 if total <= rows_min else tasks
    goal = max(1, -(-total // count))
    divided: list[list[Split]] = [[]]
    room = goal
    for index, partition, before, after in ranges:
        at, number = before.offset, 0
        whole = sources[index].rule.settle_us is not None
        while at < after:
            if room == 0:
                divided.append([])
                room = goal
            stop = after if whole else min(after, at + room)
            divided[-1].append(Split(index, partition, number, at, stop, before.arrived_ms))
            room = max(0, room - (stop - at))
            at, number = stop, number + 1
    return divided


def planned_offset(checkpoint: Path, batch_id: int) -> dict[str, Any] | None:
    """Return the source offset at which a batch ends, from Spark's offset log.

    None if the log does not say: it is not kept any more, or the batch has only DataFrames of the user's.
    """
    try:
        plan = (checkpoint / "offsets" / str(batch_id)).read_text()
    except OSError:
        return None
    return offset_in_plan(plan)


def offset_in_plan(plan: str) -> dict[str, Any] | None:
    """Return the source offset at which a batch ends, from the text that Spark keeps of its plan; None if it does not say."""
    for line in plan.splitlines():
        with suppress(ValueError, TypeError, KeyError):
            values: dict[str, Any] = json.loads(line)
            if values["topics"] is not None:
                return values
    return None


def with_declared(offset: Mapping[str, Any], plan: JobPlan) -> dict[str, Any]:
    """Return a source offset with what its batch depends on besides, and a later run may declare otherwise."""
    return {**offset, "rules": _rules(plan.sources), "given": dict(plan.program.given)}


def check_declared(offset: Mapping[str, Any], plan: JobPlan) -> None:
    """Make sure that the batch that ends at an offset is the one that it was, if a plan runs it again.

    Raises:
        ConfigError: a source had another name, or left quiet partitions or producers out by another rule; or a static
            table had other rows.
    """
    then = offset.get("rules", {})
    for name, rule in _rules(plan.sources).items():
        if name not in offset["idle"] or then.get(name, rule) != rule:
            names = ", ".join(map(repr, sorted(offset["idle"])))
            raise ConfigError(
                f"The source {name!r} was not declared as it is when the batch was planned, whose sources were {names}: it "
                "had another name, topic, idle or idle_advance, so other partitions or producers may have been left out of "
                "its watermark. Declare it as it was."
            )
    given = offset.get("given", {})
    for table, digest in plan.program.given.items():
        if given.get(table, digest) != digest:
            raise ConfigError(
                f"The static table {table!r} had other rows, or another name, when the batch was run. Give it those that it had."
            )


def _rules(sources: Sequence[SourcePlan]) -> dict[str, list[Any]]:
    """Return by source its topic, and what of its rule is not applied by the planner alone."""
    return {
        source.name: [
            source.topic,
            None if source.rule.producers_max is None else source.rule.idle_ms,
            source.rule.idle_advance,
        ]
        for source in sources
    }


def first_offset(end: Mapping[str, Any], starts: Mapping[str, Mapping[str, int]]) -> dict[str, Any]:
    """Return the source offset before the first batch of a job, which ended at ``end``.

    ``starts`` is topic → partition → where it began to read; the others were not read.
    """
    after = SourceOffset.from_json(end)
    topics = {
        topic: tuple(
            PartitionProgress(starts.get(topic, {}).get(str(number), at.offset), 0)
            for number, at in enumerate(progress)
        )
        for topic, progress in after.topics.items()
    }
    before = SourceOffset(0, topics, {}, topic_ids=after.topic_ids, removals=after.removals)
    return before.to_json()
