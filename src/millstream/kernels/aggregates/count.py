"""Counting rows."""

from __future__ import annotations

from dataclasses import dataclass, replace

import polars as pl

from millstream.kernels.aggregates.protocol import TypeOf, checked_type
from millstream.kernels.frames import DIFF


@dataclass(frozen=True)
class Count:
    """How many rows there are, or for how many the condition is true (null counts as false)."""

    condition: pl.Expr | None = None
    signed: bool = False

    @property
    def columns_read(self) -> set[str]:
        return set() if self.condition is None else set(self.condition.meta.root_names())

    @property
    def needs_order(self) -> bool:
        return False

    def bound(self, name: str, type_of: TypeOf) -> Count:
        if self.condition is not None:
            checked_type(
                name,
                self.condition,
                type_of,
                lambda dtype: dtype in (pl.Boolean, pl.Null),
                "a condition, which is true or false; compare the column with something",
            )
        return self

    def for_retractions(self) -> Count:
        return replace(self, signed=True)

    def partial(self, name: str) -> list[pl.Expr]:
        if self.signed:
            weight = pl.col(DIFF).cast(pl.Int64)
            counted = (weight if self.condition is None else weight.filter(self.condition)).sum()
        else:
            counted = pl.len() if self.condition is None else self.condition.sum()
        return [counted.cast(pl.Int64).alias(f"{name}.rows")]

    def merge(self, name: str) -> list[pl.Expr]:
        return [pl.col(f"{name}.rows").sum()]

    def result(self, name: str) -> pl.Expr:
        return pl.col(f"{name}.rows").alias(name)
