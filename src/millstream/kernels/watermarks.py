"""Event time: what has been seen of each partition, and what may be taken as complete.

Watermark W means that no further event with a time before W is expected. A partition's watermark
follows its records as the rule says: it is the largest event time seen in it less the allowed
delay, or what a punctuation promised, whichever is later; where producers are told apart, the
minimum over the partition's producers of that (:mod:`producers`); over processing time, the latest
arrival, or the planner's clock once all has been read. It never goes back. An input's watermark is
the minimum over its partitions, leaving out the idle ones; while all are idle it holds.

Lateness is judged per partition: an event is too late when *its own partition's* watermark (its
own producer's, where they are told apart) had passed the expiry of its window before the event was
read. As the input's watermark never exceeds that of an active partition, whatever passes this test
finds its window open; and the verdict depends on the order within the partition alone, not on where
batches were cut or on how fast other partitions were read. A partition that was idle meets the
input's watermark when it returns.

What records say is read off before the shuffle, lane by lane (:mod:`lane_clocks`); here are the
rule, the messages and the clocks that outlive the batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import polars as pl

from millstream.kernels.log_order import lane_of
from millstream.kernels.producers import LaneStory, Producers

UNSEEN = -(2**62)  # a watermark that nothing has moved yet; far below any time, safe to add to
_HEARTBEAT_MS_MIN = 1000


def held_back(watermark_us: int, by_us: int) -> int:
    """Give a watermark that stays behind another; behind one that nothing has moved, that one."""
    return watermark_us - by_us if watermark_us > UNSEEN else UNSEEN


@dataclass(frozen=True)
class TimeMarks:
    """What else a record says about time, as expressions over the value's fields.

    ``punctuation`` (a Datetime, mostly null): nothing earlier comes after this record.
    ``punctuation_only``: the record moves time and is nothing more. ``producer``: whose record it
    is. ``ends``: it is the last one of its producer.
    """

    punctuation: pl.Expr | None = None
    punctuation_only: pl.Expr | None = None
    producer: pl.Expr | None = None
    ends: pl.Expr | None = None

    def given(self) -> dict[str, pl.Expr]:
        """Give those that there are, by name."""
        return {name: mark for name, mark in vars(self).items() if mark is not None}

    def columns_read(self) -> set[str]:
        return {name for mark in self.given().values() for name in mark.meta.root_names()}


@dataclass(frozen=True)
class WatermarkRule:
    """How a stream's watermark follows its events. Durations in microseconds.

    ``delay_us`` is how far it stays behind the newest event; None: only punctuation moves it.
    ``idle_ms`` is the running time after which a partition (or producer) without new records is
    left out of the minimum; None keeps it in for ever. An event whose time is more than
    ``future_max_us`` after its arrival is dead. A partition that is ``align_us`` ahead of the
    slowest waits while there is a backlog. With ``producers_max`` producers are told apart, and at
    most so many of a partition are followed. With ``settle_us`` the time is processing time: the
    event time is the time of arrival, and a partition that has been read to its end reaches the
    wall clock less so much. ``idle_advance``: while all partitions are idle the watermark goes on
    with running time, from the latest that one of them has reached.
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
        """How often time has to be told though there is nothing to read; None: it need not be.

        The planner itself sees when a partition becomes idle; it does not see producers. Once all
        partitions are idle, so are their producers, and there is nothing more to tell, unless the
        watermark goes on all the same.
        """
        if self.settle_us is not None:
            return _HEARTBEAT_MS_MIN
        if self.idle_ms is not None and (self.producers_max is not None or self.idle_advance):
            return max(_HEARTBEAT_MS_MIN, self.idle_ms // 10)
        return None


@dataclass(frozen=True)
class LaneTime:
    """What one lane of one batch says about time.

    ``reached_us`` is the watermark that its own records give the partition; None: they say nothing.
    Where producers are told apart, their ``story`` says all.
    """

    partition: int
    split: int
    reached_us: int | None
    story: LaneStory | None = None

    def to_message(self) -> list[Any]:
        story = None if self.story is None else self.story.to_message()
        return [self.partition, self.split, self.reached_us, story]

    @classmethod
    def from_message(cls, message: Sequence[Any]) -> LaneTime:
        partition, split, reached_us, story = message
        return cls(
            partition, split, reached_us, None if story is None else LaneStory.from_message(story)
        )


@dataclass(frozen=True)
class SourceTime:
    """What one batch says about the time of one source.

    All but ``lanes`` comes from the planner and is the same when the batch is run again: which
    partitions are ``idle``, which are ``behind`` (have unread records after this batch), the job's
    running time ``clock_ms``, for processing time the wall clock when the planner looked, and while
    all partitions are idle for how much running time the last of them has been quiet.
    """

    lanes: tuple[LaneTime, ...]
    partition_count: int
    idle: frozenset[int]
    clock_ms: int = 0
    behind: frozenset[int] = frozenset()
    wall_us: int | None = None
    quiet_ms: int = 0

    def to_message(self) -> dict[str, Any]:
        return {
            "lanes": [lane.to_message() for lane in self.lanes],
            "partitions": self.partition_count,
            "idle": sorted(self.idle),
            "clock_ms": self.clock_ms,
            "behind": sorted(self.behind),
            "wall_us": self.wall_us,
            "quiet_ms": self.quiet_ms,
        }

    @classmethod
    def merge(cls, messages: Iterable[Mapping[str, Any]]) -> SourceTime:
        """Put together what the tasks of one batch saw, in whatever order their messages came."""
        told = list(messages)
        lanes = [LaneTime.from_message(lane) for message in told for lane in message["lanes"]]
        return cls(
            tuple(sorted(lanes, key=lambda lane: (lane.partition, lane.split))),
            max(message["partitions"] for message in told),
            frozenset(p for message in told for p in message["idle"]),
            max(message["clock_ms"] for message in told),
            frozenset(p for message in told for p in message["behind"]),
            told[0]["wall_us"],
            told[0]["quiet_ms"],
        )


class Advance(NamedTuple):
    """The clock after a batch, and for each lane the watermark in force before its first event."""

    clock: InputClock
    baselines: dict[int, int]


@dataclass(frozen=True)
class InputClock:
    """The time of one input of an operator, as of the batches taken in so far.

    ``active``: not all of its partitions are idle. An operator leaves the inputs out that are not,
    and while none is it follows those that go on by themselves (``advances``).
    """

    partitions: Mapping[int, int]  # the watermark that each has reached, microseconds
    watermark_us: int = UNSEEN
    active: bool = True
    producers: Mapping[int, Producers] = field(default_factory=dict)  # by partition
    advances: bool = False

    @classmethod
    def fresh(cls) -> InputClock:
        return cls({})

    def advanced(
        self, seen: SourceTime, rule: WatermarkRule, source: int, operator_us: int = UNSEEN
    ) -> Advance:
        """Take in what a batch says of a source's time.

        ``operator_us`` is the operator's watermark before the batch: what an idle partition or
        input finds when it returns.
        """
        held_to_us = max(self.watermark_us, operator_us)
        reached = dict(self.partitions)
        told_apart = {number: known.copy() for number, known in self.producers.items()}
        baselines: dict[int, int] = {}
        for lane in seen.lanes:
            before_us = reached.get(lane.partition, UNSEEN)
            if lane.story is None:
                stays_us = [before_us]
                after_us = before_us if lane.reached_us is None else lane.reached_us
            else:
                producers = told_apart.setdefault(lane.partition, Producers(before_us))
                stays_us = producers.take(lane.story, seen.clock_ms)
                after_us = producers.watermark_us
            for stay, stay_us in enumerate(stays_us):
                number = lane_of(source, lane.partition, lane.split, stay)
                baselines[number] = max(stay_us, held_to_us)
            reached[lane.partition] = max(before_us, after_us)
        for number, producers in told_apart.items():
            producers.let_go(
                seen.clock_ms,
                rule.idle_ms,
                behind=number in seen.behind,
                producers_max=rule.producers_max,
            )
            reached[number] = max(reached[number], producers.watermark_us)
        if seen.wall_us is not None and rule.settle_us is not None:
            for number in set(range(seen.partition_count)) - seen.behind:
                settled_us = seen.wall_us - rule.settle_us
                reached[number] = max(reached.get(number, UNSEEN), settled_us)
        active = [p for p in range(seen.partition_count) if p not in seen.idle]
        low_us = min((reached.get(p, UNSEEN) for p in active), default=UNSEEN)
        advances = rule.idle_advance and not active and bool(reached)
        if advances:
            low_us = max(reached.values()) + seen.quiet_ms * 1000
        clock = InputClock(
            reached, max(self.watermark_us, low_us), bool(active), told_apart, advances
        )
        return Advance(clock, baselines)

    def advanced_to(self, watermark_us: int, *, active: bool, advances: bool) -> InputClock:
        """Give the clock after an upstream operator announced its watermark."""
        watermark_us = max(self.watermark_us, watermark_us)
        return replace(self, watermark_us=watermark_us, active=active, advances=advances)

    @property
    def forgotten(self) -> int:
        """How many producers were let go because there were more than are followed."""
        return sum(known.forgotten for known in self.producers.values())

    def told(self) -> dict[str, Any]:
        """Say for people where it stands: what each partition has reached, and all together."""
        reached = {str(number): at_us for number, at_us in sorted(self.partitions.items())}
        told_apart = sorted(self.producers.items())
        slowest = {str(n): known.slowest() for n, known in told_apart if known.reached}
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
