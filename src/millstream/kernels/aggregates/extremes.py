"""The least and the greatest value. Nulls are left out; null where no row has a value."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import polars as pl

from millstream.kernels.aggregates.bags import BagAggregate
from millstream.kernels.aggregates.groups import Lengths, starts
from millstream.kernels.aggregates.protocol import (
    PLAIN_TYPES,
    Aggregate,
    OverValue,
    TypeOf,
    bound_type,
    checked_type,
    is_plain,
)
from millstream.kernels.column_types import one_zero


@dataclass(frozen=True)
class Extreme(OverValue):
    """The smallest value, or the greatest; of the values' own type.

    A float that is not a number counts only where there is nothing else.
    """

    greatest: bool
    dtype: pl.DataType | None = None

    def bound(self, name: str, type_of: TypeOf) -> Extreme:
        return replace(self, dtype=checked_type(name, self.value, type_of, is_plain, PLAIN_TYPES))

    def for_retractions(self) -> Aggregate:
        return ExtremeOfBag(self.value, self.dtype, signed=True, greatest=self.greatest)

    def partial(self, name: str) -> list[pl.Expr]:
        best = self._best(one_zero(self.value, bound_type(self.dtype)))
        return [best.alias(self._column(name))]

    def merge(self, name: str) -> list[pl.Expr]:
        return [self._best(pl.col(self._column(name)))]

    def result(self, name: str) -> pl.Expr:
        return pl.col(self._column(name)).alias(name)

    def _column(self, name: str) -> str:
        return f"{name}.max" if self.greatest else f"{name}.min"

    def _best(self, values: pl.Expr) -> pl.Expr:
        return values.max() if self.greatest else values.min()


@dataclass(frozen=True)
class ExtremeOfBag(BagAggregate):
    """The smallest or greatest of values that may be retracted: every different one is kept."""

    greatest: bool = False

    def result_type(self, dtype: pl.DataType) -> pl.DataType:
        return dtype

    def read(self, table: pl.DataFrame, lengths: Lengths) -> pl.Series:
        values, filled = table["value"], lengths > 0
        places = starts(lengths)
        if self.greatest:
            numbers = _numbers_in(values, lengths)
            places = places + np.where(numbers > 0, numbers, lengths) - 1
        return values.gather(pl.Series(places).set(pl.Series(~filled), None))


def _numbers_in(values: pl.Series, lengths: Lengths) -> Lengths:
    """Return how many values of each bag are before the one that is not a number, which is last."""
    if not values.dtype.is_float():
        return lengths
    last = np.cumsum(lengths) - 1
    odd = np.append(values.is_nan().to_numpy(), False)  # an empty bag at the beginning looks at it
    return lengths - (odd[last] & (lengths > 0))
