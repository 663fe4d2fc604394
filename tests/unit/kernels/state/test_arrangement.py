"""Arrangements against a Counter: what was added and not taken back, by the hash of its key."""

import json
from collections import Counter

import numpy as np
import polars as pl
import pytest
from example_counts import some
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.errors import CorruptionError
from millstream.kernels.frames import HASH, WEIGHT
from millstream.kernels.state import keyhash
from millstream.kernels.state.arrangement import Arrangement
from millstream.kernels.state.operator_state import OperatorState
from millstream.kernels.state.sorted_runs import MemoryRunStore

SCHEMA = {"k": pl.String, "v": pl.Int64, WEIGHT: pl.Int64}
KEYS = ["a", "b", "c", "d", None]


def hashed(rows):
    table = pl.DataFrame(rows, schema=SCHEMA, orient="row")
    return table.hstack([pl.Series(HASH, keyhash.hash_columns(table, ("k",)))])


class Arranged:
    """An arrangement that is written and read between batches, beside the Counter that it is to equal."""

    def __init__(self):
        self.store, self.message, self.held = MemoryRunStore(), None, Counter()

    def opened(self):
        state = OperatorState.from_message(self.message, self.store)
        return state, Arrangement(state, "rows")

    def add(self, rows):
        state, kept = self.opened()
        kept.add(hashed(rows))
        self.message = json.loads(json.dumps(state.to_message()))
        for key, value, weight in rows:
            self.held[key, value] += weight

    def found(self, keys):
        wanted = hashed([(key, 0, 1) for key in keys])[HASH].to_numpy()
        _, kept = self.opened()
        return counted(kept.look_up(wanted), keys)

    def meant(self, keys):
        return Counter({row: n for row, n in self.held.items() if n and row[0] in keys})


def counted(table, keys):
    """Count rows; those of other keys come along where hashes are equal."""
    found = Counter()
    for row in table.iter_rows(named=True) if table is not None else ():
        assert row[WEIGHT] > 0
        if row["k"] in keys:
            found[row["k"], row["v"]] += row[WEIGHT]
    return found


kinds = st.sampled_from(["add", "add", "take", "both", "twice"])
operations = st.lists(
    st.tuples(kinds, st.sampled_from(KEYS), st.integers(0, 2), st.integers(0, 99)), max_size=8
)


def rows_of(batch, held):
    """Return changes that take back only what is there, before the batch or in it."""
    rows, there = [], Counter(held)
    for kind, key, value, number in batch:
        known = sorted((+there).elements(), key=repr)
        if kind == "take" and known:
            row = known[number % len(known)]
            there[row] -= 1
            rows.append((*row, -1))
        elif kind == "both":
            rows += [(key, value, -1), (key, value, 1)]
        else:
            weight = 2 if kind == "twice" else 1
            there[key, value] += weight
            rows.append((key, value, weight))
    return rows


@settings(max_examples=some(150))
@given(st.lists(operations, max_size=8), st.sets(st.sampled_from(KEYS)))
def test_what_is_found_is_what_was_added_and_not_taken_back(batches, keys):
    arranged = Arranged()
    for batch in batches:
        arranged.add(rows_of(batch, arranged.held))
        assert arranged.found(keys) == arranged.meant(keys)
        assert arranged.found(KEYS) == arranged.meant(KEYS)
        _, kept = arranged.opened()
        assert counted(kept.scan(), KEYS) == arranged.meant(KEYS)
        assert kept.runs.events == sum(arranged.held.values())


def test_what_was_taken_back_leaves_the_state():
    arranged = Arranged()
    rows = [(str(n), n, 1) for n in range(300)]
    arranged.add(rows)
    arranged.add([(key, value, -weight) for key, value, weight in rows])
    _, kept = arranged.opened()
    assert kept.runs.rows == 0
    assert kept.scan() is None or kept.scan().height == 0
    assert arranged.found([str(n) for n in range(300)]) == {}


def test_the_state_grows_with_the_table_and_not_with_its_changes():
    arranged = Arranged()
    arranged.add([(str(n), 0, 1) for n in range(50)])
    for version in range(200):
        key = str(version % 50)
        old = version // 50
        arranged.add([(key, old, -1), (key, old + 1, 1)])
    _, kept = arranged.opened()
    assert kept.runs.rows < 5 * 50
    assert counted(kept.scan(), [str(n) for n in range(50)]).total() == 50


@pytest.mark.parametrize("how", ["look-up", "fold"])
def test_a_row_that_is_owed_is_told(how):
    arranged = Arranged()
    arranged.add([("a", 1, 1)])
    if how == "fold":
        with pytest.raises(CorruptionError, match="that is not in it"):
            arranged.add([("a", 2, -1), ("b", 3, 1)])
        return
    arranged.add([(str(n), n, 1) for n in range(50)])
    arranged.add([("a", 2, -1)])
    with pytest.raises(CorruptionError, match="that is not in it"):
        arranged.found(["a"])


def test_nothing_is_read_where_nothing_is():
    _, kept = Arranged().opened()
    assert kept.look_up(np.array([1], np.uint64)) is None
    assert kept.look_up(np.array([], np.uint64)) is None
    assert kept.scan() is None
    kept.add(hashed([]))
    assert kept.runs.rows == 0
