"""Event time: the watermark of each partition and input.

Watermark W means that no further event with a time before W is expected. A partition's watermark
follows its records as the rule says: it is the largest event time seen in it less the allowed
delay, or its last punctuation, whichever is later; where producers are told apart, the
minimum over the partition's producers of that (`producers.py`); over processing time, the latest
arrival, or the planner's clock once all has been read. It never goes back. An input's watermark is
the minimum over its partitions, leaving out the idle ones; while all are idle it holds.

Lateness is judged per partition: an event is too late when *its own partition's* watermark (its
own producer's, where they are told apart) had passed the expiry of its window before the event was
read. The input's watermark never exceeds that of an active partition, so an event that is in time
finds its window open. The decision depends on the order within the partition alone, not on batch
boundaries or on how fast other partitions were read. The events of a partition that was idle are
compared with the input's watermark when it returns.

The watermarks of splits are computed before the shuffle (`split_clocks.py`); here are the
rule, the messages and the clocks that outlive the batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import polars as pl

from millstream.kernels.time.log_order import split_number
from millstream.kernels.time.producers import ProducerHistory, Producers

# a watermark that nothing has moved yet; far below any time, safe to add to
NO_WATERMARK = -(2**62)
_HEARTBEAT_MS_MIN = 1000


def delayed_watermark(watermark_us: int, by_us: int) -> int:
    """Return a watermark less a delay; NO_WATERMARK is returned as it is."""
    return watermark_us - by_us if watermark_us > NO_WATERMARK else NO_WATERMARK


@dataclass(frozen=True)
class TimeMarks:
    """What else a record says about time, as expressions over the value's fields.

    ``punctuation`` (a Datetime, mostly null): nothing earlier comes after this record.
    ``punctuation_only``: the record only advances time. ``producer``: the producer of the
    record. ``ends``: it is the last record of its producer.
    """

    punctuation: pl.Expr | None = None
    punctuation_only: pl.Expr | None = None
    producer: pl.Expr | None = None
    ends: pl.Expr | None = None

    def present(self) -> dict[str, pl.Expr]:
        """Return the marks that are set, by name."""
        return {name: mark for name, mark in vars(self).items() if mark is not None}

    def columns_read(self) -> set[str]:
        return {name for mark in self.present().values() for name in mark.meta.root_names()}


@dataclass(frozen=True)
class WatermarkRule:
    """How a stream's watermark follows its events. Durations in microseconds.

    ``delay_us`` is how far it stays behind the newest event; None: only punctuation moves it.
    ``idle_ms`` is the running time after which a partition (or producer) without new records is
    left out of the minimum; None keeps it in forever. An event whose time is more than
    ``future_max_us`` after its arrival is dead-lettered. A partition that is ``align_us`` ahead of the
    slowest waits while there is a backlog. With ``producers_max`` producers are told apart, and at
    most so many of a partition are followed. With ``settle_us`` the time is processing time: the
    event time is the time of arrival, and the watermark of a partition that has been read to its end is
    the wall clock less this. ``idle_advance``: while all partitions are idle the watermark advances
    with running time, from the latest of theirs.
    """

    delay_us: int | None
    idle_ms: int | None
    marks: TimeMarks = field(default=TimeMarks(), compare=False)
    future_max_us: int | None = None
    align_us: int | None = None
    producers_max: int | None = None
    settle_us: int | None = None
    idle_advance: bool = False

    @property
    def heartbeat_ms(self) -> int | None:
        """How often operators need the time although there is nothing to read; None: never.

        The planner itself sees when a partition becomes idle; it does not see producers. Once all
        partitions are idle, so are their producers, and no heartbeat is needed, unless the
        watermark advances while idle.
        """
        if self.settle_us is not None:
            return _HEARTBEAT_MS_MIN
        if self.idle_ms is not None and (self.producers_max is not None or self.idle_advance):
            return max(_HEARTBEAT_MS_MIN, self.idle_ms // 10)
        return None


@dataclass(frozen=True)
class SplitTime:
    """What one split of one batch says about time.

    ``watermark_us`` is the watermark that its own records give the partition; None: they give none.
    Where producers are told apart, the ``history`` has it.
    """

    partition: int
    split: int
    watermark_us: int | None
    history: ProducerHistory | None = None

    def to_message(self) -> list[Any]:
        history = None if self.history is None else self.history.to_message()
        return [self.partition, self.split, self.watermark_us, history]

    @classmethod
    def from_message(cls, message: Sequence[Any]) -> SplitTime:
        partition, split, reached_us, history = message
        return cls(
            partition,
            split,
            reached_us,
            None if history is None else ProducerHistory.from_message(history),
        )


@dataclass(frozen=True)
class SourceTime:
    """What one batch says about the time of one source.

    All but ``splits`` comes from the planner and is the same in a repeated batch: which
    partitions are ``idle``, which are ``behind`` (have unread records after this batch), the job's
    running time ``clock_ms``, the time of day ``wall_us`` when the planner looked, and while
    all partitions are idle for how much running time the last of them has been quiet.
    """

    splits: tuple[SplitTime, ...]
    partition_count: int
    idle: frozenset[int]
    clock_ms: int = 0
    behind: frozenset[int] = frozenset()
    wall_us: int | None = None
    quiet_ms: int = 0

    def to_message(self) -> dict[str, Any]:
        return {
            "splits": [split.to_message() for split in self.splits],
            "partitions": self.partition_count,
            "idle": sorted(self.idle),
            "clock_ms": self.clock_ms,
            "behind": sorted(self.behind),
            "wall_us": self.wall_us,
            "quiet_ms": self.quiet_ms,
        }

    @classmethod
    def merge(cls, messages: Iterable[Mapping[str, Any]]) -> SourceTime:
        """Merge what the tasks of one batch saw, in any order of their messages."""
        every = list(messages)
        splits = [SplitTime.from_message(split) for message in every for split in message["splits"]]
        return cls(
            tuple(sorted(splits, key=lambda split: (split.partition, split.split))),
            max(message["partitions"] for message in every),
            frozenset(p for message in every for p in message["idle"]),
            max(message["clock_ms"] for message in every),
            frozenset(p for message in every for p in message["behind"]),
            every[0]["wall_us"],
            every[0]["quiet_ms"],
        )


class Advance(NamedTuple):
    """The clock after a batch, and for each split the watermark in force before its first event."""

    clock: InputClock
    split_watermarks_us: dict[int, int]


@dataclass(frozen=True)
class InputClock:
    """The time of one input of an operator, as of the batches taken in so far.

    ``active``: not all of its partitions are idle. An operator leaves the inputs out that are not,
    and while none is it follows those in idle advance (``advances``).
    """

    partitions: Mapping[int, int]  # the watermark that each has reached, microseconds
    watermark_us: int = NO_WATERMARK
    active: bool = True
    producers: Mapping[int, Producers] = field(default_factory=dict)  # by partition
    advances: bool = False

    @classmethod
    def initial(cls) -> InputClock:
        return cls({})

    def advanced(
        self, seen: SourceTime, rule: WatermarkRule, source: int, operator_us: int = NO_WATERMARK
    ) -> Advance:
        """Apply what a batch says about a source's time.

        ``operator_us`` is the operator's watermark before the batch, with which events of an idle
        partition or input are compared when it returns.
        """
        held_to_us = max(self.watermark_us, operator_us)
        reached = dict(self.partitions)
        told_apart = {number: known.copy() for number, known in self.producers.items()}
        split_watermarks_us: dict[int, int] = {}
        for split in seen.splits:
            before_us = reached.get(split.partition, NO_WATERMARK)
            if split.history is None:
                sessions_us = [before_us]
                after_us = before_us if split.watermark_us is None else split.watermark_us
            else:
                producers = told_apart.setdefault(split.partition, Producers(before_us))
                sessions_us = producers.replay(split.history, seen.clock_ms)
                after_us = producers.watermark_us
            for session, session_us in enumerate(sessions_us):
                number = split_number(source, split.partition, split.split, session)
                split_watermarks_us[number] = max(session_us, held_to_us)
            reached[split.partition] = max(before_us, after_us)
        for number, producers in told_apart.items():
            producers.evict(
                seen.clock_ms,
                rule.idle_ms,
                behind=number in seen.behind,
                producers_max=rule.producers_max,
            )
            reached[number] = max(reached[number], producers.watermark_us)
        if seen.wall_us is not None and rule.settle_us is not None:
            for number in set(range(seen.partition_count)) - seen.behind:
                settled_us = seen.wall_us - rule.settle_us
                reached[number] = max(reached.get(number, NO_WATERMARK), settled_us)
        active = [p for p in range(seen.partition_count) if p not in seen.idle]
        low_us = min((reached.get(p, NO_WATERMARK) for p in active), default=NO_WATERMARK)
        advances = rule.idle_advance and not active and bool(reached)
        if advances:
            low_us = max(reached.values()) + seen.quiet_ms * 1000
        clock = InputClock(
            reached, max(self.watermark_us, low_us), bool(active), told_apart, advances
        )
        return Advance(clock, split_watermarks_us)

    def advanced_to(self, watermark_us: int, *, active: bool, advances: bool) -> InputClock:
        """Return the clock after an upstream operator announced its watermark."""
        watermark_us = max(self.watermark_us, watermark_us)
        return replace(self, watermark_us=watermark_us, active=active, advances=advances)

    @property
    def forgotten(self) -> int:
        """How many producers were evicted because there were more than the maximum."""
        return sum(known.forgotten for known in self.producers.values())

    def to_status(self) -> dict[str, Any]:
        """Return the watermarks of the partitions and of the input, for the status of an app."""
        reached = {str(number): at_us for number, at_us in sorted(self.partitions.items())}
        told_apart = sorted(self.producers.items())
        slowest = {str(n): known.slowest() for n, known in told_apart if known.watermarks_us}
        return {
            "watermark": self.watermark_us,
            "active": self.active,
            "advances": self.advances,
            "partitions": reached,
            "slowest": slowest,
        }

    def to_message(self) -> dict[str, Any]:
        message: dict[str, Any] = {
            "partitions": sorted(self.partitions.items()),
            "watermark": self.watermark_us,
            "active": self.active,
            "advances": self.advances,
        }
        if self.producers:
            message["producers"] = [
                [number, known.to_message()] for number, known in sorted(self.producers.items())
            ]
        return message

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> InputClock:
        return cls(
            dict(message["partitions"]),
            message["watermark"],
            message["active"],
            {number: Producers.from_message(m) for number, m in message.get("producers", ())},
            message["advances"],
        )


@dataclass(frozen=True)
class PartitionProgress:
    """How far one partition has been read, and when (in running time) it last had records.

    ``arrived_ms`` is the largest timestamp in the log before ``offset``; it is kept where the event
    time is the time of arrival.
    """

    offset: int
    active_ms: int
    arrived_ms: int = 0


def idle_partitions(
    progress: Sequence[PartitionProgress],
    behind: Sequence[bool],
    clock_ms: int,
    idle_ms: int | None,
) -> frozenset[int]:
    """Name the partitions that count as idle at ``clock_ms`` of running time.

    A partition that still has unread records is never idle, however long ago its last one was
    read; and time in which the job did not run does not count, as ``clock_ms`` is running time.
    """
    if idle_ms is None:
        return frozenset()
    return frozenset(
        number
        for number, (at, waits) in enumerate(zip(progress, behind, strict=True))
        if not waits and clock_ms - at.active_ms >= idle_ms
    )
