"""Sums and means of numbers and durations. Nulls are left out."""

from __future__ import annotations

from dataclasses import dataclass, replace

import polars as pl

from millstream.kernels.aggregates.protocol import OverValue, TypeOf, checked_type, is_number
from millstream.kernels.aggregates.totals import Total, total_of
from millstream.kernels.frames import DIFF

_TAKES = "numbers, Decimals and durations"


@dataclass(frozen=True)
class Sum(OverValue):
    """The sum over the rows that have a value; zero where none has.

    Whole numbers give Int64, Decimals Decimals, floats floats, durations durations; each is the
    same however the rows were grouped in between (see :mod:`.totals`). Without :meth:`bound`, values
    are added as polars adds them.
    """

    dtype: pl.DataType | None = None
    signed: bool = False

    def bound(self, name: str, type_of: TypeOf) -> Sum:
        return replace(self, dtype=checked_type(name, self.value, type_of, _summable, _TAKES))

    def for_retractions(self) -> Sum:
        return replace(self, signed=True)

    def partial(self, name: str) -> list[pl.Expr]:
        return self._total.partial(name, self.value, _negative(self.signed))

    def merge(self, name: str) -> list[pl.Expr]:
        return self._total.merge(name)

    def result(self, name: str) -> pl.Expr:
        return self._total.sum(name).alias(name)

    @property
    def _total(self) -> Total:
        return total_of(self.dtype)


@dataclass(frozen=True)
class Mean(OverValue):
    """The mean over the rows that have a value; null where none has.

    It is the exact sum over the count: a float for whole numbers and floats; a Decimal of the same
    scale, or a duration, rounded to the nearest (a half goes up).
    """

    dtype: pl.DataType | None = None
    signed: bool = False

    def bound(self, name: str, type_of: TypeOf) -> Mean:
        return replace(self, dtype=checked_type(name, self.value, type_of, _summable, _TAKES))

    def for_retractions(self) -> Mean:
        return replace(self, signed=True)

    def partial(self, name: str) -> list[pl.Expr]:
        count = self.value.count().cast(pl.Int64)
        if self.signed:
            count = pl.col(DIFF).cast(pl.Int64).filter(self.value.is_not_null()).sum()
        totals = self._total.partial(name, self.value, _negative(self.signed))
        return [count.alias(f"{name}.count"), *totals]

    def merge(self, name: str) -> list[pl.Expr]:
        return [pl.col(f"{name}.count").sum(), *self._total.merge(name)]

    def result(self, name: str) -> pl.Expr:
        count = pl.col(f"{name}.count")
        return self._total.mean(name, pl.when(count > 0).then(count)).alias(name)

    @property
    def _total(self) -> Total:
        return total_of(self.dtype)


def _summable(dtype: pl.DataType) -> bool:
    return is_number(dtype) or dtype == pl.Duration


def _negative(signed: bool) -> pl.Expr | None:  # noqa: FBT001
    return pl.col(DIFF) < 0 if signed else None
