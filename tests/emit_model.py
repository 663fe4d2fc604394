"""What windows of every kind leave, whatever fires their rows: naive, an event at a time.

Rows are ``(time, key, n)``, times in seconds. A result is what a table of the emitted rows has at the end of all input,
when every window that has an end is over. Which events a window takes is written from the rule of its kind; that triggers and modes
change when rows come, and not what is left of them, is one rule for all kinds. The exceptions are windows that fire once, of which
:func:`first_panes` says how far each had come.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

NEVER, AT_LAST = -(10**9), 10**9
GAP, SIZE = 3.0, 4.0  # of sessions, and of sliding windows
COUNT, SLIDE, TIMEOUT = 3, 2, 7.0
FIXED = ("tumbling", "hopping", "cumulating")
COUNTED = ("count", "count with slide", "count with timeout")
KINDS = (*FIXED, "session", "sliding", "sliding with rank", *COUNTED)


@dataclass(frozen=True)
class Came:
    """An event: what its partition had reached before it, and the running time at which it was read."""

    time: float
    key: str
    n: int
    seen: float = NEVER
    clock: float = 0.0


@dataclass
class Left:
    """A window of a key: its events, as far as they count. ``number`` is a count window's."""

    key: str
    start: float
    end: float
    events: list[Came] = field(default_factory=list)
    number: int | None = None

    @property
    def n(self) -> int:
        return len(self.events)

    @property
    def s(self) -> int:
        return sum(one.n for one in self.events)


def apart(earlier: Came, later: Came) -> float:
    """Return the time from one to another, to the microsecond."""
    return round(later.time - earlier.time, 6)


def spans(kind: str, time: float) -> list[tuple[float, float]]:
    """Return the windows in time that hold a time."""
    if kind == "tumbling":
        return [(time // 10 * 10, time // 10 * 10 + 10)]
    if kind == "hopping":  # of 10 seconds, every 4
        starts = [at for at in range(-12, int(time) + 1, 4) if at <= time < at + 10]
        return [(float(at), float(at + 10)) for at in starts]
    start = time // 20 * 20
    return [(start, start + size) for size in (5, 10, 15, 20) if time < start + size]


def windows_left(kind: str, events: Sequence[Came]) -> list[Left]:
    """Return the windows of all events, in their order of arrival; count windows also where they are not full."""
    by_key: dict[str, list[Came]] = defaultdict(list)
    for one in events:
        by_key[one.key].append(one)
    return [left for key, mine in by_key.items() for left in _of_key(kind, key, mine)]


def _of_key(kind: str, key: str, mine: Sequence[Came]) -> Iterable[Left]:
    if kind in FIXED:
        found: dict[tuple[float, float], Left] = {}
        for one in mine:
            for start, end in spans(kind, one.time):
                found.setdefault((start, end), Left(key, start, end)).events.append(one)
        return found.values()
    if kind == "session":
        return _sessions(key, mine)
    if kind.startswith("sliding"):
        return [
            Left(key, row.time - SIZE, row.time, [o for o in mine if 0 <= apart(o, row) <= SIZE])
            for row in mine
        ]
    if kind == "count with timeout":
        return _until_timeouts(key, mine)
    slide = SLIDE if kind == "count with slide" else COUNT
    starts = range(0, len(mine), slide)
    return [
        _counted(key, number, mine[start : start + COUNT]) for number, start in enumerate(starts)
    ]


def _sessions(key: str, mine: Sequence[Came]) -> list[Left]:
    found: list[Left] = []
    for one in sorted(mine, key=lambda one: one.time):
        if not found or apart(found[-1].events[-1], one) > GAP:
            found.append(Left(key, one.time, 0.0))
        found[-1].events.append(one)
        found[-1].end = one.time + GAP
    return found


def _counted(key: str, number: int, events: Sequence[Came]) -> Left:
    return Left(key, events[0].time, max(o.time for o in events), list(events), number)


def _until_timeouts(key: str, mine: Sequence[Came]) -> list[Left]:
    found: list[list[Came]] = []
    for one in mine:
        full = found and len(found[-1]) == COUNT
        if not found or full or round(one.seen - found[-1][0].time, 6) >= TIMEOUT:
            found.append([])
        found[-1].append(one)
    return [_counted(key, number, events) for number, events in enumerate(found)]


def shown_of_open(left: Left, early: object) -> Left | None:
    """Return what panes have shown of a count window that is not full, and never times out."""
    if left.n == COUNT or early in ("batch", "time"):
        return left
    if early is None:
        return None
    assert isinstance(early, int)
    shown = left.n - left.n % early
    return _counted(left.key, left.number or 0, left.events[:shown]) if shown else None


# ── windows that fire once ──────────────────────────────────────────────────────────────────────


def first_panes(
    kind: str,
    items: Sequence[Came | float],
    early: float,
    partition_of: Callable[[str], int],
    partitions: int,
) -> list[Left]:
    """Return what each window had when it fired; no event is late, and all keys' events are in the order of time.

    ``items`` are events, and seconds of running time that pass between them; at last all time passes. ``early`` is a number of events, or
    (a float) seconds of running time.
    """
    events = [one for one in items if isinstance(one, Came)]
    whole = windows_left(kind, events)
    if kind.startswith("sliding"):  # one row, which is emitted for each event at its time
        whole = list({(left.key, left.end): left for left in whole}.values())
    reached = dict.fromkeys(range(partitions), NEVER)
    firsts = [_OnePane(kind, left, early) for left in whole]
    clock = 0.0
    for item in items:
        if isinstance(item, Came):
            for one in firsts:
                one.take(item, clock)
            place = partition_of(item.key)
            reached[place] = max(reached[place], int(item.time))
            for one in firsts:
                one.reach(min(reached.values()))
        else:
            clock += item
            for one in firsts:
                one.tick(clock)
    for one in firsts:
        one.reach(AT_LAST)
        one.tick(AT_LAST)
    full = kind in ("count", "count with slide")
    made = [(one.pane(full=full), one) for one in firsts]
    return [left for left, one in made if left is not None for _ in range(one.times)]


@dataclass
class _OnePane:
    kind: str
    whole: Left
    early: float
    taken: list[Came] = field(default_factory=list)
    new: int = 0
    due: float | None = None
    there: bool = False  # of a sliding window: its own event has come
    closed: bool = False
    fired_early: bool = False

    @property
    def ends(self) -> float:
        """The watermark at which it is over, unless it is full before."""
        past = 1e-7 if self.kind.startswith(("session", "sliding")) else 0.0
        if self.kind == "count with timeout":
            return self.whole.events[0].time + TIMEOUT
        return float("inf") if self.kind in COUNTED else self.whole.end + past

    @property
    def times(self) -> int:
        """How often its row comes."""
        if not self.kind.startswith("sliding"):
            return 1
        return sum(one.time == self.whole.end for one in self.taken)

    def take(self, one: Came, clock: float) -> None:
        if self.closed or not any(one is mine for mine in self.whole.events):
            return
        self.taken.append(one)
        if self.kind.startswith("sliding"):
            self.there |= one.time == self.whole.end
            if not self.there:
                return
        self.new += 1
        full = self.kind in COUNTED and len(self.taken) == COUNT
        if isinstance(self.early, int):
            self.closed = self.fired_early = full or self.new == self.early
        elif full:
            self.closed = True
        elif self.due is None:
            self.due = clock + self.early

    def tick(self, clock: float) -> None:
        if not self.closed and self.due is not None and clock >= self.due:
            self.closed = self.fired_early = True

    def reach(self, watermark: float) -> None:
        self.closed |= bool(self.taken) and watermark >= self.ends

    def pane(self, *, full: bool) -> Left | None:
        """Return what the pane has; None if there is none: ``full``, where a window fires only when it is full."""
        if full and not self.fired_early and len(self.taken) < COUNT:
            return None
        left, events = self.whole, self.taken
        end = max(one.time for one in events) + GAP if self.kind == "session" else left.end
        return Left(left.key, left.start, end, events, left.number)
