"""Signed changes, against a Counter: sums of equal rows, and what is no change."""

import math
import random

import numpy as np
import polars as pl
import pytest
from example_counts import some
from hypothesis import given, settings
from hypothesis import strategies as st
from table_model import bag, plain

from millstream.kernels.changes import (
    concat_present,
    consolidate,
    group_numbers,
    total_weight,
    with_diff,
    with_weight,
)
from millstream.kernels.frames import DIFF, HASH, TIME, WEIGHT
from millstream.kernels.state.keyhash import hash_columns

NAN = math.nan
SCHEMA = {"^k.*$": pl.Float64, "l": pl.List(pl.Float64), TIME: pl.Int64, WEIGHT: pl.Int64}
weights = st.sampled_from([1, 1, -1, 2, -3, 0])
rows = st.lists(
    st.tuples(
        st.sampled_from([None, 0.0, -0.0, NAN, 1.0]),
        st.sampled_from([None, [], [NAN], [0.0], [-0.0]]),
        st.integers(0, 1),
        weights,
    ),
    max_size=14,
)


def changes(drawn, *, one_hash=False):
    """Return rows with a hash, which is that of the key, and for some lists one for all keys."""
    table = pl.DataFrame(drawn, schema=SCHEMA, orient="row")
    hashes = hash_columns(table, ("^k.*$",))
    if one_hash:
        hashes = np.zeros_like(hashes)
    return table.hstack([pl.Series(HASH, hashes)])


def summed(table):
    """Return the weight of each row, without those that come to nothing."""
    sums = {}
    for *row, weight in table[[*SCHEMA]].iter_rows():
        key = tuple(plain(value) for value in row)
        sums[key] = sums.get(key, 0) + weight
    return {key: weight for key, weight in sums.items() if weight}


@settings(max_examples=some(200))
@given(rows, st.booleans(), st.sampled_from([["^k.*$"], ["^k.*$", TIME], ["l", TIME]]))
def test_groups_are_numbered_by_their_first_rows(drawn, one_hash, columns):
    table = changes(drawn, one_hash=one_hash)
    known = {}
    keys = [tuple(plain(value) for value in row) for row in table[columns].iter_rows()]
    meant = [known.setdefault(key, len(known)) for key in keys]
    assert group_numbers(table, columns).tolist() == meant
    if "^k.*$" in columns:  # equal keys have equal hashes
        assert group_numbers(table, [HASH, *columns]).tolist() == meant


@settings(max_examples=some(200))
@given(rows, st.booleans())
def test_equal_rows_are_added_up(drawn, one_hash):
    table = changes(drawn, one_hash=one_hash)
    made = consolidate(table)
    assert made.schema == table.schema
    assert summed(made) == summed(table)
    if any(weight < 0 for *_, weight in drawn):
        touched = {key for key, *_, weight in drawn if weight < 0}
        of_touched = [row for row in made.iter_rows() if row[0] in touched]
        keys = [tuple(plain(value) for value in row[:3]) for row in of_touched]
        assert len(keys) == len(set(keys))
        assert all(row[3] for row in of_touched)


def test_rows_that_were_only_added_stay_as_they_are():
    table = changes([(1.0, None, 0, 1)] * 3)
    assert consolidate(table) is table


@settings(max_examples=some(50))
@given(rows)
def test_the_order_of_rows_is_kept_so_a_repeated_batch_gives_the_same(drawn):
    table = changes(drawn).with_columns(pl.Series("l", range(len(drawn)), dtype=pl.Int64))
    made = consolidate(table)  # no two rows are equal
    assert made["l"].is_sorted()
    assert consolidate(table).equals(made, null_equal=True)


def test_what_is_taken_back_in_the_order_it_came_leaves_nothing():
    dice = random.Random(5)
    there = [(float(dice.randrange(9)), [NAN], 0, 1) for _ in range(500)]
    gone = [(key, row, time, -1) for key, row, time, _ in dice.sample(there, 500)]
    assert consolidate(changes(there + gone)).height == 0


@settings(max_examples=some(100))
@given(rows)
def test_weights_and_signs_say_the_same(drawn):
    table = changes(drawn)
    signed = with_diff(table)
    assert signed.schema[DIFF] == pl.Int8
    assert signed.height == sum(abs(weight) for *_, weight in drawn)
    assert summed(with_weight(signed)) == summed(table)
    assert total_weight(with_weight(signed)) == total_weight(table) == sum(w for *_, w in drawn)


def test_rows_without_a_sign_were_all_added():
    table = pl.DataFrame({"k": [1, 1]})
    assert with_weight(table).rows() == [(1, 1), (1, 1)]
    assert total_weight(None) == 0


def test_tables_without_rows_are_left_out():
    table, none = pl.DataFrame({"k": [1]}), pl.DataFrame({"other": [1]}).clear()
    assert concat_present([None, none]) is None
    assert concat_present([None, table, none]) is table
    both = concat_present([table, none, table])
    assert both is not None
    assert bag(both.rows()) == {(1,): 2}


@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_both_zeros_are_one_row(zero):
    table = changes([(zero, None, 0, 1), (-zero, None, 0, -1)])
    assert consolidate(table).height == 0
