"""The join of two tables, batch by batch, against SQL's rules over the tables as they then are."""

import polars as pl
import pytest
from example_counts import some
from hypothesis import given, settings
from hypothesis import strategies as st
from table_model import DIFF, TIME, Folded, KernelRun, joined

from millstream.kernels.joins.join_input import JoinedColumns, JoinInput, key_names
from millstream.kernels.joins.table_join import TableJoin

NAN, INF = float("nan"), float("inf")
LEFT = {"k": pl.Float64(), "t": pl.String(), "^v.*$": pl.Int64(), "n": pl.List(pl.Float64())}
RIGHT = {"j": pl.Float64(), "t": pl.String(), "w": pl.Int64()}
HOWS = ["inner", "left", "right", "full", "semi", "anti"]

keys = st.sampled_from([None, 0.0, -0.0, NAN, INF, 1.0])
texts = st.sampled_from([None, "", "a"])
numbers = st.sampled_from([None, 1, 2])
nested = st.sampled_from([None, [], [0.0], [-0.0], [NAN, None]])
times = st.integers(0, 2)
lefts = st.fixed_dictionaries({"k": keys, "t": texts, "^v.*$": numbers, "n": nested, TIME: times})
rights = st.fixed_dictionaries({"j": keys, "t": texts, "w": numbers, TIME: times})
kinds = st.sampled_from(["insert", "insert", "insert", "delete", "update", "move", "both"])


def operations(rows):
    return st.lists(st.tuples(kinds, st.integers(0, 9), rows), max_size=4)


histories = st.lists(st.tuples(operations(lefts), operations(rights)), min_size=1, max_size=4)


class Side:
    """One table as it is, and the changes of each batch."""

    def __init__(self, columns, key):
        self.schema = {**columns, TIME: pl.Int64(), DIFF: pl.Int8()}
        self.columns, self.key, self.rows = columns, key, []

    def change(self, operations):
        changes = []
        for kind, number, given_row in operations:
            row = given_row
            if kind == "both":
                changes += [{**row, DIFF: 1}, {**row, DIFF: -1}]
                continue
            if kind != "insert" and self.rows:
                old = self.rows.pop(number % len(self.rows))
                changes.append({**_other_zeros(old), DIFF: -1})
                row = {**old, self.key: row[self.key]} if kind == "move" else row
                if kind == "delete":
                    continue
            self.rows.append(row)
            changes.append({**row, DIFF: 1})
        return changes

    def frames(self, changes, cut):
        parts = [changes[:cut], changes[cut:]]
        return [pl.DataFrame(part, schema=self.schema) for part in parts if part]


def _other_zeros(row):
    """Return a row that is equal to this one, with the other zero."""
    return {
        name: -value if value == 0 and isinstance(value, float) else value
        for name, value in row.items()
    }


def kernel_of(how, on, *, nulls_equal=False, where=None, append_only=(False, False)):
    types = tuple(LEFT[name] for name in on)
    right = tuple(
        (n, f"{n}_right" if n in LEFT else n, t) for n, t in RIGHT.items() if n not in on.values()
    )
    if how in ("semi", "anti") and where is None:
        right = ()
    columns = JoinedColumns(
        JoinInput(tuple(on), types, tuple((n, n, t) for n, t in LEFT.items())),
        JoinInput(tuple(on.values()), types, right),
        tuple(zip(on, key_names(len(on)), strict=True)),
        how not in ("semi", "anti"),
    )
    return TableJoin("join", how, columns, nulls_equal, where, append_only)


def naive(left, right, on, how, **options):
    """Join with the time of a pair, the later one; every column is there, null where it has no side."""
    ours = [{**row, "left time": row[TIME]} for row in left.rows]
    theirs = [{**row, "right time": row[TIME]} for row in right.rows]
    for row in (*ours, *theirs):
        del row[TIME]
    names = {n: f"{n}_right" if n in LEFT else n for n in RIGHT}
    columns = [*LEFT]
    if how not in ("semi", "anti"):
        columns += [names[n] for n in RIGHT if n not in on.values()]
    for row in joined(ours or [], theirs or [], on, how=how, names=names, **options):
        known = [row[time] for time in ("left time", "right time") if row.get(time) is not None]
        yield {**{name: row.get(name) for name in columns}, TIME: max(known)}


CONDITIONS = {
    "none": (None, None),
    "values": (
        pl.nth(2) <= pl.col("w"),
        lambda row: None not in (row.get("^v.*$"), row.get("w")) and row["^v.*$"] <= row["w"],
    ),
    "all are there": (
        pl.all_horizontal(pl.all().exclude("n").is_not_null()),
        lambda row: all(
            row.get(name) is not None
            for name in row
            if name not in ("n", "left time", "right time")
        ),
    ),
}


def check_history(
    history, how, on, nulls_equal, condition, buckets, cut, append_only=(False, False)
):
    expression, rule = CONDITIONS[condition]
    kernel = kernel_of(how, on, nulls_equal=nulls_equal, where=expression, append_only=append_only)
    run, folded = KernelRun(kernel, buckets=buckets, seed=buckets), Folded()
    left, right = Side(LEFT, "k"), Side(RIGHT, "j")
    for of_left, of_right in history:
        changes = left.change(of_left), right.change(of_right)
        frames = {n: side.frames(changes[n], cut) for n, side in enumerate((left, right))}
        folded.take(run.batch({n: tables for n, tables in frames.items() if tables}))
        folded.holds(naive(left, right, on, how, where=rule, nulls_equal=nulls_equal))
    run.check_counts()


@pytest.mark.parametrize("how", HOWS)
@settings(max_examples=some(40))
@given(
    histories,
    st.sampled_from([{"k": "j"}, {"t": "t"}, {"k": "j", "t": "t"}]),
    st.booleans(),
    st.sampled_from(list(CONDITIONS)),
    st.sampled_from([1, 1, 4]),
    st.integers(0, 3),
)
def test_after_each_batch_the_changes_sum_up_to_the_join_of_both_tables(
    how, history, on, nulls_equal, condition, buckets, cut
):
    check_history(history, how, on, nulls_equal, condition, buckets, cut)


@pytest.mark.parametrize("how", HOWS)
@settings(max_examples=some(25))
@given(
    histories,
    st.sampled_from([{"k": "j"}, {"t": "t"}, {"k": "j", "t": "t"}]),
    st.booleans(),
    st.sampled_from(list(CONDITIONS)),
    st.sampled_from([1, 1, 4]),
    st.sampled_from([(True, True), (True, False), (False, True)]),
)
def test_inputs_whose_rows_are_only_added_give_the_same(
    how, history, on, nulls_equal, condition, buckets, append_only
):
    added = [
        tuple(
            [("insert", number, row) for _, number, row in side] if only else side
            for side, only in zip(sides, append_only, strict=True)
        )
        for sides in history
    ]
    check_history(added, how, on, nulls_equal, condition, buckets, 2, append_only)
