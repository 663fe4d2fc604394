"""Pairs of rows with equal keys whose times are within an interval: found in one sort.

Rows are not compared with all others of their key, so a frequent key costs as many steps as it has pairs
within the interval, and not the product of its rows.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import polars as pl

from millstream.kernels.arrays import Int64s
from millstream.kernels.frames import HASH, TIME

_LOW, _RIGHT, _HIGH = (
    0,
    1,
    2,
)  # how marks of one hash and time sort, so that both bounds are inclusive


class Pairs(NamedTuple):
    """Pairs of rows by their positions in a left and a right table."""

    left: Int64s
    right: Int64s


def pairs_within(
    left: pl.DataFrame, right: pl.DataFrame, keys: tuple[str, ...], lower_us: int, upper_us: int
) -> Pairs:
    """Return the pairs with equal keys and ``lower <= right time - left time <= upper``.

    The tables have ``__hash``. Null is equal to null.
    """
    candidates = _within(left, right, lower_us, upper_us)
    equal = np.ones(len(candidates.left), np.bool_)
    for key in keys:  # two keys may share a hash
        ours, theirs = left[key].gather(candidates.left), right[key].gather(candidates.right)
        equal &= ours.eq_missing(theirs).to_numpy()
    return candidates if equal.all() else Pairs(candidates.left[equal], candidates.right[equal])


def _within(left: pl.DataFrame, right: pl.DataFrame, lower_us: int, upper_us: int) -> Pairs:
    """Return the pairs with equal hashes whose times are within the interval.

    Each left row marks the beginning and the end of its interval among the right rows, in the order of hash
    and time: its partners are the right rows in between.
    """
    count, of_right = left.height, right.height
    hashes, times = left[HASH].to_numpy(), left[TIME].to_numpy()
    kinds = np.repeat(np.array([_LOW, _RIGHT, _HIGH], np.int8), (count, of_right, count))
    every_time = np.concatenate((times + lower_us, right[TIME].to_numpy(), times + upper_us))
    every_hash = np.concatenate((hashes, right[HASH].to_numpy(), hashes))
    order = np.lexsort((kinds, every_time, every_hash))
    is_right = kinds[order] == _RIGHT
    right_order = order[is_right] - count
    before = np.empty(len(order), np.int64)
    before[order] = np.cumsum(is_right)
    first, end = before[:count], before[count + of_right :]
    partners = end - first
    starts = np.repeat(first - (np.cumsum(partners) - partners), partners)
    return Pairs(
        np.repeat(np.arange(count), partners),
        right_order[starts + np.arange(int(partners.sum()))],
    )
