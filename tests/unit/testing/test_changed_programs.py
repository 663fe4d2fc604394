"""A program that is edited between two runs, on the kernels themselves: each step keeps its own state."""

from __future__ import annotations

import random
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import permutations

import polars as pl
import pytest

import millstream as ms
from millstream import testing
from millstream.errors import ConfigError
from millstream.testing.inputs import items_of
from millstream.testing.kernel_engine import KernelEngine
from millstream.views.state_store.sqlite_store import SqliteStateStore

UTC_TIME = pl.Datetime("us", "UTC")
START = datetime(2026, 1, 1, tzinfo=UTC)


@dataclass
class Event:
    ad: str
    kind: str
    at: datetime


def event(kind, second):
    return Event("x", kind, START + timedelta(seconds=second))


FIRST = [event("click", 1)] + [event("show", 2 + n) for n in range(5)] + [event("hide", 9)] * 2
LAST = [event("click", 30), testing.Watermark("t", at=START + timedelta(hours=1))]
RIGHT = {"click": 2, "show": 5, "hide": 2}


def app_of(parts):
    app = ms.App("edited", log="unused")
    events = app.topic("t", Event, partitions=1)
    for part in parts:
        part(events)
    return app


def tumbling(kind, delay="0 seconds"):
    """Declare a count of one kind, over a stream of its own."""

    def declare(events):
        stream = events.stream(time="at", watermark=ms.watermark(delay, idle=None))
        chosen = stream.filter(pl.col("kind") == kind)
        chosen.window(ms.tumbling("1 minute"), by="ad").agg(n=ms.count()).view(kind)

    return declare


def run_edited(folder, programs):
    """Run a program, then the next with the state that it left, and so on."""
    engine = None
    batch_id = 0
    for app, events in programs:
        plan = app.plan()
        if engine is None:
            engine = KernelEngine(plan, folder / "views.db", {"t": 1}, random.Random(0))
            engine.now_ms = 0
        engine.plan = plan
        with ExitStack() as opened:
            committer = engine._begin(opened)
            for ends in engine._ends({"t": items_of(app.topics["t"], events, 1, 0)}, 1):
                engine._commit(committer, batch_id, engine._batch(ends))
                batch_id += 1
    with SqliteStateStore(folder / "views.db", readonly=True) as state_store:
        return {view: state_store.scan(view)["n"].to_list() for view in RIGHT}


@pytest.mark.parametrize("order", list(permutations(RIGHT))[1:])
@pytest.mark.parametrize("delays", [("0 seconds",) * 3, ("0 seconds", "1 second", "2 seconds")])
def test_declarations_that_change_places_keep_each_its_own_state(tmp_path, order, delays):
    delay = dict(zip(RIGHT, delays, strict=True))
    programs = [
        (app_of([tumbling(kind, delay[kind]) for kind in kinds]), events)
        for kinds, events in ((RIGHT, FIRST), (order, LAST))
    ]
    assert run_edited(tmp_path, programs) == {kind: [n] for kind, n in RIGHT.items()}


def test_a_stateless_view_in_front_moves_no_state(tmp_path):
    def raw(events):
        events.stream(time="at", watermark=ms.watermark("0 seconds", idle=None)).view(
            "raw", key="at"
        )

    parts = [tumbling(kind) for kind in RIGHT]
    programs = [(app_of(parts), FIRST), (app_of([raw, *parts]), LAST)]
    assert run_edited(tmp_path, programs) == {kind: [n] for kind, n in RIGHT.items()}


@dataclass
class Numbered:
    ad: str
    n: int
    at: datetime


def ordered_and_raw(*parts):
    """Declare steps that go by the order of the log, each over a stream of its own, and a raw view."""
    app = ms.App("edited", log="unused")
    topic = app.topic("t", Numbered, partitions=1)
    for part in parts:
        stream = topic.stream(time="at", watermark=ms.watermark("0 seconds", idle=None))
        if part == "raw":
            stream.view("raw", key="n")
        elif part == "hour":
            stream.window(ms.tumbling("1 hour"), by="ad").agg(n=ms.list("n")).view("click")
        elif part == "three":
            stream.window(ms.count_window(3, unbounded=True), by="ad").agg(n=ms.list("n")).view(
                "show"
            )
        else:
            stream.window(ms.session("1 minute"), by="ad").agg(n=ms.list("n")).view("hide")
    return app


@pytest.mark.filterwarnings("ignore::millstream.views.coverage.PartialOutputWarning")
@pytest.mark.parametrize(
    ("was", "now"),
    [
        (["raw", "hour", "three", "gap"], ["hour", "three", "gap"]),
        (["hour", "three", "gap"], ["raw", "hour", "three", "gap"]),
        (["raw", "hour", "three", "gap"], ["gap", "three", "hour", "raw"]),
    ],
)
def test_places_in_state_mean_the_same_when_streams_come_go_and_change_places(tmp_path, was, now):
    first, *rest = (Numbered("x", n, START) for n in (1, 2, 3))
    end = testing.Watermark("t", at=START + timedelta(days=1))
    programs = [(ordered_and_raw(*was), [first]), (ordered_and_raw(*now), [*rest, end])]
    assert run_edited(tmp_path, programs) == {view: ["[1,2,3]"] for view in RIGHT}


def test_steps_of_one_meaning_may_change_places_for_they_hold_the_same(tmp_path):
    def twice(names):
        def declare(events):
            for name in names:
                stream = events.stream(time="at", watermark=ms.watermark("0 seconds", idle=None))
                window = stream.window(ms.tumbling("1 minute"), by="ad", name=name)
                window.agg(n=ms.count()).view(name)

        return declare

    programs = [
        (app_of([twice(["click", "show", "hide"])]), FIRST),
        (app_of([twice(["hide", "click", "show"])]), LAST),
    ]
    assert run_edited(tmp_path, programs) == {kind: [9] for kind in RIGHT}


def test_steps_above_other_steps_keep_their_state_when_declarations_change_places(tmp_path):
    def daily(kind):
        def declare(events):
            stream = events.stream(time="at", watermark=ms.watermark("0 seconds", idle=None))
            minutes = stream.filter(pl.col("kind") == kind).window(ms.tumbling("1 minute"), by="ad")
            counted = minutes.agg(n=ms.count()).window(ms.tumbling("10 minutes"), by="ad")
            counted.agg(n=ms.sum("n")).view(kind)

        return declare

    first = [*FIRST, event("click", 90), event("click", 150)]
    programs = [
        (app_of([daily(kind) for kind in kinds]), events)
        for kinds, events in ((["click", "show", "hide"], first), (["hide", "show", "click"], LAST))
    ]
    # What comes after 150 seconds and is of the first minute is late.
    assert run_edited(tmp_path, programs) == {"click": [3], "show": [5], "hide": [2]}


def test_clocks_of_sources_that_read_alike_keep_each_its_own_time_whatever_their_order():
    def plan_of(minutes):
        app = ms.App("edited", log="unused")
        events = app.topic("t", Event, partitions=1)
        times = [
            pl.col("at").map_batches(
                lambda s, m=m: s.dt.offset_by(f"{m}m"), return_dtype=UTC_TIME, is_elementwise=True
            )
            for m in minutes
        ]
        one, other = (events.stream(time=time) for time in times)
        one.union(other).window(ms.tumbling("1 hour"), by="ad").agg(n=ms.count()).view("v")
        return app.plan()

    def key_of(plan, minutes):
        clocks = plan.stages[0].operators[0].clocks
        return dict(zip(minutes, (clock.key for clock in clocks), strict=True))

    forth, back = plan_of([1, 2]), plan_of([2, 1])
    assert forth.program.steps.keys() == back.program.steps.keys()
    assert key_of(forth, [1, 2]) == key_of(back, [2, 1])
    assert len(set(key_of(forth, [1, 2]).values())) == 2


def test_state_of_other_steps_is_refused_where_it_is_read():
    one, other = (app_of([tumbling(kind)]).plan() for kind in ("click", "show"))
    assert {one.stages[0].operators[0].key} != {other.stages[0].operators[0].key}
    engine = KernelEngine(one, None, {"t": 1}, random.Random(0))
    engine.now_ms = 0
    ends = engine._ends({"t": items_of(app_of([]).topics["t"], FIRST, 1, 0)}, 1)
    engine._batch(next(ends))
    engine.plan = other
    with pytest.raises(ConfigError, match=r"belongs to other steps: 'tumbling\(1 minute\) by ad'"):
        engine._batch(engine._all())


@dataclass
class Amount:
    ad: str
    n: int
    at: datetime


def updated(kind, *, filtered):
    """Declare a window whose rows replace one another, and perhaps a filter below it."""
    windows = {
        "hour": ms.tumbling("1 hour"),
        "hops": ms.hopping("1 hour", "1 hour"),
        "gap": ms.session("1 minute"),
        "slide": ms.sliding("1 minute"),
    }
    app = ms.App("edited", log="unused")
    topic = app.topic("t", Amount, partitions=1)
    stream = topic.stream(
        time="at", watermark=ms.watermark("0 seconds", idle=None), lateness="1 hour"
    )
    rows = stream.window(windows[kind], by="ad").emit("update").agg(n=ms.sum("n"))
    rows.view("all", key="ad")
    if filtered:
        rows.filter(pl.col("n") < 4).view("few")
    return app


@pytest.mark.filterwarnings("ignore::millstream.views.coverage.PartialOutputWarning")
@pytest.mark.parametrize("kind", ["hour", "hops", "gap", "slide"])
@pytest.mark.parametrize("seen", [[False, True], [True, False], [False, True, False, True]])
def test_a_filter_that_comes_and_goes_below_updates_leaves_the_windows_state(tmp_path, kind, seen):
    programs = [
        (updated(kind, filtered=filtered), [Amount("x", 1, START), Amount("y", 3, START)])
        for filtered in seen
    ]
    plan, engine = None, None
    for batch_id, (app, rows) in enumerate(programs):
        plan = app.plan()
        if engine is None:
            engine = KernelEngine(plan, tmp_path / "views.db", {"t": 1}, random.Random(0))
            engine.now_ms = 0
        engine.plan = plan
        with ExitStack() as opened:
            committer = engine._begin(opened)
            for ends in engine._ends({"t": items_of(app.topics["t"], rows, 1, 0)}, 1):
                engine._commit(committer, batch_id, engine._batch(ends))
    runs = len(seen)
    with SqliteStateStore(tmp_path / "views.db", readonly=True) as state_store:
        assert state_store.scan("all").sort("ad")["n"].to_list() == [runs, 3 * runs]
        if seen[-1]:
            assert state_store.scan("few")["n"].to_list() == ([2] if runs == 2 else [])
