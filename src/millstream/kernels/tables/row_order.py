"""The order of the rows of groups, and their ranks: SQL's row_number, rank and dense_rank.

Rows are sorted by one number: its high bits are of the hash of the group, the low ones say where the first
column's value is between the least and the greatest. Only rows that are equal in it are compared by more columns.
Two groups may share these bits: the groups' own columns are compared between neighbours, and if they differ,
rows are sorted by the groups themselves.

What is not a number is behind all numbers, and null behind that, whichever the direction.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import polars as pl

from millstream.kernels.arrays import Bools, Int64s, UInt64s
from millstream.kernels.changes import group_numbers
from millstream.kernels.column_types import of_one_zero
from millstream.kernels.frames import HASH, TIME
from millstream.kernels.state.hash_order import differs_from_previous
from millstream.kernels.state.keyhash import Hashes

Ties = Literal["row_number", "rank", "dense_rank"]

_BITS = 64
_BEHIND_BITS = 2
_SPARE_BITS = 4  # there are fewer groups than rows
_SIGN = np.uint64(1 << 63)
_NAN, _NULL = np.uint64(2**64 - 2), np.uint64(2**64 - 1)
_RUN, _PLACE = "__run", "__place"


@dataclass(frozen=True)
class SortedRows:
    """Rows of groups in their order.

    Attributes:
        places: Where each row is in the table that was sorted.
        begins: Which rows are the first of their group.
        another: Which rows differ from the one before in the columns that order, or are the first of a group.
        repeated: Whether two rows may be equal in all that was compared.
    """

    places: Int64s
    begins: Bools
    another: Bools
    repeated: bool = False

    def ranks(self, ties: Ties, weights: Int64s | None = None) -> Int64s:
        """Return the rank of each row; of equal rows that are one with a weight, the first's."""
        if ties == "dense_rank":
            values: Int64s = np.cumsum(self.another, dtype=np.int64)
            return values - _at_last(values, self.begins) + 1
        before: Int64s = np.arange(len(self.places))
        if weights is not None:
            before = np.cumsum(weights[self.places]) - weights[self.places]
        equal = before if ties == "row_number" else _at_last(before, self.another)
        return equal - _at_last(before, self.begins) + 1

    def among(self, some: Bools) -> SortedRows:
        """Return the order of some of the rows alone."""
        groups, values = np.cumsum(self.begins)[some], np.cumsum(self.another)[some]
        begins, another = differs_from_previous(groups), differs_from_previous(values)
        return SortedRows(self.places[some], begins, another, self.repeated)


@dataclass(frozen=True)
class RowOrder:
    """How the rows of groups are ordered.

    Attributes:
        per: The columns that make groups; none: all rows are one group.
        order: The columns that order rows, each with whether the greatest is first.
        tie_break: The columns that order those that are equal then. The event time comes last, and of rows that
            are equal in that, too, the one that stands first.
    """

    per: tuple[str, ...]
    order: tuple[tuple[str, bool], ...]
    tie_break: tuple[str, ...]

    def sort(
        self, rows: pl.DataFrame, hashes: Hashes, within: tuple[Ties, int] | None = None
    ) -> SortedRows:
        """Order rows, which have these hashes of ``per``: first by these, then by group, then in the group.

        With ``within``, rows are left out that are known to have a greater rank.
        """
        name, descending = self.order[0]
        words = order_words(rows[name], descending=descending)
        places, begins = self._by_group(rows, hashes, words)
        another = begins | differs_from_previous(words.words[places])
        found = SortedRows(places, begins, another)
        if within is not None:
            ties, count = within
            found = found.among(found.ranks("rank" if ties == "row_number" else ties) <= count)
        if found.another.all():
            return found
        exact = words.exact and len(self.order) == 1
        return self._ties_broken(rows, found, () if exact else self.order)

    def _by_group(
        self, rows: pl.DataFrame, hashes: Hashes, ordered: OrderWords
    ) -> tuple[Int64s, Bools]:
        """Return the places of rows by group and word, and which are the first of their group."""
        words = ordered.words
        needed = ordered.bits + 2 * rows.height.bit_length()
        if ordered.bits < _BITS and needed <= _BITS + _SPARE_BITS:
            shift = np.uint64(ordered.bits)
            groups: UInt64s = hashes >> shift
            places = np.argsort(groups << shift | words)
            begins = differs_from_previous(groups[places])
            if self._are_groups(rows, places, begins):
                return places, begins
        places = np.lexsort((words, hashes))
        begins = differs_from_previous(hashes[places])
        if self._are_groups(rows, places, begins):
            return places, begins
        numbers = self._numbered(rows, hashes)
        places = np.lexsort((words, numbers))
        return places, differs_from_previous(numbers[places])

    def _are_groups(self, rows: pl.DataFrame, places: Int64s, begins: Bools) -> bool:
        """Return whether all rows between two beginnings are of one group."""
        inside = ~begins
        return not any((_value_differs(rows[name], places) & inside).any() for name in self.per)

    def _numbered(self, rows: pl.DataFrame, hashes: Hashes) -> Int64s:
        """Return numbers of the groups: by their hashes, and where these are equal by their columns."""
        numbers = group_numbers(rows, self.per)
        first = np.unique(numbers, return_index=True)[1]
        own = {str(n): of_one_zero(rows[name].gather(first)) for n, name in enumerate(self.per)}
        keys = pl.DataFrame({HASH: hashes[first], **own})
        order = keys.select(pl.arg_sort_by(keys.columns, nulls_last=True)).to_series().to_numpy()
        rank = np.empty(len(order), np.int64)
        rank[order] = np.arange(len(order))
        return rank[numbers]

    def _ties_broken(
        self, rows: pl.DataFrame, found: SortedRows, order: tuple[tuple[str, bool], ...]
    ) -> SortedRows:
        """Order the rows that are equal so far: by the columns ``order``, and then by the tie-break."""
        tied = ~found.another
        tied[:-1] |= tied[1:]
        at = np.flatnonzero(tied)
        places, another = found.places.copy(), found.another.copy()
        run = pl.Series(_RUN, np.cumsum(another)[at])
        keys = _sort_columns(rows[places[at]], order, self.tie_break)
        keys = keys.hstack([run, pl.Series(_PLACE, places[at])])
        down = {_RUN: False, **{f"o{name}": descending for name, descending in order}}
        by = [_RUN, *(name for name in keys.columns if name not in (_RUN, _PLACE)), _PLACE]
        flags = [down.get(name, False) for name in by]
        sorting = keys.select(pl.arg_sort_by(by, descending=flags, nulls_last=True))
        order_of = sorting.to_series()
        keys = keys[order_of]
        places[at] = keys[_PLACE].to_numpy()
        another[at] |= _differs(keys, [_RUN, *(f"o{name}" for name, _ in order)])
        compared = by[:-1]
        plain = not any(keys.schema[name].is_nested() for name in compared)
        repeated = not (plain and _differs(keys, compared).all())
        return SortedRows(places, found.begins, another, repeated)


def _sort_columns(
    rows: pl.DataFrame, order: tuple[tuple[str, bool], ...], tie_break: tuple[str, ...]
) -> pl.DataFrame:
    """Return the columns to sort by: those of the order, each behind where it is, the tie-break, the time."""
    made = []
    for name, _ in order:
        column = of_one_zero(rows[name])
        made += [_behind(column).alias(f"n{name}"), column.alias(f"o{name}")]
    ties = [of_one_zero(rows[name]).alias(f"t{name}") for name in tie_break]
    return pl.DataFrame([*made, *ties, rows[TIME]])


@dataclass(frozen=True)
class OrderWords:
    """For each value a number by which values are ordered: the least is first.

    They have so many ``bits``. ``exact``: only equal values have equal numbers.
    """

    words: UInt64s
    bits: int
    exact: bool = True


def order_words(column: pl.Series, *, descending: bool) -> OrderWords:
    """Return for each value a number, which is less where the value comes first."""
    dtype = column.dtype
    if dtype.is_float():
        return OrderWords(_float_words(column, descending=descending), _BITS)
    if dtype == pl.Boolean:
        column = column.cast(pl.UInt8)
    elif dtype.is_temporal():
        column = column.to_physical()
    if column.dtype.is_integer() and column.dtype not in (pl.Int128, pl.UInt128):
        found = _whole_words(column, descending=descending)
        if found is not None:
            return found
    return OrderWords(_behind(column).to_numpy().astype(np.uint64), _BEHIND_BITS, exact=False)


def _float_words(column: pl.Series, *, descending: bool) -> UInt64s:
    # Adding 0.0 turns -0.0 into 0.0.
    floats = column.cast(pl.Float64).fill_null(0.0).to_numpy() + 0.0
    bits = floats.view(np.uint64)
    words = np.where(bits & _SIGN, ~bits, bits | _SIGN)
    words = np.where(np.isnan(floats), _NAN, ~words if descending else words)
    return np.where(column.is_null().to_numpy(), _NULL, words) if column.null_count() else words


def _whole_words(column: pl.Series, *, descending: bool) -> OrderWords | None:
    """Return how far each number is from the first one; None where that is more than 64 bits."""
    low, high = column.min(), column.max()
    if not isinstance(low, int) or not isinstance(high, int):  # there is no value
        return OrderWords(np.zeros(len(column), np.uint64), 0)
    span = high - low
    nulls = column.null_count() > 0
    if span + nulls >= 1 << _BITS:
        return None
    signed = column.dtype.is_signed_integer()
    values = column.fill_null(0).to_numpy().astype(np.int64 if signed else np.uint64)
    above: UInt64s = values.view(np.uint64) - np.uint64(low % (1 << _BITS))
    words = np.uint64(span) - above if descending else above
    if nulls:
        words = np.where(column.is_null().to_numpy(), np.uint64(span + 1), words)
    return OrderWords(words, (span + nulls).bit_length())


def _behind(column: pl.Series) -> pl.Series:
    """Return 2 for null, 1 for what is not a number, and 0 for other values."""
    behind = column.is_null().cast(pl.Int8) * 2
    if not column.dtype.is_float():
        return behind
    return behind + column.is_nan().fill_null(value=False).cast(pl.Int8)


def _differs(rows: pl.DataFrame, names: list[str]) -> Bools:
    """Return which rows differ from the one before in one of these columns."""
    differ = [pl.col(name).ne_missing(pl.col(name).shift(1)) for name in names]
    return rows.select(pl.any_horizontal(differ)).to_series().to_numpy()


def _value_differs(column: pl.Series, places: Int64s) -> Bools:
    """Return which values, taken in this order, differ from the one before."""
    if column.dtype.is_integer() and not column.null_count():
        return differs_from_previous(column.to_numpy()[places])
    taken = column.alias("0").gather(places)
    return taken.ne_missing(taken.shift(1)).to_numpy()


def _at_last(values: Int64s, begins: Bools) -> Int64s:
    """Return for each place the value at the last beginning up to it."""
    places = np.maximum.accumulate(np.where(begins, np.arange(len(values)), 0))
    found: Int64s = values[places]
    return found
