"""The look-up of each row of a stream in rows that are given with the program: a stateless step.

The rows travel with the plan, so each row of the stream is joined where it is: there is no shuffle, and no state.
It gives what :class:`millstream.kernels.joins.lookup.Lookup` gives with a table of these rows, which the first
batch of a run changes before its rows are looked up.

Source: Spark's broadcast join.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import polars as pl

from millstream.kernels.joins.asof_join import AsofKind
from millstream.kernels.joins.join_input import JoinedColumns
from millstream.kernels.operator import NOT_DEFINING
from millstream.kernels.steps import ColumnNames, StepResult
from millstream.kernels.tables.static_rows import StaticRows

_PLACE = "__place"
_ONE = "__one"


@dataclass(frozen=True)
class StaticLookup:
    """The step. The columns that are compared have the key of ``table`` among them."""

    name: str
    how: AsofKind
    columns: JoinedColumns
    nulls_equal: bool
    table: StaticRows = field(metadata=NOT_DEFINING)  # its columns are in ``columns``

    def apply(self, table: pl.DataFrame) -> StepResult:
        """Add the columns of the row that matches; leave rows out, or add nulls, where none does."""
        keys = self._compared(table, self.columns.left.on)
        places = keys.join(
            self._places,
            on=keys.columns,
            how="left",
            nulls_equal=self.nulls_equal,
            maintain_order="left",
        )[_PLACE]
        if self.how == "inner" and places.null_count():
            found = places.is_not_null()
            table, places = table.filter(found), places.filter(found)
        # Under another name meanwhile: polars takes a name such as "^a.*$" for a pattern.
        added = [
            self.table.rows[name].alias("0").gather(places).alias(renamed)
            for name, renamed, _ in self.columns.right.columns
        ]
        return StepResult(table.hstack(added), table.height)

    def columns_before(self, wanted: ColumnNames) -> ColumnNames:
        """Return the columns that are compared, and those wanted that it does not add."""
        if wanted is None:
            return None
        return (wanted - set(self.columns.right.names)) | set(self.columns.left.on)

    @cached_property
    def _places(self) -> pl.DataFrame:
        """What is compared of each of the rows, and its place among them."""
        keys = self._compared(self.table.rows, self.columns.right.on)
        # A key that is given as 0.0 and as -0.0 is one to a join.
        return keys.with_row_index(_PLACE).unique(keys.columns, keep="last", maintain_order=True)

    def _compared(self, rows: pl.DataFrame, names: tuple[str, ...]) -> pl.DataFrame:
        keys = pl.DataFrame([rows[name].alias(str(n)) for n, name in enumerate(names)])
        if len(names) == 1 and keys.to_series(0).dtype.is_float():
            # Of one column of floats that it knows to be sorted polars finds no NaN; of two it does.
            return keys.with_columns(pl.lit(1).alias(_ONE))
        return keys
