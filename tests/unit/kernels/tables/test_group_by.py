"""Groups without windows, against a recomputation of everything after each batch."""

import json
import random
from collections import Counter
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from fractions import Fraction

import polars as pl
import pytest
from bag_model import RUNS, as_rows, bags, grouped, histories, last_batch
from example_counts import some
from hypothesis import given, settings
from hypothesis import strategies as st

import millstream as ms
from millstream import testing

START = datetime(2026, 1, 1, tzinfo=UTC)
SCHEMA = {"id": str, "g": str | None, "v": int | None}
NUMBER = pl.col("v")
INFINITE = float("inf")
# Values that come and are taken back, and must leave nothing behind.
EXTREME = (
    pl.when(NUMBER == 0)
    .then(float("nan"))
    .when(NUMBER == 1)
    .then(INFINITE)
    .when(NUMBER == 2)
    .then(1e18)
    .when(NUMBER == 3)
    .then(-0.0)
    .when(NUMBER == 4)
    .then(0.1)
)
AGGREGATES = {
    "n": ms.count(),
    "sum": ms.sum("v"),
    "total": ms.sum("x"),
    "least": ms.min("x"),
    "most": ms.max("v"),
    "different": ms.distinct("v"),
    "set": ms.set("v"),
    "list": ms.list("v"),
    "median": ms.quantile("v", 0.5),
}


def new_app():
    return ms.App("groups", log="unused", buckets=2)


def table_of(app):
    return app.table("t", SCHEMA, key="id")


def total(values):
    """The sum of floats: exact, rounded once."""
    if "NaN" in values:
        return "NaN"
    if INFINITE in values:
        return INFINITE
    return float(sum(map(Fraction, values), Fraction(0)))


def least(values):
    """What is not a number counts only where there is nothing else."""
    return min((v for v in values if v != "NaN"), default="NaN" if values else None)


def sql_groups(rows):
    """GROUP BY g over (id, g, v, x), with the greatest time: a row for each group that has rows."""
    found = Counter()
    for (group,), members in grouped(rows, [1]).items():
        vs = sorted(row[2] for row, _ in members if row[2] is not None)
        xs = [row[3] for row, _ in members if row[3] is not None]
        median = vs[(len(vs) + 1) // 2 - 1] if vs else None
        values = [len(members), sum(vs), total(xs), least(xs), max(vs, default=None)]
        values += [len({*vs}), tuple(sorted({*vs})), tuple(vs), median]
        found[(group, *values), max(time for _, time in members)] += 1
    return found


@settings(max_examples=some(15))
@given(rows=histories(), run=RUNS)
def test_after_each_batch_the_groups_are_what_sql_gives_over_the_rows(rows_given, rows, run):
    app = new_app()
    table = table_of(app).with_columns(x=EXTREME)
    table.to("rows")
    table.group_by("g").agg(**AGGREGATES).to("groups")
    out = rows_given(app, {"t": rows}, **run)
    count = last_batch(out)
    before = bags(out.rows["to(rows)"], ["id", "g", "v", "x"], count)
    after = bags(out.rows["to(groups)"], ["g", *AGGREGATES], count)
    for there, groups in zip(before, after, strict=True):
        assert groups == sql_groups(as_rows(there))


@settings(max_examples=some(10))
@given(rows=histories(), run=RUNS)
def test_groups_of_groups_and_groups_of_joins_follow_every_change(rows_given, rows, run):
    app = new_app()
    table = table_of(app)
    table.to("rows")
    per = table.group_by("g", "v").agg(n=ms.count())
    per.group_by("n").agg(groups=ms.count(), most=ms.max("v")).to("sizes")
    out = rows_given(app, {"t": rows}, **run)
    count = last_batch(out)
    before = bags(out.rows["to(rows)"], ["id", "g", "v"], count)
    after = bags(out.rows["to(sizes)"], ["n", "groups", "most"], count)
    for there, sizes in zip(before, after, strict=True):
        first = {
            (*key, len(members)): max(t for _, t in members)
            for key, members in grouped(as_rows(there), [1, 2]).items()
        }
        expected = Counter()
        for (n,), members in grouped(first.items(), [2]).items():
            vs = [row[1] for row, _ in members if row[1] is not None]
            values = n, len(members), max(vs, default=None)
            expected[values, max(t for _, t in members)] += 1
        assert sizes == expected


@dataclass
class Event:
    at: datetime
    g: str
    v: int


@settings(max_examples=some(12))
@given(
    values=st.lists(st.tuples(st.integers(0, 9), st.sampled_from("ab"), st.integers(0, 3))),
    run=RUNS,
)
def test_groups_of_a_stream_take_every_row_however_late(rows_given, values, run):
    app = new_app()
    stream = app.topic("events", Event, key="g").stream(
        time="at", watermark=ms.watermark("0 seconds", idle=None)
    )
    stream.group_by("g").agg(n=ms.count(), first=ms.first("v"), set=ms.set("v")).to("groups")
    rows = [Event(START + timedelta(days=day), g, v) for day, g, v in values]
    out = rows_given(app, {"events": rows}, **run)
    found = bags(out.rows["to(groups)"], ["g", "n", "first", "set"], last_batch(out))
    expected = {
        (
            (g, len(own), min(own, key=lambda e: e.at).v, tuple(sorted({e.v for e in own}))),
            int(max(e.at for e in own).timestamp() * 1e6),
        )
        for g in "ab"
        if (own := [e for e in rows if e.g == g])
    }
    assert {*(found[-1] if found else ())} == expected


def test_a_group_is_emitted_only_where_something_of_it_changed(rows_given):
    app = new_app()
    events = app.topic("events", Event, key="g").stream(time="at")
    table = events.table(key=["g", "v"])
    table.group_by("g").agg(most=ms.max("v")).to("groups")
    rows = []
    for day, v in [(3, 5), (1, 4), (2, 3), (4, 1)]:
        rows += [Event(START + timedelta(days=day), "a", v), testing.Tick(after="1 second")]
    out = rows_given(app, {"events": rows}).rows["to(groups)"]
    # Only the last row changes anything: the time of the group.
    assert out.select("most", "__diff").rows() == [(5, 1), (5, -1), (5, 1)]


def row(key, g, v):
    value = None if g is None else json.dumps({"id": key, "g": g, "v": v}).encode()
    return testing.Row(value, key=key)


# Kafka, dsl-api.html, KTable groupBy and aggregate: regions of users, and the lengths of their names.
I1 = [
    (("alice", "E"), {"E": 5}),
    (("bob", "A"), {"A": 3, "E": 5}),
    (("charlie", "A"), {"A": 10, "E": 5}),
    (("alice", "A"), {"A": 15}),  # Kafka keeps E with 0; a group without rows is no row here
    (("charlie", None), {"A": 8}),
    (("bob", "E"), {"A": 5, "E": 3}),
]


def test_case_i1_a_row_that_moves_is_taken_from_one_group_and_added_to_the_other(rows_given):
    app = new_app()
    users = app.table("users", {"name": str, "g": str}, key="name")
    sized = users.with_columns(size=pl.col("name").str.len_chars().cast(pl.Int64))
    sized.group_by("g").agg(size=ms.sum("size")).to("sizes")
    rows = []
    for (name, region), _ in I1:
        value = None if region is None else json.dumps({"name": name, "g": region}).encode()
        rows += [testing.Row(value, key=name), testing.Tick(after="1 second")]
    out = rows_given(app, {"users": rows})
    found = bags(out.rows["to(sizes)"], ["g", "size"], 2 * len(I1) - 1)
    # A Tick makes a batch of its own.
    assert [{g: size for (g, size), _ in bag} for bag in found[::2]] == [after for _, after in I1]


def test_the_views_of_groups_do_not_depend_on_batches_partitions_or_crashes():
    app = new_app()
    table = table_of(app).with_columns(x=EXTREME)
    table.group_by("g").agg(**AGGREGATES).view("groups")
    table.group_by("g", "v").agg(n=ms.count()).group_by("n").agg(m=ms.count()).view("sizes")
    dice = random.Random(4)
    rows = [
        row(
            str(dice.randrange(9)),
            dice.choice(["a", "b", None, "c"]),
            dice.choice([None, *range(5)]),
        )
        for _ in range(40)
    ]
    out = testing.replay(app, {"t": rows}, batchings=4, crash=2)
    assert out["groups"].height == 3


def test_a_group_whose_last_row_goes_leaves_the_state_with_it(rows_given):
    app = new_app()
    table_of(app).group_by("g").agg(total=ms.sum("v"), least=ms.min("v")).to("groups")
    keys = [str(number) for number in range(20)]
    rows = [row(key, "abc"[int(key) % 3], 1) for key in keys]
    gone = [row(key, None, None) for key in keys]
    assert held(rows_given(app, {"t": rows}, batches=3).engine) == 40  # rows, and their times
    out = rows_given(app, {"t": [*rows, *gone]}, batches=3)
    assert out.rows["to(groups)"]["__diff"].sum() == 0
    assert held(out.engine) == 0


def held(engine):
    """Count the rows that the state of the groups stands for."""
    events = 0
    for (stage, _), state in engine.states.items():
        for operator in json.loads(state.manifest()).values() if stage == 1 else ():
            events += sum(entry[4] for runs in operator["runs"].values() for entry in runs)
            events -= sum(sum(slots.values()) for slots in operator["emitted"].values())
    return events


def test_keys_may_be_any_floats_and_have_one_zero(rows_given):
    app = new_app()
    table = table_of(app).with_columns(x=EXTREME, z=pl.when(NUMBER > 2).then(-0.0).otherwise(0.0))
    table.group_by("x").agg(n=ms.count()).to("by_x")
    table.group_by("z").agg(n=ms.count()).to("by_z")
    rows = [row(str(number), "a", number % 5) for number in range(10)] + [row("10", "a", None)]
    out = rows_given(app, {"t": rows}, batches=3, partitions=2)
    (by_x,) = bags(out.rows["to(by_x)"], ["x", "n"], last_batch(out))[-1:]
    assert {row for row, _ in by_x} == {
        (None, 1),
        ("NaN", 2),
        (INFINITE, 2),
        (1e18, 2),
        (0.0, 2),
        (0.1, 2),
    }
    zeros = out.rows["to(by_z)"]["z"]
    assert {str(zero) for zero in zeros} == {"0.0"}


def test_columns_may_have_names_that_polars_takes_for_patterns(rows_given):
    app = new_app()
    table = table_of(app).rename({"g": "^.*$", "v": "*"})
    table.group_by("^.*$").agg(n=ms.count()).to("groups")
    table.distinct().group_by("*").agg(n=ms.count()).to("distinct")
    table.top(1, by="*", per="^.*$", rank="^r$").to("top")
    out = rows_given(app, {"t": [row("1", "a", 1), row("2", "a", 2)]})
    assert out.rows["to(groups)"]["n"].to_list() == [2]
    assert sorted(out.rows["to(distinct)"]["*"]) == [1, 2]
    assert out.rows["to(top)"]["^r$"].to_list() == [1]
    assert out.rows["to(top)"]["*"].to_list() == [2]


# ── what is refused ─────────────────────────────────────────────────────────────────────────


def test_what_cannot_be_grouped_is_refused_where_it_is_declared():
    app = new_app()
    table = table_of(app)
    stream = app.topic("events", Event, key="g").stream(time="at", late="side")
    windows = stream.window(ms.tumbling("1 minute"), by="g")
    late = windows.agg(n=ms.count()).late
    nested = table.with_columns(l=pl.concat_list("v"))
    refused = {
        "names no column": table.group_by,
        "names 'h'": lambda: table.group_by("h"),
        "cannot be a key": lambda: nested.group_by("l"),
        "has no aggregates": lambda: table.group_by("g").agg(),
        "is taken": lambda: table.group_by("g").agg(g=ms.count()),
        "Use one of Millstream's": lambda: table.group_by("g").agg(n=1),
        "can be retracted": lambda: table.group_by("g").agg(n=ms.first("v")),
        "after late rows": lambda: late.group_by("g"),
    }
    for message, declare in refused.items():
        with pytest.raises(ms.ConfigError, match=message):
            declare()


class Longest(ms.UserAggregate):
    result_type = pl.Int64()

    def zero(self):
        return 0

    def add(self, state, value):
        return max(state, value)

    def merge(self, state, other):
        return max(state, other)


def test_a_user_aggregate_that_takes_nothing_back_is_refused_over_a_table():
    table = table_of(new_app())
    with pytest.raises(ms.ConfigError, match="retract"):
        table.group_by("g").agg(longest=ms.aggregate(Longest(), "v"))
