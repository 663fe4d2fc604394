"""Sliding windows against a naive model, and the cases that their rules are made of."""

import json
from collections import Counter, defaultdict
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import numpy as np
import polars as pl
import pytest
from example_counts import some
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import millstream as ms
from millstream import testing
from millstream.errors import ConfigError
from millstream.kernels.frames import DIFF
from millstream.kernels.windows import sliding_windows
from millstream.log.murmur2 import partition_of

START = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass
class Event:
    at: datetime
    key: str | None
    n: int | None = 1


def at(seconds):
    return START + timedelta(seconds=seconds)


def app_with(mode="final", *, size=10, delay=0, lateness=0, late="drop", **emit):
    app = ms.App("sliding", log="unused")
    stream = app.topic("events", Event, key="key").stream(
        time="at",
        watermark=ms.watermark(timedelta(seconds=delay), idle=None),
        lateness=timedelta(seconds=lateness),
        late=late,
    )
    windowed = stream.window(ms.sliding(timedelta(seconds=size)), by="key").emit(mode, **emit)
    out = windowed.agg(rows=ms.count(), total=ms.sum("n"), avg=ms.mean("n"))
    out.view("out", key=["window_start", "key"])
    return app, out


def model(rows, *, partitions, size, delay, lateness):
    """Judge the events one by one; then look back from each. Also give the watermark at the end."""
    seen = defaultdict(lambda: -(10**9))
    kept = []
    for row in rows:
        time = (row.at - START).total_seconds()
        partition = partition_of(row.key.encode(), partitions)
        first = max(time, seen[partition] - delay - lateness)
        if first <= time + size:
            kept.append((time, row.key, row.n, first))
        seen[partition] = max(seen[partition], time)
    said = []
    for time, key, _, own in kept:
        if own > time:
            continue
        numbers = [n for t, k, n, f in kept if k == key and time - size <= t and f <= time]
        known = [n for n in numbers if n is not None]
        average = sum(known) / len(known) if known else None
        said.append((time, key, len(numbers), sum(known), average))
    return said, len(rows) - len(kept), min(seen[p] for p in range(partitions)) - delay


def told(row):
    time = (row["window_end"] - START).total_seconds()
    assert row["window_end"] - row["window_start"] == timedelta(seconds=10)
    return (time, row["key"], row["rows"], row["total"], row["avg"])


draws = st.lists(
    st.tuples(st.integers(-20, 60), st.sampled_from("abc"), st.none() | st.integers(-5, 5)),
    max_size=40,
)


@pytest.mark.parametrize("how", ["final", "correct", "update", "retract"])
@settings(
    deadline=None,
    max_examples=some(25),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    drawn=draws,
    partitions=st.sampled_from([1, 4, 7]),
    batches=st.integers(1, 6),
    seed=st.integers(0, 99),
    delay=st.sampled_from([0, 7]),
    lateness=st.sampled_from([0, 5, 200]),
)
def test_every_event_has_the_models_row(
    how, drawn, partitions, batches, seed, delay, lateness, rows_given
):
    rows = [Event(at(t), key, n) for t, key, n in drawn]
    lateness = lateness or (3 if how == "correct" else 0)
    expected, late, watermark = model(
        rows, partitions=partitions, size=10, delay=delay, lateness=lateness
    )
    mode, policy = ("final", "correct") if how == "correct" else (how, "drop")
    app, _ = app_with(mode, delay=delay, lateness=lateness, late=policy)
    run = rows_given(app, {"events": rows}, batches=batches, partitions=partitions, seed=seed)
    given_rows = run.rows["out"].to_dicts()
    step = next(name for name in run.books if name.startswith("sliding")) if rows else None
    if step:
        assert run.books[step]["late"] == late
        assert run.books[step]["held"] == len(rows) - late
    if how == "retract":
        left = Counter()
        for row in given_rows:
            left[told(row)] += row[DIFF]
        assert +left == Counter(expected)
        assert min(left.values(), default=0) >= 0
    elif how == "final":
        settled = [row for row in expected if watermark > row[0] + lateness]
        assert Counter(told(row) for row in given_rows) == Counter(settled)
    else:
        shown = [row for row in expected if how == "update" or watermark > row[0]]
        assert {told(row)[:2]: told(row) for row in given_rows} == {r[:2]: r for r in shown}


ROWS = [(10, 1), (10, 2), (14, 3), (15, 4), (20, 5), (22, 6), (30, 7)]


def events(rows, key="a"):
    return [Event(at(time), key, n) for time, n in rows]


def totals(out):
    return {(row["window_end"] - START).total_seconds(): row["total"] for row in out.to_dicts()}


@pytest.mark.parametrize(("batches", "seed"), [(2, seed) for seed in range(10)])
def test_a_late_event_corrects_the_rows_that_count_it_and_no_others(batches, seed, rows_given):
    app, _ = app_with("retract", lateness=30)
    rows = [*events(ROWS), testing.Tick("1 second"), *events([(12, 100)])]
    run = rows_given(app, {"events": rows}, batches=batches, seed=seed)
    last = run.rows["out"]["batch"].max()
    said = run.rows["out"].filter(batch=last)
    story = [(row[DIFF], told(row)[0], row["total"]) for row in said.to_dicts()]
    assert story == [
        (1, 12, 103),
        (-1, 14, 6),
        (1, 14, 106),
        (-1, 15, 10),
        (1, 15, 110),
        (-1, 20, 15),
        (1, 20, 115),
        (-1, 22, 18),
        (1, 22, 118),
    ]


def test_a_row_is_final_once_the_watermark_has_passed_its_event(rows_given):
    app, _ = app_with()
    run = rows_given(app, {"events": events([(10, 1), (20, 2), (20, 4)])})
    assert totals(run.rows["out"]) == {10: 1}
    run = rows_given(app, {"events": events([(10, 1), (20, 2), (20, 4), (20.000001, 0)])})
    assert totals(run.rows["out"]) == {10: 1, 20: 7}
    assert run.rows["out"].height == 3


def test_state_goes_when_no_row_can_count_it_any_more(rows_given):
    app, _ = app_with(lateness=5)
    run = rows_given(app, {"events": events([(t, 1) for t in range(2000)])}, batches=10)
    held = [
        sum(r.rows for store in state.stores.values() for r in _runs(store))
        for state in run.engine.states.values()
    ]
    assert 15 <= sum(held) < 60


def _runs(store):
    @dataclass
    class Held:
        rows: int

    return [Held(table.num_rows) for table in store.tables.values()]


def test_keys_that_are_null_are_one_key(rows_given):
    app, _ = app_with("update")
    run = rows_given(app, {"events": events([(1, 1), (2, 2)], key=None)})
    assert totals(run.rows["out"]) == {1: 1, 2: 3}


def test_rows_that_are_too_late_go_aside_as_they_came():
    app, out = app_with(late="side")
    out.late.view("late", key=["at"])
    rows = events([(10, 1), (30, 2), (12, 7)])
    for seed in range(10):
        run = testing.run(app, {"events": rows}, batches=1 + seed % 4, seed=seed, partitions=1)
        (row,) = run["late"].to_dicts()
        assert (row["at"], row["n"], row["late_by"]) == (at(12), 7, timedelta(seconds=18))
        assert row["window_start"] == at(2)


def test_what_sliding_cannot_do_is_refused():
    with pytest.raises(ConfigError, match="sliding's size is 0"):
        ms.sliding("0 seconds")
    with pytest.raises(ConfigError, match='cannot emit "discard"'):
        app_with("discard")


IN_ORDER = {
    "first": (ms.first("n"), lambda rows: rows[0][1]),
    "last": (ms.last("n"), lambda rows: rows[-1][1]),
    "list": (ms.list("n"), lambda rows: [n for _, n in rows]),
    "least_by": (ms.min_by("n", pl.col("n") % 3), lambda rows: min(rows, key=_third)[1]),
    "most_by": (ms.max_by("n", pl.col("n") % 3), lambda rows: max(rows, key=_third)[1]),
}


def _third(row):
    return row[1] % 3


@pytest.mark.parametrize("mode", ["final", "update", "retract"])
@settings(deadline=None, max_examples=some(10))
@given(
    drawn=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 9)), min_size=1, max_size=25),
    batches=st.integers(1, 4),
    seed=st.integers(0, 99),
)
def test_aggregates_that_need_an_order_go_by_time_and_then_by_place(mode, drawn, batches, seed):
    app = ms.App("sliding", log="unused")
    stream = app.topic("events", Event, key="key").stream(
        time="at", watermark=ms.watermark("1 minute", idle=None)
    )
    windowed = stream.window(ms.sliding("10 seconds"), by="key").emit(mode)
    aggregates = {name: aggregate for name, (aggregate, _) in IN_ORDER.items()}
    windowed.agg(**aggregates).view("out", key=["window_end"])
    rows = [Event(at(time), "a", n) for time, n in drawn]
    given_rows = [*rows, testing.Watermark("events", at=at(3600))]
    out = testing.run(app, {"events": given_rows}, partitions=1, batches=batches, seed=seed)["out"]
    in_order = sorted(drawn, key=lambda row: row[0])
    expected = {}
    for time, _ in in_order:
        seen = [row for row in in_order if time - 10 <= row[0] <= time]
        expected[time] = {name: answer(seen) for name, (_, answer) in IN_ORDER.items()}
    found = {}
    for row in out.to_dicts():
        row["list"] = json.loads(row["list"])
        time = (row["window_end"] - START).total_seconds()
        found[time] = {name: row[name] for name in IN_ORDER}
    assert found == expected


@pytest.mark.parametrize("mode", ["final", "correct", "update", "retract"])
@settings(deadline=None, max_examples=some(15))
@given(
    drawn=st.lists(
        st.tuples(st.integers(0, 60), st.sampled_from(["a", "b", None]), st.integers(-5, 5)),
        max_size=30,
    ),
    batches=st.integers(1, 5),
    seed=st.integers(0, 99),
)
def test_keys_that_share_a_hash_are_told_apart(mode, drawn, batches, seed):
    rows = [Event(at(time), key, n) for time, key, n in drawn]
    rows.append(testing.Watermark("events", at=at(3600)))

    def out():
        how, policy = ("final", "correct") if mode == "correct" else (mode, "drop")
        app, _ = app_with(how, delay=5, lateness=20, late=policy)
        run = testing.run(app, {"events": rows}, partitions=1, batches=batches, seed=seed)
        table = run["out"]
        return table.sort("window_start", "key") if table.width else table

    apart = out()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            sliding_windows, "hash_columns", lambda table, *_: np.zeros(table.height, np.uint64)
        )
        assert out().equals(apart)
