"""What the operators of joins have in common: keys, the rows of two inputs, and what they are by default."""

from __future__ import annotations

from collections.abc import Sequence

import polars as pl

from millstream.kernels import late
from millstream.kernels.arrays import Int64s
from millstream.kernels.frames import HASH, ORDER, SPLIT, TIME
from millstream.kernels.joins.join_input import JoinedColumns, JoinInput, null_keys
from millstream.kernels.joins.versions import TIE
from millstream.kernels.operator import BatchContext, OperatorResult, Prepared
from millstream.kernels.operator_base import OperatorBase
from millstream.kernels.state.keyhash import hash_columns
from millstream.kernels.time.log_order import in_log_order


class JoinOperator(OperatorBase):
    """A join of two inputs by equal keys. The defaults are those of a join that emits rows of its own, in any order."""

    columns: JoinedColumns

    @property
    def by(self) -> tuple[str, ...]:
        return self.columns.left.keys

    @property
    def inputs(self) -> tuple[JoinInput, JoinInput]:
        return self.columns.left, self.columns.right

    def columns_read(self, number: int) -> set[str]:
        return self.inputs[number].columns_read

    def hashed(self, rows: pl.DataFrame, seed: int) -> pl.DataFrame:
        """Return rows with the hash of the key."""
        return rows.hstack([pl.Series(HASH, hash_columns(rows, self.by, seed))])

    def without_null_keys(self, prepared: pl.DataFrame) -> Prepared:
        """Leave out the rows whose key is null, and count them."""
        without = prepared.filter(~null_keys(prepared, self.by))
        return Prepared(without, counts={"filtered": prepared.height - without.height})


def split_late(rows: pl.DataFrame, seen_us: Int64s, lateness_us: int) -> late.LateSplit:
    """Divide the rows of an input by lateness, given the watermarks that they saw."""
    return late.split_late(rows, seen_us, rows[TIME].to_numpy() + lateness_us, late.JOIN)


def add_late_rows(
    found: late.LateSplit, result: OperatorResult, *, without: Sequence[str] = ()
) -> None:
    """Put late rows that have a tie into the side output, in the order of the log; ``without`` some columns."""
    if not found.late.height:
        return
    late_rows = late.side_output(found.late.drop(without), found.late_us, late.JOIN)
    placed = SPLIT in late_rows.columns
    late_rows = late_rows.rename({TIE: ORDER}) if placed else late_rows.drop(TIE)
    every = [late_rows] if result.late is None else [result.late, late_rows]
    result.late = in_log_order(pl.concat(every, how="diagonal"))


def take_in_time(
    rows: pl.DataFrame, lateness_us: int, context: BatchContext, result: OperatorResult
) -> late.LateSplit:
    """Divide the rows of an input by lateness, and count them."""
    found = split_late(rows, context.watermarks_seen(rows), lateness_us)
    result.counts.update(late=found.late.height, held=found.in_time.height)
    result.late_by_us = max(result.late_by_us, found.late_by_us)
    return found
