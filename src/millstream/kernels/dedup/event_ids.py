"""Ids in the order in which they arrived, and which of them are the first of their kind.

An id is known by 128 bits of hash: two independent hashes of 64 bits. Among n ids, the probability
that any two share both is n²/2¹²⁹, which for a thousand million ids is 10⁻²¹: far below that of an
undetected fault of memory; and as they depend on the app's own seed, nobody can construct such a pair. An
entry of state thus has one small, fixed size, whatever the id is.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import polars as pl

from millstream.kernels.arrays import Bools, Int64s
from millstream.kernels.frames import TIME
from millstream.kernels.state.keyhash import Hashes, digest_columns, hash_columns

_CHECK_SEED = 0x5851F42D4C957F2D  # chooses the second hash; any number but 0
_ROUNDS_MAX = 64  # an id kept more often than this in one batch is gone through event by event


@dataclass(frozen=True)
class EventIds:
    """Events, sorted by id, and those of an id in the order of arrival.

    ``rows`` is the row number of each in the batch. Times in microseconds.
    """

    rows: Int64s
    hashes: Hashes
    checks: Hashes
    times: Int64s

    @classmethod
    def of(cls, table: pl.DataFrame, by: tuple[str, ...], seed: int = 0) -> EventIds:
        """Read the ids of a table whose rows are in the order of arrival."""
        hashes = hash_columns(table, by, seed)
        checks = digest_columns(table, by, seed ^ _CHECK_SEED)
        order = np.argsort(hashes, kind="stable")
        if _has_twins(hashes[order], checks[order]):
            order = np.lexsort((checks, hashes))
        return cls(order, hashes[order], checks[order], table[TIME].to_numpy()[order])

    @classmethod
    def none(cls) -> EventIds:
        hashes = np.empty(0, np.uint64)
        return cls(np.empty(0, np.int64), hashes, hashes, np.empty(0, np.int64))

    def __len__(self) -> int:
        return len(self.rows)

    def take(self, which: Bools | Int64s) -> EventIds:
        """Return some of the events, in the same order."""
        return EventIds(self.rows[which], self.hashes[which], self.checks[which], self.times[which])

    def first_of_id(self) -> Bools:
        """Return for each event whether it is the first of its id."""
        new = np.ones(len(self), np.bool_)
        new[1:] = np.diff(self.hashes) != 0
        new[1:] |= np.diff(self.checks) != 0
        return new


@dataclass(frozen=True)
class SearchRanges:
    """The positions of events in time, and the range in which each looks for an earlier one of its id.

    An event is a repeat of a kept one at ``p`` if ``low ≤ p ≤ high``. The caller chooses the unit of
    positions: microseconds, or spans of time by their starts.
    """

    at: Int64s
    low: Int64s
    high: Int64s

    def take(self, which: Bools | Int64s) -> SearchRanges:
        return SearchRanges(self.at[which], self.low[which], self.high[which])


def keep_first(begins: Bools, spans: SearchRanges) -> Bools:
    """Return which events are kept: those that are no repeat of one kept before them.

    ``begins`` marks the first event of each id. In each round the first event left of every id is
    kept, and the repeats of it go: as many rounds as the most frequent id is kept times.
    """
    kept = np.zeros(len(begins), np.bool_)
    ids: Int64s = np.cumsum(begins)
    left: Int64s = np.arange(len(begins))
    for _ in range(_ROUNDS_MAX):
        if not len(left):
            return kept
        first = np.diff(ids[left], prepend=0) != 0
        kept[left[first]] = True
        anchors = spans.at[left[first]][np.cumsum(first) - 1]
        repeats = (spans.low[left] <= anchors) & (anchors <= spans.high[left])
        left = left[~repeats]
    several = _one_by_one(ids[left], spans.take(left))
    kept[left[several]] = True
    return kept


def _one_by_one(ids: Int64s, spans: SearchRanges) -> Int64s:
    """Go through the events of a few ids that are kept very often."""
    kept: list[int] = []
    current, places = -1, list[int]()
    events = zip(
        ids.tolist(), spans.at.tolist(), spans.low.tolist(), spans.high.tolist(), strict=True
    )
    for number, (one, at, low, high) in enumerate(events):
        if one != current:
            current, places = one, []
        nearest = bisect_left(places, low)
        if nearest == len(places) or places[nearest] > high:
            insort(places, at)
            kept.append(number)
    return np.array(kept, np.int64)


def by_time_slot(events: EventIds, width_us: int) -> Iterator[tuple[int, EventIds]]:
    """Divide events into spans of event time of one width; give each span's start with its events."""
    starts = events.times // width_us * width_us
    order = np.argsort(starts, kind="stable")
    cuts = np.flatnonzero(np.diff(starts[order])) + 1
    for part in np.split(order, cuts) if len(order) else ():
        yield int(starts[part[0]]), events.take(part)


def _has_twins(hashes: Hashes, checks: Hashes) -> bool:
    """Return whether two ids share the first hash, so that sorting by it alone may mix them."""
    return bool(((np.diff(hashes) == 0) & (np.diff(checks) != 0)).any())
