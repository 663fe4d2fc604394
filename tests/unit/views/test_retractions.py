"""What is left of rows given and taken back: the sum, in whatever order they come."""

from collections import Counter

import polars as pl
from example_counts import some
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.kernels.frames import DIFF, SPLIT
from millstream.views.retractions import (
    DIFF_COLUMN,
    split_upserts_and_deletes,
    with_diff_column,
)

ROW = st.tuples(
    st.sampled_from([None, "a", "b"]), st.sampled_from([None, 0.0, 1.5]), st.sampled_from([1, -1])
)
SCHEMA = {"^k$": pl.String, "v": pl.Float64, DIFF: pl.Int8}


@settings(max_examples=some(200), deadline=None)
@given(rows=st.lists(ROW, max_size=12), seed=st.randoms())
def test_what_is_left_is_the_sum_and_no_key_is_both_set_and_deleted(rows, seed):
    frame = pl.DataFrame(rows, schema=SCHEMA, orient="row")
    kept, gone = split_upserts_and_deletes(frame, ("^k$",), replaces=False)
    sums = Counter()
    for key, value, sign in rows:
        sums[key, value] += sign
    assert Counter(kept.rows()) == Counter(row for row, total in sums.items() if total > 0) or all(
        sign == 1 for *_, sign in rows
    )
    taken = set() if gone is None else {key for (key,) in gone.rows()}
    given_keys = {key for (key, _), total in sums.items() if total > 0}
    assert taken == {key for (key, _), total in sums.items() if total < 0} - given_keys
    shuffled = list(rows)
    seed.shuffle(shuffled)
    shuffled = pl.DataFrame(shuffled, schema=SCHEMA, orient="row")
    again, gone_again = split_upserts_and_deletes(shuffled, ("^k$",), replaces=False)
    assert Counter(again.rows()) == Counter(kept.rows())
    assert taken == (set() if gone_again is None else {key for (key,) in gone_again.rows()})


def test_rows_without_a_sign_are_all_given():
    frame = pl.DataFrame({"k": [1, 1]})
    assert split_upserts_and_deletes(frame, ("k",), replaces=False) == (frame, None)


def test_of_rows_left_for_one_key_the_last_stays_last():
    frame = pl.DataFrame({"k": [1, 2, 1, 1], "v": [1, 9, 2, 1], DIFF: [1, -1, 1, -1]})
    kept, _ = split_upserts_and_deletes(frame, ("k",), replaces=False)
    assert kept.rows() == [(1, 2)]


def test_hidden_columns_stay_hidden_and_the_sign_is_shown():
    frame = pl.DataFrame({"^.*$": [1], SPLIT: [3], DIFF: pl.Series([-1], dtype=pl.Int64)})
    assert with_diff_column(frame).schema == {"^.*$": pl.Int64, DIFF_COLUMN: pl.Int8}
    assert with_diff_column(frame.drop(DIFF)).columns == ["^.*$"]


def test_where_rows_replace_one_another_the_last_row_of_a_key_says_what_becomes_of_it():
    rows = [("a", 1.0, 1), ("b", 2.0, 1), ("a", 1.0, -1), ("c", 3.0, -1), ("c", 4.0, 1)]
    frame = pl.DataFrame(
        rows, schema={"k": pl.String, "v": pl.Float64, DIFF: pl.Int8}, orient="row"
    )
    kept, gone = split_upserts_and_deletes(frame, ("k",), replaces=True)
    assert kept.rows() == [("b", 2.0), ("c", 4.0)]
    assert gone.rows() == [("a",)]  # a row of an earlier batch may stand there
