"""Pairs within an interval, against trying all pairs; also where keys share their hash."""

import numpy as np
import polars as pl
from example_counts import some
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.kernels.frames import HASH, TIME
from millstream.kernels.joins.interval_pairs import pairs_within

ROWS = st.lists(st.tuples(st.sampled_from(["a", "b", "c", None]), st.integers(-5, 20)), max_size=30)


def table(rows):
    schema = {"key": pl.String, TIME: pl.Int64}
    made = pl.DataFrame(rows, schema=schema, orient="row")
    # "a" and "b" share a hash.
    hashes = [{"a": 1, "b": 1, "c": 2**64 - 1, None: 0}[key] for key, _ in rows]
    return made.hstack([pl.Series(HASH, np.array(hashes, np.uint64))])


@settings(max_examples=some(200))
@given(ROWS, ROWS, st.integers(-6, 6), st.integers(0, 8))
def test_the_pairs_are_those_that_trying_all_of_them_gives(left, right, lower, width):
    found = pairs_within(table(left), table(right), ("key",), lower, lower + width)
    expected = [
        (one, other)
        for one, (key, at) in enumerate(left)
        for other, (its_key, its_at) in enumerate(right)
        if key == its_key and lower <= its_at - at <= lower + width
    ]
    assert sorted(zip(found.left.tolist(), found.right.tolist(), strict=True)) == expected


def test_a_frequent_key_costs_its_pairs_within_the_interval():
    times = [(("a"), at) for at in range(100_000)]
    found = pairs_within(table(times), table(times), ("key",), 1, 2)
    assert len(found.left) == 2 * 100_000 - 3
