"""The user's own function over frames, as a step: its input, and the checks of its result.

The function is called with a polars frame of some rows and gives a frame. Which rows share a frame is
arbitrary, so it must treat each row by itself. An exception concerns
some row, which is searched; a result that is not as declared stops the job.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

import polars as pl

from millstream.errors import UserCodeError
from millstream.kernels.frames import HIDDEN_PREFIX
from millstream.kernels.steps import ColumnNames, StepResult

ROW_COLUMN = "row"
RowsRule = Literal["same", "any"]
FrameFunction = Callable[[pl.DataFrame], pl.DataFrame]


@dataclass(frozen=True)
class MapFrames:
    """Runs ``function`` over frames of the columns ``columns_in``; it gives the columns ``schema_out``.

    With the rule ``"same"`` it gives one row for each row that it got, in their order. With
    ``"any"`` the frame has one more column, ``row``, with the numbers from 0 on, and what is given
    back has it, too: it says from which row each row was made, whose event time it takes.
    """

    name: str
    function: FrameFunction
    columns_in: tuple[str, ...]
    schema_out: tuple[tuple[str, pl.DataType], ...]
    rows: RowsRule

    def apply(self, table: pl.DataFrame) -> StepResult:
        given = _columns(table, self.columns_in)
        hidden = table.select(pl.col(f"^{HIDDEN_PREFIX}.*$"))
        if self.rows == "same":
            result = self._checked(self.function(given), dict(self.schema_out))
            if result.height != given.height:
                raise self._wrong(
                    f"gave {result.height} rows for {given.height}. Give one row for each, in "
                    'their order, or declare rows="any"'
                )
            return StepResult(pl.concat([result, hidden], how="horizontal"), result.height)
        result = self._checked(
            self.function(given.with_row_index(ROW_COLUMN)),
            {**dict(self.schema_out), ROW_COLUMN: None},
        )
        numbers = self._row_numbers(result[ROW_COLUMN], given.height)
        made = pl.concat([result.drop(ROW_COLUMN), hidden[numbers]], how="horizontal")
        return StepResult(made, numbers.n_unique())

    def columns_before(self, wanted: ColumnNames) -> ColumnNames:  # noqa: ARG002 - it takes them all
        return set(self.columns_in)

    def _checked(self, result: object, declared: dict[str, pl.DataType | None]) -> pl.DataFrame:
        """Return the function's result in the order of the declared columns."""
        if not isinstance(result, pl.DataFrame):
            raise self._wrong(f"gave a {type(result).__name__}. Give a polars DataFrame")
        if set(result.columns) != set(declared):
            raise self._wrong(
                f"gave the columns {', '.join(result.columns)}. Declared are {', '.join(declared)}: "
                "give just those, or declare others with schema="
            )
        return _columns(result, declared)

    def _row_numbers(self, numbers: pl.Series, height: int) -> pl.Series:
        if not numbers.dtype.is_integer() or not numbers.is_between(0, height - 1).all():
            raise self._wrong(
                f"gave a column {ROW_COLUMN!r} that does not hold numbers of rows that it got. Keep "
                "the column through the function: it says from which row each row was made"
            )
        return numbers

    def _wrong(self, what: str) -> UserCodeError:
        return UserCodeError(f"step {self.name!r}: its function {what}.", step=self.name)


def _columns(table: pl.DataFrame, names: Iterable[str]) -> pl.DataFrame:
    """Return the columns of these names, of which some may look like patterns to polars."""
    return table.select([table[name] for name in names])
