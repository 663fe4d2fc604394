"""Windowed aggregates against a naive model: any disorder, batching, partitions and lateness."""

from collections import defaultdict
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import polars as pl
import pytest
from example_counts import some
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream import App, count, mean, sum, testing, tumbling, watermark  # noqa: A004
from millstream.log.murmur2 import partition_of
from millstream.pipeline.compiler import compile_plan

START = datetime(1970, 1, 1, tzinfo=UTC)  # windows of negative times are met, too


@dataclass
class Event:
    at: datetime
    key: str
    n: int | None = None


def events(draws):
    return [Event(START + timedelta(seconds=at), key, n) for at, key, n in draws]


def app_with(mode, *, size=10, delay=0, lateness=0, by="key"):
    app = App("windows", log="unused")
    stream = app.topic("events", Event, key="key").stream(
        time="at",
        watermark=watermark(timedelta(seconds=delay), idle=None),
        lateness=timedelta(seconds=lateness),
    )
    windowed = stream.window(tumbling(timedelta(seconds=size)), by=by).emit(mode)
    windowed.agg(rows=count(), big=count(pl.col("n") > 2), total=sum("n"), avg=mean("n")).view(
        "out"
    )
    return app


def model(rows, *, partitions, size, delay, lateness, mode):
    """Take events one by one, each judged by what its own partition had shown before it."""
    seen = defaultdict(lambda: -(10**12))
    windows = defaultdict(list)
    late = 0
    for event in rows:
        at = (event.at - START).total_seconds()
        partition = partition_of(event.key.encode(), partitions)
        start = at // size * size
        if start + size + lateness <= seen[partition] - delay:
            late += 1
        else:
            windows[start, event.key].append(event.n)
        seen[partition] = max(seen[partition], at)
    reached = min(seen[p] for p in range(partitions)) - delay
    if mode == "final":
        windows = {w: ns for w, ns in windows.items() if w[0] + size + lateness <= reached}
    return late, {window: answer(ns) for window, ns in windows.items()}


def answer(numbers):
    known = [n for n in numbers if n is not None]
    average = __builtins__["sum"](known) / len(known) if known else None
    return len(numbers), len([n for n in known if n > 2]), __builtins__["sum"](known), average


def answers(out):
    return {
        ((row["window_start"] - START).total_seconds(), row["key"]): (
            row["rows"],
            row["big"],
            row["total"],
            row["avg"],
        )
        for row in out["out"].to_dicts()
    }


draws = st.lists(
    st.tuples(st.integers(-50, 90), st.sampled_from("abcdef"), st.none() | st.integers(-5, 5)),
    max_size=60,
)


@settings(deadline=None, max_examples=some(60))
@given(
    draws,
    st.sampled_from(["final", "update"]),
    st.sampled_from([1, 4, 7]),
    st.integers(1, 6),
    st.integers(0, 99),
    st.sampled_from([0, 7, 30]),
    st.sampled_from([0, 5, 200]),
    st.booleans(),
)
def test_answers_are_the_models_whatever_the_batches_and_partitions(
    the_long_way, drawn, mode, partitions, batches, seed, delay, lateness, long_way
):
    rows = events(drawn)
    expected_late, expected = model(
        rows, partitions=partitions, size=10, delay=delay, lateness=lateness, mode=mode
    )
    app = app_with(mode, delay=delay, lateness=lateness)
    inputs = {"events": rows}
    with the_long_way(taken=long_way):
        out = testing.run(app, inputs, batches=batches, partitions=partitions, seed=seed)
    assert answers(out) == expected
    assert out.late == expected_late


@pytest.mark.not_in_lane("thresholds", "it knows from where on keys are apart")
@pytest.mark.parametrize(("first_of_second", "packed"), [(0, 60_000), (60_000, 120_000)])
def test_many_partials_are_merged_before_the_shuffle_where_keys_repeat(first_of_second, packed):
    app = app_with("update")
    (operator,) = compile_plan("windows", app.outputs, (0,)).stages[0].operators

    def partials(first):
        keys = pl.int_range(first, first + 60_000, eager=True).cast(pl.String)
        rows = pl.DataFrame({"key": keys}).with_columns(n=pl.lit(1, pl.Int64), __time=pl.lit(0))
        return operator.kernel.prepare(rows.with_columns(pl.col("__time").cast(pl.Int64))).table

    table = operator.kernel.pack([partials(0), partials(first_of_second)])
    assert table.height == packed
    assert table["__rows"].sum() == 120_000


def one_partition(mode, *rows, **options):
    app = app_with(mode, by=[], **options)
    inputs = [Event(START + timedelta(seconds=at), "k", 1) for at in rows]
    out = testing.run(app, {"events": inputs}, partitions=1, batches=len(rows), seed=3)
    starts = [(row["window_start"] - START).total_seconds() for row in out["out"].to_dicts()]
    return dict(zip(starts, out["out"]["rows"], strict=True)), out


def test_a_windows_end_is_outside_it():
    assert one_partition("update", 0, 9.999, 10)[0] == {0: 2, 10: 1}


def test_a_time_before_1970_falls_into_the_window_that_holds_it():
    assert one_partition("update", -1)[0] == {-10: 1}


def test_a_window_is_final_when_the_watermark_reaches_its_end_and_not_before():
    assert one_partition("final", 5, 9.999)[0] == {}
    assert one_partition("final", 5, 10)[0] == {0: 1}


def test_a_straggler_within_the_lateness_is_counted_and_beyond_it_is_late():
    counts, out = one_partition("final", 5, 14, 6, 15, 7, 40, lateness=5)
    assert counts == {0: 2, 10: 2}
    assert out.late == 1


def test_final_results_never_change_once_they_are_out():
    _, out = one_partition("final", 1, 11, 2, 21, 3, 31)
    assert out.changes("out")["_op"].to_list() == ["upsert"] * 3
    assert out.late == 2


def test_an_idle_partition_stops_holding_the_others_back():
    app = App("idle", log="unused")
    stream = app.topic("events", Event, key="key", partitions=2).stream(
        time="at", watermark=watermark("0 seconds", idle="30 seconds")
    )
    stream.window(tumbling("10 seconds")).emit("final").agg(rows=count()).view("out")
    keys = {partition_of(key.encode(), 2): key for key in "abcdef"}
    first, second = (Event(START + timedelta(seconds=at), keys[0], 1) for at in (1, 25))
    rows = [first, testing.Tick("20 seconds"), second]
    assert testing.run(app, {"events": rows})["out"].height == 0
    ticked = [*rows, testing.Tick("9 seconds")]
    assert testing.run(app, {"events": ticked})["out"].height == 0
    ticked = [*rows, testing.Tick("10 seconds")]
    assert testing.run(app, {"events": ticked})["out"].height == 1
    returning = [*ticked, Event(START + timedelta(seconds=15), keys[1], 1)]
    assert testing.run(app, {"events": returning}).late == 1


def test_every_step_accounts_for_every_event():
    rows = [*events([(t, "abc"[t % 3], t) for t in range(60)]), b"bad", *events([(1, "a", 1)] * 5)]
    app = app_with("update")
    ledger = testing.run(app, {"events": rows}, batches=5, seed=2).ledger
    exits = pl.sum_horizontal("emitted", "held", "late", "dead", "filtered", "duplicate")
    assert ledger.filter(pl.col("read") != exits).is_empty()
    assert ledger.filter(step="events")["read"].sum() == 66
    assert ledger.filter(step="events")["dead"].sum() == 1


@pytest.mark.parametrize("batches", [1, 2, 9])
def test_a_window_then_a_regrouping_counts_every_event_once(batches):
    app = App("two", log="unused")
    stream = app.topic("events", Event, key="key", partitions=3).stream(
        time="at", watermark=watermark("20 seconds", idle=None), lateness="20 seconds"
    )
    once = stream.window(tumbling("10 seconds"), by=["key", "n"]).emit("final").agg(copies=count())
    by_number = once.window(tumbling("20 seconds"), by="n").emit("final")
    by_number.agg(keys=count(), events=sum("copies")).view("out")
    # A second value of n per key, all keys in every window: duplicates must collapse in stage 1.
    rows = [
        Event(START + timedelta(seconds=t), key, t % 2)
        for t in range(200)
        for key in "abcdefgh"
        for _ in range(1 + t % 3)
    ]
    out = testing.run(app, {"events": rows}, batches=batches, seed=batches)["out"]
    # The watermark is 179; what stage 1 still holds begins at 150, so stage 2 is final up to 140.
    assert out.height == 14
    assert set(out["keys"]) == {16}
    assert out["events"].sum() == len([r for r in rows if r.at < START + timedelta(seconds=140)])
