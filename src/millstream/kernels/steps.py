"""Stateless steps: what happens to each row on its way, in polars expressions.

A step is applied to whole tables and keeps the hidden columns. A failing expression is the user's
error: it names the step and the columns that were there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import polars as pl

from millstream.errors import UserCodeError
from millstream.kernels.frames import HIDDEN_PREFIX, visible


@dataclass(frozen=True)
class Filter:
    """Keep the rows for which every condition is true; null counts as false."""

    name: str
    conditions: tuple[pl.Expr, ...]

    def apply(self, table: pl.DataFrame) -> pl.DataFrame:
        return table.filter(*self.conditions)

    def columns_read(self) -> set[str]:
        return _roots(self.conditions)


@dataclass(frozen=True)
class WithColumns:
    """Add columns, or replace those of the same name."""

    name: str
    expressions: tuple[pl.Expr, ...]

    def apply(self, table: pl.DataFrame) -> pl.DataFrame:
        return table.with_columns(*self.expressions)

    def columns_read(self) -> set[str]:
        return _roots(self.expressions)


@dataclass(frozen=True)
class Select:
    """Keep only what the expressions give."""

    name: str
    expressions: tuple[pl.Expr, ...]

    def apply(self, table: pl.DataFrame) -> pl.DataFrame:
        return table.select(*self.expressions, pl.col(f"^{HIDDEN_PREFIX}.*$"))

    def columns_read(self) -> set[str]:
        return _roots(self.expressions)


Step = Filter | WithColumns | Select


def apply_steps(steps: Sequence[Step], table: pl.DataFrame) -> pl.DataFrame:
    """Run a table through the steps, in order.

    Raises:
        UserCodeError: an expression failed on this data; the message names step and columns.
    """
    for step in steps:
        try:
            table = step.apply(table)
        except pl.exceptions.PolarsError as error:
            raise UserCodeError(
                f"step {step.name!r} failed: {first_line(error)}. "
                f"The columns there are {', '.join(visible(table.columns))}.",
                step=step.name,
            ) from error
    return table


def columns_needed(steps: Sequence[Step], wanted: set[str] | None) -> set[str] | None:
    """Walk the steps backwards: which columns must come in so that ``wanted`` come out.

    None stands for all columns.
    """
    for step in reversed(steps):
        if isinstance(step, Select):
            wanted = step.columns_read()
        elif wanted is not None:
            made = (
                {e.meta.output_name() for e in step.expressions}
                if isinstance(step, WithColumns)
                else set()
            )
            wanted = (wanted - made) | step.columns_read()
    return wanted


def _roots(expressions: Sequence[pl.Expr]) -> set[str]:
    return {name for expression in expressions for name in expression.meta.root_names()}


def first_line(error: Exception) -> str:
    """Give what polars says of an error, without the plan that it adds."""
    return str(error).strip().splitlines()[0].rstrip(".")
