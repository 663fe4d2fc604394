"""The look-up of each row of a stream in a table whose rows the program gives.

The table is the same during a whole run, so the look-up is a step over each row by itself: rows need no shuffle, and
there is no state. Source: the broadcast join of Spark SQL.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import polars as pl

from millstream.kernels.frames import rows_digest
from millstream.kernels.joins.asof_join import AsofKind
from millstream.kernels.joins.join_input import JoinedColumns
from millstream.kernels.operator import NOT_DEFINING
from millstream.kernels.steps import ColumnNames, StepResult

_PLACE = "__place"
_ONE = "__one"


@dataclass(frozen=True)
class StaticLookup:
    """A step that adds the columns of the table's row with the same key.

    ``rows`` are the rows of the table, of which no two have one key. Neither which rows they are nor the table's
    name, ``table``, is part of the step's definition.
    """

    name: str
    how: AsofKind
    columns: JoinedColumns
    rows: pl.DataFrame
    table: str = field(metadata=NOT_DEFINING)
    nulls_equal: bool = False

    @cached_property
    def digest(self) -> str:
        """A text that says which rows the table has."""
        return rows_digest(self.rows)

    def apply(self, table: pl.DataFrame) -> StepResult:
        """Return the rows with the columns of the table, null where it has no row; an inner join leaves those out."""
        places = self._places(table)
        if self.how == "inner":
            found = places.is_not_null()
            table, places = table.filter(found), places.filter(found)
        taken = [column.gather(places).alias(name) for name, column in self._columns]
        return StepResult(table.hstack(taken), table.height)

    def columns_before(self, wanted: ColumnNames) -> ColumnNames:
        if wanted is None:
            return None
        return (wanted - set(self.columns.right.names)) | set(self.columns.left.on)

    def _places(self, table: pl.DataFrame) -> pl.Series:
        """Return for each row where in the table its key is; null where it is not."""
        left = self.columns.left
        keys = [table[name].alias(key) for name, key in zip(left.on, left.keys, strict=True)]
        rows = pl.DataFrame([*keys, *self._second(len(table))])
        return rows.join(
            self._keys,
            on=rows.columns,
            how="left",
            nulls_equal=self.nulls_equal,
            maintain_order="left",
        )[_PLACE]

    @cached_property
    def _keys(self) -> pl.DataFrame:
        right = self.columns.right
        keys = [self.rows[name].alias(key) for name, key in zip(right.on, right.keys, strict=True)]
        return pl.DataFrame([*keys, *self._second(self.rows.height)]).with_row_index(_PLACE)

    def _second(self, height: int) -> list[pl.Series]:
        # Polars merges by a single column of floats that is sorted, and finds no NaN there.
        if len(self.columns.left.on) > 1 or not self.columns.left.key_types[0].is_float():
            return []
        return [pl.Series(_ONE, [1]).new_from_index(0, height)]

    @cached_property
    def _columns(self) -> list[tuple[str, pl.Series]]:
        # Under another name meanwhile: polars takes a name such as "^a.*$" for a pattern.
        return [(made, self.rows[name].alias("0")) for name, made, _ in self.columns.right.columns]
