"""Several outputs of one operator as one table, and the step that takes one of them out again.

Rows of the main output and of side outputs have other columns each. They leave the operator in one table, in
which a column has the number of its output before its name, and ``__branch`` says which output a row is of.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import polars as pl

from millstream.kernels.frames import DIFF, HIDDEN_PREFIX, RELEASED, RELEASED_TIE, TIME
from millstream.kernels.process.row_sort import in_order
from millstream.kernels.steps import BRANCH, ColumnNames, StepResult


class Emitted(Protocol):
    """The rows that were emitted to one output, with their event times, and what orders those of one time."""

    @property
    def rows(self) -> Sequence[object]: ...
    @property
    def times_us(self) -> Any: ...
    @property
    def ties(self) -> Any: ...
    @property
    def signs(self) -> Any:
        """1 of a row that was emitted, -1 of one that was taken back; empty where none can be."""
        ...

    def frame(self) -> pl.DataFrame:
        """Return the rows, without their times."""
        ...


def _column(number: int, name: str) -> str:
    return f"{number}.{name}"


def merged_outputs(outputs: Sequence[Emitted], *, ordered: bool) -> pl.DataFrame | None:
    """Return the rows of all outputs, in the order in which they were emitted; None if there are none.

    ``ordered``: they are in the order of their event time, and are to stay so.
    """
    tables = [
        _table(output, number if len(outputs) > 1 else None, ordered=ordered)
        for number, output in enumerate(outputs)
        if output.rows
    ]
    if not tables:
        return None
    together = tables[0] if len(tables) == 1 else pl.concat(tables, how="diagonal")
    if not ordered:
        return together
    released = in_order(together, TIME, RELEASED_TIE)
    return released.hstack([released[TIME].alias(RELEASED)])


def _table(output: Emitted, number: int | None, *, ordered: bool) -> pl.DataFrame:
    rows = output.frame()
    if number is not None:
        rows = rows.rename({name: _column(number, name) for name in rows.columns})
        rows = rows.with_columns(pl.lit(number, pl.UInt16).alias(BRANCH))
    rows = rows.hstack([pl.Series(TIME, output.times_us, pl.Int64)])
    if len(output.signs):
        rows = rows.hstack([pl.Series(DIFF, output.signs, pl.Int8)])
    if ordered:
        rows = rows.hstack([pl.Series(RELEASED_TIE, output.ties, pl.Int64)])
    return rows


@dataclass(frozen=True)
class SelectOutput:
    """Take the rows of one output of an operator, with its own columns."""

    name: str
    number: int
    columns: tuple[str, ...]

    def apply(self, table: pl.DataFrame) -> StepResult:
        mine = table.filter(table[BRANCH] == self.number)
        if not mine.height:
            return StepResult(pl.DataFrame(), 0)
        hidden = [n for n in mine.columns if n.startswith(HIDDEN_PREFIX) and n != BRANCH]
        names = {_column(self.number, name): name for name in self.columns}
        return StepResult(mine[[*names, *hidden]].rename(names), mine.height)

    def columns_before(self, wanted: ColumnNames) -> ColumnNames:  # noqa: ARG002 - all of the output
        return None
