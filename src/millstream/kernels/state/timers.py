"""Timers: the keys to process at a time, found without reading the others.

A timer is a time and the hash of a key. Timers are in sorted runs by their time, in slots of time:
the due ones are a range of a few runs, found by binary search, and a slot whose time has passed is
dropped whole. A timer only triggers a look-up; the key's state decides what is done. So a timer
that no longer means anything is harmless, and none is ever retracted. But a timer that is lost
would leave its key waiting forever, so rows that wait are counted by the slots of their times.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl

from millstream.errors import CorruptionError
from millstream.kernels.arrays import Int64s
from millstream.kernels.columns import filter_rows
from millstream.kernels.frames import HASH
from millstream.kernels.state.hash_order import sorted_distinct
from millstream.kernels.state.keyhash import Hashes
from millstream.kernels.state.operator_state import OperatorState
from millstream.kernels.state.sorted_runs import Run, SortedRuns
from millstream.kernels.time.watermarks import NO_WATERMARK

_TIME_KEY = (
    "__time_key"  # UInt64: a time with its sign bit turned, so that it sorts as the time does
)
WAITING = "waiting"
_SIGN = np.uint64(1 << 63)  # turns the order of signed times into that of unsigned ones
_SLOTS_PER_WAIT = 8  # the time for which rows wait is divided into about this many slots
_SLOT_US_MIN = 10_000_000  # a slot costs a few runs however little it holds


def slot_width_us(wait_us: int) -> int:
    """Return how wide the slots of rows are that wait for so long in event time."""
    return max(_SLOT_US_MIN, -(-wait_us // _SLOTS_PER_WAIT))


@dataclass
class Timers:
    """The timers in one family of an operator's state. ``slot`` is the width of a slot of time.

    Times are in the unit of the operator: microseconds of event time, milliseconds of running
    time; ``slot`` is in the same unit.
    """

    state: OperatorState
    family: str
    slot: int

    @property
    def runs(self) -> SortedRuns:
        return self.state.runs(self.family, sort_column=_TIME_KEY)

    def add(self, times: Int64s, hashes: Hashes) -> None:
        """Set timers; those for times that :meth:`due` has been asked for already never come."""
        if not len(times):
            return
        slots = times // self.slot
        timers = pl.DataFrame({_TIME_KEY: times.view(np.uint64) ^ _SIGN, HASH: hashes})
        for slot in np.unique(slots):
            rows = filter_rows(timers, slots == slot)
            self.runs.add(int(slot), rows, self._waiting)

    def due(self, until: int) -> Hashes:
        """Return the keys (their hashes, sorted, distinct) whose time is ``until`` or earlier.

        Each timer comes once: the next call gives those of later times only.
        """
        after = self._done
        if until <= after:
            return np.empty(0, np.uint64)
        found: list[Hashes] = []
        for slot in [slot for slot in self.runs.slots if slot * self.slot <= until]:
            found += [self._between(run, after, until) for run in self.runs.slots[slot]]
            if (slot + 1) * self.slot <= until + 1:
                self.runs.drop_slot(slot)
        self.state.values[self._done_name] = until
        return sorted_distinct(np.concatenate(found)) if found else np.empty(0, np.uint64)

    @property
    def _done_name(self) -> str:
        return f"{self.family}.done"

    @property
    def _done(self) -> int:
        done: int = self.state.values.get(self._done_name, NO_WATERMARK)
        return done

    def _between(self, run: Run, after: int, until: int) -> Hashes:
        """Return the keys of a run's timers in ``(after, until]``."""
        keys: Hashes = self.runs.between(run, *_unsigned(after, until).tolist())[HASH].to_numpy()
        return keys

    def _waiting(self, timers: pl.DataFrame) -> pl.DataFrame:
        """Leave out, when runs are folded, what has come already, and what is there twice."""
        done = _unsigned(self._done)[0]
        return filter_rows(timers, timers[_TIME_KEY].to_numpy() > done).unique()


@dataclass(frozen=True)
class WaitingLedger:
    """How many rows of an operator's state wait for a time in each slot of it, ``slot`` wide.

    Of slots from before the bucket was divided from others, the number is not known: it is null.
    """

    step: str
    state: OperatorState
    slot: int

    def update(self, before: Int64s, after: Int64s, now: int) -> None:
        """Take note of what the rows waited for that a batch touched, and what they wait for after it.

        Raises:
            CorruptionError: rows have waited for a time up to ``now``, and nobody looked at them.
        """
        held: dict[str, int | None] = self.state.values.get(WAITING, {})
        counts = {int(slot): rows for slot, rows in held.items() if rows is not None}
        unknown = {int(slot) for slot, rows in held.items() if rows is None}
        for times, sign in ((before, -1), (after, 1)):
            slots, rows = np.unique(times // self.slot, return_counts=True)
            for slot, count in zip(slots.tolist(), rows.tolist(), strict=True):
                if slot not in unknown:
                    counts[slot] = counts.get(slot, 0) + sign * count
        wrong = {
            slot: rows
            for slot, rows in counts.items()
            if rows < 0 or (rows and self._is_over(slot, now))
        }
        if wrong:
            raise CorruptionError(
                f"The ledger of step {self.step!r} does not balance: {sum(wrong.values())} more rows "
                "were waiting for a timer than were found when it fired. "
                "Nothing of this batch was committed. Please report this; the log still holds every "
                "event."
            )
        waiting: dict[str, int | None] = {str(slot): rows for slot, rows in counts.items() if rows}
        waiting |= {str(slot): None for slot in unknown if not self._is_over(slot, now)}
        self.state.values[WAITING] = waiting

    def _is_over(self, slot: int, now: int) -> bool:
        return (slot + 1) * self.slot <= now + 1


def _unsigned(*times: int) -> Hashes:
    return np.array(times, np.int64).view(np.uint64) ^ _SIGN
