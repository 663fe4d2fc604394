"""What a frame function does is what a dict for each key does, however rows are divided among batches, failing rows left out."""

import json
import random
from datetime import datetime, timedelta
from math import nan

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from process_model import at
from process_run import SCHEMA, SECOND, Run, as_table, kernel_of, run, stored_keys

import millstream as ms
from millstream import testing
from millstream.errors import ConfigError, UserCodeError
from millstream.kernels.process import frame_calls, operator
from millstream.kernels.state.keyhash import hash_columns
from millstream.kernels.state.operator_state import OperatorState
from millstream.kernels.state.rescale import rescale_operator

OUTPUT = {"k": pl.String, "total": pl.Int64, "items": pl.List(pl.Int64)}
SIDE = {"k": pl.String, "n": pl.Int64}
PLACES = pl.List(pl.Struct({"key": pl.Float64, "value": pl.Int64}))
KEYS = "xyz"
WORDS = ("add", "clear", "side", "fail")


class Fold(ms.FrameFunction):
    """Adds and appends ``n``; ``clear`` begins again. Emits what is held after each row."""

    total = ms.value_state(pl.Int64, default=0)
    items = ms.list_state(pl.Int64)

    def on_rows(self, context, rows, state):
        if (rows["do"] == "fail").any():
            raise ValueError("a row says so")
        held = {row["__key"]: row for row in state.to_dicts()}
        made = []
        for row in rows.to_dicts():
            one = held[row["__key"]]
            if row["do"] == "clear":
                one |= {"total": 0, "items": []}
            else:
                one |= {"total": one["total"] + row["n"], "items": [*one["items"], row["n"]]}
            made.append({**one, "__time": row["__time"]})
        names = ["__key", "__time", *OUTPUT]
        context.emit(pl.DataFrame(made, schema_overrides=OUTPUT)[names])
        side = rows.filter(pl.col("do") == "side")
        context.emit(side["__key", "k", "n"], to="side")
        # Keys of which nothing is held are left out, and so forgotten.
        kept = [one for one in held.values() if one["items"] or one["total"]]
        return pl.DataFrame(kept, schema=state.schema).reverse()


def model(rows):
    """Return what is emitted, to the side, how many rows fail, and of how many keys something is left."""
    made, side, failed, left = [], [], 0, 0
    for key, own in sorted(rows.items()):
        total, items = 0, []
        for time, do, n in own:
            if do == "fail":
                failed += 1
                continue
            total, items = (0, []) if do == "clear" else (total + n, [*items, n])
            made.append((key, time, total, items))
            side += [(key, n)] if do == "side" else []
        left += bool(total or items)
    return made, side, failed, left


ROW = st.tuples(st.integers(1, 30), st.sampled_from(WORDS), st.integers(-3, 9))
KEY_ROWS = st.lists(ROW, max_size=8).map(lambda rows: sorted(rows, key=lambda row: row[0]))


@settings(max_examples=25, deadline=None)
@given(
    st.fixed_dictionaries(dict.fromkeys(KEYS, KEY_ROWS)),
    st.integers(1, 5),
    st.randoms(use_true_random=False),
)
def test_any_rows_in_any_batches_give_what_the_model_says(rows, batches, dice):
    require_the_models(rows, batches, dice)


@pytest.mark.parametrize("hashes", [1, 2])
def test_keys_that_share_a_hash_are_told_apart(hashes, monkeypatch):
    monkeypatch.setattr(
        operator, "hash_columns", lambda *given: hash_columns(*given) % np.uint64(hashes)
    )
    for seed in range(12):
        dice = random.Random(seed)
        rows = {
            key: [
                (time, dice.choice(WORDS), dice.randrange(9))
                for time in sorted(dice.choices(range(1, 30), k=dice.randrange(6)))
            ]
            for key in "uvxyz"
        }
        require_the_models(rows, dice.randint(1, 5), dice)


def require_the_models(rows, batches, dice):
    kernel = kernel_of(Fold(), OUTPUT, side_outputs={"side": SIDE})
    done = run(kernel, as_table(rows), batches, 60 * SECOND, dice)
    made, side, failed, left = model(rows)
    found = [
        (row["0.k"], row["__time"] // SECOND, row["0.total"], row["0.items"])
        for table in done.outputs
        for row in table.to_dicts()
        if row["__branch"] == 0
    ]
    assert sorted(found, key=lambda row: row[0]) == made  # stable: of each key in its order
    assert sorted(done.output(1, tuple(SIDE)), key=lambda row: row[0]) == side
    assert len(done.failed) == failed
    assert stored_keys(done) == left


def app_of(function, schema, *, key, **options):
    app = ms.App("p", log="unused")
    stream = app.topic("t", SCHEMA, key="k").stream(time="at", watermark=ms.watermark("0 seconds"))
    stream.process(function, by="k", schema=schema, **options).view("made", key=key)
    return app


def row(second, do, n, key="x"):
    return {"at": at(second), "k": key, "do": do, "n": n}


@pytest.mark.parametrize("order", ["time", "arrival"])
def test_in_partitions_batches_and_crashes_the_view_is_the_models_and_bad_rows_are_dead_letters(
    order,
):
    rows = [
        row(1 + n // 2, WORDS[3] if n % 11 == 5 else WORDS[n % 3], n, KEYS[n % 3])
        for n in range(30)
    ]
    app = app_of(Fold(), OUTPUT, key="k", side_outputs={"side": SIDE}, order=order)
    own = {
        key: [(n, one["do"], one["n"]) for n, one in enumerate(rows) if one["k"] == key]
        for key in KEYS
    }
    made, _, failed, _ = model(own)
    last = {key: (total, items) for key, _, total, items in made}
    end = testing.Watermark("t", at=at(60))
    out = testing.replay(app, {"t": [*rows, end]}, batchings=4, crash=2)
    shown = out["made"].select("k", "total", "items").rows()
    assert {key: (total, json.loads(items)) for key, total, items in shown} == last
    assert out.dead.height == failed
    letter = out.dead.row(0, named=True)
    assert letter["reason"] == "ValueError: a row says so"
    assert json.loads(letter["value"])["do"] == "fail"


class Quiet(ms.FrameFunction):
    """Emits how many rows a key had, once it has had none for 5 seconds."""

    count = ms.value_state(pl.Int64, default=0)

    def on_rows(self, context, rows, state):
        found = rows.group_by("__key").agg(pl.len().alias("more"), pl.col("at").last())
        made = state.join(found, on="__key", maintain_order="left")
        later = pl.concat_list(pl.col("at") + timedelta(seconds=5))
        return made.with_columns(pl.col("count") + pl.col("more"), later.alias("__timers"))

    def on_timers(self, context, timers, state):
        if (timers["time"] == at(9)).any():
            raise ValueError("nine")
        context.emit(state["__key", "k", "count"])
        return state.clear()


QUIET = {"k": pl.String, "count": pl.Int64}


def test_timers_come_after_the_rows_of_their_batch_once_and_only_the_bad_one_fails():
    done = Run(kernel_of(Quiet(), QUIET))
    rows = {"x": [(1, "", 0), (2, "", 0)], "y": [(4, "", 0)], "z": [(1, "", 0)], "w": [(30, "", 0)]}
    done.batch(as_table(rows), 5 * SECOND)
    assert done.outputs == []
    out = done.batch(as_table({"z": [(8, "", 0)]}), 10 * SECOND).rows
    assert out.select("k", "count", "__time").rows() == [("x", 2, 7 * SECOND)]
    assert done.failed == [("k", "timer", "ValueError: nine")]
    out = done.batch(as_table({}), 99 * SECOND).rows
    assert out.select("k", "count", "__time").rows() == [
        ("z", 2, 13 * SECOND),
        ("w", 1, 35 * SECOND),
    ]
    assert done.batch(as_table({}), 200 * SECOND).rows is None
    assert stored_keys(done) == 1  # the timer of y failed, so its state is as it was


class Endless(Quiet):
    def on_timers(self, context, timers, state):
        return state.with_columns(pl.concat_list(timers["time"]).alias("__timers"))


def test_timers_that_set_themselves_for_ever_stop_the_job(monkeypatch):
    monkeypatch.setattr(frame_calls, "TIMERS_AT_ONCE_MAX", 20)
    done = Run(kernel_of(Endless(), QUIET))
    with pytest.raises(UserCodeError, match="timers of a key have fired at one time"):
        done.batch(as_table({"x": [(1, "", 0)]}), 60 * SECOND)


class Periodic(Quiet):
    def on_timers(self, context, timers, state):
        later = pl.concat_list(timers["time"] + timedelta(seconds=1))
        return state.with_columns(pl.col("count") + 1, later.alias("__timers"))


def test_any_number_of_timers_may_follow_one_another_in_a_batch(monkeypatch):
    monkeypatch.setattr(frame_calls, "TIMERS_AT_ONCE_MAX", 5)
    done = Run(kernel_of(Periodic(), QUIET))
    done.batch(as_table({"x": [(1, "", 0)], "y": [(9, "", 0)]}), 60 * SECOND)
    done.batch(as_table({}), 70 * SECOND)
    assert (done.failed, stored_keys(done)) == ([], 2)


class AtTimes(ms.FrameFunction):
    """The names of its key are those that ``timers`` and dead letters have for the time."""

    count = ms.value_state(pl.Int64, default=0)

    def on_rows(self, context, rows, state):
        return state.with_columns(count=1, __timers=pl.lit([at(3), at(4)]))

    def on_timers(self, context, timers, state):
        if (timers["time"] == at(4)).any():
            raise ValueError("four")
        context.emit(state["__key", "time", "timer"])
        return state


def test_a_key_may_have_the_names_of_a_timers_time():
    columns = {"at": datetime, "time": str, "timer": int}
    stream = ms.App("p", log="unused").topic("t", columns, key="time").stream(time="at")
    schema = {"time": pl.String, "timer": pl.Int64}
    done = Run(stream.process(AtTimes(), by=["time", "timer"], schema=schema).node.kernel)
    rows = as_table({"x": [(1, "", 7)]}).rename({"k": "time", "n": "timer"})
    out = done.batch(rows, 5 * SECOND).rows
    assert out["time", "timer"].rows() == [("x", 7)]
    assert done.failed == [("time", "timer", "timer_", "ValueError: four")]


def test_code_that_fails_on_all_of_many_rows_stops_the_job_and_so_does_one_if_that_is_said():
    rows = as_table({"x": [(1, "fail", 0)] * 101})
    with pytest.raises(UserCodeError, match="each of more than 100"):
        Run(kernel_of(Fold(), OUTPUT, side_outputs={"side": SIDE})).batch(rows, 5 * SECOND)
    stops = kernel_of(Fold(), OUTPUT, side_outputs={"side": SIDE}, on_error="stop")
    with pytest.raises(UserCodeError, match="a row says so"):
        Run(stops).batch(as_table({"x": [(1, "add", 0), (2, "fail", 0)]}), 5 * SECOND)


class Wrong(ms.FrameFunction):
    count = ms.value_state(pl.Int8, default=0)
    places = ms.map_state(pl.Float64, pl.Int64)
    kept = None

    def on_rows(self, context, rows, state):
        n = pl.col("count")
        given = {
            "none": None,
            "missing": state.drop("count"),
            "twice": pl.concat([state, state]),
            "strange": state.with_columns(__key=7),
            "keyless": state.with_columns(__key=pl.lit(None, pl.UInt32)),
            "text": state.with_columns(n.cast(pl.String)),
            "float": state.with_columns(n + 0.5),
            "large": state.with_columns(count=pl.lit(300)),
            "timers": state.with_columns(__timers=None),
            "gap": state.with_columns(places=pl.Series([[None]], dtype=PLACES)),
            "nan": state.with_columns(places=pl.Series([[{"key": nan, "value": 1}]], dtype=PLACES)),
        }
        self.kept = self.kept or context
        word = rows["do"][0]
        if word == "emits":
            context.emit(state)
        if word == "elsewhere":
            context.emit(state["__key", "k"], to="there")
        if word == "early":
            context.emit(rows["__key", "k"].with_columns(__time=-1))
        if word == "dict":
            context.emit({"k": "x"})
        if word == "kept":
            self.kept.emit(rows["__key", "k"])
        return given.get(word, state)


def test_what_cannot_be_taken_fails_with_what_was_wrong():
    said = {
        "none": "a NoneType is returned",
        "missing": "has no column count",
        "twice": "several rows of one key",
        "strange": "has 7 to 7, and the call has 1 keys",
        "keyless": "with 1 nulls",
        "text": "The state 'count' is String, and is declared as Int8",
        "float": "The state 'count' is Float",
        "large": "The state 'count' has a value that is declared as Int8",
        "emits": "is declared with __key, k",
        "elsewhere": "emitted to 'there', and the side outputs are (none)",
        "early": "is before what was emitted already",
        "dict": "a dict is emitted, and not a frame",
        "kept": "by a context that was kept from another call",
        "timers": "has __timers, and the function has no on_timers",
        "gap": "The state 'places' has an item of a map that is null",
        "nan": "A key of the state 'places' is NaN",
    }
    done = Run(kernel_of(Wrong(), {"k": pl.String}))
    done.batch(as_table({"y": []}), 1)
    done.batch(as_table({"x": [(1, word, 0) for word in said]}), 5 * SECOND)
    for text, (*_, reason) in zip(said.values(), done.failed, strict=True):
        assert text in reason
    assert stored_keys(done) == 0


class Widens(ms.FrameFunction):
    wide = ms.value_state(pl.Float64)
    short = ms.value_state(pl.Float32)

    def on_rows(self, context, rows, state):
        columns = {
            "exact": {"wide": pl.lit(2**53), "short": pl.lit(0.1)},
            "endless": {"wide": pl.lit(1), "short": pl.lit(float("inf"))},
            "whole": {"wide": pl.lit(2**53 + 1), "short": pl.lit(None)},
            "greatest": {"wide": pl.lit(2**63 - 1), "short": pl.lit(None)},
            "far": {"wide": pl.lit(None), "short": pl.lit(1e300)},
        }
        return state.with_columns(**columns[rows["do"][0]])


def test_a_column_is_made_wider_or_shorter_only_if_its_numbers_stay():
    done = Run(kernel_of(Widens(), {"k": pl.String}))
    words = ("exact", "endless", "whole", "greatest", "far")
    for second, word in enumerate(words, start=1):
        done.batch(as_table({"x": [(second, word, 0)]}), (second + 1) * SECOND)
    assert [reason for *_, reason in done.failed] == [
        "The state 'wide' has 9007199254740993, and is declared as Float64, which cannot hold it",
        "The state 'wide' has 9223372036854775807, and is declared as Float64, which cannot hold it",
        "The state 'short' has 1e+300, and is declared as Float32, which cannot hold it",
    ]


class Zero(ms.FrameFunction):
    x = ms.value_state(pl.Float64, default=0.0)

    def on_rows(self, context, rows, state):
        return state.with_columns(x=pl.lit(-0.0 if rows["n"][0] else 0.0))


def test_a_default_is_not_stored_and_minus_zero_is_no_default_of_zero():
    for n, keys in ((0, 0), (1, 1)):
        done = Run(kernel_of(Zero(), {"k": pl.String}))
        done.batch(as_table({"x": [(1, "", n)]}), 5 * SECOND)
        assert stored_keys(done) == keys


def test_a_bucket_is_divided_and_put_together_with_its_timers_and_state():
    kernel = kernel_of(Quiet(), QUIET)
    done = Run(kernel)
    done.store.keeps_all = True
    done.batch(as_table({f"k{n}": [(1, "", 0)] for n in range(20)}), 2 * SECOND)
    stored = {**done.stored, "watermark": 2 * SECOND, "clocks": {}, "seed": 7}
    found = []
    for message in rescale_operator("p", {0: stored}, kernel.layout, before=1, after=3).values():
        one = Run(kernel)
        one.store, one.stored, one.before = done.store, message, 2 * SECOND
        one.batch(as_table({}), 60 * SECOND)
        found += [key for table in one.outputs for key in table["k"]]
    assert sorted(found) == sorted(f"k{n}" for n in range(20))


class ByRow(ms.ProcessFunction):
    count = ms.value_state(pl.Int64, default=0)

    def on_row(self, context, row):
        context.state.count += 1
        context.set_timer(context.time + timedelta(seconds=9))


class InFrames(Quiet):
    version = 2

    def migrate(self, version, state):
        return {"count": 10 * state["count"]}


def test_state_of_a_function_by_row_is_migrated_to_one_in_frames_and_timers_stay():
    done = Run(kernel_of(ByRow(), QUIET))
    done.batch(as_table({"x": [(1, "", 0), (2, "", 0)], "y": [(3, "", 0)]}), 5 * SECOND)
    done.kernel = kernel_of(InFrames(), QUIET)
    done.batch(as_table({}), 6 * SECOND)
    state = OperatorState.from_message(done.stored, done.store)
    assert [name for name in state.families if name.startswith("keys")] == ["keys.2"]
    out = done.batch(as_table({}), 60 * SECOND).rows
    assert out.select("k", "count").rows() == [("x", 20), ("y", 10)]


class ByClock(ByRow):
    def on_processing_timer(self, context, time):
        raise NotImplementedError

    def on_row(self, context, row):
        context.set_processing_timer(context.processing_time + timedelta(seconds=9))


class Timeless(ms.FrameFunction):
    version = 2
    count = ms.value_state(pl.Int64, default=0)

    def migrate(self, version, state):
        return state

    def on_rows(self, context, rows, state):
        return state


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        (ByRow(), Timeless(), "has timers, and the function has no on_timers"),
        (ByClock(), InFrames(), "has processing-time timers, for which"),
    ],
)
def test_timers_for_which_the_newer_version_has_no_method_are_not_lost(before, after, said):
    done = Run(kernel_of(before, QUIET))
    done.batch(as_table({"x": [(1, "", 0)]}), 5 * SECOND)
    done.kernel = kernel_of(after, QUIET)
    with pytest.raises(UserCodeError, match=said):
        done.batch(as_table({}), 6 * SECOND)


class Abroad(ms.FrameFunction):
    seen = ms.value_state(pl.Datetime("us", "Europe/Berlin"), default=at(3))

    def on_rows(self, context, rows, state):
        context.emit(state.select("__key", "k", n=pl.col("seen").dt.timestamp("ms")))
        return state


def test_a_default_may_be_of_another_time_zone_than_its_column():
    done = Run(kernel_of(Abroad(), SIDE))
    out = done.batch(as_table({"x": [(1, "", 0)]}), 5 * SECOND).rows
    assert (out["n"].to_list(), stored_keys(done)) == ([3000], 0)


class Counts(ms.FrameFunction):
    counts = ms.map_state(pl.String, pl.Int64)

    def on_rows(self, context, rows, state):
        item = pl.struct(pl.col("do").alias("key"), pl.col("n").alias("value"))
        added = rows.group_by("__key").agg(item.alias("added"))
        made = state.join(added, on="__key", maintain_order="left")
        made = made.with_columns(pl.col("counts").list.concat("added"))
        context.emit(made.select("__key", "k", total=pl.col("counts").list.len().cast(pl.Int64)))
        return made


def test_a_map_is_a_list_of_its_items_and_has_each_key_once():
    done = Run(kernel_of(Counts(), {"k": pl.String, "total": pl.Int64}))
    done.batch(as_table({"x": [(1, "a", 1), (2, "b", 2)]}), 5 * SECOND)
    done.batch(as_table({"x": [(6, "c", 1)], "y": [(6, "a", 1)]}), 9 * SECOND)
    done.batch(as_table({"x": [(9, "a", 1)]}), 12 * SECOND)
    found = [row for table in done.outputs for row in table.select("k", "total").rows()]
    assert sorted(found) == [("x", 2), ("x", 3), ("y", 1)]
    assert "The state 'counts' has a key of a map twice" in done.failed[0][-1]


class Forgets(Fold):
    items = ms.list_state(pl.Int64, ttl="1 day")


class Stateless(ms.FrameFunction):
    def on_rows(self, context, rows, state):
        return state


class Nested(Fold):
    total = ms.value_state(pl.List(pl.Int64), default=[1])


class SameName(Fold):
    k = ms.value_state(pl.Int64)


class NeverCalled(Fold):
    def on_timer(self, context, time):
        raise NotImplementedError


class NeverCalledByRow(ByRow):
    def on_timers(self, context, timers, state):
        raise NotImplementedError


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (SameName(), "has the name of a column of the key"),
        (NeverCalled(), "has on_timer, which is never called: it derives from ms.FrameFunction"),
        (
            NeverCalledByRow(),
            "has on_timers, which is never called: .* are on_row, on_retraction, on_timer",
        ),
        (Forgets(), "has a ttl, and a frame does not say"),
        (Stateless(), "declares no state"),
        (Nested(), "of a nested type. Leave it out"),
    ],
)
def test_state_that_frames_cannot_have_is_refused_where_it_is_declared(function, message):
    with pytest.raises(ConfigError, match=message):
        kernel_of(function, OUTPUT)
