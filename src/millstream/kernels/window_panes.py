"""Windows that emit in panes: early, on time and late, as :mod:`millstream.kernels.emission` defines.

State is in families of sorted runs, all by window and key:

===========  ====================================================================================
``fired``    what is known of the last pane; the newest row counts
``early``    what is pending before the on-time pane: one slot per window
``waiting``  late events whose lane is ahead of the others: one slot per window
``late``     what is pending after the on-time pane: slots of a few windows
``… due``    timers of the early and the late phase: slots of running time
===========  ====================================================================================

A batch looks up the keys that it touches, and scans the slots of windows whose on-time pane or
expiry the watermark brings; it never goes over all that is open.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import polars as pl

from millstream.kernels.emission import AfterCount, AfterTime, EachBatch, Firing
from millstream.kernels.frames import WINDOW
from millstream.kernels.operator import Moment, OperatorState, Outcome
from millstream.kernels.pane_batch import PaneBatch
from millstream.kernels.pane_values import PaneValues
from millstream.kernels.window_step import LATE, PIECE, WindowStep


@dataclass(frozen=True)
class WindowPanes(WindowStep):
    """A windowing operator that emits in panes."""

    @property
    def by_arrival(self) -> bool:
        return any(isinstance(firing, AfterCount) for firing in self.firings)

    @property
    def firings(self) -> tuple[Firing | None, ...]:
        return self.emission.early, self.emission.late

    @property
    def expires_after_us(self) -> int:
        return 0 if self.emission.late is None else self.lateness_us

    @property
    def tells_late(self) -> bool:
        return self.expires_after_us > 0

    @property
    def values(self) -> PaneValues:
        return PaneValues(self.aggregation, self.emission)

    def process(
        self, state: OperatorState, arrived: Mapping[int, Sequence[pl.DataFrame]], moment: Moment
    ) -> Outcome:
        """Take the batch in; give the panes that it brings."""
        outcome = Outcome()
        clock_ms = max(moment.clock_ms, state.values.get("clock_ms", 0))
        state.values["clock_ms"] = clock_ms
        fresh = self.arrivals(arrived, moment, outcome)
        batch = PaneBatch(self, self.values, state, replace(moment, clock_ms=clock_ms))
        batch.pending.came = 0 if fresh is None else self.events_by_window(fresh)
        firings = [f for f in batch.firings(self._by_window(fresh, moment)) if f.height]
        if firings:
            outcome.rows = batch.rows(firings)
        batch.drop_expired()
        batch.pending.close()
        batch.told.close()
        return outcome

    @property
    def waits(self) -> bool:
        """Whether a late event waits for the on-time pane of its window, if that is still to come.

        It does where rows tell which pane they are, or come after so many events. Elsewhere nobody
        can tell, and what has come is told with the next pane.
        """
        by_itself = isinstance(self.emission.early, EachBatch | AfterTime)
        return not by_itself or self.emission.panes or self.by_arrival

    def _by_window(self, fresh: pl.DataFrame | None, moment: Moment) -> pl.DataFrame | None:
        """Give what came, by window and key; merged, unless panes are by count."""
        if fresh is None:
            return None
        if self.by_arrival:
            return self.hashed(self.each_window(fresh), moment.seed)
        if not self.window.tiled:
            fresh = self.each_window(
                self.aggregation.merge(fresh, PIECE, *self.judgements, *self.by)
            )
        else:
            fresh = self.each_window(fresh)
        late = [LATE] if self.tells_late else []
        if late and not self.waits:
            ended = self.window.ends(fresh[WINDOW].to_numpy()) <= moment.before_us
            fresh = fresh.with_columns(pl.col(LATE) & pl.Series(ended))
        return self.hashed(self.aggregation.merge(fresh, WINDOW, *late, *self.by), moment.seed)
