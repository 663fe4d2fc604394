"""The key hash: the same for ever, spread evenly, equal for equal keys."""

import numpy as np
import polars as pl
from hypothesis import given
from hypothesis import strategies as st
from truncated_hashes import not_when_cut

from millstream.kernels.state.keyhash import buckets_of, frequent_hash, hash_columns, mix

pytestmark = not_when_cut("it says what the hashes are")


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


def undone_mix(word):
    """Find what is mixed into a word: the finaliser has no secret."""
    for shift, factor in ((31, 0x94D049BB133111EB), (27, 0xBF58476D1CE4E5B9), (30, 1)):
        found = word
        for _ in range(3):
            found = word ^ (found >> shift)
        word = found * pow(factor, -1, 2**64) % 2**64
    return (word - 0x9E3779B97F4A7C15) % 2**64


def bytes_with_the_hash_of_null():
    head = b"user0001"
    (middle,) = mix(np.array([16 ^ int.from_bytes(head, "little")], np.uint64)).tolist()
    null = 0x6E756C6C6E756C6C
    return head + (middle ^ undone_mix(null)).to_bytes(8, "little")


def test_keys_made_to_collide_do_not_under_a_seed_that_is_not_known():
    frame = pl.DataFrame({"b": [bytes_with_the_hash_of_null(), None]}, schema={"b": pl.Binary})
    without, *others = (hash_columns(frame, ("b",), seed).tolist() for seed in (0, 1, 2, 2**62))
    assert without[0] == without[1]
    assert all(made != null for made, null in others)


@given(st.integers(0, 2**63 - 1), st.integers(0, 2**63 - 1))
def test_every_seed_gives_other_hashes_and_the_same_each_time(one, other):
    frame = pl.DataFrame({"n": [0, 1, None], "s": ["", "a", None]})
    found = hash_columns(frame, ("n", "s"), one).tolist()
    assert found == hash_columns(frame, ("n", "s"), one).tolist()
    assert (found == hash_columns(frame, ("n", "s"), other).tolist()) == (one == other)


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


@given(
    st.lists(st.integers(0, 3), max_size=60),
    st.sampled_from([0.5, 0.6, 1.0]),
)
def test_a_hash_that_most_have_is_found_with_its_count(values, share):
    hashed = np.array(values, np.uint64)
    counts = {value: values.count(value) for value in values}
    frequent = [(value, n) for value, n in counts.items() if n >= share * len(values)]
    found = frequent_hash(hashed, share)
    assert (found in frequent) if frequent else found is None


def test_of_many_hashes_a_sample_says_whether_one_is_frequent():
    dice = np.random.default_rng(3)
    even = dice.integers(0, 1 << 60, 100_000).astype(np.uint64)
    assert frequent_hash(even, 0.5) is None
    skewed = np.where(dice.random(100_000) < 0.6, np.uint64(7), even)
    value, count = frequent_hash(skewed, 0.5)
    assert (value, count) == (7, (skewed == 7).sum())
