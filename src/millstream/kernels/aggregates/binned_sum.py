"""Sums of floats that do not depend on the order or the grouping of what is added.

Every value is cut into digits to the base 2^30, at places that are the same for all values; a sum
keeps, as whole numbers, the sums of the digits at the three highest places that its largest value
reaches. Whole numbers add exactly, and which places are kept depends on the largest value alone, so
the same values give the same sum in any order, to the last bit.

What is lost are digits below the three places: at most 2^-60 of the largest value's magnitude per
value added, which is 128 times less than what adding in a float may lose at each step. The result is
rounded once. It holds for up to 2^33 values per key. A value that is taken back goes, but the places
that it needed stay.

Source: J. Demmel and H. D. Nguyen, "Parallel Reproducible Summation", IEEE Transactions on Computers
64(7), 2015 (binned sums, with bins of whole numbers in place of their floats).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import polars as pl

from millstream.kernels.aggregates.groups import (
    Lengths,
    flat,
    over_groups,
    over_rows,
    reduced,
    without_nulls,
)

DIGIT_BITS = 30
_BASE = 2.0**DIGIT_BITS
PLACE_MIN = -40  # below the place of the smallest float above zero, which is -36
_MASK = (1 << DIGIT_BITS) - 1
_HIGH = pl.Series([1 << 2 * DIGIT_BITS], dtype=pl.Int128)

STATE = pl.Struct(
    {
        "place": pl.Int64,  # the highest place, as a power of 2^30
        "high": pl.Int64,  # the sums of the digits at that place ...
        "middle": pl.Int64,  # ... the one below ...
        "low": pl.Int64,  # ... and the next
        "special": pl.Float64,  # the sum of the values that are infinite or not a number
    }
)

Floats = npt.NDArray[np.float64]
Whole = npt.NDArray[np.int64]


def partial(value: pl.Expr) -> pl.Expr:
    """Add up the floats of a group; nulls are left out."""
    return over_groups(value.cast(pl.Float64), _added, STATE)


def merge(column: pl.Expr) -> pl.Expr:
    """Add up the sums of a key."""
    return over_groups(column, _merged, STATE)


def total(column: pl.Expr) -> pl.Expr:
    """Give the sum as a float."""
    return over_rows(column, _total, pl.Float64())


def _added(lists: pl.Series) -> pl.Series:
    series, lengths = without_nulls(*flat(lists))
    values: Floats = series.to_numpy()
    special = np.zeros(len(lengths))
    finite = np.isfinite(values)
    if not finite.all():
        with np.errstate(invalid="ignore"):  # infinity less infinity is not a number, as it should
            special = reduced(np.add, np.where(finite, 0.0, values), lengths, 0.0)
        values = np.where(finite, values, 0.0)
    places = places_of(reduced(np.maximum, np.abs(values), lengths, 0.0))
    digits = digits_of(values, places, lengths)
    return _state(places, [reduced(np.add, digit, lengths, 0) for digit in digits], special)


def places_of(largest: Floats) -> Whole:
    """Give the place of the highest digit of each group's largest magnitude."""
    _, exponents = np.frexp(largest)
    places = (exponents.astype(np.int64) - 1) // DIGIT_BITS
    return np.where(largest > 0, places, PLACE_MIN)


def digits_of(values: Floats, places: Whole, lengths: Lengths) -> list[Whole]:
    """Cut each value into its digits at the place of its group and the two below."""
    # Half of the power at a time: the whole of it may be beyond what a float holds.
    half = np.ldexp(1.0, (-DIGIT_BITS // 2) * places)
    if len(half) and (half == half[0]).all():
        rest = values * half[0] * half[0]
    else:
        each = np.repeat(half, lengths)
        rest = values * each
        rest *= each
    digits = []
    for _ in range(2):
        digit = rest.astype(np.int64)  # towards zero, so the rest is exact
        digits.append(digit)
        rest -= digit
        rest *= _BASE
    return [*digits, rest.astype(np.int64)]


def _merged(lists: pl.Series) -> pl.Series:
    parts, lengths = flat(lists)
    fields = {name: parts.struct.field(name).to_numpy() for name in ("place", "special")}
    digits = [parts.struct.field(name).to_numpy() for name in ("high", "middle", "low")]
    places = reduced(np.maximum, fields["place"], lengths, PLACE_MIN)
    shift = np.repeat(places, lengths) - fields["place"]
    aligned = [
        np.choose(np.minimum(shift, 3), [*reversed(digits[: at + 1]), *[np.int64(0)] * (3 - at)])
        for at in range(3)
    ]
    with np.errstate(invalid="ignore"):
        special = reduced(np.add, fields["special"], lengths, 0.0)
    return _state(places, [reduced(np.add, digit, lengths, 0) for digit in aligned], special)


def _state(places: Whole, digits: list[Whole], special: Floats) -> pl.Series:
    high, middle, low = digits
    columns = {"place": places, "high": high, "middle": middle, "low": low, "special": special}
    return pl.DataFrame(columns, schema=dict(STATE)).to_struct("")


def _total(states: pl.Series) -> pl.Series:
    table = states.struct.unnest()
    middle = table["middle"].to_numpy() + (table["low"].to_numpy() >> DIGIT_BITS)
    low = table["low"].to_numpy() & _MASK
    high = table["high"].to_numpy() + (middle >> DIGIT_BITS)
    below = ((middle & _MASK) << DIGIT_BITS) | low
    whole = pl.Series(high).cast(pl.Int128) * _HIGH + pl.Series(below).cast(pl.Int128)
    rounded = whole.cast(pl.Float64).to_numpy()
    with np.errstate(over="ignore"):  # a sum beyond the largest float is infinite
        sums = np.ldexp(rounded, DIGIT_BITS * (table["place"].to_numpy() - 2))
    special = table["special"].to_numpy()
    return pl.Series(np.where(special == 0.0, sums, special), dtype=pl.Float64)
