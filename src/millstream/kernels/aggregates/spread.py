"""Variance and standard deviation, exact and rounded once, whatever the order and grouping.

Every value, as a float, is cut into three digits to the base 2^30 (see :mod:`.binned_sum`, which says
what is lost below them). Kept are the sums of the digits and of their products, all as whole numbers:
they merge exactly and can be taken back exactly, and the sum of squares less the square of the sum is
computed from them without rounding, so nothing cancels however far the mean is from zero.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from millstream.kernels.aggregates.binned_sum import DIGIT_BITS, PLACE_MIN, digits_of, places_of
from millstream.kernels.aggregates.groups import (
    Lengths,
    flat,
    kept,
    over_groups,
    over_rows,
    reduced,
)
from millstream.kernels.aggregates.protocol import OverValue, TypeOf, checked_type, is_number
from millstream.kernels.frames import DIFF

# The columns of the state: how many values, how many of them infinite or not a number, the place of
# the highest digit, the sums of the three digits, and those of their six products, each cut in two.
_COUNT, _ODD, _PLACE = 0, 1, 2
_PAIRS = [(0, 0), (0, 1), (0, 2), (1, 1), (1, 2), (2, 2)]
_COLUMNS = 3 + 3 + 2 * len(_PAIRS)
_STATE = pl.Array(pl.Int64, _COLUMNS)
_MASK = (1 << DIGIT_BITS) - 1

Whole = npt.NDArray[np.int64]


def _digit(i: int) -> int:
    return 3 + i


def _product(i: int, j: int) -> int:
    return 6 + 2 * _PAIRS.index((i, j))


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

    def for_changes(self) -> Variance:
        return replace(self, signed=True)

    def partial(self, name: str) -> list[pl.Expr]:
        weight = pl.col(DIFF).cast(pl.Int64) if self.signed else pl.lit(1, pl.Int64)
        rows = pl.struct(self.value.cast(pl.Float64).alias("value"), weight.alias("weight"))
        return [over_groups(rows, _moments, _STATE).alias(f"{name}.moments")]

    def merge(self, name: str) -> list[pl.Expr]:
        return [over_groups(pl.col(f"{name}.moments"), _merged, _STATE)]

    def result(self, name: str) -> pl.Expr:
        return over_rows(pl.col(f"{name}.moments"), self._read, pl.Float64()).alias(name)

    def _read(self, states: pl.Series) -> pl.Series:
        answers = [self._answer(state) for state in states.to_list()]
        return pl.Series(answers, dtype=pl.Float64)

    def _answer(self, state: list[int]) -> float | None:
        count = state[_COUNT]
        degrees = count - 1 if self.sample else count
        if degrees <= 0:
            return None
        if state[_ODD]:
            return math.nan
        base = 1 << DIGIT_BITS
        total = sum(state[_digit(i)] * base ** (2 - i) for i in range(3))
        squares = 0
        for i, j in _PAIRS:
            both = state[_product(i, j)] * base + state[_product(i, j) + 1]
            squares += both * base ** (4 - i - j) * (1 if i == j else 2)
        units = (count * squares - total * total) / (count * degrees)  # Python rounds it once
        exponent = DIGIT_BITS * (state[_PLACE] - 2)
        return _scaled(math.sqrt(units), exponent) if self.root else _scaled(units, 2 * exponent)


def _scaled(number: float, exponent: int) -> float:
    try:
        return math.ldexp(number, exponent)
    except OverflowError:
        return math.inf


def _moments(lists: pl.Series) -> pl.Series:
    rows, lengths = flat(lists)
    rows, lengths = kept(rows, lengths, rows.struct.field("value").is_not_null())
    values = rows.struct.field("value").to_numpy()
    weights = rows.struct.field("weight").to_numpy()
    odd = ~np.isfinite(values)
    values = np.where(odd, 0.0, values)
    places = places_of(reduced(np.maximum, np.abs(values), lengths, 0.0))
    sums = np.zeros((len(lengths), _COLUMNS), np.int64)
    sums[:, _COUNT] = reduced(np.add, weights, lengths, 0)
    sums[:, _ODD] = reduced(np.add, weights * odd, lengths, 0)
    sums[:, _PLACE] = places
    _add_products(sums, digits_of(values, places, lengths), weights, lengths)
    return _state(sums)


def _add_products(sums: Whole, digits: list[Whole], weights: Whole, lengths: Lengths) -> None:
    """Enter the sums of digits and products; most numbers are short, and their low digits zero."""
    used = [bool(digit.any()) for digit in digits]
    weighted = [digit * weights for digit in digits]
    for i in range(3):
        if used[i]:
            sums[:, _digit(i)] = reduced(np.add, weighted[i], lengths, 0)
    for i, j in _PAIRS:
        if used[i] and used[j]:
            product = weighted[i] * digits[j]  # below 2^60
            sums[:, _product(i, j)] = reduced(np.add, product >> DIGIT_BITS, lengths, 0)
            sums[:, _product(i, j) + 1] = reduced(np.add, product & _MASK, lengths, 0)


def _merged(lists: pl.Series) -> pl.Series:
    states, lengths = flat(lists)
    sums: Any = states.to_numpy().reshape(-1, _COLUMNS)
    places = reduced(np.maximum, sums[:, _PLACE], lengths, PLACE_MIN)
    lower = np.repeat(places, lengths) - sums[:, _PLACE]
    aligned = np.zeros_like(sums)
    aligned[:, : _PLACE + 1] = sums[:, : _PLACE + 1]
    for by in range(3):
        rows = lower == by
        for to, source in _moves(by):
            aligned[rows, to] = sums[rows, source]
    out = reduced(np.add, aligned, lengths, 0)
    out[:, _PLACE] = places
    return _state(out)


def _moves(by: int) -> list[tuple[int, int]]:
    """Say which columns go where when the highest place rises: digits below the third drop out."""
    moves = [(_digit(i + by), _digit(i)) for i in range(3 - by)]
    for i, j in _PAIRS:
        if j + by < 3:
            to, source = _product(i + by, j + by), _product(i, j)
            moves += [(to, source), (to + 1, source + 1)]
    return moves


def _state(sums: Whole) -> pl.Series:
    return pl.Series(values=sums, dtype=_STATE)
