"""Exact sums of floats, in digits: whole numbers that add in any order, and can be retracted.

Every float is a few digits to the base 2^30, at places that are the same for all floats. A sum keeps
the sums of the digits, as whole numbers, from its highest place downwards: a fixed number of them in
columns (``top``), which is where nearly all sums of one size of number end, and what lies below in
``more``, as many as there are, which is at most 75. Nothing is lost, so a retraction removes its value
exactly.

Sums that fit into their columns are added column by column. The others are *gathered*: digit by digit,
then made *tidy*, which means digits of one sign, each below the base, without zeros at either end. Only
tidy sums have anything in ``more``.

Source: R. M. Neal, "Fast Exact Summation Using Small and Large Superaccumulators", arXiv 1505.05571,
2015 (all places at once, where here only those are kept that a sum uses); J. Demmel and H. D. Nguyen,
"Parallel Reproducible Summation", IEEE Transactions on Computers 64(7), 2015 (the columns).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise

import numpy as np

from millstream.kernels.aggregates.groups import Lengths, numbered, reduced
from millstream.kernels.arrays import Bools, Float64s, Int64s

DIGIT_BITS = 30
PLACE_MIN = -80  # of a sum of nothing; below the place of the square of the smallest float
OWN_DIGITS = 3  # 53 bits, wherever they begin, lie in so many
_BASE = 2.0**DIGIT_BITS
DIGIT_MASK = (1 << DIGIT_BITS) - 1
_LARGE = 1 << 48  # the sums of digits in state are smaller, so that 2^14 of them can be added
_PARTS_MAX = 1 << 14
_TINY = 2.0**-900  # what is scaled to less may have lost bits
_GATHERED = 4096  # sums that are gathered at a time
_CARRIES = 3  # places for what sums of 63 bits carry


@dataclass(frozen=True)
class Entries:
    """Digits to be added up: of which sum each is, at which place, as a power of the base."""

    sums: Int64s
    places: Int64s
    digits: Int64s

    @classmethod
    def together(cls, parts: Sequence[Entries]) -> Entries:
        return cls(
            np.concatenate([part.sums for part in parts]),
            np.concatenate([part.places for part in parts]),
            np.concatenate([part.digits for part in parts]),
        )


@dataclass(frozen=True)
class Superaccumulators:
    """Sums: the highest place of each, its digits from there on, and those below, end to end."""

    places: Int64s
    top: list[Int64s]
    more: Int64s
    more_lengths: Lengths

    @classmethod
    def short(cls, places: Int64s, top: list[Int64s]) -> Superaccumulators:
        """Make sums with nothing below their columns."""
        return cls(places, top, np.empty(0, np.int64), np.zeros(len(places), np.int64))

    def entries(self, which: Bools) -> Entries:
        """Return the digits of some of the sums."""
        at = np.flatnonzero(which)
        parts = [Entries(at, self.places[at] - n, top[at]) for n, top in enumerate(self.top)]
        of = numbered(self.more_lengths)
        if len(of):
            first = np.cumsum(self.more_lengths) - self.more_lengths
            below = self.places[of] - len(self.top) - (np.arange(len(of)) - first[of])
            mine = which[of]
            parts.append(Entries(of[mine], below[mine], self.more[mine]))
        return Entries.together(parts)

    def replaced(self, which: Bools, by: Superaccumulators) -> Superaccumulators:
        """Put other sums, in their order, in the place of some."""
        places, more_lengths = self.places.copy(), self.more_lengths.copy()
        places[which], more_lengths[which] = by.places, by.more_lengths
        top = [digits.copy() for digits in self.top]
        for mine, its in zip(top, by.top, strict=True):
            mine[which] = its
        kept = ~which[numbered(self.more_lengths)]
        more = np.empty(int(more_lengths.sum()), np.int64)
        its_places = which[numbered(more_lengths)]
        more[its_places], more[~its_places] = by.more, self.more[kept]
        return Superaccumulators(places, top, more, more_lengths)

    def small(self) -> Superaccumulators:
        """Make those tidy whose digits have grown large."""
        large = np.zeros(len(self.places), np.bool_)
        for digits in self.top:
            large |= np.abs(digits) >= _LARGE
        return self.tidied(large) if large.any() else self

    def wholes(self) -> Iterator[tuple[int, int]]:
        """Return each sum as a whole number, and the place that it counts from."""
        below = iter(self.more.tolist())
        columns = zip(*(digits.tolist() for digits in self.top), strict=True)
        rows = zip(self.places.tolist(), columns, self.more_lengths.tolist(), strict=True)
        for place, top, length in rows:
            whole = 0
            for digit in (*top, *islice(below, length)):
                whole = (whole << DIGIT_BITS) + digit
            yield whole, place - len(top) - length + 1

    def tidied(self, which: Bools) -> Superaccumulators:
        """Make some of the sums tidy."""
        return self.replaced(which, gathered(self.entries(which), which, len(self.top)))


def place_of(magnitudes: Float64s) -> Int64s:
    """Return the place of the highest digit of each."""
    _, exponents = np.frexp(magnitudes)
    places = (exponents.astype(np.int64) - 1) // DIGIT_BITS
    return np.where(magnitudes > 0, places, PLACE_MIN)


def own_digits(values: Float64s) -> tuple[Int64s, list[Int64s]]:
    """Cut each value into all its digits; give the place of the highest of them as well."""
    places = place_of(np.abs(values))
    digits, _ = _cut(values, places, OWN_DIGITS)
    return places, digits + [np.zeros(len(values), np.int64)] * (OWN_DIGITS - len(digits))


def _cut(values: Float64s, places: Int64s, count: int) -> tuple[list[Int64s], Bools | None]:
    """Cut values into as many digits, from a place on, as they have, and no more than so many.

    Say also of which values these may not be all digits; None: they are, for all.
    """
    # Half of the power at a time: the whole of it may be beyond what a float holds.
    half = np.ldexp(1.0, (-DIGIT_BITS // 2) * np.maximum(places, -36))  # no float begins below
    one = len(half) > 0 and bool((half == half[0]).all())
    scale = half[0] if one else half
    rest = values * scale
    rest *= scale
    small = (np.abs(rest) < _TINY) & (values != 0.0) if (half < 1.0).any() else None
    digits: list[Int64s] = []
    while len(digits) < count:
        digit = rest.astype(np.int64)  # towards zero, so the rest is exact
        digits.append(digit)
        rest -= digit
        if not rest.any():
            return digits, small if small is not None and small.any() else None
        rest *= _BASE
    left = rest != 0.0
    return digits, left if small is None else left | small


def added(
    parts: Sequence[Float64s], lengths: Lengths, width: int, unfit: Bools | None = None
) -> tuple[Superaccumulators, Bools]:
    """Add floats up, group by group; each row is worth what the parts say for it together.

    The first part is the largest, and each of the others below the place of the one before.

    Say also which sums do not fit into their columns, or have a row that is said to be unfit: what is
    given of those is of no use.
    """
    largest = reduced(np.maximum, np.abs(parts[0]), lengths, 0.0)
    places = place_of(largest)
    each = places[:1] if (places == places[:1]).all() else np.repeat(places, lengths)
    top = [np.zeros(len(lengths), np.int64) for _ in range(width)]
    unfits = [] if unfit is None else [unfit]
    for n, values in enumerate(parts):
        digits, left = _cut(values, each - n, width - n)
        for column, digit in enumerate(digits, start=n):
            top[column] += reduced(np.add, digit, lengths, 0)
        if left is not None:
            unfits.append(left)
    wide = np.zeros(len(lengths), np.bool_)
    for rows in unfits:
        if rows.any():
            wide |= reduced(np.logical_or, rows, lengths, empty=False)
    return Superaccumulators.short(places, top).small(), wide


def merged(sums: Superaccumulators, lengths: Lengths) -> Superaccumulators:
    """Make one sum of those of each group, which stand one behind the other."""
    if lengths.max(initial=0) > _PARTS_MAX:
        sums = sums.tidied(np.ones(len(sums.places), np.bool_))
    places = reduced(np.maximum, sums.places, lengths, PLACE_MIN)
    shift = np.repeat(places, lengths) - sums.places
    wide_parts = sums.more_lengths > 0
    top = sums.top
    if shift.any():
        top, lost = _shifted(top, shift)
        wide_parts |= lost
    whole = Superaccumulators.short(places, [reduced(np.add, digits, lengths, 0) for digits in top])
    if wide_parts.any():
        wide = reduced(np.logical_or, wide_parts, lengths, empty=False)
        own = sums.entries(np.repeat(wide, lengths))
        entries = Entries(numbered(lengths)[own.sums], own.places, own.digits)
        whole = whole.replaced(wide, gathered(entries, wide, len(top)))
    return whole.small()


def _shifted(top: list[Int64s], shift: Int64s) -> tuple[list[Int64s], Bools]:
    """Move digits to the columns of higher places; say where some found none."""
    width = len(top)
    moved = [digits.copy() for digits in top]
    lost = np.zeros(len(shift), np.bool_)
    for by in range(1, int(shift.max()) + 1):
        rows = np.flatnonzero(shift == by if by < width else shift >= by)
        if not len(rows):
            continue
        for n in range(width):
            moved[n][rows] = top[n - by][rows] if n >= by else 0
        for digits in top[max(0, width - by) :]:
            lost[rows] |= digits[rows] != 0
        if by >= width:
            break
    return moved, lost


def gathered(entries: Entries, which: Bools, width: int) -> Superaccumulators:
    """Add up the digits of some sums, and make them tidy; give those sums alone."""
    count = int(which.sum())
    order = np.argsort(entries.sums, kind="stable")
    at = (np.cumsum(which) - 1)[entries.sums[order]]
    starts = np.searchsorted(at, np.arange(0, count + _GATHERED, _GATHERED))
    parts = [
        _tidy(
            at[start:end] - n * _GATHERED,
            entries.places[order[start:end]],
            entries.digits[order[start:end]],
            min(_GATHERED, count - n * _GATHERED),
            width,
        )
        for n, (start, end) in enumerate(pairwise(starts.tolist()))
    ]
    return Superaccumulators(
        np.concatenate([part.places for part in parts]),
        [np.concatenate([part.top[n] for part in parts]) for n in range(width)],
        np.concatenate([part.more for part in parts]),
        np.concatenate([part.more_lengths for part in parts]),
    )


def _tidy(at: Int64s, places: Int64s, digits: Int64s, count: int, width: int) -> Superaccumulators:
    """Add up digits by sum and place; a row of the table is a sum, a column a place, falling."""
    highest = int(places.max(initial=PLACE_MIN)) + _CARRIES
    span = highest - int(places.min(initial=highest)) + 1
    table = np.zeros((count, span + width), np.int64)
    np.add.at(table, (at, highest - places), digits)
    used = table[:, :span]
    _carry(used)
    sign = np.where(used[:, 0] < 0, -1, 1)
    used *= sign[:, None]
    _carry(used)
    filled = used != 0
    nothing = ~filled.any(axis=1)
    first = np.where(nothing, 0, filled.argmax(axis=1))
    last = np.where(nothing, -1, span - 1 - filled[:, ::-1].argmax(axis=1))
    rows = np.arange(count)
    top = [table[rows, first + n] * sign for n in range(width)]
    columns = np.arange(span)
    below = (columns >= (first + width)[:, None]) & (columns <= last[:, None])
    lengths = np.maximum(last - first - width + 1, 0)
    more = used[below] * np.repeat(sign, lengths)
    return Superaccumulators(np.where(nothing, PLACE_MIN, highest - first), top, more, lengths)


def _carry(table: Int64s) -> None:
    """Bring all digits but the highest into ``[0, 2^30)``; the sums do not change."""
    for column in range(table.shape[1] - 1, 0, -1):
        table[:, column - 1] += table[:, column] >> DIGIT_BITS
        table[:, column] &= DIGIT_MASK
