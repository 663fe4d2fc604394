"""One batch of one bucket of sessions: events joined to what is open, panes fired, state moved on.

All events of the batch take this way at once; where panes fire by count, those of a key go one after
another first (:mod:`millstream.kernels.session_rounds`).

1. Events that are not late for their own lane are joined to the open sessions.
2. Late ones that an open session still covers are joined as well: for it they are not late.
3. On-time panes fire.
4. Of the other late ones, those whose lane the watermark has caught up with are joined or found too
   late; the rest wait.
5. Other panes fire; sessions that have expired are closed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from millstream.kernels.aggregation import rows_in
from millstream.kernels.emission import AfterTime
from millstream.kernels.frames import HASH, ORDER, REACHED, ROWS, TIME
from millstream.kernels.hash_order import distinct
from millstream.kernels.held_events import HeldEvents
from millstream.kernels.keyed_rows import KeyedRows
from millstream.kernels.keyhash import Hashes
from millstream.kernels.operator import Moment, OperatorState, Outcome
from millstream.kernels.session_closed import ClosedSessions
from millstream.kernels.session_panes import DONE, DUE, FRESH, Said
from millstream.kernels.session_rounds import Rounds
from millstream.kernels.session_spans import (
    BELOW,
    END,
    FROM,
    PART,
    SPAN,
    START,
    TILL,
    WAITS,
    furthest_back,
    in_company,
    pointed,
    whole_spans,
)
from millstream.kernels.sorted_runs import EACH_ROW
from millstream.kernels.timers import Timers, Waiting

if TYPE_CHECKING:
    from millstream.kernels.sessions import SessionAggregate

TIMER = "__timer"  # Int64, nullable: the earliest timer that is set for it
RAW = "__raw"  # Struct: an event as it came, where those too late go aside
_NOW = "__now"
_AT = "__at"
_ROUND = "__round"
_COVER = "__cover"
_SLOT_CLOCK_MS = 60_000
_NO_TIMES = np.empty(0, np.int64)


@dataclass
class SessionBatch:
    """The sessions that a batch touches. ``out`` gathers what is emitted, in its order."""

    operator: SessionAggregate
    state: OperatorState
    moment: Moment
    out: Said = field(default_factory=Said)
    late: list[pl.DataFrame] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    closed_events: int = 0  # of sessions that have expired, those that had been told

    def run(self, tables: Sequence[pl.DataFrame]) -> None:
        """Take the batch's events in, and everything that is due."""
        rows = pl.concat(tables) if tables else None
        ledger = HeldEvents(self.operator.name, (self._held.runs,))
        self._take(rows)
        ledger.came = 0 if rows is None else rows.height
        ledger.left = self.counts["late"] + self.closed_events
        if self.operator.panes.emission.mode == "discard":  # what was told is not held any more
            ledger.left += self.out.events
        ledger.close()

    def _take(self, rows: pl.DataFrame | None) -> None:
        touched = [self._timers.due(self.moment.watermark_us)]
        if self._clock_timers is not None:
            touched.append(self._clock_timers.due(self.moment.clock_ms))
        if rows is not None:
            self.counts["held"] += rows.height
            touched.append(rows[HASH].to_numpy())
        hashes = distinct(np.concatenate(touched))
        held = self._held.get(hashes) if len(hashes) else None
        if held is None and (rows is None or not rows.height):  # at most timers without a meaning
            self._waiting.move(_NO_TIMES, _NO_TIMES, self.moment.watermark_us)
            return
        rest = self._advance(held, rows)
        self._keep(hashes, held, rest)

    def outcome(self) -> Outcome:
        """Give what comes out."""
        rows = pl.concat(self.out.rows) if self.out.rows else None
        late = self._aside(pl.concat(self.late)) if self.late else None
        return Outcome(rows, late, self.counts)

    # ── the families of state ───────────────────────────────────────────────────────────────

    @property
    def _held(self) -> KeyedRows:
        return KeyedRows(self.state, "sessions", ROWS)

    @property
    def _timers(self) -> Timers:
        return Timers(self.state, "timers", self.operator.slot_us)

    @property
    def _waiting(self) -> Waiting:
        return Waiting(self.operator.name, self.state, self.operator.slot_us)

    @property
    def _closed(self) -> ClosedSessions:
        operator = self.operator
        runs = self.state.runs("closed", EACH_ROW)
        return ClosedSessions(runs, operator.by, operator.slot_us, operator.session.gap_us)

    @property
    def _passed_us(self) -> int:
        """What reaches no further has expired."""
        return self.moment.watermark_us - self.operator.lateness_us

    @property
    def _clock_timers(self) -> Timers | None:
        emission = self.operator.panes.emission
        timed = isinstance(emission.early, AfterTime) or isinstance(emission.late, AfterTime)
        return Timers(self.state, "clock_timers", _SLOT_CLOCK_MS) if timed else None

    # ── the five steps ──────────────────────────────────────────────────────────────────────

    @property
    def keys(self) -> list[str]:
        return [HASH, *self.operator.by]

    def _advance(self, held: pl.DataFrame | None, rows: pl.DataFrame | None) -> pl.DataFrame:
        """Take the events in; give what is still held."""
        if held is None:
            held = self._nothing(rows)
        panes, at = self.operator.panes, pl.lit(self.moment.watermark_us, pl.Int64)
        opened, waiting = held.filter(~pl.col(WAITS)), held.filter(WAITS)
        if panes.counted:
            opened, waiting = Rounds(self).taken(opened, waiting, rows)
            opened = self._fired_on_time(self._closed.looked_up(opened), at)
        else:
            if rows is not None:
                opened, waiting = self._arrived(opened, waiting, rows)
            opened, waiting = self._taken(self._closed.looked_up(opened), waiting, at)
        opened = self.noted(opened, at)
        if opened.height:
            opened = self._fired(opened, at)
        return pl.concat([opened, waiting.select(opened.columns)])

    def _taken(
        self, opened: pl.DataFrame, waiting: pl.DataFrame, now: pl.Expr
    ) -> tuple[pl.DataFrame, pl.DataFrame]:
        """Join the late events that are in time, before and after the on-time panes."""
        only_final = self.operator.panes.only_final
        if not self.operator.session.strict or only_final:
            if not only_final:
                opened, waiting = self._rescued(opened, waiting)
                opened = self._fired_on_time(self._early_again(opened), now)
            opened, _, waiting = self._admitted(opened, waiting)
            return opened, waiting
        # Which of several late events are in time depends on one another, so that comes first.
        _, admitted, waiting = self._admitted(opened, waiting)
        opened, admitted = self._rescued(opened, admitted)
        opened = self._fired_on_time(self._early_again(opened), now)
        return self.joined(opened, pointed(admitted)), waiting

    def _early_again(self, opened: pl.DataFrame) -> pl.DataFrame:
        """Have sessions that events have made longer since their on-time pane wait for another."""
        # What has been told on time was over by then.
        before = pl.lit(self.moment.before_us, pl.Int64)
        return self.operator.panes.early_again(opened, before)

    def _fired_on_time(self, opened: pl.DataFrame, now: pl.Expr) -> pl.DataFrame:
        opened = self.noted(opened, now)
        opened = self.operator.panes.fire_owed(opened, now, self.out, complete=False)
        return self.operator.panes.fire_on_time(opened, now, self.out)

    def _nothing(self, rows: pl.DataFrame | None) -> pl.DataFrame:
        assert rows is not None
        keys = {name: rows.schema[name] for name in self.operator.by}
        return pl.DataFrame(schema={**keys, **self.operator.state_schema})

    def _fired(self, opened: pl.DataFrame, now: pl.Expr) -> pl.DataFrame:
        """Fire the other panes, and close what has expired."""
        panes, moment = self.operator.panes, self.moment
        if not panes.only_final:
            opened = panes.fire_owed(opened, now, self.out, complete=True)
            opened = panes.fire_others(opened, now, moment.clock_ms, self.out, at_end=True)
        expired = pl.col(TILL) < self._passed_us
        closing = opened.filter(expired)
        if not closing.height:
            return opened
        if panes.only_final:
            self.out.rows.append(panes.read_off(closing.sort(START, END, HASH), now))
        untold = 0 if panes.only_final else int(closing[FRESH].sum())
        self.closed_events += rows_in(closing) - untold
        self._closed.add(closing, self._passed_us)
        return opened.filter(~expired)

    # ── joining ─────────────────────────────────────────────────────────────────────────────

    def _arrived(
        self, opened: pl.DataFrame, waiting: pl.DataFrame, rows: pl.DataFrame
    ) -> tuple[pl.DataFrame, pl.DataFrame]:
        """Join the events that are simply joined to what they overlap; the others wait."""
        apart = self._late_for_lane()
        parts = self.operator.session.parted(rows.filter(~apart), self.operator.by)
        arrived = self._partials(parts, opened.columns)
        opened = self.joined(opened, arrived) if opened.height else arrived
        return opened, pl.concat([waiting, self.each_alone(rows.filter(apart), waiting.columns)])

    def _late_for_lane(self) -> pl.Expr:
        """Which events are not simply joined to what they overlap."""
        session, panes = self.operator.session, self.operator.panes
        late = pl.col(FROM) > pl.col(TILL)
        if not panes.only_final:
            late |= pl.col(TILL) < pl.col(REACHED)
        if session.strict:
            late |= pl.col(FROM) > pl.col(START)
        return late

    def each_alone(self, rows: pl.DataFrame, columns: Sequence[str]) -> pl.DataFrame:
        """Make every event one by itself, to wait for its verdict; they stay in their order."""
        waits = pl.lit(value=True).alias(WAITS)
        numbered = rows.with_columns(pl.int_range(1, pl.len() + 1).alias(PART))
        return self._partials(numbered, columns).with_columns(waits)

    def _partials(self, rows: pl.DataFrame, columns: Sequence[str]) -> pl.DataFrame:
        aggregation = self.operator.aggregation
        made = [e for name, a in aggregation.aggregates for e in a.partial(name)]
        names = [name for name, _ in self.operator.row_schema]
        # Null where nobody needs to know the place, or there is none.
        placed = pl.col(ORDER) if ORDER in rows.columns else pl.lit(None, pl.Int64).alias(ORDER)
        raw = [pl.struct(*names, placed).first().alias(RAW)] if self.operator.aside else []
        place = [pl.col(ORDER).first()] if self.operator.panes.counted else []
        reduced = rows.group_by(PART, maintain_order=True).agg(
            *(pl.col(name).first() for name in (*self.operator.by, HASH)),
            *made,
            pl.len().cast(pl.Int64).alias(ROWS),
            *place,
            *raw,
        )
        reduced = reduced.cast(dict(aggregation.schema)).with_columns(
            *whole_spans(rows),
            pl.lit(value=False).alias(WAITS),
            pl.lit(None, pl.Int64).alias(TIMER),
            pl.lit(None, pl.Int64).alias(BELOW),
            *self.operator.panes.begun(ROWS),
        )
        return reduced.select(columns)

    def joined(self, opened: pl.DataFrame, more: pl.DataFrame) -> pl.DataFrame:
        """Make open sessions that overlap one."""
        if not more.height:
            return opened
        spans = self.operator.session.parted(pl.concat([opened, more]), self.operator.by)
        several = in_company(spans)
        alone = spans.filter(~several).select(opened.columns)
        meeting = spans.filter(several)
        if not meeting.height:
            return alone
        whole = whole_spans(meeting)
        # One that was below a part may have become part of the whole itself.
        below = pl.when(pl.col(BELOW) < furthest_back(meeting)).then(BELOW).alias(BELOW)
        meeting = meeting.with_columns(below)
        firsts = [*self.keys, WAITS, *(name for name in (RAW, ORDER) if name in opened.columns)]
        aggregates = self.operator.aggregation.aggregates
        merged = [e for name, a in aggregates for e in a.merge(name)]
        one = meeting.group_by(PART, maintain_order=True).agg(
            *(pl.col(name).first() for name in firsts),
            *merged,
            pl.col(ROWS).sum(),
            pl.col(TIMER).min(),
            pl.col(BELOW).max(),
            *self.operator.panes.joined(),
        )
        one = one.cast(dict(self.operator.aggregation.schema)).with_columns(*whole)
        return pl.concat([alone, one.select(opened.columns)])

    # ── late events ─────────────────────────────────────────────────────────────────────────

    def _rescued(
        self, opened: pl.DataFrame, waiting: pl.DataFrame
    ) -> tuple[pl.DataFrame, pl.DataFrame]:
        """Join the late events for which the session that covers them is not complete."""
        if not waiting.height:
            return opened, waiting
        on_time = (self._covers(opened, waiting) >= waiting[REACHED]).fill_null(value=False)
        on_time |= (waiting[FROM] <= waiting[TILL]) & (waiting[TILL] >= waiting[REACHED])
        return self.joined(opened, pointed(waiting.filter(on_time))), waiting.filter(~on_time)

    def _admitted(
        self, opened: pl.DataFrame, waiting: pl.DataFrame
    ) -> tuple[pl.DataFrame, pl.DataFrame, pl.DataFrame]:
        """Join the late events that are in time, and leave out those that are too late.

        Give the sessions then, the events that were joined, and those that wait.
        """
        if not waiting.height:
            return opened, waiting, waiting
        strict, below = self.operator.session.strict, self.below(opened)
        known = waiting[REACHED] <= self.moment.watermark_us
        if self.operator.panes.only_final and not strict:
            candidates, rest = waiting, waiting.clear()
        else:
            candidates, rest = waiting.filter(known), waiting.filter(~known)
        admitted = [waiting.clear()]
        for events in self._verdicts(candidates):
            overlapping = events[FROM] <= events[TILL]
            if strict:
                overlapping &= ~self.overlap_expired(events, opened, below)
            opened = self.joined(opened, pointed(events.filter(overlapping)))
            doubtful = events.filter(~overlapping)
            cover = self._covers(opened, doubtful) >= doubtful[REACHED] - self.operator.lateness_us
            covered = cover.fill_null(value=False) & (doubtful[FROM] > doubtful[TILL])
            if strict:
                covered &= ~self.overlap_expired(doubtful, opened, below)
            opened = self.joined(opened, pointed(doubtful.filter(covered)))
            admitted += [events.filter(overlapping), doubtful.filter(covered)]
            doubtful = doubtful.filter(~covered)
            over = doubtful[REACHED] <= self.moment.watermark_us
            rest = pl.concat([rest, doubtful.filter(~over)])
            self.too_late(doubtful.filter(over))
        return opened, pl.concat(admitted), rest

    def _verdicts(self, events: pl.DataFrame) -> Iterator[pl.DataFrame]:
        """Give the events to be decided on: at once, or as their verdicts depend on one another."""
        if not self.operator.session.strict:
            yield events
            return
        number = pl.col(REACHED).rank("dense").over(HASH).alias(_ROUND)
        rounds = events.with_columns(number).partition_by(_ROUND, as_dict=True, include_key=False)
        for (_,), part in sorted(rounds.items()):
            yield part

    def _covers(self, opened: pl.DataFrame, events: pl.DataFrame) -> pl.Series:
        """Say how far the open session reaches that holds each event's own end; null if none does."""
        at = pl.int_range(pl.len(), dtype=pl.Int64).alias(_AT)
        points = (
            pointed(events).select(*self.keys, *SPAN, at).with_columns(pl.col(TILL).alias(FROM))
        )
        sessions = opened.select(*self.keys, *SPAN, pl.lit(-1, pl.Int64).alias(_AT))
        spans = self.operator.session.parted(pl.concat([sessions, points]), self.operator.by)
        is_session = pl.col(_AT) < 0
        cover = pl.when(is_session).then(TILL).max().over(PART)
        found = spans.with_columns(cover.alias(_COVER)).filter(~is_session).sort(_AT)
        return found[_COVER]

    def overlap_expired(
        self, events: pl.DataFrame, opened: pl.DataFrame, below: pl.DataFrame
    ) -> pl.Series:
        """Say which events would make a session overlap one that had expired for their lane.

        ``below`` is what :meth:`below` told before the time of these events.
        """
        known = pl.concat([below, self.below(self._closed.looked_up(events))])
        keyed = known.group_by(self.keys).agg(pl.col(BELOW).max().alias(_COVER))
        numbered = events.select(*self.keys, START, REACHED).with_row_index(_AT)
        closed = numbered.join(keyed, on=self.keys, how="left", nulls_equal=True)
        pairs = numbered.join(opened.select(*self.keys, TILL), on=self.keys, nulls_equal=True)
        expired = pl.col(TILL) + self.operator.lateness_us < pl.col(REACHED)
        met = [
            closed.filter(pl.col(_COVER) >= pl.col(START))[_AT],
            pairs.filter(expired & (pl.col(TILL) >= pl.col(START)))[_AT],
        ]
        return numbered.select(pl.col(_AT).is_in(pl.concat(met).implode())).to_series()

    def below(self, spans: pl.DataFrame) -> pl.DataFrame:
        """Give what is known of expired sessions of the keys of some spans, if verdicts depend on it."""
        known = spans.select(*self.keys, BELOW)
        return known if self.operator.session.strict else known.clear()

    def too_late(self, events: pl.DataFrame) -> None:
        """Count events that are too late, and put them aside if that is wanted."""
        if events.height:
            count = rows_in(events)
            self.counts.update(held=-count, late=count)
            if self.operator.aside:
                self.late.append(events.select(RAW, START, END, REACHED))

    def _aside(self, events: pl.DataFrame) -> pl.DataFrame:
        """Say of events that are too late why, by how much, and for which session."""
        aside = events.select(
            pl.col(RAW).struct.unnest(),
            pl.col(START).alias(TIME),
            (pl.col(REACHED) - pl.col(START)).cast(pl.Duration("us")).alias("late_by"),
            pl.lit("expired_window").alias("late_reason"),
            pl.from_epoch(START, "us").dt.replace_time_zone("UTC").alias("window_start"),
            pl.from_epoch(END, "us").dt.replace_time_zone("UTC").alias("window_end"),
        )
        return aside.drop(ORDER) if aside[ORDER].null_count() else aside

    # ── expired neighbours ──────────────────────────────────────────────────────────────────

    def noted(self, opened: pl.DataFrame, now: pl.Expr) -> pl.DataFrame:
        """Let sessions know of those of their key that have expired, now or earlier."""
        opened = self._closed.looked_up(opened)
        expired = opened.filter(pl.col(TILL) + self.operator.lateness_us < now)
        if not expired.height:
            return opened
        beside = opened.filter(pl.col(HASH).is_in(expired[HASH].implode()))
        if beside.height == expired[HASH].n_unique():  # each is the only one of its key
            return opened
        return self._told_of(opened, expired)

    def _told_of(self, spans: pl.DataFrame, expired: pl.DataFrame) -> pl.DataFrame:
        numbered = spans.with_row_index(_AT)
        ends = expired.select(*self.keys, pl.col(TILL).alias(_COVER))
        pairs = numbered.select(_AT, *self.keys, FROM).join(ends, on=self.keys, nulls_equal=True)
        below = pairs.filter(pl.col(_COVER) < pl.col(FROM)).group_by(_AT).agg(pl.col(_COVER).max())
        told = numbered.join(below, on=_AT, how="left", maintain_order="left")
        told = told.with_columns(pl.max_horizontal(BELOW, _COVER).alias(BELOW))
        return told.select(spans.columns)

    # ── state ───────────────────────────────────────────────────────────────────────────────

    def _keep(self, hashes: Hashes, held: pl.DataFrame | None, rest: pl.DataFrame) -> None:
        """Put what is still held back, with timers for when it is to be looked at."""
        complete = pl.col(TILL) + 1
        due = complete + self.operator.lateness_us
        if not self.operator.panes.only_final:
            due = pl.when(DONE).then(due).otherwise(complete)
        if self.operator.panes.takes_back:
            owed = self.operator.panes.owed()
            due = (
                pl.when(owed > self.moment.watermark_us)
                .then(pl.min_horizontal(due, owed))
                .otherwise(due)
            )
        due = pl.when(WAITS).then(REACHED).otherwise(due)
        unset = pl.col(TIMER).is_null() | (pl.col(TIMER) <= self.moment.watermark_us)
        rest = rest.with_columns(due.alias(_NOW)).with_columns(
            (unset | (pl.col(TIMER) > pl.col(_NOW))).alias(_COVER)
        )
        setting = rest.filter(_COVER)
        self._timers.add(setting[_NOW].to_numpy(), setting[HASH].to_numpy())
        timer = pl.when(_COVER).then(_NOW).otherwise(TIMER).alias(TIMER)
        self._set_clock_timers(rest)
        rest = rest.with_columns(timer).drop(_NOW, _COVER)
        self._held.put(hashes, self.operator.aggregation.stored(rest), held)
        waited = _NO_TIMES if held is None else held[TIMER].to_numpy()
        self._waiting.move(waited, rest[TIMER].to_numpy(), self.moment.watermark_us)
        self._closed.drop(self._passed_us)

    def _set_clock_timers(self, rest: pl.DataFrame) -> None:
        if self._clock_timers is not None:
            firing = rest.filter(pl.col(DUE).is_not_null() & (pl.col(FRESH) > 0))
            self._clock_timers.add(firing[DUE].to_numpy(), firing[HASH].to_numpy())
