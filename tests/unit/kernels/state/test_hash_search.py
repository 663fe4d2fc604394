"""Search and merge of rising hashes against the plain rule, by NumPy and compiled."""

from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from millstream.kernels import jit
from millstream.kernels.state import hash_search
from millstream.kernels.state.hash_search import find, newest

HIGHEST = 2**64 - 1
hashes = st.one_of(st.integers(0, 30), st.sampled_from([2**63 - 1, 2**63, HIGHEST]))
tables = st.lists(hashes, max_size=40).map(sorted)
by_loops = pytest.mark.parametrize("compiled", [False, True])


def taken(compiled):
    """Let the compiled loops be taken, or not."""
    if compiled and not jit.is_available():
        pytest.skip("numba is not installed")
    return patch.object(hash_search, "_compiles", lambda count: compiled)


def array(values):
    return np.array(values, np.uint64)


@by_loops
@given(held=tables, wanted=st.sets(hashes, max_size=30).map(sorted))
@example(held=[0, HIGHEST, HIGHEST], wanted=[0, HIGHEST])
def test_every_place_of_a_wanted_hash_is_found(compiled, held, wanted):
    with taken(compiled):
        found = find(array(held), array(wanted))
    expected = [(at, wanted.index(hash_)) for at, hash_ in enumerate(held) if hash_ in wanted]
    assert [*zip(found.places.tolist(), found.numbers.tolist(), strict=True)] == expected


@by_loops
@given(given_tables=st.lists(tables, min_size=1, max_size=5))
def test_of_each_hash_the_rows_of_the_newest_table_count(compiled, given_tables):
    with taken(compiled):
        found, places = newest([array(table) for table in given_tables])
    last = {hash_: number for number, table in enumerate(given_tables) for hash_ in table}
    rows = [(hash_, number) for number, table in enumerate(given_tables) for hash_ in table]
    counted = [at for at, (hash_, number) in enumerate(rows) if last[hash_] == number]
    assert places.tolist() == sorted(counted, key=lambda at: (rows[at][0], at))
    assert found.tolist() == [rows[at][0] for at in places]


@by_loops
def test_many_hashes_are_found_and_merged(compiled):
    dice = np.random.default_rng(5)
    held = np.unique(dice.integers(0, 2**64, 20_000, np.uint64, endpoint=False))
    wanted = np.union1d(held[::7], dice.integers(0, 2**64, 3_000, np.uint64, endpoint=False))
    with taken(compiled):
        found = find(held, wanted)
        rising, places = newest([held, wanted])
    assert np.array_equal(held[found.places], np.intersect1d(held, wanted))
    assert np.array_equal(wanted[found.numbers], held[found.places])
    both = np.concatenate([held, wanted])
    assert np.array_equal(both[places], rising)
    assert np.array_equal(rising, np.union1d(held, wanted))
    assert (places[np.isin(both[places], wanted)] >= len(held)).all()


def test_the_loops_are_compiled_once_as_many_hashes_have_come_as_pay_for_it(monkeypatch):
    monkeypatch.setattr(hash_search, "COMPILED_HASHES_MIN", 10)
    monkeypatch.setattr(hash_search, "_seen", 0)
    monkeypatch.setattr(jit, "is_available", lambda: True)
    assert [hash_search._compiles(4) for _ in range(4)] == [False, False, True, True]
