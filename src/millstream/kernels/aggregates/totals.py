"""Totals: how sums are kept for each type of value, exactly and whatever the grouping.

===========================  ========================================================================
whole numbers, booleans      added as 128-bit numbers, kept as Decimal(38, 0): exact, and too wide to
                             overflow; the result is Int64, and one that does not fit stops the job
durations                    the same, in the unit of the duration
Decimals                     added in two halves, so that nothing overflows before the result, which
                             is a Decimal(38, scale); one that does not fit stops the job
floats                       added exactly, and rounded once: :mod:`millstream.kernels.aggregates.exact_sum`
===========================  ========================================================================
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from decimal import Context, Decimal
from typing import Protocol

import polars as pl

from millstream.errors import UserCodeError
from millstream.kernels.aggregates import exact_sum
from millstream.kernels.aggregates.groups import over_rows

_WHOLE = pl.Decimal(38, 0)
_HALF = 1 << 64
_INT64_MAX = (1 << 63) - 1
_DIGITS_MAX = 38
_PRECISE = Context(prec=60)


class Total(Protocol):
    """A sum in the making. ``negative``, where given, says of which rows the value is taken off."""

    def partial(self, name: str, value: pl.Expr, negative: pl.Expr | None) -> list[pl.Expr]: ...
    def merge(self, name: str) -> list[pl.Expr]: ...
    def sum(self, name: str) -> pl.Expr: ...
    def mean(self, name: str, count: pl.Expr) -> pl.Expr:
        """Return the sum over the count; null where the count is null."""
        ...


def total_of(dtype: pl.DataType | None) -> Total:
    """Choose how values of a type are added up; without a type, as polars adds them."""
    if dtype is None:
        return PlainTotal()
    if dtype.is_float():
        return FloatTotal()
    if isinstance(dtype, pl.Decimal):
        return DecimalTotal(dtype.scale)
    return WholeTotal(dtype)


def _signed(value: pl.Expr, negative: pl.Expr | None) -> pl.Expr:
    return value if negative is None else pl.when(negative).then(0 - value).otherwise(value)


@dataclass(frozen=True)
class PlainTotal:
    """A sum as polars makes it, in one column of the values' own type."""

    def partial(self, name: str, value: pl.Expr, negative: pl.Expr | None) -> list[pl.Expr]:
        return [_signed(value, negative).sum().alias(f"{name}.sum")]

    def merge(self, name: str) -> list[pl.Expr]:
        return [pl.col(f"{name}.sum").sum()]

    def sum(self, name: str) -> pl.Expr:
        return pl.col(f"{name}.sum")

    def mean(self, name: str, count: pl.Expr) -> pl.Expr:
        return self.sum(name).cast(pl.Float64) / count


@dataclass(frozen=True)
class FloatTotal:
    """An exact sum of floats, rounded once."""

    def partial(self, name: str, value: pl.Expr, negative: pl.Expr | None) -> list[pl.Expr]:
        return [exact_sum.partial(value, negative).alias(f"{name}.floats")]

    def merge(self, name: str) -> list[pl.Expr]:
        return [exact_sum.merge(pl.col(f"{name}.floats"))]

    def sum(self, name: str) -> pl.Expr:
        return exact_sum.total(pl.col(f"{name}.floats"))

    def mean(self, name: str, count: pl.Expr) -> pl.Expr:
        return self.sum(name) / count


@dataclass(frozen=True)
class WholeTotal:
    """An exact sum of whole numbers, booleans or durations."""

    dtype: pl.DataType

    def partial(self, name: str, value: pl.Expr, negative: pl.Expr | None) -> list[pl.Expr]:
        whole = value.to_physical() if self.dtype == pl.Duration else value
        summed = _signed(whole.cast(pl.Int128), negative).sum()
        return [summed.cast(_WHOLE).alias(f"{name}.whole")]

    def merge(self, name: str) -> list[pl.Expr]:
        return [pl.col(f"{name}.whole").sum().cast(_WHOLE)]

    def sum(self, name: str) -> pl.Expr:
        checked = over_rows(
            pl.col(f"{name}.whole").cast(pl.Int128), lambda sums: _int64(sums, name), pl.Int64()
        )
        return checked.cast(self.dtype) if self.dtype == pl.Duration else checked

    def mean(self, name: str, count: pl.Expr) -> pl.Expr:
        total = pl.col(f"{name}.whole").cast(pl.Int128)
        if self.dtype != pl.Duration:
            return total.cast(pl.Float64) / count
        counted = count.cast(pl.Int128)
        return ((total * 2 + counted) // (counted * 2)).cast(pl.Int64).cast(self.dtype)


def _int64(sums: pl.Series, name: str) -> pl.Series:
    beyond = sums.filter((sums > _INT64_MAX) | (sums < -_INT64_MAX - 1))
    if len(beyond):
        raise _does_not_fit(
            name, str(beyond[0]), "Int64", "Cast the values to a Decimal or a float"
        )
    return sums.cast(pl.Int64)


def _does_not_fit(name: str, value: str, dtype: str, remedy: str) -> UserCodeError:
    return UserCodeError(
        f"The sum {name!r} is {value}, which does not fit into {dtype}. {remedy} first: "
        f"with_columns, then the aggregate."
    )


@dataclass(frozen=True)
class DecimalTotal:
    """An exact sum of Decimals: of the digits above 2^64 units, and of those below."""

    scale: int

    def partial(self, name: str, value: pl.Expr, negative: pl.Expr | None) -> list[pl.Expr]:
        units = _signed(value.to_physical(), negative)
        return [
            (units // _HALF).sum().cast(_WHOLE).alias(f"{name}.high{self.scale}"),
            (units % _HALF).sum().cast(_WHOLE).alias(f"{name}.low{self.scale}"),
        ]

    def merge(self, name: str) -> list[pl.Expr]:
        return [pl.col(column).sum().cast(_WHOLE) for column in self._columns(name)]

    def _columns(self, name: str) -> tuple[str, str]:
        return f"{name}.high{self.scale}", f"{name}.low{self.scale}"

    @property
    def dtype(self) -> pl.DataType:
        return pl.Decimal(_DIGITS_MAX, self.scale)

    def sum(self, name: str) -> pl.Expr:
        return over_rows(
            pl.struct(*self._columns(name)),
            lambda halves: self._decimals(name, _units(halves)),
            self.dtype,
        )

    def mean(self, name: str, count: pl.Expr) -> pl.Expr:
        def means(rows: pl.Series) -> pl.Series:
            counts = rows.struct.field("count").to_list()
            pairs = zip(_units(rows), counts, strict=True)
            return self._decimals(name, (n and (2 * s + n) // (2 * n) for s, n in pairs))

        columns = pl.struct(*self._columns(name), count.alias("count"))
        return over_rows(columns, means, self.dtype)

    def _decimals(self, name: str, units: Iterable[int | None]) -> pl.Series:
        made = [None if n is None else Decimal(n).scaleb(-self.scale, _PRECISE) for n in units]
        for value in made:
            if value is not None and len(value.as_tuple().digits) > _DIGITS_MAX:
                remedy = "Cast the values to a Decimal of fewer places, or to a float"
                raise _does_not_fit(name, str(value), str(self.dtype), remedy)
        return pl.Series(made, dtype=self.dtype)


def _units(halves: pl.Series) -> Iterable[int]:
    high, low = (field.to_list() for field in halves.struct.unnest().get_columns()[:2])
    return (int(h) * _HALF + int(n) for h, n in zip(high, low, strict=True))
