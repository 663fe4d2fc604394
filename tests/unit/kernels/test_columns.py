"""Steps on single columns give what polars gives by a query, for few rows and for many, whatever the types."""

from datetime import UTC, datetime, timedelta
from decimal import Decimal
from itertools import compress

import numpy as np
import polars as pl
import pytest
from example_counts import some
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.kernels.columns import constant, filter_rows, gather_rows, is_among

VALUES = {
    "number": (pl.Int64, [1, None, -5, 2**62]),
    "text": (pl.String, ["", "a longer text than twelve bytes", None, "ü"]),
    "bytes": (pl.Binary, [b"", b"\x00" * 20, None]),
    "flag": (pl.Boolean, [True, False, None]),
    "time": (pl.Datetime("ms", "Europe/Berlin"), [datetime(2026, 1, 1, tzinfo=UTC), None]),
    "money": (pl.Decimal(38, 9), [Decimal("1.5"), None]),
    "list": (pl.List(pl.String), [["a", None], [], None]),
    "struct": (pl.Struct({"a": pl.Int8, "b": pl.List(pl.Int8)}), [{"a": 1, "b": [1]}, None]),
    "kind": (pl.Enum(["x", "y"]), ["x", "y", None]),
    "pair": (pl.Array(pl.Int16, 2), [[1, 2], None]),
    "float": (pl.Float64, [0.0, -0.0, float("nan"), None]),
    "span": (pl.Duration("ns"), [timedelta(seconds=1), None]),
}
HEIGHTS = [0, 1, 7, 20_000, 20_001]


def frame_of(height, seed):
    dice = np.random.default_rng(seed)
    return pl.DataFrame(
        {
            name: pl.Series([values[i] for i in dice.integers(0, len(values), height)], dtype=dtype)
            for name, (dtype, values) in VALUES.items()
        }
    )


@pytest.mark.parametrize("height", HEIGHTS)
def test_rows_are_those_of_a_query(height):
    rows = frame_of(height, seed=height)
    dice = np.random.default_rng(height + 1)
    for share in (0.0, 0.3, 1.0):
        mask = dice.random(height) < share
        assert filter_rows(rows, mask).equals(rows.filter(pl.Series(mask, dtype=pl.Boolean)))
    order = dice.permutation(height)[: height // 2 + 1]
    assert gather_rows(rows, order).equals(rows[order])
    assert gather_rows(rows, order).schema == rows.schema


@settings(max_examples=some(40), deadline=None)
@given(
    st.lists(st.booleans(), min_size=12, max_size=12),
    st.lists(st.integers(0, 11), max_size=20),
)
def test_rows_of_a_frame_that_was_cut_and_joined_are_those_at_their_places(kept, places):
    # Several chunks, one of them cut out of a longer one, another empty.
    rows = pl.concat([frame_of(9, 1), frame_of(5, 2)[1:4], frame_of(0, 3)]).drop("float")
    each = rows.rows()
    assert filter_rows(rows, np.array(kept)).rows() == list(compress(each, kept))
    assert gather_rows(rows, np.array(places, np.int64)).rows() == [each[i] for i in places]


def test_a_frame_without_columns_stays_one():
    assert filter_rows(pl.DataFrame(), np.zeros(0, np.bool_)).shape == (0, 0)


@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("height", [0, 1, 5])
def test_a_constant_is_its_value_in_each_row(name, height):
    dtype, values = VALUES[name]
    for value in values:
        column = constant(value, height, dtype, "c")
        assert (column.name, column.dtype, len(column)) == ("c", dtype, height)
        one = pl.Series("c", [value], dtype=dtype)
        assert height == 0 or column.equals(pl.concat([one] * height), null_equal=True)


@pytest.mark.parametrize("height", HEIGHTS)
def test_values_are_found_among_others(height):
    dice = np.random.default_rng(height)
    values = dice.integers(0, 2**64, height, dtype=np.uint64)
    for wanted in (values[::3], np.concatenate([values[:2], values[:2]]), values[:0]):
        there = set(wanted.tolist())
        assert is_among(values, wanted).tolist() == [one in there for one in values.tolist()]
