"""Windows that emit in panes: early, on time and late, as :mod:`millstream.kernels.trigger` defines.

State is in families of sorted runs, all by window and key:

===========  ====================================================================================
``fired``    the state of the last pane; the newest row counts. Of windows that fire once: that they have fired
``early``    pending rows before the on-time pane: one slot per window
``waiting``  late events whose split is ahead of the others: one slot per window
``late``     pending rows after the on-time pane: slots of a few windows
``… due``    timers of the early and the late phase: slots of running time
===========  ====================================================================================

A batch looks up the keys that it touches, and scans the slots of windows whose on-time pane or
expiry the watermark reaches; it never scans all open windows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import polars as pl

from millstream.kernels.frames import WINDOW
from millstream.kernels.operator import BatchContext, OperatorResult
from millstream.kernels.queryable import QueryKeys
from millstream.kernels.state.operator_state import OperatorState
from millstream.kernels.trigger import AfterCount, AfterTime, EachBatch, Trigger
from millstream.kernels.windows.pane_batch import EVENT, PaneBatch
from millstream.kernels.windows.pane_values import PaneValues
from millstream.kernels.windows.window_operator import LATE_WINDOWS, SLICE, WindowOperator


@dataclass(frozen=True)
class PaneWindowOperator(WindowOperator):
    """A windowing operator that emits in panes."""

    @property
    def by_arrival(self) -> bool:
        counted = any(isinstance(firing, AfterCount) for firing in self.triggers)
        return counted or self.emission.once

    @property
    def triggers(self) -> tuple[Trigger | None, ...]:
        return self.emission.early, self.emission.late

    @property
    def expires_after_us(self) -> int:
        return 0 if self.emission.late is None else self.lateness_us

    @property
    def tracks_late(self) -> bool:
        return self.expires_after_us > 0

    @property
    def values(self) -> PaneValues:
        return PaneValues(self.aggregation, self.emission)

    def process(
        self,
        state: OperatorState,
        inputs: Mapping[int, Sequence[pl.DataFrame]],
        context: BatchContext,
    ) -> OperatorResult:
        """Process the batch; return the panes that fire."""
        result = OperatorResult()
        clock_ms = max(context.clock_ms, state.values.get("clock_ms", 0))
        state.values["clock_ms"] = clock_ms
        fresh = self.take_in_time(inputs, context, result)
        batch = PaneBatch(self, self.values, state, replace(context, clock_ms=clock_ms))
        batch.pending_ledger.events_in = 0 if fresh is None else self.count_by_window(fresh)
        firings = [f for f in batch.firings(self._by_window(fresh, context)) if f.height]
        if firings:
            result.rows = batch.rows(firings)
        result.counts.update(batch.left_out)
        batch.drop_expired()
        batch.pending_ledger.check()
        batch.emitted_ledger.check()
        return result

    def current_rows(
        self, state: OperatorState, keys: QueryKeys | None, watermark_us: int
    ) -> pl.DataFrame:
        """Return the values of the open windows with all that has come; of parts, what no pane has given yet."""
        clock_ms = state.values.get("clock_ms", 0)
        batch = PaneBatch(
            self, self.values, state, BatchContext(watermark_us, watermark_us, clock_ms=clock_ms)
        )
        return self.open_windows(batch.current_partials(keys), watermark_us)

    @property
    def defers_late(self) -> bool:
        """Whether a late event waits for the on-time pane of its window, if that is still to come.

        It does where rows name their pane, or panes fire by count. Elsewhere the difference does not
        show, and the event is in the next pane.
        """
        by_itself = isinstance(self.emission.early, EachBatch | AfterTime)
        return not by_itself or self.emission.panes or self.by_arrival

    def _by_window(self, fresh: pl.DataFrame | None, context: BatchContext) -> pl.DataFrame | None:
        """Return the new rows, by window and key; merged, unless panes are by count."""
        if fresh is None:
            return None
        if self.by_arrival:
            numbered = fresh.with_row_index(EVENT) if self.emission.once else fresh
            return self.with_hash(self.explode_windows(numbered), context.seed)
        if not self.window.tiled:
            fresh = self.explode_windows(
                self.aggregation.merge(fresh, SLICE, *self.lateness_columns, *self.by)
            )
        else:
            fresh = self.explode_windows(fresh)
        late = [LATE_WINDOWS] if self.tracks_late else []
        if late and not self.defers_late:
            ended = self.window.ends(fresh[WINDOW].to_numpy()) <= context.watermark_before_us
            fresh = fresh.with_columns(pl.col(LATE_WINDOWS) & pl.Series(ended))
        return self.with_hash(self.aggregation.merge(fresh, WINDOW, *late, *self.by), context.seed)
