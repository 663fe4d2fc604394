"""Tables in the order of hashes, against what dicts and loops say; many keys share a hash."""

from zlib import crc32

import numpy as np
import polars as pl
import pytest
from example_counts import some
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.kernels.frames import HASH, WINDOW
from millstream.kernels.state.hash_order import (
    last_of_each,
    latest_per_key,
    positions_in,
    sort_by_hash,
    sort_by_window_and_hash,
    sorted_distinct,
)

SCHEMA = {WINDOW: pl.Int64, "k": pl.String, "f": pl.Float64, HASH: pl.UInt64, "n": pl.Int64}
KEY = [WINDOW, "k", "f"]
LARGE = 1 << 63
keys = st.sampled_from(["a", "b", "c", "d", None])
floats = st.sampled_from([0.5, float("nan"), None])
windows = st.lists(st.integers(-2, 2), min_size=1, max_size=3)


@st.composite
def tables(draw, shared=None):
    """Rows of window, key, hash and a number of their own. ``shared``: so many hashes for all keys."""
    there, shared = draw(windows), shared or draw(st.sampled_from([1, 3, 1000]))
    rows = draw(st.lists(st.tuples(st.sampled_from(there), keys, floats), max_size=40))
    hashes = [LARGE + crc32(f"{k} {f}".encode()) % shared for _, k, f in rows]
    columns = [*zip(*rows, strict=True)] or [[], [], []]
    data = dict(zip(KEY, columns, strict=True)) | {HASH: hashes, "n": range(len(rows))}
    return pl.DataFrame(data, schema=SCHEMA)


def key_of(row):
    return row[WINDOW], row["k"], str(row["f"])


@settings(max_examples=some(200))
@given(st.lists(st.integers(0, 2**64 - 1) | st.integers(0, 3), max_size=30))
def test_distinct_hashes_rise(hashes):
    assert sorted_distinct(np.array(hashes, np.uint64)).tolist() == sorted(set(hashes))


@settings(max_examples=some(200))
@given(tables())
def test_rows_of_one_hash_keep_their_order(rows):
    numbers = sorted(range(rows.height), key=rows[HASH].to_list().__getitem__)
    assert sort_by_hash(rows)["n"].to_list() == numbers


@settings(max_examples=some(200))
@given(tables())
def test_the_newest_row_of_each_key_is_its_last(rows):
    last = {key_of(row): row["n"] for row in rows.rows(named=True)}
    found = latest_per_key(rows, KEY)
    assert sorted(found["n"]) == sorted(last.values())


@pytest.mark.not_in_lane("thresholds", "it knows how many windows are looked through")
@settings(max_examples=some(200))
@given(st.sampled_from([1, 3, 1000]).flatmap(lambda n: st.tuples(tables(n), tables(n))))
def test_a_key_is_found_in_its_place_or_nowhere(drawn):
    table, rows = drawn
    table = sort_by_window_and_hash(table.unique(KEY))
    assert table.select(WINDOW, HASH).rows() == sorted(table.select(WINDOW, HASH).rows())
    places = positions_in(table, rows, KEY)
    if places is None:
        shared = table.select(WINDOW, HASH).is_duplicated().any()
        assert shared or table[WINDOW].n_unique() > 16
        return
    where = {key_of(row): place for place, row in enumerate(table.rows(named=True))}
    assert places.tolist() == [where.get(key_of(row), -1) for row in rows.rows(named=True)]


def test_rows_with_the_hash_of_another_key_are_not_taken_for_it():
    table = pl.DataFrame({WINDOW: [0], "k": ["a"], "f": [0.5], HASH: [7], "n": [0]}, schema=SCHEMA)
    assert positions_in(table, table.with_columns(k=pl.lit("b")), KEY).tolist() == [-1]
    assert positions_in(table, table, KEY).tolist() == [0]
    assert positions_in(table.clear(), table, KEY).tolist() == [-1]


@pytest.mark.not_in_lane("thresholds", "it knows how many windows are looked through")
def test_windows_past_count_are_left_to_a_join():
    table = pl.DataFrame({WINDOW: range(40), "k": "a", "f": 0.5, HASH: 7, "n": 0}, schema=SCHEMA)
    assert positions_in(table, table, KEY) is None
    assert positions_in(table.head(16), table.head(16), KEY).tolist() == list(range(16))


@settings(max_examples=some(200))
@given(st.lists(st.integers(0, 5), max_size=20))
def test_each_place_is_told_with_where_it_occurs_last(places):
    found, last = last_of_each(np.array(places, np.int64))
    assert dict(zip(found.tolist(), last.tolist(), strict=True)) == {
        place: at for at, place in enumerate(places)
    }
    assert found.tolist() == sorted(set(places))
