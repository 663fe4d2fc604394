"""State by key against a dict, and timers against a list: whatever is put, removed and asked for."""

import json
from unittest.mock import patch

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.kernels import jit
from millstream.kernels.frames import HASH
from millstream.kernels.state import hash_search, sorted_runs
from millstream.kernels.state.keyed_rows import KeyedRows
from millstream.kernels.state.operator_state import OperatorState
from millstream.kernels.state.sorted_runs import MemoryRunStore
from millstream.kernels.state.timers import Timers

NESTED = {
    "pair": pl.Array(pl.Int64, 2),
    "list": pl.List(pl.Int64),
    "struct": pl.Struct({"pair": pl.Array(pl.Int64, 2), "text": pl.String}),
}
SCHEMA = {"k": pl.String, "n": pl.Int64, HASH: pl.UInt64, **NESTED}


def hash_of(key):
    return len(key)  # keys of one length share a hash


def stored(state):
    """The state as the next batch finds it."""
    return OperatorState.from_message(json.loads(json.dumps(state.to_message())), state.store)


def hashes_of(keys):
    return np.unique(np.array([hash_of(key) for key in keys], np.uint64))


def rows_of(numbers_by_key):
    rows = [
        (k, n, hash_of(k), [n, -n], [n], {"pair": [n, 5], "text": k})
        for k, numbers in numbers_by_key.items()
        for n in numbers
    ]
    return pl.DataFrame(rows, schema=SCHEMA, orient="row")


def contents(rows):
    found = {}
    for key, number, _, pair, many, struct in rows.iter_rows() if rows is not None else ():
        assert (pair, many, struct) == (
            [number, -number],
            [number],
            {"pair": [number, 5], "text": key},
        )
        found.setdefault(key, []).append(number)
    return {key: sorted(numbers) for key, numbers in found.items()}


keys = st.text("ab", min_size=1, max_size=6)
steps = st.lists(
    st.tuples(st.dictionaries(keys, st.lists(st.integers(0, 9), max_size=3), max_size=6), keys),
    max_size=20,
)


@settings(deadline=None)
@given(steps, st.sampled_from([2, 5, sorted_runs.PART_ROWS]))
def test_what_is_held_of_a_key_is_what_was_put_last(steps, part_rows):
    with patch.object(sorted_runs, "PART_ROWS", part_rows):
        put_and_look(steps)


def put_and_look(steps):
    state = OperatorState(MemoryRunStore())
    model = {}
    for put, removed in steps:
        held = KeyedRows(state, "rows")
        touched = hashes_of(put)
        known = contents(held.get(touched))
        assert known == {k: v for k, v in model.items() if hash_of(k) in touched}
        known |= {k: sorted(v) for k, v in put.items()}
        held.put(touched, rows_of(known))
        model |= known
        held.remove(hashes_of([removed]))
        model = {k: v for k, v in model.items() if v and hash_of(k) != hash_of(removed)}
        state = stored(state)
    assert contents(KeyedRows(state, "rows").scan()) == model


def test_removing_everything_leaves_nothing_in_the_runs():
    state = OperatorState(MemoryRunStore())
    held = KeyedRows(state, "rows")
    for size in (5, 3, 1):
        held.put(hashes_of("a" * n for n in range(1, 1 + size)), rows_of({"a" * size: [size]}))
    held.remove(np.arange(9, dtype=np.uint64))
    held.put(np.array([1], np.uint64), rows_of({"b": [1]}))
    assert held.runs.rows == 1


LISTS = pl.List(pl.Int64())
USUAL = (("late", LISTS, []), ("later", LISTS, []), ("n", pl.Int64(), 1))
COUNTED = {"k": pl.Int64, "late": LISTS, "n": pl.Int64, HASH: pl.UInt64, "later": LISTS}
counted_rows = st.dictionaries(
    st.integers(0, 11),  # of a key; four share a hash, and each may have several rows
    st.lists(
        st.tuples(st.sampled_from([1, 1, 1, 2, 0, -3]), st.sampled_from([[], [], [7], [7, 8]])),
        max_size=2,
    ),
    max_size=8,
)


@settings(deadline=None)
@given(
    st.lists(st.tuples(counted_rows, st.booleans()), max_size=15),
    st.sampled_from([2, 5, sorted_runs.PART_ROWS]),
    st.booleans(),
)
def test_rows_are_counted_and_columns_that_runs_leave_out_have_their_usual_values(
    steps, part_rows, compiled
):
    """``early``: the rows of a step are put as a version did it whose runs have all columns."""
    compiles = patch.object(hash_search, "_compiles", lambda _: compiled and jit.is_available())
    with patch.object(sorted_runs, "PART_ROWS", part_rows), compiles:
        state, model, early = OperatorState(MemoryRunStore()), {}, True
        for put, goes_on in steps:
            early &= goes_on
            held = KeyedRows(state, "rows", "n", signed=True, usual=() if early else USUAL)
            touched = np.unique(np.array([key % 3 for key in put], np.uint64))
            known = held.get(touched)
            assert _by_key(known) == {k: v for k, v in model.items() if k % 3 in touched}
            model |= put
            model = {k: v for k, v in model.items() if v}
            rows = [
                (key, late, n, key % 3, [])
                for key in sorted(model)
                if key % 3 in touched
                for n, late in model[key]
            ]
            made = pl.DataFrame(rows, COUNTED, orient="row")
            held.put(touched, made, made.clear() if known is None else known)
            assert held.runs.events == sum(n for rows in model.values() for n, _ in rows)
            state = stored(state)
        held = KeyedRows(state, "rows", "n", signed=True, usual=USUAL)
        assert _by_key(held.scan()) == model
        assert [key for part in held.parts(3) for key in _by_key(part)] == [
            key for part in (held.scan(),) for key in _by_key(part)
        ]
        few = held.get(np.arange(3, dtype=np.uint64), ["n", HASH])
        assert (few is None) == (not model)
        assert few is None or few.rows() == [(n, k % 3) for k, n, _ in _flat(held.scan())]


def _flat(rows):
    return [] if rows is None else rows[["k", "n", "late"]].rows()


def _by_key(rows):
    found = {}
    for key, n, late in _flat(rows):
        found.setdefault(key, []).append((n, late))
    assert rows is None or rows["later"].to_list() == [[]] * rows.height
    return found


def test_a_run_without_any_of_the_columns_that_are_gathered_has_its_rows():
    """All other columns are numbers, which are not gathered."""
    held = KeyedRows(OperatorState(MemoryRunStore()), "rows", "n", signed=True, usual=USUAL)
    for keys, late in ([*range(1, 9)], []), ([9], [7]):
        rows = [(key, late, 1, key, []) for key in keys]
        held.put(np.array(keys, np.uint64), pl.DataFrame(rows, COUNTED, orient="row"))
    found = held.get(np.array([2, 9], np.uint64))
    assert _by_key(found) == {2: [(1, [])], 9: [(1, [7])]}


@pytest.mark.not_in_lane("thresholds", "it counts runs, which have many parts there")
def test_a_run_has_only_the_columns_that_do_not_have_their_usual_values():
    state = OperatorState(MemoryRunStore())
    held = KeyedRows(state, "rows", "n", usual=USUAL)
    seen = []
    for key, (late, n) in enumerate([([], 1), ([5], 1), ([], 2), ([], 1)]):
        made = pl.DataFrame([(key, late, n, key, [])], COUNTED, orient="row")
        held.put(np.array([key], np.uint64), made)
        seen.append(
            [{*held.runs.table(run).column_names} - {"k", HASH} for run in held.runs.slots[0]]
        )
    assert seen == [[set()], [{"late"}], [{"late"}, {"n"}], [{"late", "n"}]]
    held.put(
        np.arange(2, dtype=np.uint64), held.scan().clear(), held.get(np.arange(2, dtype=np.uint64))
    )
    assert held.runs.events == 3


times = st.integers(-30, 60)


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.lists(st.tuples(times, keys), max_size=6), times), max_size=15),
    st.sampled_from([1, 7, 100]),
)
def test_every_timer_comes_once_when_it_is_due(steps, slot):
    state = OperatorState(MemoryRunStore())
    waiting, asked = [], -(2**62)
    for added, until in steps:
        timers = Timers(state, "timers", slot)
        timers.add(np.array([t for t, _ in added], np.int64), _hashes(k for _, k in added))
        waiting += [(t, k) for t, k in added if t > asked]
        due = {hash_of(k) for t, k in waiting if t <= until}
        assert timers.due(until).tolist() == sorted(due)
        waiting = [(t, k) for t, k in waiting if t > until]
        asked = max(asked, until)
        state = stored(state)
    timers = Timers(state, "timers", slot)
    timers.due(1000)
    assert timers.runs.rows == 0


def _hashes(keys):
    return np.array([hash_of(key) for key in keys], np.uint64)
