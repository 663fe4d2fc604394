"""Rows that wait until the watermark has passed their time, found without reading the others.

They are in sorted runs by their time, in slots of time, as timers are: those that are due are a range of a
few runs, found by binary search, and a slot whose time has passed is dropped whole.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import polars as pl

from millstream.kernels.arrays import Bools
from millstream.kernels.changes import concat_present
from millstream.kernels.columns import filter_rows
from millstream.kernels.frames import TIME
from millstream.kernels.state.keyhash import Hashes
from millstream.kernels.state.ledger import StateLedger
from millstream.kernels.state.operator_state import OperatorState
from millstream.kernels.state.sorted_runs import EACH_ROW, Run, Share, SortedRuns
from millstream.kernels.time.watermarks import NO_WATERMARK

SLOT_US = 3_600_000_000
_TIME_KEY = (
    "__time_key"  # UInt64: the time with its sign bit turned, so that it sorts as the time does
)
_SIGN = np.uint64(1 << 63)


@dataclass
class WaitingRows:
    """The rows, with ``__time`` and fixed columns, in one family of an operator's state.

    They have no ``__hash`` yet: ``hashes`` gives it.
    """

    state: OperatorState
    family: str
    hashes: Callable[[pl.DataFrame], Hashes]

    @property
    def runs(self) -> SortedRuns:
        return self.state.runs(self.family, EACH_ROW, sort_column=_TIME_KEY, owned=self._owned)

    def add(self, rows: pl.DataFrame) -> None:
        """Let rows wait; their times are after all that :meth:`take` has been asked for."""
        if not rows.height:
            return
        times = rows[TIME].to_numpy()
        slots = times // SLOT_US
        keyed = rows.hstack([pl.Series(_TIME_KEY, times.view(np.uint64) ^ _SIGN)])
        for slot in np.unique(slots):
            mine = filter_rows(keyed, slots == slot)
            self.runs.add(int(slot), mine, lambda rows: rows, alive=self._waiting)

    def due(
        self, came: pl.DataFrame | None, until_us: int, ledger: StateLedger
    ) -> pl.DataFrame | None:
        """Return the rows whose time is ``until_us`` or earlier, of those that waited and those that came.

        The others wait from now on. ``ledger`` counts what leaves the state, and what comes into it.
        """
        held = self.take(until_us)
        ledger.events_out += 0 if held is None else held.height
        if came is None:
            return held
        comes_due = came[TIME] <= until_us
        if comes_due.all():
            return concat_present([held, came])
        kept = came.filter(~comes_due)
        self.add(kept)
        ledger.events_in += kept.height
        return concat_present([held, came.filter(comes_due)])

    def take(self, until_us: int) -> pl.DataFrame | None:
        """Return the rows whose time is ``until_us`` or earlier, each once; None if there are none."""
        after_us = self._done_us
        if until_us <= after_us:
            return None
        found: list[pl.DataFrame] = []
        for slot in sorted(slot for slot in self.runs.slots if slot * SLOT_US <= until_us):
            due = [self._between(run, after_us, until_us) for run in self.runs.slots[slot]]
            self.runs.spend(slot, sum(rows.height for rows in due))
            found += due
            if (slot + 1) * SLOT_US <= until_us + 1:
                self.runs.drop_slot(slot)
        self.state.values[self._done_name] = until_us
        rows = concat_present(found)
        return None if rows is None else rows.drop(_TIME_KEY)

    def _owned(self, rows: pl.DataFrame, share: Share) -> Bools:
        return share.has(self.hashes(rows))

    @property
    def _done_name(self) -> str:
        return f"{self.family}.done"

    @property
    def _done_us(self) -> int:
        done: int = self.state.values.get(self._done_name, 2 * NO_WATERMARK)
        return done

    def _between(self, run: Run, after_us: int, until_us: int) -> pl.DataFrame:
        """Return the rows of a run with times in ``(after_us, until_us]``."""
        return self.runs.between(run, *_unsigned(after_us, until_us).tolist())

    def _waiting(self, rows: pl.DataFrame) -> pl.DataFrame:
        """Leave out, when runs are folded, the rows that were taken."""
        done = _unsigned(self._done_us)[0]
        return filter_rows(rows, rows[_TIME_KEY].to_numpy() > done)


def _unsigned(*times: int) -> Hashes:
    return np.array(times, np.int64).view(np.uint64) ^ _SIGN
