"""As-of joins and look-ups against plain Python: each row by itself, over all that there is."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import polars as pl
import pytest
from example_counts import some
from hypothesis import given, settings
from hypothesis import strategies as st

import millstream as ms
from millstream import testing
from millstream.errors import ConfigError
from millstream.kernels.frames import DELETED, HASH, TIME
from millstream.kernels.joins.asof_match import key_numbers
from millstream.kernels.joins.versions import TIE, VALID_FROM, Horizon, Versions
from millstream.kernels.state.keyhash import hash_columns
from millstream.kernels.state.operator_state import OperatorState
from millstream.kernels.state.sorted_runs import MemoryRunStore
from millstream.testing import Row, Watermark

START = datetime(2026, 1, 1, tzinfo=UTC)
END = START + timedelta(days=1)
RULE = ms.watermark("1 hour", idle=None)


@dataclass
class Left:
    at: datetime
    k: str | None
    v: int


@dataclass
class Right:
    at: datetime
    k: str | None
    w: int
    gone: bool = False


def at(seconds):
    return START + timedelta(seconds=seconds)


keys = st.sampled_from(["a", "b", "c"])
times = st.integers(0, 12)
lefts = st.lists(st.tuples(times, st.sampled_from(["a", "b", "c", None])), max_size=12)
rights = st.lists(st.tuples(times, keys, st.booleans()), max_size=12)


def streams(*, order="time"):
    app = ms.App("temporal", log="unused")
    left = app.topic("left", Left, key="k").stream(time="at", watermark=RULE)
    topic = app.topic("right", Right, key="k")
    table = topic.table(order=order, time="at", watermark=RULE, deleted=pl.col("gone")).drop(
        "gone", "at"
    )
    return app, left, topic.stream(time="at", watermark=RULE, name="quotes"), table


def inputs_of(left, right):
    rows = {
        "left": [Left(at(time), key, number) for number, (time, key) in enumerate(left)],
        "right": [Right(at(t), key, number, gone) for number, (t, key, gone) in enumerate(right)],
    }
    return {topic: [*made, Watermark(topic, at=END)] for topic, made in rows.items()}


def nearest(time, candidates, *, direction, allow_equal, tolerance):
    """Choose among (time, number) pairs, which are in the order of the log."""
    before = [c for c in candidates if c[0] < time or (allow_equal and c[0] == time)]
    after = [c for c in candidates if c[0] > time or (allow_equal and c[0] == time)]
    last = max(before, default=None)
    first = min((c[0] for c in after), default=None)
    later = None if first is None else max(c for c in after if c[0] == first)
    near = [
        c
        for c in (last, later)
        if c is not None and (tolerance is None or abs(c[0] - time) <= tolerance)
    ]
    wanted = {"backward": [last], "forward": [later], "nearest": [last, later]}[direction]
    near = [c for c in wanted if c in near]
    return min(near, key=lambda c: abs(c[0] - time), default=None)


def ways(seed):
    return {
        "batches": 1 + seed % 5,
        "partitions": [1, 4, 7][seed % 3],
        "seed": seed,
        "crash": seed % 3,
    }


@settings(max_examples=some(60))
@given(
    lefts, rights, st.booleans(), st.sampled_from([None, 0, 3]), st.booleans(), st.integers(0, 999)
)
def test_a_row_has_the_version_that_was_valid_at_its_time(
    left, right, allow_equal, tolerance, inner, seed
):
    app, stream, _, table = streams()
    stream.join_asof(
        table,
        "k",
        how="inner" if inner else "left",
        allow_equal=allow_equal,
        tolerance=None if tolerance is None else f"{tolerance} seconds",
    ).view("out", key="v")
    expected = []
    for number, (time, key) in enumerate(left):
        mine = [(t, n) for n, (t, k, _) in enumerate(right) if k == key]
        found = nearest(
            time, mine, direction="backward", allow_equal=allow_equal, tolerance=tolerance
        )
        value = None if found is None or right[found[1]][2] else found[1]
        if value is not None or not inner:
            expected.append((number, value))
    out = testing.run(app, inputs_of(left, right), **ways(seed))
    assert out["out"].select("v", "w").sort("v").rows() == expected
    assert out.late == 0
    assert out.dead.is_empty()


@settings(max_examples=some(60))
@given(
    lefts,
    rights,
    st.sampled_from(["backward", "forward", "nearest"]),
    st.booleans(),
    st.sampled_from([0, 2, 5]),
    st.integers(0, 999),
)
def test_a_row_has_the_quote_that_is_nearest_in_the_direction(
    left, right, direction, allow_equal, tolerance, seed
):
    app, stream, quotes, _ = streams()
    stream.join_asof(
        quotes,
        "k",
        direction=direction,
        allow_equal=allow_equal,
        tolerance=f"{tolerance} seconds",
    ).view("out", key="v")
    expected = []
    for number, (time, key) in enumerate(left):
        mine = [(t, n) for n, (t, k, _) in enumerate(right) if k == key]
        found = nearest(
            time, mine, direction=direction, allow_equal=allow_equal, tolerance=tolerance
        )
        expected.append((number, None if found is None else found[1]))
    out = testing.run(app, inputs_of(left, right), **ways(seed))
    assert out["out"].select("v", "w").sort("v").rows() == expected


arrivals = st.integers(0, 6)


@settings(max_examples=some(60))
@given(
    st.lists(st.tuples(arrivals, st.sampled_from(["a", "b", None])), max_size=10),
    st.lists(st.tuples(arrivals, keys, times, st.booleans()), max_size=10),
    st.sampled_from(["offset", "time"]),
    st.integers(0, 999),
)
def test_a_row_is_looked_up_in_the_table_as_it_was_on_its_arrival(left, right, order, seed):
    """In one batch: of two topics a batch takes what is there, so more of them are not comparable."""
    app, stream, _, table = streams(order=order)
    stream.lookup(table, "k").view("out", key="v")
    left, right = sorted(left, key=lambda row: row[0]), sorted(right, key=lambda row: row[0])
    events = [(ms_, 1, "left", number) for number, (ms_, _) in enumerate(left)]
    events += [(ms_, 0, "right", number) for number, (ms_, *_) in enumerate(right)]
    held, expected = {}, {}
    for _, _, side, number in sorted(events):
        if side == "right":
            _, key, time, gone = right[number]
            version = (time, number) if order == "time" else (number,)
            if key not in held or version > held[key][0]:
                held[key] = version, None if gone else number
        else:
            expected[number] = held.get(left[number][1], (None, None))[1]
    rows = {
        "left": [
            Row(Left(at(0), key, number), at=START + timedelta(milliseconds=ms_))
            for number, (ms_, key) in enumerate(left)
        ],
        "right": [
            Row(Right(at(time), key, number, gone), at=START + timedelta(milliseconds=ms_))
            for number, (ms_, key, time, gone) in enumerate(right)
        ],
    }
    out = testing.run(app, rows, partitions=[1, 4, 7][seed % 3], seed=seed)
    assert out["out"].select("v", "w").sort("v").rows() == sorted(expected.items())


def test_a_look_up_in_rows_that_are_given_with_the_program_finds_them_from_the_first_batch():
    app, stream, _, _ = streams()
    names = app.static_table(pl.DataFrame({"k": ["a", "b"], "name": ["A", "B"]}), key="k")
    stream.lookup(names, "k").view("out", key="v")
    for seed in range(10):
        out = testing.run(app, inputs_of([(0, "a"), (1, "c"), (2, None)], []), **ways(seed))
        assert out["out"].select("v", "name").rows() == [(0, "A"), (1, None), (2, None)]


def test_a_window_below_a_look_up_does_not_wait_for_the_table():
    app, stream, _, table = streams()
    looked_up = stream.lookup(table, "k")
    looked_up.window(ms.tumbling("10 seconds"), by="w").agg(n=ms.count()).view("out")
    rows = inputs_of([(0, "a"), (1, "a")], [])
    for seed in range(5):
        out = testing.run(app, {"left": rows["left"]}, **ways(seed))
        assert out["out"]["n"].to_list() == [2]


def test_a_table_that_rests_does_not_make_a_join_wait_when_its_partitions_may_be_idle():
    app = ms.App("idle", log="unused")
    left = app.topic("left", Left, key="k").stream(time="at", watermark=ms.watermark("0 seconds"))
    rule = ms.watermark("0 seconds", idle="30 seconds")
    table = app.topic("right", Right, key="k").table(time="at", watermark=rule).drop("at")
    left.join_asof(table, "k").view("out", key="v")
    first = [Left(at(1), "a", 0), Left(at(5), "a", 1)]
    later = [testing.Tick(after="1 minute"), Left(at(90), "a", 2)]
    out = testing.run(
        app,
        {
            "left": [*first, *later],
            "right": [Right(at(0), "a", 7), testing.Tick(after="1 minute")],
        },
        partitions=1,
    )
    assert out["out"].select("v", "w").rows() == [(0, 7), (1, 7)]


def test_the_state_of_a_table_that_changes_for_ever_stays_small():
    """Each batch brings a hundred versions of ten keys, and the watermark passes those before."""
    state = OperatorState(MemoryRunStore())
    held = []
    for batch in range(100):
        state = OperatorState.from_message(state.to_message(), state.store)
        versions = Versions(state, "right", ("k",))
        rows = pl.DataFrame({"k": [n % 10 for n in range(100)], "w": range(100)}).with_columns(
            pl.Series(TIME, [batch * 100 + n for n in range(100)]),
            pl.Series(TIE, range(100)),
            pl.Series(VALID_FROM, [batch * 100 + n for n in range(100)]),
            pl.lit(value=False).alias(DELETED),
        )
        rows = rows.hstack([pl.Series(HASH, hash_columns(rows, ("k",)))])
        versions.add(rows, Horizon(batch * 100 - 1, None, newest=True))
        held.append(versions.runs.rows)
    assert max(held) < 1000


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda s, q, t: s.join_asof(q, "k", direction="forward"), "and no tolerance"),
        (lambda s, q, t: s.join_asof(t, "k", direction="forward", tolerance="1 s"), "and a table"),
        (lambda s, q, t: s.join_asof(t, {"v": "w"}), "identified by k"),
        (lambda s, q, t: s.join_asof(t.distinct(), "k"), "whose versions are not known"),
        (lambda s, q, t: s.join_asof(t, "k", how="outer"), "join_asof's how is 'outer'"),
        (lambda s, q, t: s.lookup(t.select("w"), {"v": "w"}), "whose rows may be equal"),
        (lambda s, q, t: s.lookup(q, "k"), "table"),
        (
            lambda s, q, t: (
                s.window(ms.tumbling("1 s"), by="k")
                .emit("discard")
                .agg(n=ms.count())
                .lookup(t, "k")
            ),
            'lookup comes after emit("discard"), whose rows are parts that add up',
        ),
        (
            lambda s, q, t: s.join_asof(
                q.window(ms.tumbling("1 s"), by="k").emit("discard").agg(n=ms.count()), "k"
            ),
            'join_asof\'s right input comes after emit("discard"), whose rows are parts that add up',
        ),
        (
            lambda s, q, t: s.join_asof(
                s.app.topic("side", Right).stream(time="at", late="side"), "k"
            ),
            'join_asof\'s right input is read with late="side"',
        ),
    ],
)
def test_what_cannot_be_joined_is_refused_where_it_is_declared(build, message):
    _, stream, quotes, table = streams()
    with pytest.raises(ConfigError) as refused:
        build(stream, quotes, table)
    assert message in str(refused.value)


def test_a_key_that_is_not_a_number_matches_itself():
    """polars merges by a single sorted column of floats, in which NaN is not equal to NaN."""
    left, right = pl.DataFrame({"k": [float("nan")]}), pl.DataFrame({"k": [1.0, float("nan")]})
    numbers = key_numbers(left, right, ["k"], nulls_equal=False)
    assert [list(each) for each in numbers] == [[1], [0, 1]]


def test_a_deletion_reaches_a_key_that_was_selected_under_another_name():
    app, left, _, table = streams()
    swapped = table.with_columns(x=pl.lit("b")).select(pl.col("k").alias("x"), k="x", w="w")
    assert swapped.primary_key == ("x",)
    left.join_asof(swapped, {"k": "x"}).view("valid", key="v")
    left.lookup(swapped, {"k": "x"}).view("looked_up", key="v")
    inputs = inputs_of([(5, "a"), (15, "a")], [(0, "a", False), (10, "a", True)])
    for seed in range(6):
        out = testing.run(app, inputs, **ways(seed))
        assert out["valid"].select("v", "w").rows() == [(0, 0), (1, None)]
    inputs["left"].insert(0, testing.Tick("1 minute"))
    out = testing.run(app, inputs, batches=3, partitions=1)
    assert out["looked_up"]["w"].to_list() == [None, None]


def test_of_quotes_of_one_time_that_differ_in_a_list_alone_the_same_one_matches():
    app = ms.App("lists", log="unused")
    rule = ms.watermark("0 seconds", idle=None)
    events = app.topic("right", Right, key="w").stream(time="at", watermark=rule)
    lists = events.window(ms.tumbling("10 seconds"), by=["k", "w"]).agg(all=ms.list("w"))
    left = app.topic("left", Left, key="v").stream(time="at", watermark=rule)
    left.join_asof(lists.select("k", "all"), "k").view("out", key="v")
    inputs = inputs_of([(50, "a")], [(1, "a", False)] * 8)
    found = {str(testing.run(app, inputs, **ways(seed))["out"]["all"][0]) for seed in range(8)}
    assert len(found) == 1


def test_columns_of_the_right_side_may_have_any_name():
    app, left, _, table = streams()
    odd = table.rename({"w": "^a.*$"})
    left.join_asof(odd, "k").view("valid", key="v")
    left.join_asof(odd, "k", late="correct", lateness="1 day").view("corrected", key="v")
    left.lookup(app.static_table(pl.DataFrame({"k": ["a"], "^b$": [7]}), key="k"), "k").view(
        "looked_up", key="v"
    )
    inputs = inputs_of([(5, "a"), (15, "a")], [(0, "a", False), (10, "a", False), (3, "a", False)])
    for seed in range(4):
        out = testing.run(app, inputs, **ways(seed))
        for view in ("valid", "corrected"):
            assert out[view].select("v", pl.nth(-1)).rows() == [(0, 2), (1, 1)]
        assert out["looked_up"].to_series(-1).to_list() == [7, 7]
