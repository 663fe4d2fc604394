"""Variance and standard deviation, exact and rounded once, whatever the order and grouping.

Kept are the count, the sum and the sum of the squares of the values, as floats, both sums exact (see
:mod:`.exact_sum`): they merge exactly and can be retracted exactly, and the sum of squares less the
square of the sum is computed from them without rounding, so nothing cancels however far the mean is
from zero.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import polars as pl

from millstream.kernels.aggregates import exact_sum
from millstream.kernels.aggregates.groups import over_groups, over_rows
from millstream.kernels.aggregates.protocol import OverValue, TypeOf, checked_type, is_number
from millstream.kernels.aggregates.superaccumulator import (
    DIGIT_BITS,
    DIGIT_MASK,
    OWN_DIGITS,
    added,
    gathered,
    own_digits,
)
from millstream.kernels.arrays import Float64s, Int64s
from millstream.kernels.frames import DIFF

_WIDTH = 6  # a square has 106 bits
_SQUARES = exact_sum.state(_WIDTH)
_SPLIT = 2.0**27 + 1
_SMALLEST, _LARGEST = 2.0**-480, 2.0**500  # between these a square is two floats


@dataclass(frozen=True)
class Variance(OverValue):
    """The variance, or its root, over the rows that have a value; as a float.

    Null where no row has a value and, for a sample, where only one has. Not a number where a value
    is infinite or not a number.
    """

    sample: bool = True
    root: bool = False
    signed: bool = False

    def bound(self, name: str, type_of: TypeOf) -> Variance:
        checked_type(name, self.value, type_of, is_number, "numbers and Decimals")
        return self

    def for_retractions(self) -> Variance:
        return replace(self, signed=True)

    def partial(self, name: str) -> list[pl.Expr]:
        value = self.value.cast(pl.Float64)
        weight = pl.col(DIFF).cast(pl.Int64) if self.signed else pl.lit(1, pl.Int64)
        negative = pl.col(DIFF) < 0 if self.signed else None
        rows = value if negative is None else exact_sum.changes(value, negative)
        return [
            pl.when(value.is_not_null()).then(weight).sum().alias(f"{name}.count"),
            over_groups(rows, exact_sum.summed, exact_sum.STATE).alias(f"{name}.floats"),
            over_groups(rows, _squared, _SQUARES).alias(f"{name}.squares"),
        ]

    def merge(self, name: str) -> list[pl.Expr]:
        return [
            pl.col(f"{name}.count").sum(),
            exact_sum.merge(pl.col(f"{name}.floats")),
            exact_sum.merge(pl.col(f"{name}.squares"), _WIDTH),
        ]

    def result(self, name: str) -> pl.Expr:
        state = pl.struct(
            pl.col(f"{name}.{part}").alias(part) for part in ("count", "floats", "squares")
        )
        return over_rows(state, self._read, pl.Float64()).alias(name)

    def _read(self, states: pl.Series) -> pl.Series:
        sums, odd = exact_sum.read(states.struct.field("floats"), exact_sum.WIDTH)
        squares, _ = exact_sum.read(states.struct.field("squares"), _WIDTH)
        counts = states.struct.field("count").to_list()
        none = [False] * len(counts) if odd is None else [any(kinds) for kinds in odd.tolist()]
        rows = zip(counts, none, sums.wholes(), squares.wholes(), strict=True)
        results = [
            math.nan if none and count > (1 if self.sample else 0) else self._result(count, *sums)
            for count, none, *sums in rows
        ]
        return pl.Series(results, dtype=pl.Float64)

    def _result(self, count: int, total: tuple[int, int], squares: tuple[int, int]) -> float | None:
        degrees = count - 1 if self.sample else count
        if degrees <= 0:
            return None
        (sum_, at), (square, square_at) = total, squares
        lowest = min(2 * at, square_at)
        above = count * (square << DIGIT_BITS * (square_at - lowest))
        above -= (sum_ * sum_) << DIGIT_BITS * (2 * at - lowest)
        return _quotient(above, count * degrees, DIGIT_BITS * lowest, root=self.root)


def _quotient(above: int, below: int, exponent: int, *, root: bool) -> float:
    """Return ``above / below * 2**exponent``, or its root; Python rounds a quotient once."""
    if exponent > 0:
        above <<= exponent
    else:
        below <<= -exponent
    half = (above.bit_length() - below.bit_length()) // 2 if root else 0
    try:
        if not root:
            return above / below
        if half > 0:
            below <<= 2 * half
        else:
            above <<= -2 * half
        return math.ldexp(math.sqrt(above / below), half)
    except OverflowError:
        return math.inf


def _squared(lists: pl.Series) -> pl.Series:
    """Add up the squares of values, each as the two floats that it is equal to."""
    values, signs, lengths = exact_sum.rows_of(lists)
    values = np.where(np.isfinite(values), values, 0.0)
    magnitudes = np.abs(values)
    beyond = (magnitudes > _LARGEST) | ((magnitudes < _SMALLEST) & (values != 0.0))
    parts = _two_floats(np.where(beyond, 0.0, values))
    signed = parts if signs is None else [part * signs for part in parts]
    sums, wide = added(signed, lengths, _WIDTH, unfit=beyond)
    if wide.any():
        mine = np.repeat(wide, lengths)
        digits = _square_digits(values[mine])
        if signs is not None:
            mine_signs = signs[mine].astype(np.int64)
            digits = [(places, digit * mine_signs) for places, digit in digits]
        entries = exact_sum.entries_of(lengths, mine, digits)
        sums = sums.replaced(wide, gathered(entries, wide, _WIDTH))
    return exact_sum.written(sums)


def _two_floats(values: Float64s) -> list[Float64s]:
    """Return each square as a float and what rounding took off (Dekker, Numerische Mathematik 18, 1971)."""
    split = values * _SPLIT
    upper = split - (split - values)
    lower = values - upper
    high = values * values
    return [high, ((upper * upper - high) + 2 * upper * lower) + lower * lower]


def _square_digits(values: Float64s) -> list[tuple[Int64s, Int64s]]:
    """Return the digits of each square, with their places, from products of the value's digits."""
    places, digits = own_digits(values)
    found = []
    for i in range(OWN_DIGITS):
        for j in range(i, OWN_DIGITS):
            product = digits[i] * digits[j] * (1 if i == j else 2)  # below 2^61
            at = 2 * places - i - j
            found.append((at + 1, product >> DIGIT_BITS))
            found.append((at, product & DIGIT_MASK))
    return found
