"""Sessions whose panes fire by count: the events of a key one after another, as its splits saw them.

Which pane an event is in depends on what came before it, so the order must not depend on batches, nor
on how far other partitions have been read. Events are taken in the order of the watermarks
of their splits, and of their places in the log among equals: it is the order in which a watermark that
followed each event at once would have met them. An event before which the operator's own watermark has
come as far as its split (``r <= W``) is taken, and judged, as if the watermark were ``r``. All that could
come before it has been read by then. One that is ahead of W

* is taken at once if it reaches back to its own time, and touches no session that its split takes for
  complete and W does not: so nothing that happens until W has come to ``r`` concerns it;
* waits otherwise, and unless it is only the question whether it is too late, so do the events of its
  key that come after it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import polars as pl

from millstream.kernels import late
from millstream.kernels.frames import ORDER, UNPLACED, WATERMARK_SEEN
from millstream.kernels.sessions.open_sessions import OpenSessions
from millstream.kernels.sessions.spans import FROM, PART, SPAN, START, TILL, as_points
from millstream.kernels.time.watermarks import NO_WATERMARK

_ROUND = "__round"
_NOW = "__now"
_AT = "__at"
_TOUCHES = "__touches"
_REACHES = "__reaches"
_BETWEEN = "__between"
_JOINS = "__joins"
_LATE = "__too_late"
_BLOCKS = "__blocks"


@dataclass(frozen=True)
class EventRounds:
    """The events of one sessions, taken in rounds of one for each key."""

    sessions: OpenSessions

    def take_events(
        self, opened: pl.DataFrame, waiting: pl.DataFrame, rows: pl.DataFrame | None
    ) -> tuple[pl.DataFrame, pl.DataFrame]:
        """Return the open sessions after all events that can be taken, and those that wait."""
        columns, keys = opened.columns, self.sessions.keys
        blocked = waiting.select(keys).clear()
        left = [waiting.clear()]
        for events in self._rounds(waiting, rows):
            behind = events.join(blocked, on=keys, how="semi", nulls_equal=True)
            free = events.join(blocked, on=keys, how="anti", nulls_equal=True)
            mine = opened.join(free, on=keys, how="semi", nulls_equal=True)
            others = opened.join(free, on=keys, how="anti", nulls_equal=True)
            mine, staying = self._one_each(mine, free)
            opened = pl.concat([others, mine])
            blocked = pl.concat([blocked, staying.filter(_BLOCKS).select(keys)])
            left += [behind.select(columns), staying.select(columns)]
        return opened, pl.concat(left)

    def _rounds(self, waiting: pl.DataFrame, rows: pl.DataFrame | None) -> Iterator[pl.DataFrame]:
        """Return the events, one for each key at a time."""
        events = waiting.with_columns(pl.lit(NO_WATERMARK, pl.Int64).alias(UNPLACED))
        if rows is not None:
            alone = self.sessions.one_row_per_event(rows, waiting.columns).hstack([rows[UNPLACED]])
            events = pl.concat([events, alone])
        keys = self.sessions.keys
        events = events.sort(WATERMARK_SEEN, UNPLACED, ORDER).drop(UNPLACED)
        rounds = events.with_columns(pl.int_range(pl.len()).over(keys).alias(_ROUND))
        parts = rounds.partition_by(_ROUND, as_dict=True, include_key=False)
        for (_,), part in sorted(parts.items()):
            yield part

    def _one_each(
        self, opened: pl.DataFrame, events: pl.DataFrame
    ) -> tuple[pl.DataFrame, pl.DataFrame]:
        """Take one event for each key; give what is open then, and the events that must wait."""
        sessions, columns = self.sessions, opened.columns
        panes, context, at = sessions.config.panes, sessions.context, pl.col(_NOW)
        now = pl.min_horizontal(WATERMARK_SEEN, pl.lit(context.watermark_us)).alias(_NOW)
        clock = events.select(*sessions.keys, now)
        # What was complete before the event came does not know of it.
        opened = sessions.note_expired(self._with(opened, clock), at)
        opened = panes.fire_due_retractions(opened, at, sessions.out, complete=False)
        opened = panes.fire_on_time(opened, at, sessions.out)
        opened = panes.fire_due_retractions(opened, at, sessions.out, complete=True).select(columns)
        judged = self._decide(opened, events)
        sessions.drop_late(judged.filter(_LATE))
        opened = sessions.merge_overlapping(
            opened, as_points(judged.filter(_JOINS).select(columns))
        )
        opened = sessions.note_expired(self._with(opened, clock), at)
        opened = panes.fire_others(opened, at, context.clock_ms, sessions.out, at_end=False)
        return opened.select(columns), judged.filter(~pl.col(_JOINS) & ~pl.col(_LATE))

    def _with(self, rows: pl.DataFrame, clock: pl.DataFrame) -> pl.DataFrame:
        """Return sessions with the watermark of their key."""
        return rows.join(
            clock, on=self.sessions.keys, how="left", nulls_equal=True, maintain_order="left"
        )

    # ── decisions ────────────────────────────────────────────────────────────────────────────

    def _decide(self, opened: pl.DataFrame, events: pl.DataFrame) -> pl.DataFrame:
        """Return for each event whether it is joined, is too late, or waits and lets others wait."""
        config = self.sessions.config
        touching = events.hstack(self._touched(opened, events))
        known = pl.col(WATERMARK_SEEN) <= self.sessions.context.watermark_us
        own = ~late.is_late(pl.col(WATERMARK_SEEN), self.sessions.deadline, late.SESSION)
        covering_us = pl.col(_REACHES) + config.lateness_us
        expired = late.is_late(pl.col(WATERMARK_SEEN), covering_us, late.SESSION)
        in_time = own | ~expired.fill_null(value=True)
        if config.session.strict:
            overlaps = self.sessions.overlaps_expired(
                events, opened, self.sessions.expired_ends(opened)
            )
            in_time &= ~(pl.lit(overlaps) & (pl.col(FROM) > pl.col(START)))
        on_time = pl.max_horizontal(TILL, _REACHES) >= pl.col(WATERMARK_SEEN)
        at_once = own & (pl.col(FROM) == pl.col(START)) & on_time & ~pl.col(_BETWEEN)
        return touching.with_columns(
            pl.when(known).then(in_time).otherwise(at_once).alias(_JOINS),
            (known & ~in_time).alias(_LATE),
            (own | pl.col(_TOUCHES)).alias(_BLOCKS),
        )

    def _touched(self, opened: pl.DataFrame, events: pl.DataFrame) -> pl.DataFrame:
        """Return for each event whether it touches sessions, how far they reach, and whether one of them
        is complete for the event's split but not for the watermark.
        """
        keys, config = self.sessions.keys, self.sessions.config
        place = pl.int_range(pl.len(), dtype=pl.Int64).alias(_AT)
        points = as_points(events).select(*keys, *SPAN, WATERMARK_SEEN, place)
        nobody = (pl.lit(None, pl.Int64).alias(WATERMARK_SEEN), pl.lit(-1, pl.Int64).alias(_AT))
        sessions = opened.select(*keys, *SPAN, *nobody)
        spans = config.session.assign_parts(pl.concat([sessions, points]), config.by)
        is_session = pl.col(_AT) < 0
        complete = pl.col(TILL) < pl.col(WATERMARK_SEEN).max().over(PART)
        between = is_session & complete & (pl.col(TILL) >= self.sessions.context.watermark_us)
        summed = spans.with_columns(
            is_session.any().over(PART).alias(_TOUCHES),
            pl.when(is_session).then(TILL).max().over(PART).alias(_REACHES),
            between.any().over(PART).alias(_BETWEEN),
        )
        return summed.filter(~is_session).sort(_AT).select(_TOUCHES, _REACHES, _BETWEEN)
