"""The rule of a process function, case by case: timers, order, failures, late rows, expiry, clocks, rescaling."""

import json
from datetime import timedelta

import polars as pl
import pytest
from process_model import OUTPUT, Interpreter, at, seconds
from process_run import SCHEMA, SECOND, Run, as_table, kernel_of, stored_keys

import millstream as ms
from millstream import testing
from millstream.errors import UserCodeError
from millstream.kernels.process import calls
from millstream.kernels.state.rescale import rescale_operator

TEXT = {"what": pl.String}


class Told(ms.ProcessFunction):
    """Emits what is called, and sets a timer for each row, ``n`` seconds after it."""

    last = ms.value_state(pl.Struct({"n": pl.Int64, "tags": pl.List(pl.String)}))
    kept = ms.list_state(pl.Int64, ttl="5 seconds")

    def on_row(self, context, row):
        if row["do"] == "timer":
            context.set_timer(context.time + timedelta(seconds=row["n"]))
        if row["do"] == "keep":
            context.state.kept.append(row["n"])
        if row["do"] == "change":
            context.state.last["n"] += 1
        if row["do"] == "struct":
            context.state.last = {"n": row["n"], "tags": ["a"]}
        context.emit(
            {"what": f"{row['do']} {row['n']} {[*context.state.kept]} {context.state.last}"}
        )

    def on_timer(self, context, time):
        context.emit({"what": f"timer {seconds(time)} at {seconds(context.time)}"})


def told(batches, **options):
    """Return what is emitted for batches of (rows of key x, watermark in seconds)."""
    run = Run(kernel_of(Told(), TEXT, **options))
    for rows, watermark in batches:
        run.batch(as_table({"x": rows}), watermark * SECOND)
    return run, [row for table in run.outputs for row in table["what"]]


def test_a_row_with_a_time_that_python_has_not_is_a_dead_letter_among_others():
    events = ms.App("p", log="unused").topic("t", SCHEMA, key="k").stream(time="at")
    far = events.with_columns(far=(pl.col("n") * 10**18).cast(pl.Datetime("us", "UTC")))
    run = Run(far.process(Told(), by="k", schema=TEXT).node.kernel)
    rows = as_table({"x": [(1, "row", 0), (1, "row", 1)] * 120})
    far_of = (pl.col("n") * 10**18).cast(pl.Datetime("us", "UTC")).alias("far")
    out = run.batch(rows.with_columns(far_of), 5 * SECOND).rows
    assert out["what"].to_list() == ["row 0 [] None"] * 120
    assert len(run.failed) == 120
    assert "the row has a value that Python cannot hold" in run.failed[0][-1]


def test_a_timer_comes_after_the_rows_before_it_and_before_those_at_it():
    rows = [(1, "timer", 4), (4, "row", 1), (5, "row", 2), (6, "row", 3)]
    _, all_at_once = told([(rows, 60)])
    said = [text.split(" [")[0] for text in all_at_once]
    assert said == ["timer 4", "row 1", "timer 5 at 5", "row 2", "row 3"]
    _, apart = told([(rows[:1], 2), (rows[1:2], 5), (rows[2:], 60)])
    assert apart == all_at_once


def test_a_timer_in_the_past_comes_next_and_at_the_present_time():
    rows = [(9, "timer", -6), (9, "row", 1)]
    _, said = told([(rows, 60)])
    assert [text.split(" [")[0] for text in said] == ["timer -6", "timer 3 at 9", "row 1"]


def test_a_timer_fires_once_the_watermark_is_at_it_and_without_a_row():
    _, said = told([([(1, "timer", 4)], 4), ([], 5)])
    assert said[1:] == ["timer 5 at 5"]
    assert told([([(1, "timer", 4)], 4), ([], 4)])[1][1:] == []


def test_a_key_has_one_timer_for_a_time():
    rows = [(1, "timer", 4), (2, "timer", 3), (3, "timer", 2)]
    assert told([(rows[:2], 3), (rows[2:], 60)])[1][3:] == ["timer 5 at 5"]


def test_timers_of_keys_at_one_instant_fire_once_each():
    run = Run(kernel_of(Told(), TEXT))
    table = as_table({key: [(1, "timer", 4)] for key in "abcdef"})
    run.batch(table, 3 * SECOND)
    assert run.batch(table.clear(), 5 * SECOND).rows.height == 6
    assert run.batch(table.clear(), 60 * SECOND).rows is None


def test_state_is_forgotten_when_it_is_older_than_its_ttl_and_leaves_the_store():
    run, said = told([([(1, "keep", 7), (6, "row", 0), (7, "row", 0)], 6), ([], 60)])
    assert [text.split(" None")[0] for text in said] == ["keep 7 [7]", "row 0 [7]", "row 0 []"]
    run, _ = told([([(1, "keep", 7)], 6)])
    assert run.kernel.name
    assert stored_keys(run) == 1
    run.batch(as_table({"x": []}), 6 * SECOND)
    assert stored_keys(run) == 1
    run.batch(as_table({"x": []}), 7 * SECOND)
    assert stored_keys(run) == 0


def test_nested_state_cannot_be_changed_in_place_which_nobody_would_notice():
    run, said = told([([(1, "struct", 7), (2, "change", 0), (3, "row", 1)], 60)])
    assert "does not support item assignment" in run.failed[0][-1]
    assert said[-1].endswith("{'n': 7, 'tags': ('a',)}")


def test_in_the_order_of_arrival_rows_come_at_once_and_timers_after_the_rows_of_their_batch():
    table = as_table({"x": [(3, "timer", 1), (1, "row", 1), (9, "row", 2)]})
    placed = table.sort("__order").with_columns(pl.lit(0, pl.Int64).alias("__split"))
    shuffled = placed[[2, 0, 1]].with_columns(pl.Series("__order", [5, 6, 7]))
    run = Run(kernel_of(Told(), TEXT, order="arrival"))
    rows = run.batch(shuffled, 4 * SECOND, splits={0: 0}).rows
    assert [text.split(" [")[0] for text in rows["what"]] == [
        "row 2",
        "row 1",
        "timer 1",
        "timer 4 at 4",
    ]


def test_a_row_that_is_late_is_counted_and_given_to_the_side_output():
    events = ms.App("p", log="unused").topic("t", SCHEMA, key="k")
    stream = events.stream(time="at", watermark=ms.watermark("0 seconds"), late="side")
    made = stream.process(Told(), by="k", schema=TEXT, side_outputs={"other": TEXT})
    made.view("made", key="what")
    made.late.view("late", key=["k", "at"])
    rows = [row(5, "row", 1), row(3, "row", 2), row(6, "row", 3)]
    out = testing.run(made.app, {"t": rows}, partitions=1)
    assert out.late == 1
    assert out["late"].select("n", "late_reason").rows() == [(2, "below_watermark")]


def row(second, do, n, key="x"):
    return {"at": at(second), "k": key, "do": do, "n": n}


class Endless(ms.ProcessFunction):
    def on_row(self, context, row):
        context.set_timer(context.time)

    def on_timer(self, context, time):
        context.set_timer(time)


def test_a_timer_that_sets_itself_for_ever_is_a_failure_and_not_a_batch_without_end(monkeypatch):
    monkeypatch.setattr(calls, "TIMERS_AT_ONCE_MAX", 50)
    run = Run(kernel_of(Endless(), TEXT))
    run.batch(as_table({"x": [(1, "row", 0)]}), 5 * SECOND)
    assert run.failed == [("k", "timer", run.failed[0][-1])]
    assert "timers of a key have fired at one time" in run.failed[0][-1]


class Alarm(ms.ProcessFunction):
    count = ms.value_state(pl.Int64, default=0)

    def on_row(self, context, row):
        for time in context.processing_timers:
            context.delete_processing_timer(time)
        context.state.count += 1
        context.set_processing_timer(context.processing_time + timedelta(seconds=10))

    def on_processing_timer(self, context, time):
        waited = context.processing_time - time >= timedelta()
        context.emit({"k": context.key["k"], "count": context.state.count, "waited": waited})
        context.state.count = 0


def test_the_kits_clock_fires_processing_time_timers_also_in_partitions_and_after_crashes():
    app = ms.App("p", log="unused")
    stream = app.topic("t", SCHEMA, key="k").stream(time="at", watermark=ms.watermark("0 seconds"))
    schema = {"k": pl.String, "count": pl.Int64, "waited": pl.Boolean}
    stream.process(Alarm(), by="k", schema=schema, order="arrival").view("quiet", key="k")
    rows = [row(1, "row", 0), row(2, "row", 0), row(3, "row", 0, "y")]
    for after, meant in (("9 seconds", []), ("10 seconds", [("x", 2, True), ("y", 1, True)])):
        for partitions, crash in ((1, 0), (4, 2)):
            given = {"t": [*rows, testing.Tick(after=after)]}
            out = testing.run(app, given, partitions=partitions, crash=crash, batches=2)
            assert out["quiet"].select("k", "count", "waited").rows() == meant


class Failing(ms.ProcessFunction):
    count = ms.value_state(pl.Int64, default=0)

    def on_row(self, context, row):
        context.state.count += 1
        context.emit({"k": row["k"], "count": context.state.count})
        if row["do"] == "fail":
            raise ValueError("no")


def failing_app(**options):
    app = ms.App("p", log="unused")
    stream = app.topic("t", SCHEMA, key="k").stream(time="at", watermark=ms.watermark("0 seconds"))
    schema = {"k": pl.String, "count": pl.Int64}
    stream.process(Failing(), by="k", schema=schema, **options).view("counts", key="k")
    return app


@pytest.mark.parametrize("order", ["time", "arrival"])
def test_a_row_that_fails_is_a_dead_letter_with_its_place_and_leaves_nothing_behind(order):
    rows = [row(1, "row", 0), row(2, "fail", 1), row(3, "row", 2)]
    end = testing.Watermark("t", at=at(9))
    out = testing.run(failing_app(order=order), {"t": [*rows, end]}, partitions=1)
    assert out["counts"].select("k", "count").rows() == [("x", 2)]
    letter = out.dead.row(0, named=True)
    assert (letter["topic"], letter["partition"], letter["offset"]) == ("t", 0, 1)
    assert letter["reason"] == "ValueError: no"
    assert json.loads(letter["value"])["k"] == "x"


def test_a_failing_row_stops_the_job_if_that_is_said_and_so_do_all_rows():
    rows = [row(1, "row", 0), row(2, "fail", 1)]
    end = testing.Watermark("t", at=at(9))
    with pytest.raises(UserCodeError, match=r"ValueError: no.*test_process_calls.*The row: .*fail"):
        testing.run(failing_app(on_error="stop"), {"t": [*rows, end]})
    every = [row(1, "fail", n) for n in range(102)]
    with pytest.raises(UserCodeError, match="each of more than 100"):
        testing.run(failing_app(), {"t": [*every, end]}, partitions=1)


def test_a_bucket_is_divided_and_put_together_with_its_timers_and_state():
    kernel = kernel_of(Interpreter(), OUTPUT, side_outputs={"side": {"n": pl.Int64}})
    run = Run(kernel)
    run.store.keeps_all = True
    keys = {f"k{n}": [(1, "add append timer", 3)] for n in range(20)}
    run.batch(as_table(keys), 2 * SECOND)
    stored = {**run.stored, "watermark": 2 * SECOND, "clocks": {}, "seed": 7}
    divided = rescale_operator("p", {0: stored}, kernel.layout, before=1, after=3)
    together = rescale_operator("p", divided, kernel.layout, before=3, after=1)
    alone, made = [], []
    for messages, outputs in ((divided, alone), (together, made)):
        for message in messages.values():
            one = Run(kernel)
            one.store, one.stored, one.before = run.store, message, 2 * SECOND
            one.batch(as_table({"k": []}), 60 * SECOND)
            outputs.extend(one.output(0, tuple(OUTPUT)))
    assert len(made) >= 20
    assert sorted(alone) == sorted(made)


class Highest(ms.ProcessFunction):
    n = ms.value_state(pl.UInt32)

    def on_row(self, context, row):
        if context.state.n is None or row["n"] > context.state.n:
            context.state.n = row["n"]
            context.emit({"at": context.time, "n": row["n"]})


@pytest.mark.parametrize("order", ["time", "arrival"])
def test_rows_of_a_window_are_processed_under_one_key_for_all(order):
    app = ms.App("p", log="unused")
    stream = app.topic("t", SCHEMA, key="k").stream(time="at", watermark=ms.watermark("0 seconds"))
    counted = stream.window(ms.tumbling("10 seconds"), by="k").agg(n=ms.count())
    schema = {"at": pl.Datetime("us", "UTC"), "n": pl.UInt32}
    counted.process(Highest(), by=(), schema=schema, order=order).view("highest", key="n")
    rows = [
        row(s, "", 0, key)
        for s, key in ((1, "x"), (2, "x"), (11, "y"), (21, "x"), (22, "x"), (23, "x"))
    ]
    end = testing.Watermark("t", at=at(60))
    out = testing.replay(app, {"t": [*rows, end]}, batchings=3)
    assert out["highest"]["n"].to_list() == [2, 3]
