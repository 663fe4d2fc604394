"""Windows that emit once: one row per window and key, when the window expires.

With W the watermark after the batch and L the allowed lateness, a window ``[s, e)`` expires when
``W ≥ e + L``. Runs hold partials per piece of time and key, so an event is kept once, however many
windows it is in; a slot all of whose windows have expired is dropped whole.

Runs hold partials, not values: what is known of a key is the merge of its partials, so taking a
batch in needs no look-up. A piece is read as often as windows that hold it expire.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl

from millstream.kernels.aggregation import WEIGHT, rows_in
from millstream.kernels.frames import HASH, ROWS, WINDOW
from millstream.kernels.hash_order import by_window_and_hash
from millstream.kernels.held_events import HeldEvents
from millstream.kernels.operator import Moment, OperatorState, Outcome
from millstream.kernels.sorted_runs import SortedRuns
from millstream.kernels.watermarks import UNSEEN
from millstream.kernels.window_step import GONE, PIECE, WindowStep

_PARTIALS = "partials"


@dataclass(frozen=True)
class WindowAggregate(WindowStep):
    """A windowing operator that emits final results."""

    def process(
        self, state: OperatorState, arrived: Mapping[int, Sequence[pl.DataFrame]], moment: Moment
    ) -> Outcome:
        """Take the batch's partials into state; give the rows of the windows that it expires."""
        outcome = Outcome()
        partials = self.arrivals(arrived, moment, outcome)
        runs = state.runs(_PARTIALS, ROWS)
        ledger = HeldEvents(self.name, (runs,), outcome.counts["held"])
        if partials is not None:
            partials = self.hashed(self._merge(partials), moment.seed)
        expired = self._expired(runs, partials, moment, ledger)
        if expired is not None:
            outcome.rows = self.read_off(by_window_and_hash(expired))
        self._hold(runs, partials, moment.watermark_us)
        ledger.close()
        return outcome

    def _merge(self, partials: pl.DataFrame) -> pl.DataFrame:
        carried = [HASH] if HASH in partials.columns else []
        return self.aggregation.merge(partials, PIECE, *self.judgements, *self.by, first=carried)

    def _expired(
        self,
        runs: SortedRuns,
        partials: pl.DataFrame | None,
        moment: Moment,
        ledger: HeldEvents,
    ) -> pl.DataFrame | None:
        """Gather and merge what is in the windows that this batch expires."""
        lateness_us = self.expires_after_us
        after_us, upto_us = moment.before_us - lateness_us, moment.watermark_us - lateness_us
        if moment.watermark_us <= UNSEEN or self.window.ended(upto_us) <= after_us:
            return None
        pieces = [] if partials is None else [partials]
        for slot in runs.slots:
            if self.first_end(slot) <= upto_us:
                for rows in runs.scan(slot):
                    runs.spend(slot, self._leaving(rows, after_us, upto_us))
                    pieces.append(rows)
        windows = [self._ending(rows, after_us, upto_us) for rows in pieces]
        windows = [rows for rows in windows if rows.height]
        if not windows:
            return None
        merged = self.aggregation.merge(pl.concat(windows), WINDOW, *self.by, first=[HASH])
        ledger.left += rows_in(merged)
        if not self.window.tiled:  # what was in several windows has left with the last of them
            for rows in pieces:
                ledger.left -= self._given(rows, after_us, upto_us)
                ledger.left += self._leaving(rows, after_us, upto_us)
        return merged.filter(pl.col(WEIGHT) != 0) if self.aggregation.weighted else merged

    def _ending(self, pieces: pl.DataFrame, after_us: int, upto_us: int) -> pl.DataFrame:
        """Give the rows of the windows that end in (after, upto], once for each of them."""
        starts = pieces[PIECE].to_numpy()
        if self.window.tiled:
            ends = self.window.ends(starts)
            here = (ends > after_us) & (ends <= upto_us)
            rows = pieces if here.all() else pieces.filter(pl.Series(here))
            return rows.rename({PIECE: WINDOW})
        ended = self.window.passed(starts, starts * 0 + upto_us)
        before = self.window.passed(starts, starts * 0 + after_us)
        spread = self.each_window(pieces.filter(pl.Series(ended > before)))
        ends = self.window.ends(spread[WINDOW].to_numpy())
        return spread.filter(pl.Series((ends > after_us) & (ends <= upto_us)))

    def _given(self, pieces: pl.DataFrame, after_us: int, upto_us: int) -> int:
        """Count the events that are to be given out, once for each window that ends in (after, upto]."""
        starts, gone = pieces[PIECE].to_numpy(), pieces[GONE].to_numpy()
        before, now = (
            np.maximum(self.window.passed(starts, starts * 0 + at_us), gone)
            for at_us in (after_us, upto_us)
        )
        return int((pieces[ROWS].to_numpy() * (now - before)).sum())

    def _leaving(self, pieces: pl.DataFrame, after_us: int, upto_us: int) -> int:
        """Count the events whose last window ends in (after, upto]: nothing of them is to be held."""
        starts = pieces[PIECE].to_numpy()
        last = self.window.ends(self.last_windows(starts))
        leaving = (last > after_us) & (last <= upto_us)
        return int(pieces[ROWS].to_numpy()[leaving].sum())

    def _hold(self, runs: SortedRuns, partials: pl.DataFrame | None, watermark_us: int) -> None:
        """Put what is still open into the runs, and drop the slots whose time has passed."""
        for slot in [s for s in runs.slots if self.slot_expiry(s) <= watermark_us]:
            runs.drop_slot(slot)
        if partials is None:
            return
        stored = self.aggregation.stored(self._open(partials, watermark_us))
        for slot, rows in self.by_slot(stored, PIECE):
            runs.add(slot, rows, self._merge, alive=lambda held: self._open(held, watermark_us))

    def _open(self, partials: pl.DataFrame, watermark_us: int) -> pl.DataFrame:
        """Leave out what is in no window that is still open."""
        pieces = partials[PIECE].to_numpy()
        passed = self.window.passed(pieces, pieces * 0 + (watermark_us - self.expires_after_us))
        is_open = passed < self.window.counts(pieces)
        return partials if is_open.all() else partials.filter(pl.Series(is_open))
