"""Where sessions were that have expired: kept for as long as an event may still overlap them.

An event that would have joined an expired session makes one that overlaps it, and somebody will want
to know. What is kept of a session is its span, in slots by the time that its longest gap after its
end is over: with the lateness, no event that is in time reaches it after that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl

from millstream.kernels.frames import HASH
from millstream.kernels.hash_order import distinct
from millstream.kernels.session_spans import END, FROM, GAP, START, TILL, Session
from millstream.kernels.sorted_runs import SortedRuns

_AT = "__at"
_CLOSED = ".closed"  # ends the names of columns of the closed session, beside those of a span


@dataclass(frozen=True)
class ClosedSessions:
    """The expired sessions of one bucket, in slots that are ``slot_us`` wide."""

    runs: SortedRuns
    by: Sequence[str]
    slot_us: int
    session: Session

    @property
    def _columns(self) -> list[str]:
        return [HASH, *self.by, START, END, TILL, GAP]

    def add(self, closing: pl.DataFrame, passed_us: int) -> None:
        """Keep sessions, but for those that nothing can overlap any more."""
        closed = closing.select(self._columns)
        until = closed[END].to_numpy() + closed[GAP].to_numpy()
        slots = until // self.slot_us
        for slot in np.unique(slots[until > passed_us]):
            self.runs.add(int(slot), closed.filter(pl.Series(slots == slot)), lambda rows: rows)

    def drop(self, passed_us: int) -> None:
        """Forget what nothing can overlap any more."""
        for slot in [slot for slot in self.runs.slots if (slot + 1) * self.slot_us <= passed_us]:
            self.runs.drop_slot(slot)

    def meet(self, spans: pl.DataFrame, others: pl.DataFrame) -> pl.Series:
        """Say which spans overlap a session that had expired before they reached it.

        ``others`` are sessions of the same keys that are not closed yet but may have expired for
        the lanes of the events that made the spans.
        """
        keys = [HASH, *self.by]
        hashes = distinct(spans[HASH].to_numpy())
        found = [rows for slot in self.runs.slots for rows in self.runs.look_up(slot, hashes)]
        closed = pl.concat(
            [others.select(self._columns), *(f.select(self._columns) for f in found)]
        )
        closed = closed.rename({name: f"{name}{_CLOSED}" for name in (START, END, TILL, GAP)})
        numbered = spans.select(*keys, START, FROM).with_row_index(_AT)
        pairs = numbered.join(closed, on=keys, nulls_equal=True)
        till = pl.col(f"{TILL}{_CLOSED}")
        meets = (till >= pl.col(START)) & (till < pl.col(FROM))
        meets &= pl.col(FROM) <= till + pl.col(f"{GAP}{_CLOSED}")
        length_us = self.session.max_length_us
        if length_us is not None:
            meets &= pl.col(START) // length_us == pl.col(f"{START}{_CLOSED}") // length_us
        met = pairs.filter(meets)[_AT].unique()
        return numbered.select(pl.col(_AT).is_in(met.implode())).to_series()
