"""A function that takes rows back gives what one over the rows that are left would give."""

from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import polars as pl
import pytest
from example_counts import some
from hypothesis import given, settings
from hypothesis import strategies as st
from process_run import SECOND, Run, as_table, stored_keys

import millstream as ms
from millstream import testing
from millstream.errors import ConfigError, UserCodeError
from millstream.kernels.frames import DIFF, ORDER, TIME

START = datetime(2026, 1, 1, tzinfo=UTC)
END = testing.Watermark("t", at=START + timedelta(days=9))
TOTAL = {"k": pl.String, "total": pl.Int64, "windows": pl.Int64}
BAD = 3


@dataclass
class Event:
    at: datetime
    k: str
    n: int


class Totals(ms.ProcessFunction):
    """Adds up the counts of a key's windows, and fails on windows of some count."""

    total = ms.value_state(pl.Int64, default=0)
    windows = ms.value_state(pl.Int64, default=0)

    def on_row(self, context, row):
        if row["n"] == BAD:
            context.state.total = -1000
            raise ValueError("it is not to be so")
        self.change(context, row["n"], 1)

    def on_retraction(self, context, row):
        self.change(context, -row["n"], -1)

    def change(self, context, n, windows):
        state = context.state
        if state.windows:
            self.tell(context, context.retract)
        state.total += n
        state.windows += windows
        if state.windows:
            self.tell(context, context.emit)

    def tell(self, context, how):
        state = context.state
        row = {"k": context.key["k"], "total": state.total, "windows": state.windows}
        how(row)
        how({"total": state.total}, to="totals")


class FrameTotals(ms.FrameFunction):
    """Does the same in frames."""

    total = ms.value_state(pl.Int64, default=0)
    windows = ms.value_state(pl.Int64, default=0)

    def on_rows(self, context, rows, state):
        if (rows["n"] == BAD).any():
            self.tell(state, context.emit)
            raise ValueError("it is not to be so")
        return self.change(context, rows, state, 1)

    def on_retractions(self, context, rows, state):
        return self.change(context, rows, state, -1)

    def change(self, context, rows, state, sign):
        made = rows.group_by("__key").agg(
            n=sign * pl.col("n").sum(), more=sign * pl.len().cast(int)
        )
        after = state.join(made, on="__key").with_columns(
            pl.col("total") + pl.col("n"), pl.col("windows") + pl.col("more")
        )
        self.tell(state, context.retract)
        self.tell(after, context.emit)
        return after.filter(pl.col("windows") != 0)

    def tell(self, state, how):
        rows = state.filter(pl.col("windows") != 0)
        how(rows["__key", "k", "total", "windows"])
        how(rows["__key", "total"], to="totals")


SIDE = {"totals": {"total": pl.Int64}}


def app_of_totals(function=Totals):
    app = ms.App("p", log="unused", buckets=2)
    stream = app.topic("t", Event, key="k").stream(
        time="at", watermark=ms.watermark("0 seconds", idle=None), lateness="1 day"
    )
    windows = stream.window(ms.tumbling("10 seconds"), by="k").emit("update", early="each")
    counts = windows.agg(n=ms.count())
    made = counts.process(function(), by="k", schema=TOTAL, side_outputs=SIDE, order="arrival")
    totals = made.group_by("k").agg(total=ms.sum("total"), windows=ms.sum("windows"))
    totals.view("totals", key="k")
    made.side_output("totals").group_by("total").agg(keys=ms.count()).view("keys", key="total")
    return app


def meant(rows):
    """Return the total and number of windows of each key, of those whose count is not the bad one."""
    counts = Counter((row.k, (row.at - START).seconds // 10) for row in rows)
    found = {}
    for (key, _), n in counts.items():
        if n != BAD:
            total, windows = found.get(key, (0, 0))
            found[key] = (total + n, windows + 1)
    return found


ROWS = st.lists(st.tuples(st.integers(0, 39), st.sampled_from("xyz")), max_size=25)


@settings(max_examples=some(16), deadline=None)
@given(
    st.sampled_from([Totals, FrameTotals]),
    ROWS,
    st.integers(1, 6),
    st.integers(0, 2),
    st.sampled_from([1, 4, 7]),
)
def test_what_holds_at_the_end_is_that_of_the_rows_that_are_left(
    function, drawn, batches, crash, partitions
):
    rows = [Event(START + timedelta(seconds=at), key, 1) for at, key in drawn]
    out = testing.run(
        app_of_totals(function),
        {"t": [*rows, END]},
        batches=batches,
        crash=crash,
        partitions=partitions,
    )
    totals = meant(rows)
    found = {row["k"]: (row["total"], row["windows"]) for row in out["totals"].to_dicts()}
    assert found == totals
    keys = Counter(total for total, _ in totals.values())
    assert dict(out["keys"].rows()) == keys


@pytest.mark.parametrize("function", [Totals, FrameTotals])
def test_a_row_that_failed_is_not_taken_back_and_is_a_dead_letter(function):
    rows = [item for _ in range(5) for item in (Event(START, "x", 1), testing.Tick("1 second"))]
    out = testing.run(app_of_totals(function), {"t": [*rows, END]})
    assert out["totals"].rows() == [("x", 5, 1)]
    assert out.dead.height == 1


class Framed(ms.FrameFunction):
    retracts = True
    n = ms.value_state(pl.Int64)

    def on_rows(self, context, rows, state): ...


class Running(ms.ProcessFunction):
    """Over events: it takes back what it said before."""

    retracts = True
    count = ms.value_state(pl.Int64, default=0)

    def on_row(self, context, row):
        if context.state.count:
            context.retract({"k": row["k"], "n": context.state.count})
        context.state.count += 1
        context.emit({"k": row["k"], "n": context.state.count})


class FrameRunning(ms.FrameFunction):
    """The same in frames: for the rows of a key in one frame what one after the other would leave."""

    retracts = True
    count = ms.value_state(pl.Int64, default=0)

    def on_rows(self, context, rows, state):
        after = state.join(rows.group_by("__key").agg(more=pl.len().cast(int)), on="__key")
        after = after.with_columns(pl.col("count") + pl.col("more"))
        context.retract(state.filter(pl.col("count") != 0)["__key", "k", "count"].rename(N))
        context.emit(after["__key", "k", "count"].rename(N))
        return after


N = {"count": "n"}


def events():
    app = ms.App("p", log="unused")
    return app, app.topic("t", Event, key="k").stream(time="at")


@pytest.mark.parametrize("function", [Running, FrameRunning])
def test_over_events_what_was_emitted_may_be_taken_back(function):
    app, stream = events()
    made = stream.process(function(), by="k", schema={"k": str, "n": int}, order="arrival")
    made.group_by("n").agg(keys=ms.count()).view("keys", key="n")
    rows = [Event(START + timedelta(seconds=at), key, 1) for at, key in enumerate("xyxxzy")]
    out = testing.run(app, {"t": rows}, batches=3, partitions=1, crash=1)
    assert dict(out["keys"].rows()) == {3: 1, 2: 1, 1: 1}


class Undoing(ms.ProcessFunction):
    """Takes back rows that are taken back, which events never are."""

    def on_row(self, context, row):
        context.emit({"k": row["k"]})

    def on_retraction(self, context, row):
        context.retract({"k": row["k"]})


def test_over_events_a_key_keeps_nothing_of_what_could_only_be_taken_back_with_them():
    _, stream = events()
    made = stream.process(Undoing(), by="k", schema={"k": str})
    assert made.shape.mode is None
    kernel = made.node.kernel
    done = Run(kernel)
    rows = as_table({"x": [(at, "", 0) for at in range(5)]})
    given = rows.select("at", "k", "n", TIME, ORDER)
    assert done.batch(given, 9 * SECOND).rows.height == 5
    assert stored_keys(done) == 0
    counts = stream.window(ms.tumbling("10 seconds"), by="k").emit("update").agg(n=ms.count())
    after_changes = counts.process(Undoing(), by="k", schema={"k": str}, order="arrival")
    assert after_changes.shape.mode == "retract"


class Sometimes(ms.ProcessFunction):
    retracts = "sometimes"

    def on_row(self, context, row): ...


class FrameSometimes(Framed):
    retracts = 1


def test_what_retracts_says_is_checked():
    _, stream = events()
    with pytest.raises(ConfigError, match=r"has retracts = 'sometimes'\. Say True if"):
        stream.process(Sometimes(), by="k", schema={"k": str}, order="arrival")
    with pytest.raises(ConfigError, match=r"has retracts = 1\. Say True if"):
        stream.process(FrameSometimes(), by="k", schema={"k": str}, order="arrival")
    for function in (Running(), FrameRunning()):
        with pytest.raises(ConfigError, match='Say order="arrival"'):
            stream.process(function, by="k", schema={"k": str, "n": int})


class Plain(ms.ProcessFunction):
    def on_row(self, context, row):
        context.retract({"k": row["k"]})


class FramePlain(Framed):
    retracts = False

    def on_rows(self, context, rows, state):
        context.retract(rows["__key", "k"])


@pytest.mark.parametrize(
    ("plain", "method"), [(Plain(), "on_retraction,"), (FramePlain(), "on_retractions,")]
)
def test_a_function_that_does_not_say_so_takes_nothing_back(plain, method):
    app, stream = events()
    stream.process(plain, by="k", schema={"k": str}).view("v", key="k")
    out = testing.run(app, {"t": [Event(START, "x", 1), END]}, partitions=1)
    assert "Say retracts = True in its class" in out.dead["reason"][0]
    counts = stream.window(ms.tumbling("1 minute"), by="k").emit("update").agg(n=ms.count())
    with pytest.raises(ConfigError, match=f"Give it an {method}"):
        counts.process(plain, by="k", schema={"k": str})
    for function in (Totals(), FrameTotals()):
        with pytest.raises(ConfigError, match='Say order="arrival"'):
            counts.process(function, by="k", schema=TOTAL, side_outputs=SIDE)


class FrameWrong(Framed):
    """Takes back a row twice."""

    def on_rows(self, context, rows, state):
        held = rows["__key", "k"]
        context.emit(held)
        context.retract(held)
        context.retract(rows.filter(pl.col("n") == 2)["__key", "k"])
        return state


class Wrong(ms.ProcessFunction):
    """Takes back a row twice."""

    retracts = True

    def on_row(self, context, row):
        context.emit({"k": row["k"]})
        context.retract({"k": row["k"]})
        if row["n"] == 2:
            context.retract({"k": row["k"]})


@pytest.mark.parametrize("function", [Wrong, FrameWrong])
def test_a_call_that_takes_back_what_does_not_hold_fails_and_stops_nothing(function):
    app, stream = events()
    made = stream.process(function(), by="k", schema={"k": str}, order="arrival")
    made.group_by("k").agg(n=ms.count()).view("v", key="k")
    rows = [Event(START + timedelta(seconds=at), "x", 1 + at % 2) for at in range(4)]
    out = testing.run(app, {"t": rows}, batches=2, partitions=1)
    assert out["v"].rows() == []
    assert out.dead.height == 2
    assert "which was not emitted for this key, or was taken back" in out.dead["reason"][0]


class FrameCatching(Framed):
    """The same in frames."""

    def on_rows(self, context, rows, state):
        given = rows["__key", "k"]
        with suppress(Exception):
            context.retract(given.with_columns(x=pl.lit(5.0)))
        context.emit(given.with_columns(x=pl.lit(0.0)))
        context.retract(rows.filter(pl.col("n") == 2)["__key", "k"].with_columns(x=pl.lit(-0.0)))
        return state


class Catching(ms.ProcessFunction):
    """Goes on where nothing could be taken back, and takes a row with 0.0 back as -0.0."""

    retracts = True

    def on_row(self, context, row):
        with suppress(Exception):
            context.retract({"k": row["k"], "x": 5.0})
        context.emit({"k": row["k"], "x": 0.0})
        if row["n"] == 2:
            context.retract({"k": row["k"], "x": -0.0})


@pytest.mark.parametrize("function", [Catching, FrameCatching])
def test_an_error_of_retract_that_is_caught_takes_nothing_back_and_zeros_are_equal(function):
    app, stream = events()
    made = stream.process(function(), by="k", schema={"k": str, "x": float}, order="arrival")
    made.group_by("k").agg(n=ms.count()).view("v", key="k")
    rows = [Event(START + timedelta(seconds=at), "x", 1 + at % 2) for at in range(4)]
    out = testing.run(app, {"t": rows}, batches=2, partitions=1)
    assert out["v"].rows() == [("x", 2)]
    assert out.dead.height == 0


class Twice(ms.ProcessFunction):
    """Emits equal rows at different times, and takes back the latest."""

    retracts = True

    def on_row(self, context, row):
        (context.emit if row["n"] else context.retract)({"k": row["k"]})


class FrameTwice(Framed):
    """The same in frames."""

    def on_rows(self, context, rows, state):
        for row in rows.rows_by_key("n", named=True, include_key=True, unique=False).items():
            given = pl.DataFrame(row[1], schema=rows.schema)["__key", "__time", "k"]
            (context.emit if row[0] else context.retract)(given)
        return state


class FrameSeconds(Framed):
    """The same in frames, of calls for one row each."""

    def on_rows(self, context, rows, state):
        return self.tell(context.emit, rows, state)

    def on_retractions(self, context, rows, state):
        return self.tell(context.retract, rows, state)

    def tell(self, how, rows, state):
        seconds = rows["__time"] // 1_000_000 - int(START.timestamp())
        if (seconds == 0).any():
            raise ValueError("not the first one")
        how(rows.select("__key", "__time", second=seconds))
        return state


class Seconds(ms.ProcessFunction):
    """Emits the second of each row, and fails at the first one."""

    def on_row(self, context, row):
        self.tell(context, context.emit)

    def on_retraction(self, context, row):
        self.tell(context, context.retract)

    def tell(self, context, how):
        if context.time == START:
            raise ValueError("not the first one")
        how({"second": context.time.second})


@pytest.mark.parametrize(
    "functions", [(Twice, Seconds), (FrameTwice, FrameSeconds), (Twice, FrameSeconds)]
)
def test_of_equal_rows_at_two_times_the_one_that_failed_is_remembered(functions):
    app, stream = events()
    twice = stream.process(functions[0](), by="k", schema={"k": str}, order="arrival")
    seconds = twice.process(functions[1](), by="k", schema={"second": int}, order="arrival")
    seconds.group_by("second").agg(n=ms.count()).view("v", key="second")
    came = [Event(START, "x", 1), Event(START + timedelta(seconds=5), "x", 1)]
    taken_back = Event(START + timedelta(seconds=5), "x", 0)
    out = testing.run(app, {"t": [*came, testing.Tick("1 second"), taken_back]}, partitions=1)
    assert out["v"].rows() == []
    assert out.dead.height == 1


class Migrated:
    """Another version, which has its state from the one before."""

    version = 2

    def migrate(self, version, state):
        assert [*state] == ["total", "windows"]
        return state


class Newer(Migrated, Totals): ...


class FrameNewer(Migrated, FrameTotals): ...


def kernel_of_windows(function):
    app = ms.App("p", log="unused")
    stream = app.topic("t", Event, key="k").stream(time="at")
    counts = stream.window(ms.tumbling("10 seconds"), by="k").emit("update").agg(n=ms.count())
    made = counts.process(function, by="k", schema=TOTAL, side_outputs=SIDE, order="arrival")
    return made.node.parent.kernel


def window_row(kernel, n, sign):
    given = {"k": "x", "n": n, "window_start": START, "window_end": START}
    columns = [pl.Series(name, [given[name]], dtype) for name, dtype in kernel.columns]
    return pl.DataFrame([*columns, pl.Series(TIME, [0]), pl.Series(DIFF, [sign], pl.Int8)])


@pytest.mark.parametrize(("function", "newer"), [(Totals, Newer), (FrameTotals, FrameNewer)])
def test_a_newer_version_knows_which_rows_have_failed_and_which_hold(function, newer):
    kernel = kernel_of_windows(function())
    done = Run(kernel)
    for n in (1, BAD):
        done.batch(window_row(kernel, n, 1), 0)
    assert len(done.failed) == 1
    done.kernel = kernel_of_windows(newer())
    assert done.batch(window_row(kernel, BAD, -1), 0).rows is None
    taken_back = done.batch(window_row(kernel, 1, -1), 0).rows
    assert taken_back[DIFF].to_list() == [-1, -1]
    assert len(done.failed) == 1
    assert stored_keys(done) == 0


@pytest.mark.parametrize(("function", "newer"), [(Totals, FrameNewer), (FrameTotals, Newer)])
def test_rows_that_hold_cannot_be_taken_over_from_rows_to_frames(function, newer):
    kernel = kernel_of_windows(function())
    done = Run(kernel)
    done.batch(window_row(kernel, 1, 1), 0)
    done.kernel = kernel_of_windows(newer())
    with pytest.raises(UserCodeError, match="emitted row by row or in frames"):
        done.batch(window_row(kernel, 1, -1), 0)


@pytest.mark.parametrize("function", [Totals, FrameTotals])
def test_what_the_operator_notes_of_a_key_is_not_shown_as_its_state(function):
    columns = kernel_of_windows(function()).state_columns
    assert columns.shown(pl.DataFrame(schema=columns.schema)).columns == ["k", "total", "windows"]
