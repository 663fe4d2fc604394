"""One batch of one bucket of sessions: events join open sessions, panes fire, state is updated.

All events of the batch take these steps at once; where panes fire by count, those of a key first take
them one after another (:mod:`millstream.kernels.sessions.rounds`).

1. Events that are not late for their own split are joined to the open sessions.
2. Late ones that an open session still covers are joined as well: for it they are not late.
3. On-time panes fire.
4. Of the other late ones, those whose split the watermark has caught up with are joined or dropped as
   late; the rest wait.
5. Other panes fire; sessions that have expired are closed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl

from millstream.kernels import late
from millstream.kernels.aggregation import event_count
from millstream.kernels.frames import HASH, ROWS, WATERMARK_SEEN
from millstream.kernels.operator import BatchContext, OperatorResult
from millstream.kernels.sessions.config import TIMER, SessionConfig
from millstream.kernels.sessions.open_sessions import OpenSessions
from millstream.kernels.sessions.panes import DONE, DUE, NEW_EVENTS
from millstream.kernels.sessions.rounds import EventRounds
from millstream.kernels.sessions.spans import (
    DEFERRED,
    END,
    FROM,
    PART,
    SPAN,
    START,
    TILL,
    as_points,
)
from millstream.kernels.state.hash_order import sorted_distinct
from millstream.kernels.state.keyed_rows import KeyedRows
from millstream.kernels.state.keyhash import Hashes
from millstream.kernels.state.ledger import StateLedger
from millstream.kernels.state.operator_state import OperatorState
from millstream.kernels.state.timers import Timers, WaitingLedger
from millstream.kernels.trigger import AfterTime

_NOW = "__now"
_AT = "__at"
_ROUND = "__round"
_COVERING_END = "__covering_end"  # Int64: how far the session reaches that covers an event
_SET_TIMER = "__set_timer"  # Boolean: whether a timer is to be set for the row
_SLOT_CLOCK_MS = 60_000
_NO_TIMES = np.empty(0, np.int64)


@dataclass
class SessionBatch:
    """The sessions that a batch touches."""

    config: SessionConfig
    state: OperatorState
    context: BatchContext
    closed_events: int = 0  # of sessions that have expired, those that panes had emitted

    def __post_init__(self) -> None:
        self.sessions = OpenSessions(self.config, self.state, self.context)
        self.out, self.counts = self.sessions.out, self.sessions.counts

    def run(self, tables: Sequence[pl.DataFrame]) -> None:
        """Take the batch's events in, and everything that is due."""
        rows = pl.concat(tables) if tables else None
        ledger = StateLedger(self.config.name, (self._held.runs,))
        self._take(rows)
        ledger.events_in = 0 if rows is None else rows.height
        ledger.events_out = self.counts["late"] + self.counts["filtered"] + self.closed_events
        if self.config.panes.emits_parts:  # what was emitted is not held any more
            ledger.events_out += self.out.events
        ledger.check()

    def _take(self, rows: pl.DataFrame | None) -> None:
        touched = [self._timers.due(self.context.watermark_us)]
        if self._clock_timers is not None:
            touched.append(self._clock_timers.due(self.context.clock_ms))
        if rows is not None:
            self.counts["held"] += rows.height
            touched.append(rows[HASH].to_numpy())
        hashes = sorted_distinct(np.concatenate(touched))
        held = self._held.get(hashes) if len(hashes) else None
        if held is None and (rows is None or not rows.height):  # at most timers without a meaning
            self._waiting.update(_NO_TIMES, _NO_TIMES, self.context.watermark_us)
            return
        rest = self._advance(held, rows)
        self._keep(hashes, held, rest)

    def result(self) -> OperatorResult:
        """Return what comes out."""
        rows = pl.concat(self.out.rows) if self.out.rows else None
        return OperatorResult(rows, self.sessions.side_output(), self.counts)

    # ── the families of state ───────────────────────────────────────────────────────────────

    @property
    def _held(self) -> KeyedRows:
        return KeyedRows(self.state, "sessions", ROWS)

    @property
    def _timers(self) -> Timers:
        return Timers(self.state, "timers", self.config.slot_us)

    @property
    def _waiting(self) -> WaitingLedger:
        return WaitingLedger(self.config.name, self.state, self.config.slot_us)

    @property
    def _passed_us(self) -> int:
        """What reaches no further has expired."""
        return self.context.watermark_us - self.config.lateness_us

    @property
    def _clock_timers(self) -> Timers | None:
        emission = self.config.panes.emission
        timed = isinstance(emission.early, AfterTime) or isinstance(emission.late, AfterTime)
        return Timers(self.state, "running_time_timers", _SLOT_CLOCK_MS) if timed else None

    # ── the five steps ──────────────────────────────────────────────────────────────────────

    def _advance(self, held: pl.DataFrame | None, rows: pl.DataFrame | None) -> pl.DataFrame:
        """Take the events in; give what is still held."""
        if held is None:
            held = self._no_sessions(rows)
        panes, at = self.config.panes, pl.lit(self.context.watermark_us, pl.Int64)
        opened, waiting = held.filter(~pl.col(DEFERRED)), held.filter(DEFERRED)
        if panes.fires_by_count:
            opened, waiting = EventRounds(self.sessions).take_events(opened, waiting, rows)
            opened = self._fired_on_time(self.sessions.closed.with_expired_ends(opened), at)
        else:
            if rows is not None:
                opened, waiting = self._merge_in_time(opened, waiting, rows)
            opened, waiting = self._take_late(
                self.sessions.closed.with_expired_ends(opened), waiting, at
            )
        opened = self.sessions.note_expired(opened, at)
        if opened.height:
            opened = self._fired(opened, at)
        return pl.concat([opened, waiting.select(opened.columns)])

    def _take_late(
        self, opened: pl.DataFrame, waiting: pl.DataFrame, now: pl.Expr
    ) -> tuple[pl.DataFrame, pl.DataFrame]:
        """Join the late events that are in time, before and after the on-time panes."""
        only_final = self.config.panes.only_final
        if not self.config.session.strict or only_final:
            if not only_final:
                opened, waiting = self._merge_covered_late(opened, waiting)
                opened = self._fired_on_time(self._reopen(opened), now)
            opened, _, waiting = self._admit_late(opened, waiting)
            return opened, waiting
        # Which of several late events are in time depends on one another, so that comes first.
        _, admitted, waiting = self._admit_late(opened, waiting)
        opened, admitted = self._merge_covered_late(opened, admitted)
        opened = self._fired_on_time(self._reopen(opened), now)
        return self.sessions.merge_overlapping(opened, as_points(admitted)), waiting

    def _reopen(self, opened: pl.DataFrame) -> pl.DataFrame:
        """Make sessions that became longer after their on-time pane wait for another."""
        # Sessions that had an on-time pane were complete by then.
        before = pl.lit(self.context.watermark_before_us, pl.Int64)
        return self.config.panes.reopen(opened, before)

    def _fired_on_time(self, opened: pl.DataFrame, now: pl.Expr) -> pl.DataFrame:
        opened = self.sessions.note_expired(opened, now)
        opened = self.config.panes.fire_due_retractions(opened, now, self.out, complete=False)
        return self.config.panes.fire_on_time(opened, now, self.out)

    def _no_sessions(self, rows: pl.DataFrame | None) -> pl.DataFrame:
        assert rows is not None
        keys = {name: rows.schema[name] for name in self.config.by}
        return pl.DataFrame(schema={**keys, **self.config.state_schema})

    def _fired(self, opened: pl.DataFrame, now: pl.Expr) -> pl.DataFrame:
        """Fire the other panes, and close what has expired."""
        panes, context = self.config.panes, self.context
        if not panes.only_final:
            opened = panes.fire_due_retractions(opened, now, self.out, complete=True)
            opened = panes.fire_others(opened, now, context.clock_ms, self.out, at_end=True)
        expired = pl.col(TILL) < self._passed_us
        closing = opened.filter(expired)
        if not closing.height:
            return opened
        if panes.only_final:
            self.out.rows.append(panes.result_rows(closing.sort(START, END, HASH), now))
        untold = 0 if panes.only_final else int(closing[NEW_EVENTS].sum())
        self.closed_events += event_count(closing) - untold
        self.sessions.closed.add(closing, self._passed_us)
        return opened.filter(~expired)

    # ── joining ─────────────────────────────────────────────────────────────────────────────

    def _merge_in_time(
        self, opened: pl.DataFrame, waiting: pl.DataFrame, rows: pl.DataFrame
    ) -> tuple[pl.DataFrame, pl.DataFrame]:
        """Join the events that are simply joined to what they overlap; the others wait."""
        deferred = self._is_deferred()
        parts = self.config.session.assign_parts(rows.filter(~deferred), self.config.by)
        arrived = self.sessions.partials(parts, opened.columns)
        opened = self.sessions.merge_overlapping(opened, arrived) if opened.height else arrived
        return opened, pl.concat(
            [waiting, self.sessions.one_row_per_event(rows.filter(deferred), waiting.columns)]
        )

    def _is_deferred(self) -> pl.Expr:
        """Which events are not simply joined to what they overlap."""
        session, panes = self.config.session, self.config.panes
        deferred = late.is_late(pl.col(WATERMARK_SEEN), self.sessions.deadline, late.SESSION)
        if not panes.only_final:
            deferred |= pl.col(TILL) < pl.col(WATERMARK_SEEN)
        if session.strict:
            deferred |= pl.col(FROM) > pl.col(START)
        return deferred

    # ── late events ─────────────────────────────────────────────────────────────────────────

    def _merge_covered_late(
        self, opened: pl.DataFrame, waiting: pl.DataFrame
    ) -> tuple[pl.DataFrame, pl.DataFrame]:
        """Join the late events for which the session that covers them is not complete."""
        if not waiting.height:
            return opened, waiting
        on_time = (self._covering_ends(opened, waiting) >= waiting[WATERMARK_SEEN]).fill_null(
            value=False
        )
        on_time |= ~self.sessions.are_late(waiting) & (waiting[TILL] >= waiting[WATERMARK_SEEN])
        return self.sessions.merge_overlapping(
            opened, as_points(waiting.filter(on_time))
        ), waiting.filter(~on_time)

    def _admit_late(
        self, opened: pl.DataFrame, waiting: pl.DataFrame
    ) -> tuple[pl.DataFrame, pl.DataFrame, pl.DataFrame]:
        """Join the late events that are in time, and leave out those that are too late.

        Return the sessions then, the events that were joined, and those that wait.
        """
        if not waiting.height:
            return opened, waiting, waiting
        strict, below = self.config.session.strict, self.sessions.expired_ends(opened)
        known = waiting[WATERMARK_SEEN] <= self.context.watermark_us
        if self.config.panes.only_final and not strict:
            candidates, rest = waiting, waiting.clear()
        else:
            candidates, rest = waiting.filter(known), waiting.filter(~known)
        admitted = [waiting.clear()]
        for events in self._decision_rounds(candidates):
            overlapping = ~self.sessions.are_late(events)
            if strict:
                overlapping &= ~self.sessions.overlaps_expired(events, opened, below)
            opened = self.sessions.merge_overlapping(opened, as_points(events.filter(overlapping)))
            undecided = events.filter(~overlapping)
            covering_us = self._covering_ends(opened, undecided) + self.config.lateness_us
            expired = late.is_late(undecided[WATERMARK_SEEN], covering_us, late.SESSION)
            covered = ~expired.fill_null(value=True) & self.sessions.are_late(undecided)
            if strict:
                covered &= ~self.sessions.overlaps_expired(undecided, opened, below)
            opened = self.sessions.merge_overlapping(opened, as_points(undecided.filter(covered)))
            admitted += [events.filter(overlapping), undecided.filter(covered)]
            undecided = undecided.filter(~covered)
            over = undecided[WATERMARK_SEEN] <= self.context.watermark_us
            rest = pl.concat([rest, undecided.filter(~over)])
            self.sessions.drop_late(undecided.filter(over))
        return opened, pl.concat(admitted), rest

    def _decision_rounds(self, events: pl.DataFrame) -> Iterator[pl.DataFrame]:
        """Return the events to be decided on: at once, or as their decisions depend on one another."""
        if not self.config.session.strict:
            yield events
            return
        number = pl.col(WATERMARK_SEEN).rank("dense").over(HASH).alias(_ROUND)
        rounds = events.with_columns(number).partition_by(_ROUND, as_dict=True, include_key=False)
        for (_,), part in sorted(rounds.items()):
            yield part

    def _covering_ends(self, opened: pl.DataFrame, events: pl.DataFrame) -> pl.Series:
        """Return how far the open session reaches that holds each event's own end; null if none does."""
        at = pl.int_range(pl.len(), dtype=pl.Int64).alias(_AT)
        points = (
            as_points(events)
            .select(*self.sessions.keys, *SPAN, at)
            .with_columns(pl.col(TILL).alias(FROM))
        )
        sessions = opened.select(*self.sessions.keys, *SPAN, pl.lit(-1, pl.Int64).alias(_AT))
        spans = self.config.session.assign_parts(pl.concat([sessions, points]), self.config.by)
        is_session = pl.col(_AT) < 0
        cover = pl.when(is_session).then(TILL).max().over(PART)
        found = spans.with_columns(cover.alias(_COVERING_END)).filter(~is_session).sort(_AT)
        return found[_COVERING_END]

    # ── state ───────────────────────────────────────────────────────────────────────────────

    def _keep(self, hashes: Hashes, held: pl.DataFrame | None, rest: pl.DataFrame) -> None:
        """Put what is still held back, with timers for when it is to be looked at."""
        complete = pl.col(TILL) + 1
        due = complete + self.config.lateness_us
        if not self.config.panes.only_final:
            due = pl.when(DONE).then(due).otherwise(complete)
        if self.config.panes.retracts:
            owed = self.config.panes.retraction_due()
            due = (
                pl.when(owed > self.context.watermark_us)
                .then(pl.min_horizontal(due, owed))
                .otherwise(due)
            )
        due = pl.when(DEFERRED).then(WATERMARK_SEEN).otherwise(due)
        unset = pl.col(TIMER).is_null() | (pl.col(TIMER) <= self.context.watermark_us)
        rest = rest.with_columns(due.alias(_NOW)).with_columns(
            (unset | (pl.col(TIMER) > pl.col(_NOW))).alias(_SET_TIMER)
        )
        setting = rest.filter(_SET_TIMER)
        self._timers.add(setting[_NOW].to_numpy(), setting[HASH].to_numpy())
        timer = pl.when(_SET_TIMER).then(_NOW).otherwise(TIMER).alias(TIMER)
        self._set_clock_timers(rest)
        rest = rest.with_columns(timer).drop(_NOW, _SET_TIMER)
        self._held.put(hashes, self.config.aggregation.for_state(rest), held)
        waited = _NO_TIMES if held is None else held[TIMER].to_numpy()
        self._waiting.update(waited, rest[TIMER].to_numpy(), self.context.watermark_us)
        self.sessions.closed.drop(self._passed_us)

    def _set_clock_timers(self, rest: pl.DataFrame) -> None:
        if self._clock_timers is not None:
            firing = rest.filter(pl.col(DUE).is_not_null() & (pl.col(NEW_EVENTS) > 0))
            self._clock_timers.add(firing[DUE].to_numpy(), firing[HASH].to_numpy())
