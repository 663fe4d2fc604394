"""Random numbers that stay the same for ever: a pure function of a seed, a purpose and a number.

What is stopped today goes on exactly after an upgrade, because unlike a library's generator this one
cannot change with a version.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

FloatArray: TypeAlias = NDArray[np.float64]
IntArray: TypeAlias = NDArray[np.int64]


def uniform(seed: int, purpose: str, count: int) -> FloatArray:
    """Return ``count`` numbers in [0, 1), the same for ever for a seed and a purpose.

    SplitMix64 over a counter. Source: Steele, Lea, Flood, "Fast Splittable Pseudorandom Number
    Generators" (2014).
    """
    name = int.from_bytes(purpose.encode(), "little")
    assert name < 2**64, purpose
    counter = np.arange(1, count + 1, dtype=np.uint64)
    start = _mixed(np.array([seed % 2**64], np.uint64) ^ _mixed(np.array([name], np.uint64)))
    mixed = _mixed(start + counter * np.uint64(0x9E3779B97F4A7C15))
    return (mixed >> np.uint64(11)).astype(np.float64) / 2.0**53


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def uniform_integers(limits: tuple[int, int], drawn: FloatArray) -> IntArray:
    """Spread numbers in [0, 1) over the whole numbers of a half-open range."""
    low, high = limits
    return low + (drawn * (high - low)).astype(np.int64)


def skewed(drawn: FloatArray, size: int) -> IntArray:
    """Choose among ``size`` things, the first ones most often: half of the draws take an eighth.

    A cube, unlike a power law, comes out the same to the last bit on every machine.
    """
    return (drawn * drawn * drawn * size).astype(np.int64)
