"""One batch of one bucket of sessions: events joined to what is open, panes fired, state moved on.

Events take this way, all at once, or, where panes fire by count, in rounds of one event per key:

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
from millstream.kernels.frames import HASH, REACHED, ROWS, TIME
from millstream.kernels.hash_order import distinct
from millstream.kernels.keyed_rows import KeyedRows
from millstream.kernels.log_order import in_log_order
from millstream.kernels.operator import Moment, OperatorState, Outcome
from millstream.kernels.session_closed import ClosedSessions
from millstream.kernels.session_panes import DONE, DUE, FRESH, OVERLAPS
from millstream.kernels.session_spans import END, FROM, PART, SPAN, START, TILL, joined_span
from millstream.kernels.timers import Timers

if TYPE_CHECKING:
    from millstream.kernels.sessions import SessionAggregate

WAITS = "__waits"  # Boolean: the row is an event that waits, not a session
TIMER = "__timer"  # Int64, nullable: the earliest timer that is set for it
RAW = "__raw"  # Struct: an event as it came, where those too late go aside
_NOW = "__now"  # Int64: the watermark as far as it concerns a key, within a round
_ROUND = "__round"
_COVER = "__cover"
_SLOT_CLOCK_MS = 60_000


@dataclass
class SessionBatch:
    """The sessions that a batch touches. ``out`` gathers what is emitted, in its order."""

    operator: SessionAggregate
    state: OperatorState
    moment: Moment
    out: list[pl.DataFrame] = field(default_factory=list)
    late: list[pl.DataFrame] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    def run(self, tables: Sequence[pl.DataFrame]) -> None:
        """Take the batch's events in, and everything that is due."""
        rows = pl.concat(tables) if tables else None
        touched = [self._timers.due(self.moment.watermark_us)]
        if self._clock_timers is not None:
            touched.append(self._clock_timers.due(self.moment.clock_ms))
        if rows is not None:
            self.counts["held"] += rows.height
            touched.append(rows[HASH].to_numpy())
        hashes = distinct(np.concatenate(touched))
        if not len(hashes):
            return
        held = self._held.get(hashes)
        if held is None and rows is None:  # timers that no longer mean anything
            return
        rest = self._advance(held, rows)
        self._keep(hashes, rest)

    def outcome(self) -> Outcome:
        """Give what comes out."""
        rows = pl.concat(self.out) if self.out else None
        late = self._aside(pl.concat(self.late)) if self.late else None
        return Outcome(rows, late, self.counts)

    # ── the families of state ───────────────────────────────────────────────────────────────

    @property
    def _held(self) -> KeyedRows:
        return KeyedRows(self.state, "sessions")

    @property
    def _timers(self) -> Timers:
        return Timers(self.state, "timers", self.operator.slot_us)

    @property
    def _closed(self) -> ClosedSessions:
        operator = self.operator
        runs = self.state.runs("closed")
        return ClosedSessions(runs, operator.by, operator.slot_us, operator.session)

    @property
    def _passed_us(self) -> int:
        """What ends by then has expired."""
        return self.moment.watermark_us - self.operator.lateness_us

    @property
    def _clock_timers(self) -> Timers | None:
        emission = self.operator.panes.emission
        timed = isinstance(emission.early, AfterTime) or isinstance(emission.late, AfterTime)
        return Timers(self.state, "clock_timers", _SLOT_CLOCK_MS) if timed else None

    # ── rounds ──────────────────────────────────────────────────────────────────────────────

    def _advance(self, held: pl.DataFrame | None, rows: pl.DataFrame | None) -> pl.DataFrame:
        """Take the events in, in rounds where that matters; give what is still held."""
        if held is None:
            held = self._nothing(rows)
        if rows is not None and self.operator.panes.counted:
            for events in self._rounds(rows):
                of_keys = pl.col(HASH).is_in(events[HASH].implode())
                others = held.filter(~of_keys)
                now = events.group_by(HASH).agg(pl.col(REACHED).min().alias(_NOW))
                now = now.with_columns(pl.col(_NOW).clip(None, self.moment.watermark_us))
                held = pl.concat([others, self._taken(held.filter(of_keys), events, now)])
            rows = None
        return self._taken(held, rows, None)

    def _rounds(self, rows: pl.DataFrame) -> Iterator[pl.DataFrame]:
        """Give the events one per key at a time, in the order of arrival."""
        ordered = in_log_order(rows)
        number = pl.int_range(pl.len()).over(HASH, *self.operator.by)
        rounds = ordered.with_columns(number.alias(_ROUND)).partition_by(
            _ROUND, as_dict=True, include_key=False
        )
        for (_,), events in sorted(rounds.items()):
            yield events

    def _nothing(self, rows: pl.DataFrame | None) -> pl.DataFrame:
        assert rows is not None
        keys = {name: rows.schema[name] for name in self.operator.by}
        return pl.DataFrame(schema={**keys, **self.operator.state_schema})

    def _taken(
        self, held: pl.DataFrame, rows: pl.DataFrame | None, now: pl.DataFrame | None
    ) -> pl.DataFrame:
        """Go the five steps; ``now`` is the watermark by key, or None at the end of the batch."""
        panes, columns = self.operator.panes, held.columns
        opened = held.filter(~pl.col(WAITS))
        waiting = held.filter(WAITS)
        at = pl.lit(self.moment.watermark_us, pl.Int64) if now is None else pl.col(_NOW)
        if now is not None:  # what was complete before the event came does not know of it
            opened = panes.fire_on_time(_with(opened, now), at, self.out).select(columns)
        if rows is not None:
            apart = self._late_for_lane()
            arrived = self._reduced(rows.filter(~apart), columns)
            opened = self._joined(opened, arrived) if opened.height else arrived
            waiting = pl.concat([waiting, self._apart(rows.filter(apart), columns)])
        if not panes.only_final:
            opened, waiting = self._rescued(opened, waiting)
            opened = panes.fire_on_time(_with(opened, now), at, self.out).select(columns)
        if waiting.height:
            opened, waiting = self._decided(opened, _with(waiting, now), at)
        if opened.height:
            opened = self._flagged(opened)
            opened = self._fired(_with(opened, now), at, at_end=now is None).select(columns)
        return pl.concat([opened, waiting.select(columns)])

    def _fired(self, opened: pl.DataFrame, now: pl.Expr, *, at_end: bool) -> pl.DataFrame:
        panes = self.operator.panes
        expired = pl.col(END) + self.operator.lateness_us <= self.moment.watermark_us
        if not panes.only_final:
            clock_ms = self.moment.clock_ms
            opened = panes.fire_others(opened, now, clock_ms, self.out, at_end=at_end)
        if not at_end:
            return opened
        closing = opened.filter(expired)
        if not closing.height:
            return opened
        if panes.only_final:
            self.out.append(panes.read_off(closing.sort(START, HASH), now))
        self._closed.add(closing, self._passed_us)
        return opened.filter(~expired)

    # ── joining ─────────────────────────────────────────────────────────────────────────────

    def _late_for_lane(self) -> pl.Expr:
        """Which events are not simply joined to what they overlap."""
        session, panes = self.operator.session, self.operator.panes
        late = pl.col(FROM) > pl.col(TILL)
        if not panes.only_final:
            late |= pl.col(END) <= pl.col(REACHED)
        if session.strict:
            late |= pl.col(FROM) > pl.col(START)
        return late

    def _reduced(self, rows: pl.DataFrame, columns: Sequence[str]) -> pl.DataFrame:
        """Make the events of each connected part one session."""
        return self._partials(self.operator.session.parted(rows, self.operator.by), columns)

    def _apart(self, rows: pl.DataFrame, columns: Sequence[str]) -> pl.DataFrame:
        """Make every event one by itself, to wait for its verdict."""
        waits = pl.lit(value=True).alias(WAITS)
        numbered = rows.with_columns(pl.int_range(1, pl.len() + 1).alias(PART))
        return self._partials(numbered, columns).with_columns(waits)

    def _partials(self, rows: pl.DataFrame, columns: Sequence[str]) -> pl.DataFrame:
        aggregation = self.operator.aggregation
        made = [e for name, a in aggregation.aggregates for e in a.partial(name)]
        names = [name for name, _ in self.operator.row_schema]
        raw = [pl.struct(names).first().alias(RAW)] if self.operator.aside else []
        reduced = rows.group_by(PART, maintain_order=True).agg(
            *(pl.col(name).first() for name in (*self.operator.by, HASH)),
            *made,
            pl.len().cast(pl.Int64).alias(ROWS),
            *joined_span(),
            pl.col(REACHED).max(),
            *raw,
        )
        reduced = reduced.cast(dict(aggregation.schema)).with_columns(
            pl.lit(value=False).alias(WAITS),
            pl.lit(None, pl.Int64).alias(TIMER),
            pl.lit(value=False).alias(OVERLAPS),
            *self.operator.panes.begun(ROWS),
        )
        return reduced.select(columns)

    def _joined(self, opened: pl.DataFrame, more: pl.DataFrame) -> pl.DataFrame:
        """Make open sessions that overlap one."""
        if not more.height:
            return opened
        spans = self.operator.session.parted(pl.concat([opened, more]), self.operator.by)
        several = pl.len().over(PART) > 1
        spans = spans.with_columns(several.alias(_COVER))
        alone = spans.filter(~pl.col(_COVER)).select(opened.columns)
        meeting = spans.filter(_COVER)
        if not meeting.height:
            return alone
        firsts = (*self.operator.by, HASH, WAITS, *((RAW,) if self.operator.aside else ()))
        aggregates = self.operator.aggregation.aggregates
        merged = [e for name, a in aggregates for e in a.merge(name)]
        one = meeting.group_by(PART, maintain_order=True).agg(
            *(pl.col(name).first() for name in firsts),
            *merged,
            pl.col(ROWS).sum(),
            *joined_span(),
            pl.col(REACHED).max(),
            pl.col(TIMER).min(),
            pl.col(OVERLAPS).any(),
            *self.operator.panes.joined(),
        )
        one = one.cast(dict(self.operator.aggregation.schema))
        return pl.concat([alone, one.select(opened.columns)])

    # ── late events ─────────────────────────────────────────────────────────────────────────

    def _rescued(
        self, opened: pl.DataFrame, waiting: pl.DataFrame
    ) -> tuple[pl.DataFrame, pl.DataFrame]:
        """Join the late events for which the session that covers them is not complete."""
        if not waiting.height or not opened.height:
            return opened, waiting
        on_time = (self._covers(opened, waiting) > waiting[REACHED]).fill_null(value=False)
        if self.operator.session.strict:
            on_time &= waiting[FROM] <= waiting[START]
        return self._joined(opened, _pointed(waiting.filter(on_time))), waiting.filter(~on_time)

    def _decided(
        self, opened: pl.DataFrame, waiting: pl.DataFrame, now: pl.Expr
    ) -> tuple[pl.DataFrame, pl.DataFrame]:
        """Join the late events that are in time, and leave out those that are too late."""
        columns = opened.columns
        known = waiting.select(pl.col(REACHED) <= now).to_series()
        if self.operator.panes.only_final and not self.operator.session.strict:
            candidates, rest = waiting, waiting.clear()
        else:
            candidates, rest = waiting.filter(known), waiting.filter(~known)
        for events in self._verdicts(candidates):
            overlapping = events[FROM] <= events[TILL]
            if self.operator.session.strict:
                overlapping &= ~self._closed.meet(events, opened)
            opened = self._joined(opened, _pointed(events.filter(overlapping).select(columns)))
            doubtful = events.filter(~overlapping)
            lateness_us = self.operator.lateness_us
            cover = self._covers(opened, doubtful) > doubtful[REACHED] - lateness_us
            covered = cover.fill_null(value=False) & (doubtful[FROM] > doubtful[TILL])
            if self.operator.session.strict:
                covered &= ~self._closed.meet(doubtful, opened)
            opened = self._joined(opened, _pointed(doubtful.filter(covered).select(columns)))
            doubtful = doubtful.filter(~covered)
            open_to = doubtful.select(pl.col(REACHED) <= now).to_series()
            rest = pl.concat([rest, doubtful.filter(~open_to)])
            self._too_late(doubtful.filter(open_to))
        return opened, rest

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
        """Give the end of the open session that holds each event's own end; null if none does."""
        keys = [*self.operator.by, HASH, *SPAN]
        at = pl.int_range(pl.len(), dtype=pl.Int64).alias(_ROUND)
        points = _pointed(events).select(*keys, at).with_columns(pl.col(TILL).alias(FROM))
        sessions = opened.select(*keys, pl.lit(-1, pl.Int64).alias(_ROUND))
        spans = self.operator.session.parted(pl.concat([sessions, points]), self.operator.by)
        is_session = pl.col(_ROUND) < 0
        cover = pl.when(is_session).then(END).max().over(PART)
        found = spans.with_columns(cover.alias(_COVER)).filter(~is_session).sort(_ROUND)
        return found[_COVER]

    def _too_late(self, events: pl.DataFrame) -> None:
        if events.height:
            count = rows_in(events)
            self.counts.update(held=-count, late=count)
            if self.operator.aside:
                self.late.append(events.select(RAW, START, END, REACHED))

    def _aside(self, events: pl.DataFrame) -> pl.DataFrame:
        """Say of events that are too late why, by how much, and for which session."""
        return events.select(
            pl.col(RAW).struct.unnest(),
            pl.col(START).alias(TIME),
            (pl.col(REACHED) - pl.col(START)).cast(pl.Duration("us")).alias("late_by"),
            pl.lit("expired_window").alias("late_reason"),
            pl.from_epoch(START, "us").dt.replace_time_zone("UTC").alias("window_start"),
            pl.from_epoch(END, "us").dt.replace_time_zone("UTC").alias("window_end"),
        )

    def _flagged(self, opened: pl.DataFrame) -> pl.DataFrame:
        """Mark the sessions that overlap a closed one."""
        suspect = (pl.col(FROM) > pl.col(START)) & ~pl.col(OVERLAPS)
        suspects = opened.filter(suspect)
        if not suspects.height:
            return opened
        meets = self._closed.meet(suspects, opened)
        marked = suspects.with_columns(meets.alias(OVERLAPS))
        return pl.concat([opened.filter(~suspect), marked])

    # ── state ───────────────────────────────────────────────────────────────────────────────

    def _keep(
        self, hashes: np.ndarray[tuple[int], np.dtype[np.uint64]], rest: pl.DataFrame
    ) -> None:
        """Put what is still held back, with timers for when it is to be looked at."""
        due = pl.col(END) + self.operator.lateness_us
        if not self.operator.panes.only_final:
            due = pl.when(DONE).then(due).otherwise(END)
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
        self._held.put(hashes, self.operator.aggregation.stored(rest))
        self._closed.drop(self._passed_us)

    def _set_clock_timers(self, rest: pl.DataFrame) -> None:
        if self._clock_timers is not None:
            firing = rest.filter(pl.col(DUE).is_not_null() & (pl.col(FRESH) > 0))
            self._clock_timers.add(firing[DUE].to_numpy(), firing[HASH].to_numpy())


def _pointed(events: pl.DataFrame) -> pl.DataFrame:
    """Let events that wait take part as sessions; one that reaches nothing stands at its end."""
    return events.with_columns(
        pl.min_horizontal(FROM, TILL).alias(FROM), pl.lit(value=False).alias(WAITS)
    )


def _with(rows: pl.DataFrame, now: pl.DataFrame | None) -> pl.DataFrame:
    """Give rows with the watermark of their key, where it is not the same for all."""
    return rows if now is None else rows.join(now, on=HASH, how="left")
