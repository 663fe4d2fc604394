"""Sums of floats that are exact and rounded once, whatever was added, in any order, and retracted.

The state is made of digits (see :mod:`.digits`). Values that are infinite or not a number are counted,
and the sum is what IEEE 754 makes of those that are there. A sum is never -0.0.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import polars as pl
import pyarrow as pa

from millstream.kernels.aggregates.groups import (
    Lengths,
    flat,
    kept,
    numbered,
    over_groups,
    over_rows,
    reduced,
    without_nulls,
)
from millstream.kernels.aggregates.superaccumulator import (
    DIGIT_BITS,
    DIGIT_MASK,
    Entries,
    Superaccumulators,
    added,
    gathered,
    merged,
    own_digits,
)
from millstream.kernels.arrays import Bools, Float64s, Int64s

WIDTH = 4
_ODD = 3  # of what is not a number, of inf and of -inf
_FITS = 1 << 34  # a highest digit below leaves room in 128 bits for those of all columns
_TWO_DIGITS = pl.Series([1 << 2 * DIGIT_BITS], dtype=pl.Int128)


def state(width: int) -> pl.Struct:
    """Return the type of sums with so many columns of digits.

    ``more`` is empty for most; else it has the counts of values that are infinite or not a number,
    and the digits below the columns.
    """
    columns = {f"d{n}": pl.Int64() for n in range(width)}
    return pl.Struct({"place": pl.Int64(), **columns, "more": pl.List(pl.Int64)})


STATE = state(WIDTH)


def partial(value: pl.Expr, negative: pl.Expr | None) -> pl.Expr:
    """Add up the floats of a group, or take them off; nulls are left out."""
    floats = value.cast(pl.Float64)
    rows = floats if negative is None else changes(floats, negative)
    return over_groups(rows, summed, STATE)


def changes(floats: pl.Expr, negative: pl.Expr) -> pl.Expr:
    """Pair values with whether they are retracted, as :func:`rows_of` reads them."""
    return pl.struct(floats.alias("value"), negative.alias("negative"))


def merge(column: pl.Expr, width: int = WIDTH) -> pl.Expr:
    """Put the sums of a key together."""
    return over_groups(column, lambda lists: _merged(lists, width), state(width))


def total(column: pl.Expr) -> pl.Expr:
    """Return the sum as a float."""
    return over_rows(column, _total, pl.Float64())


def summed(lists: pl.Series) -> pl.Series:
    """Make the state of each group's values."""
    values, signs, lengths = rows_of(lists)
    values, odd = _finite(values, signs, lengths)
    sums, wide = added([values], lengths, WIDTH)
    if wide.any():
        mine = np.repeat(wide, lengths)
        places, digits = own_digits(values[mine])
        own = [(places - n, digit) for n, digit in enumerate(digits)]
        sums = sums.replaced(wide, gathered(entries_of(lengths, mine, own), wide, WIDTH))
    return written(sums, odd)


def rows_of(lists: pl.Series) -> tuple[Float64s, Float64s | None, Lengths]:
    """Return the values end to end without nulls, the sign of each (None: they are added), and lengths."""
    rows, lengths = flat(lists)
    if not rows.dtype.is_nested():
        values, lengths = without_nulls(rows, lengths)
        return values.to_numpy(), None, lengths
    rows, lengths = kept(rows, lengths, rows.struct.field("value").is_not_null())
    signs = np.where(rows.struct.field("negative").to_numpy(), -1.0, 1.0)
    return rows.struct.field("value").to_numpy(), signs, lengths


def entries_of(lengths: Lengths, rows: Bools, digits: Sequence[tuple[Int64s, Int64s]]) -> Entries:
    """Enter the digits of some rows, each with its place, for the groups of the rows."""
    groups = numbered(lengths)[rows]
    return Entries.together([Entries(groups, places, digit) for places, digit in digits])


def _finite(
    values: Float64s, signs: Float64s | None, lengths: Lengths
) -> tuple[Float64s, Int64s | None]:
    """Return the values with their signs, and zero for those that are no finite number, which are counted."""
    good = np.isfinite(values)
    odd = None
    if not good.all():
        kinds = (np.isnan(values), values == np.inf, values == -np.inf)
        counted = np.stack(kinds, axis=1).astype(np.int64)
        if signs is not None:
            counted *= signs.astype(np.int64)[:, None]
        odd = reduced(np.add, counted, lengths, 0)
        values = np.where(good, values, 0.0)
    return (values if signs is None else values * signs), odd


def _merged(lists: pl.Series, width: int) -> pl.Series:
    parts, lengths = flat(lists)
    sums, odd = read(parts, width)
    whole = merged(sums, lengths)
    return written(whole, None if odd is None else reduced(np.add, odd, lengths, 0))


def _total(states: pl.Series) -> pl.Series:
    sums, odd = read(states, WIDTH)
    totals = _rounded(sums)
    if odd is not None:
        nan, plus, minus = (odd[:, n] > 0 for n in range(_ODD))
        totals = np.where(plus, np.inf, np.where(minus, -np.inf, totals))
        totals = np.where(nan | (plus & minus), np.nan, totals)
    return pl.Series(totals, dtype=pl.Float64)


def _rounded(sums: Superaccumulators) -> Float64s:
    """Round each sum to the nearest float: once, as there is a bit for all that is not looked at."""
    high, middle, low, lowest = (digits.copy() for digits in sums.top)
    low += lowest >> DIGIT_BITS
    middle += low >> DIGIT_BITS
    high += middle >> DIGIT_BITS
    upper = ((middle & DIGIT_MASK) << DIGIT_BITS) | (low & DIGIT_MASK)
    lowest &= DIGIT_MASK
    fits = np.abs(high) < _FITS
    shift = np.where(fits, DIGIT_BITS, 1)
    lower = np.where(fits, lowest, lowest != 0)
    whole = pl.Series(high).cast(pl.Int128) * _TWO_DIGITS + pl.Series(upper).cast(pl.Int128)
    whole = whole * pl.Series(2 << shift).cast(pl.Int128)
    whole += pl.Series(2 * lower + _below(sums)).cast(pl.Int128)
    with np.errstate(over="ignore"):  # a sum beyond the largest float is infinite
        exponents = DIGIT_BITS * (sums.places - 2) - shift - 1
        found: Float64s = np.ldexp(whole.cast(pl.Float64).to_numpy(), exponents)
    return found


def _below(sums: Superaccumulators) -> Int64s:
    """Return the sign of what lies below the columns."""
    signs = np.zeros(len(sums.places), np.int64)
    there = sums.more_lengths > 0
    if there.any():
        first = (np.cumsum(sums.more_lengths) - sums.more_lengths)[there]
        # The digits have one sign, and the last of them is not zero.
        signs[there] = np.sign(sums.more[first + sums.more_lengths[there] - 1])
    return signs


# ── in tables ───────────────────────────────────────────────────────────────────────────────────


def written(sums: Superaccumulators, odd: Int64s | None = None) -> pl.Series:
    """Write sums, and the counts of what is no finite number, as a column."""
    columns: dict[str, pl.Series] = {"place": pl.Series(sums.places)}
    columns |= {f"d{n}": pl.Series(digits) for n, digits in enumerate(sums.top)}
    long = sums.more_lengths > 0
    if odd is not None:
        long = long | odd.any(axis=1)
    lengths = np.where(long, sums.more_lengths + _ODD, 0)
    values = np.zeros(int(lengths.sum()), np.int64)
    if len(values):
        heads = (np.cumsum(lengths) - lengths)[long][:, None] + np.arange(_ODD)
        is_head = np.zeros(len(values), np.bool_)
        is_head[heads] = True
        values[heads] = 0 if odd is None else odd[long]
        values[~is_head] = sums.more
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]), pa.int64())
    lists = pa.LargeListArray.from_arrays(offsets, pa.array(values, pa.int64()))
    columns["more"] = pl.Series(lists, dtype=pl.List(pl.Int64))
    return pl.DataFrame(columns).to_struct("")


def read(states: pl.Series, width: int) -> tuple[Superaccumulators, Int64s | None]:
    """Read what :func:`written` wrote; None: everything was a finite number."""
    top = [states.struct.field(f"d{n}").to_numpy() for n in range(width)]
    places = states.struct.field("place").to_numpy()
    values, lengths = flat(states.struct.field("more"))
    if not len(values):
        return Superaccumulators.short(places, top), None
    every = values.to_numpy()
    long = lengths > 0
    heads = (np.cumsum(lengths) - lengths)[long][:, None] + np.arange(_ODD)
    odd = np.zeros((len(places), _ODD), np.int64)
    odd[long] = every[heads]
    is_head = np.zeros(len(every), np.bool_)
    is_head[heads] = True
    sums = Superaccumulators(places, top, every[~is_head], np.where(long, lengths - _ODD, 0))
    return sums, odd if odd.any() else None
