"""Sets of MySQL's GTIDs: which transactions a server has executed, of whichever server they were first of.

As text: ``uuid:1-5:7,other:1-3``, as ``gtid_executed`` has it. A number is from 1 on; intervals are half-open here.

Source: MySQL 8.0 Reference Manual, "GTID Format and Storage", GTID Sets.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Self

from millstream.errors import ConfigError

_INTERVAL = re.compile(r"(\d+)(?:-(\d+))?")
Interval = tuple[int, int]


@dataclass(slots=True)
class GtidSet:
    """A set of GTIDs. ``intervals``: of each UUID, those of its numbers, sorted, apart from each other."""

    intervals: dict[str, list[Interval]] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the set that a text of MySQL's says.

        Raises:
            ConfigError: it is not one that is read here; such as one with tags (MySQL 8.3).
        """
        found = cls()
        for part in re.sub(r"\s", "", text).lower().split(","):
            source, *intervals = part.split(":")
            for interval in intervals:
                numbers = _INTERVAL.fullmatch(interval)
                if numbers is None:
                    raise ConfigError(
                        f"the server's GTIDs have {interval[:40]!r} in {part[:80]!r}, which is no interval of numbers. Use "
                        "GTIDs without tags."
                    )
                found.add_interval(source, int(numbers[1]), int(numbers[2] or numbers[1]) + 1)
        return found

    def add(self, source: str, number: int) -> None:
        """Put in one GTID."""
        self.add_interval(source, number, number + 1)

    def add_interval(self, source: str, start: int, end: int) -> None:
        """Put in the numbers of an interval."""
        there = self.intervals.get(source)
        if there and there[-1][1] == start:  # mostly the next one
            there[-1] = (there[-1][0], end)
            return
        self.intervals[source] = _joined([*(there or ()), (start, end)])

    def __contains__(self, gtid: tuple[str, int]) -> bool:
        source, number = gtid
        return any(start <= number < end for start, end in self.intervals.get(source, ()))

    def end(self, source: str) -> int:
        """Return the number behind the last of a UUID; 0 if it has none."""
        there = self.intervals.get(source)
        return there[-1][1] if there else 0

    def minus(self, other: GtidSet) -> GtidSet:
        """Return those that are not in the other set."""
        left = {
            source: _subtracted(there, other.intervals.get(source, []))
            for source, there in self.intervals.items()
        }
        return GtidSet({source: there for source, there in left.items() if there})

    def __bool__(self) -> bool:
        return bool(self.intervals)

    def __str__(self) -> str:
        return ",".join(
            ":".join([source, *map(_shown, there)])
            for source, there in sorted(self.intervals.items())
        )


def _shown(interval: Interval) -> str:
    start, end = interval
    return str(start) if end == start + 1 else f"{start}-{end - 1}"


def _joined(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the same numbers as intervals that do not touch."""
    found: list[Interval] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return found


def _subtracted(intervals: list[Interval], others: list[Interval]) -> list[Interval]:
    found = []
    for start, end in intervals:
        at = start
        for other_start, other_end in others:
            if other_end > at and other_start < end:
                if other_start > at:
                    found.append((at, other_start))
                at = max(at, other_end)
        if at < end:
            found.append((at, end))
    return found
