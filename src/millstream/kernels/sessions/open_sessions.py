"""The open sessions of one bucket in a batch: merging them, and expired sessions of their keys."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import polars as pl

from millstream.kernels import late
from millstream.kernels.aggregation import event_count
from millstream.kernels.frames import HASH, ORDER, ROWS, TIME, WATERMARK_SEEN
from millstream.kernels.operator import BatchContext
from millstream.kernels.sessions.closed import ClosedSessions
from millstream.kernels.sessions.config import ORIGINAL, TIMER, SessionConfig
from millstream.kernels.sessions.panes import EmittedPanes
from millstream.kernels.sessions.spans import (
    DEFERRED,
    END,
    EXPIRED_END,
    FROM,
    PART,
    START,
    TILL,
    earliest_from,
    shares_part,
    whole_spans,
)
from millstream.kernels.state.operator_state import OperatorState
from millstream.kernels.state.sorted_runs import EACH_ROW

_AT = "__at"
_BESIDE = (
    "__beside"  # Int64: the latest TILL of an expired session of the key, as found in this batch
)


@dataclass
class OpenSessions:
    """What a batch does with open sessions. ``out`` gathers what is emitted, in its order."""

    config: SessionConfig
    state: OperatorState
    context: BatchContext
    out: EmittedPanes = field(default_factory=EmittedPanes)
    late: list[pl.DataFrame] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    @property
    def deadline(self) -> pl.Expr:
        """Return the watermark up to which a session, or an event's own, takes events."""
        return pl.col(TILL) + self.config.lateness_us

    def are_late(self, events: pl.DataFrame) -> pl.Series:
        """Return which events are late, if no other session covers them."""
        deadline_us = events[TILL] + self.config.lateness_us
        return late.is_late(events[WATERMARK_SEEN], deadline_us, late.SESSION)

    @property
    def keys(self) -> list[str]:
        return [HASH, *self.config.by]

    @property
    def closed(self) -> ClosedSessions:
        config = self.config
        runs = self.state.runs("closed", EACH_ROW)
        return ClosedSessions(runs, config.by, config.slot_us, config.session.gap_us)

    def one_row_per_event(self, rows: pl.DataFrame, columns: Sequence[str]) -> pl.DataFrame:
        """Make a row of each event, which waits for its decision; the order is kept."""
        waits = pl.lit(value=True).alias(DEFERRED)
        numbered = rows.with_columns(pl.int_range(1, pl.len() + 1).alias(PART))
        return self.partials(numbered, columns).with_columns(waits)

    def partials(self, rows: pl.DataFrame, columns: Sequence[str]) -> pl.DataFrame:
        aggregation = self.config.aggregation
        names = [name for name, _ in self.config.row_schema]
        # Null if the log order is not needed, or there is none.
        placed = pl.col(ORDER) if ORDER in rows.columns else pl.lit(None, pl.Int64).alias(ORDER)
        raw = [pl.struct(*names, placed).first().alias(ORIGINAL)] if self.config.side_output else []
        place = [pl.col(ORDER).first()] if self.config.panes.fires_by_count else []
        reduced = rows.group_by(PART, maintain_order=True).agg(
            *(pl.col(name).first() for name in (*self.config.by, HASH)),
            *aggregation.partial_expressions,
            pl.len().cast(pl.Int64).alias(ROWS),
            *place,
            *raw,
        )
        reduced = reduced.cast(dict(aggregation.schema)).with_columns(
            *whole_spans(rows),
            pl.lit(value=False).alias(DEFERRED),
            pl.lit(None, pl.Int64).alias(TIMER),
            pl.lit(None, pl.Int64).alias(EXPIRED_END),
            *self.config.panes.initial_columns(ROWS),
        )
        return reduced.select(columns)

    def merge_overlapping(self, opened: pl.DataFrame, more: pl.DataFrame) -> pl.DataFrame:
        """Merge open sessions that overlap."""
        if not more.height:
            return opened
        spans = self.config.session.assign_parts(pl.concat([opened, more]), self.config.by)
        several = shares_part(spans)
        alone = spans.filter(~several).select(opened.columns)
        meeting = spans.filter(several)
        if not meeting.height:
            return alone
        whole = whole_spans(meeting)
        # A session that had expired before a part may have become part of the whole itself.
        below = (
            pl.when(pl.col(EXPIRED_END) < earliest_from(meeting))
            .then(EXPIRED_END)
            .alias(EXPIRED_END)
        )
        meeting = meeting.with_columns(below)
        firsts = [
            *self.keys,
            DEFERRED,
            *(name for name in (ORIGINAL, ORDER) if name in opened.columns),
        ]
        aggregation = self.config.aggregation
        one = meeting.group_by(PART, maintain_order=True).agg(
            *(pl.col(name).first() for name in firsts),
            *aggregation.merge_expressions,
            pl.col(ROWS).sum(),
            pl.col(TIMER).min(),
            pl.col(EXPIRED_END).max(),
            *self.config.panes.merge_columns(),
        )
        one = one.cast(dict(aggregation.schema)).with_columns(*whole)
        if self.config.panes.emission.once:
            one, left_out = self.config.panes.without_late_comers(one)
            self.counts.update(held=-left_out, filtered=left_out, windows_closed=left_out)
        return pl.concat([alone, one.select(opened.columns)])

    def drop_late(self, events: pl.DataFrame) -> None:
        """Count late events, and keep them for the side output if there is one."""
        if events.height:
            count = event_count(events)
            self.counts.update(held=-count, late=count)
            if self.config.side_output:
                self.late.append(events.select(ORIGINAL, START, END, WATERMARK_SEEN))

    def side_output(self) -> pl.DataFrame | None:
        """Return the late events: why, by how much, and for which session of their own."""
        if not self.late:
            return None
        events = pl.concat(self.late)
        start_us, seen_us = events[START].to_numpy(), events[WATERMARK_SEEN].to_numpy()
        rows = events.select(pl.col(ORIGINAL).struct.unnest(), pl.col(START).alias(TIME))
        window_us = start_us, events[END].to_numpy()
        rows = late.side_output(rows, seen_us - start_us, late.SESSION, window_us)
        return rows.drop(ORDER) if rows[ORDER].null_count() else rows

    def note_expired(self, opened: pl.DataFrame, now: pl.Expr) -> pl.DataFrame:
        """Note in sessions the ends of those of their key that have expired, now or earlier."""
        opened = self.closed.with_expired_ends(opened)
        expired = opened.filter(late.is_late(now, self.deadline, late.SESSION))
        if not expired.height:
            return opened
        beside = opened.filter(pl.col(HASH).is_in(expired[HASH].implode()))
        if beside.height == expired[HASH].n_unique():  # each is the only one of its key
            return opened
        return self._with_expired_beside(opened, expired)

    def _with_expired_beside(self, spans: pl.DataFrame, expired: pl.DataFrame) -> pl.DataFrame:
        numbered = spans.with_row_index(_AT)
        ends = expired.select(*self.keys, pl.col(TILL).alias(_BESIDE))
        pairs = numbered.select(_AT, *self.keys, FROM).join(ends, on=self.keys, nulls_equal=True)
        below = (
            pairs.filter(pl.col(_BESIDE) < pl.col(FROM)).group_by(_AT).agg(pl.col(_BESIDE).max())
        )
        noted = numbered.join(below, on=_AT, how="left", maintain_order="left")
        noted = noted.with_columns(pl.max_horizontal(EXPIRED_END, _BESIDE).alias(EXPIRED_END))
        return noted.select(spans.columns)

    def expired_ends(self, spans: pl.DataFrame) -> pl.DataFrame:
        """Return the ends of expired sessions of the keys of some spans, if decisions depend on them."""
        known = spans.select(*self.keys, EXPIRED_END)
        return known if self.config.session.strict else known.clear()

    def overlaps_expired(
        self, events: pl.DataFrame, opened: pl.DataFrame, below: pl.DataFrame
    ) -> pl.Series:
        """Return which events would make a session overlap one that had expired for their split.

        ``below`` has the ends that :meth:`expired_ends` returned before the time of these events.
        """
        known = pl.concat([below, self.expired_ends(self.closed.with_expired_ends(events))])
        keyed = known.group_by(self.keys).agg(pl.col(EXPIRED_END).max().alias(_BESIDE))
        numbered = events.select(*self.keys, START, WATERMARK_SEEN).with_row_index(_AT)
        closed = numbered.join(keyed, on=self.keys, how="left", nulls_equal=True)
        pairs = numbered.join(opened.select(*self.keys, TILL), on=self.keys, nulls_equal=True)
        expired = late.is_late(pl.col(WATERMARK_SEEN), self.deadline, late.SESSION)
        met = [
            closed.filter(pl.col(_BESIDE) >= pl.col(START))[_AT],
            pairs.filter(expired & (pl.col(TILL) >= pl.col(START)))[_AT],
        ]
        return numbered.select(pl.col(_AT).is_in(pl.concat(met).implode())).to_series()
