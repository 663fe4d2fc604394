"""Sessions over rows that are taken back: where the event that joined two sessions goes, they are two again.

The state keeps the events of the open sessions, each with its reach (:mod:`millstream.kernels.sessions.spans`). A
retraction (``__diff`` -1) removes one equal event: of the same key, time and values, and of several such that came
at different times the last one. The sessions of a key are the connected parts of the reaches that are left, as if what
was taken back had never come. With W the watermark, L the allowed lateness and r the watermark that a row saw:

===============  ============================================================================================
a row is late    when the session that its event makes on its own has expired: ``r > till + L``. That holds
                 for an event and for its retraction alike, so that one of them is late whenever the other
                 that came before it was. Therefore an open session that covers a late event does not admit it,
                 as it would if nothing were taken back.
a session        has expired when ``W > till + L``; its events leave the state. Nothing that is in time can
                 take one of them back.
``final``        its row comes then
otherwise        the rows of the sessions that are there (without early panes: that are complete, ``W > till``)
                 are compared with those before the batch. What differs is retracted and emitted; ``update``
                 retracts only what no new row replaces.
===============  ============================================================================================

What is left of a session may end earlier than the session did, by up to a gap. So the watermark of the output stays a
gap behind that of other sessions, and rows are never late for the next operator.

It costs, with each batch, the events of all open sessions of the keys that the batch touches: they are read, sorted,
and aggregated before and after it. ``final`` aggregates each session once. Sessions over rows that stay keep one row
each instead: :mod:`millstream.kernels.sessions.operator`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl

from millstream.errors import CorruptionError
from millstream.kernels import late
from millstream.kernels.arrays import Int64s
from millstream.kernels.changes import (
    concat_present,
    consolidate,
    group_numbers,
    total_weight,
    with_diff,
    with_weight,
)
from millstream.kernels.columns import filter_rows
from millstream.kernels.frames import DIFF, HASH, REPLACED, SPLIT, TIME, WATERMARK_SEEN, WEIGHT
from millstream.kernels.operator import BatchContext, OperatorResult, Prepared
from millstream.kernels.sessions.config import SessionConfig
from millstream.kernels.sessions.spans import END, EXPIRED_END, FROM, PART, START, TILL
from millstream.kernels.state.arrangement import Arrangement
from millstream.kernels.state.hash_order import sorted_distinct
from millstream.kernels.state.keyhash import Hashes, hash_columns
from millstream.kernels.state.ledger import StateLedger
from millstream.kernels.state.operator_state import OperatorState
from millstream.kernels.state.timers import Timers, WaitingLedger
from millstream.kernels.time.watermarks import NO_WATERMARK, delayed_watermark

_AT = "__at"
_SAME = "__same"  # UInt32: the number of what is equal but for its reach
_LACKING = "__lacking"  # Int64: how many of it are still to be taken back
_DUE = "__due"  # Int64: when a session or the end of one must be looked at
_CLOSED = "__closed"  # Int64: the till of a session that has expired


@dataclass(frozen=True)
class SignedSessionOperator(SessionConfig):
    """One operator of session windows over rows that may be taken back."""

    @property
    def emits_once(self) -> bool:
        """Whether a session has one row, when it has expired."""
        return self.panes.only_final

    @property
    def fires_early(self) -> bool:
        """Whether the row of a session comes before it is complete."""
        return self.panes.emission.mode != "final" and self.panes.emission.early is not None

    def output_watermark(self, watermark_us: int) -> int:
        """Return the watermark of its output, for which what is left of a session is not late."""
        behind = super().output_watermark(watermark_us)
        return delayed_watermark(behind, self.session.gap_us)

    # ── before the shuffle ──────────────────────────────────────────────────────────────────

    def prepare(self, rows: pl.DataFrame, number: int = 0) -> Prepared:  # noqa: ARG002
        """Add the end of the session that each event makes; drop columns that are not needed."""
        if DIFF not in rows.columns:
            rows = rows.with_columns(pl.lit(1, pl.Int8).alias(DIFF))
        rows = self.session.with_end(rows)
        if self.side_output:
            return Prepared(rows)
        wanted = [*self._identity, DIFF, SPLIT, WATERMARK_SEEN]
        return Prepared(rows.select(name for name in wanted if name in rows.columns))

    def pack(self, tables: Sequence[pl.DataFrame], number: int = 0) -> pl.DataFrame:  # noqa: ARG002
        """Concatenate tables."""
        return pl.concat(tables)

    @property
    def _identity(self) -> list[str]:
        """The columns in which an event and its retraction are equal."""
        names = dict.fromkeys([*self.by, *sorted(self.aggregation.columns_read)])
        return [*names, TIME, END, TILL]

    @property
    def event_columns(self) -> list[str]:
        """The columns of an event in state."""
        return [*self._identity, FROM, HASH, WEIGHT]

    # ── after the shuffle ───────────────────────────────────────────────────────────────────

    def process(
        self,
        state: OperatorState,
        inputs: Mapping[int, Sequence[pl.DataFrame]],
        context: BatchContext,
    ) -> OperatorResult:
        """Take the batch's events and retractions in; give the rows to emit.

        Raises:
            CorruptionError: an event was taken back that never came.
        """
        result = OperatorResult(counts=Counter())
        changes = self._in_time(inputs.get(0, ()), context, result)
        batch = _SignedBatch(self, state, context)
        batch.run(changes)
        result.rows = batch.out
        return result

    def _in_time(
        self, tables: Sequence[pl.DataFrame], context: BatchContext, result: OperatorResult
    ) -> pl.DataFrame | None:
        """Return the changes that are in time, with their reach; equal ones of opposite sign cancel."""
        kept, too_late = [], []
        for rows in tables:
            seen_us = context.watermarks_seen(rows)
            deadline_us = rows[TILL].to_numpy() + self.lateness_us
            marked = rows.with_columns(pl.Series(WATERMARK_SEEN, seen_us))
            found = late.split_late(marked, seen_us, deadline_us, late.SESSION)
            result.counts.update(held=found.in_time.height, late=found.late.height)
            first = pl.max_horizontal(TIME, pl.col(WATERMARK_SEEN) - self.lateness_us)
            kept.append(found.in_time.select(*self._identity, DIFF, first.alias(FROM)))
            if self.side_output and found.late.height:
                too_late.append(self._side_output(found.late))
        result.late = concat_present(too_late)
        changes = concat_present(kept)
        if changes is None:
            return None
        hashes = pl.Series(HASH, hash_columns(changes, self.by, context.seed))
        changes = consolidate(with_weight(changes.hstack([hashes])))
        return changes if changes.height else None

    def _side_output(self, rows: pl.DataFrame) -> pl.DataFrame:
        start_us, seen_us = rows[TIME].to_numpy(), rows[WATERMARK_SEEN].to_numpy()
        window_us = start_us, rows[END].to_numpy()
        rows = rows.drop(END, TILL, WATERMARK_SEEN, SPLIT, strict=False)
        return late.side_output(rows, seen_us - start_us, late.SESSION, window_us)


@dataclass
class _SignedBatch:
    """The sessions of the keys that a batch touches, before it and after it."""

    step: SignedSessionOperator
    state: OperatorState
    context: BatchContext
    out: pl.DataFrame | None = None

    def __post_init__(self) -> None:
        self.events = Arrangement(self.state, "events")
        self.closed = Arrangement(self.state, "closed")
        self.timers = Timers(self.state, "timers", self.step.slot_us)
        self.keys = [HASH, *self.step.by]

    def run(self, changes: pl.DataFrame | None) -> None:
        """Take the changes in, and all that is due."""
        ledgers = [StateLedger(self.step.name, (kept.runs,)) for kept in (self.events, self.closed)]
        ledgers[0].events_in = total_weight(changes)
        hashes = [self.timers.due(self.context.watermark_us)]
        hashes += [] if changes is None else [changes[HASH].to_numpy()]
        self._take(sorted_distinct(np.concatenate(hashes)), changes, ledgers)
        for ledger in ledgers:
            ledger.check()

    def _take(
        self, hashes: Hashes, changes: pl.DataFrame | None, ledgers: Sequence[StateLedger]
    ) -> None:
        held, ends = self.events.look_up(hashes), self.closed.look_up(hashes)
        net = None if changes is None else self._without_taken_back(held, changes)
        before = self._parts(held)
        after = self._parts(_sum(held, net))
        passed_us = self.context.watermark_us - self.step.lateness_us
        expired = None if after is None else after.filter(pl.col(TILL).max().over(PART) < passed_us)
        sessions, closing = self._spans(after), self._spans(expired)
        new_ends = self._ends(closing)
        known_ends = _sum(ends, new_ends)
        self._emit((before, ends), (after, known_ends), expired)
        gone_ends = self._needless(known_ends, sessions, passed_us)
        leaving = None if expired is None else expired.select(self.step.event_columns)
        self._store(self.events, [net, _negated(leaving)])
        self._store(self.closed, [new_ends, _negated(gone_ends)])
        ledgers[0].events_out = total_weight(expired)
        ledgers[1].events_in, ledgers[1].events_out = (
            total_weight(new_ends),
            total_weight(gone_ends),
        )
        due_before = self._due(self._spans(before), ends, self.context.watermark_before_us)
        left_ends = _sum(known_ends, _negated(gone_ends))
        due_after = self._due(sessions, left_ends, self.context.watermark_us)
        self._set_timers(due_before, due_after)

    def _store(self, kept: Arrangement, parts: Sequence[pl.DataFrame | None]) -> None:
        changes = concat_present(parts)
        if changes is not None:
            kept.add(consolidate(changes))

    # ── what is taken back ──────────────────────────────────────────────────────────────────

    def _without_taken_back(self, held: pl.DataFrame | None, changes: pl.DataFrame) -> pl.DataFrame:
        """Return changes whose retractions have the reach of the event that each takes back.

        Raises:
            CorruptionError: there is no such event.
        """
        back = changes.filter(pl.col(WEIGHT) < 0)
        if not back.height:
            return changes
        came = changes.filter(pl.col(WEIGHT) > 0)
        here = _sum(held, came)
        touched = back.clear() if here is None else here.select(back.columns)
        is_touched = np.isin(touched[HASH].to_numpy(), back[HASH].to_numpy())
        both = pl.concat([filter_rows(touched, is_touched), back])
        both = self._numbered(both).sort(_SAME, FROM, descending=[False, True])
        present = pl.col(WEIGHT).clip(0, None)
        earlier = present.cum_sum().over(_SAME) - present  # of equal ones that came after it
        wanted = -pl.col(WEIGHT).clip(None, 0).sum().over(_SAME)
        both = both.with_columns((wanted - earlier).alias(_LACKING))
        taken = pl.min_horizontal(_LACKING, WEIGHT).clip(0, None)
        removed = both.with_columns((-taken).alias(WEIGHT)).filter(pl.col(WEIGHT) < 0)
        if total_weight(removed) != total_weight(back):
            raise CorruptionError(
                f"The step {self.step.name!r} was to take back an event that it does not hold: its state, "
                "or that of a step above, is not of this input. Nothing of this batch was committed. "
                "Restore the app's whole folder, or restart from the log (millstream reset)."
            )
        return pl.concat([came, removed.select(came.columns)])

    def _numbered(self, rows: pl.DataFrame) -> pl.DataFrame:
        """Return rows with a number for what is equal but for its reach."""
        own = [name for name in rows.columns if name not in (FROM, WEIGHT)]
        # Numbers for names: polars takes a name such as "^a.*$" for a pattern.
        plain = rows.select([rows[name].alias(str(n)) for n, name in enumerate(own)])
        groups = plain.with_row_index(_AT).group_by(plain.columns, maintain_order=True).agg(_AT)
        numbers = groups.with_row_index(_SAME).select(_SAME, _AT).explode(_AT).sort(_AT)
        return rows.hstack([numbers[_SAME]])

    # ── sessions ────────────────────────────────────────────────────────────────────────────

    def _parts(self, events: pl.DataFrame | None) -> pl.DataFrame | None:
        """Return events with the number of their session, session by session."""
        if events is None or not events.height:
            return None
        return self.step.session.assign_parts(events, self.step.by)

    def _spans(self, parts: pl.DataFrame | None) -> pl.DataFrame | None:
        """Return the sessions of events: their keys and spans."""
        return None if parts is None or not parts.height else self._grouped(parts, [])

    def _grouped(self, parts: pl.DataFrame, made: Sequence[pl.Expr]) -> pl.DataFrame:
        return parts.group_by(PART, maintain_order=True).agg(
            pl.col(self.keys).first(),
            pl.col(TIME).min().alias(START),
            pl.col(FROM).min(),
            pl.col(END, TILL).max(),
            *made,
        )

    def _valued(self, parts: pl.DataFrame, ends: pl.DataFrame | None) -> pl.DataFrame:
        """Return the rows of sessions, with the hashes of their keys."""
        aggregation = self.step.aggregation
        sessions = self._grouped(with_diff(parts), aggregation.partial_expressions)
        types = {n: t for n, t in aggregation.schema if n in sessions.columns}
        sessions = self._with_expired_end(sessions.cast(types), ends)  # type: ignore[arg-type]
        rows = self.step.panes.result_rows(sessions, pl.lit(self.context.watermark_us))
        return rows.hstack([sessions[HASH]])

    def _with_expired_end(self, sessions: pl.DataFrame, ends: pl.DataFrame | None) -> pl.DataFrame:
        """Add the latest end of an expired session of the key that each session does not reach back to."""
        none = pl.lit(NO_WATERMARK, pl.Int64).alias(EXPIRED_END)
        if ends is None or not ends.height:
            return sessions.with_columns(none)
        pairs = sessions.join(
            ends.select(*self.keys, _CLOSED), on=self.keys, nulls_equal=True
        ).filter(pl.col(_CLOSED) < pl.col(FROM))
        latest = pairs.group_by(PART).agg(pl.col(_CLOSED).max().alias(EXPIRED_END))
        found = sessions.join(latest, on=PART, how="left", maintain_order="left")
        return found.with_columns(pl.col(EXPIRED_END).fill_null(NO_WATERMARK))

    # ── rows ────────────────────────────────────────────────────────────────────────────────

    def _emit(
        self,
        before: tuple[pl.DataFrame | None, pl.DataFrame | None],
        after: tuple[pl.DataFrame | None, pl.DataFrame | None],
        expired: pl.DataFrame | None,
    ) -> None:
        """Find the rows to emit, from events and ends of expired sessions before the batch and after it."""
        order = ["window_start", "window_end", HASH]
        if self.step.emits_once:
            if expired is not None and expired.height:
                self.out = (
                    self._valued(expired, after[1]).sort(order, maintain_order=True).drop(HASH)
                )
            return
        shown = [
            (self._shown(*before, self.context.watermark_before_us), -1),
            (self._shown(*after, self.context.watermark_us), 1),
        ]
        signed = concat_present(
            [
                None if rows is None else rows.with_columns(pl.lit(sign, pl.Int64).alias(WEIGHT))
                for rows, sign in shown
            ]
        )
        changed = None if signed is None else self._replacing(consolidate(signed))
        if changed is not None and changed.height:
            by_key = changed.sort(HASH, *self.step.by, WEIGHT, *order, maintain_order=True)
            self.out = with_diff(by_key.drop(HASH))

    def _shown(
        self, parts: pl.DataFrame | None, ends: pl.DataFrame | None, watermark_us: int
    ) -> pl.DataFrame | None:
        """Return the rows of the sessions that are shown at a watermark."""
        if parts is not None and not self.step.fires_early:
            parts = parts.filter(pl.col(TILL).max().over(PART) < watermark_us)
        return None if parts is None or not parts.height else self._valued(parts, ends)

    def _replacing(self, changed: pl.DataFrame) -> pl.DataFrame:
        """Leave out, or mark, the retractions of rows that new ones replace, where rows replace others."""
        panes = self.step.panes
        marks = panes.emission.marks_replaced
        if panes.emission.mode == "retract" and not marks:
            return changed
        back = changed[WEIGHT].to_numpy() < 0
        numbers = group_numbers(changed, [*self.keys, *panes.window_key])
        replaced = pl.Series(REPLACED, back & np.isin(numbers, numbers[~back]))
        return changed.hstack([replaced]) if marks else changed.filter(~replaced)

    # ── expired sessions, and when to look again ────────────────────────────────────────────

    def _ends(self, closing: pl.DataFrame | None) -> pl.DataFrame | None:
        if closing is None:
            return None
        one = pl.lit(1, pl.Int64).alias(WEIGHT)
        return closing.select(*self.keys, pl.col(TILL).alias(_CLOSED), one)

    def _needless(
        self, ends: pl.DataFrame | None, sessions: pl.DataFrame | None, passed_us: int
    ) -> pl.DataFrame | None:
        """Return the ends that no session overlaps, now or later."""
        if ends is None:
            return None
        over = ends.filter(pl.col(_CLOSED) + self.step.session.gap_us < passed_us)
        opened = None if sessions is None else sessions.filter(pl.col(TILL) >= passed_us)
        if opened is None or not opened.height:
            return over
        first = opened.group_by(self.keys).agg(pl.col(START).min())
        met = over.join(first, on=self.keys, how="left", nulls_equal=True, maintain_order="left")
        needed = (pl.col(START) <= pl.col(_CLOSED)).fill_null(value=False)
        return met.filter(~needed).select(over.columns)

    def _due(
        self, sessions: pl.DataFrame | None, ends: pl.DataFrame | None, watermark_us: int
    ) -> pl.DataFrame:
        """Return when the sessions that are open at a watermark, and the ends of others, are due."""
        lateness_us = self.step.lateness_us
        due: list[pl.DataFrame] = [pl.DataFrame(schema={HASH: pl.UInt64(), _DUE: pl.Int64()})]
        if sessions is not None:
            opened = sessions.filter(pl.col(TILL) + lateness_us >= watermark_us)
            complete, over = pl.col(TILL) + 1, pl.col(TILL) + lateness_us + 1
            if not self.step.emits_once and not self.step.fires_early:
                over = pl.when(complete > watermark_us).then(complete).otherwise(over)
            due.append(opened.select(HASH, over.alias(_DUE)))
        if ends is not None:
            # One that is needed for longer goes with the session that it is needed for.
            over = pl.col(_CLOSED) + self.step.session.gap_us + lateness_us + 1
            waiting = ends.unique([*self.keys, _CLOSED]).select(HASH, over.alias(_DUE))
            due.append(waiting.filter(pl.col(_DUE) > watermark_us))
        return pl.concat(due)

    def _set_timers(self, before: pl.DataFrame, after: pl.DataFrame) -> None:
        new = after.join(before, on=[HASH, _DUE], how="anti", maintain_order="left")
        new = new.unique(maintain_order=True)
        times: Int64s = new[_DUE].to_numpy()
        self.timers.add(times, new[HASH].to_numpy())
        waiting = WaitingLedger(self.step.name, self.state, self.step.slot_us)
        waiting.update(before[_DUE].to_numpy(), after[_DUE].to_numpy(), self.context.watermark_us)


def _sum(one: pl.DataFrame | None, other: pl.DataFrame | None) -> pl.DataFrame | None:
    """Add up signed rows; None if there are none."""
    if one is None or other is None:
        return other if one is None else one
    both = consolidate(pl.concat([one, other.select(one.columns)]))
    return both if both.height else None


def _negated(rows: pl.DataFrame | None) -> pl.DataFrame | None:
    return None if rows is None else rows.with_columns(-pl.col(WEIGHT))
