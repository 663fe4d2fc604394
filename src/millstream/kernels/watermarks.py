"""Event time: what has been seen of each partition, and what may be taken as complete.

A partition's watermark is the largest event time seen in it less the allowed delay; it never goes
back. An input's watermark is the minimum over its partitions, leaving out the idle ones; while all
are idle it holds. Watermark W means that no event earlier than W is expected.

Lateness is judged per partition: an event is too late when *its own partition's* watermark had
passed the expiry of its window before the event was read. As the input's watermark never exceeds
that of an active partition, whatever passes this test finds its window open; and the verdict
depends on the order within the partition alone, not on where batches were cut or on how fast other
partitions were read. A partition that was idle meets the input's watermark when it returns.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

UNSEEN = -(2**62)  # a watermark that nothing has moved yet; far below any time, safe to add to
_SPLIT_BITS = 12
_PARTITION_BITS = 24
_OFFSET_BITS = 40


@dataclass(frozen=True)
class WatermarkRule:
    """How a stream's watermark follows its events. Durations in microseconds.

    ``idle_ms`` is the running time after which a partition without new records is left out of the
    minimum; None keeps it in for ever.
    """

    delay_us: int
    idle_ms: int | None


def lane_of(source: int, partition: int, split: int) -> int:
    """Give the number of one split of one partition's records, as one source reads them in a batch.

    Sorted by it, lanes are in the order of source, partition and offset.
    """
    assert 0 <= split < 1 << _SPLIT_BITS, split
    assert 0 <= partition < 1 << _PARTITION_BITS, partition
    return ((source << _PARTITION_BITS | partition) << _SPLIT_BITS) | split


def order_of(partition: int, offset: int) -> int:
    """Give a record's place in the order of arrival: by partition, and within it by offset."""
    assert 0 <= offset < 1 << _OFFSET_BITS, offset
    return partition << _OFFSET_BITS | offset


Numbers = npt.NDArray[np.int64]


def source_in(lanes: Numbers) -> Numbers:
    """Give the sources that lanes belong to."""
    return lanes >> (_PARTITION_BITS + _SPLIT_BITS)


def partition_in(orders: Numbers) -> Numbers:
    """Give the partitions of places in the order of arrival."""
    return orders >> _OFFSET_BITS


def offset_in(orders: Numbers) -> Numbers:
    """Give the offsets of places in the order of arrival."""
    return orders & ((1 << _OFFSET_BITS) - 1)


@dataclass(frozen=True)
class LaneTime:
    """The largest event time in one lane of one batch; None when it held no event."""

    partition: int
    split: int
    time_us_max: int | None


@dataclass(frozen=True)
class SourceTime:
    """What one batch says about the time of one source. ``clock_ms`` is the job's running time."""

    lanes: tuple[LaneTime, ...]
    partition_count: int
    idle: frozenset[int]
    clock_ms: int = 0

    def to_message(self) -> dict[str, Any]:
        lanes = [[lane.partition, lane.split, lane.time_us_max] for lane in self.lanes]
        return {
            "lanes": lanes,
            "partitions": self.partition_count,
            "idle": sorted(self.idle),
            "clock_ms": self.clock_ms,
        }

    @classmethod
    def merge(cls, messages: Iterable[Mapping[str, Any]]) -> SourceTime:
        """Put together what the tasks of one batch saw, in whatever order their messages came."""
        lanes: list[LaneTime] = []
        partition_count = clock_ms = 0
        idle: set[int] = set()
        for message in messages:
            lanes += [LaneTime(*lane) for lane in message["lanes"]]
            partition_count = max(partition_count, message["partitions"])
            idle.update(message["idle"])
            clock_ms = max(clock_ms, message["clock_ms"])
        ordered = sorted(lanes, key=lambda lane: (lane.partition, lane.split))
        return cls(tuple(ordered), partition_count, frozenset(idle), clock_ms)


@dataclass(frozen=True)
class InputClock:
    """The time of one input of an operator, as of the batches taken in so far."""

    partitions: Mapping[int, int]  # the largest event time seen, microseconds
    watermark_us: int = UNSEEN

    @classmethod
    def fresh(cls) -> InputClock:
        return cls({})

    def baselines(self, seen: SourceTime, rule: WatermarkRule, source: int) -> dict[int, int]:
        """Give, per lane of a source, the watermark that was in force before its first event."""
        latest = dict(self.partitions)
        baselines: dict[int, int] = {}
        for lane in seen.lanes:
            reached = latest.get(lane.partition, UNSEEN)
            own_us = reached - rule.delay_us if reached > UNSEEN else UNSEEN
            baselines[lane_of(source, lane.partition, lane.split)] = max(own_us, self.watermark_us)
            if lane.time_us_max is not None:
                latest[lane.partition] = max(reached, lane.time_us_max)
        return baselines

    def after(self, seen: SourceTime, rule: WatermarkRule) -> InputClock:
        """Give the clock once the batch has been taken in."""
        latest = dict(self.partitions)
        for lane in seen.lanes:
            if lane.time_us_max is not None:
                latest[lane.partition] = max(latest.get(lane.partition, UNSEEN), lane.time_us_max)
        active = [p for p in range(seen.partition_count) if p not in seen.idle]
        low_us = min((latest.get(p, UNSEEN) for p in active), default=UNSEEN)
        reached = low_us - rule.delay_us if low_us > UNSEEN else UNSEEN
        return InputClock(latest, max(self.watermark_us, reached))

    def advanced_to(self, watermark_us: int) -> InputClock:
        """Give the clock after an upstream operator announced its watermark."""
        return replace(self, watermark_us=max(self.watermark_us, watermark_us))

    def to_message(self) -> dict[str, Any]:
        return {"partitions": sorted(self.partitions.items()), "watermark": self.watermark_us}

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> InputClock:
        return cls(dict(message["partitions"]), message["watermark"])


@dataclass(frozen=True)
class PartitionProgress:
    """How far one partition has been read, and when (in running time) it last had records."""

    offset: int
    active_ms: int


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
