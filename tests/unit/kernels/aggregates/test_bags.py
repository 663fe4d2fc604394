"""Sets of values of groups, against Python's own sets."""

from __future__ import annotations

import random

import numpy as np
import polars as pl
import pytest

from millstream.kernels.aggregates.bags import distinct_values
from millstream.kernels.aggregates.groups import regrouped


@pytest.mark.parametrize(
    ("dtype", "low", "high"),
    [
        (pl.Int8(), -128, 127),
        (pl.Int32(), -3, 3),
        (pl.UInt32(), 0, 2**32 - 1),
        (pl.Int64(), -5, 5),
        (pl.Int64(), -(2**63), -(2**63) + 4),
        (pl.Int64(), 2**63 - 5, 2**63 - 1),
        (pl.Int64(), -(2**63), 2**63 - 1),  # wider than 63 bits
        (pl.UInt64(), 2**63 - 3, 2**63 + 3),
        (pl.Int128(), 2**70, 2**70 + 4),
    ],
    ids=str,
)
def test_whole_numbers_of_any_size_are_sorted_and_once_in_each_group(
    dtype: pl.DataType, low: int, high: int
) -> None:
    dice = random.Random(1)
    for _ in range(20):
        lists = [
            [dice.choice([None, low, high, dice.randint(low, high)]) for _ in range(count)]
            for count in (0, dice.randint(0, 5), 3, 0, dice.randint(0, 5))
        ]
        lengths = np.array([len(one) for one in lists], np.int64)
        values = pl.Series([value for one in lists for value in one], dtype=dtype)
        found = regrouped(*distinct_values(values, lengths))
        assert found.to_list() == [sorted({v for v in one if v is not None}) for one in lists]
        assert found.dtype == pl.List(dtype)


@pytest.mark.parametrize("dtype", [pl.Float64(), pl.Float32(), pl.Int16(), pl.String()], ids=str)
def test_values_that_lie_end_to_end_come_into_lists_with_their_nulls(dtype: pl.DataType) -> None:
    values = pl.Series([1, 2, None, 3]).cast(dtype)
    one, two, _, three = values.to_list()
    found = regrouped(values, np.array([0, 2, 0, 2, 0]))
    assert found.to_list() == [[], [one, two], [], [None, three], []]
    assert found.dtype == pl.List(dtype)
    assert regrouped(values.clear(), np.zeros(0, np.int64)).to_list() == []
