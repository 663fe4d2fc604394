"""Bags: the values of a key, each with how often it occurs, as sorted lists.

A bag is what an aggregate keeps that must know every value. It merges by adding counts, and takes
values back by counts below zero; a value whose count comes to zero is gone. The list is sorted by
value, without nulls, each value once, so that equal bags are equal lists. -0.0 counts as 0.0, and a
float that is not a number as one value, above all others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import polars as pl

from millstream.kernels.aggregates.groups import (
    Lengths,
    flat,
    flat_twice,
    kept,
    numbered,
    over_groups,
    over_rows,
    reduced,
    regrouped,
)
from millstream.kernels.aggregates.protocol import (
    PLAIN_TYPES,
    OverValue,
    TypeOf,
    bound_type,
    checked_type,
    is_plain,
)
from millstream.kernels.column_types import one_zero
from millstream.kernels.frames import DIFF

Counted = tuple[pl.DataFrame, Lengths]  # the columns value and count, and how many a bag has


def bag_type(dtype: pl.DataType) -> pl.DataType:
    """Return the type of bags of values of a type."""
    return pl.List(pl.Struct({"value": dtype, "count": pl.Int64}))


def bag(value: pl.Expr, dtype: pl.DataType, *, signed: bool) -> pl.Expr:
    """Put the values of a group into a bag; with ``signed``, as often as ``__diff`` says."""
    weight = pl.col(DIFF).cast(pl.Int64) if signed else pl.lit(1, pl.Int64)
    counted = pl.struct(one_zero(value, dtype).alias("value"), weight.alias("count"))
    return over_groups(counted, lambda lists: _consolidated(*flat(lists)), bag_type(dtype))


def merged_bags(column: pl.Expr, dtype: pl.DataType) -> pl.Expr:
    """Put the bags of a key together into one."""
    return over_groups(column, lambda lists: _consolidated(*flat_twice(lists)), bag_type(dtype))


def of_bags(
    column: pl.Expr, function: Callable[[pl.DataFrame, Lengths], pl.Series], dtype: pl.DataType
) -> pl.Expr:
    """Return what ``function`` makes of bags, handed over flat: value and count, and their lengths.

    Counts below zero, where more was retracted than added, are left out.
    """
    return over_rows(column, lambda bags: function(*_counted(bags)), dtype)


def _counted(bags: pl.Series) -> Counted:
    values, lengths = flat(bags)
    present = values.struct.field("count") > 0
    values, lengths = kept(values, lengths, present)
    return values.struct.unnest(), lengths


def _consolidated(counted: pl.Series, lengths: Lengths) -> pl.Series:
    table, sizes = _summed(counted.struct.unnest(), lengths)
    return regrouped(table.select("value", "count").to_struct(""), sizes)


def _summed(table: pl.DataFrame, lengths: Lengths) -> Counted:
    ordered = _ordered(table.with_columns(pl.Series("group", numbered(lengths))))
    first = _first_of_its_kind(ordered)
    places = np.flatnonzero(first.to_numpy())
    runs = np.diff(places, append=ordered.height)
    counts = reduced(np.add, ordered["count"].to_numpy(), runs, 0)
    summed = ordered.filter(first).with_columns(pl.Series("count", counts))
    summed = summed.filter(pl.col("count") != 0)
    return summed, _sizes(summed["group"], lengths)


def _ordered(table: pl.DataFrame) -> pl.DataFrame:
    return table.drop_nulls("value").sort("group", "value")


def _first_of_its_kind(ordered: pl.DataFrame) -> pl.Series:
    """Return for each row whether it differs from the one before: quicker by far than grouping."""
    differs = [pl.col(name) != pl.col(name).shift() for name in ("group", "value")]
    return ordered.select(pl.any_horizontal(differs).fill_null(True)).to_series()


def _sizes(groups: pl.Series, lengths: Lengths) -> Lengths:
    return np.bincount(groups.to_numpy(), minlength=len(lengths)).astype(np.int64)


def sorted_set(value: pl.Expr, dtype: pl.DataType) -> pl.Expr:
    """Put the values of a group into a sorted list, each once, without nulls."""
    return over_groups(
        one_zero(value, dtype), lambda lists: _distinct(*flat(lists)), pl.List(dtype)
    )


def merged_sets(column: pl.Expr, dtype: pl.DataType) -> pl.Expr:
    """Put the sorted sets of a key together into one."""
    return over_groups(column, lambda lists: _distinct(*flat_twice(lists)), pl.List(dtype))


def _distinct(values: pl.Series, lengths: Lengths) -> pl.Series:
    return regrouped(*distinct_values(values, lengths))


def distinct_values(values: pl.Series, lengths: Lengths) -> tuple[pl.Series, Lengths]:
    """Keep each group's different values, which lie end to end; in order."""
    if values.dtype.is_integer():
        packed = _packed(values, lengths)
        if packed is not None:
            return packed
    ordered = _ordered(pl.DataFrame({"group": numbered(lengths), "value": values}))
    once = ordered.filter(_first_of_its_kind(ordered))
    return once["value"], _sizes(once["group"], lengths)


def _packed(values: pl.Series, lengths: Lengths) -> tuple[pl.Series, Lengths] | None:
    """Do the same for whole numbers, group and value as one number: to sort that takes a fifth of the time.

    None where they do not fit into 63 bits.
    """
    low, high = values.min(), values.max()
    if not isinstance(low, int) or not isinstance(high, int):  # there is no value
        return None
    span = high - low + 1
    if span * len(lengths) >= 1 << 63 or high >= 1 << 63:
        return None
    present = values.is_not_null().to_numpy()
    above = values.drop_nulls().cast(pl.Int64).to_numpy() - low
    ordered = pl.Series(numbered(lengths)[present] * span + above).sort().to_numpy()
    groups, above = np.divmod(ordered[np.diff(ordered, prepend=-1) != 0], span)
    return pl.Series(above + low, dtype=pl.Int64).cast(values.dtype), _sizes(
        pl.Series(groups), lengths
    )


@dataclass(frozen=True)
class BagAggregate(OverValue):
    """An aggregate whose state is a bag, and whose result is what :meth:`read` makes of it."""

    dtype: pl.DataType | None = None
    signed: bool = False

    def bound(self, name: str, type_of: TypeOf) -> Self:
        return replace(self, dtype=checked_type(name, self.value, type_of, is_plain, PLAIN_TYPES))

    def for_retractions(self) -> Self:
        return replace(self, signed=True)

    def partial(self, name: str) -> list[pl.Expr]:
        return [bag(self.value, bound_type(self.dtype), signed=self.signed).alias(f"{name}.bag")]

    def merge(self, name: str) -> list[pl.Expr]:
        return [merged_bags(pl.col(f"{name}.bag"), bound_type(self.dtype))]

    def result(self, name: str) -> pl.Expr:
        dtype = self.result_type(bound_type(self.dtype))
        return of_bags(pl.col(f"{name}.bag"), self.read, dtype).alias(name)

    def result_type(self, dtype: pl.DataType) -> pl.DataType:
        """Return the type of the result, given that of the values."""
        raise NotImplementedError

    def read(self, table: pl.DataFrame, lengths: Lengths) -> pl.Series:
        """Return one result per bag; see :func:`of_bags`."""
        raise NotImplementedError
