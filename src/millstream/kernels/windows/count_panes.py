"""Count windows in panes: early ones while a window is not full, and one on time when it is.

A count window has no end in time, so no event is late for it and it has no late panes. With the event
that fills it, a window has its on-time pane, which closes it; an early pane that would have fired with the same event is
that one. Otherwise panes fire and say what :mod:`millstream.kernels.trigger` defines: their values are
computed as those of other windows, by :class:`PaneValues`, with the window's number for its label.

The time of a row is that at which all of its window was known so far; so it moves with each pane. A row that
is taken back has the time that it had, which the watermark may have passed: such rows are for views,
topics and tables, and not for other windows. Of rows that stay, those that come by running time have at least the
watermark of then, and so are in time for windows behind.

With ``once`` the first pane of a window closes it, and the events that come before the window would be full
are left out of it. Which they are follows from their places in the window where panes fire by count.

Of each key the state has the rows of :class:`CountWindowOperator`, but of an open window up to two: what its panes
have emitted, and what no pane has yet. Of a window that has fired once it is kept, until it would be full, that it
has, and how many events came for it.
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
    FIRST_TIME,
    HEAD,
    KNOWN_TIME,
    LAST_TIME,
    NUMBER,
    PLACE,
    SEEN,
    CountWindowOperator,
)
from millstream.kernels.windows.pane_values import EMITTED, KIND, LAST, RANK, PaneValues

_FIRED = "__fired"  # Boolean: what the panes of a window have emitted, or what none has yet
_STEP = "__step"  # Int64: the number of a pane by count in its window
_DUE = "__due"  # Int64, nullable: running time at which a pane fires
_FULL = "__full"  # Boolean: whether the window is full
_TOTAL = "__total"  # Int64: the events of the panes so far
_SPAN = (FIRST_TIME, LAST_TIME, KNOWN_TIME)
_SLOT_CLOCK_MS = 60_000


@dataclass(frozen=True)
class CountPaneOperator(CountWindowOperator):
    """One operator of count windows that emit in panes; they are not timed out."""

    @property
    def values(self) -> PaneValues:
        return PaneValues(self.aggregation, self.emission)

    @property
    def state_schema(self) -> dict[str, pl.DataType]:
        numbers = dict.fromkeys([WINDOW, *_SPAN, SEEN, _STEP, _DUE, EMITTED], pl.Int64())
        own = {HASH: pl.UInt64(), HEAD: pl.Boolean(), _FIRED: pl.Boolean(), KIND: pl.String()}
        return {**own, **numbers, **dict(self.aggregation.schema)}

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
        timers = Timers(state, "running_time_timers", _SLOT_CLOCK_MS) if timed else None
        touched = [] if timers is None else [timers.due(clock_ms)]
        touched += [] if rows is None else [rows[HASH].to_numpy()]
        hashes = sorted_distinct(np.concatenate(touched)) if touched else np.empty(0, np.uint64)
        held = KeyedRows(state, "windows", ROWS)
        known = held.get(hashes) if len(hashes) else None
        if known is None:
            if rows is None:
                return OperatorResult()
            keys = {name: rows.schema[name] for name in self.by}
            known = pl.DataFrame(schema={**keys, **self.state_schema})
        ledger = StateLedger(self.name, (held.runs,))
        batch = _CountPaneBatch(self, known, clock_ms, context.watermark_before_us)
        out = batch.run(rows)
        held.put(hashes, self.aggregation.for_state(batch.rest), known)
        if timers is not None:
            setting = batch.rest.filter(pl.col(_DUE).is_not_null())
            timers.add(setting[_DUE].to_numpy(), setting[HASH].to_numpy())
        if rows is not None:
            ledger.events_in = self.events_in(known, batch.rest, rows, known.clear())
        ledger.events_out = batch.windows_full * self.window.count
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

    ``watermark_us`` is that before it. ``rest`` is what is kept of their keys afterwards; ``left_out`` counts what
    came for windows that had fired once.
    """

    def __init__(
        self, step: CountPaneOperator, known: pl.DataFrame, clock_ms: int, watermark_us: int
    ) -> None:
        self.step, self.clock_ms, self.watermark_us = step, clock_ms, watermark_us
        self.columns = known.columns
        self.key = [HASH, *step.by, WINDOW]
        self.heads = known.filter(HEAD)
        self.fired = known.filter(~pl.col(HEAD) & pl.col(_FIRED))
        self.pending = known.filter(~pl.col(HEAD) & ~pl.col(_FIRED))
        self.windows_full = 0
        self.left_out: Counter[str] = Counter()
        self.rest = known

    def run(self, rows: pl.DataFrame | None) -> pl.DataFrame | None:
        """Take events into windows; return the rows to emit."""
        timed = self._timed()
        firings = [timed]
        if rows is not None:
            self._take(rows, timed)
            firings += self._complete()
        firing = pl.concat(firings)
        out = self._emitted(self._spanned(firing)) if firing.height else None
        if self.once:
            self._keep_closed(firing.filter(pl.col(KIND) == "early"))
        self.rest = pl.concat([self.heads, self.fired, self.pending])
        return out

    # ── which panes fire ────────────────────────────────────────────────────────────────────

    def _timed(self) -> pl.DataFrame:
        """Fire the panes that are due by running time, with the events of earlier batches."""
        due = (pl.col(_DUE) <= self.clock_ms).fill_null(value=False)
        firing = self.pending.filter(due)
        self.pending = self.pending.filter(~due)
        if not self.step.values.accumulates:
            known = pl.max_horizontal(KNOWN_TIME, pl.lit(self.watermark_us, pl.Int64))
            firing = firing.with_columns(known.alias(KNOWN_TIME))
        return _firing(firing, pl.lit(0, pl.Int64), "early", last=self.once)

    @property
    def once(self) -> bool:
        """Whether the first pane of a window closes it."""
        return self.step.emission.once

    @property
    def _inside(self) -> pl.Expr:
        """Return the place of an event in its window."""
        return pl.col(PLACE) - pl.col(WINDOW) * self.step.window.slide

    def _take(self, rows: pl.DataFrame, timed: pl.DataFrame) -> None:
        """Add events to what no pane has yet; ``timed`` are the firings by running time before them."""
        placed, totals = self.step.placed(self.heads, rows)
        spread = self.step.in_windows(placed).rename({NUMBER: WINDOW})
        if self.once:
            spread = self._admitted(spread, timed, placed.height)
        trigger = self.step.emission.early
        number = self._inside // trigger.count if isinstance(trigger, AfterCount) else pl.lit(0)
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
        )
        merged = merged.cast(dict(aggregation.schema))
        self.pending = pl.concat([self.pending.clear(), merged], how="diagonal")
        self.heads = self.step.heads(self.heads, totals)

    def _admitted(self, spread: pl.DataFrame, timed: pl.DataFrame, events: int) -> pl.DataFrame:
        """Leave out, and count, the events of windows that have fired, or do so before them."""
        closed = pl.concat([self.fired.select(self.key), timed.select(self.key)])
        admitted = spread.join(
            closed, on=self.key, how="anti", nulls_equal=True, maintain_order="left"
        )
        trigger = self.step.emission.early
        if isinstance(trigger, AfterCount):
            admitted = admitted.filter(self._inside < trigger.count)
        gone = events - admitted.select(HASH, *self.step.by, PLACE).n_unique()
        missed = spread.height - admitted.height
        self.left_out.update(held=-gone, filtered=gone, windows_closed=missed)
        return admitted

    def _complete(self) -> list[pl.DataFrame]:
        """Fire the panes of windows that are full, and those that are early; the others wait."""
        trigger, window = self.step.emission.early, self.step.window
        by = [HASH, *self.step.by]
        pending = self.pending.drop(SEEN).join(
            self.heads.select(*by, SEEN), on=by, how="left", nulls_equal=True, maintain_order="left"
        )
        full = pl.col(WINDOW) * window.slide + window.count <= pl.col(SEEN)
        counted = isinstance(trigger, AfterCount)
        last_step = (window.count - 1) // trigger.count if isinstance(trigger, AfterCount) else 0
        pending = pending.with_columns((full & (pl.col(_STEP) == last_step)).alias(_FULL))
        on_time = pending.filter(_FULL)
        others = pending.filter(~pl.col(_FULL))
        if isinstance(trigger, AfterCount):
            early = others.filter(pl.col(ROWS) == trigger.count)
            others = others.filter(pl.col(ROWS) != trigger.count)
        else:
            early = others if isinstance(trigger, EachBatch) else others.clear()
            others = others.clear() if isinstance(trigger, EachBatch) else others
        if isinstance(trigger, AfterTime):
            due = pl.col(_DUE).fill_null(self.clock_ms + trigger.delay_ms)
            others = others.with_columns(due)
        self.pending = others.with_columns(pl.lit(None, pl.Int64).alias(SEEN)).select(self.columns)
        self.windows_full = on_time.height
        rank = pl.col(_STEP) + 1 if counted else pl.lit(1, pl.Int64)
        return [
            _firing(early.select(self.columns), rank, "early", last=self.once),
            _firing(on_time.select(self.columns), rank, "on_time", last=True),
        ]

    def _spanned(self, firing: pl.DataFrame) -> pl.DataFrame:
        """Give each firing the times and the number of events of its window so far."""
        before = pl.lit(-1, pl.Int64).alias(RANK)
        every = pl.concat([self.fired.with_columns(before), firing], how="diagonal")
        every = every.sort(*self.key, RANK)
        return every.with_columns(
            pl.col(FIRST_TIME).first().over(self.key),
            pl.col(LAST_TIME, KNOWN_TIME).cum_max().over(self.key),
            pl.col(ROWS).cum_sum().over(self.key).alias(_TOTAL),
        ).filter(pl.col(RANK) >= 0)

    # ── what they say ───────────────────────────────────────────────────────────────────────

    def _emitted(self, firing: pl.DataFrame) -> pl.DataFrame:
        """Return the rows of the panes that fire, and keep what they have emitted."""
        values, step = self.step.values, self.step
        own = [*values.key, HASH, *step.aggregation.partials]
        made = firing.select(*own, RANK, KIND, LAST, *_SPAN, _TOTAL)
        follows = values.keeps_previous and not self.once
        known = self.fired.select(*values.stored_columns, *_SPAN) if follows else None
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
        """Keep which windows have fired once, until they are full, and how many events came for each."""
        window, by = self.step.window, [HASH, *self.step.by]
        no = pl.lit(value=False)
        marks = firing.select(*self.key, no.alias(HEAD), (~no).alias(_FIRED))
        closed = pl.concat([self.fired.drop(SEEN), marks], how="diagonal").join(
            self.heads.select(*by, SEEN), on=by, how="left", nulls_equal=True, maintain_order="left"
        )
        came = pl.col(SEEN) - pl.col(WINDOW) * window.slide
        waiting = closed.filter(came < window.count)
        self.windows_full += closed.height - waiting.height
        none = pl.lit(None, pl.Int64).alias(SEEN)
        self.fired = waiting.with_columns(came.alias(ROWS), none).select(self.columns)


def _firing(rows: pl.DataFrame, rank: pl.Expr, kind: str, *, last: bool) -> pl.DataFrame:
    return rows.with_columns(rank.alias(RANK), pl.lit(kind).alias(KIND), pl.lit(last).alias(LAST))
