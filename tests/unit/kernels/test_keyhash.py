"""The key hash: the same for ever, spread evenly, equal for equal keys."""

import numpy as np
import polars as pl
from hypothesis import given
from hypothesis import strategies as st

from millstream.kernels.keyhash import buckets_of, hash_columns


def hashes(**columns):
    frame = pl.DataFrame(columns)
    return hash_columns(frame, tuple(frame.columns)).tolist()


def test_hashes_are_the_ones_that_stored_state_was_divided_by():
    assert hashes(s=["", "a", "user-42", "x" * 17, None]) == [
        7960286522194355700,
        1469172660403383190,
        9613100509384268854,
        6071803470472434765,
        1950344035676135012,
    ]
    assert hashes(n=[0, 1, -1, None]) == [
        7960286522194355700,
        16834447057089888969,
        13029008266876403067,
        1950344035676135012,
    ]


def test_negative_zero_hashes_as_zero_and_nan_as_nan():
    zero, negative, nan, other_nan = hashes(f=[0.0, -0.0, float("nan"), -float("nan")])
    assert zero == negative
    assert nan == other_nan


def test_a_key_of_two_columns_depends_on_their_order():
    frame = pl.DataFrame({"a": [1], "b": [2]})
    assert hash_columns(frame, ("a", "b")) != hash_columns(frame, ("b", "a"))


def test_no_key_columns_are_one_key():
    assert len(set(hash_columns(pl.DataFrame({"a": [1, 2, 3]}), ()).tolist())) == 1


@given(st.lists(st.text(max_size=40), min_size=1, max_size=50))
def test_a_value_hashes_the_same_alone_and_among_others(values):
    together = hashes(s=values)
    assert together == [hashes(s=[value])[0] for value in values]


@given(st.lists(st.text(max_size=40), max_size=50))
def test_a_slice_hashes_like_a_copy(values):
    frame = pl.DataFrame({"s": ["before", *values, "after"]}, schema={"s": pl.String})
    cut = hash_columns(frame.slice(1, len(values)), ("s",)).tolist()
    assert cut == hash_columns(frame, ("s",)).tolist()[1:-1]


def test_buckets_are_evenly_filled():
    counts = np.bincount(buckets_of(hash_columns(pl.DataFrame({"n": range(40_000)}), ("n",)), 7))
    assert len(counts) == 7
    assert counts.min() > 0.9 * 40_000 / 7


def test_what_is_kept_by_codes_is_hashed_by_its_text():
    texts = pl.Series(["b", "a", None, "c"])
    expected = hash_columns(pl.DataFrame({"k": texts}), ("k",))
    for order in (["a", "b", "c"], ["c", "b", "a"]):
        for dtype in (pl.Enum(order), pl.Categorical()):
            pl.Series(order, dtype=dtype)  # which gives out the codes
            coded = pl.DataFrame({"k": texts.cast(dtype)})
            assert hash_columns(coded, ("k",)).tolist() == expected.tolist()


def test_whole_numbers_of_any_width_have_hashes_of_their_own():
    for dtype in (pl.UInt64, pl.Int128):
        values = pl.Series([0, 1, 2**63 - 1, 2**63, 2**64 - 1, None], dtype=dtype)
        hashes = hash_columns(pl.DataFrame({"k": values}), ("k",))
        assert len(set(hashes.tolist())) == len(values)
