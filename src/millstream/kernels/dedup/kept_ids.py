"""The ids that were kept, each with the time of its event: the exact state of deduplication.

A kept event at time t can have a repeat as long as an event with a time of ``t + within`` or less
may still come and not be late, which is while ``W ≤ t + within + lateness``, W being the operator's
watermark. Entries are in slots of event time; a slot is deleted as a whole once that has passed for all of
it. Which entries are still there never changes a result: a repeat is decided by the distance between
its time and the kept event's.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl

from millstream.kernels.arrays import Bools, Int64s
from millstream.kernels.dedup.event_ids import EventIds, SearchRanges, by_time_slot
from millstream.kernels.frames import HASH, TIME
from millstream.kernels.state.sorted_runs import SortedRuns

CHECK = "__check"  # UInt64: the second hash of an id
_SLOTS = 8  # the time for which an entry is held is divided into about this many slots
_SLOT_US_MIN = 10_000_000  # a slot costs a few runs however little it holds


@dataclass(frozen=True)
class KeptIds:
    """The kept ids of one bucket. Durations in microseconds."""

    runs: SortedRuns
    within_us: int
    lateness_us: int

    @property
    def slot_us(self) -> int:
        return max(_SLOT_US_MIN, -(-(self.within_us + self.lateness_us) // _SLOTS))

    def search_ranges(self, events: EventIds) -> SearchRanges:
        """Return how far each event looks for an earlier one: ``within`` to both sides, inclusive."""
        return SearchRanges(
            events.times, events.times - self.within_us, events.times + self.within_us
        )

    def repeats(self, events: EventIds) -> Bools:
        """Return which events are repeats of one that is held."""
        found = np.zeros(len(events), np.bool_)
        for slot in self.runs.slots:
            near = events.times >= slot - self.within_us
            near &= events.times < slot + self.slot_us + self.within_us
            near &= ~found
            if near.any():
                asked = np.flatnonzero(near)
                found[asked[self._repeats_of_slot(slot, events.take(asked))]] = True
        return found

    def _repeats_of_slot(self, slot: int, events: EventIds) -> Int64s:
        hashes = events.hashes[np.diff(events.hashes, prepend=~events.hashes[0]) != 0]
        found = [self._repeats_of(rows, events) for rows in self.runs.look_up(slot, hashes)]
        return np.concatenate(found) if found else np.empty(0, np.int64)

    def _repeats_of(self, held: pl.DataFrame, events: EventIds) -> Int64s:
        """Return the events (some of them more than once) that repeat one of the held entries."""
        hashes = held[HASH].to_numpy()
        first = np.searchsorted(events.hashes, hashes, side="left")
        counts = np.searchsorted(events.hashes, hashes, side="right") - first
        entry = np.repeat(np.arange(len(hashes)), counts)
        event = first[entry] + np.arange(len(entry)) - (np.cumsum(counts) - counts)[entry]
        apart_us = np.abs(events.times[event] - held[TIME].to_numpy()[entry])
        same = events.checks[event] == held[CHECK].to_numpy()[entry]
        repeats: Int64s = event[same & (apart_us <= self.within_us)]
        return repeats

    def counted_runs(self) -> tuple[tuple[SortedRuns, ...], ...]:
        """Return the runs that the ids lie in, those together that are counted together."""
        return ((self.runs,),)

    def add(self, events: EventIds, watermark_us: int) -> tuple[int, ...]:
        """Keep these events, except those that no event can repeat any more; drop expired ones.

        Return how many were dropped, of these and of those held before.
        """
        past_us = watermark_us - self.slot_us - self.within_us - self.lateness_us
        let_go = int((events.times // self.slot_us * self.slot_us <= past_us).sum())
        for slot in [start for start in self.runs.slots if start <= past_us]:
            let_go += self.runs.drop_slot(slot)
        for slot, part in by_time_slot(events, self.slot_us):
            if slot > past_us:
                self.runs.add(slot, _table(part), lambda rows: rows)
        return (let_go,)


def _table(events: EventIds) -> pl.DataFrame:
    return pl.DataFrame({HASH: events.hashes, CHECK: events.checks, TIME: events.times})
