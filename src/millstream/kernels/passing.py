"""What operators have in common that let rows pass, in the order of their arrival.

They emit rows in the batch that brought them, with their lane and all that hides in it, and judge each
for itself: so it is late or it is not, and there are no windows that it misses.

The order of arrival is, within a partition, that of offsets. Of two partitions read in one batch the
lower goes first, and what an earlier batch read goes before all; so an answer depends on the events alone
as long as a key keeps to one partition. What came without a place in the log (out of a native step, or
from an operator) is taken in the order of time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import polars as pl

from millstream.kernels.frames import ORDER, TIME, visible
from millstream.kernels.keyhash import digest_columns
from millstream.kernels.log_order import in_log_order
from millstream.kernels.operator import Outcome

LATE_BY = "late_by"
LATE_REASON = "late_reason"
_TIE = "__tie"


@dataclass(frozen=True)
class Passing:
    """An operator with one input that lets rows pass. Durations in microseconds.

    ``by`` names the columns that choose the bucket. ``side``: late rows are given out.
    """

    name: str
    by: tuple[str, ...]
    lateness_us: int
    side: bool

    @property
    def transparent(self) -> bool:
        return True

    @property
    def heartbeat_ms(self) -> int | None:
        return None

    @property
    def ordered(self) -> bool:
        return True

    def holds_back(self, watermark_us: int) -> int:
        return watermark_us

    def pack(self, tables: Sequence[pl.DataFrame], number: int = 0) -> pl.DataFrame:  # noqa: ARG002
        return pl.concat(tables)

    def in_time(
        self,
        rows: pl.DataFrame,
        late: npt.NDArray[np.bool_],
        missed_us: npt.NDArray[np.int64],
        reason: str,
        outcome: Outcome,
    ) -> pl.DataFrame:
        """Take out the rows that are late, count them, and give them out if they are wanted."""
        if not late.any():
            return rows
        outcome.counts.update(late=int(late.sum()))
        outcome.late_by_us = int(missed_us.max())
        if self.side:
            by = pl.Series(LATE_BY, missed_us).cast(pl.Duration("us"))
            late_rows = rows.hstack([by]).filter(pl.Series(late))
            outcome.late = late_rows.with_columns(pl.lit(reason).alias(LATE_REASON))
        return rows.filter(pl.Series(~late))


def together(tables: Sequence[pl.DataFrame]) -> pl.DataFrame:
    """Put tables into one, sorted by arrival: by topic, partition and offset; without these, by time.

    Among rows of one time the content decides, so that a batch that is repeated has the same order.
    """
    rows = pl.concat(table.select(tables[0].columns) for table in tables)
    if ORDER in rows.columns:
        return in_log_order(rows)
    plain = tuple(name for name in visible(rows.columns) if not rows.schema[name].is_nested())
    tie = pl.Series(_TIE, digest_columns(rows, plain))
    return rows.hstack([tie]).sort(TIME, _TIE).drop(_TIE)
