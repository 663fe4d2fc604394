"""Matched rows in row patterns: ``ms.variable(…)``, ``ms.classifier()`` and ``ms.match_number()``."""

from __future__ import annotations

from dataclasses import dataclass, replace

import polars as pl

from millstream.errors import ConfigError
from millstream.kernels.patterns.row_references import ReferenceKind, RowReference
from millstream.pipeline.checks import require_text, whole_number

_STEPS_MAX = 1_000_000


@dataclass(frozen=True)
class RowOfMatch:
    """One row of a match, or near it: ``row["price"]`` is the value of its column; null if there is no such row."""

    reference: RowReference

    def prev(self, steps: int = 1) -> RowOfMatch:
        """Return the row so many rows before this one, whether it is matched or not (SQL: ``PREV``)."""
        return self._moved(-whole_number(steps, 0, _STEPS_MAX, "prev's steps"))

    def next(self, steps: int = 1) -> RowOfMatch:
        """Return the row so many rows after this one, whether it is matched or not (SQL: ``NEXT``)."""
        return self._moved(whole_number(steps, 0, _STEPS_MAX, "next's steps"))

    def __getitem__(self, column: str) -> pl.Expr:
        """Return the value of a column."""
        require_text(column, "A column of a matched row", "price")
        return pl.col(replace(self.reference, column=column).name)

    def classifier(self) -> pl.Expr:
        """Return which variable the row is matched to, as text (SQL: ``CLASSIFIER``)."""
        return pl.col(replace(self.reference, classifier=True).name)

    def _moved(self, steps: int) -> RowOfMatch:
        if self.reference.physical:
            raise ConfigError(
                f"prev or next is asked of {self.reference}, which has one already. Add the steps up, and say it once."
            )
        return RowOfMatch(replace(self.reference, physical=steps))


@dataclass(frozen=True)
class PatternVariable:
    """The rows that are matched to a variable, or to any, as :func:`variable` gives them.

    In a condition, and where rows are emitted one by one, they are those up to the current row (SQL: ``RUNNING``); with
    :attr:`final`, those of the whole match.
    """

    variable: str | None
    is_final: bool = False

    @property
    def final(self) -> PatternVariable:
        """The rows of the whole match (SQL: ``FINAL``). Only in measures."""
        return replace(self, is_final=True)

    def __getitem__(self, column: str) -> pl.Expr:
        """Return the value of a column in the last of the rows (SQL: ``B.price``)."""
        return self.last()[column]

    def first(self, offset: int = 0) -> RowOfMatch:
        """Return the first of the rows, or the one so many of them after it (SQL: ``FIRST``)."""
        return self._row("first", offset)

    def last(self, offset: int = 0) -> RowOfMatch:
        """Return the last of the rows, or the one so many of them before it (SQL: ``LAST``)."""
        return self._row("last", offset)

    def prev(self, steps: int = 1) -> RowOfMatch:
        """Return the row so many rows before the last one (SQL: ``PREV(B.price)``)."""
        return self.last().prev(steps)

    def next(self, steps: int = 1) -> RowOfMatch:
        """Return the row so many rows after the last one (SQL: ``NEXT(B.price)``)."""
        return self.last().next(steps)

    def classifier(self) -> pl.Expr:
        """Return which variable the last of the rows is matched to, as text (SQL: ``CLASSIFIER(U)``)."""
        return self.last().classifier()

    def count(self, column: str | None = None) -> pl.Expr:
        """Return how many rows there are, or how many of them have a value in a column."""
        return self._aggregate("count", column)

    def sum(self, column: str) -> pl.Expr:
        """Return the sum of a column's values, as Int64 or Float64; null if there is none."""
        return self._aggregate("sum", column)

    def mean(self, column: str) -> pl.Expr:
        """Return the mean of a column's values, as Float64; null if there is none."""
        return self._aggregate("mean", column)

    def min(self, column: str) -> pl.Expr:
        """Return the least value of a column; null if there is none."""
        return self._aggregate("min", column)

    def max(self, column: str) -> pl.Expr:
        """Return the greatest value of a column; null if there is none."""
        return self._aggregate("max", column)

    def list(self, column: str | None = None) -> pl.Expr:
        """Return a column's values as a list; without a column, whole rows. Only as a measure, of whole matches."""
        return self._aggregate("list", column)

    def _row(self, kind: ReferenceKind, offset: int) -> RowOfMatch:
        whole_number(offset, 0, _STEPS_MAX, f"{kind}'s offset")
        return RowOfMatch(RowReference(kind, self.variable, None, self.is_final, offset))

    def _aggregate(self, kind: ReferenceKind, column: str | None) -> pl.Expr:
        if column is not None or kind not in ("count", "list"):
            require_text(column, f"The column of {kind}", "price")
        return pl.col(RowReference(kind, self.variable, column, self.is_final).name)


def variable(name: str | None = None) -> PatternVariable:
    """Look at the rows that are matched to a variable or subset of a row pattern, in conditions and measures.

    ::

        b = ms.variable("B")
        falls = pl.col("price") < b.prev()["price"]  # SQL: price < PREV(B.price)
        lowest = b.last()["price"]                   # SQL: LAST(B.price)

    Without a name, at all rows of the match. The row that a condition is asked about is among them: it is matched to
    the condition's variable meanwhile.
    """
    if name is not None:
        require_text(name, "The name of a variable", "A")
        if ":" in name:
            raise ConfigError(
                f"The name of a variable is {name!r}. Give one of the pattern, without a colon."
            )
    return PatternVariable(name)


def classifier() -> pl.Expr:
    """Return which variable the current row is matched to, as text (SQL: ``CLASSIFIER()``)."""
    return variable().classifier()


def match_number() -> pl.Expr:
    """Return the number of the match among those of its key, from 1 (SQL: ``MATCH_NUMBER()``).

    It is kept for each key for ever, so it needs ``unbounded=True``.
    """
    return pl.col(RowReference("match_number").name)
