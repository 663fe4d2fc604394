"""The types of NumPy arrays that kernels pass to one another."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Bools = npt.NDArray[np.bool_]
Int64s = npt.NDArray[np.int64]
UInt64s = npt.NDArray[np.uint64]
Float64s = npt.NDArray[np.float64]


def stable_order(numbers: Int64s) -> Int64s:
    """Return the places of numbers in rising order, equal ones as they stand; for numbers of groups: from 0, and not many more than places.

    It sorts number and place as one whole number, which takes a seventh of the time of ``argsort(kind="stable")``
    (62,500 numbers, NumPy 2.3 with AVX-512): a plain sort is vectorised, a stable one of places is not.
    """
    count = len(numbers)
    if not count:
        return np.zeros(0, np.int64)
    assert numbers.min() >= 0, "numbers of groups"
    bits = count.bit_length()
    assert int(numbers.max()) < 1 << (63 - bits), "numbers of groups"
    together = numbers << bits
    together |= np.arange(count)
    together.sort()
    together &= (1 << bits) - 1
    return together


def are_counted_up(numbers: Int64s) -> bool:
    """Return whether numbers are those from 0 on, in their order."""
    ends = not len(numbers) or (numbers[0] == 0 and numbers[-1] == len(numbers) - 1)
    return bool(ends and (numbers[1:] > numbers[:-1]).all())


def first_places(numbers: Int64s) -> Int64s:
    """Return where each number occurs first, for numbers that are counted from 0 in the order of their first places."""
    most = np.maximum.accumulate(numbers)
    return np.flatnonzero(np.diff(most, prepend=-1))
