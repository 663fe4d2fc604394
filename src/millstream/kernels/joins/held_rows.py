"""The rows of one input that an interval join holds until no partner of theirs can come any more.

Rows are in slots of event time, by the hash of their key. A row at t waits until W > t + wait, W being the
operator's watermark; a slot is dropped as a whole once that is true of all its rows.

Where rows without a partner are in the result, each row has a number. A row is never rewritten: that it has a
partner is a *mark* with its number, in runs of its own. Rows that wait for their end have a timer, so those
that are due are found without reading the others.

When a slot is dropped, each of its rows must have a mark, or have come out alone. So a timer that is lost, or
a row that comes out twice, is noticed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import polars as pl

from millstream.errors import CorruptionError
from millstream.kernels.arrays import Bools, Int64s
from millstream.kernels.changes import concat_present
from millstream.kernels.columns import filter_rows
from millstream.kernels.frames import HASH, TIME
from millstream.kernels.operator import BatchContext
from millstream.kernels.state.hash_order import sorted_distinct
from millstream.kernels.state.numbers import take_numbers
from millstream.kernels.state.operator_state import OperatorState
from millstream.kernels.state.sorted_runs import EACH_ROW, SortedRuns
from millstream.kernels.state.timers import Timers

NUMBER = "__number"  # Int64: distinguishes the rows of one input in a bucket


def numbered_families(*families: str) -> dict[str, tuple[str, ...]]:
    """Return which families have the numbers of held rows, by the value that counts them."""
    return {_next_of(name): (name, _marks_of(name)) for name in families}


def _next_of(family: str) -> str:
    return f"{family}.next"


def _marks_of(family: str) -> str:
    return f"{family}.matched"


@dataclass(frozen=True)
class HeldRows:
    """The held rows of one input in one bucket. Durations in microseconds.

    ``marked``: it is known which rows have a partner. ``timed``: those without one come out when they are due.
    """

    state: OperatorState
    family: str
    wait_us: int
    slot_us: int
    marked: bool
    timed: bool

    @property
    def runs(self) -> SortedRuns:
        return self.state.runs(self.family, EACH_ROW, numbered=NUMBER)

    @property
    def marks(self) -> SortedRuns:
        return self.state.runs(_marks_of(self.family), EACH_ROW, numbered=NUMBER)

    @property
    def timers(self) -> Timers:
        return Timers(self.state, f"{self.family}.due", self.slot_us)

    def numbered(self, rows: pl.DataFrame) -> pl.DataFrame:
        """Give each row a number that no other row of the input has in this bucket."""
        numbers = take_numbers(self.state.values, _next_of(self.family), rows.height)
        return rows.hstack([pl.Series(NUMBER, numbers)])

    def is_due(self, rows: pl.DataFrame, watermark_us: int) -> Bools:
        """Return for each row whether no partner can come any more."""
        due: Bools = rows[TIME].to_numpy() + self.wait_us < watermark_us
        return due

    # ── looking up ──────────────────────────────────────────────────────────────────────────

    def near(self, others: pl.DataFrame, low_us: int, high_us: int) -> pl.DataFrame | None:
        """Return the rows that may be partners of others: at their times, plus ``low`` to ``high``.

        Rows come along that have only the hash, or are only in a slot that the interval reaches into.
        """
        order = np.argsort(others[TIME].to_numpy(), kind="stable")
        times, hashes = others[TIME].to_numpy()[order], others[HASH].to_numpy()[order]
        found: list[pl.DataFrame | None] = []
        for slot in sorted(self.runs.slots):
            bounds = (slot - high_us, slot + self.slot_us - low_us)
            first, end = np.searchsorted(times, bounds)
            if end > first:
                found += self.runs.look_up(slot, sorted_distinct(hashes[first:end]))
        return concat_present(found)

    def without_mark(self, rows: pl.DataFrame) -> pl.DataFrame:
        """Leave out the rows that have had a partner before."""
        if not rows.height:
            return rows
        marks: list[Int64s] = [np.empty(0, np.int64)]
        for slot, part in self._by_slot(rows):
            found = self.marks.look_up(slot, sorted_distinct(part[HASH].to_numpy()))
            marks += [marked[NUMBER].to_numpy() for marked in found]
        return filter_rows(rows, ~np.isin(rows[NUMBER].to_numpy(), np.concatenate(marks)))

    def take_due(self, context: BatchContext) -> pl.DataFrame | None:
        """Return the rows without a partner for which the batch's watermark is the first past their end."""
        hashes = self.timers.due(context.watermark_us - 1)
        first_us = context.watermark_before_us - self.wait_us
        end_us = context.watermark_us - self.wait_us
        found = [
            _between(rows, first_us, end_us)
            for slot in sorted(self.runs.slots)
            if len(hashes) and slot + self.slot_us > first_us and slot < end_us
            for rows in self.runs.look_up(slot, hashes)
        ]
        rows = concat_present(found)
        if rows is None:
            return None
        alone = self.without_mark(rows)
        for slot, part in self._by_slot(alone):
            self.runs.spend(slot, part.height)
        return alone

    def _by_slot(self, rows: pl.DataFrame) -> Iterator[tuple[int, pl.DataFrame]]:
        slots = rows[TIME].to_numpy() // self.slot_us * self.slot_us
        for slot in np.unique(slots).tolist():
            yield slot, filter_rows(rows, slots == slot)

    # ── changing ────────────────────────────────────────────────────────────────────────────

    def add(self, rows: pl.DataFrame, matched: Bools | None = None) -> None:
        """Hold rows that are not due; ``matched`` says which of them have a partner, where that is known."""
        for slot, part in self._by_slot(rows):
            self.runs.add(slot, part, _as_they_are, all_spent_goes=False)
        if matched is None:
            return
        if self.marked:
            self.mark(filter_rows(rows, matched))
        if self.timed:
            waiting = filter_rows(rows, ~matched)
            self.timers.add(waiting[TIME].to_numpy() + self.wait_us, waiting[HASH].to_numpy())

    def mark(self, rows: pl.DataFrame) -> None:
        """Note that rows have a partner: those that have no mark yet."""
        for slot, part in self._by_slot(rows[[HASH, TIME, NUMBER]]):
            self.marks.add(slot, part.drop(TIME), _as_they_are)

    def drop_expired(self, watermark_us: int, step: str) -> int:
        """Drop the slots all of whose rows are due; return how many rows had not come out alone.

        Raises:
            CorruptionError: some of these have no mark.
        """
        dropped = 0
        for slot in sorted(self.runs.slots):
            if slot + self.slot_us - 1 + self.wait_us >= watermark_us:
                break
            known = slot not in self.runs.unsettled | self.marks.unsettled
            rows, marks = self.runs.drop_slot(slot), self.marks.drop_slot(slot)
            if known and (marks > rows or (self.timed and marks != rows)):
                raise CorruptionError(
                    f"The ledger of step {step!r} does not balance: {rows} rows have not come out alone, "
                    f"and {marks} have had a partner. Nothing of this batch was committed. Please report "
                    "this; the log still holds every event."
                )
            dropped += rows
        return dropped


def _between(rows: pl.DataFrame, first_us: int, end_us: int) -> pl.DataFrame:
    times = rows[TIME].to_numpy()
    return filter_rows(rows, (times >= first_us) & (times < end_us))


def _as_they_are(rows: pl.DataFrame) -> pl.DataFrame:
    return rows
