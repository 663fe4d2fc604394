"""What is read off all values of a key: set, number of different ones, quantiles, most frequent.

All of it is exact, and costs state in proportion to the different values of a key. Nulls are left
out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np
import polars as pl

from millstream.kernels.aggregates.bags import BagAggregate, bag_type, merged_sets, sorted_set
from millstream.kernels.aggregates.groups import Lengths, numbered, reduced, regrouped, starts
from millstream.kernels.aggregates.protocol import (
    PLAIN_TYPES,
    Aggregate,
    OverValue,
    TypeOf,
    bound_type,
    checked_type,
    is_plain,
)
from millstream.kernels.columns import filter_rows


@dataclass(frozen=True)
class DistinctValues(OverValue):
    """The different values, as a sorted list, or with ``counted`` how many they are."""

    counted: bool
    dtype: pl.DataType | None = None

    def bound(self, name: str, type_of: TypeOf) -> DistinctValues:
        return replace(self, dtype=checked_type(name, self.value, type_of, is_plain, PLAIN_TYPES))

    def for_retractions(self) -> Aggregate:
        return DistinctOfBag(self.value, self.dtype, signed=True, counted=self.counted)

    def partial(self, name: str) -> list[pl.Expr]:
        return [sorted_set(self.value, bound_type(self.dtype)).alias(f"{name}.set")]

    def merge(self, name: str) -> list[pl.Expr]:
        return [merged_sets(pl.col(f"{name}.set"), bound_type(self.dtype))]

    def result(self, name: str) -> pl.Expr:
        values = pl.col(f"{name}.set")
        return (values.list.len().cast(pl.Int64) if self.counted else values).alias(name)


@dataclass(frozen=True)
class DistinctOfBag(BagAggregate):
    """The different ones of values that may be retracted, or how many they are."""

    counted: bool = False

    def result_type(self, dtype: pl.DataType) -> pl.DataType:
        return pl.Int64() if self.counted else pl.List(dtype)

    def read(self, table: pl.DataFrame, lengths: Lengths) -> pl.Series:
        return pl.Series(lengths) if self.counted else regrouped(table["value"], lengths)


@dataclass(frozen=True)
class Quantiles(BagAggregate):
    """Quantiles by the nearest rank: the first value that at least the share q is not above.

    So the result is always one of the values, of their own type; q = 0 gives the smallest. (SQL's
    ``percentile_disc``.) With ``several`` the result is a list in the order of ``shares``.
    """

    shares: tuple[Fraction, ...] = ()
    several: bool = False

    def result_type(self, dtype: pl.DataType) -> pl.DataType:
        return pl.List(dtype) if self.several else dtype

    def read(self, table: pl.DataFrame, lengths: Lengths) -> pl.Series:
        counts = table["count"].to_numpy()
        running = np.cumsum(counts)
        totals = reduced(np.add, counts, lengths, 0)
        before = np.cumsum(totals) - totals
        found = [np.searchsorted(running, before + _ranks(share, totals)) for share in self.shares]
        filled = lengths > 0
        if not self.several:
            positions = pl.Series(found[0]).set(pl.Series(~filled), None)
            return table["value"].gather(positions)
        values = table["value"].gather(np.column_stack(found)[filled].ravel())
        return regrouped(values, np.where(filled, len(self.shares), 0))


def _ranks(share: Fraction, totals: Lengths) -> Lengths:
    """Return the rank, from 1, of the quantile of each bag; in whole numbers, so exactly."""
    ranks = [max(1, -(-share.numerator * n // share.denominator)) for n in totals.tolist()]
    return np.array(ranks, np.int64)


@dataclass(frozen=True)
class TopValues(BagAggregate):
    """The k most frequent values with their counts, most frequent first; ties by value."""

    k: int = 1

    def result_type(self, dtype: pl.DataType) -> pl.DataType:
        return bag_type(dtype)

    def read(self, table: pl.DataFrame, lengths: Lengths) -> pl.Series:
        ranked = table.with_columns(pl.Series("group", numbered(lengths))).sort(
            "group", "count", "value", descending=[False, True, False]
        )
        rank = np.arange(ranked.height) - np.repeat(starts(lengths), lengths)
        best = filter_rows(ranked, rank < self.k).select("value", "count")
        return regrouped(best.to_struct(""), np.minimum(lengths, self.k))
