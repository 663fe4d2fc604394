"""Tracks which offsets may be committed when records are finished in another order than they were read.

Only offsets before the first unfinished record may be committed. So after any crash no record is skipped,
and the finished records after that one are delivered again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping


class OffsetTracker:
    """Tracks the unfinished records of the partitions that are read. Not thread-safe.

    Args:
        starts: The next offset of each partition.
    """

    def __init__(self, starts: Mapping[int, int]) -> None:
        self._next = dict(starts)
        self._begun: dict[int, deque[int]] = {}
        self._finished: dict[int, set[int]] = {}

    def begin(self, partition: int, offset: int) -> None:
        """Record that a record was read; those of a partition come in the order of their offsets."""
        self._begun.setdefault(partition, deque()).append(offset)

    def finish(self, partition: int, offset: int) -> None:
        """Record that a record was delivered or dead-lettered."""
        begun, finished = self._begun[partition], self._finished.setdefault(partition, set())
        finished.add(offset)
        while begun and begun[0] in finished:
            first = begun.popleft()
            finished.remove(first)
            self._next[partition] = first + 1

    @property
    def unfinished(self) -> int:
        """How many records were read and cannot be committed: they would be delivered again."""
        return sum(map(len, self._begun.values()))

    def committable(self) -> dict[int, int]:
        """Return the offset of each partition below which everything is finished."""
        return dict(self._next)
