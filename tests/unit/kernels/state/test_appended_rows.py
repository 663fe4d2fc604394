"""Rows that are only added against a list: what was added, by the hash of its key, in the order of arrival."""

import json

import numpy as np
import polars as pl
import pytest
from example_counts import some
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.errors import CorruptionError
from millstream.kernels.frames import HASH, WEIGHT
from millstream.kernels.state import appended_rows, keyhash
from millstream.kernels.state.appended_rows import AppendedRows
from millstream.kernels.state.operator_state import OperatorState
from millstream.kernels.state.sorted_runs import MemoryRunStore

SCHEMA = {"__key0": pl.String, "^k.*$": pl.String, "v": pl.Int64, "n": pl.List(pl.Int64)}
KEYS = ["a", "b", "c", "d", None]


def hashed(rows):
    """Return rows of a key and a number; the key is there twice."""
    made = [(key, key, value, [value] * (value % 3)) for key, value in rows]
    table = pl.DataFrame(made, schema=SCHEMA, orient="row")
    weights = pl.repeat(1, table.height, dtype=pl.Int64, eager=True).alias(WEIGHT)
    hashes = pl.Series(HASH, keyhash.hash_columns(table, ("__key0",)))
    return table.hstack([weights, hashes])


class Kept:
    """Rows that are written and read between batches, beside the list that they are to equal."""

    def __init__(self):
        self.store, self.message, self.held = MemoryRunStore(), None, []

    def opened(self):
        state = OperatorState.from_message(self.message, self.store)
        return state, AppendedRows(state, "rows", {"__key0": "^k.*$"})

    def add(self, rows):
        state, kept = self.opened()
        kept.add(hashed(rows))
        self.message = json.loads(json.dumps(state.to_message()))
        self.held += rows

    def check(self, keys):
        wanted = hashed([(key, 0) for key in keys])[HASH].to_numpy()
        found = self.opened()[1].look_up(wanted)
        own = [] if found is None else found.filter(found["__key0"].is_in(keys, nulls_equal=True))
        meant = [row for row in self.held if row[0] in keys]
        if not meant:
            assert not len(own)
            return
        columns = hashed([]).columns
        assert own[columns].equals(hashed(meant)[columns])

    @property
    def chunks(self):
        slots = self.opened()[1].chunks.slots
        return [chunk for place in sorted(slots) for chunk in slots[place]]


batches = st.lists(
    st.lists(st.tuples(st.sampled_from(KEYS), st.integers(0, 9)), max_size=6), max_size=20
)


@settings(max_examples=some(80))
@given(batches, st.sets(st.sampled_from(KEYS)))
def test_the_rows_of_keys_are_found_in_the_order_in_which_they_came(batches, keys):
    kept = Kept()
    for batch in batches:
        kept.add(batch)
        kept.check(sorted(keys, key=repr))
    kept.check(KEYS)
    assert len(kept.store.tables) == len(kept.chunks) + len(kept.opened()[1].runs.slots.get(0, []))


def test_small_chunks_become_one_and_large_ones_are_not_written_again(monkeypatch):
    kept = Kept()
    monkeypatch.setattr(appended_rows, "_FAN_IN", 8)
    for number in range(200):
        kept.add([(str(number), number)])
    # Of two levels at most seven each, and some at the third.
    assert len(kept.chunks) <= 7 + 7 + 3
    kept.check([str(number) for number in range(0, 200, 7)])
    monkeypatch.setattr(appended_rows, "_CHUNK_BYTES", 1)
    before = kept.chunks
    for number in range(50):
        kept.add([(str(number), number)])
    assert kept.chunks[: len(before)] == before
    assert len(kept.chunks) == len(before) + 50
    kept.check([str(number) for number in range(0, 200, 7)])


def test_a_chunk_is_no_larger_than_is_said_and_small_ones_give_one_of_at_least_half_of_that(
    monkeypatch,
):
    monkeypatch.setattr(appended_rows, "_CHUNK_BYTES", 20_000)
    monkeypatch.setattr(appended_rows, "_FAN_IN", 8)
    kept = Kept()
    for number in range(300):
        kept.add([(str(row), row) for row in range(number % 13)])
    sizes = [chunk.size_bytes for chunk in kept.chunks]
    assert max(sizes) <= 20_000
    assert sum(size < 10_000 for size in sizes) < 20
    kept.check([str(row) for row in range(0, 13, 5)])


def test_the_same_rows_give_the_same_state():
    states = []
    for _ in range(2):
        kept = Kept()
        for number in range(30):
            kept.add([(str(row % 5), row) for row in range(number)])
        states.append((kept.message, [table.to_pylist() for table in kept.store.tables.values()]))
    assert states[0] == states[1]


def test_what_is_stored_of_a_row_besides_its_columns_are_sixteen_bytes():
    kept = Kept()
    kept.add([(str(row), row) for row in range(1000)])
    index = kept.opened()[1].runs.slots[0]
    assert sum(part.size_bytes for part in index) == 16 * 1000
    (chunk,) = kept.chunks
    assert set(kept.store.tables[chunk.name].column_names) == {"^k.*$", "v", "n"}


def test_a_row_that_is_taken_back_is_told():
    kept = Kept()
    kept.add([("a", 1)])
    _, opened = kept.opened()
    with pytest.raises(CorruptionError, match="are only added"):
        opened.add(hashed([("a", 1)]).with_columns(pl.lit(-1, pl.Int64).alias(WEIGHT)))


@pytest.mark.parametrize("how", ["add", "look-up"])
def test_an_index_of_other_rows_is_told(how):
    kept = Kept()
    kept.add([("a", 1), ("b", 2)])
    del kept.message["runs"]["rows.rows"]
    _, opened = kept.opened()
    with pytest.raises(CorruptionError, match="An index of the state has 2 rows, and there are 0"):
        if how == "add":
            opened.add(hashed([("a", 1)]))
        else:
            opened.look_up(hashed([("a", 1)])[HASH].to_numpy())


def test_a_place_behind_the_last_row_is_told():
    kept = Kept()
    kept.add([("a", 1)])
    ((index, *_),) = kept.opened()[1].runs.slots.values()
    table = kept.store.tables[index.name]
    kept.store.tables[index.name] = table.set_column(1, "__place", [[7]])
    with pytest.raises(CorruptionError, match="An index of the state has a row 7"):
        kept.check(["a"])


def test_nothing_is_read_where_nothing_is():
    _, opened = Kept().opened()
    assert opened.look_up(np.array([1], np.uint64)) is None
    assert opened.look_up(np.array([], np.uint64)) is None
    assert opened.scan() is None
    opened.add(hashed([]))
    assert opened.runs.rows == 0


def test_a_scan_gives_all_rows():
    kept = Kept()
    for value in range(20):
        kept.add([("a", value), ("b", value)])
    assert kept.opened()[1].scan()["v"].to_list() == [value for value in range(20) for _ in "ab"]
