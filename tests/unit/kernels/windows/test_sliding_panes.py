"""Sliding windows over rows that are taken back, and in panes, against a naive model."""

from collections import Counter, defaultdict
from datetime import timedelta

import polars as pl
import pytest
from example_counts import some
from hypothesis import given, settings
from hypothesis import strategies as st
from signed_rows import (
    START,
    UNIT,
    Change,
    Event,
    Kernel,
    at,
    histories,
    signed_stream,
    summed,
    told,
)
from sliding_model import AGGREGATES, SIZE, Model

import millstream as ms
from millstream import testing
from millstream.errors import ConfigError, CorruptionError

drawn = settings(deadline=None, max_examples=some(20))


def kernel_of(mode, *, lateness=0, policy="drop", signed=True, **emit):
    stream = signed_stream(lateness=lateness, late=policy, signed=signed)
    windowed = stream.window(ms.sliding(SIZE * UNIT), by="key").emit(mode, **emit)
    return Kernel.of(windowed.agg(**AGGREGATES))


@pytest.mark.parametrize("early", ["batch", None])
@drawn
@given(history=histories(), lateness=st.sampled_from([0, 3, 30]))
def test_what_was_emitted_and_not_retracted_is_what_the_model_says_of_the_events_left(
    early, history, lateness
):
    kernel, model = kernel_of("retract", lateness=lateness, early=early), Model(lateness)
    bag = Counter()
    for changes, watermark in history:
        late = model.take(changes, kernel.watermark)
        result = kernel.batch(changes, watermark)
        assert result.counts["late"] == late
        for row, count in summed(told(result.rows)).items():
            bag[row] += count
        assert min(bag.values(), default=0) >= 0
        expected = model.rows(lambda t: early == "batch" or t < watermark)  # noqa: B023
        assert +bag == expected


@drawn
@given(history=histories(), lateness=st.sampled_from([0, 3, 30]))
def test_an_update_sets_a_row_or_deletes_it(history, lateness):
    kernel, model = kernel_of("update", lateness=lateness), Model(lateness)
    view = {}
    for changes, watermark in history:
        model.take(changes, kernel.watermark)
        for sign, *row in told(kernel.batch(changes, watermark).rows):
            view[tuple(row[:3])] = tuple(row[3:]) if sign > 0 else None
        expected = model.rows(lambda _: True)
        assert {place: row for place, row in view.items() if row is not None} == {
            row[:3]: row[3:] for row in expected
        }


@drawn
@given(history=histories(), lateness=st.sampled_from([0, 3, 30]))
def test_a_final_row_comes_once_with_what_was_left_when_it_was_settled(history, lateness):
    kernel, model = kernel_of("final", lateness=lateness), Model(lateness)
    said = Counter()
    for changes, watermark in history:
        model.take(changes, kernel.watermark)
        rows = told(kernel.batch(changes, watermark).rows)
        assert all(sign == 1 for sign, *_ in rows)
        said.update(tuple(row) for _, *row in rows)
        assert said == model.rows(lambda t: t < watermark - lateness)  # noqa: B023


@drawn
@given(history=histories(), lateness=st.sampled_from([3, 30]))
def test_a_corrected_final_row_comes_when_it_is_complete_and_again_when_it_changes(
    history, lateness
):
    kernel = kernel_of("final", lateness=lateness, policy="correct")
    model, view = Model(lateness), {}
    for changes, watermark in history:
        model.take(changes, kernel.watermark)
        for sign, *row in told(kernel.batch(changes, watermark).rows):
            view[tuple(row[:3])] = tuple(row[3:]) if sign > 0 else None
        expected = model.rows(lambda t: t < watermark)  # noqa: B023
        assert {place: row for place, row in view.items() if row is not None} == {
            row[:3]: row[3:] for row in expected
        }


# ── panes ───────────────────────────────────────────────────────────────────────────────────────


class Panes:
    """The panes of every row, as :mod:`millstream.kernels.trigger` has them, batch by batch."""

    def __init__(self, model, mode, *, early, suppress, allowed):
        self.model, self.mode, self.early = model, mode, early
        self.suppress, self.allowed = suppress, allowed
        self.last = defaultdict(lambda: (0, None, None))  # how often, values, pane
        self.index = Counter()

    def batch(self, touched, before, now):
        out = Counter()
        for key, time in self.model.places:
            mine = {t for k, t in touched if k == key and t <= time <= t + SIZE}
            if time >= now:
                if self.early:
                    fresh = mine and before <= time
                    self.fire(out, key, time, "early", fresh=fresh, deferring=True)
                continue
            gone = time + self.allowed < now
            if time >= before:
                self.fire(out, key, time, "on_time", fresh=True, deferring=True)
                waited = self.model.waited_for(key, time)
                self.fire(out, key, time, "late", fresh=waited, gone=gone)
            else:
                fresh = mine and before <= time + self.allowed
                self.fire(out, key, time, "late", fresh=fresh, gone=gone)
        return out

    def fire(self, out, key, time, kind, *, fresh, deferring=False, gone=False):
        times, values = self.model.row(key, time, deferring=deferring)
        before, old, pane = self.last[key, time]
        if (times, values) == (before, old) and (self.suppress or not times or not fresh):
            return
        if before and (self.mode == "retract" or not times):
            out[(-1, time, key, *old, *pane)] += before if self.mode == "retract" else 1
        now = None
        if times:
            index = self.index[key, time]
            self.index[key, time] += 1
            now = (kind, index, index == 0)
            last = gone or (kind == "on_time" and not self.allowed)
            out[(1, time, key, *values, *now, last)] += times
        self.last[key, time] = (times, values, now)


PANES = ("pane_kind", "pane_index", "pane_first")
COLUMNS = ("window_end", "key", *AGGREGATES, *PANES, "pane_last")


@pytest.mark.parametrize("mode", ["update", "retract", "correct"])
@pytest.mark.parametrize("signed", [False, True], ids=["stay", "taken back"])
@drawn
@given(
    history=histories(),
    lateness=st.sampled_from([0, 3, 30]),
    early=st.sampled_from(["batch", None]),
    late=st.sampled_from(["batch", None]),
    suppress=st.booleans(),
)
def test_panes_are_those_of_the_model(mode, signed, history, lateness, early, late, suppress):
    if mode == "correct":
        lateness, late, early = lateness or 3, "batch", None
        kernel = kernel_of("final", lateness=lateness, policy="correct", signed=signed, panes=True)
    else:
        emit = {"early": early, "late": late, "suppress_unchanged": suppress, "panes": True}
        kernel = kernel_of(mode, lateness=lateness, signed=signed, **emit)
    allowed = lateness if late else 0
    model = Model(allowed)
    panes = Panes(model, mode, early=early, suppress=suppress, allowed=allowed)
    for every, watermark in history:
        changes = every if signed else [c for c in every if c.diff > 0]
        before = kernel.watermark
        model.take(changes, before)
        net = Counter()
        for c in changes:
            net[c.key, c.time, c.n] += c.diff
        touched = {(key, time) for (key, time, _), count in net.items() if count}
        expected = panes.batch(touched, before, watermark)
        found = Counter()
        for sign, *row in told(kernel.batch(changes, watermark, signed=signed).rows, *COLUMNS):
            found[(sign, *row) if sign > 0 else (sign, *row[:-1])] += 1
        assert found == expected


def test_taking_back_what_never_came_is_damage():
    for mode in ("final", "update", "retract"):
        kernel = kernel_of(mode)
        kernel.batch([Change(5, "a", 1, 1)], 0)
        with pytest.raises(CorruptionError, match="take back an event that it does not hold"):
            kernel.batch([Change(5, "a", 2, -1)], 1)


def test_a_row_of_events_at_one_time_is_there_once_for_each_that_is_left():
    kernel = kernel_of("retract")
    first = kernel.batch([Change(5, "a", 1, 1), Change(5, "a", 1, 1)], 0)
    assert told(first.rows, "rows") == [(1, 2), (1, 2)]
    second = kernel.batch([Change(5, "a", 1, -1)], 1)
    assert told(second.rows, "rows") == [(-1, 2), (-1, 2), (1, 1)]
    assert told(kernel.batch([Change(5, "a", 1, -1)], 2).rows, "rows") == [(-1, 1)]


def test_a_retraction_that_comes_when_its_own_row_is_settled_corrects_the_later_rows_alone():
    kernel = kernel_of("retract")
    kernel.batch([Change(5, "a", 1, 1), Change(9, "a", 2, 1)], 7)
    late = kernel.batch([Change(5, "a", 1, -1)], 7)
    assert told(late.rows, "window_end", "total") == [(-1, 9, 3), (1, 9, 2)]
    assert +late.counts == {"held": 1}
    kernel.batch([], 16)
    assert +kernel.batch([Change(5, "a", 1, -1)], 16).counts == {"late": 1}


def test_state_holds_nothing_of_what_was_taken_back_once_runs_are_folded():
    kernel = kernel_of("retract")
    for n in range(60):
        kernel.batch([Change(n, "a", 1, 1)], n)
        kernel.batch([Change(n, "a", 1, -1)], n)
    assert sum(table.num_rows for table in kernel.store.tables.values()) < 30


# ── behind windows that retract ─────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("mode", ["final", "update", "retract"])
@settings(deadline=None, max_examples=some(12))
@given(
    rows=st.lists(
        st.tuples(st.integers(0, 60), st.sampled_from("abc"), st.integers(-3, 3)), max_size=40
    ),
    partitions=st.sampled_from([1, 4, 7]),
    batches=st.integers(1, 6),
    crash=st.integers(0, 2),
    seed=st.integers(0, 99),
)
def test_behind_a_window_that_retracts_rows_look_back_on_what_it_shows_at_last(
    mode, rows, partitions, batches, crash, seed
):
    app = ms.App("behind", log="unused")
    stream = app.topic("events", Event, key="key").stream(
        time="at", watermark=ms.watermark(0 * UNIT, idle=None), lateness=20 * UNIT
    )
    sums = stream.window(ms.tumbling(2 * UNIT), by="key").emit("retract").agg(n=ms.sum("n"))
    shown = sums.filter(pl.col("n") > 0)
    shown.view("shown")
    windowed = shown.window(ms.sliding(SIZE * UNIT), by="key").emit(mode)
    windowed.agg(**AGGREGATES).view("out")
    given_rows = [Event(at(time), key, n) for time, key, n in rows]
    end = testing.Watermark("events", at=at(10**6))
    run = testing.run(
        app,
        {"events": [*given_rows, end]},
        partitions=partitions,
        batches=batches,
        crash=crash,
        seed=seed,
    )
    table = run["shown"] if "shown" in run.views else pl.DataFrame()
    model = Model(0)
    times = [(row["window_end"] - START) // UNIT - 1 for row in table.to_dicts()]
    changes = [
        Change(time, row["key"], row["n"], 1)
        for time, row in zip(times, table.to_dicts(), strict=True)
    ]
    model.take(changes, -1)
    found = (
        told(run["out"].select("window_start", "window_end", "key", *AGGREGATES)) if rows else []
    )
    assert Counter(tuple(row) for _, *row in found) == model.rows(lambda _: True)
    assert run.late == run.ledger.filter(pl.col("step").str.starts_with("tumbling"))["late"].sum()


def refused(match):
    return pytest.raises(ConfigError, match=match)


def test_what_panes_of_sliding_windows_cannot_do_is_refused():
    with refused('emit\'s early is "batch" or None'):
        kernel_of("update", early=timedelta(seconds=1))
    with refused('emit\'s late is "batch" or None'):
        kernel_of("update", late="each")
    with refused("first is over rows that can be retracted"):
        signed_stream().window(ms.sliding("1 second"), by="key").agg(x=ms.first("n"))
