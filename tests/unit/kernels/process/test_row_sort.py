"""Rows are put in the order in which a stable sort by both columns puts them."""

import polars as pl
from hypothesis import given
from hypothesis import strategies as st

from millstream.kernels.process.row_sort import in_order

NUMBERS = st.lists(st.tuples(st.integers(-3, 3), st.integers(-2, 2)), max_size=30)


@given(NUMBERS)
def test_rows_are_sorted_by_both_columns_and_equal_ones_keep_their_order(numbers):
    rows = [(*one, place) for place, one in enumerate(numbers)]
    schema = {"first": pl.Int64, "second": pl.Int64, "place": pl.Int64}
    table = pl.DataFrame(rows, schema=schema, orient="row")
    assert in_order(table, "first", "second").rows() == sorted(rows)
    assert in_order(table, "first", "first").rows() == sorted(rows, key=lambda row: row[0])


def test_rows_that_are_in_order_are_not_copied():
    table = pl.DataFrame({"first": [1, 1, 2], "second": [0, 0, -1]})
    assert in_order(table, "first", "second") is table
