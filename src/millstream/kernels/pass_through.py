"""The base of operators that pass rows on, in the order of arrival.

They emit rows in the batch that brought them, with their hidden columns. Each row is late or in time as a
whole: there are no windows that it misses.

The order of arrival is, within a partition, that of offsets. Of two partitions read in one batch the
lower goes first, and rows of earlier batches go before both; so a result depends on the events alone
if all events of a key are in one partition. Rows without a log order (from a native step or an
operator) are taken in the order of time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import polars as pl

from millstream.kernels.arrays import Int64s
from millstream.kernels.frames import ORDER, TIME, visible
from millstream.kernels.late import LatenessRule, side_output, split_late
from millstream.kernels.operator import OperatorResult
from millstream.kernels.operator_base import OperatorBase
from millstream.kernels.state.keyhash import digest_columns
from millstream.kernels.time.log_order import in_log_order

_TIE = "__tie"


@dataclass(frozen=True)
class PassThroughOperator(OperatorBase):
    """An operator with one input that lets rows pass. Durations in microseconds.

    ``by`` names the columns that choose the bucket. ``side_output``: late rows go to the side output.
    """

    name: str
    by: tuple[str, ...]
    lateness_us: int
    side_output: bool

    @property
    def transparent(self) -> bool:
        return True

    @property
    def ordered(self) -> bool:
        return True

    def take_in_time(
        self,
        rows: pl.DataFrame,
        seen_us: Int64s,
        deadline_us: Int64s,
        rule: LatenessRule,
        result: OperatorResult,
    ) -> pl.DataFrame:
        """Return the rows in time; count late rows, and send them to the side output if there is one."""
        found = split_late(rows, seen_us, deadline_us, rule)
        if found.late.height:
            result.counts.update(late=found.late.height)
            result.late_by_us = found.late_by_us
            if self.side_output:
                result.late = side_output(found.late, found.late_us, rule)
        return found.in_time


def in_arrival_order(tables: Sequence[pl.DataFrame]) -> pl.DataFrame:
    """Put tables into one, sorted by arrival: by topic, partition and offset; without these, by time.

    Among rows of one time the content decides, so that a batch that is repeated has the same order.
    """
    rows = pl.concat([table[tables[0].columns] for table in tables])
    if ORDER in rows.columns:
        return in_log_order(rows)
    plain = tuple(name for name in visible(rows.columns) if not rows.schema[name].is_nested())
    tie = pl.Series(_TIE, digest_columns(rows, plain))
    return rows.hstack([tie]).sort(TIME, _TIE).drop(_TIE)
