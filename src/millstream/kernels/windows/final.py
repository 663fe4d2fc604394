"""Windows that emit once: one row per window and key, when the window expires.

With W the watermark after the batch and L the allowed lateness, a window ``[s, e)`` expires when
``W ≥ e + L``. Runs hold partials per slice of time and key, so an event is kept once, however many
windows it is in; a slot all of whose windows have expired is dropped whole.

Runs hold partials, not values: the value of a key is the merge of its partials, so adding a
batch needs no look-up. A slice is read as often as windows that hold it expire.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl

from millstream.kernels.aggregation import event_count
from millstream.kernels.columns import filter_rows
from millstream.kernels.frames import HASH, ROWS, WEIGHT, WINDOW
from millstream.kernels.operator import BatchContext, OperatorResult
from millstream.kernels.queryable import QueryKeys, held_in_runs
from millstream.kernels.state.hash_order import sort_by_window_and_hash
from millstream.kernels.state.ledger import StateLedger
from millstream.kernels.state.operator_state import OperatorState
from millstream.kernels.state.sorted_runs import SortedRuns
from millstream.kernels.time.watermarks import NO_WATERMARK
from millstream.kernels.windows.window_operator import EXPIRED_WINDOWS, SLICE, WindowOperator

_PARTIALS = "partials"


@dataclass(frozen=True)
class FinalWindowOperator(WindowOperator):
    """A windowing operator that emits final results."""

    def process(
        self,
        state: OperatorState,
        inputs: Mapping[int, Sequence[pl.DataFrame]],
        context: BatchContext,
    ) -> OperatorResult:
        """Add the batch's partials to state; return the rows of the windows that it expires."""
        result = OperatorResult()
        partials = self.take_in_time(inputs, context, result)
        runs = state.runs(_PARTIALS, ROWS)
        ledger = StateLedger(self.name, (runs,), result.counts["held"])
        if partials is not None:
            partials = self.with_hash(self._merge(partials), context.seed)
        expired = self._expired(runs, partials, context, ledger)
        if expired is not None:
            result.rows = self.result_rows(sort_by_window_and_hash(expired))
        self._hold(runs, partials, context.watermark_us)
        ledger.check()
        return result

    def current_rows(
        self, state: OperatorState, keys: QueryKeys | None, watermark_us: int
    ) -> pl.DataFrame:
        """Return the values of the open windows so far, which are not emitted yet."""
        held = held_in_runs(state.runs(_PARTIALS, ROWS), keys, self.by)
        windows = [self.explode_windows(rows) for rows in held if rows.height]
        return self.open_windows(windows, watermark_us)

    def _merge(self, partials: pl.DataFrame) -> pl.DataFrame:
        carried = [HASH] if HASH in partials.columns else []
        return self.aggregation.merge(
            partials, SLICE, *self.lateness_columns, *self.by, first=carried
        )

    def _expired(
        self,
        runs: SortedRuns,
        partials: pl.DataFrame | None,
        context: BatchContext,
        ledger: StateLedger,
    ) -> pl.DataFrame | None:
        """Merge the partials of the windows that this batch expires."""
        lateness_us = self.expires_after_us
        after_us, upto_us = (
            context.watermark_before_us - lateness_us,
            context.watermark_us - lateness_us,
        )
        if (
            context.watermark_us <= NO_WATERMARK
            or self.window.end_at_or_before(upto_us) <= after_us
        ):
            return None
        slices = [] if partials is None else [partials]
        for slot in runs.slots:
            if self.first_end(slot) <= upto_us:
                for rows in runs.scan(slot):
                    runs.spend(slot, self._events_leaving(rows, after_us, upto_us))
                    slices.append(rows)
        windows = [self._ending(rows, after_us, upto_us) for rows in slices]
        windows = [rows for rows in windows if rows.height]
        if not windows:
            return None
        slices_of = pl.concat(windows) if len(windows) > 1 else windows[0]
        merged = self.aggregation.merge(slices_of, WINDOW, *self.by, first=[HASH])
        ledger.events_out += event_count(merged)
        if not self.window.tiled:  # partials of several windows leave with the last of them
            for rows in slices:
                ledger.events_out -= self._events_emitted(rows, after_us, upto_us)
                ledger.events_out += self._events_leaving(rows, after_us, upto_us)
        return merged.filter(pl.col(WEIGHT) != 0) if self.aggregation.weighted else merged

    def _ending(self, slices: pl.DataFrame, after_us: int, upto_us: int) -> pl.DataFrame:
        """Return the rows of the windows that end in (after, upto], once for each of them."""
        starts = slices[SLICE].to_numpy()
        if self.window.tiled:
            ends = self.window.ends(starts)
            here = (ends > after_us) & (ends <= upto_us)
            rows = slices if here.all() else filter_rows(slices, here)
            return rows.rename({SLICE: WINDOW})
        ended = self.window.count_ended(starts, starts * 0 + upto_us)
        before = self.window.count_ended(starts, starts * 0 + after_us)
        spread = self.explode_windows(filter_rows(slices, ended > before))
        ends = self.window.ends(spread[WINDOW].to_numpy())
        return filter_rows(spread, (ends > after_us) & (ends <= upto_us))

    def _events_emitted(self, slices: pl.DataFrame, after_us: int, upto_us: int) -> int:
        """Count the events to emit, once for each window that ends in (after, upto]."""
        starts, gone = slices[SLICE].to_numpy(), slices[EXPIRED_WINDOWS].to_numpy()
        before, now = (
            np.maximum(self.window.count_ended(starts, starts * 0 + at_us), gone)
            for at_us in (after_us, upto_us)
        )
        return int((slices[ROWS].to_numpy() * (now - before)).sum())

    def _events_leaving(self, slices: pl.DataFrame, after_us: int, upto_us: int) -> int:
        """Count the events whose last window ends in (after, upto]: they must not be held any more."""
        starts = slices[SLICE].to_numpy()
        last = self.window.ends(self.last_windows(starts))
        leaving = (last > after_us) & (last <= upto_us)
        return int(slices[ROWS].to_numpy()[leaving].sum())

    def _hold(self, runs: SortedRuns, partials: pl.DataFrame | None, watermark_us: int) -> None:
        """Store the partials of open windows, and drop the slots whose time has passed."""
        for slot in [s for s in runs.slots if self.slot_expiry(s) <= watermark_us]:
            runs.drop_slot(slot)
        if partials is None:
            return
        stored = self.aggregation.for_state(self._open(partials, watermark_us))
        for slot, rows in self.by_slot(stored, SLICE):
            runs.add(slot, rows, self._merge, alive=lambda held: self._open(held, watermark_us))

    def _open(self, partials: pl.DataFrame, watermark_us: int) -> pl.DataFrame:
        """Leave out partials that are in no open window."""
        slices = partials[SLICE].to_numpy()
        passed = self.window.count_ended(
            slices, slices * 0 + (watermark_us - self.expires_after_us)
        )
        is_open = passed < self.window.counts(slices)
        return partials if is_open.all() else filter_rows(partials, is_open)
