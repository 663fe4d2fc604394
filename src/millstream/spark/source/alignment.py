"""How partitions of a backlog are read in step: all to one event time, as far as can be foreseen.

A partition's *pace* is how many records it had per microsecond of event time when it was last read.
By it the planner foresees how far so many records lead, and chooses a time up to which all partitions
together have what a batch may hold. Paces are kept in memory: a job that has just started knows none,
and reads its first two batches in proportion to what each partition holds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

PartitionKey = tuple[str, int]  # topic and partition
EventTimes = Mapping[str, Mapping[int, int]]  # topic → partition → the largest one read, µs


@dataclass
class Paces:
    """The paces known so far, and where each partition stood when it was last looked at."""

    known: dict[PartitionKey, float] = field(default_factory=dict)
    _stood: dict[PartitionKey, tuple[int, int]] = field(default_factory=dict)  # offset, event time

    def update(self, offsets: Mapping[str, Sequence[int]], event_times: EventTimes) -> None:
        """Take in how far each partition is read: in records, and in event time."""
        for topic, times in event_times.items():
            for number, at_us in times.items():
                if number < len(offsets.get(topic, ())):
                    self._update((topic, number), offsets[topic][number], at_us)

    def _update(self, place: PartitionKey, offset: int, at_us: int) -> None:
        stood = self._stood.get(place)
        if stood is not None and offset > stood[0]:
            # Records that moved no time are dense: as many as there were within a microsecond.
            self.known[place] = (offset - stood[0]) / max(1, at_us - stood[1])
        if stood is None or offset > stood[0]:
            self._stood[place] = (offset, at_us)


def divide_proportionally(
    waiting: Mapping[PartitionKey, int], rows_max: int
) -> dict[PartitionKey, int]:
    """Divide a batch in proportion to what waits; everything, if it holds that."""
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
    """Divide a batch so that the partitions come to one event time, if they keep their pace.

    ``waiting``, more than ``rows_max`` in all, names the partitions; of each the time that it has
    reached and its pace are known. Those that are past that time already get nothing.
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
