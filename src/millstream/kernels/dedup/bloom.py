"""Bloom filters as arrays of 64-bit words: size, rate, look-up and insertion.

A filter of m bits and k hashes that holds n ids says "there" for every id that was added, and for
another one with the probability ``(1 - e^(-kn/m))^k``: the rate of false positives. The k places of
an id are found from its 64-bit hash by enhanced double hashing. The bits of an id are anywhere in
the filter, so that this is the rate of the classic filter, with no correction for blocks; a look-up
stops at the first bit that is not set, which for a new id is the second or third.

Sources: Bloom, "Space/Time Trade-offs in Hash Coding with Allowable Errors", CACM 1970; Dillinger
and Manolios, "Bloom Filters in Probabilistic Verification", FMCAD 2004 (enhanced double hashing).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from millstream.kernels.arrays import Bools, UInt64s
from millstream.kernels.state.keyhash import Hashes, mix

WORD_BITS = 64


@dataclass(frozen=True)
class BloomShape:
    """The size of a filter: ``bits`` (whole words of 64) and ``hashes`` per id."""

    bits: int
    hashes: int

    @classmethod
    def for_ids(cls, ids: int, rate: float) -> BloomShape:
        """Return the smallest filter that holds so many ids at the given rate of false positives."""
        assert ids >= 1, ids
        assert 0 < rate < 1, rate
        hashes = max(1, round(-math.log2(rate)))
        bits = bits_for(ids, rate, hashes)
        return cls(-(-math.ceil(bits) // WORD_BITS) * WORD_BITS, hashes)

    @property
    def size_bytes(self) -> int:
        return self.bits // 8

    def rate(self, ids: int) -> float:
        """Return the probability that the filter, holding so many ids, has an id that was not added."""
        return rate_of(self.bits, self.hashes, ids)

    def empty(self) -> UInt64s:
        return np.zeros(self.bits // WORD_BITS, np.uint64)

    def contains(self, words: UInt64s, hashes: Hashes) -> Bools:
        """Return for each hash whether all of its bits are set. Cost: a few reads per hash."""
        there = np.zeros(len(hashes), np.bool_)
        left = np.arange(len(hashes))
        place, stride = hashes, mix(hashes)
        for number in range(self.hashes):
            at = place % np.uint64(self.bits)
            is_set = (words[at >> np.uint64(6)] >> (at & np.uint64(63))) & np.uint64(1) == 1
            left, place, stride = left[is_set], place[is_set], stride[is_set]
            place, stride = _next(place, stride, number)
        there[left] = True
        return there

    def with_added(self, words: UInt64s, hashes: Hashes) -> UInt64s:
        """Return the filter with these hashes added; ``words`` is not changed."""
        words = words.copy()
        for at in self._places(hashes):
            left = at
            while len(left):
                word, bit = left >> np.uint64(6), np.uint64(1) << (left & np.uint64(63))
                words[word] |= bit  # of two ids that set bits of one word, only one is heeded
                left = left[words[word] & bit == 0]
        return words

    def _places(self, hashes: Hashes) -> Iterator[Hashes]:
        place, stride = hashes, mix(hashes)
        for number in range(self.hashes):
            yield place % np.uint64(self.bits)
            place, stride = _next(place, stride, number)


def _next(place: Hashes, stride: Hashes, number: int) -> tuple[Hashes, Hashes]:
    return place + stride, stride + np.uint64(number + 1)


def rate_of(bits: float, hashes: int, ids: float) -> float:
    """Return the rate of false positives of a filter: ``(1 - e^(-kn/m))^k``."""
    return float(-math.expm1(-hashes * ids / bits)) ** hashes


def bits_for(ids: float, rate: float, hashes: int) -> float:
    """Return the bits with which a filter of so many hashes holds the ids at the rate."""
    return -hashes * ids / math.log1p(-(rate ** (1 / hashes)))


def combined_rate(rates: Iterator[float]) -> float:
    """Return the probability that at least one of several filters is wrong."""
    return -math.expm1(sum(math.log1p(-min(rate, 1 - 1e-15)) for rate in rates))
