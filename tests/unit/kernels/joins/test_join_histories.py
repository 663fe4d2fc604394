"""Each kind of join on many histories, against plain Python: rows late and in time, bags, nulls, deletions, key changes.

A run has hundreds of histories at once, each with keys of its own, so that ten thousand for each kind are a matter of
minutes: ``MILLSTREAM_JOIN_HISTORIES=10000``, as ``make test-long`` says. They share the watermarks, which the models
compute from the rule as users read it: a row is late if the watermark of its partition, as the rows before it made it, is above
its time and the lateness. What a join gives is computed row by row over the rows in time.
"""

from __future__ import annotations

import os
import random
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from zlib import crc32

import polars as pl
import pytest
from example_counts import some
from hypothesis import given, settings
from hypothesis import strategies as st
from table_model import KernelRun, joined

import millstream as ms
from millstream import testing
from millstream.kernels.frames import DIFF, TIME
from millstream.kernels.joins.join_input import JoinedColumns, JoinInput, key_names
from millstream.kernels.joins.table_join import TableJoin

HISTORIES = int(os.environ.get("MILLSTREAM_JOIN_HISTORIES", some(200)))
TOGETHER = min(HISTORIES, 500)
RUNS = settings(max_examples=-(-HISTORIES // TOGETHER))
pytestmark = pytest.mark.timeout(3600)
SEEDS = given(st.integers(0, 1 << 40))
START = datetime(1970, 1, 1, tzinfo=UTC)
END_S = 10_000
FOREVER = float("inf")


def instant(seconds):
    return START + timedelta(seconds=seconds)


def span(seconds):
    return f"{seconds} seconds" if seconds >= 0 else f"-{-seconds} seconds"


# ── events and watermarks ───────────────────────────────────────────────────────────────────


@dataclass
class Event:
    at: datetime
    k: str | None
    n: int
    gone: bool = False


@dataclass
class Drawn:
    """One event of a side, in the order of arrival; ``seen`` is its partition's watermark before it."""

    at: int
    k: str | None
    n: int
    part: int
    gone: bool = False
    seen: float = -FOREVER


@dataclass
class Side:
    """The events of one topic, and how far behind the newest of a partition its watermark is."""

    delay: int
    partitions: int
    events: list[Drawn] = field(default_factory=list)
    reached: dict[int, float] = field(default_factory=dict)

    def draw(self, dice, *, nulls, noise, by_key):
        """Draw events of all histories, nearly in the order of time."""
        for history in range(TOGETHER):
            first = history % 80  # near to each other, so that many match, one after the other
            for _ in range(dice.choice([0, 1, 3, 5, 8])):
                key = None if dice.random() < nulls else f"{history}{dice.choice('aaab')}"
                part = crc32(f"{key}".encode()) if by_key else dice.getrandbits(8)
                time = first + dice.randint(0, 10)
                self.events.append(Drawn(time, key, 0, part % self.partitions))
        self.events.sort(key=lambda event: event.at + dice.uniform(0, noise))
        for number, event in enumerate(self.events):
            event.n, event.gone = number, dice.random() < 0.25
            event.seen = self.reached.get(event.part, -FOREVER)
            self.reached[event.part] = max(event.seen, event.at - self.delay)

    @property
    def watermark(self):
        return min(self.reached.get(part, -FOREVER) for part in range(self.partitions))

    def in_time(self, lateness):
        return [event for event in self.events if event.seen <= event.at + lateness]

    def rows(self, topic, *, closed):
        rows = [
            testing.Row(Event(instant(e.at), e.k, e.n, e.gone), partition=e.part)
            for e in self.events
        ]
        return [*rows, testing.Watermark(topic, at=instant(END_S))] if closed else rows

    @property
    def rule(self):
        return ms.watermark(span(self.delay), idle=None)


def by_key(events):
    found = defaultdict(list)
    for event in events:
        found[event.k].append(event)
    return found


def sides(dice, *, nulls=0.1, of_one_key_together=False, late_versions=False):
    """Draw both sides; ``late_versions``: the left is in time, and goes on while the right is late."""
    partitions = dice.choice([1, 1, 1, 4] if late_versions else [1, 1, 4, 7])
    made = []
    for number in range(2):
        delay = dice.choice([0, 1] if late_versions else [0, 0, 0, 2, 6])
        side = Side(delay, partitions)
        noise = (0, 8)[number] if late_versions else dice.choice([0, 0, 3, 8])
        side.draw(dice, nulls=nulls, noise=noise, by_key=of_one_key_together)
        made.append(side)
    return made


def found_rows(rows_given, app, left, right, *, closed, dice, columns):
    """Run the app in random batches; return the bag of rows, those taken back subtracted."""
    inputs = {"l": left.rows("l", closed=closed), "r": right.rows("r", closed=closed)}
    seed = dice.getrandbits(20)
    out = rows_given(
        app,
        inputs,
        partitions=left.partitions,
        batches=dice.choice([1, 2, 5, 9, 16]),
        seed=seed,
    )
    rows = out.rows["to(out)"]
    made = Counter()
    if rows.height:
        diffs = rows["__diff"].to_list() if "__diff" in rows.columns else [None] * rows.height
        for row, diff in zip(rows.select(columns).rows(), diffs, strict=True):
            made[row] += 1 if diff is None else diff
    return Counter({row: count for row, count in made.items() if count})


def check(found, expected):
    assert found == expected, (sorted(map(str, (found - expected).items()))[:5], "instead of", sorted(map(str, (expected - found).items()))[:5])  # fmt: skip


# ── within an interval ──────────────────────────────────────────────────────────────────────

INTERVAL = [
    ("inner", "final"),
    *((how, emit) for how in ("left", "right", "full") for emit in ("final", "eager")),
]


@pytest.mark.parametrize(("how", "emit"), INTERVAL)
@RUNS
@SEEDS
def test_within_an_interval(rows_given, how, emit, seed):
    dice = random.Random(f"{seed}")  # of a text, also small seeds differ from the first draw on
    left, right = sides(dice)
    lower = dice.randint(-8, 8)
    upper = lower + dice.choice([0, 1, 5, 12])
    lateness = dice.choice([0, 0, 4]), dice.choice([0, 0, 4])
    closed, nulls_equal = dice.random() < 0.7, dice.random() < 0.2
    app = ms.App("histories", log="unused", buckets=dice.choice([1, 3]))
    streams = [
        app.topic(topic, Event).stream(time="at", watermark=side.rule, lateness=span(late))
        for topic, side, late in zip("lr", (left, right), lateness, strict=True)
    ]
    streams[0].join(
        streams[1],
        "k",
        within=(span(lower), span(upper)),
        how=how,
        emit=emit,
        nulls_equal=nulls_equal,
    ).to("out")

    watermark = END_S if closed else min(left.watermark, right.watermark)
    ours, theirs = left.in_time(lateness[0]), right.in_time(lateness[1])
    partners = by_key(theirs)
    expected, paired = Counter(), set()
    for one in ours:
        if one.k is None and not nulls_equal:
            continue
        for other in partners[one.k]:
            if lower <= other.at - one.at <= upper:
                expected[one.k, one.n, other.n, max(one.at, other.at) * 1_000_000] += 1
                paired |= {("l", one.n), ("r", other.n)}
    alone = [("l", one, one.at + upper + lateness[1]) for one in ours if how in ("left", "full")]
    alone += [
        ("r", one, one.at - lower + lateness[0]) for one in theirs if how in ("right", "full")
    ]
    for side, one, last in alone:
        at_once = emit == "eager" or (one.k is None and not nulls_equal)
        if (side, one.n) not in paired and (at_once or watermark > last):
            numbers = (one.n, None) if side == "l" else (None, one.n)
            expected[one.k, *numbers, one.at * 1_000_000] += 1
    columns = ["k", "n", "n_right", "__time"]
    check(
        found_rows(rows_given, app, left, right, closed=closed, dice=dice, columns=columns),
        expected,
    )


# ── as of a time ────────────────────────────────────────────────────────────────────────────


def nearest(time, candidates, direction, allow_equal, tolerance):
    """Choose of (time, number) pairs, which are in the order of the log, as the documentation says."""
    near = [c for c in candidates if tolerance is None or abs(c[0] - time) <= tolerance]
    before = [c for c in near if c[0] < time or (allow_equal and c[0] == time)]
    after = [c for c in near if c[0] > time or (allow_equal and c[0] == time)]
    last = max(before, default=None)
    first = max((c for c in after if c[0] == min(after)[0]), default=None)
    if direction != "nearest":
        return last if direction == "backward" else first
    if last is None or first is None:
        return last or first
    return last if time - last[0] <= first[0] - time else first


def check_asof(rows_given, seed, *, table, direction="backward", late="drop"):
    dice = random.Random(f"{seed}")  # of a text, also small seeds differ from the first draw on
    left, right = sides(
        dice,
        nulls=0 if table else 0.1,
        of_one_key_together=True,
        late_versions=late != "drop" and dice.random() < 0.7,
    )
    for event in left.events:
        event.k = None if dice.random() < 0.1 else event.k
    lateness, corrected = dice.choice([0, 0, 4]), dice.choice([5, 40]) if late == "correct" else 0
    how, allow_equal = dice.choice(["left", "inner"]), dice.random() < 0.7
    tolerance = dice.choice([0, 3, 8] if direction != "backward" else [None, None, 0, 8])
    closed = dice.random() < 0.7
    app = ms.App("histories", log="unused", buckets=dice.choice([1, 3]))
    stream = app.topic("l", Event).stream(time="at", watermark=left.rule, lateness=span(lateness))
    topic = app.topic("r", Event, key="k")
    if table:
        order = dice.choice(["offset", "time"])
        versions = topic.table(time="at", watermark=right.rule, deleted=pl.col("gone"), order=order)
        versions = versions.select("k", pl.col("n"))
    else:
        versions = topic.stream(time="at", watermark=right.rule).select("k", "n")
    stream.join_asof(
        versions,
        "k",
        how=how,
        direction=direction,
        allow_equal=allow_equal,
        tolerance=None if tolerance is None else span(tolerance),
        late=late,
        lateness=span(corrected) if corrected else None,
    ).to("out")

    waits = lateness + (0 if direction == "backward" else tolerance)
    watermark = END_S if closed else min(left.watermark, right.watermark)
    versions_of = by_key(right.events)
    expected = Counter()
    for one in left.in_time(lateness):
        if watermark <= one.at + waits:
            continue
        candidates = {
            (other.at, other.n): other.gone and table
            for other in (versions_of[one.k] if one.k is not None else ())
            if counts(other, one.at, late, waits, corrected)
        }
        match = nearest(one.at, list(candidates), direction, allow_equal, tolerance)
        number = None if match is None or candidates[match] else match[1]
        if number is not None or how == "left":
            expected[one.k, one.n, number, one.at * 1_000_000] += 1
    columns = ["k", "n", "n_right", "__time"]
    check(
        found_rows(rows_given, app, left, right, closed=closed, dice=dice, columns=columns),
        expected,
    )


def counts(version, time, late, waits, corrected):
    """Say whether a version, or quote, counts for a row of a time: see decision 0049."""
    if late == "drop":
        return version.seen <= version.at
    return version.seen <= version.at or time >= version.seen - waits - corrected


@pytest.mark.parametrize("late", ["drop", "keep", "correct"])
@RUNS
@SEEDS
def test_as_of_a_time_of_a_table(rows_given, late, seed):
    check_asof(rows_given, seed, table=True, late=late)


@pytest.mark.parametrize("direction", ["backward", "forward", "nearest"])
@RUNS
@SEEDS
def test_as_of_a_time_of_a_stream(rows_given, direction, seed):
    check_asof(rows_given, seed, table=False, direction=direction)


# ── looked up ───────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("order", ["offset", "time"])
@RUNS
@SEEDS
def test_looked_up(rows_given, order, seed):
    """In one batch: of two topics a batch takes what is there, so more of them are not comparable."""
    dice = random.Random(f"{seed}")  # of a text, also small seeds differ from the first draw on
    left, right = sides(dice, nulls=0, of_one_key_together=True)
    how = dice.choice(["left", "inner"])
    app = ms.App("histories", log="unused", buckets=dice.choice([1, 3]))
    stream = app.topic("l", Event).stream(time="at", watermark=left.rule)
    table = app.topic("r", Event, key="k").table(time="at", deleted=pl.col("gone"), order=order)
    stream.lookup(table.select("k", "n"), "k", how=how).to("out")
    inputs, arrivals = {}, []
    for topic, side in (("l", left), ("r", right)):
        millisecond, rows = 0, []
        for event in side.events:
            event.k = None if topic == "l" and dice.random() < 0.1 else event.k
            millisecond += dice.choice([0, 1, 1, 2])
            arrivals.append((millisecond, topic == "l", event))
            values = Event(instant(event.at), event.k, event.n, event.gone)
            arrived = START + timedelta(milliseconds=millisecond)
            rows.append(testing.Row(values, at=arrived, partition=event.part))
        inputs[topic] = rows
    held, expected = {}, Counter()
    for _, of_left, event in sorted(arrivals, key=lambda each: each[:2]):
        if of_left:
            version = held.get(event.k)
            number = None if version is None or version.gone else version.n
            if number is not None or how == "left":
                expected[event.n, number] += 1
        elif order == "offset" or event.k not in held or event.at >= held[event.k].at:
            held[event.k] = event
    out = rows_given(app, inputs, partitions=left.partitions, seed=dice.getrandbits(20))
    rows = out.rows["to(out)"]
    found = Counter(rows.select("n", "n_right").rows()) if rows.height else Counter()
    check(found, expected)


# ── tables ──────────────────────────────────────────────────────────────────────────────────

LEFT = {"h": pl.Int64(), "k": pl.Int64(), "v": pl.Int64()}
RIGHT = {"h": pl.Int64(), "j": pl.Int64(), "w": pl.Int64()}


@dataclass
class Bag:
    """One table of one history: its rows, of which some may be equal, and the changes of a batch."""

    columns: tuple[str, ...]
    unique: bool = False
    rows: list[dict[str, int | None]] = field(default_factory=list)

    def change(self, dice, history):
        """Add, delete and replace rows, also rows that go in the batch in which they came."""
        changes = []
        for _ in range(dice.choice([0, 0, 1, 2, 3])):
            if self.rows and dice.random() < 0.4:
                changes.append({**self.rows.pop(dice.randrange(len(self.rows))), DIFF: -1})
            if dice.random() < 0.8:
                key = dice.choice([None, 0, 1, 2])
                row = dict(
                    zip(self.columns, (history, key, dice.choice([None, 0, 1])), strict=True)
                )
                row[TIME] = dice.randint(0, 2)
                if self.unique and any(r[self.columns[1]] == key for r in self.rows):
                    continue
                self.rows.append(row)
                changes.append({**row, DIFF: 1})
        return changes


def kernel_of(how, nulls_equal, where):
    right = (("w", "w", RIGHT["w"]),)
    types = (LEFT["h"], LEFT["k"])
    columns = JoinedColumns(
        JoinInput(("h", "k"), types, tuple((n, n, t) for n, t in LEFT.items())),
        JoinInput(("h", "j"), types, () if how in ("semi", "anti") and where is None else right),
        tuple(zip(("h", "k"), key_names(2), strict=True)),
        how not in ("semi", "anti"),
    )
    return TableJoin("join", how, columns, nulls_equal, where, (False, False))


def naive(left, right, how, nulls_equal, rule):
    ours = [{**row, "left time": row[TIME]} for row in left]
    theirs = [{**row, "right time": row[TIME]} for row in right]
    for row in (*ours, *theirs):
        del row[TIME]
    on = {"h": "h", "k": "j"}
    for row in joined(ours, theirs, on, how=how, where=rule, nulls_equal=nulls_equal):
        times = [row[time] for time in ("left time", "right time") if row.get(time) is not None]
        own = ("h", "k", "v") if how in ("semi", "anti") else ("h", "k", "v", "w")
        yield (*(row.get(name) for name in own), max(times))


CONDITIONS = {
    "none": (None, None),
    "values": (
        pl.col("v") <= pl.col("w"),
        lambda row: None not in (row.get("v"), row.get("w")) and row["v"] <= row["w"],
    ),
}


@pytest.mark.parametrize("kind", ["bags", "foreign key", "with itself"])
@pytest.mark.parametrize("how", ["inner", "left", "right", "full", "semi", "anti"])
@RUNS
@SEEDS
def test_of_tables(how, kind, seed):
    dice = random.Random(f"{seed}")  # of a text, also small seeds differ from the first draw on
    nulls_equal = dice.random() < 0.3
    where, rule = CONDITIONS[dice.choice(["none", "none", "values"])]
    run = KernelRun(kernel_of(how, nulls_equal, where), buckets=dice.choice([1, 4]), seed=seed % 97)
    lefts = [Bag(("h", "k", "v")) for _ in range(TOGETHER)]
    rights = [Bag(("h", "j", "w"), unique=kind == "foreign key") for _ in range(TOGETHER)]
    found = Counter()
    for _ in range(dice.randint(1, 3)):
        changes = [], []
        for history in range(TOGETHER):
            ours = lefts[history].change(dice, history)
            changes[0].extend(ours)
            if kind == "with itself":
                names = {"k": "j", "v": "w"}
                changes[1].extend({names.get(n, n): v for n, v in row.items()} for row in ours)
                rights[history].rows = [
                    {names.get(n, n): v for n, v in row.items()} for row in lefts[history].rows
                ]
            else:
                changes[1].extend(rights[history].change(dice, history))
        frames = {}
        for number, (rows, columns) in enumerate(zip(changes, (LEFT, RIGHT), strict=True)):
            schema = {**columns, TIME: pl.Int64(), DIFF: pl.Int8()}
            if rows:
                frames[number] = [pl.DataFrame(rows, schema=schema)]
        made = run.batch(frames)
        if made is not None:
            own = ["h", "k", "v"] if how in ("semi", "anti") else ["h", "k", "v", "w"]
            diffs = made[DIFF].to_list()
            for row, diff in zip(made.select(*own, TIME).rows(), diffs, strict=True):
                found[row] += diff
        assert not [row for row, count in found.items() if count < 0]
        expected = Counter()
        for left, right in zip(lefts, rights, strict=True):
            expected.update(naive(left.rows, right.rows, how, nulls_equal, rule))
        check(Counter({row: count for row, count in found.items() if count}), expected)
    run.check_counts()
