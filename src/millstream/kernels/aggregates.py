"""Aggregates that merge: each is a few partial columns, a way to merge them, and a result.

``partial`` turns rows into partial columns within one group; ``merge`` turns partials of one key
into one; ``result`` reads the answer off. Merging is associative and commutative, so partials may
be made before the shuffle, kept apart in state and put together in any order. (For sums of floats
that holds up to the rounding of floating-point addition: use an integer or Decimal where the last
bit matters.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import polars as pl


class Aggregate(Protocol):
    """What the windowing kernel asks of an aggregate."""

    @property
    def columns_read(self) -> set[str]: ...

    def partial(self, name: str) -> list[pl.Expr]:
        """Expressions over the rows of a group, named ``name`` or ``name.…``."""
        ...

    def merge(self, name: str) -> list[pl.Expr]:
        """Expressions over the partials of a key, with the same names."""
        ...

    def result(self, name: str) -> pl.Expr:
        """Read the answer off merged partials, under ``name``."""
        ...


@dataclass(frozen=True)
class Count:
    """How many rows there are, or for how many the condition is true."""

    condition: pl.Expr | None = None

    @property
    def columns_read(self) -> set[str]:
        return set() if self.condition is None else set(self.condition.meta.root_names())

    def partial(self, name: str) -> list[pl.Expr]:
        counted = pl.len() if self.condition is None else self.condition.sum()
        return [counted.cast(pl.Int64).alias(name)]

    def merge(self, name: str) -> list[pl.Expr]:
        return [pl.col(name).sum()]

    def result(self, name: str) -> pl.Expr:
        return pl.col(name)


@dataclass(frozen=True)
class Sum:
    """The sum of a number over the rows; nulls are left out, and the sum of none is zero."""

    value: pl.Expr

    @property
    def columns_read(self) -> set[str]:
        return set(self.value.meta.root_names())

    def partial(self, name: str) -> list[pl.Expr]:
        return [self.value.sum().alias(name)]

    def merge(self, name: str) -> list[pl.Expr]:
        return [pl.col(name).sum()]

    def result(self, name: str) -> pl.Expr:
        return pl.col(name)


@dataclass(frozen=True)
class Mean:
    """The mean of a number over the rows that have one; null where none has."""

    value: pl.Expr

    @property
    def columns_read(self) -> set[str]:
        return set(self.value.meta.root_names())

    def partial(self, name: str) -> list[pl.Expr]:
        return [
            self.value.sum().cast(pl.Float64).alias(f"{name}.sum"),
            self.value.count().cast(pl.Int64).alias(f"{name}.count"),
        ]

    def merge(self, name: str) -> list[pl.Expr]:
        return [pl.col(f"{name}.sum").sum(), pl.col(f"{name}.count").sum()]

    def result(self, name: str) -> pl.Expr:
        count = pl.col(f"{name}.count")
        return pl.when(count > 0).then(pl.col(f"{name}.sum") / count).alias(name)
