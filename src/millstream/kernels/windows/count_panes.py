"""Count windows in panes: early ones while a window is not full, and one on time when it is.

A count window has no end in time, so no event is late for it and it has no late panes. With the event
that fills it, a window has its on-time pane, which closes it; an early pane that would have fired with the same event is
that one. A window that is timed out has its on-time pane then, with what no pane has yet, if anything. Otherwise panes fire and say what :mod:`millstream.kernels.trigger` defines: their values are
computed as those of other windows, by :class:`PaneValues`, with the window's number for its label.

The time of a row is that at which all of its window was known so far; so it moves with each pane. A row that
is taken back has the time that it had, which the watermark may have passed: such rows are for views,
topics and tables, and not for other windows. Of rows that stay, those that come by running time have at least the
watermark of then, and so are in time for windows behind.

With ``once`` the first pane of a window closes it, and the events that come before the window would be full
or timed out are left out of it. Which they are follows from their places in the window where panes fire by count.

Of each key the state has the rows of :class:`CountWindowOperator`, but of an open window up to two: what its panes
have emitted, and what no pane has yet. Of a window that has fired once it is kept, until it would be full or timed out,
that it has, and how many events came for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl

from millstream.kernels.frames import HASH, ROWS, TIME, WATERMARK_SEEN, WINDOW
from millstream.kernels.operator import BatchContext, OperatorResult
from millstream.kernels.state.hash_order import sorted_distinct
from millstream.kernels.state.keyed_rows import KeyedRows
from millstream.kernels.state.ledger import StateLedger
from millstream.kernels.state.operator_state import OperatorState
from millstream.kernels.state.timers import Timers
from millstream.kernels.trigger import AfterCount, AfterTime, EachBatch
from millstream.kernels.windows.count_windows import (
    EVENTS,
    FIRST_TIME,
    HEAD,
    KNOWN_TIME,
    LAST_TIME,
    NUMBER,
    PLACE,
    SEEN,
    TIMEOUT,
    CountWindowOperator,
)
from millstream.kernels.windows.pane_values import EMITTED, KIND, LAST, RANK, PaneValues

_FIRED = "__fired"  # Boolean: what the panes of a window have emitted, or what none has yet
_STEP = "__step"  # Int64: the number of a pane by count in its window
_DUE = "__due"  # Int64, nullable: running time at which a pane fires
_EVENT = "__event"  # UInt32: the number of an event in the batch
_OVER = "__over"  # Boolean: whether the window takes no more events: it is full, or timed out
_LAST_STEP = "__last_step"  # Int64: the number of its last pane by count
_TOTAL = "__total"  # Int64: the events of the panes so far
_SPAN = (FIRST_TIME, LAST_TIME, KNOWN_TIME)
_SLOT_CLOCK_MS = 60_000


@dataclass(frozen=True)
class CountPaneOperator(CountWindowOperator):
    """One operator of count windows that emit in panes."""

    @property
    def values(self) -> PaneValues:
        return PaneValues(self.aggregation, self.emission)

    @property
    def state_schema(self) -> dict[str, pl.DataType]:
        names = [WINDOW, *self.span, SEEN, _STEP, _DUE, EMITTED]
        numbers = dict.fromkeys(names, pl.Int64())
        own = {HASH: pl.UInt64(), HEAD: pl.Boolean(), _FIRED: pl.Boolean(), KIND: pl.String()}
        return {**own, **numbers, **dict(self.aggregation.schema)}

    @property
    def span(self) -> tuple[str, ...]:
        """The times that are kept of a window."""
        return _SPAN if self.window.timeout_us is None else (*_SPAN, TIMEOUT)

    @property
    def timeout_column(self) -> str:
        return TIMEOUT

    def process(
        self,
        state: OperatorState,
        inputs: Mapping[int, Sequence[pl.DataFrame]],
        context: BatchContext,
    ) -> OperatorResult:
        """Take the batch's events into windows; return the panes that fire."""
        clock_ms = max(context.clock_ms, state.values.get("clock_ms", 0))
        state.values["clock_ms"] = clock_ms
        rows = self.in_order(inputs.get(0, ()), context)
        timed = isinstance(self.emission.early, AfterTime)
        running = Timers(state, "running_time_timers", _SLOT_CLOCK_MS) if timed else None
        timeouts = self.timers(state)
        touched = [] if running is None else [running.due(clock_ms)]
        touched += [] if timeouts is None else [timeouts.due(context.watermark_us)]
        touched += [] if rows is None else [rows[HASH].to_numpy()]
        hashes = sorted_distinct(np.concatenate(touched)) if touched else np.empty(0, np.uint64)
        held = KeyedRows(state, "windows", ROWS)
        known = held.get(hashes) if len(hashes) else None
        if known is None:
            if rows is None:
                self.note_timeouts(state, None, None, context)
                return OperatorResult()
            keys = {name: rows.schema[name] for name in self.by}
            known = pl.DataFrame(schema={**keys, **self.state_schema})
        ledger = StateLedger(self.name, (held.runs,))
        batch = _CountPaneBatch(self, known, clock_ms, context)
        out = batch.run(rows)
        held.put(hashes, self.aggregation.for_state(batch.rest), known)
        opened = batch.rest.filter(~pl.col(HEAD))
        for timers, column in ((running, _DUE), (timeouts, TIMEOUT)):
            if timers is not None:
                setting = opened.filter(pl.col(column).is_not_null()).unique([HASH, column])
                timers.add(setting[column].to_numpy(), setting[HASH].to_numpy())
        self.note_timeouts(state, known, batch.rest, context)
        over = batch.windows.filter(_OVER)
        ledger.events_in = self.events_in(known, batch.rest, rows, over)
        ledger.events_out = int(over[EVENTS].sum())
        ledger.check()
        counts = Counter(held=0 if rows is None else rows.height)
        counts.update(batch.left_out)
        return OperatorResult(out, None, counts)

    def open_windows(self, windows: pl.DataFrame) -> pl.DataFrame:
        """Merge what panes have given of each window with what none has; of parts, only the latter is known."""
        key = [HASH, *self.by, WINDOW]
        if self.emission.once:
            fired = windows.filter(_FIRED).select(key)
            windows = windows.join(fired, on=key, how="anti", nulls_equal=True)
        elif not self.values.accumulates:
            windows = windows.filter(~pl.col(_FIRED))
        merged = (
            windows.sort(pl.col(_FIRED).not_(), _STEP)
            .group_by(key, maintain_order=True)
            .agg(
                *self.aggregation.merge_expressions,
                pl.col(FIRST_TIME).first(),
                pl.col(LAST_TIME, KNOWN_TIME).max(),
            )
        )
        merged = merged.cast(dict(self.aggregation.schema), strict=False)
        return merged.with_columns(pl.col(WINDOW).alias(NUMBER)).sort(NUMBER, HASH)


class _CountPaneBatch:
    """The count windows that a batch touches.

    ``windows`` are those of the keys that it touches: how many events came for each, and whether it is over.
    ``rest`` is what is kept of these keys afterwards; ``left_out`` counts what came for windows that had fired
    once.
    """

    def __init__(
        self, step: CountPaneOperator, known: pl.DataFrame, clock_ms: int, context: BatchContext
    ) -> None:
        self.step, self.clock_ms, self.context = step, clock_ms, context
        self.columns = known.columns
        self.key = [HASH, *step.by, WINDOW]
        self.heads = known.filter(HEAD)
        self.fired = known.filter(~pl.col(HEAD) & pl.col(_FIRED))
        self.pending = known.filter(~pl.col(HEAD) & ~pl.col(_FIRED))
        self.windows = self._events(known.filter(~pl.col(HEAD)), pl.col(ROWS).sum())
        self.left_out: Counter[str] = Counter()
        self.rest = known

    def run(self, rows: pl.DataFrame | None) -> pl.DataFrame | None:
        """Take events into windows; return the rows to emit."""
        timed = self._timed()
        if rows is not None:
            self._take(rows, timed)
        self._end()
        firing = pl.concat([timed, *self._complete()])
        out = self._emitted(self._spanned(firing)) if firing.height else None
        if self.once:
            self._keep_closed(firing.filter(pl.col(KIND) == "early"))
        self.rest = pl.concat([self.heads, self.fired, self.pending])
        return out

    # ── windows ─────────────────────────────────────────────────────────────────────────────

    @property
    def _may_time_out(self) -> bool:
        return self.step.window.timeout_us is not None

    def _events(self, rows: pl.DataFrame, events: pl.Expr) -> pl.DataFrame:
        """Return of each window how many events it has among some rows, and when it is timed out."""
        timeout = [pl.col(TIMEOUT).first()] if self._may_time_out else []
        return rows.group_by(self.key, maintain_order=True).agg(
            events.cast(pl.Int64).alias(EVENTS), *timeout
        )

    def _spread(self, rows: pl.DataFrame) -> pl.DataFrame:
        """Return every event once for each window that has it, with its place in that."""
        step, rows = self.step, rows.with_row_index(_EVENT)
        if self._may_time_out:
            opened = self.windows.rename({WINDOW: NUMBER})
            return step.until_timeouts(rows, opened, self.heads).rename({NUMBER: WINDOW})
        placed, totals = step.placed(self.heads, rows)
        self.heads = step.heads(self.heads, totals)
        spread = step.in_windows(placed).rename({NUMBER: WINDOW})
        return spread.with_columns(pl.col(PLACE) - pl.col(WINDOW) * step.window.slide)

    def _end(self) -> None:
        """Find which windows are over: those that are full, or timed out; the next one may have begun."""
        by, full = [HASH, *self.step.by], pl.col(EVENTS) == self.step.window.count
        if not self._may_time_out:
            self.windows = self.windows.with_columns(full.alias(_OVER))
            return
        passed = pl.col(WINDOW) < pl.col(WINDOW).max().over(by)
        passed |= pl.col(TIMEOUT) <= self.context.watermark_us
        self.windows = self.windows.with_columns((full | passed).alias(_OVER))
        over = self.windows.filter(_OVER)
        totals = over.group_by(by).agg((pl.col(WINDOW).max() + 1).alias(SEEN))
        self.heads = self.step.heads(self.heads, totals)

    # ── which panes fire ────────────────────────────────────────────────────────────────────

    def _timed(self) -> pl.DataFrame:
        """Fire the panes that are due by running time, with the events of earlier batches."""
        due = (pl.col(_DUE) <= self.clock_ms).fill_null(value=False)
        firing = self.pending.filter(due)
        self.pending = self.pending.filter(~due)
        if not self.step.values.accumulates:
            watermark_us = pl.lit(self.context.watermark_before_us, pl.Int64)
            known = pl.max_horizontal(KNOWN_TIME, watermark_us)
            firing = firing.with_columns(known.alias(KNOWN_TIME))
        return _firing(firing, pl.lit(0, pl.Int64), "early", last=self.once)

    @property
    def once(self) -> bool:
        """Whether the first pane of a window closes it."""
        return self.step.emission.once

    def _take(self, rows: pl.DataFrame, timed: pl.DataFrame) -> None:
        """Add events to what no pane has yet; ``timed`` are the firings by running time before them."""
        spread = self._spread(rows)
        came = pl.concat([self.windows, self._events(spread, pl.len())])
        self.windows = self._events(came, pl.col(EVENTS).sum())
        if self.once:
            spread = self._admitted(spread, timed, rows.height)
        trigger = self.step.emission.early
        number = pl.col(PLACE) // trigger.count if isinstance(trigger, AfterCount) else pl.lit(0)
        aggregation = self.step.aggregation
        cut = (
            spread.with_columns(number.cast(pl.Int64).alias(_STEP))
            .group_by(*self.key, _STEP, maintain_order=True)
            .agg(
                *aggregation.partial_expressions,
                pl.len().cast(pl.Int64).alias(ROWS),
                pl.col(TIME).first().alias(FIRST_TIME),
                pl.col(TIME).max().alias(LAST_TIME),
                pl.max_horizontal(TIME, WATERMARK_SEEN).max().alias(KNOWN_TIME),
                *self._timeout,
            )
            .cast(dict(aggregation.schema))
        )
        no = pl.lit(value=False)
        both = pl.concat(
            [self.pending, cut.with_columns(no.alias(HEAD), no.alias(_FIRED))], how="diagonal"
        )
        merged = both.group_by(*self.key, _STEP, maintain_order=True).agg(
            *aggregation.merge_expressions,
            pl.col(ROWS).sum(),
            pl.col(HEAD, _FIRED, FIRST_TIME).first(),
            pl.col(LAST_TIME, KNOWN_TIME).max(),
            pl.col(_DUE).min(),
            *self._timeout,
        )
        merged = merged.cast(dict(aggregation.schema))
        self.pending = pl.concat([self.pending.clear(), merged], how="diagonal")

    @property
    def _timeout(self) -> list[pl.Expr]:
        return [pl.col(TIMEOUT).first()] if self._may_time_out else []

    def _admitted(self, spread: pl.DataFrame, timed: pl.DataFrame, events: int) -> pl.DataFrame:
        """Leave out, and count, the events of windows that have fired, or do so before them."""
        closed = pl.concat([self.fired.select(self.key), timed.select(self.key)])
        admitted = spread.join(
            closed, on=self.key, how="anti", nulls_equal=True, maintain_order="left"
        )
        trigger = self.step.emission.early
        if isinstance(trigger, AfterCount):
            admitted = admitted.filter(pl.col(PLACE) < trigger.count)
        gone = events - admitted[_EVENT].n_unique()
        missed = spread.height - admitted.height
        self.left_out.update(held=-gone, filtered=gone, windows_closed=missed)
        return admitted

    def _complete(self) -> list[pl.DataFrame]:
        """Fire the panes of windows that are over, and those that are early; the others wait."""
        trigger = self.step.emission.early
        counted = trigger.count if isinstance(trigger, AfterCount) else None
        last_step = pl.lit(0, pl.Int64) if counted is None else (pl.col(EVENTS) - 1) // counted
        windows = self.windows.with_columns(last_step.alias(_LAST_STEP))
        known = windows.select(*self.key, EVENTS, _OVER, _LAST_STEP)
        pending = self.pending.join(
            known, on=self.key, how="left", nulls_equal=True, maintain_order="left"
        )
        # The pane by count that the last event completes is on time, if it makes the window full.
        ends = pl.col(_OVER) & (pl.col(_STEP) == pl.col(_LAST_STEP))
        if counted is not None:
            ends &= (pl.col(EVENTS) == self.step.window.count) | (pl.col(ROWS) < counted)
        on_time = pending.filter(ends).select(self.columns)
        others = pending.filter(~ends).select(self.columns)
        if counted is not None:
            early = others.filter(pl.col(ROWS) == counted)
            others = others.filter(pl.col(ROWS) != counted)
        else:
            early = others if isinstance(trigger, EachBatch) else others.clear()
            others = others.clear() if isinstance(trigger, EachBatch) else others
        if isinstance(trigger, AfterTime):
            due = pl.col(_DUE).fill_null(self.clock_ms + trigger.delay_ms)
            others = others.with_columns(due)
        self.pending = others
        rank = pl.lit(1, pl.Int64) if counted is None else pl.col(_STEP) + 1
        firings = [
            _firing(early, rank, "early", last=self.once),
            _firing(self._timed_out(on_time), rank, "on_time", last=True),
        ]
        quiet = self._quiet(windows.filter(_OVER), on_time)
        if quiet.height:
            firings.append(_firing(quiet, pl.col(_STEP) + 2, "on_time", last=True))
        return firings

    def _timed_out(self, on_time: pl.DataFrame) -> pl.DataFrame:
        """Note of windows that are not full that they were known to be over by their timeout."""
        if not self._may_time_out:
            return on_time
        events = on_time.join(
            self.windows, on=self.key, how="left", nulls_equal=True, maintain_order="left"
        )[EVENTS]
        full = pl.lit(events) == self.step.window.count
        known = pl.max_horizontal(KNOWN_TIME, TIMEOUT)
        return on_time.with_columns(pl.when(full).then(KNOWN_TIME).otherwise(known))

    def _quiet(self, over: pl.DataFrame, on_time: pl.DataFrame) -> pl.DataFrame:
        """Return, without partials, the windows that are over with nothing that no pane has."""
        nothing = self.pending.clear()
        if not self._may_time_out or self.once:
            return nothing
        quiet = over.join(on_time, on=self.key, how="anti", nulls_equal=True).select(
            *self.key,
            pl.lit(value=False).alias(HEAD),
            pl.lit(value=False).alias(_FIRED),
            pl.lit(0, pl.Int64).alias(ROWS),
            pl.col(_LAST_STEP).alias(_STEP),
            TIMEOUT,
            pl.col(TIMEOUT).alias(KNOWN_TIME),
        )
        return pl.concat([nothing, quiet], how="diagonal")

    def _spanned(self, firing: pl.DataFrame) -> pl.DataFrame:
        """Give each firing the times and the number of events of its window so far."""
        before = pl.lit(-1, pl.Int64).alias(RANK)
        every = pl.concat([self.fired.with_columns(before), firing], how="diagonal")
        every = every.sort(*self.key, RANK)
        return every.with_columns(
            pl.col(FIRST_TIME).first().over(self.key),
            pl.col(LAST_TIME, KNOWN_TIME).cum_max().forward_fill().over(self.key),
            pl.col(ROWS).cum_sum().over(self.key).alias(_TOTAL),
        ).filter(pl.col(RANK) >= 0)

    # ── what they say ───────────────────────────────────────────────────────────────────────

    def _emitted(self, firing: pl.DataFrame) -> pl.DataFrame:
        """Return the rows of the panes that fire, and keep what they have emitted."""
        values, step = self.step.values, self.step
        own = [*values.key, HASH, *step.aggregation.partials]
        made = firing.select(*own, RANK, KIND, LAST, *step.span, _TOTAL)
        follows = values.keeps_previous and not self.once
        known = self.fired.select(*values.stored_columns, *step.span) if follows else None
        panes, _ = values.panes([made], known)
        if values.accumulates:
            numbered = panes.with_columns(pl.col(WINDOW).alias(NUMBER))
            results = step.result_rows(numbered)
            panes = values.mark_emitted(panes, results, also=("window_end", TIME))
        else:
            panes = values.mark_emitted_parts(panes)
            results = step.result_rows(panes.with_columns(pl.col(WINDOW).alias(NUMBER)))
        self._keep(panes, made)
        return values.rows(panes, results.hstack(values.pane_columns(panes)))

    def _keep(self, panes: pl.DataFrame, made: pl.DataFrame) -> None:
        """Keep what the panes of windows that are not full have emitted, instead of that before."""
        values = self.step.values
        others = self.fired.join(made, on=self.key, how="anti", nulls_equal=True)
        latest = (
            values.last_of_each_key(panes)
            .filter(~pl.col(LAST))
            .with_columns(
                pl.lit(value=False).alias(HEAD),
                pl.lit(value=True).alias(_FIRED),
                pl.col(_TOTAL).alias(ROWS),
            )
        )
        kept = [name for name in self.columns if name in latest.columns]
        if not values.accumulates:  # parts are not needed again
            kept = [
                name for name in kept if name == ROWS or name not in values.aggregation.partials
            ]
        self.fired = pl.concat([others, latest.select(kept)], how="diagonal").select(self.columns)

    def _keep_closed(self, firing: pl.DataFrame) -> None:
        """Keep which windows have fired once, until they are over, and how many events came for each."""
        closed = pl.concat([self.fired.select(self.key), firing.select(self.key)])
        waiting = self.windows.filter(~pl.col(_OVER)).join(
            closed, on=self.key, how="semi", nulls_equal=True, maintain_order="left"
        )
        no, timeout = pl.lit(value=False), [TIMEOUT] if self._may_time_out else []
        marks = waiting.select(
            *self.key, no.alias(HEAD), (~no).alias(_FIRED), pl.col(EVENTS).alias(ROWS), *timeout
        )
        self.fired = pl.concat([self.fired.clear(), marks], how="diagonal")


def _firing(rows: pl.DataFrame, rank: pl.Expr, kind: str, *, last: bool) -> pl.DataFrame:
    return rows.with_columns(rank.alias(RANK), pl.lit(kind).alias(KIND), pl.lit(last).alias(LAST))
