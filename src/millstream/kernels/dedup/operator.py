"""Deduplication: of the events with one id, the first one, and the next that is far enough from it.

An event is kept if and only if there is no kept one before it with the same id and a time that is
at most ``within`` away, earlier or later. *Before* is the order of arrival
(:mod:`millstream.kernels.pass_through`), so the result depends on the events alone as long as an id keeps
to one partition.

====================  ==========================================================================
an event               leaves as
====================  ==========================================================================
late                   ``late``: its time is below its partition's watermark by more than the
                       lateness; it is never emitted, and repeats nothing
without an id          ``emitted``: an id of which a part is null is like no other
a repeat               ``duplicate``
any other              ``emitted``, in the batch of its arrival, as it came
====================  ==========================================================================

State is exact (`kept_ids.py`), or a few bits per id (`bloom_generations.py`), or the second in front of
the first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import polars as pl

from millstream.kernels import late
from millstream.kernels.arrays import Bools, Int64s
from millstream.kernels.columns import filter_rows
from millstream.kernels.dedup.bloom_generations import FILTERS, BloomGenerations, BloomRule
from millstream.kernels.dedup.event_ids import EventIds, SearchRanges, keep_first
from millstream.kernels.dedup.kept_ids import KeptIds
from millstream.kernels.frames import TIME, WATERMARK_SEEN
from millstream.kernels.operator import BatchContext, OperatorResult, Prepared
from millstream.kernels.pass_through import PassThroughOperator, in_arrival_order
from millstream.kernels.state.layout import StateLayout
from millstream.kernels.state.ledger import StateLedger
from millstream.kernels.state.operator_state import OperatorState
from millstream.kernels.state.sorted_runs import EACH_ROW, SortedRuns

FALSE_POSITIVE_RATE = "false_positive_rate"
_KEPT = "ids"


class SeenIds(Protocol):
    """What is known of the ids that were kept. See :class:`KeptIds` for the exact one."""

    def search_ranges(self, events: EventIds) -> SearchRanges: ...
    def repeats(self, events: EventIds) -> Bools: ...
    def counted_runs(self) -> tuple[tuple[SortedRuns, ...], ...]: ...
    def add(self, events: EventIds, watermark_us: int) -> tuple[int, ...]: ...


@dataclass(frozen=True)
class CheckedIds:
    """Filters in front of the exact state: only the ids that the filters may hold are looked up."""

    filters: BloomGenerations
    kept: KeptIds

    def search_ranges(self, events: EventIds) -> SearchRanges:
        return self.kept.search_ranges(events)

    def repeats(self, events: EventIds) -> Bools:
        found = self.filters.repeats(events)
        found[found] = self.kept.repeats(events.take(found))
        return found

    def counted_runs(self) -> tuple[tuple[SortedRuns, ...], ...]:
        return *self.filters.counted_runs(), *self.kept.counted_runs()

    def add(self, events: EventIds, watermark_us: int) -> tuple[int, ...]:
        in_filters = self.filters.add(events, watermark_us)
        return *in_filters, *self.kept.add(events, watermark_us)


@dataclass(frozen=True)
class Dedup(PassThroughOperator):
    """One deduplicating operator. Durations in microseconds.

    ``by`` names the columns of the id, ``types`` their types.
    """

    types: tuple[str, ...]
    within_us: int
    bloom: BloomRule | None = None

    def columns_read(self, number: int) -> set[str]:  # noqa: ARG002 - it has one input
        return set(self.by)

    @property
    def layout(self) -> StateLayout:
        return StateLayout(filters=(FILTERS,))

    # ── before the shuffle ──────────────────────────────────────────────────────────────────

    def prepare(self, rows: pl.DataFrame, number: int = 0) -> Prepared:  # noqa: ARG002
        """Leave out what is late by what this batch read before it, unless late rows are wanted."""
        if self.side_output or WATERMARK_SEEN not in rows.columns:
            return Prepared(rows)
        seen_us = rows[WATERMARK_SEEN].to_numpy()
        found = late.split_late(rows, seen_us, self._deadlines(rows), late.DEDUP)
        return Prepared(found.in_time, found.late.height, late_by_us=found.late_by_us)

    def _deadlines(self, rows: pl.DataFrame) -> Int64s:
        """Return the watermark up to which each row is in time."""
        return rows[TIME].to_numpy() + self.lateness_us

    # ── after the shuffle ───────────────────────────────────────────────────────────────────

    def process(
        self,
        state: OperatorState,
        inputs: Mapping[int, Sequence[pl.DataFrame]],
        context: BatchContext,
    ) -> OperatorResult:
        """Emit the rows that are no repeats, and hold their ids; let go of what is past."""
        result = OperatorResult(counts=Counter())
        memory = self._seen_ids(state, context.bucket_count)
        ledgers = [StateLedger(self.name, runs) for runs in memory.counted_runs()]
        if tables := inputs.get(0, ()):
            arrivals = in_arrival_order(tables)
            seen_us, deadline_us = context.watermarks_seen(arrivals), self._deadlines(arrivals)
            rows = self.take_in_time(arrivals, seen_us, deadline_us, late.DEDUP, result)
            keep, let_go = self._keep(memory, rows, context)
            result.rows = filter_rows(rows, keep)
            emitted = result.rows.height
            result.counts.update(emitted=emitted, duplicate=rows.height - emitted)
        else:
            let_go = memory.add(EventIds.none(), context.watermark_us)
        for ledger, left in zip(ledgers, let_go, strict=True):
            ledger.events_in, ledger.events_out = self._with_id(result.rows), left
            ledger.check()
        if isinstance(memory, BloomGenerations):
            result.gauges[FALSE_POSITIVE_RATE] = memory.false_positive_rate()
        return result

    def _seen_ids(self, state: OperatorState, bucket_count: int) -> SeenIds:
        kept = KeptIds(state.runs(_KEPT, EACH_ROW), self.within_us, self.lateness_us)
        if self.bloom is None:
            return kept
        rule = self.bloom.in_buckets(bucket_count)
        generations = BloomGenerations(rule, state, self.within_us, self.lateness_us)
        return CheckedIds(generations, kept) if self.bloom.exact_check else generations

    def _with_id(self, rows: pl.DataFrame | None) -> int:
        """Count the rows of which no part of the id is null."""
        if rows is None:
            return 0
        return rows.height - int(without_id(rows, self.by).sum())

    def _keep(
        self, memory: SeenIds, rows: pl.DataFrame, context: BatchContext
    ) -> tuple[Bools, tuple[int, ...]]:
        """Return which rows, being in the order of arrival, are kept; hold their ids, let others go."""
        keep = without_id(rows, self.by)
        events = EventIds.of(rows, self.by, context.seed)
        events = events.take(~keep[events.rows])
        new = events.take(~memory.repeats(events))
        kept = new.take(keep_first(new.first_of_id(), memory.search_ranges(new)))
        keep[kept.rows] = True
        return keep, memory.add(kept, context.watermark_us)


def without_id(rows: pl.DataFrame, by: Sequence[str]) -> Bools:
    """Return which rows have no id: a part of it is null."""
    found = np.zeros(rows.height, np.bool_)
    for name in by:
        # By another name: polars takes a name such as "^a.*$" for a pattern.
        found |= rows[name].alias("0").is_null().to_numpy()
    return found
