"""Panes against a naive model that replays their definition event by event."""

from collections import Counter, defaultdict
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from example_counts import some
from hypothesis import given, settings
from hypothesis import strategies as st

import millstream as ms
from millstream import testing
from millstream.log.murmur2 import partition_of

START = datetime(1970, 1, 1, tzinfo=UTC)
NEVER = -(10**9)
SEEDS = range(20)


@dataclass
class Event:
    at: datetime
    key: str
    n: int = 1


def event(at, key, n=1):
    return Event(START + timedelta(seconds=at), key, n)


def seconds(at):
    return (at - START).total_seconds()


def declared(window, *, delay=0, lateness=0, policy="drop", by="key", **emit):
    app = ms.App("panes", log="unused", buckets=2)
    stream = app.topic("events", Event, key="key").stream(
        time="at",
        watermark=ms.watermark(timedelta(seconds=delay), idle=None),
        lateness=timedelta(seconds=lateness),
        late=policy,
    )
    windowed = stream.window(window, by=by).emit(**emit)
    # Without pane columns a discarded part cannot be told from another: they need no key of a view.
    out = windowed.agg(n=ms.count(), total=ms.sum("n"))
    out.view("out", key=["window_start", "window_end", *(["key"] if by else [])])
    return app


# ── the model ───────────────────────────────────────────────────────────────────────────────────


@dataclass
class Pane:
    kind: str
    numbers: list  # what came since the pane before
    last: bool = False


class Window:
    """One window of one key, as the definition of panes tells it."""

    def __init__(self, start, end, early, late, clock):
        self.start, self.end, self.early, self.late = start, end, early, late
        self.pending, self.behind, self.panes = [], [], []
        self.due = None
        self.any_in_time = self.closed = self.expired = False

    def fire(self, kind, numbers, *, last=False):
        self.panes.append(Pane(kind, list(numbers), last))

    def tick(self, clock):
        if self.due is not None and clock >= self.due and not self.expired:
            self.fire("late" if self.closed else "early", self.pending)
            self.pending, self.due = [], None

    def take(self, number, is_late, clock):
        self.any_in_time |= not is_late
        if is_late and not self.closed:
            self.behind.append(number)
            return
        self.pending.append(number)
        firing, kind = (self.late, "late") if self.closed else (self.early, "early")
        if isinstance(firing, int) and len(self.pending) == firing:
            self.fire(kind, self.pending)
            self.pending = []
        if isinstance(firing, float) and self.due is None:
            self.due = clock + firing

    def reach(self, watermark, lateness, clock):
        if not self.closed and watermark >= self.end:
            if self.any_in_time:
                self.fire("on_time", self.pending, last=lateness == 0)
            self.pending, self.due, self.closed = [], None, True
            behind, self.behind = self.behind, []
            for number in behind:
                self.take(number, True, clock)
        if self.closed and not self.expired and watermark >= self.end + lateness:
            if self.pending:
                self.fire("late", self.pending, last=True)
            self.pending, self.due, self.expired = [], None, True


@dataclass(frozen=True)
class Hops:
    """Windows of one size, one begun every slide."""

    size: int
    slide: int
    name = "hopping"

    def declared(self):
        size, slide = timedelta(seconds=self.size), timedelta(seconds=self.slide)
        return ms.hopping(size, slide, allow_gaps=True)

    def holding(self, at):
        start = at // self.slide * self.slide
        while start > at - self.size:
            yield start, start + self.size
            start -= self.slide


@dataclass(frozen=True)
class Growth:
    """Windows that begin together, each a step longer than the one before."""

    size: int
    step: int
    name = "cumulating"

    def declared(self):
        return ms.cumulating(timedelta(seconds=self.size), timedelta(seconds=self.step))

    def holding(self, at):
        start = at // self.size * self.size
        for end in range(int(start) + self.step, int(start) + self.size + 1, self.step):
            if at < end:
                yield start, end


SHAPES = [Hops(10, 10), Hops(10, 5), Hops(10, 4), Hops(7, 10), Hops(12, 8)]
SHAPES += [Growth(12, 3), Growth(10, 5), Growth(30, 6), Growth(7, 7)]


def model(rows, *, partitions, shape, delay, lateness, early, late):
    """Replay rows and Ticks: a firing is None, a count (int) or running seconds (float)."""
    if late is None:
        lateness = 0
    seen = dict.fromkeys(range(partitions), NEVER)
    windows, books, clock = {}, Counter(), 0.0
    for row in rows:
        if isinstance(row, float):
            clock += row
            for window in windows.values():
                window.tick(clock)
            continue
        at, partition = seconds(row.at), partition_of(row.key.encode(), partitions)
        reached = seen[partition] - delay
        missed = count = 0
        for start, end in shape.holding(at):
            count += 1
            if end + lateness <= reached:
                missed += 1
                continue
            window = windows.setdefault(
                (start, end, row.key), Window(start, end, early, late, clock)
            )
            window.take(row.n, end <= reached, clock)
        books["windows_missed"] += missed
        books["filtered" if not count else "late" if missed == count else "held"] += 1
        seen[partition] = max(seen[partition], at)
        watermark = min(seen.values()) - delay
        for window in windows.values():
            window.reach(watermark, lateness, clock)
    return windows, books, min(seen.values()) - delay


def told(pane, so_far, mode):
    numbers = pane.numbers if mode == "discard" else so_far
    return len(numbers), sum(numbers)


def expected_rows(windows, mode, suppress):
    """Say, for each window and key, what rows come out: (diff, kind, index, first, last, n, total)."""
    expected = {}
    for key, window in windows.items():
        rows, so_far, before = [], [], None
        index = 0
        for pane in window.panes:
            so_far = so_far + pane.numbers
            says = told(pane, so_far, mode)
            unchanged = not pane.numbers if mode == "discard" else before and says == before[-2:]
            if suppress and unchanged:
                continue
            if mode == "retract" and before:
                rows.append((-1, *before))
            before = (pane.kind, index, index == 0, pane.last, *says)
            rows.append((1, *before))
            index += 1
        if rows:
            expected[key] = rows
    return expected


def rows_by_key(table):
    found = defaultdict(list)
    for row in table.to_dicts():
        pane = [row[name] for name in ("pane_kind", "pane_index", "pane_first", "pane_last")]
        diff = row.get("__diff", 1)
        values = (diff, *pane, row["n"], row["total"])
        found[seconds(row["window_start"]), seconds(row["window_end"]), row["key"]].append(values)
    return dict(found)


def ticked(rows):
    return [testing.Tick(timedelta(seconds=r)) if isinstance(r, float) else r for r in rows]


def word(firing):
    if isinstance(firing, int):
        return ms.after_count(firing) if firing > 1 else "each"
    return timedelta(seconds=firing) if isinstance(firing, float) else firing


keys = st.sampled_from("abcdef")
row_draws = st.lists(
    st.tuples(st.integers(-30, 70), keys, st.integers(-1, 3)) | st.sampled_from([3.0, 10.0]),
    max_size=40,
)
firings = st.sampled_from([None, 1, 2, 3, 5.0, 12.0])


@settings(deadline=None, max_examples=some(150))
@given(
    drawn=row_draws,
    mode=st.sampled_from(["update", "discard", "retract"]),
    early=firings,
    late=firings,
    suppress=st.booleans(),
    shape=st.sampled_from(SHAPES),
    delay=st.sampled_from([0, 7, 30]),
    lateness=st.sampled_from([0, 5, 40]),
    partitions=st.sampled_from([1, 4, 7]),
    batches=st.integers(1, 5),
    seed=st.integers(0, 99),
    long_way=st.booleans(),
)
def test_panes_are_the_models_event_by_event(
    rows_given,
    the_long_way,
    drawn,
    mode,
    early,
    late,
    suppress,
    shape,
    delay,
    lateness,
    partitions,
    batches,
    seed,
    long_way,
):
    rows = [d if isinstance(d, float) else event(*d) for d in drawn]
    windows, books, _ = model(
        rows, partitions=partitions, shape=shape, delay=delay,
        lateness=lateness, early=early, late=late,
    )  # fmt: skip
    app = declared(
        shape.declared(), delay=delay, lateness=lateness, mode=mode, early=word(early), late=word(late),
        suppress_unchanged=suppress, panes=True,
    )  # fmt: skip
    inputs = {"events": ticked(rows)}
    with the_long_way(taken=long_way):
        out = rows_given(app, inputs, batches=batches, partitions=partitions, seed=seed)
    assert rows_by_key(out.rows["out"]) == expected_rows(windows, mode, suppress)
    line = next((x for step, x in out.books.items() if step.startswith(shape.name)), Counter())
    assert {name: line[name] for name in books} == dict(books)
    assert line["read"] == sum(books[name] for name in ("held", "late", "filtered"))


@settings(deadline=None, max_examples=some(50))
@given(
    drawn=st.lists(st.tuples(st.integers(-30, 70), keys, st.integers(-1, 3)), max_size=40),
    shape=st.sampled_from(SHAPES),
    policy=st.sampled_from(["drop", "side"]),
    delay=st.sampled_from([0, 7]),
    lateness=st.sampled_from([0, 5, 40]),
    partitions=st.sampled_from([1, 4, 7]),
    batches=st.integers(1, 5),
    seed=st.integers(0, 99),
)
def test_final_windows_have_once_all_that_came_before_they_expired(
    rows_given, drawn, shape, policy, delay, lateness, partitions, batches, seed
):
    rows = [event(*d) for d in drawn]
    windows, books, _ = model(
        rows, partitions=partitions, shape=shape, delay=delay,
        lateness=lateness, early=None, late=1,
    )  # fmt: skip
    app = declared(shape.declared(), delay=delay, lateness=lateness, policy=policy, mode="final")
    out = rows_given(app, {"events": rows}, batches=batches, partitions=partitions, seed=seed)
    found = [
        (
            *map(seconds, (row["window_start"], row["window_end"])),
            *(row["key"], row["n"], row["total"]),
        )
        for row in out.rows["out"].to_dicts()
    ]
    expired = {key: window for key, window in windows.items() if window.expired}
    numbers = {key: [n for pane in w.panes for n in pane.numbers] for key, w in expired.items()}
    assert sorted(found) == sorted((*key, len(ns), sum(ns)) for key, ns in numbers.items())
    line = next((x for step, x in out.books.items() if step.startswith(shape.name)), Counter())
    assert {name: line[name] for name in books} == dict(books)
