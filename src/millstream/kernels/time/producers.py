"""The producers of one partition, each with a watermark of its own.

A partition's watermark is the minimum over its *active* producers, and never goes back. A producer
becomes active with its first record, at the watermark that the partition had then; it goes with a
record that says so, by having been quiet for long enough, or because more than the stated number
are active (the one heard longest ago goes first). One that returns is a new one. So a producer's
watermark is never behind its partition's: what it lets pass finds its window open.

What a producer finds when it joins depends on how far the others were at that very record, and who
the others are is known only after the shuffle. So a split sends a *history* that can be replayed from
any state: its *producer sessions* (one producer's records up to its end) in the order in which they
begin, and between two such beginnings how far each session got. The history is as long as there are
sessions, and between the beginnings as there are producers heard: for n producers that all send
often, about n log n entries a split, however many records there are.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

_NAMED_MAX = 3


@dataclass
class HistoryInterval:
    """What happened between the beginnings of two sessions.

    ``watermarks_us`` gives, for the sessions that got further, their watermark at its end; ``punctuation_us``
    is a promise made for the whole partition; ``ended`` lists the sessions that ended, in order.
    """

    watermarks_us: dict[int, int] = field(default_factory=dict)
    punctuation_us: int | None = None
    ended: list[int] = field(default_factory=list)

    def to_message(self) -> list[Any]:
        return [list(self.watermarks_us.items()), self.punctuation_us, self.ended]


@dataclass(frozen=True)
class ProducerHistory:
    """What a split shows of its producers: see the module.

    ``names`` are the producers of the sessions, in the order in which these begin; ``intervals`` has
    one more entry, and the session i begins between the intervals i and i + 1. ``last`` gives each
    session's last record, by its place in the split.
    """

    names: tuple[str | None, ...]
    intervals: tuple[HistoryInterval, ...]
    last: tuple[int, ...]

    def to_message(self) -> list[Any]:
        return [self.names, [interval.to_message() for interval in self.intervals], self.last]

    @classmethod
    def from_message(cls, message: Sequence[Any]) -> ProducerHistory:
        names, intervals, last = message
        advances = (
            HistoryInterval(dict(reached), promised, ended)
            for reached, promised, ended in intervals
        )
        return cls(tuple(names), tuple(advances), tuple(last))


@dataclass
class Producers:
    """The active producers of a partition, in the order in which they were last heard."""

    watermark_us: int
    watermarks_us: dict[str | None, int] = field(default_factory=dict)
    last_seen_ms: dict[str | None, int] = field(default_factory=dict)  # running time
    behind_ms: int = 0  # when the partition was last seen to have unread records, running time
    forgotten: int = 0

    def copy(self) -> Producers:
        return Producers(
            self.watermark_us,
            dict(self.watermarks_us),
            dict(self.last_seen_ms),
            self.behind_ms,
            self.forgotten,
        )

    def replay(self, history: ProducerHistory, clock_ms: int) -> list[int]:
        """Replay a split; give for each session the watermark that its producer had before it."""
        low = _MinimumHeap(self.watermarks_us)
        before: list[int] = []
        for number, interval in enumerate(history.intervals):
            self._replay_interval(interval, history.names, low)
            if number == len(history.names):
                break
            name = history.names[number]
            if name not in self.watermarks_us:
                self.watermark_us = low.rise(self.watermark_us)
                self.watermarks_us[name] = self.watermark_us
                low.add(name)
            before.append(self.watermarks_us[name])
        self.watermark_us = low.rise(self.watermark_us)
        for _, name in sorted(
            zip(history.last, history.names, strict=True), key=lambda one: one[0]
        ):
            if name in self.watermarks_us:
                # now it is the one heard last
                self.watermarks_us[name] = self.watermarks_us.pop(name)
                self.last_seen_ms[name] = clock_ms
        return before

    def _replay_interval(
        self, interval: HistoryInterval, names: Sequence[str | None], low: _MinimumHeap
    ) -> None:
        # The order within an interval does not matter as long as producers end last: until the next
        # session begins, nothing asks for the watermark, and all that happens lets it rise.
        for session, reached_us in interval.watermarks_us.items():
            self.watermarks_us[names[session]] = max(self.watermarks_us[names[session]], reached_us)
        if interval.punctuation_us is not None:
            self.watermark_us = max(self.watermark_us, interval.punctuation_us)
            for name, reached_us in self.watermarks_us.items():
                self.watermarks_us[name] = max(reached_us, interval.punctuation_us)
        for session in interval.ended:
            self.watermark_us = low.rise(self.watermark_us)
            self._drop(names[session])

    def evict(
        self, clock_ms: int, idle_ms: int | None, *, behind: bool, producers_max: int | None
    ) -> None:
        """Let go who has been quiet for ``idle_ms`` of running time, and who is too many.

        While the partition has unread records nobody counts as quiet: the records may be theirs.
        Those who fell silent earlier go earlier, however much time has passed at once.
        """
        if behind:
            self.behind_ms = clock_ms
        elif idle_ms is not None:
            quiet = [
                (self.last_seen_ms[name], name)
                for name in self.watermarks_us
                if clock_ms - max(self.last_seen_ms[name], self.behind_ms) >= idle_ms
            ]
            for _, together in groupby(quiet, key=lambda one: one[0]):  # they are in this order
                for _, name in together:
                    self._drop(name)
                self._rise()
        if producers_max is not None:
            for name in list(self.watermarks_us)[: max(0, len(self.watermarks_us) - producers_max)]:
                self._drop(name)
                self.forgotten += 1
        self._rise()

    def slowest(self) -> dict[str, Any]:
        """Name a few of the producers that hold the watermark, and say how many there are."""
        least_us = min(self.watermarks_us.values(), default=None)
        names = [name for name, at_us in self.watermarks_us.items() if at_us == least_us]
        return {"names": names[:_NAMED_MAX], "count": len(names)}

    def _rise(self) -> None:
        lowest_us = min(self.watermarks_us.values(), default=self.watermark_us)
        self.watermark_us = max(self.watermark_us, lowest_us)

    def _drop(self, name: str | None) -> None:
        del self.watermarks_us[name]
        self.last_seen_ms.pop(name, None)

    def to_message(self) -> dict[str, Any]:
        entries = [[name, at, self.last_seen_ms[name]] for name, at in self.watermarks_us.items()]
        return {
            "watermark": self.watermark_us,
            "active": entries,
            "behind_ms": self.behind_ms,
            "forgotten": self.forgotten,
        }

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> Producers:
        return cls(
            message["watermark"],
            {name: at for name, at, _ in message["active"]},
            {name: heard_ms for name, _, heard_ms in message["active"]},
            message["behind_ms"],
            message["forgotten"],
        )


class _MinimumHeap:
    """The minimum over producers whose watermarks rise: a heap in which old entries may remain."""

    def __init__(self, reached: Mapping[str | None, int]) -> None:
        self._reached = reached
        self._serial = 0
        self._heap: list[tuple[int, int, str | None]] = []
        self._fill(reached)

    def _fill(self, names: Iterable[str | None]) -> None:
        for name in names:
            self._serial += 1
            self._heap.append((self._reached[name], self._serial, name))
        heapq.heapify(self._heap)

    def add(self, name: str | None) -> None:
        self._serial += 1
        heapq.heappush(self._heap, (self._reached[name], self._serial, name))

    def rise(self, watermark_us: int) -> int:
        """Return the minimum, or what it was where that is later or there is nobody."""
        while self._heap:
            reached_us, serial, name = self._heap[0]
            now_us = self._reached.get(name)
            if now_us is None:
                heapq.heappop(self._heap)
            elif now_us != reached_us:
                heapq.heapreplace(self._heap, (now_us, serial, name))
            else:
                return max(watermark_us, reached_us)
        return watermark_us
