"""Timers at the edges: those that others set, clocks and watermarks that jump, times that come twice, failures."""

import json
from datetime import UTC, datetime, time, timedelta

import polars as pl
import pytest
from process_model import at, seconds
from process_run import SCHEMA, SECOND, Run, as_table, kernel_of, stored_keys

import millstream as ms
from millstream import testing
from millstream.errors import ConfigError
from millstream.kernels.process import calls

WHAT = {"what": pl.String}
LAST = datetime(9999, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC)


class Script(ms.ProcessFunction):
    """Does what its rows say; each timer does what ``after`` says."""

    calls = ms.value_state(pl.Int64, default=0)
    kept = ms.value_state(pl.Int64, ttl="5 seconds")

    def __init__(self, after=None):
        self.after = after

    def on_row(self, context, row):
        self.told(context, f"row {row['n']}")
        if row["do"] == "event":
            context.set_timer(at(row["n"]))
        elif row["do"] == "clock":
            context.set_processing_timer(at(row["n"]))
        elif row["do"] == "clocks":
            for number in range(row["n"]):
                context.set_processing_timer(at(number + 1))
        elif row["do"] == "last":
            context.set_timer(LAST)
            context.set_processing_timer(LAST)
        elif row["do"] == "text":
            raise ValueError("\ud800 is half a character")

    def on_timer(self, context, time):
        self.told(context, f"timer {seconds(time)}")
        if self.after == "clock":
            context.set_processing_timer(context.processing_time)
        if self.after == "fail":
            raise ValueError("the timer")

    def on_processing_timer(self, context, time):
        self.told(context, f"clock {seconds(time)}")
        if self.after == "event":
            context.set_timer(context.time + timedelta(seconds=2))
        if self.after == "clock":
            context.set_timer(context.time)

    def told(self, context, what):
        context.state.calls += 1
        context.emit({"what": f"{context.key['k']}: {what} at {seconds(context.time)}"})


def script(after=None, **options):
    return Run(kernel_of(Script(after), WHAT, **options))


def said(result):
    return [] if result.rows is None else result.rows["what"].to_list()


def test_timers_of_many_keys_and_of_one_key_at_one_time_are_no_loop(monkeypatch):
    monkeypatch.setattr(calls, "TIMERS_AT_ONCE_MAX", 5)
    run = script()
    run.batch(as_table({f"k{n}": [(1, "clocks", 9)] for n in range(9)}), 2 * SECOND, wall_ms=0)
    fired = said(run.batch(as_table({}), 2 * SECOND, wall_ms=99_000))
    assert len(fired) == 81
    assert run.failed == []


def test_timers_of_both_kinds_that_set_one_another_for_ever_are_a_failure(monkeypatch):
    monkeypatch.setattr(calls, "TIMERS_AT_ONCE_MAX", 50)
    run = script("clock")
    run.batch(as_table({"x": [(1, "event", 1)]}), 2 * SECOND, wall_ms=1)
    assert len(run.failed) == 1
    assert "timers of a key have fired at one time" in run.failed[0][-1]


def test_a_timer_that_a_clock_sets_for_a_time_that_the_watermark_has_passed_is_not_lost():
    run = script("event")
    run.batch(as_table({"x": [(1, "clock", 50)]}), 3 * SECOND, wall_ms=0)
    # The watermark jumps, and the clock's timer is for event time 3, where event time had got to.
    assert said(run.batch(as_table({}), 60 * SECOND, wall_ms=50_000)) == [
        "x: clock 50 at 3",
        "x: timer 5 at 5",
    ]


def test_nor_is_one_that_is_set_by_a_clock_that_a_row_has_set():
    run = script("event")
    rows = as_table({"x": [(1, "clock", 0)]})
    assert said(run.batch(rows, 60 * SECOND, wall_ms=1))[1:] == [
        "x: clock 0 at 1",
        "x: timer 3 at 3",
    ]
    assert stored_keys(run) == 1


def test_a_timer_that_is_set_again_when_its_time_has_passed_comes_once():
    run = script(order="arrival")
    run.batch(as_table({"x": [(1, "event", 5)]}), 3 * SECOND)
    assert said(run.batch(as_table({"x": [(9, "event", 5)]}), 10 * SECOND)) == [
        "x: row 5 at 9",
        "x: timer 5 at 9",
    ]


def test_a_timer_beyond_all_times_stays_and_hurts_nothing():
    run = script()
    run.batch(as_table({"x": [(1, "last", 0)]}), 3 * SECOND, wall_ms=1)
    assert said(run.batch(as_table({}), 10**9 * SECOND, wall_ms=10**12)) == []
    assert run.failed == []
    assert stored_keys(run) == 1


def test_a_watermark_and_a_clock_that_stand_still_or_go_back_fire_nothing_twice():
    run = script()
    run.batch(as_table({"x": [(1, "event", 4)], "y": [(1, "clock", 4)]}), 2 * SECOND, wall_ms=0)
    assert len(said(run.batch(as_table({}), 5 * SECOND, wall_ms=5_000))) == 2
    for watermark, wall_ms in ((5, 5_000), (5, 3_000), (6, 6_000)):
        assert said(run.batch(as_table({}), watermark * SECOND, wall_ms=wall_ms)) == []


def test_state_leaves_the_store_at_the_first_instant_at_which_it_has_expired():
    class Kept(ms.ProcessFunction):
        kept = ms.list_state(pl.Int64, ttl="5 seconds")

        def on_row(self, context, row):
            context.state.kept.append(row["n"])

    run = Run(kernel_of(Kept(), WHAT))
    run.batch(as_table({"x": [(1, "", 1)]}), 6 * SECOND)
    assert stored_keys(run) == 1
    run.batch(as_table({}), 6 * SECOND + 1)
    assert stored_keys(run) == 0


@pytest.mark.parametrize("column", ["k", "timer"])
def test_a_failed_timer_is_a_dead_letter_with_its_key_and_its_time(column):
    app = ms.App("p", log="unused")
    schema = {"at": datetime, column: str | None, "do": str, "n": int}
    stream = app.topic("t", schema).stream(time="at", watermark=ms.watermark("0 seconds"))

    class Fails(ms.ProcessFunction):
        def on_row(self, context, row):
            context.set_timer(context.time + timedelta(seconds=1))

        def on_timer(self, context, time):
            raise ValueError("the timer")

    stream.process(Fails(), by=column, schema=WHAT).view("made", key="what")
    rows = [{"at": at(1), column: key, "do": "", "n": 0} for key in (None, "x", None)]
    out = testing.run(app, {"t": [*rows, testing.Watermark("t", at=at(9))]}, partitions=1)
    named = "timer_" if column == "timer" else "timer"
    letters = sorted((json.loads(value) for value in out.dead["value"]), key=str)
    assert letters == [{column: key, named: "1970-01-01T00:00:02+00:00"} for key in ("x", None)]


def test_a_failing_timer_is_undone_and_leaves_no_key_behind():
    run = script("fail")
    run.batch(as_table({"x": [(1, "event", 4)]}), 2 * SECOND)
    run.batch(as_table({}), 5 * SECOND)
    assert [reason for *_, reason in run.failed] == ["ValueError: the timer"]
    assert sum(table.height for table in run.outputs) == 1


class Returns(ms.ProcessFunction):
    def on_row(self, context, row):
        return {"what": "x"} if row["n"] else None


def test_what_a_call_returns_would_be_lost_and_is_a_failure():
    run = Run(kernel_of(Returns(), WHAT))
    run.batch(as_table({"x": [(1, "", 0), (1, "", 1)]}), 2 * SECOND)
    assert [reason for *_, reason in run.failed] == [
        "on_row returns a dict, and what it returns is not emitted: give rows to context.emit"
    ]


class Yields(Returns):
    def on_row(self, context, row):
        yield row


class Awaits(Returns):
    async def on_timer(self, context, time):
        pass


@pytest.mark.parametrize(("function", "method"), [(Yields(), "on_row"), (Awaits(), "on_timer")])
def test_a_method_whose_call_does_nothing_is_refused_where_it_is_declared(function, method):
    with pytest.raises(ConfigError, match=f"{method} of .* has a yield or is async"):
        kernel_of(function, WHAT)


class Stores(ms.ProcessFunction):
    text = ms.value_state(pl.String)
    clock = ms.value_state(pl.Time)

    def on_row(self, context, row):
        if row["do"] == "half":
            context.state.text = "\ud800"
        if row["do"] == "emit":
            context.emit({"what": "\udfff"})
        if row["do"] == "zone":
            context.state.clock = time(1, 2, tzinfo=UTC)
        if row["do"] == "whole":
            context.state.text = "é😀"


def test_what_a_column_cannot_keep_fails_its_row_and_not_the_batch():
    run = Run(kernel_of(Stores(), WHAT))
    rows = [(1, do, 0) for do in ("half", "emit", "zone", "whole")]
    run.batch(as_table({"x": rows}), 2 * SECOND)
    assert ["is declared as" in reason for *_, reason in run.failed] == [True] * 3


def test_keys_of_a_map_in_a_zone_are_refused_as_an_hour_comes_twice_there():
    with pytest.raises(ConfigError, match="when clocks are put back"):
        ms.map_state(pl.Datetime("us", "Europe/Berlin"), pl.Int64)


def test_an_error_whose_text_cannot_be_stored_is_a_dead_letter_all_the_same():
    app = ms.App("p", log="unused")
    stream = app.topic("t", SCHEMA, key="k").stream(time="at", watermark=ms.watermark("0 seconds"))
    stream.process(Script(), by="k", schema=WHAT).view("made", key="what")
    rows = [{"at": at(1), "k": "x", "do": do, "n": 0} for do in ("text", "event")]
    out = testing.run(app, {"t": [*rows, testing.Watermark("t", at=at(9))]}, partitions=1)
    assert out.dead["reason"].str.contains("is half a character").to_list() == [True]


def test_zeros_of_both_signs_and_all_nans_are_one_key_each():
    app = ms.App("p", log="unused")
    schema = {"at": datetime, "x": float}
    stream = app.topic("t", schema).stream(time="at", watermark=ms.watermark("0 seconds"))
    stream = stream.with_columns(x=-pl.col("x"))  # what is read has one zero already

    class Counts(ms.ProcessFunction):
        count = ms.value_state(pl.Int64, default=0)

        def on_row(self, context, row):
            context.state.count += 1
            context.emit({"key": str(context.key["x"]), "count": context.state.count})

    made = stream.process(Counts(), by="x", schema={"key": pl.String, "count": pl.Int64})
    made.view("made", key="key")
    values = [0.0, -0.0, float("nan"), -float("nan"), 0.0]
    rows = [{"at": at(1 + n), "x": value} for n, value in enumerate(values)]
    end = testing.Watermark("t", at=at(60))
    for batches in (1, 6):
        out = testing.run(app, {"t": [*rows, end]}, partitions=1, batches=batches)
        assert sorted(out["made"].select("key", "count").rows()) == [("0.0", 3), ("nan", 2)]
