"""The producers of one partition, each with a watermark of its own.

A partition's watermark is the minimum over its *active* producers, and never goes back. A producer
becomes active with its first record, at the watermark that the partition had then; it goes with a
record that says so, by having been quiet for long enough, or because more than the stated number
are active (the one heard longest ago goes first). One that returns is a new one. So a producer's
watermark is never behind its partition's: what it lets pass finds its window open.

What a producer finds when it joins depends on how far the others were at that very record, and who
the others are is known only after the shuffle. So a lane tells a *story* that can be replayed from
any state: its *stays* (a stay is one producer's records up to its end) in the order in which they
begin, and between two such beginnings how far each stay got. The story is as long as there are
stays, and between the beginnings as there are producers heard: for n producers that all send
often, about n log n entries a lane, however many records there are.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

_NAMED_MAX = 3


@dataclass
class Stretch:
    """What happened between the beginnings of two stays.

    ``reached`` gives, for the stays that got further, their watermark at its end; ``promised_us``
    is a promise made for the whole partition; ``ended`` lists the stays that ended, in order.
    """

    reached: dict[int, int] = field(default_factory=dict)
    promised_us: int | None = None
    ended: list[int] = field(default_factory=list)

    def to_message(self) -> list[Any]:
        return [list(self.reached.items()), self.promised_us, self.ended]


@dataclass(frozen=True)
class LaneStory:
    """What a lane shows of its producers: see the module.

    ``names`` are the producers of the stays, in the order in which these begin; ``stretches`` has
    one more entry, and the stay i begins between the stretches i and i + 1. ``last`` gives each
    stay's last record, by its place in the lane.
    """

    names: tuple[str | None, ...]
    stretches: tuple[Stretch, ...]
    last: tuple[int, ...]

    def to_message(self) -> list[Any]:
        return [self.names, [stretch.to_message() for stretch in self.stretches], self.last]

    @classmethod
    def from_message(cls, message: Sequence[Any]) -> LaneStory:
        names, stretches, last = message
        told = (Stretch(dict(reached), promised, ended) for reached, promised, ended in stretches)
        return cls(tuple(names), tuple(told), tuple(last))


@dataclass
class Producers:
    """The active producers of a partition, in the order in which they were last heard."""

    watermark_us: int
    reached: dict[str | None, int] = field(default_factory=dict)
    heard_ms: dict[str | None, int] = field(default_factory=dict)  # running time
    behind_ms: int = 0  # when the partition was last seen to have unread records, running time
    forgotten: int = 0

    def copy(self) -> Producers:
        return Producers(
            self.watermark_us,
            dict(self.reached),
            dict(self.heard_ms),
            self.behind_ms,
            self.forgotten,
        )

    def take(self, story: LaneStory, clock_ms: int) -> list[int]:
        """Replay a lane; give for each stay the watermark that its producer had before it."""
        low = _Lowest(self.reached)
        before: list[int] = []
        for number, stretch in enumerate(story.stretches):
            self._replay(stretch, story.names, low)
            if number == len(story.names):
                break
            name = story.names[number]
            if name not in self.reached:
                self.watermark_us = low.rise(self.watermark_us)
                self.reached[name] = self.watermark_us
                low.enter(name)
            before.append(self.reached[name])
        self.watermark_us = low.rise(self.watermark_us)
        for _, name in sorted(zip(story.last, story.names, strict=True), key=lambda one: one[0]):
            if name in self.reached:
                self.reached[name] = self.reached.pop(name)  # now it is the one heard last
                self.heard_ms[name] = clock_ms
        return before

    def _replay(self, stretch: Stretch, names: Sequence[str | None], low: _Lowest) -> None:
        # The order within a stretch does not matter as long as producers end last: until the next
        # stay begins, nothing asks for the watermark, and all that happens lets it rise.
        for stay, reached_us in stretch.reached.items():
            self.reached[names[stay]] = max(self.reached[names[stay]], reached_us)
        if stretch.promised_us is not None:
            self.watermark_us = max(self.watermark_us, stretch.promised_us)
            for name, reached_us in self.reached.items():
                self.reached[name] = max(reached_us, stretch.promised_us)
        for stay in stretch.ended:
            self.watermark_us = low.rise(self.watermark_us)
            self._drop(names[stay])

    def let_go(
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
                (self.heard_ms[name], name)
                for name in self.reached
                if clock_ms - max(self.heard_ms[name], self.behind_ms) >= idle_ms
            ]
            for _, together in groupby(quiet, key=lambda one: one[0]):  # they are in this order
                for _, name in together:
                    self._drop(name)
                self._rise()
        if producers_max is not None:
            for name in list(self.reached)[: max(0, len(self.reached) - producers_max)]:
                self._drop(name)
                self.forgotten += 1
        self._rise()

    def slowest(self) -> dict[str, Any]:
        """Name a few of the producers that hold the watermark, and say how many there are."""
        least_us = min(self.reached.values(), default=None)
        names = [name for name, at_us in self.reached.items() if at_us == least_us]
        return {"names": names[:_NAMED_MAX], "count": len(names)}

    def _rise(self) -> None:
        lowest_us = min(self.reached.values(), default=self.watermark_us)
        self.watermark_us = max(self.watermark_us, lowest_us)

    def _drop(self, name: str | None) -> None:
        del self.reached[name]
        self.heard_ms.pop(name, None)

    def to_message(self) -> dict[str, Any]:
        entries = [[name, at, self.heard_ms[name]] for name, at in self.reached.items()]
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


class _Lowest:
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

    def enter(self, name: str | None) -> None:
        self._serial += 1
        heapq.heappush(self._heap, (self._reached[name], self._serial, name))

    def rise(self, watermark_us: int) -> int:
        """Give the minimum, or what it was where that is later or there is nobody."""
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
