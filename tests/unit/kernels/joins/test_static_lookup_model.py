"""Look-ups in rows that the program gives, compared with a dictionary."""

from __future__ import annotations

import math
from typing import Any

import polars as pl
import pytest
from example_counts import some
from hypothesis import given, settings
from hypothesis import strategies as st

import millstream as ms
from millstream import testing
from millstream.kernels.static_lookup import StaticLookup
from millstream.pipeline.graph import StepNode

_FLOATS = st.sampled_from([0.0, -0.0, 1.5, math.nan, math.inf])
_WORDS = st.sampled_from(["", "a", "b", "^a.*$"])
_NUMBERS = st.sampled_from([0, 1, -(2**63), 2**63 - 1])
_KEYS: dict[str, tuple[st.SearchStrategy[Any], Any]] = {
    "floats": (_FLOATS, float),
    "words": (_WORDS, str),
    "numbers": (_NUMBERS, int),
}


def plain(key: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return a key as the dictionary has it: NaN is equal to NaN, and Python's 0.0 to -0.0."""
    return tuple("NaN" if isinstance(part, float) and math.isnan(part) else part for part in key)


@pytest.mark.parametrize("how", ["left", "inner"])
@pytest.mark.parametrize("nulls_equal", [False, True])
@pytest.mark.parametrize("kinds", [["floats"], ["words"], ["numbers"], ["floats", "words"]])
@settings(max_examples=some(12))
@given(data=st.data())
def test_a_row_finds_the_row_with_its_key(
    kinds: list[str], nulls_equal: bool, how: str, data: st.DataObject
) -> None:
    key = st.tuples(*(_KEYS[kind][0] for kind in kinds))
    known = data.draw(st.lists(key, unique_by=plain, max_size=5))
    left = data.draw(
        st.lists(st.tuples(*(st.none() | _KEYS[kind][0] for kind in kinds)), max_size=12)
    )
    names = [f"k{number}" for number in range(len(kinds))]
    types = {name: _KEYS[kind][1] for name, kind in zip(names, kinds, strict=True)}
    table = pl.DataFrame(
        [(*one, number) for number, one in enumerate(known)],
        schema={**types, "^w$": int},
        orient="row",
    )
    app = ms.App("given", log="unused")
    schema = {"v": int, **{name: kind | None for name, kind in types.items()}}
    events = app.topic("events", schema, key="v").stream()
    found = events.lookup(
        app.static_table(table, key=names), names, how=how, nulls_equal=nulls_equal
    )
    assert isinstance(found.node, StepNode)
    assert isinstance(found.node.step, StaticLookup)
    rows = pl.DataFrame(
        [(number, *one) for number, one in enumerate(left)],
        schema={"v": int, **types},
        orient="row",
    )
    result = found.node.step.apply(rows).table

    places = {plain(one): number for number, one in enumerate(known)}
    expected = [(number, places.get(plain(one))) for number, one in enumerate(left)]
    if how == "inner":
        expected = [row for row in expected if row[1] is not None]
    assert result[["v", "^w$"]].rows() == expected


def test_rows_are_counted_and_the_rest_of_the_pipeline_goes_on() -> None:
    app = ms.App("given", log="unused")
    cities = app.static_table(pl.DataFrame({"city": ["x"], "country": ["X"]}), key="city")
    events = app.topic("events", {"v": int, "city": str | None}, key="v").stream()
    events.lookup(cities, "city", how="inner").view("known", key="v")
    rows = [{"v": 0, "city": "x"}, {"v": 1, "city": "y"}, {"v": 2, "city": None}]
    for seed in range(5):
        out = testing.run(app, {"events": rows}, batches=2, partitions=3, seed=seed, crash=1)
        assert out["known"]["v", "country"].rows() == [(0, "X")]
        counted = out.ledger.filter(pl.col("step") == "look-up by city")
        assert counted.select(pl.sum("read", "emitted", "filtered")).row(0) == (3, 1, 2)


def test_other_rows_do_not_change_what_a_window_below_is_defined_by() -> None:
    def program(country: str) -> Any:
        app = ms.App("given", log="unused")
        cities = app.static_table(pl.DataFrame({"city": ["x"], "country": [country]}), key="city")
        events = app.topic("events", {"city": str}).stream()
        looked_up = events.lookup(cities, "city")
        looked_up.window(ms.tumbling("1 hour"), by="country").agg(n=ms.count()).view("n")
        return app.plan().program

    one, other = program("X"), program("Y")
    assert one.steps == other.steps
    assert one.outputs == other.outputs
    assert one.given != other.given
