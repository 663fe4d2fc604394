"""The ends of expired sessions: kept for as long as an event may still overlap them.

An event that would have joined an expired session makes one that overlaps it. The end of a session is
kept in the slot of the time at which the longest gap after it is over: after that, no event that is in
time by itself begins before the end. Sessions that are open when another of their key expires keep that
end themselves, so that the decision is the same for an event which joins them much later.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl

from millstream.kernels.columns import filter_rows
from millstream.kernels.frames import HASH
from millstream.kernels.sessions.spans import EXPIRED_END, TILL
from millstream.kernels.state.hash_order import sorted_distinct
from millstream.kernels.state.sorted_runs import SortedRuns
from millstream.kernels.time.watermarks import NO_WATERMARK

_FOUND = "__found"


@dataclass(frozen=True)
class ClosedSessions:
    """The expired sessions of one bucket, in slots that are ``slot_us`` wide."""

    runs: SortedRuns
    by: Sequence[str]
    slot_us: int
    gap_us: int

    def add(self, closing: pl.DataFrame, passed_us: int) -> None:
        """Keep sessions, but for those that nothing can overlap any more."""
        closed = closing.select(HASH, *self.by, TILL)
        until = closed[TILL].to_numpy() + self.gap_us
        slots = until // self.slot_us
        for slot in np.unique(slots[until >= passed_us]):
            self.runs.add(int(slot), filter_rows(closed, slots == slot), lambda rows: rows)

    def drop(self, passed_us: int) -> None:
        """Drop the ends that nothing can overlap any more."""
        for slot in [slot for slot in self.runs.slots if (slot + 1) * self.slot_us <= passed_us]:
            self.runs.drop_slot(slot)

    def with_expired_ends(self, spans: pl.DataFrame) -> pl.DataFrame:
        """Return spans, in any order, with ``__expired_end`` filled in where there was none yet."""
        unknown = spans[EXPIRED_END].is_null()
        if not unknown.any():
            return spans
        keys = [HASH, *self.by]
        hashes = sorted_distinct(spans[HASH].filter(unknown).to_numpy())
        found = [rows for slot in self.runs.slots for rows in self.runs.look_up(slot, hashes)]
        if not found:
            return spans.with_columns(pl.col(EXPIRED_END).fill_null(NO_WATERMARK))
        latest = pl.concat(found).group_by(keys).agg(pl.col(TILL).max().alias(_FOUND))
        asked = spans.filter(unknown).join(latest, on=keys, how="left", nulls_equal=True)
        ends = pl.col(_FOUND).fill_null(NO_WATERMARK).alias(EXPIRED_END)
        filled = asked.with_columns(ends).drop(_FOUND)
        return pl.concat([spans.filter(~unknown), filled])
