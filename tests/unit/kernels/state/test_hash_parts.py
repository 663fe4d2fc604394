"""State that is read in parts: together they are all rows, and the rows of one hash are in one part."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import polars as pl
from hypothesis import given
from hypothesis import strategies as st

from millstream.kernels.frames import HASH, WEIGHT
from millstream.kernels.state.arrangement import Arrangement
from millstream.kernels.state.keyed_rows import KeyedRows
from millstream.kernels.state.operator_state import OperatorState
from millstream.kernels.state.sorted_runs import MemoryRunStore

HASHES = st.sampled_from([0, 1, 7, 8, 1 << 63, (1 << 64) - 1, *range(100, 130)])
ROWS = st.lists(st.tuples(HASHES, st.integers(0, 3)), max_size=40)


def hashes_of(parts):
    return [{*part[HASH].to_list()} for part in parts]


def assert_in_ranges(parts):
    """No hash is in two parts, and parts come by rising hashes."""
    seen = hashes_of(parts)
    assert all(max(one) < min(other) for one, other in pairwise(seen))


@given(batches=st.lists(ROWS, max_size=6), rows_max=st.integers(1, 50))
def test_of_replaced_rows_the_parts_have_the_newest(batches, rows_max):
    kept = KeyedRows(OperatorState(MemoryRunStore()), "rows")
    expected = {}
    for batch in batches:
        if not batch:
            continue
        touched = np.unique(np.array([one for one, _ in batch], np.uint64))
        stored = [(one, value) for one, value in batch if value]  # a hash with 0 alone goes
        for one in touched.tolist():
            expected[one] = sorted(value for other, value in stored if other == one)
        schema = {HASH: pl.UInt64, "value": pl.Int64}
        kept.put(touched, pl.DataFrame(stored, schema=schema, orient="row"))
    parts = [*kept.parts(rows_max)]
    assert_in_ranges(parts)
    found = {}
    for one, value in (row for part in parts for row in part[[HASH, "value"]].iter_rows()):
        found.setdefault(one, []).append(value)
    assert {one: sorted(values) for one, values in found.items()} == {
        one: values for one, values in expected.items() if values
    }


@given(batches=st.lists(ROWS, max_size=6), rows_max=st.integers(1, 50))
def test_of_signed_changes_the_parts_have_what_they_come_to(batches, rows_max):
    kept = Arrangement(OperatorState(MemoryRunStore()), "rows")
    weights = {}
    for number, batch in enumerate(batches):
        changes = []
        for row in batch:
            there = weights.get(row, 0)
            weight = -there if there and number % 2 else 1
            weights[row] = there + weight
            changes.append((*row, weight))
        schema = {HASH: pl.UInt64, "value": pl.Int64, WEIGHT: pl.Int64}
        kept.add(pl.DataFrame(changes, schema=schema, orient="row"))
    parts = [*kept.parts(rows_max)]
    assert_in_ranges(parts)
    found = {}
    for one, value, weight in (row for part in parts for row in part.iter_rows()):
        found[one, value] = found.get((one, value), 0) + weight
    assert found == {row: weight for row, weight in weights.items() if weight}


@given(count=st.integers(1, 500), rows_max=st.integers(1, 100))
def test_a_part_has_about_as_many_rows_as_it_may(count, rows_max):
    kept = KeyedRows(OperatorState(MemoryRunStore()), "rows")
    hashes = np.sort(np.random.default_rng(count).integers(0, 2**63, count)).astype(np.uint64)
    hashes = np.unique(hashes)
    kept.put(hashes, pl.DataFrame({HASH: hashes, "value": np.arange(len(hashes))}))
    sizes = [part.height for part in kept.parts(rows_max)]
    assert sum(sizes) == len(hashes)
    assert max(sizes) <= 2 * rows_max + 1
