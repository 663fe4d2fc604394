"""Distinct, union, except and intersect, against SQL's rules over all rows after each batch."""

import itertools
from collections import Counter

import polars as pl
import pytest
from bag_model import RUNS, bags, histories, last_batch
from example_counts import some
from hypothesis import given, settings

import millstream as ms
from millstream import testing

SCHEMA = {"id": str, "g": str | None, "v": int | None}
# Rows of null, not a number, both zeros, lists and structs, of which many are equal.
X = pl.when(pl.col("v") == 0).then(float("nan")).when(pl.col("v") == 1).then(-0.0).otherwise(0.0)
NESTED = pl.when(pl.col("v") == 2).then(None).otherwise(pl.concat_list(pl.col("v") // 2, "v"))
STRUCT = pl.struct(a=pl.col("v") // 3, b=pl.when(pl.col("v") == 4).then(None).otherwise(X))


def new_app():
    return ms.App("sets", log="unused", buckets=2)


def two_tables(app, *columns, **named):
    return [
        app.table(name, SCHEMA, key="id").select(*columns, **named) for name in ("left", "right")
    ]


def counted(bag):
    """Count each row, and find its least time."""
    counts, times = Counter(), {}
    for (row, time), n in bag.items():
        counts[row] += n
        times[row] = min(time, times.get(row, time))
    return counts, times


def sql(operation, left, right, *, keep_all):
    (a, first), (b, others) = counted(left), counted(right)
    times = first
    if operation == "union":
        rows = a + b
        times = {
            row: min(t for t in (first.get(row), others.get(row)) if t is not None) for row in rows
        }
    elif operation == "except":
        rows = a - b if keep_all else Counter({row: 1 for row in a if row not in b})
    else:
        rows = a & b
    if not keep_all:
        rows = Counter(dict.fromkeys(rows, 1))
    return Counter({(row, times[row]): n for row, n in rows.items()})


@settings(max_examples=some(8))
@given(left=histories(20), right=histories(20), run=RUNS)
def test_after_each_batch_set_operations_are_what_sql_gives(rows_given, left, right, run):
    app = new_app()
    columns = ["g", "x"]
    one, other = two_tables(app, "g", x=X)
    one.to("one")
    other.to("other")
    for keep_all in (False, True):
        one.except_(other, all=keep_all).to(f"except_{keep_all}")
        one.intersect(other, all=keep_all).to(f"intersect_{keep_all}")
    one.union(other).to("union_False")
    one.distinct().to("distinct")
    one.union(other, all=True).to("both")
    out = rows_given(app, {"left": left, "right": right}, **run)
    count = last_batch(out)

    def found(name):
        return bags(out.rows[f"to({name})"], columns, count)

    results = {name[3:-1]: found(name[3:-1]) for name in out.rows}
    for batch, (a, b) in enumerate(zip(results["one"], results["other"], strict=True)):
        for operation, keep_all in itertools.product(
            ("except", "intersect", "union"), (False, True)
        ):
            if (operation, keep_all) != ("union", True):
                expected = sql(operation, a, b, keep_all=keep_all)
                assert results[f"{operation}_{keep_all}"][batch] == expected, operation
        assert results["distinct"][batch] == sql("union", a, Counter(), keep_all=False)
        assert results["both"][batch] == a + b


@settings(max_examples=some(10))
@given(left=histories(20), right=histories(20), run=RUNS)
def test_lists_and_structs_are_compared_as_a_whole(rows_given, left, right, run):
    app = new_app()
    columns = ["g", "l", "s"]
    one, other = two_tables(app, "g", l=NESTED, s=STRUCT)
    one.to("one")
    other.to("other")
    one.except_(other, all=True).to("except")
    one.distinct().to("distinct")
    out = rows_given(app, {"left": left, "right": right}, **run)
    count = last_batch(out)
    a, b, difference, distinct = (
        bags(out.rows[f"to({name})"], columns, count)
        for name in ("one", "other", "except", "distinct")
    )
    for there, others, rest, once in zip(a, b, difference, distinct, strict=True):
        assert rest == sql("except", there, others, keep_all=True)
        assert once == sql("union", there, Counter(), keep_all=False)


@settings(max_examples=some(8))
@given(rows=histories(), run=RUNS)
def test_a_table_without_itself_is_empty_and_with_itself_the_same(rows_given, rows, run):
    app = new_app()
    table = app.table("left", SCHEMA, key="id")
    table.to("rows")
    table.except_(table, all=True).to("nothing")
    table.intersect(table, all=True).to("same")
    table.union(table.filter(pl.lit(value=True)), all=True).to("twice")
    out = rows_given(app, {"left": rows}, **run)
    count = last_batch(out)
    names = ["id", "g", "v"]
    there = bags(out.rows["to(rows)"], names, count)
    assert not out.rows["to(nothing)"].height
    assert bags(out.rows["to(same)"], names, count) == there
    assert bags(out.rows["to(twice)"], names, count) == [bag + bag for bag in there]


def test_the_views_of_set_operations_do_not_depend_on_batches_partitions_or_crashes():
    app = new_app()
    one, other = two_tables(app, "g", "v")
    one.except_(other).view("except")
    one.intersect(other, all=True).group_by("g", "v").agg(n=ms.count()).view("intersect")
    one.union(other).view("union")
    one.distinct("g").view("distinct")
    inputs = {
        name: [
            testing.Row(
                None
                if n % 5 == 3
                else f'{{"id": "{n % 9}", "g": "{n % 4}", "v": {n * k % 3}}}'.encode(),
                key=str(n % 9),
            )
            for n in range(40)
        ]
        for name, k in (("left", 1), ("right", 2))
    }
    out = testing.replay(app, inputs, batchings=4, crash=2)
    assert out["union"].height


def test_what_identifies_the_rows_of_the_result():
    app = new_app()
    one, other = (app.table(name, SCHEMA, key="id") for name in ("left", "right"))
    assert one.distinct("g", "v").primary_key == ("g", "v")
    assert one.distinct().columns == one.columns
    assert one.union(other).primary_key == ("id", "g", "v")
    assert one.union(other, all=True).primary_key is None
    assert one.except_(other, all=True).primary_key == ("id",)
    bag = one.select("g")
    assert bag.intersect(other.select("g")).primary_key == ("g",)
    assert bag.intersect(other.select("g"), all=True).primary_key is None
    with pytest.raises(ms.ConfigError, match="Its rows have no key"):
        one.union(other, all=True).view("both")


def test_tables_that_do_not_fit_together_are_refused_where_they_are_declared():
    app = new_app()
    one, other = (app.table(name, SCHEMA, key="id") for name in ("left", "right"))
    stream = app.topic("events", SCHEMA, key="id").stream()
    elsewhere = new_app().table("left", SCHEMA, key="id")
    cast = other.with_columns(v=pl.col("v").cast(pl.Float64))
    refused = {
        "its 'v' is Float64 and not Int64": lambda: one.union(cast),
        "it has no 'v'": lambda: one.except_(other.select("id", "g")),
        "it has 'w' besides": lambda: one.intersect(other.with_columns(w=pl.lit(1))),
        "Give a table": lambda: one.union(stream),
        "tables of one app": lambda: one.except_(elsewhere),
        "union has one table": one.union,
        "same table twice": lambda: one.union(one, all=True),
        "names 'h'": lambda: one.distinct("h"),
    }
    for message, declare in refused.items():
        with pytest.raises(ms.ConfigError, match=message):
            declare()
