"""Sliding windows whose rows come by count, by running time or once, against a naive model event by event."""

import json
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

import lane
import polars as pl
import pytest
from example_counts import some
from hypothesis import given, settings
from hypothesis import strategies as st

import millstream as ms
from millstream import testing
from millstream.errors import ConfigError
from millstream.kernels.state.sorted_runs import Run
from millstream.kernels.windows import sliding_triggers
from millstream.log.murmur2 import partition_of

START = datetime(1970, 1, 1, tzinfo=UTC)
NEVER = -(10**9)
SIZE = 10


@dataclass
class Event:
    at: datetime
    key: str | None
    n: int = 1


def event(at, key, n=1):
    return Event(START + timedelta(seconds=at), key, n)


def seconds(at):
    return (at - START).total_seconds()


def trigger(firing):
    if isinstance(firing, tuple):
        return ms.once(trigger(firing[0]))
    if isinstance(firing, int):
        return ms.after_count(firing)
    return timedelta(seconds=firing) if isinstance(firing, float) else firing


EVERY = {"rows": ms.count(), "total": ms.sum("n"), "values": ms.list("n")}
TOP = {"top": ms.max("n")}  # stays the same while there are more rows of it


def declared(mode, *, delay=0, lateness=0, window=None, aggregates=EVERY, **emit):
    app = ms.App("triggers", log="unused", buckets=2)
    stream = app.topic("events", Event, key="key").stream(
        time="at",
        watermark=ms.watermark(timedelta(seconds=delay), idle=None),
        lateness=timedelta(seconds=lateness),
        late="correct" if mode == "correct" else "drop",
    )
    window = window or ms.sliding(timedelta(seconds=SIZE))
    windowed = stream.window(window, by="key", name="windows")
    windowed = windowed.emit("final" if mode == "correct" else mode, **emit)
    out = windowed.agg(**aggregates)
    out.view("out", key=["window_end", "key", *(["place"] if window.rank else [])])
    return app


@dataclass
class Seen:
    """An event that came: what it saw, and when it was read."""

    time: float
    key: str
    n: int
    seen: float
    clock: float


@dataclass
class Row:
    """A row as the rule tells it. ``said`` are its panes: the kind, the events that it has, and if it is the last."""

    time: float
    lateness: float
    early: object
    late: object
    once: bool
    in_time: list = field(default_factory=list)
    behind: list = field(default_factory=list)
    waiting: list = field(default_factory=list)  # late, and no pane has them
    new: int = 0
    due: float | None = None
    has_own: bool = False
    ended: bool = False
    closed: bool = False
    said: list = field(default_factory=list)

    def fire(self, kind, *, last=False):
        self.said.append((kind, [*self.in_time, *self.behind], last or self.once))
        self.new, self.due = 0, None
        self.closed = self.once

    def take(self, one, brought=()):
        """Return whether the row takes an event, and those that came before the row was there."""
        if self.closed:
            return False
        if one.seen <= self.time:
            self.in_time += [*brought, one]
            self.has_own |= one.time == self.time
            self.new += 1
            if isinstance(self.early, int) and self.new == self.early:
                self.fire("early")
            elif isinstance(self.early, float) and self.due is None:
                self.due = one.clock + self.early
            return True
        self.in_time += [each for each in brought if each.seen <= self.time]
        self.behind += [each for each in brought if each.seen > self.time]
        self.waiting.append(one)
        if self.ended:
            self.fire_late(one.clock)
        return True

    def fire_late(self, clock):
        while isinstance(self.late, int) and len(self.waiting) >= self.late:
            self.behind += self.waiting[: self.late]
            self.waiting = self.waiting[self.late :]
            self.fire("late")
        while isinstance(self.late, float) and self.waiting:
            due = self.waiting[0].clock + self.late
            if due > clock:
                break
            self.behind += [one for one in self.waiting if one.clock < due]
            self.waiting = [one for one in self.waiting if one.clock >= due]
            self.fire("late")

    def tick(self, clock):
        if self.due is not None and not self.ended and clock >= self.due:
            self.fire("early")
        if self.ended:
            self.fire_late(clock)

    def reach(self, watermark, clock):
        if watermark > self.time and not self.ended:
            self.ended = True
            if self.has_own and not self.closed:
                self.fire("on_time", last=not self.lateness)
            self.fire_late(clock)
        if watermark > self.time + self.lateness and self.waiting:
            self.behind += self.waiting
            self.waiting = []
            self.fire("late", last=True)


def model(rows, *, partitions, delay, lateness, early, late):
    once = isinstance(early, tuple)
    early = early[0] if once else early
    lateness = 0 if late is None or once else lateness
    reached, clock = dict.fromkeys(range(partitions), NEVER), 0.0
    came, found, books = [], {}, Counter()
    for row in rows:
        if isinstance(row, float):
            clock += row
            for one in found.values():
                one.tick(clock)
            continue
        time, partition = seconds(row.at), partition_of(row.key.encode(), partitions)
        one = Seen(time, row.key, row.n, reached[partition] - delay, clock)
        if one.seen > time + SIZE + lateness:
            books["late"] += 1
        else:
            books["held"] += 1
            mine = [
                (at, r)
                for (key, at), r in found.items()
                if key == row.key and time <= at <= time + SIZE
            ]
            for at, r in mine:
                if one.seen <= at + lateness:
                    books["windows_closed"] += not r.take(one)
            if one.seen <= time + lateness and (row.key, time) not in found:
                brought = [
                    other
                    for other in came
                    if other.key == row.key and time - SIZE <= other.time <= time
                    and other.seen <= time + lateness
                ]  # fmt: skip
                found[row.key, time] = made = Row(time, lateness, early, late, once)
                made.take(one, brought)
            came.append(one)
        reached[partition] = max(reached[partition], time)
        for each in found.values():
            each.reach(min(reached.values()) - delay, clock)
    return found, books


def expected_rows(found, mode, *, suppress, panes, top=False, ranked=False):
    expected = {}

    def rows_of(sign, times, values):
        return [(sign, *values, place if ranked else None) for place in range(1, times + 1)]

    for (key, time), row in found.items():
        said, before, index = [], None, 0
        for kind, events, last in row.said:
            times = sum(one.time == time for one in events)
            numbers = sorted(e.n for e in events)
            values = (None, None, numbers[-1:]) if top else (len(numbers), sum(numbers), numbers)
            if suppress and before and before[:2] == (times, values):
                continue
            pane = (kind, index, index == 0) if panes else (None, None, None)
            if mode == "retract" and before:
                said += rows_of(-1, before[0], (*before[1], *before[2]))
            said += rows_of(1, times, (*values, *pane, last if panes else None))
            before, index = (times, values, (*pane, False if panes else None)), index + 1
        if said:
            expected[key, time] = said
    return expected


def told(table):
    found = defaultdict(list)
    for row in table.to_dicts() if table.width else ():
        pane = (row.get(f"pane_{name}") for name in ("kind", "index", "first", "last"))
        numbers = sorted(row["values"]) if "values" in row else [row["top"]]
        values = (row.get("rows"), row.get("total"), numbers)
        key = row["key"], seconds(row["window_end"])
        found[key].append((row.get("__diff", 1), *values, *pane, row.get("place")))
    return dict(found)


draws = st.lists(
    st.tuples(st.integers(-4, 24), st.sampled_from("aab"), st.integers(-1, 3))
    | st.sampled_from([3.0, 5.0, 10.0]),
    min_size=8,
    max_size=40,
)
# One key mostly, times that are close together, and a few that pass them: many events are late, and many panes due.
dense = st.lists(
    st.tuples(
        st.sampled_from([0, 0, 1, 2, 3, 4, 5, 6, 8, 12]),
        st.sampled_from("aaaab"),
        st.integers(-1, 3),
    )
    | st.sampled_from([3.0, 5.0]),
    min_size=8,
    max_size=25,
)
TIMES = [None, 1, 2, 3, 5.0, 8.0]


def check_panes(
    rows_given, drawn, *, mode="retract", early=None, late=None, delay=0, lateness=4, suppress=True,
    top=False, ranked=False, pairs=1 << 19, partitions=1, batches=1, seed=0,
):  # fmt: skip
    """Compare what is emitted of ``(second, key, n)``, and of seconds that pass, with the model."""
    rows = [d if isinstance(d, float) else event(*d) for d in drawn]
    emit = {"suppress_unchanged": suppress, "panes": True}
    if mode == "correct":
        early, late, lateness = None, late or 2, lateness or 4
        emit["late"] = trigger(late)
    elif isinstance(early, tuple):
        emit["early"] = trigger(early)
    else:
        early = early or (2 if late is None else None)  # something else than by batch
        emit |= {"early": trigger(early), "late": trigger(late)}
    found, books = model(
        rows, partitions=partitions, delay=delay, lateness=lateness, early=early, late=late
    )
    window = ms.sliding(timedelta(seconds=SIZE), rank="place" if ranked else None)
    app = declared(
        mode,
        delay=delay,
        lateness=lateness,
        window=window,
        aggregates=TOP if top else EVERY,
        **emit,
    )
    given_rows = [testing.Tick(timedelta(seconds=r)) if isinstance(r, float) else r for r in rows]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sliding_triggers, "_PAIRS", pairs)
        out = rows_given(
            app, {"events": given_rows}, batches=batches, partitions=partitions, seed=seed
        )
    expected = expected_rows(found, mode, suppress=suppress, panes=True, top=top, ranked=ranked)
    assert told(out.rows["out"]) == expected
    line = out.books.get("windows", Counter())
    assert {name: line[name] for name in books} == dict(books)


@settings(deadline=None, max_examples=some(60))
@given(
    drawn=draws | dense,
    mode=st.sampled_from(["update", "retract", "correct"]),
    early=st.sampled_from([*TIMES, (1,), (2,), (3,), (5.0,), (8.0,)]),
    late=st.sampled_from(TIMES),
    delay=st.sampled_from([0, 0, 7]),
    lateness=st.sampled_from([0, 4, 30]),
    suppress=st.booleans(),
    top=st.booleans(),
    ranked=st.booleans(),
    pairs=st.sampled_from([1, 9, 1 << 19]),
    partitions=st.sampled_from([1, 4, 7]),
    batches=st.integers(1, 6),
    seed=st.integers(0, 99),
)
def test_panes_are_the_models_event_by_event(rows_given, drawn, **drawn_too):
    check_panes(rows_given, drawn, **drawn_too)


@settings(deadline=None, max_examples=some(20))
@given(
    drawn=draws,
    early=st.sampled_from(["batch", *TIMES]),
    late=st.sampled_from(["batch", *TIMES]),
    mode=st.sampled_from(["update", "retract"]),
    lateness=st.sampled_from([4, 30]),
    panes=st.booleans(),
    partitions=st.sampled_from([1, 4, 7]),
    batches=st.integers(1, 6),
    seed=st.integers(0, 99),
)
def test_however_they_fire_the_rows_are_in_the_end_those_of_all_events_that_count(
    rows_given, drawn, early, late, mode, lateness, panes, partitions, batches, seed
):
    early = 2 if {early, late} <= {"batch", None} else early
    rows = [d if isinstance(d, float) else event(*d) for d in drawn]
    rows += [event(1000, key) for key in "abcdefghij"]
    found, _ = model(
        rows, partitions=partitions, delay=0, lateness=lateness, early=None,
        late=None if late is None else 1,
    )  # fmt: skip
    app = declared(mode, lateness=lateness, panes=panes, early=trigger(early), late=trigger(late))
    given_rows = [testing.Tick(timedelta(seconds=r)) if isinstance(r, float) else r for r in rows]
    out = rows_given(app, {"events": given_rows}, batches=batches, partitions=partitions, seed=seed)
    left = Counter()
    for key, said in told(out.rows["out"]).items():
        for sign, count, total, values, *_ in said:
            if mode == "update":
                left[key] = (count, total, tuple(values))
            else:
                left[key, count, total, tuple(values)] += sign
    settled = {}
    for key, row in found.items():
        if row.said and row.said[-1][2]:
            events = row.said[-1][1]
            numbers = tuple(sorted(one.n for one in events))
            times = sum(one.time == row.time for one in events)
            settled[key] = (len(numbers), sum(numbers), numbers), times
    for key, (values, times) in settled.items():
        assert (left[key] if mode == "update" else left[key, *values]) == (
            values if mode == "update" else times
        )


WINDOWS = {"plain": ms.sliding("10 seconds"), "ranked": ms.sliding("10 seconds", rank="place")}
EMITS = {
    "by count": {"early": ms.after_count(3), "late": ms.after_count(2)},
    "each": {"early": "each", "late": "each"},
    "once": {"early": ms.once(ms.after_count(2))},
}


@pytest.mark.parametrize("emit", EMITS.values(), ids=EMITS)
@pytest.mark.parametrize("window", WINDOWS.values(), ids=WINDOWS)
def test_views_are_the_same_under_all_batchings_and_crashes(window, emit):
    app = declared("retract", window=window, lateness=8, panes=True, **emit)
    keys = ["a", "d", "b", "a", "", "é"]
    rows = [event(n * 7 % 30 + n // 4, keys[n % 6], n) for n in range(90)]
    for partitions in (1, 4, 7):  # whether an event is late depends on its partition
        testing.replay(app, {"events": rows}, batchings=3, partitions=(partitions,))


def test_a_step_behind_rows_by_trigger_sees_their_changes():
    app = ms.App("behind", log="unused", buckets=2)
    stream = app.topic("events", Event, key="key").stream(
        time="at", watermark=ms.watermark("0 seconds", idle=None)
    )
    windowed = stream.window(ms.sliding("10 seconds"), by="key").emit("update", early="each")
    out = windowed.agg(rows=ms.count())
    out.filter(pl.col("rows") < 3).view("few")
    out.view("all")
    rows = [event(n * 5 % 13, "ab"[n % 2], n) for n in range(30)] + [event(900, "a")]
    run = testing.run(app, {"events": rows}, partitions=1, batches=7)
    every = run["all"].filter(pl.col("rows") < 3).sort("key", "window_end")
    assert run["few"].sort("key", "window_end").equals(every)
    assert run["all"].height > every.height > 0


def test_what_sliding_windows_cannot_emit_is_refused():
    def refused(match):
        return pytest.raises(ConfigError, match=match)

    with refused('cannot emit "discard"'):
        declared("discard", early="each")
    app = ms.App("changes", log="unused")
    stream = app.topic("events", Event, key="key").stream(time="at")
    above = stream.window(ms.tumbling("1 second"), by="key").emit("retract").agg(n=ms.sum("n"))
    for emit in ({"early": "each"}, {"late": "2 seconds"}):
        with refused(r"sliding\(9 seconds\) over rows that are taken back emits with every batch"):
            above.window(ms.sliding("9 seconds"), by="key").emit("update", **emit).agg(n=ms.count())


CASES = {
    "what was due when the clock stood still has fired": {
        "drawn": [(0, "a", 1), 5.0, (0, "a", 2), 3.0],
        "early": 5.0,
        "suppress": False,
    },
    "a row that begins late has late panes by count": {
        "drawn": [(20, "a", 1), 3.0, (5, "a", 1), 3.0, (5, "a", 2)],
        "late": 2,
        "lateness": 30,
    },
    "what came before a late row does not make its panes fire": {
        "drawn": [(20, "a", 1), (4, "a", 1), (3, "a", 1), 3.0, (5, "a", 1), (5, "a", 2)],
        "late": 2,
        "lateness": 30,
    },
    "what no late pane has comes with the last": {
        "drawn": [(0, "a", 1), (2, "a", 1), 3.0, (0, "a", 2), 3.0, (12, "a", 1)],
        "late": 3,
    },
    "once, a row takes nothing more in the batch that fired it": {
        "drawn": [(0, "a", 1), (0, "a", 2), (0, "a", 3), (0, "a", 3), (20, "a", 1)],
        "early": (2,),
    },
    "once, a row takes nothing more in later batches": {
        "drawn": [(0, "a", 1), 3.0, (0, "a", 2), 3.0, (0, "a", 3), (20, "a", 1)],
        "early": (1,),
    },
    "once by time, a row takes nothing more when its time is over": {
        "drawn": [(0, "a", 1), 5.0, (0, "a", 2), 3.0, (1, "a", 3), (20, "a", 1)],
        "early": (5.0,),
    },
    "a late pane that is taken back was late": {
        "drawn": [(0, "a", 1), (2, "a", 1), 3.0, (0, "a", 2), 3.0, (0, "a", 3), 3.0],
        "late": 1,
        "lateness": 30,
    },
    "a pane that fires late by time is there although the row is not touched": {
        "drawn": [(0, "a", 1), (2, "a", 1), (0, "a", 2), 3.0, (2, "b", 1), 5.0, 3.0],
        "late": 8.0,
        "lateness": 30,
    },
}


@pytest.mark.parametrize("mode", ["update", "retract"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_in_each_case_panes_are_the_models(rows_given, case, mode):
    check_panes(rows_given, mode=mode, pairs=5, ranked=True, **case)


@pytest.mark.parametrize(("early", "late"), [(5.0, 8.0), (2, 3), ((5.0,), None)])
def test_buckets_are_divided_and_put_together_while_panes_wait(
    rows_given, monkeypatch, early, late
):
    lane.load("rescaling")(monkeypatch)
    drawn = [(n * 7 % 13 + n // 4, "abcdefg"[n * n % 7], n) for n in range(40)]
    for at in (35, 22, 11, 4):
        drawn.insert(at, 3.0)
    for seed in range(3):
        check_panes(rows_given, drawn, early=early, late=late, batches=3, seed=seed)


def test_timers_of_a_long_delay_lie_in_a_few_slots(rows_given):
    app = declared("update", lateness=8, early=timedelta(seconds=60))
    rows = []
    for n in range(24):
        rows += [event(n % 3, "a", n), testing.Tick(timedelta(seconds=1))]
    out = rows_given(app, {"events": rows})
    stored = [json.loads(state.stored) for state in out.engine.states.values()]
    due = [
        Run.from_message(entry)
        for manifest in stored
        for message in manifest.values()
        for entry in message["runs"].get("due", ())
    ]
    assert 1 <= len({run.slot for run in due}) <= 5
    assert sum(run.rows for run in due) <= 24
