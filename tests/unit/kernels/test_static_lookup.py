"""A look-up in rows that are given: every row as a dictionary would have it, and as with a table in state."""

from __future__ import annotations

import math

import polars as pl
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.example_counts import some

import millstream as ms
from millstream import testing
from millstream.kernels.state.keyhash import Buckets
from millstream.kernels.static_lookup import StaticLookup

KEY = "^a.*$"
TEXTS = st.one_of(st.none(), st.sampled_from(["", "x", "y", "z"]))
NUMBERS = st.one_of(st.none(), st.sampled_from([0.0, -0.0, 1.5, 2.5]))


def app_of(table: pl.DataFrame, key: str | list[str], on, *, given: bool, **options) -> ms.App:
    app = ms.App("looked-up", log="unused")
    fields = {"id": int, KEY: str | None, "n": float | None}
    rows = app.topic("rows", fields, partitions=3).stream()
    static = app.static_table(table, key=key, name="side")
    if not given:
        static = static.with_columns(extra=pl.lit(1)).drop("extra")  # a table in state
    looked_up = rows.lookup(static, on, name="look", **options)
    looked_up.view("out", key="id")
    return app


def is_given(app: ms.App) -> bool:
    plan = app.plan(Buckets(2))
    return not plan.stages and isinstance(plan.sources[0].edges[0].step, StaticLookup)


@settings(max_examples=some(10))
@given(
    st.lists(st.tuples(TEXTS, NUMBERS), max_size=12),
    st.lists(st.sampled_from(["", "x", "y"]), unique=True, max_size=3),
    st.lists(NUMBERS, min_size=3, max_size=3),
    st.sampled_from(["left", "inner"]),
    st.booleans(),
)
def test_each_row_gets_the_row_of_its_key(rows, keys, others, how, nulls_equal) -> None:
    table = pl.DataFrame(
        {KEY: keys, "m": others[: len(keys)], "said": [f"said {key}" for key in keys]},
        schema={KEY: pl.String, "m": pl.Float64, "said": pl.String},
    )
    values = [{"id": n, KEY: text, "n": number} for n, (text, number) in enumerate(rows)]
    for on in (KEY, {KEY: KEY, "n": "m"}):
        found = {}
        for is_step in (True, False):
            app = app_of(table, KEY, on, given=is_step, how=how, nulls_equal=nulls_equal)
            assert is_given(app) is is_step
            run = testing.run(app, {"rows": values}, batches=3, partitions=3, seed=1, crash=1)
            found[is_step] = run["out"]
            if is_step:
                ledger = run.ledger.filter(pl.col("step") == "look")
                assert ledger["read"].sum() == len(values)
        assert found[True].columns == found[False].columns
        assert found[True].equals(found[False])
        expected = {}
        for row in values:
            matching = [
                each
                for each in table.iter_rows(named=True)
                if each[KEY] == row[KEY]
                and (on == KEY or (each["m"] == row["n"] and (row["n"] is not None or nulls_equal)))
            ]
            if matching or how == "left":
                expected[row["id"]] = matching[0]["said"] if matching else None
        assert dict(found[True]["id", "said"].rows()) == expected


def test_rows_without_a_match_are_filtered_in_the_ledger() -> None:
    table = pl.DataFrame({KEY: ["x"], "said": ["yes"]})
    app = app_of(table, KEY, KEY, given=True, how="inner")
    rows = [{"id": n, KEY: text, "n": None} for n, text in enumerate(["x", "y", None, "x"])]
    run = testing.run(app, {"rows": rows}, batches=2, partitions=2, seed=0)
    counts = run.ledger.filter(pl.col("step") == "look").sum()
    assert counts["read", "emitted", "filtered"].row(0) == (4, 2, 2)


def test_floats_find_their_equals_and_one_of_two_zeros() -> None:
    table = pl.DataFrame({"k": [0.0, math.nan], "said": ["zero", "nan"]})
    app = app_of(table, "k", {"n": "k"}, given=True)
    numbers = [-0.0, 0.0, math.nan, 1.0]
    rows = [{"id": n, KEY: "", "n": number} for n, number in enumerate(numbers)]
    found = testing.run(app, {"rows": rows[:2] + rows[3:]}, partitions=1)["out"]
    assert found["said"].to_list() == ["zero", "zero", None]
    step = app.plan(Buckets(2)).sources[0].edges[0].step
    made = step.apply(pl.DataFrame({"id": [0, 1], "n": [math.nan, -0.0]})).table
    assert made["said"].to_list() == ["nan", "zero"]
    both = pl.DataFrame({"k": [0.0, -0.0], "said": ["plus", "minus"]})
    try:
        step = app_of(both, "k", {"n": "k"}, given=True).plan(Buckets(2)).sources[0].edges[0].step
    except ms.ConfigError as refused:
        assert "two rows with the key" in str(refused)
    else:
        assert step.apply(pl.DataFrame({"n": [0.0, 1.0]})).table.height == 2


def test_a_look_up_reads_only_the_columns_that_are_wanted() -> None:
    table = pl.DataFrame({KEY: ["x"], "said": ["yes"]})
    app = ms.App("looked-up", log="unused")
    rows = app.topic("rows", {"id": int, KEY: str, "n": float}, partitions=3).stream()
    looked_up = rows.lookup(app.static_table(table, key=KEY), KEY)
    looked_up.select("id", "said").view("out", key="id")
    (source,) = app.plan(Buckets(2)).sources
    assert {field.name for field in source.fields} == {"id", KEY}
