"""Stateless steps: polars expressions and functions over each row.

A step processes each row by itself, so results do not depend on where one table ends and
the next begins. It is applied to whole tables, keeps the hidden columns, and reports for how many of
the input rows it gave rows. :mod:`millstream.kernels.errors.user_code` handles failing rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import polars as pl
from polars import selectors

from millstream.kernels.frames import HIDDEN_PREFIX, visible

BRANCH = "__branch"  # UInt16: to which part of a split the row belongs
_HIDDEN = pl.col(f"^{HIDDEN_PREFIX}.*$")

ColumnNames = set[str] | None  # names of columns; None stands for all


class StepResult(NamedTuple):
    """The output of a step for a table, and the number of input rows that gave rows."""

    table: pl.DataFrame
    rows: int


class Step(Protocol):
    """One stateless step."""

    @property
    def name(self) -> str: ...

    def apply(self, table: pl.DataFrame) -> StepResult:
        """Run a table through; what the user's expressions and functions raise comes out."""
        ...

    def columns_before(self, wanted: ColumnNames) -> ColumnNames:
        """Return which columns must come in so that ``wanted`` can come out."""
        ...


@dataclass(frozen=True)
class Filter:
    """Keep the rows for which every condition is true; null counts as false."""

    name: str
    conditions: tuple[pl.Expr, ...]

    def apply(self, table: pl.DataFrame) -> StepResult:
        if _is_wide(self.conditions):
            true = _visible(table).select(pl.all_horizontal(*self.conditions)).to_series()
            return _all_of(table.filter(true))
        return _all_of(table.filter(*self.conditions))

    def columns_before(self, wanted: ColumnNames) -> ColumnNames:
        return _joined(wanted, _roots(self.conditions))


@dataclass(frozen=True)
class WithColumns:
    """Add columns, or replace those of the same name."""

    name: str
    expressions: tuple[pl.Expr, ...]

    def apply(self, table: pl.DataFrame) -> StepResult:
        if _is_wide(self.expressions):
            made = _visible(table).with_columns(*self.expressions)
            return _all_of(pl.concat([made, table.select(_HIDDEN)], how="horizontal"))
        return _all_of(table.with_columns(*self.expressions))

    def columns_before(self, wanted: ColumnNames) -> ColumnNames:
        if wanted is None or _is_wide(self.expressions):
            return None
        made = {expression.meta.output_name() for expression in self.expressions}
        return _joined(wanted - made, _roots(self.expressions))


@dataclass(frozen=True)
class Select:
    """Keep only what the expressions give."""

    name: str
    expressions: tuple[pl.Expr, ...]

    def apply(self, table: pl.DataFrame) -> StepResult:
        if _is_wide(self.expressions):
            made = _visible(table).select(*self.expressions)
            return _all_of(pl.concat([made, table.select(_HIDDEN)], how="horizontal"))
        return _all_of(table.select(*self.expressions, _HIDDEN))

    def columns_before(self, wanted: ColumnNames) -> ColumnNames:  # noqa: ARG002 - it computes them all
        return _roots(self.expressions)


@dataclass(frozen=True)
class Rename:
    """Rename columns: pairs of the old and the new name."""

    name: str
    names: tuple[tuple[str, str], ...]

    def apply(self, table: pl.DataFrame) -> StepResult:
        return _all_of(table.rename(dict(self.names), strict=False))

    def columns_before(self, wanted: ColumnNames) -> ColumnNames:
        old = {after: before for before, after in self.names}
        return None if wanted is None else {old.get(column, column) for column in wanted}


@dataclass(frozen=True)
class Drop:
    """Leave columns out."""

    name: str
    columns: tuple[str, ...]

    def apply(self, table: pl.DataFrame) -> StepResult:
        # By a list of names: polars takes a name such as "^a.*$" for a pattern.
        return _all_of(table[[name for name in table.columns if name not in self.columns]])

    def columns_before(self, wanted: ColumnNames) -> ColumnNames:
        return wanted


@dataclass(frozen=True)
class Explode:
    """Make a row of each element of lists; the lists of one row must be equally long.

    A row whose lists are empty, or null, gives none.
    """

    name: str
    columns: tuple[str, ...]

    def apply(self, table: pl.DataFrame) -> StepResult:
        length, *others = (_lengths(table[column]) for column in self.columns)
        for other in others:
            if not other.equals(length):
                raise pl.exceptions.ShapeError(
                    f"the lists in {', '.join(self.columns)} are not equally long"
                )
        # Whether those without elements give a row depends on the version of polars.
        kept = table.filter(length > 0)
        return StepResult(kept.explode(selectors.by_name(*self.columns)), kept.height)

    def columns_before(self, wanted: ColumnNames) -> ColumnNames:
        return _joined(wanted, set(self.columns))


@dataclass(frozen=True)
class AssignBranch:
    """Note for each row to which part of a split it belongs: the first whose condition is true."""

    name: str
    conditions: tuple[pl.Expr, ...]

    def apply(self, table: pl.DataFrame) -> StepResult:
        part = pl.lit(len(self.conditions), pl.UInt16)
        for number, condition in reversed(list(enumerate(self.conditions))):
            part = pl.when(condition).then(pl.lit(number, pl.UInt16)).otherwise(part)
        return _all_of(table.with_columns(part.alias(BRANCH)))

    def columns_before(self, wanted: ColumnNames) -> ColumnNames:
        return _joined(wanted, _roots(self.conditions))


@dataclass(frozen=True)
class SelectBranch:
    """Keep the rows of one part of a split."""

    name: str
    number: int

    def apply(self, table: pl.DataFrame) -> StepResult:
        return _all_of(table.filter(pl.col(BRANCH) == self.number).drop(BRANCH))

    def columns_before(self, wanted: ColumnNames) -> ColumnNames:
        return wanted


def is_defining(step: Step, wanted: ColumnNames) -> bool:
    """Return whether rows of which the columns ``wanted`` are taken depend on a step.

    They do not where it leaves others out, unless an expression below stands for all columns that come to it.
    """
    return wanted is None or not isinstance(step, Drop)


def _lengths(lists: pl.Series) -> pl.Series:
    lists = lists.alias(
        "lists"
    )  # the methods of a series find it by its name, which may look like a pattern
    lengths = lists.arr.len() if isinstance(lists.dtype, pl.Array) else lists.list.len()
    return lengths.fill_null(0).cast(pl.UInt32)


def _all_of(table: pl.DataFrame) -> StepResult:
    return StepResult(table, table.height)


def _visible(table: pl.DataFrame) -> pl.DataFrame:
    # By a list of names: polars takes a name such as "^a.*$" for a pattern.
    return table[visible(table.columns)]


def _is_wide(expressions: Sequence[pl.Expr]) -> bool:
    """Return whether an expression, such as ``pl.all()``, stands for columns that it does not name."""
    return any(expression.meta.has_multiple_outputs() for expression in expressions)


def _roots(expressions: Sequence[pl.Expr]) -> ColumnNames:
    if _is_wide(expressions):
        return None
    return {name for expression in expressions for name in expression.meta.root_names()}


def _joined(columns: ColumnNames, others: ColumnNames) -> ColumnNames:
    return None if columns is None or others is None else columns | others
