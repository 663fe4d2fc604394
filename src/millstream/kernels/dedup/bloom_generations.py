"""Generations of Bloom filters: which ids may have been kept, in a few bits for each.

A generation is a span of event time, ``rotate`` long, counted from 1970. The id of a kept event goes
into the generation of the event's time, and an event asks every generation that overlaps
``[t - within, t + within]``: those before it, and those after it, for an event that is out of
order. So a repeat inside the horizon is always found, whatever the batches; one that is further
away than ``within``, and by less than ``rotate``, may be found as well.

A generation in state is *recent* ids (64-bit hashes in sorted runs, compared exactly) and
*filters*. A batch adds one small run of recent ids; when these have come to a sixteenth of what a
filter takes, they are moved into the filter in one go. So a batch writes its own ids and not the
bitmap that they are scattered over, which is rewritten sixteen times in its life. A filter takes
the ids that it was sized for and no more: when more come, the generation gets one more filter, and
the stated rate rises by one filter's.

After a rescale a filter may have ids of other buckets, too. It is asked for hashes of its share only, and takes no more ids.

Sources: Bloom 1970; Almeida et al., "Scalable Bloom Filters", IPL 2007 (more filters when one is
full); Shtul et al., "Age-Partitioned Bloom Filters", 2020 (a generation more than the horizon takes).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import polars as pl
import pyarrow as pa

from millstream.kernels.arrays import Bools, UInt64s
from millstream.kernels.dedup.bloom import WORD_BITS, BloomShape, combined_rate
from millstream.kernels.dedup.event_ids import EventIds, SearchRanges, by_time_slot
from millstream.kernels.frames import HASH
from millstream.kernels.operator import NOT_DEFINING
from millstream.kernels.state.keyhash import Hashes
from millstream.kernels.state.operator_state import OperatorState
from millstream.kernels.state.sorted_runs import EACH_ROW, Run, SortedRuns, every_row

_RECENT = "recent ids"
FILTERS = "filters"
_WORDS = "words"
_MOVES = 16  # in so many goes a filter is filled


@dataclass(frozen=True)
class BloomRule:
    """Generations of ``rotate_us``; a filter takes ``ids`` at the false-positive rate ``rate``.

    ``ids`` and ``rate`` are those of one filter, in one of ``buckets`` (0: whatever their number). ``exact_check``: what
    the filters have is looked up in an exact store, so that no event is lost.
    """

    rotate_us: int
    ids: int
    rate: float
    exact_check: bool
    buckets: int = field(default=0, metadata=NOT_DEFINING)

    def in_buckets(self, count: int) -> BloomRule:
        """Return the rule where the ids are divided among another number of buckets, after a rescale."""
        if self.buckets in (0, count):
            return self
        return replace(self, ids=-(-self.ids * self.buckets // count), buckets=count)

    @property
    def shape(self) -> BloomShape:
        return BloomShape.for_ids(self.ids, self.rate)


class BloomGenerations:
    """The generations of one bucket while a batch is worked on."""

    def __init__(
        self, rule: BloomRule, state: OperatorState, within_us: int, lateness_us: int
    ) -> None:
        self._rule = rule
        self._within_us = within_us
        self._lateness_us = lateness_us
        self._shape = rule.shape
        self._recent = state.runs(_RECENT, EACH_ROW)
        # Each run says how many ids it was given.
        self._filters = state.runs(FILTERS, owned=every_row)

    def counted_runs(self) -> tuple[tuple[SortedRuns, ...], ...]:
        """Return the runs that the ids lie in, those together that are counted together."""
        return ((self._recent, self._filters),)

    def search_ranges(self, events: EventIds) -> SearchRanges:
        """Return which generations each event is in, and asks: those within the horizon, rounded out."""
        width, times = self._rule.rotate_us, events.times
        return SearchRanges(
            times // width * width,
            (times - self._within_us) // width * width,
            (times + self._within_us) // width * width,
        )

    def repeats(self, events: EventIds) -> Bools:
        """Return which events have an id that one of the generations they ask may hold."""
        found = np.zeros(len(events), np.bool_)
        spans = self.search_ranges(events)
        for start in sorted({*self._recent.slots, *self._filters.slots}, reverse=True):
            asks = (spans.low <= start) & (start <= spans.high) & ~found
            if asks.any():
                asked = np.flatnonzero(asks)
                found[asked[self._holds(start, events.hashes[asked])]] = True
        return found

    def _holds(self, start: int, hashes: Hashes) -> Bools:
        held = np.zeros(len(hashes), np.bool_)
        for recent in self._recent_of(start):
            held |= _among(recent, hashes)
        for run in self._filters.slots.get(start, ()):
            asked = np.ones(len(hashes), np.bool_) if run.share is None else run.share.has(hashes)
            held[asked] |= self._shape_of(run).contains(self._words(run), hashes[asked])
        return held

    def add(self, events: EventIds, watermark_us: int) -> tuple[int, ...]:
        """Add the ids of kept events; drop the generations that no event in time asks any more.

        Return how many ids were dropped, of these and of those held before.
        """
        width_us = self._rule.rotate_us
        past_us = watermark_us - width_us - self._within_us - self._lateness_us
        let_go = int((events.times // width_us * width_us <= past_us).sum())
        for runs in (self._recent, self._filters):
            for start in [start for start in runs.slots if start <= past_us]:
                let_go += runs.drop_slot(start)
        for start, part in by_time_slot(events, width_us):
            if start > past_us:
                self._recent.add(start, pl.DataFrame({HASH: part.hashes}), _same)
                self._move_when_many(start)
        return (let_go,)

    def _move_when_many(self, start: int) -> None:
        held = sum(run.rows for run in self._recent.slots[start])
        if held * _MOVES >= self._rule.ids:
            hashes = np.concatenate(list(self._recent_of(start)))
            self._recent.drop_slot(start)
            while len(hashes):
                hashes = self._fill(start, hashes)

    def _fill(self, start: int, hashes: Hashes) -> Hashes:
        """Put as many ids into the generation's newest filter as it takes; give what is left."""
        runs = self._filters.slots.setdefault(start, [])
        old = next(filter(self._takes_more, reversed(runs)), None)
        if old is None:
            words, ids = self._shape.empty(), 0
        else:
            runs.remove(old)
            words, ids = self._words(old), old.events
        more, rest = np.split(hashes, [self._rule.ids - ids])
        saved = self._filters.store.save(
            start, pa.table({_WORDS: self._shape.with_added(words, more)})
        )
        runs.append(replace(saved, events=ids + len(more)))
        if old is not None:
            self._filters.store.drop(old)
        return rest

    def _takes_more(self, run: Run) -> bool:
        """Return whether a filter has room, and is this bucket's own, of the size of new ones."""
        own = run.share is None and self._shape_of(run) == self._shape
        return own and run.events < self._rule.ids

    def _shape_of(self, run: Run) -> BloomShape:
        """Return the shape of a filter, which another number of buckets may have made."""
        return BloomShape(run.stored_rows * WORD_BITS, self._shape.hashes)

    def false_positive_rate(self) -> float:
        """Return the probability, as it stands, that an event is taken for a repeat and is none.

        It is that of an event which asks every generation there is; recent ids add nothing to it.
        """
        runs = (run for runs in self._filters.slots.values() for run in runs)
        return combined_rate(self._shape_of(run).rate(run.stored_events) for run in runs)

    def _recent_of(self, start: int) -> Iterator[Hashes]:
        for rows in self._recent.scan(start):
            yield rows[HASH].to_numpy()

    def _words(self, run: Run) -> UInt64s:
        words: UInt64s = self._filters.table(run).column(_WORDS).chunk(0).to_numpy()
        return words


def _same(rows: pl.DataFrame) -> pl.DataFrame:
    return rows


def _among(held: Hashes, asked: Hashes) -> Bools:
    """Return which hashes are among ``held`` (sorted)."""
    at = np.minimum(np.searchsorted(held, asked), len(held) - 1)
    there: Bools = held[at] == asked
    return there
