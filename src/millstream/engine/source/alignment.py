"""Watermark alignment: the partitions of a backlog are read up to about the same event time.

A partition's *pace* is the number of its records per microsecond of event time when it was last read. With
it the planner estimates the event time after a number of records, and chooses a time up to which all
partitions together have the records of one batch. Paces are kept in memory: a job that has just started
knows none, and reads its first two batches in proportion to the unread records of each partition.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

PartitionKey = tuple[str, int]  # topic and partition
EventTimes = Mapping[str, Mapping[int, int]]  # topic → partition → the largest one read, µs


@dataclass
class Paces:
    """The paces known so far, and the last offset and event time of each partition."""

    known: dict[PartitionKey, float] = field(default_factory=dict)
    _last: dict[PartitionKey, tuple[int, int]] = field(default_factory=dict)

    def update(self, offsets: Mapping[str, Sequence[int]], event_times: EventTimes) -> None:
        """Update the paces with the offsets and event times that have been read."""
        for topic, times in event_times.items():
            for number, at_us in times.items():
                if number < len(offsets.get(topic, ())):
                    self._update((topic, number), offsets[topic][number], at_us)

    def _update(self, partition: PartitionKey, offset: int, at_us: int) -> None:
        last = self._last.get(partition)
        if last is not None and offset > last[0]:
            # Records that did not advance time count as if they were within one microsecond.
            self.known[partition] = (offset - last[0]) / max(1, at_us - last[1])
        if last is None or offset > last[0]:
            self._last[partition] = (offset, at_us)


def divide_proportionally(
    waiting: Mapping[PartitionKey, int], rows_max: int
) -> dict[PartitionKey, int]:
    """Divide a batch in proportion to the unread records; all of them, if the batch can hold them."""
    total = sum(waiting.values())
    if total <= rows_max:
        return dict(waiting)
    return {at: -(-count * rows_max // total) for at, count in waiting.items()}


def align_event_times(
    waiting: Mapping[PartitionKey, int],
    times_us: Mapping[PartitionKey, int],
    paces: Mapping[PartitionKey, float],
    rows_max: int,
) -> dict[PartitionKey, int]:
    """Divide a batch so that the partitions reach the same event time, if they keep their pace.

    ``waiting``, more than ``rows_max`` in all, are the unread records of the partitions, whose event times
    and paces are known. A partition that is past the common time already gets nothing.
    """

    def up_to(until_us: int) -> dict[PartitionKey, int]:
        return {
            at: min(count, max(0, math.ceil(paces[at] * (until_us - times_us[at]))))
            for at, count in waiting.items()
        }

    low = min(times_us[at] for at in waiting)  # up to here there is nothing to read
    high = max(times_us[at] + math.ceil(waiting[at] / paces[at]) for at in waiting)
    while high - low > 1:
        middle = (low + high) // 2
        if sum(up_to(middle).values()) > rows_max:
            high = middle
        else:
            low = middle
    return divide_proportionally(up_to(high), rows_max)
