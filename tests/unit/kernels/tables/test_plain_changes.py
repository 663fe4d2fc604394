"""Batches of plain changes are applied at once to the same state and changes as one after the other."""

from collections import Counter

import polars as pl
import pytest
from example_counts import some
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.errors import UserCodeError
from millstream.kernels.decode.captured import UNAVAILABLE
from millstream.kernels.frames import DIFF, KIND, ORDER, ROWS, TIME
from millstream.kernels.operator import BatchContext
from millstream.kernels.state.keyed_rows import KeyedRows
from millstream.kernels.state.operator_state import OperatorState
from millstream.kernels.state.sorted_runs import MemoryRunStore
from millstream.kernels.tables.captured_table import CapturedTable
from millstream.kernels.tables.plain_changes import PlainChanges
from millstream.kernels.tables.waiting_changes import COMMIT, NEW, PLACE

SCHEMA = {
    "id": pl.Int64(),
    "v": pl.String(),
    TIME: pl.Int64(),
    ORDER: pl.Int64(),
    COMMIT: pl.Int64(),
    PLACE: pl.Int64(),
    KIND: pl.String(),
    UNAVAILABLE: pl.List(pl.String()),
    NEW: pl.Boolean(),
}
KINDS = st.sampled_from(["upsert"] * 6 + ["delete"] * 3)
ODD = st.sampled_from(["upsert", "delete", "spoil", "truncate", "move", "carry", "left out"])


class Versioned(CapturedTable):
    """Takes rows that have their versions already."""

    def _due(self, _state, came, _decided, _result):
        return came


def table(*, transactions=True):
    columns = (("id", pl.Int64()), ("v", pl.String()))
    return Versioned("table", ("id",), columns, transactions=transactions)


def frame(changes, first):
    rows = []
    for number, (key, kind, commit) in enumerate(changes, first):
        left_out = ["v"] if kind == "left out" else []
        said = "upsert" if left_out else kind
        value = f"v{number}" if kind == "upsert" else None
        of = None if kind == "truncate" else key
        rows.append((of, value, number, number, commit, number, said, left_out, True))
    return pl.DataFrame(rows, schema=SCHEMA, orient="row")


def state_of(state):
    found = KeyedRows(state, "rows", ROWS).scan()
    rows = [] if found is None else found.select(sorted(found.columns)).rows()
    return sorted(map(repr, rows)), state.values.get("gone"), state.values.get("truncated")


def outcome(result):
    rows = None if result.rows is None else result.rows.select("id", "v", TIME, DIFF).rows()
    return Counter(rows or ()), +result.counts


@st.composite
def histories(draw):
    """Batches of changes; in one that is odd there is anything, and commits may go back."""
    batches, commit = [], 0
    for _ in range(draw(st.integers(1, 6))):
        odd, changes = draw(st.integers(0, 3)) == 0, []
        for _ in range(draw(st.integers(1, 10))):
            commit += draw(st.integers(0, 2))
            when = commit - draw(st.integers(0, 4)) if odd else commit
            changes.append((draw(st.integers(0, 5)), draw(ODD if odd else KINDS), when))
        batches.append(changes)
    return batches


@settings(max_examples=some(80), deadline=None)
@given(histories())
def test_state_and_changes_are_those_of_one_change_after_the_other(history):
    plain, slow = (OperatorState(MemoryRunStore()) for _ in range(2))
    first = 0
    for changes in history:
        rows, context = frame(changes, first), BatchContext(0, 0, seed=7)
        first += len(changes)
        got = table().process(plain, {0: [rows]}, context)
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(PlainChanges, "may_be", staticmethod(lambda _rows: False))
            expected = table().process(slow, {0: [rows]}, context)
        assert outcome(got) == outcome(expected)
        assert state_of(plain) == state_of(slow)


def test_the_rule_of_the_last_change_of_each_key():
    state, rows = OperatorState(MemoryRunStore()), {}
    changes = [(key * 7 % 11, "delete" if key % 4 == 0 else "upsert", key) for key in range(200)]
    total = Counter()
    for first in range(0, 200, 23):
        part = changes[first : first + 23]
        result = table().process(state, {0: [frame(part, first)]}, BatchContext(0, 0))
        for key, value, diff in result.rows.select("id", "v", DIFF).rows():
            total[key, value] += diff
        for number, (key, kind, _) in enumerate(part, first):
            rows.pop(key, None)
            if kind == "upsert":
                rows[key] = f"v{number}"
    assert dict.fromkeys(rows.items(), 1) == {k: n for k, n in total.items() if n}


def test_batches_of_plain_changes_are_applied_at_once(monkeypatch):
    monkeypatch.setattr("millstream.kernels.tables.captured_table._CapturedBatch", None)
    state = OperatorState(MemoryRunStore())
    for first, changes in enumerate([[(1, "upsert", 0), (2, "upsert", 0)], [(1, "delete", 1)]]):
        table().process(state, {0: [frame(changes, first * 2)]}, BatchContext(0, 0))


def test_without_transactions_a_key_of_several_partitions_stops_the_job():
    rows = frame([(1, "upsert", -1), (1, "upsert", -1)], 0)
    rows = rows.with_columns(pl.Series(ORDER, [5, (1 << 40) + 3]))
    with pytest.raises(UserCodeError, match="in several partitions"):
        table(transactions=False).process(
            OperatorState(MemoryRunStore()), {0: [rows]}, BatchContext(0, 0)
        )
