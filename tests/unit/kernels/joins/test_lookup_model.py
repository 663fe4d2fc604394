"""The look-up, batch by batch, against a plain dictionary: each row sees what the table had when it arrived.

Of versions the one that counts is, of those that have arrived by then, that with the greatest offset or the latest
time. Of a derived table, whose rows come as signed changes, it is what there is after the batch's changes.
"""

from __future__ import annotations

import math

import polars as pl
import pytest
from example_counts import some
from hypothesis import given, settings
from hypothesis import strategies as st
from table_model import KernelRun, plain

import millstream as ms
from millstream.kernels.frames import ARRIVED, DELETED, DIFF, ORDER, TIME

NAN = math.nan
keys = st.sampled_from([None, 0.0, -0.0, NAN, 1.0, 2.0])
there = st.sampled_from([0.0, -0.0, NAN, 1.0, 2.0])  # a table of a topic has no null among its keys
moments = st.integers(0, 6)
rows = st.lists(st.tuples(keys, moments), max_size=6)
versions = st.lists(st.tuples(there, moments, moments, st.booleans()), max_size=6)
ROWS = {"k": pl.Float64, "n": pl.Int64, TIME: pl.Int64, ARRIVED: pl.Int64, ORDER: pl.Int64}
VERSIONS = {**ROWS, "n": pl.String, DELETED: pl.Boolean}
CHANGES = {"k": pl.Float64, "n": pl.String, TIME: pl.Int64, DIFF: pl.Int8}


def kernel_of(how, order, *, signed=False, nulls_equal=False):
    app = ms.App("looked-up", log="unused")
    stream = app.topic("rows", {"k": float | None, "n": int}).stream()
    table = app.table("table", {"k": float, "n": str}, key="k", order=order)
    if signed:
        table = table.group_by("k").agg(n=ms.max("n"))
    kernel = stream.lookup(table, "k", how=how, nulls_equal=nulls_equal).node.kernel
    assert kernel.signed == signed
    return kernel


class Lookups:
    """One look-up, and what each of its rows is to see."""

    def __init__(self, kernel, buckets):
        self.run, self.kernel = KernelRun(kernel, buckets=buckets, seed=buckets), kernel
        self.numbers, self.held, self.offset = 0, {}, 0

    def rows(self, drawn):
        """Return a frame of rows, and the same as tuples of number, key and arrival."""
        made = []
        for key, arrived in drawn:
            made.append((self.numbers, key, arrived))
            self.numbers += 1
        frame = [(key, number, 0, arrived, number) for number, key, arrived in made]
        return pl.DataFrame(frame, schema=ROWS, orient="row"), made

    def check(self, frames, given_rows, seen):
        """Give the batch to the operator; make sure that each row comes out once, with what it is to see."""
        out = self.run.batch({n: [f] for n, f in enumerate(frames) if f.height})
        found = [] if out is None else sorted(out.select("n", "n_right").rows())
        meant = [(number, seen(key, arrived)) for number, key, arrived in given_rows]
        if self.kernel.how == "inner":
            meant = [pair for pair in meant if pair[1] is not None]
        assert found == sorted(meant)


@pytest.mark.parametrize("order", ["offset", "time"])
@settings(max_examples=some(60))
@given(
    st.lists(st.tuples(rows, versions), min_size=1, max_size=4),
    st.sampled_from(["left", "inner"]),
    st.sampled_from([1, 3]),
)
def test_each_row_sees_the_version_that_counted_when_it_arrived(order, history, how, buckets):
    looked_up = Lookups(kernel_of(how, order), buckets)
    for drawn_rows, drawn in history:
        left, given_rows = looked_up.rows(drawn_rows)
        right, came, clocks = [], [], {}
        for key, arrived, time, deleted in drawn:
            number = looked_up.offset
            looked_up.offset += 1
            right.append((key, str(number), time, arrived, number, deleted))
            clock = arrived
            if order == "offset":  # what is later in the log has not arrived before what is earlier
                clock = clocks[plain(key)] = max(arrived, clocks.get(plain(key), arrived))
            rank = (number,) if order == "offset" else (time, number)
            came.append((plain(key), clock, rank, None if deleted else str(number)))

        def seen(key, arrived, came=came):
            known = [
                (rank, value) for k, at, rank, value in came if k == plain(key) and at <= arrived
            ]
            known += [looked_up.held[plain(key)]] if plain(key) in looked_up.held else []
            return max(known, default=(None, None))[1]

        frame = pl.DataFrame(right, schema=VERSIONS, orient="row")
        looked_up.check((left, frame), given_rows, seen)
        for key, _, rank, value in came:
            held = looked_up.held.get(key)
            if held is None or rank > held[0]:
                looked_up.held[key] = rank, value
    looked_up.run.check_counts()


changes = st.lists(st.tuples(keys, st.sampled_from(["put", "put", "delete", "both"])), max_size=6)


@settings(max_examples=some(60))
@given(
    st.lists(st.tuples(rows, changes), min_size=1, max_size=4),
    st.sampled_from(["left", "inner"]),
    st.booleans(),
    st.sampled_from([1, 3]),
)
def test_of_a_derived_table_each_row_sees_what_there_is_after_the_changes_of_its_batch(
    history, how, nulls_equal, buckets
):
    looked_up = Lookups(kernel_of(how, "offset", signed=True, nulls_equal=nulls_equal), buckets)
    held, value = {}, 0
    for drawn_rows, drawn in history:
        left, given_rows = looked_up.rows(drawn_rows)
        made = []
        for key, kind in drawn:
            old = held.pop(plain(key), None)
            if old is not None:
                made.append((*old, -1))
            value += 1
            new = (key, str(value), value)
            if kind != "delete":
                made.append((*new, 1))
            if kind == "both":
                made.append((*new, -1))
            elif kind == "put":
                held[plain(key)] = new

        def seen(key, _arrived):
            if key is None and not nulls_equal:
                return None
            return held.get(plain(key), (None, None))[1]

        looked_up.check((left, pl.DataFrame(made, schema=CHANGES, orient="row")), given_rows, seen)
    looked_up.run.check_counts()


def test_a_batch_that_is_repeated_gives_the_same_bytes():
    for signed in (False, True):
        kernel = kernel_of("left", "offset", signed=signed)
        run, found = KernelRun(kernel), []
        table = pl.DataFrame(
            [(float(n), str(n), 0, n, n, False) for n in range(40)], schema=VERSIONS, orient="row"
        )
        run.batch({1: [table.select(CHANGES.keys() - {DIFF}) if signed else table]})
        rows = pl.DataFrame([(n % 50, n, 0, n, n) for n in range(99)], schema=ROWS, orient="row")
        before = dict(run.manifests)
        for _ in range(2):
            run.manifests = dict(before)
            found.append(run.batch({0: [rows]}))
        assert found[0].equals(found[1])
