"""Deduplication: of the events with one id, the first one, and the next that is far enough from it.

An event is kept if and only if there is no kept one before it with the same id and a time that is
at most ``within`` away, earlier or later. *Before* is the order of arrival (:mod:`passing`), so the
answer depends on the events alone as long as an id keeps to one partition.

====================  ==========================================================================
an event               leaves as
====================  ==========================================================================
late                   ``late``: its time is below its partition's watermark by more than the
                       lateness; it is never emitted, and repeats nothing
without an id          ``emitted``: an id of which a part is null is like no other
a repeat               ``duplicate``
any other              ``emitted``, in the batch of its arrival, as it came
====================  ==========================================================================

State is exact (:mod:`kept_ids`), or a few bits per id (:mod:`bloom_generations`), or the second in
front of the first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import polars as pl

from millstream.kernels.arriving_ids import Arrivals, Mask, Spans, first_of_each
from millstream.kernels.bloom_generations import BloomGenerations, BloomRule
from millstream.kernels.frames import REACHED, TIME
from millstream.kernels.held_events import HeldEvents
from millstream.kernels.kept_ids import KeptIds
from millstream.kernels.operator import Moment, OperatorState, Outcome, Prepared
from millstream.kernels.passing import Passing, together
from millstream.kernels.sorted_runs import EACH_ROW, SortedRuns

BELOW_WATERMARK = "below_watermark"
FALSE_POSITIVE_RATE = "false_positive_rate"
_KEPT = "kept ids"


class Memory(Protocol):
    """What is known of the ids that were kept. See :class:`KeptIds` for the exact one."""

    def spans(self, events: Arrivals) -> Spans: ...
    def repeats(self, events: Arrivals) -> Mask: ...
    def families(self) -> tuple[tuple[SortedRuns, ...], ...]: ...
    def hold(self, events: Arrivals, watermark_us: int) -> tuple[int, ...]: ...


@dataclass(frozen=True)
class CheckedIds:
    """Filters in front of the exact state: only the ids that the filters may hold are looked up."""

    filters: BloomGenerations
    kept: KeptIds

    def spans(self, events: Arrivals) -> Spans:
        return self.kept.spans(events)

    def repeats(self, events: Arrivals) -> Mask:
        found = self.filters.repeats(events)
        found[found] = self.kept.repeats(events.take(found))
        return found

    def families(self) -> tuple[tuple[SortedRuns, ...], ...]:
        return *self.filters.families(), *self.kept.families()

    def hold(self, events: Arrivals, watermark_us: int) -> tuple[int, ...]:
        in_filters = self.filters.hold(events, watermark_us)
        return *in_filters, *self.kept.hold(events, watermark_us)


@dataclass(frozen=True)
class Dedup(Passing):
    """One deduplicating operator. Durations in microseconds.

    ``by`` names the columns of the id, ``types`` their types.
    """

    types: tuple[str, ...]
    within_us: int
    bloom: BloomRule | None = None

    def columns_read(self, number: int) -> set[str]:  # noqa: ARG002 - it has one input
        return set(self.by)

    # ── before the shuffle ──────────────────────────────────────────────────────────────────

    def prepare(self, rows: pl.DataFrame, number: int = 0) -> Prepared:  # noqa: ARG002
        """Leave out what is late by what this batch read before it, unless late rows are wanted."""
        if self.side or REACHED not in rows.columns:
            return Prepared(rows)
        missed_us = rows.select(pl.col(REACHED) - self.lateness_us - pl.col(TIME)).to_series()
        in_time = rows.filter(missed_us <= 0)
        late = rows.height - in_time.height
        return Prepared(in_time, late, late_by_us=int(missed_us.max()) if late else 0)  # type: ignore[arg-type]

    # ── after the shuffle ───────────────────────────────────────────────────────────────────

    def process(
        self, state: OperatorState, arrived: Mapping[int, Sequence[pl.DataFrame]], moment: Moment
    ) -> Outcome:
        """Emit the rows that are no repeats, and hold their ids; let go of what is past."""
        outcome = Outcome(counts=Counter())
        memory = self._memory(state)
        ledgers = [HeldEvents(self.name, runs) for runs in memory.families()]
        if tables := arrived.get(0, ()):
            arrivals = together(tables)
            missed_us = moment.reached(arrivals) - self.lateness_us - arrivals[TIME].to_numpy()
            rows = self.in_time(arrivals, missed_us > 0, missed_us, BELOW_WATERMARK, outcome)
            keep, let_go = self._keep(memory, rows, moment)
            outcome.rows = rows.filter(pl.Series(keep))
            emitted = outcome.rows.height
            outcome.counts.update(emitted=emitted, duplicate=rows.height - emitted)
        else:
            let_go = memory.hold(Arrivals.none(), moment.watermark_us)
        for ledger, left in zip(ledgers, let_go, strict=True):
            ledger.came, ledger.left = self._with_id(outcome.rows), left
            ledger.close()
        if isinstance(memory, BloomGenerations):
            outcome.facts[FALSE_POSITIVE_RATE] = memory.false_positive_rate()
        return outcome

    def _memory(self, state: OperatorState) -> Memory:
        kept = KeptIds(state.runs(_KEPT, EACH_ROW), self.within_us, self.lateness_us)
        if self.bloom is None:
            return kept
        generations = BloomGenerations(self.bloom, state, self.within_us, self.lateness_us)
        return CheckedIds(generations, kept) if self.bloom.exact_check else generations

    def _with_id(self, rows: pl.DataFrame | None) -> int:
        """Count the rows of which no part of the id is null."""
        if rows is None:
            return 0
        return int(rows.select(pl.all_horizontal(pl.col(self.by).is_not_null()).sum()).item())

    def _keep(
        self, memory: Memory, rows: pl.DataFrame, moment: Moment
    ) -> tuple[Mask, tuple[int, ...]]:
        """Say which rows, being in the order of arrival, are kept; hold their ids, let others go."""
        keep: Mask = (
            rows.select(pl.any_horizontal(pl.col(self.by).is_null())).to_series().to_numpy()
        )
        keep = keep.copy()
        events = Arrivals.of(rows, self.by, moment.seed)
        events = events.take(~keep[events.rows])
        new = events.take(~memory.repeats(events))
        kept = new.take(first_of_each(new.begins(), memory.spans(new)))
        keep[kept.rows] = True
        return keep, memory.hold(kept, moment.watermark_us)
