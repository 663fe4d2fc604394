"""The order and the ranks of rows in groups, against sorting them one by one in Python."""

import math
from functools import cmp_to_key
from itertools import pairwise

import numpy as np
import polars as pl
import pytest
from example_counts import some
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.kernels.frames import TIME
from millstream.kernels.state.keyhash import hash_columns
from millstream.kernels.tables.row_order import RowOrder

WHOLE = st.sampled_from([None, 0, 1, 2, -1, 7])
VALUES = {
    pl.Int64(): st.sampled_from([None, 0, 1, -1, 2**63 - 1, -(2**63)]),
    pl.Int8(): st.sampled_from([None, 0, 127, -128]),
    pl.UInt64(): st.sampled_from([None, 0, 1, 2**64 - 1]),
    pl.Float64(): st.sampled_from([None, 0.0, -0.0, math.nan, math.inf, -math.inf, 0.1, -3e300]),
    pl.Float32(): st.sampled_from([None, 0.0, math.nan, 1.5, -1.5]),
    pl.Boolean(): st.sampled_from([None, True, False]),
    pl.String(): st.sampled_from([None, "", "a", "b", "ba"]),
    pl.Datetime("us", "UTC"): WHOLE,
    pl.Duration("ms"): WHOLE,
    pl.Date(): WHOLE,
    pl.Decimal(10, 2): WHOLE,
    pl.Binary(): st.sampled_from([None, b"", b"\x00", b"\xff"]),
}
TIES = ["row_number", "rank", "dense_rank"]


@st.composite
def tables(draw):
    first, second = (draw(st.sampled_from(list(VALUES))) for _ in range(2))
    count = draw(st.integers(0, 25))

    def column(name, values, dtype):
        made = draw(st.lists(values, min_size=count, max_size=count))
        whole = pl.Int64() if dtype.is_temporal() else dtype
        return pl.Series(name, made, whole).cast(dtype)

    return pl.DataFrame(
        [
            column("0", st.sampled_from(["a", "b", None]), pl.String()),
            column("1", VALUES[first], first),
            column("2", VALUES[second], second),
            column(TIME, st.integers(0, 2), pl.Int64()),
        ]
    )


def compared(one, other, *, descending=False):
    """Compare two values: -1, 0 or 1; what is not a number is behind numbers, and null behind that."""

    def behind(value):
        if value is None:
            return 2
        return int(isinstance(value, float) and math.isnan(value))

    if behind(one) or behind(other):
        return (behind(one) > behind(other)) - (behind(one) < behind(other))
    found = (one > other) - (one < other)
    return -found if descending else found


def ranked(rows, order, count, ties, tie_break):
    """Return the group, rank and place of the rows with a rank of at most ``count``, group by group."""

    def before(one, other):
        keys = [(column, down) for column, down in order] + [
            (int(c), False) for c in (*tie_break, 3)
        ]
        for column, down in keys:
            found = compared(one[1][column], other[1][column], descending=down)
            if found:
                return found
        return one[0] - other[0]

    found = {}
    for group in {row[0] for row in rows}:
        members = [pair for pair in enumerate(rows) if pair[1][0] == group]
        members.sort(key=cmp_to_key(before))
        number = rank = dense = 0
        for place, (at, row) in enumerate(members):
            last = members[place - 1][1] if place else None
            if last is None or any(compared(row[c], last[c]) for c, _ in order):
                rank, dense = place + 1, dense + 1
            number = {"row_number": place + 1, "rank": rank, "dense_rank": dense}[ties]
            if number <= count:
                found.setdefault(group, []).append((number, at))
    return found


@settings(max_examples=some(150))
@given(
    rows=tables(),
    by=st.sampled_from([("1",), ("2",), ("1", "2"), ("2", "1")]),
    downs=st.tuples(st.booleans(), st.booleans()),
    ties=st.sampled_from(TIES),
    count=st.integers(1, 4),
    bits=st.sampled_from([0, 1, 64]),
    pruned=st.booleans(),
    tie_break=st.sampled_from([("1", "2"), ()]),
)
def test_rows_are_ranked_as_if_they_were_compared_one_by_one(
    rows, by, downs, ties, count, bits, pruned, tie_break
):
    order = tuple(zip(by, downs, strict=False))
    rule = RowOrder(("0",), order, tie_break)
    mask = np.uint64(2**64 - 2 ** (64 - bits))  # groups may share a hash
    hashes = hash_columns(rows, ("0",)) & mask
    found = rule.sort(rows, hashes, (ties, count) if pruned else None)
    ranks = found.ranks(ties)
    at = [
        (rows["0"][int(place)], int(rank), int(place))
        for place, rank in zip(found.places, ranks, strict=True)
    ]
    got = {}
    for group, rank, place in at:
        if rank <= count:
            got.setdefault(group, []).append((rank, place))
    whole = rows.with_columns(
        pl.col(name).to_physical() for name in "12" if rows.schema[name].is_temporal()
    )
    by_number = [(int(c), down) for c, down in order]
    expected = ranked(whole.rows(), by_number, count, ties, tie_break)
    assert got == expected
    groups = [group for group, _, _ in at]
    changes = sum(a != b for a, b in pairwise(groups))
    assert changes + bool(groups) == len(set(groups)) == int(found.begins.sum())


@pytest.mark.parametrize("ties", TIES)
def test_ranks_of_some_rows_are_those_that_they_have_alone(ties):
    rows = pl.DataFrame({"0": ["a"] * 6, "1": [3, 1, 3, 2, 1, 3], TIME: [0] * 6})
    rule = RowOrder(("0",), (("1", True),), ())
    hashes = hash_columns(rows, ("0",))
    some_rows = np.array([True, False, True, False, True, True])
    whole = rule.sort(rows, hashes)
    among = whole.among(some_rows[whole.places])
    alone = rule.sort(rows.filter(pl.Series(some_rows)), hashes[some_rows])
    assert among.ranks(ties).tolist() == alone.ranks(ties).tolist()
    assert np.flatnonzero(some_rows)[alone.places].tolist() == among.places.tolist()
