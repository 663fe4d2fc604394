"""Count windows over rows that are taken back: of the rows that are there, in the order of their times.

In the order of arrival, one event that is taken back would move all events after it to other windows, without an
end. So a row waits until no retraction of it can be in time any more, and only then gets its place. With W the
watermark, L the allowed lateness, r the watermark that a row saw, and t its time:

=============  ==============================================================================================
a row is late  when ``r > t + L``: an event and its retraction alike, so one of them is late whenever the other
               that came before it was
a row is       when ``W > t + L``. What was taken back has gone by then, as if it had never come.
final
its place      is by its time among the final rows of its key, and of equal times by a hash of its values: rows that
               an operator made have no place in the log
a window       comes with the row that fills it, or, with a timeout, when that is final which is as late as the
               timeout: here an event is in a window if its time is before that
=============  ==============================================================================================

So results depend on the rows alone, also for keys in several partitions. Final rows are as if they had come straight
from a source, and aggregates need not take anything back. How rows wait, :mod:`millstream.kernels.final_rows` says.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import polars as pl

from millstream.kernels import late
from millstream.kernels.final_rows import ChangingRows, changes_in_time, with_sign
from millstream.kernels.frames import HASH, ORDER, TIME, WATERMARK_SEEN
from millstream.kernels.operator import BatchContext, OperatorResult, Prepared
from millstream.kernels.state.operator_state import OperatorState
from millstream.kernels.state.row_digest import digest_rows
from millstream.kernels.time.watermarks import delayed_watermark
from millstream.kernels.windows.count_windows import CountWindowOperator


@dataclass(frozen=True)
class SignedCountWindowOperator(CountWindowOperator):
    """One operator of count windows over rows that may be taken back."""

    lateness_us: int = 0

    @property
    def ordered(self) -> bool:
        return False

    def output_watermark(self, watermark_us: int) -> int:
        """Return the watermark of the output: rows wait for the lateness."""
        return delayed_watermark(watermark_us, self.lateness_us)

    # ── before the shuffle ──────────────────────────────────────────────────────────────────

    @property
    def _identity(self) -> list[str]:
        """The columns in which an event and its retraction are equal, besides the time."""
        return list(dict.fromkeys([*self.by, *sorted(self.aggregation.columns_read)]))

    def prepare(self, rows: pl.DataFrame, number: int = 0) -> Prepared:  # noqa: ARG002
        """Give rows an order by their values; drop columns that are not needed."""
        own = [rows[name] for name in self._identity]
        values = own or [pl.zeros(rows.height, pl.Int8, eager=True)]
        order = pl.Series(ORDER, digest_rows(values))
        return Prepared(with_sign(rows, self._identity).hstack([order]))

    # ── after the shuffle ───────────────────────────────────────────────────────────────────

    def process(
        self,
        state: OperatorState,
        inputs: Mapping[int, Sequence[pl.DataFrame]],
        context: BatchContext,
    ) -> OperatorResult:
        """Hold the batch's rows; take those that are final into windows, and give the rows to emit.

        Raises:
            CorruptionError: an event was taken back that never came.
        """
        result = OperatorResult(counts=Counter())
        changes = changes_in_time(
            inputs.get(0, ()), self.by, self.lateness_us, context, result, rule=late.COUNT_WINDOW
        )
        final = ChangingRows(self.name, self.lateness_us).take(state, changes, context.watermark_us)
        if final is not None:
            final = final.sort(TIME, ORDER, HASH, maintain_order=True)
            final = final.with_columns(pl.col(TIME).alias(WATERMARK_SEEN))
        passed = replace(
            context,
            watermark_before_us=self.output_watermark(context.watermark_before_us),
            watermark_us=self.output_watermark(context.watermark_us),
        )
        taken = self.take(state, final, passed)
        taken.counts, taken.late_by_us = result.counts, result.late_by_us
        return taken
