"""The look-up of rows that may be taken back: a row is taken back with what it was looked up with.

The table may say something else by then, so the rows are stored with what they found
(:mod:`millstream.kernels.given_rows`). They have no time of arrival: they see the table as it is after the batch's
changes of it.

Source: Apache Flink, "Non-deterministic updates in streaming": the state of a look-up join in front of updates.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import polars as pl

from millstream.kernels.changes import concat_present
from millstream.kernels.columns import constant
from millstream.kernels.final_rows import changes_in_time, with_sign
from millstream.kernels.frames import ARRIVED
from millstream.kernels.given_rows import COMES_OUT, GivenRows
from millstream.kernels.joins.asof_match import NO_MATCH, taken
from millstream.kernels.joins.lookup import LAST_ARRIVED, Lookup
from millstream.kernels.operator import BatchContext, OperatorResult, Prepared
from millstream.kernels.state.operator_state import OperatorState


@dataclass(frozen=True)
class SignedLookup(Lookup):
    """The operator. ``lateness_us`` is that of the rows."""

    lateness_us: int = 0

    @property
    def ordered(self) -> bool:
        return False

    def columns_read(self, number: int) -> set[str]:
        """Return all of the rows: a row and its retraction are known by them."""
        return self.inputs[number].columns_read

    def prepare(self, rows: pl.DataFrame, number: int) -> Prepared:
        """Take the keys, the columns, the time, the sign, and what decides on lateness."""
        if number:
            return super().prepare(rows, number)
        left = self.columns.left
        keys = [rows[name].alias(key) for name, key in zip(left.on, left.keys, strict=True)]
        return Prepared(with_sign(rows, left.names).hstack(keys))

    def process(
        self,
        state: OperatorState,
        inputs: Mapping[int, Sequence[pl.DataFrame]],
        context: BatchContext,
    ) -> OperatorResult:
        """Return the rows with what the table has, and those that are taken back with what they had."""
        result = OperatorResult(counts=Counter())
        left = self.columns.left
        rows = changes_in_time(inputs.get(0, ()), self.by, self.lateness_us, context, result)
        changes = concat_present(inputs.get(1, ()))
        changes = None if changes is None else self.hashed(changes, context.seed)
        table = self.or_no_rows(self.table_of(state, rows, changes, context))
        result.counts.update(held=0 if changes is None else changes.height)
        given = GivenRows(self.name, tuple(left.names), left.on, self.lateness_us)
        result.rows = given.process(
            state,
            rows,
            context.watermark_us,
            context.seed,
            lambda added: self._given(added, table),
        )
        return result

    def _given(self, added: pl.DataFrame, table: pl.DataFrame) -> pl.DataFrame:
        rows = added.with_columns(pl.lit(LAST_ARRIVED, pl.Int64).alias(ARRIVED))
        matches = self.matches(rows, table)
        comes_out = constant(True, added.height, pl.Boolean)
        if self.how == "inner":
            comes_out = pl.Series(matches != NO_MATCH)
        found = taken(table, self.columns.right.names, matches)
        return added.drop(*self.by).hstack([*found, comes_out.alias(COMES_OUT)])
