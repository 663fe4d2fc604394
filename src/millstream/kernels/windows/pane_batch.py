"""One batch of windows in panes, in one bucket: which panes fire, in which order, and their rows.

The firings of a key are ranked: what was due by running time, early panes, the on-time pane, late
panes, and the last one of a window that expires; panes by count also by their number.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import numpy as np
import polars as pl

from millstream.kernels.aggregation import event_count
from millstream.kernels.arrays import Bools
from millstream.kernels.changes import divide_by
from millstream.kernels.columns import filter_rows
from millstream.kernels.frames import HASH, ROWS, WINDOW
from millstream.kernels.operator import BatchContext
from millstream.kernels.queryable import QueryKeys, held_in_runs
from millstream.kernels.state.hash_order import sorted_distinct
from millstream.kernels.state.ledger import StateLedger
from millstream.kernels.state.operator_state import OperatorState
from millstream.kernels.state.sorted_runs import SortedRuns
from millstream.kernels.trigger import AfterCount, EachBatch
from millstream.kernels.windows.pane_values import KIND, LAST, RANK, PaneValues
from millstream.kernels.windows.pending_panes import STEP, PendingPanes
from millstream.kernels.windows.window_operator import (
    LATE_WINDOWS,
    WindowOperator,
)

EVENT = "__event"  # UInt32: the number of an event, where each is in several windows
_ROOM = "__room"  # Int64: how many more events the one pane of a window and key takes
_STAGE_BITS = 48
_TIMED, _EARLY, _ON_TIME, _LATE, _CLOSING = (n << _STAGE_BITS for n in range(5))


@dataclass
class PaneBatch:
    """One batch of one bucket. ``context`` has a running time that never goes back.

    ``pending_ledger`` is the ledger of rows that no pane has yet, ``emitted_ledger`` that of rows that panes
    have emitted, if that is kept; ``last`` has, by slot, the last panes of a slot. ``left_out`` counts what came for
    windows that had fired once.
    """

    step: WindowOperator
    values: PaneValues
    state: OperatorState
    context: BatchContext
    pending_ledger: StateLedger = field(init=False)
    emitted_ledger: StateLedger = field(init=False)
    last: dict[int, pl.DataFrame] = field(default_factory=dict)
    left_out: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        runs = tuple(self.state.runs(family, ROWS) for family in ("early", "deferred", "late"))
        self.pending_ledger = StateLedger(self.step.name, runs)
        self.emitted_ledger = StateLedger(self.step.name, (self._fired,))

    @property
    def _fired(self) -> SortedRuns:
        return self.state.runs("emitted", self.values.counted)

    # ── what is held between batches ────────────────────────────────────────────────────────

    def current_partials(self, keys: QueryKeys | None) -> list[pl.DataFrame]:
        """Return partials whose merge is the value of each window and key: what panes have given, and what is pending."""
        values, by = self.values, self.step.by
        pending = []
        families: tuple[Literal["early", "deferred", "late"], ...] = ("early", "deferred", "late")
        for family in families:
            phase = self._pending(family)
            held = [rows.select(phase.columns) for rows in held_in_runs(phase.runs, keys, by)]
            if held:
                pending.append(phase.alive(phase.merged(pl.concat(held))))
        emitted = held_in_runs(self._fired, keys, by)
        if not emitted:
            return pending
        last = values.latest(pl.concat([rows[values.stored_columns] for rows in emitted]))
        if values.accumulates:
            return [*pending, last]
        if self.step.emission.once:
            return [
                rows.join(last, on=values.key, how="anti", nulls_equal=True) for rows in pending
            ]
        return pending

    # ── which windows ───────────────────────────────────────────────────────────────────────

    def _ended(self, rows: pl.DataFrame, at_us: int) -> Bools:
        """Return which rows' windows end at or before a time."""
        ended: Bools = self.step.window.ends(rows[WINDOW].to_numpy()) <= at_us
        return ended

    def _closed(self, rows: pl.DataFrame) -> Bools:
        """Return which rows' windows have had their on-time pane, once the batch is done."""
        return self._ended(rows, self.context.watermark_us)

    def _expired(self, rows: pl.DataFrame) -> Bools:
        return self._ended(rows, self.context.watermark_us - self.step.expires_after_us)

    def _passes_ends(self, after_us: int) -> bool:
        """Return whether the watermark passes a window's end, or the time so long after one."""
        before, now = (
            self.context.watermark_before_us - after_us,
            self.context.watermark_us - after_us,
        )
        return now > before and self.step.window.end_at_or_before(now) > before

    # ── what is pending ─────────────────────────────────────────────────────────────────────

    def _pending(self, family: Literal["early", "deferred", "late"]) -> PendingPanes:
        emission = self.step.emission
        return PendingPanes(
            self.step.aggregation,
            emission.early if family == "early" else emission.late,
            self.state.runs(family, ROWS),
            self.state.runs(f"{family} due"),
            self._by_slot if family == "late" else _by_window,
            self.context.clock_ms,
            deferred=family == "deferred",
        )

    def _by_slot(self, rows: pl.DataFrame) -> Iterator[tuple[int, pl.DataFrame]]:
        return self.step.by_slot(rows, WINDOW)

    def _take_ended(self, pending: PendingPanes) -> list[pl.DataFrame]:
        """Take out of the state what is pending of the windows that the watermark has reached."""
        reached = self.context.watermark_us
        ends = self.step.window.ends(np.array(list(pending.runs.slots), np.int64))
        slots = [s for s, end in zip(pending.runs.slots, ends, strict=True) if end <= reached]
        rows = list(pending.scan(slots))
        for slot in slots:
            pending.runs.drop_slot(slot)
        return rows

    def _partials(self, rows: pl.DataFrame, pending: PendingPanes) -> pl.DataFrame:
        """Reduce rows that came one by one, unless the panes of the phase are by count."""
        if not self.step.by_arrival or isinstance(pending.trigger, AfterCount):
            return rows
        return self.step.with_hash(self.step.aggregation.reduce(rows, WINDOW), self.context.seed)

    # ── firings ─────────────────────────────────────────────────────────────────────────────

    def firings(self, fresh: pl.DataFrame | None) -> Iterator[pl.DataFrame]:
        """Yield the firings of the batch, and update pending rows."""
        early, late = self._pending("early"), self._pending("late")
        # Before anything is stored, which may fold it away.
        early_due = self._due(early, "early", 0)
        late_due = self._due(late, "late", self.step.expires_after_us)
        if fresh is not None and self.step.emission.once:
            fresh = self._admitted(fresh, early, early_due)
        in_time, behind = fresh, None
        if fresh is not None and self.step.tracks_late:
            in_time, behind = (
                fresh.filter(late).drop(LATE_WINDOWS)
                for late in (~pl.col(LATE_WINDOWS), LATE_WINDOWS)
            )
        panes, ending = self._early_panes(early, in_time)
        panes = [*early_due, *panes]
        yield from panes
        if self._passes_ends(0):
            yield from self._on_time(early, [*self._take_ended(early), *ending], panes)
        if self.step.tracks_late:
            yield from late_due
            yield from self._after_end(late, behind)

    # ── windows that fire once ──────────────────────────────────────────────────────────────

    def _admitted(
        self, rows: pl.DataFrame, early: PendingPanes, due: list[pl.DataFrame]
    ) -> pl.DataFrame:
        """Leave out, and count, the events of windows and keys that have fired, or do so before them."""
        key = self.values.key
        fired = self._known([rows])
        closed = [] if fired is None else [fired.select(key)]
        closed += [firing.select(key) for firing in due]
        admitted = rows
        if closed:
            admitted = rows.join(
                pl.concat(closed), on=key, how="anti", nulls_equal=True, maintain_order="left"
            )
        if isinstance(early.trigger, AfterCount):
            held = early.known(admitted).select(*key, (-pl.col(ROWS)).alias(_ROOM))
            met = admitted.join(held, on=key, how="left", nulls_equal=True, maintain_order="left")
            room = pl.col(_ROOM).fill_null(0) + early.trigger.count
            admitted = met.filter(pl.int_range(pl.len()).over(key) < room).drop(_ROOM)
        missed = rows.height - admitted.height
        gone = rows[EVENT].n_unique() - admitted[EVENT].n_unique()
        self.left_out.update(held=-gone, filtered=gone, windows_closed=missed)
        self.pending_ledger.events_in -= missed
        return admitted.drop(EVENT)

    def _due(self, pending: PendingPanes, kind: str, over_us: int) -> list[pl.DataFrame]:
        """Fire panes due by running time, of windows that had not ended when the batch began."""
        due = pending.due()
        if due is None:
            return []
        over = self._ended(due, self.context.watermark_before_us - over_us)
        fired = filter_rows(due, ~over)
        pending.spend(fired)
        return [_firing(fired, _TIMED, kind, last=self.step.emission.once)]

    def _early_panes(
        self, early: PendingPanes, rows: pl.DataFrame | None
    ) -> tuple[list[pl.DataFrame], list[pl.DataFrame]]:
        """Take rows in; return early panes, and pending rows of windows that are on time now."""
        if rows is None or not rows.height:
            return [], []
        taken = early.add(self._partials(rows, early))
        closed = self._closed(taken.pending)
        early.store(filter_rows(taken.pending, ~closed), taken.complete)
        ending = [filter_rows(taken.pending, closed)]
        closed = self._closed(taken.complete)
        if not isinstance(early.trigger, EachBatch):
            once = self.step.emission.once
            return [_firing(taken.complete, _EARLY, "early", last=once, by_step=True)], ending
        # At the end of the batch, of a window that the watermark has reached, they are on time.
        ending.append(filter_rows(taken.complete, closed))
        return [_firing(filter_rows(taken.complete, ~closed), _EARLY, "early")], ending

    def _on_time(
        self, early: PendingPanes, ending: list[pl.DataFrame], panes: list[pl.DataFrame]
    ) -> Iterator[pl.DataFrame]:
        """Fire on-time panes, of what is pending and, if asked for, of keys with nothing new."""
        last = self.step.expires_after_us == 0
        slices = [rows for rows in ending if rows.height]
        fired = None
        if slices and isinstance(early.trigger, EachBatch):  # nothing is pending: they are merged
            fired = pl.concat(slices)
        elif slices:
            fired = early.alive(early.merged(pl.concat(slices)))
        if fired is not None:
            yield _firing(fired, _ON_TIME, "on_time", last=last)
        if not self.step.emission.suppress_unchanged and not self.step.emission.once:
            quiet = self._quiet(fired, panes)
            if quiet is not None:
                yield _firing(quiet.select(early.columns), _ON_TIME, "on_time", last=last)

    def _quiet(self, fired: pl.DataFrame | None, panes: list[pl.DataFrame]) -> pl.DataFrame | None:
        """Return, without partials, the keys of ending windows that have panes and no new events."""
        key = [*self.values.key, HASH]
        found = [rows.select(key) for rows in self._fired_of_ending_windows()]
        found += [filter_rows(pane, self._closed(pane)).select(key) for pane in panes]
        if not found:
            return None
        keys = pl.concat(found).unique(self.values.key)
        if fired is not None:
            keys = keys.join(fired, on=self.values.key, how="anti", nulls_equal=True)
        schema = dict(self.step.aggregation.schema)
        nothing = {name: pl.lit(None, dtype) for name, dtype in schema.items()}
        return keys.with_columns(
            **(nothing | {ROWS: pl.lit(0, pl.Int64), STEP: pl.lit(0, pl.Int64)})
        )

    def _fired_of_ending_windows(self) -> Iterator[pl.DataFrame]:
        step, runs = self.step, self._fired
        before_us, now_us = self.context.watermark_before_us, self.context.watermark_us
        for slot in runs.slots:
            last_us = step.slot_expiry(slot) - step.expires_after_us
            if step.first_end(slot) <= now_us and last_us > before_us:
                for rows in runs.scan(slot):
                    ending = self._ended(rows, now_us) & ~self._ended(rows, before_us)
                    yield filter_rows(rows, ending)

    # ── late ────────────────────────────────────────────────────────────────────────────────

    def _after_end(self, late: PendingPanes, came: pl.DataFrame | None) -> Iterator[pl.DataFrame]:
        """Fire late panes, and the last ones of windows that expire."""
        pending: list[pl.DataFrame] = []
        for complete, left in self._late_panes(late, came):
            last = self._expired(complete) if isinstance(late.trigger, EachBatch) else False
            yield _firing(complete, _LATE, "late", last=last, by_step=True)
            expired = self._expired(left)
            pending.append(filter_rows(left, expired))
            late.store(filter_rows(left, ~expired), complete)
        stored: list[pl.DataFrame] = []
        if self._passes_ends(self.step.expires_after_us):
            stored += self._expiring(late.runs, late)
        pending = [part for part in (*pending, *stored) if part.height]
        if pending:
            left = late.alive(late.merged(pl.concat(pending)))
            for rows in stored:
                late.spend(late.of_same_panes(rows, left))
            yield _firing(left, _CLOSING, "late", last=True)

    def _late_panes(
        self, late: PendingPanes, rows: pl.DataFrame | None
    ) -> Iterator[tuple[pl.DataFrame, pl.DataFrame]]:
        """Take late rows in; yield the panes that are complete, and the pending rows."""
        ended = self._deferred_late(rows)
        if ended is not None and isinstance(late.trigger, AfterCount):
            whole = pl.col(ROWS) == late.trigger.count
            yield ended.filter(whole), ended.filter(~whole)
            ended = None
        past = [] if ended is None else [ended.select(late.input_columns)]
        if rows is not None and rows.height:
            long_ended = rows.filter(self._ended(rows, self.context.watermark_before_us))
            partials = self._partials(long_ended, late)
            past.append(partials.select(late.input_columns) if past else partials)
        if past:
            taken = late.add(pl.concat(past))
            yield taken.complete, taken.pending

    def _deferred_late(self, rows: pl.DataFrame | None) -> pl.DataFrame | None:
        """Defer late rows of windows that are not yet on time; return those deferred until now."""
        waiting = self._pending("deferred")
        ended: list[pl.DataFrame] = []
        if rows is not None and rows.height:
            ahead = rows.filter(~self._ended(rows, self.context.watermark_before_us))
            if ahead.height:
                waits = waiting.add(self._partials(ahead, waiting)).pending
                closed = self._closed(waits)
                ended.append(filter_rows(waits, closed))
                waiting.store(filter_rows(waits, ~closed))
        if self._passes_ends(0):
            ended += self._take_ended(waiting)
        ended = [part for part in ended if part.height]
        return waiting.merged(pl.concat(ended)) if ended else None

    def _expiring(self, runs: SortedRuns, late: PendingPanes) -> Iterator[pl.DataFrame]:
        """Yield the pending rows of windows that expire with this batch."""
        lateness_us = self.step.expires_after_us
        before_us = self.context.watermark_before_us - lateness_us
        for slot in runs.slots:
            if self.step.first_end(slot) + lateness_us <= self.context.watermark_us:
                for rows in late.scan([slot]):
                    yield rows.filter(self._expired(rows) & ~self._ended(rows, before_us))

    # ── rows of the panes ──────────────────────────────────────────────────────────────────

    def rows(self, firings: list[pl.DataFrame]) -> pl.DataFrame:
        """Return the rows to emit, and store the state of their panes."""
        values = self.values
        self.pending_ledger.events_out += sum(event_count(firing) for firing in firings)
        # Of a window and key that fires once, nothing has fired.
        follows = values.keeps_previous and not self.step.emission.once
        known = self._known(firings) if follows else None
        panes, before = values.panes(firings, known)
        if values.accumulates:
            results = self.step.result_rows(panes)
            panes = values.mark_emitted(panes, results)
        else:
            panes = values.mark_emitted_parts(panes)
            results = self.step.result_rows(panes)
        if values.keeps_previous:
            self.emitted_ledger.events_in = values.events_added(
                panes, self.pending_ledger.events_out
            )
            self._keep(values.to_store(panes), before)
        return values.rows(panes, results.hstack(values.pane_columns(panes)))

    def _known(self, firings: list[pl.DataFrame]) -> pl.DataFrame | None:
        """Look up the emitted panes of the keys that fire, with rows of other keys of the same hash."""
        runs = self._fired
        if not runs.slots:
            return None
        keys = pl.concat([firing.select(WINDOW, HASH) for firing in firings])
        found = [
            rows[self.values.stored_columns]
            for slot, touched in self._by_slot(keys)
            for rows in runs.look_up(slot, sorted_distinct(touched[HASH].to_numpy()))
        ]
        return pl.concat(found) if found else None

    def _keep(self, kept: pl.DataFrame, before: pl.DataFrame | None) -> None:
        """Store the new state of panes, instead of that ``before``."""
        runs = self._fired
        for slot, part in () if before is None else self._by_slot(before):
            runs.spend(slot, runs.count(part))
        if self.values.accumulates:
            kept = self.step.aggregation.for_state(kept)
        for slot, part in self._by_slot(kept):
            if self._is_over(slot):
                self.last[slot] = part
                self.emitted_ledger.events_out += runs.count(part)
            else:
                runs.add(slot, part, lambda rows: rows, alive=partial(self._newest, slot))

    def _newest(self, slot: int, rows: pl.DataFrame) -> pl.DataFrame:
        """Leave out, in a fold, what has been replaced; and what has expired, if no older run is left."""
        runs, rows = self._fired, self.values.latest(rows)
        if runs.slots.get(slot):  # older rows must remain hidden
            return rows
        expired = self._expired(rows)
        let_go = runs.count(filter_rows(rows, expired)) if expired.any() else 0
        self.emitted_ledger.events_out += let_go
        runs.spend(slot, let_go)
        return filter_rows(rows, ~expired)

    def drop_expired(self) -> None:
        """Drop the slots of state all of whose windows have expired."""
        for slot in self._slots_over(self._fired):
            self._fired.check_slot(slot, self.values.latest, self.last.get(slot))
            self.emitted_ledger.events_out += self._fired.drop_slot(slot)
        late = self.state.runs("late", ROWS)
        for slot in self._slots_over(late):
            late.drop_slot(slot)

    def _slots_over(self, runs: SortedRuns) -> list[int]:
        return [slot for slot in runs.slots if self._is_over(slot)]

    def _is_over(self, slot: int) -> bool:
        return self.step.slot_expiry(slot) <= self.context.watermark_us


def _by_window(rows: pl.DataFrame) -> Iterator[tuple[int, pl.DataFrame]]:
    return divide_by(rows, rows[WINDOW].to_numpy())


def _firing(
    rows: pl.DataFrame, rank: int, kind: str, *, last: bool | Bools = False, by_step: bool = False
) -> pl.DataFrame:
    """Make firings of partials: one of each row."""
    ranks = (pl.col(STEP) + rank if by_step else pl.lit(rank)).cast(pl.Int64)
    # polars keeps a value that all rows share as a literal for as long as it can.
    lasts = pl.Series(last) if isinstance(last, np.ndarray) else pl.lit(last)
    made = rows.with_columns(ranks.alias(RANK), pl.lit(kind).alias(KIND), lasts.alias(LAST))
    return made[[name for name in made.columns if name != STEP]]
