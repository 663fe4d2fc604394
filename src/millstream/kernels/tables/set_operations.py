"""Distinct, union, except and intersect of tables: SQL's set operations, maintained.

With a and b how many times a row is in the first input and in the other, it is in the result

=============  ===============  ==============
operation      ALL              otherwise
=============  ===============  ==============
union          (rows pass)      1 if a + b > 0
except         max(a - b, 0)    1 if a > 0 = b
intersect      min(a, b)        1 if a, b > 0
=============  ===============  ==============

Rows are equal if all their columns are; null is equal to null, and NaN to NaN. Lists and structs are compared
as a whole. Distinct is the union of one table.

A row of the result has the least event time of the rows that are equal to it in the first input; of a union,
in all. So it changes when an earlier row comes or goes, and not with every row that comes later.

Source: ISO/IEC 9075-2 (SQL), 7.17, "<query expression>", general rules of UNION, EXCEPT and INTERSECT.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import polars as pl

from millstream.kernels.frames import DIFF, WEIGHT
from millstream.kernels.tables.group_by import GroupBy
from millstream.kernels.tables.group_sets import RowCounter

SetRule = Literal["union", "except", "intersect"]

_INPUT = "__input"
INPUT_TYPE = {_INPUT: pl.Int64()}  # what the rows have besides their columns, for the aggregates
_FIRST = "first"
_OF_FIRST = f"{_FIRST}.rows"


@dataclass(frozen=True)
class RowsOfFirst(RowCounter):
    """The aggregate that counts the rows of the first input."""

    def partial(self, name: str) -> list[pl.Expr]:
        of_first = pl.col(DIFF).cast(pl.Int64) * (pl.col(_INPUT) == 0)
        return [of_first.sum().alias(f"{name}.rows")]

    def merge(self, name: str) -> list[pl.Expr]:
        return [pl.col(f"{name}.rows").sum()]

    def result(self, name: str) -> pl.Expr:
        return pl.col(f"{name}.rows").alias(name)


@dataclass(frozen=True)
class SetOperation(GroupBy):
    """The operator of a set operation: its groups are the rows that are equal.

    ``bag``: of equal rows there may be several, as with SQL's ALL.
    """

    rule: SetRule = "union"
    bag: bool = False

    @property
    def greatest(self) -> bool:
        return False

    @property
    def timed(self) -> str:
        return WEIGHT if self.rule == "union" else _OF_FIRST

    @property
    def row_key(self) -> tuple[str, ...]:
        return () if self.bag else super().row_key

    def copies(self, groups: pl.DataFrame) -> pl.Series:
        if self.rule == "union":
            return super().copies(groups)
        first = groups[_OF_FIRST]
        others = groups[WEIGHT] - first
        if self.rule == "intersect":
            both = first.zip_with(first < others, others)
        else:
            both = first - others if self.bag else first.zip_with(others <= 0, others * 0)
        return both.clip(0, None if self.bag else 1)

    def results(self, groups: pl.DataFrame) -> list[pl.Series]:  # noqa: ARG002 - the key is all
        return []

    def with_keys(self, rows: pl.DataFrame, number: int) -> pl.DataFrame:
        keyed = super().with_keys(rows, number)
        return keyed.with_columns(pl.lit(number, pl.Int64).alias(_INPUT))


def counted_by(rule: SetRule) -> tuple[tuple[str, RowsOfFirst], ...]:
    """Return the aggregates that an operation needs."""
    return () if rule == "union" else ((_FIRST, RowsOfFirst()),)
