"""Numbers of different values, counted by sets that batches add to, against Python's own sets."""

import json
import math
from collections import defaultdict
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import numpy as np
import polars as pl
import pytest
from bag_model import RUNS, bags, last_batch
from example_counts import some
from hypothesis import given, settings
from hypothesis import strategies as st

import millstream as ms
from millstream import testing
from millstream.kernels.frames import HASH
from millstream.kernels.state.operator_state import OperatorState
from millstream.kernels.state.sorted_runs import MemoryRunStore
from millstream.kernels.tables import group_sets
from millstream.kernels.tables.group_sets import new_ids
from millstream.kernels.tables.group_times import GROUP

START = datetime(2026, 1, 1, tzinfo=UTC)
V = pl.col("v")
# By the side of the values themselves: what is a condition's, another type's, what is not a number, zeros of
# both signs, numbers below zero and above 2^40, and none at all.
COUNTED = {
    "all": V,
    "low": pl.when(V < 3).then(V),
    "high": pl.when(V >= 3).then(V),
    "large": pl.when(V < 4).then(V * 2**41 - 2**41),
    "float": pl.when(V == 0).then(-0.0).when(V == 1).then(0.0).when(V == 2).then(math.nan),
    "text": pl.col("g") + V.cast(pl.String),
    "day": pl.col("at").dt.date(),
    "none": pl.lit(None, pl.Int64) + V,
    "small": V.cast(pl.Int8),
    "true": V > 2,
}


@dataclass
class Event:
    at: datetime
    g: str | None
    v: int | None


def stream_of(app):
    return app.topic("events", Event, key="g").stream(time="at")


def events(values):
    return [Event(START + timedelta(hours=7 * n), g, v) for n, (g, v) in enumerate(values)]


def values_of(event):
    """Return what each of the expressions gives for an event."""
    v, g = event.v, event.g
    return {
        "all": v,
        "low": v if v is not None and v < 3 else None,
        "high": v if v is not None and v >= 3 else None,
        "large": None if v is None or v >= 4 else (v - 1) * 2**41,
        "float": {0: 0.0, 1: 0.0, 2: "NaN"}.get(v),
        "text": None if v is None or g is None else g + str(v),
        "day": event.at.date(),
        "none": None,
        "small": v,
        "true": None if v is None else v > 2,
    }


@settings(max_examples=some(20))
@given(
    values=st.lists(
        st.tuples(st.sampled_from(["a", "b", None]), st.sampled_from([None, *range(6)])),
        max_size=40,
    ),
    run=RUNS,
)
def test_after_each_batch_the_numbers_are_those_of_all_rows_that_came(rows_given, values, run):
    app = new_app()
    stream = stream_of(app)
    stream.select("g", "v", "at").to("rows")
    counted = {name: ms.distinct(value) for name, value in COUNTED.items()}
    counted |= {"n": ms.count(), "set": ms.set("v"), "most": ms.max("v")}
    stream.group_by("g").agg(**counted).to("groups")
    out = rows_given(app, {"events": events(values)}, **run)
    count = last_batch(out)
    came = bags(out.rows["to(rows)"], ["g", "v", "at"], count)
    groups = bags(out.rows["to(groups)"], ["g", *counted], count)
    for there, found in zip(came, groups, strict=True):
        expected = defaultdict(list)
        for (g, v, at), _ in there.elements():
            expected[g].append(Event(datetime.fromisoformat(str(at)), g, v))
        assert found.total() == len(expected)
        assert {row for row, _ in found} == {(g, *sql(own)) for g, own in expected.items()}


def sql(own):
    """Return what SQL says of a group's events: COUNT(DISTINCT …), COUNT(*), the set, MAX."""
    sets = defaultdict(set)
    for event in own:
        for name, value in values_of(event).items():
            sets[name] |= set() if value is None else {value}
    numbers = [len(sets[name]) for name in COUNTED]
    return *numbers, len(own), tuple(sorted(sets["all"])), max(sets["all"], default=None)


def new_app():
    return ms.App("sets", log="unused", buckets=2)


def test_the_views_of_sets_do_not_depend_on_batches_partitions_or_crashes():
    app = new_app()
    counted = {name: ms.distinct(value) for name, value in COUNTED.items()}
    stream = stream_of(app)
    stream.group_by("g").agg(**counted).view("groups")
    stream.group_by("v").agg(days=ms.distinct("at"), groups=ms.distinct("g")).view("values")
    values = [("ab"[n % 2], n * n % 6) for n in range(50)]
    out = testing.replay(app, {"events": events(values)}, batchings=4, crash=2)
    assert out["groups"].height == 2


def rows_and_bytes(engine):
    """Return the rows and bytes in state, by family."""
    found = defaultdict(lambda: [0, 0])
    for state in engine.states.values():
        for operator in json.loads(state.manifest()).values():
            for family, runs in operator["runs"].items():
                for entry in runs:
                    found[family][0] += entry[2]
                    found[family][1] += entry[3]
    return found


@pytest.mark.not_in_lane("thresholds", "two sets share a row there, not four")
def test_the_row_of_a_group_has_no_values_and_values_that_several_sets_have_are_one_row(rows_given):
    app = new_app()
    levels = {f"low{n}": ms.distinct(pl.when(n > V).then(V)) for n in (100, 300, 600)}
    stream_of(app).group_by("g").agg(all=ms.distinct("v"), **levels).to("groups")
    rows = events([("a", n % 500) for n in range(3_000)])
    out = rows_given(app, {"events": rows}, batches=30)
    held = rows_and_bytes(out.engine)
    assert held["groups"][1] < 500
    assert sum(rows for family, (rows, _) in held.items() if family.startswith("sets")) == 500
    last = out.rows["to(groups)"].filter(pl.col("__diff") == 1).row(-1, named=True)
    assert [last[name] for name in ("all", *levels)] == [500, 100, 300, 500]


def test_new_groups_that_share_a_hash_get_their_numbers_by_all_their_keys_however_they_came():
    lists = [[2], [1], [], None, [1, 2]]
    structs = [{"a": 1}, {"a": None}, {"a": 3}, {"a": 2}, {"a": 1}]
    groups = pl.DataFrame({"k": ["x"] * 5, "l": lists, "s": structs}).with_columns(
        pl.lit(7, pl.UInt64).alias(HASH)
    )
    numbered = []
    for places in ([0, 1, 2, 3, 4], [4, 2, 0, 3, 1]):
        came = groups[places]
        ids = new_ids(OperatorState(MemoryRunStore()), came, ("k", "l", "s"))
        numbered.append(dict(zip(places, ids, strict=True)))
    assert numbered[0] == numbered[1]


def test_values_that_share_a_hash_are_written_in_one_order_however_they_came(monkeypatch):
    monkeypatch.setattr(
        group_sets, "hash_columns", lambda rows, *_: np.zeros(rows.height, np.uint64)
    )
    values = [f"{n}" for n in range(200)]
    written = []
    for sets in ([values[:150], values[100:]], [values[100:], values[:150]]):
        fresh = pl.DataFrame({GROUP: [0, 0], "n.set": sets})
        written.append(group_sets._values_by_group(fresh, ["n"], np.array([3]), 0))
    assert written[0].equals(written[1])
