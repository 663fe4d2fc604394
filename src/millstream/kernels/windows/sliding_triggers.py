"""Sliding windows whose rows come as triggers say: by the number of events, by running time, or once.

A row is a key and a time ``t`` at which it has events, as in :mod:`.sliding_panes`, and is there from its first own
event on, which is one at ``t``. With r the watermark that an event saw:

==========  ====================================================================================
early       events with ``r <= t``. Those from the first own one on make panes fire; what came before it is
            part of the first pane
on time     once W > t: all events with ``r <= t``
late        after that: events with ``t < r <= t + L``. A row without an own event in time begins with a late
            pane, from its first own event on, and that has what was in time, too
last        once W > t + L: what no pane has
==========  ====================================================================================

An event whose split is ahead waits for the on-time pane, whatever the trigger. With ``once`` a row has one pane, the
early one or that on time; what comes for it afterwards is left out of it, and counted as ``windows_closed``. Later
rows count it.

Which panes there are, and which of them had fired before, follows from the events that are held, each with its
number in the order of arrival and the running time at which it was read. So nothing is kept of what was
emitted but the numbers of panes, if rows name them. Their values are summed up by
:class:`~millstream.kernels.windows.pane_values.PaneValues`, as those of windows of fixed spans and of count windows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import polars as pl

from millstream.kernels.aggregates.count import Count
from millstream.kernels.arrays import Bools, Int64s
from millstream.kernels.changes import concat_present, divide_by
from millstream.kernels.columns import filter_rows
from millstream.kernels.frames import (
    HASH,
    RELEASED,
    RELEASED_TIE,
    ROWS,
    TIME,
    WATERMARK_SEEN,
    WINDOW,
)
from millstream.kernels.operator import BatchContext
from millstream.kernels.state.hash_order import sorted_distinct
from millstream.kernels.state.operator_state import OperatorState
from millstream.kernels.state.sorted_runs import SortedRuns
from millstream.kernels.time.log_order import in_log_order
from millstream.kernels.trigger import AfterTime, EachBatch, Trigger
from millstream.kernels.windows.pane_values import EMITTED, KIND, LAST, RANK, PaneValues
from millstream.kernels.windows.sliding_panes import (
    AFTER,
    BEFORE,
    ON_TIME,
    STAGE,
    TIMES,
    SlidingBatch,
    SlidingPaneOperator,
)
from millstream.kernels.windows.sliding_windows import FROM

ARRIVED = "__number"  # Int64: the number of an event in the order of arrival
READ_MS = "__read_ms"  # Int64: the running time at which it was read
_OWN = "__own"  # Boolean: whether an event is at the time of the row
_FIRES_AS = "__fires_as"  # String: the kind of a pane
_DUE = "__due"  # Int64: the running time at which a pane of a row is due
_AT = "__at"
_EARLY, _ON_TIME, _LATE, _CLOSING = (1 + (n << 40) for n in range(4))  # of the ranks of panes
_PENDING, _FIRED = -1, 0
_NEVER = 2**62
_SLOTS_PER_DELAY = 8
_PAIRS = 1 << 19  # of a row and an event that are in hand at a time; each takes a few hundred bytes


@dataclass(frozen=True)
class SlidingTriggerOperator(SlidingPaneOperator):
    """An operator of sliding windows that emits by triggers other than the batch; no event is taken back."""

    @property
    def ordered(self) -> bool:
        return True

    @property
    def defers_late(self) -> bool:
        return True

    @property
    def columns_sent(self) -> list[str]:
        return [*super().columns_sent, RELEASED, RELEASED_TIE]

    @property
    def event_columns(self) -> list[str | pl.Expr]:
        placed = (RELEASED, RELEASED_TIE)  # not every event has these
        return [
            name
            for name in super().event_columns
            if isinstance(name, pl.Expr) or name not in placed
        ]

    def kept(self, in_time: pl.DataFrame) -> pl.DataFrame:
        placed = [name for name in (RELEASED, RELEASED_TIE) if name in in_time.columns]
        return in_time.select(*self.event_columns, *placed)

    @property
    def counted(self) -> PaneValues:
        """How panes add up, with how many events at its time a row has."""
        own = (TIMES, Count(pl.col(_OWN)))
        return PaneValues(
            replace(
                self.aggregation,
                aggregates=(*self.aggregation.aggregates, own),
                schema=(*self.aggregation.schema, (f"{TIMES}.rows", pl.Int64())),
            ),
            self.emission,
        )

    def batch(
        self,
        state: OperatorState,
        context: BatchContext,
        runs: SortedRuns,
        changes: pl.DataFrame | None,
    ) -> SlidingBatch:
        """Give the events of the batch their numbers; return what it does."""
        values = state.values
        before_ms, first = values.get("clock_ms", -_NEVER), values.get("arrived", 0)
        clock_ms = max(context.clock_ms, before_ms)
        values["clock_ms"] = clock_ms
        if changes is not None:
            changes = in_log_order(changes).drop(RELEASED, RELEASED_TIE, strict=False)
            changes = changes.with_columns(
                pl.int_range(first, first + pl.len(), dtype=pl.Int64).alias(ARRIVED),
                pl.lit(clock_ms, pl.Int64).alias(READ_MS),
            )
            values["arrived"] = first + changes.height
        context = replace(context, clock_ms=clock_ms)
        return _TriggeredBatch(self, state, context, runs, changes, before_ms, first)


@dataclass(frozen=True)
class _Rows:
    """The rows that a batch may concern, and the events that each of them counts, in the order of arrival.

    ``row`` and ``event`` are the places of a pair's row among ``times_us``, and of its event among ``events``.
    """

    events: pl.DataFrame
    times_us: Int64s
    row: Int64s
    event: Int64s

    def column(self, name: str) -> Int64s:
        """Return what the event of each pair has in a column."""
        values: Int64s = self.events[name].to_numpy()[self.event]
        return values

    def first(self, pairs: Bools, values: Int64s) -> Int64s:
        """Return the least value of each row among some pairs."""
        least = np.full(len(self.times_us), _NEVER)
        np.minimum.at(least, self.row[pairs], values[pairs])
        return least

    def places(self, counted: Bools) -> Int64s:
        """Return how many counted pairs of its row are before each pair, itself left out; 0 at the beginning."""
        so_far = np.cumsum(counted)
        begins = np.searchsorted(self.row, np.arange(len(self.times_us)))
        before = np.concatenate([[0], so_far])[begins]
        places: Int64s = np.maximum(so_far - before[self.row] - 1, 0)
        return places


@dataclass(frozen=True)
class _Steps:
    """The pane of each pair by the trigger of its phase: its number, and whether it has fired, as of when.

    ``due_ms`` is when it fires by running time.
    """

    number: Int64s
    before: Bools
    now: Bools
    due_ms: Int64s


@dataclass
class _TriggeredBatch(SlidingBatch):
    """What one batch of one bucket does to rows; ``first`` is the number of its first event."""

    before_ms: int
    first: int

    @property
    def _counted(self) -> PaneValues:
        step = self.step
        assert isinstance(step, SlidingTriggerOperator)
        return step.counted

    @property
    def _lateness_us(self) -> int:
        return self.step.lateness_us

    # ── which rows ──────────────────────────────────────────────────────────────────────────

    def _stages(self) -> pl.DataFrame | None:
        due = self._due()
        touched = [self.changes, self._between(0), due]
        if self._lateness_us:
            touched.append(self._between(self._lateness_us))
        found = [rows.select(HASH, TIME) for rows in touched if rows is not None and rows.height]
        if not found:
            return None
        keys = pl.concat(found)
        first_us, last_us = int(keys[TIME].min()), int(keys[TIME].max())  # type: ignore[arg-type]
        size_us = self.step.window.size_us
        hashes = sorted_distinct(keys[HASH].to_numpy())
        known = self.step.known(self.events, hashes, first_us - size_us, last_us + size_us)
        events = concat_present([part for part in (known, self.changes) if part is not None])
        if events is None:
            return None
        fired = [self._fired(rows) for rows in self._rows_of(events, due) if len(rows.event)]
        return concat_present([stages for stages in fired if stages is not None])

    def _between(self, waits_us: int) -> pl.DataFrame | None:
        """Return the events that the watermark, less a time, has passed now."""
        since, until = self.since - waits_us, self.until - waits_us
        width = self.step.slot_us
        found = [
            rows.filter(pl.col(TIME).is_between(since, until, closed="left"))
            for slot in self.events.slots
            if slot * width < until and (slot + 1) * width > since
            for rows in self.events.scan(slot)
        ]
        return concat_present(found)

    def _rows_of(self, events: pl.DataFrame, due: pl.DataFrame | None) -> Iterator[_Rows]:
        """Yield the rows that something may be emitted of, and the events that they count, some at a time."""
        by = [HASH, *self.step.by]
        events = events.sort(*by, TIME, ARRIVED)
        key = events.select(pl.struct(by).rle_id().cast(pl.Int64)).to_series().to_numpy()
        time_us, size_us = events[TIME].to_numpy(), self.step.window.size_us
        times, place = np.unique(time_us, return_inverse=True)
        at = key * len(times) + place  # in the order of keys and times
        own = np.flatnonzero(events[FROM].to_numpy() <= time_us)
        own = own[np.unique(at[own], return_index=True)[1]]
        begins = key[own] * len(times) + np.searchsorted(times, time_us[own] - size_us)
        new = at[events[ARRIVED].to_numpy() >= self.first]
        wanted = np.searchsorted(new, at[own], "right") > np.searchsorted(new, begins)
        passed = time_us[own]
        for waits_us in (0, self._lateness_us):
            wanted |= (passed >= self.since - waits_us) & (passed < self.until - waits_us)
        if due is not None:
            rows = events[own].select(*by, TIME).with_row_index(_AT)
            met = rows.join(due, on=self.row, how="semi", nulls_equal=True)
            wanted[met[_AT].to_numpy()] = True
        wanted &= passed >= self.since - self._lateness_us  # the others are settled
        own, begins = own[wanted], np.searchsorted(at, begins[wanted])
        counts = np.searchsorted(at, at[own], "right") - begins
        step = (np.cumsum(counts) - counts) // _PAIRS
        for part in np.split(np.arange(len(own)), np.flatnonzero(np.diff(step)) + 1):
            yield self._pairs(events, time_us[own[part]], begins[part], counts[part])

    def _pairs(
        self, events: pl.DataFrame, times_us: Int64s, begins: Int64s, counts: Int64s
    ) -> _Rows:
        """Pair rows with so many events from where they begin."""
        row = np.repeat(np.arange(len(counts)), counts)
        event = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts - begins, counts)
        counted = events[FROM].to_numpy()[event] <= times_us[row]
        row, event = row[counted], event[counted]
        order = np.lexsort([events[ARRIVED].to_numpy()[event], row])
        return _Rows(events, times_us, row[order], event[order])

    # ── which panes ─────────────────────────────────────────────────────────────────────────

    def _fired(self, rows: _Rows) -> pl.DataFrame | None:
        """Return what had been said of rows, and the panes that fire now."""
        time_us, arrived = rows.times_us[rows.row], rows.column(ARRIVED)
        in_time, own = rows.column(WATERMARK_SEEN) <= time_us, rows.column(TIME) == time_us
        begins = rows.first(own & in_time, arrived)
        is_early = in_time & (begins < _NEVER)[rows.row]
        begins_late = rows.first(own, arrived)
        counted = is_early & (arrived >= begins[rows.row])
        early = self._steps(rows, self.step.emission.early, counted, begins)
        starts_late = np.where(begins < _NEVER, -1, begins_late)
        counted = ~in_time & (arrived >= starts_late[rows.row])
        late = self._steps(rows, self.step.emission.late, counted, starts_late)
        ranks = np.where(
            is_early, self._early_ranks(early, time_us), self._late_ranks(late, time_us)
        )
        if self.step.emission.once:
            ranks = self._first_alone(rows, early, ranks, arrived)
        self._set_timers(rows, ranks, np.where(is_early, early.due_ms, late.due_ms))
        quiet = np.zeros(0, np.int64)
        if not self.step.emission.suppress_unchanged and not self.step.emission.once:
            passes = (rows.times_us >= self.since) & (rows.times_us < self.until)
            fires = np.zeros(len(passes), np.bool_)
            fires[rows.row[ranks == _ON_TIME]] = True
            quiet = np.flatnonzero(passes & (begins < _NEVER) & ~fires)
        return self._summed(rows, ranks, quiet)

    def _early_ranks(self, steps: _Steps, time_us: Int64s) -> Int64s:
        passed = time_us < self.until
        ranks = np.where(passed, _ON_TIME, _PENDING)
        ranks = np.where(steps.now, _EARLY + steps.number, ranks)
        if isinstance(
            self.step.emission.early, EachBatch
        ):  # at its end, which the watermark has reached
            ranks = np.where(passed, _ON_TIME, ranks)
        return np.where(steps.before | (time_us < self.since), _FIRED, ranks)

    def _late_ranks(self, steps: _Steps, time_us: Int64s) -> Int64s:
        ranks = np.where(time_us + self._lateness_us < self.until, _CLOSING, _PENDING)
        ranks = np.where(steps.now, _LATE + steps.number, ranks)
        ranks = np.where(time_us < self.until, ranks, _PENDING)
        return np.where(steps.before & (time_us < self.since), _FIRED, ranks)

    def _first_alone(self, rows: _Rows, steps: _Steps, ranks: Int64s, arrived: Int64s) -> Int64s:
        """Leave out what comes for rows that have had their one pane, and count it."""
        closed = np.zeros(len(rows.times_us), np.bool_)
        first = steps.number == 0
        closed[rows.row[first & (steps.now | steps.before)]] = True
        gone = closed[rows.row] & ~first
        self.left_out["windows_closed"] += int((gone & (arrived >= self.first)).sum())
        said = np.zeros(len(rows.times_us), np.bool_)
        said[rows.row[ranks == _FIRED]] = True
        return np.where(gone | (said[rows.row] & (ranks != _FIRED)), _PENDING, ranks)

    def _steps(
        self, rows: _Rows, trigger: Trigger | None, counted: Bools, begins: Int64s
    ) -> _Steps:
        """Cut the events of rows into panes. Those that are not counted, from before it began, are in the first."""
        none = np.zeros(len(rows.row), np.bool_)
        number, due_ms = np.zeros(len(rows.row), np.int64), np.full(len(rows.row), _NEVER)
        arrived = np.maximum(rows.column(ARRIVED), begins[rows.row])
        if isinstance(trigger, EachBatch):
            return _Steps(number, arrived < self.first, ~none, due_ms)
        if isinstance(trigger, AfterTime):
            number, due_ms = _by_time(rows, counted, trigger.delay_ms)
            return _Steps(number, due_ms <= self.before_ms, due_ms <= self.context.clock_ms, due_ms)
        if trigger is None or not counted.any():
            return _Steps(number, none, none, due_ms)
        number = np.where(counted, rows.places(counted) // trigger.count, 0)
        total = np.bincount(rows.row[counted], minlength=len(rows.times_us))
        last = (number + 1) * trigger.count  # how many events make the pane complete
        complete = last <= total[rows.row]
        at = np.cumsum(total) - total
        fires = arrived[counted][np.where(complete, at[rows.row] + last - 1, 0)]
        return _Steps(number, complete & (fires < self.first), complete, due_ms)

    # ── by running time ─────────────────────────────────────────────────────────────────────

    @property
    def _timers(self) -> SortedRuns:
        return self.state.runs("due")

    @property
    def _slot_ms(self) -> int:
        """The width of a slot of timers: a batch adds to one or two, and a few are held at a time."""
        return max(1, (self.step.emission.heartbeat_ms or 0) // _SLOTS_PER_DELAY)

    def _due(self) -> pl.DataFrame | None:
        """Return the rows of which a pane is due by running time, and drop the timers that have passed."""
        until, width = self.context.clock_ms, self._slot_ms
        due = pl.col(_DUE).is_between(self.before_ms, until, closed="right")
        found: list[pl.DataFrame] = []
        for slot in sorted(slot for slot in self._timers.slots if slot * width <= until):
            found += [timers.filter(due) for timers in self._timers.scan(slot)]
            if (slot + 1) * width <= until + 1:
                self._timers.drop_slot(slot)
        return concat_present(found)

    def _set_timers(self, rows: _Rows, ranks: Int64s, due_ms: Int64s) -> None:
        """Set a timer for the next pane of each row that has one."""
        waits = (ranks == _PENDING) & (due_ms > self.context.clock_ms) & (due_ms < _NEVER)
        if not waits.any():
            return
        next_ms = rows.first(waits, due_ms)
        last = np.zeros(len(next_ms), np.int64)
        last[rows.row] = rows.event  # the key's: which of its events it is does not matter
        named = rows.events[last].select(HASH, *self.step.by)
        named = named.with_columns(pl.Series(TIME, rows.times_us), pl.Series(_DUE, next_ms))
        named = filter_rows(named, next_ms < _NEVER)
        for slot, timers in divide_by(named, named[_DUE].to_numpy() // self._slot_ms):
            self._timers.add(slot, timers, _each_once)

    # ── values ──────────────────────────────────────────────────────────────────────────────

    def _summed(self, rows: _Rows, ranks: Int64s, quiet: Int64s) -> pl.DataFrame | None:
        """Return the value at each pane of the rows of which one fires, and before it."""
        fires = np.zeros(len(rows.times_us), np.bool_)
        fires[rows.row[ranks > _FIRED]] = True
        fires[quiet] = True
        wanted = fires[rows.row] & (ranks != _PENDING)
        if not wanted.any():
            return None
        row, event = rows.row[wanted], rows.event[wanted]
        times_us = rows.times_us[row]
        pairs = rows.events[event].with_columns(
            pl.Series(WINDOW, times_us), pl.Series(RANK, ranks[wanted])
        )
        pairs = pairs.with_columns((pl.col(TIME) == pl.col(WINDOW)).alias(_OWN))
        values = self._counted
        firings = values.aggregation.reduce(pairs, WINDOW, RANK, HASH)
        if len(quiet):
            firings = self._with_quiet(firings, rows, quiet)
        panes, _ = values.panes([self._named(firings)], None)
        panes = panes.drop(EMITTED, KIND).rename({WINDOW: TIME, f"{TIMES}.rows": TIMES})
        rank = pl.col(RANK)
        stage = pl.when(rank == _FIRED).then(BEFORE).when(rank == _ON_TIME).then(ON_TIME)
        panes = panes.with_columns(stage.otherwise(AFTER).cast(pl.Int64).alias(STAGE))
        return panes.select(sorted(panes.columns)).sort(*self.row, RANK)

    def _with_quiet(self, firings: pl.DataFrame, rows: _Rows, quiet: Int64s) -> pl.DataFrame:
        """Add on-time panes of rows of which nothing is new then."""
        last = np.zeros(len(rows.times_us), np.int64)
        last[rows.row] = rows.event
        named = rows.events[last[quiet]].select(HASH, *self.step.by)
        named = named.with_columns(
            pl.Series(WINDOW, rows.times_us[quiet]),
            pl.lit(_ON_TIME, pl.Int64).alias(RANK),
            pl.lit(0, pl.Int64).alias(ROWS),
        )
        return pl.concat([firings, named], how="diagonal")

    def _named(self, firings: pl.DataFrame) -> pl.DataFrame:
        """Say of each firing which kind of pane it is, and whether it is the last one."""
        rank, emission = pl.col(RANK), self.step.emission
        after = pl.when(rank == _ON_TIME).then(pl.lit("on_time")).otherwise(pl.lit("late"))
        kind = pl.when(rank < _ON_TIME).then(pl.lit("early")).otherwise(after)
        last = (rank == _ON_TIME) & pl.lit(self._lateness_us == 0) | (rank == _CLOSING)
        if isinstance(emission.late, EachBatch):
            last |= (rank == _LATE) & (pl.col(WINDOW) < self.until - self._lateness_us)
        last |= pl.lit(emission.once)
        return firings.with_columns(
            kind.alias(KIND), kind.alias(_FIRES_AS), last.alias(LAST)
        ).with_columns(pl.col(RANK).cast(pl.Int64))

    # ── what is emitted ─────────────────────────────────────────────────────────────────────

    def _is_touched(self, stages: pl.DataFrame, follows: Bools) -> Bools:  # noqa: ARG002
        touched: Bools = stages[RANK].to_numpy() > _FIRED
        return touched

    def _kind(self) -> pl.Expr:
        return pl.col(_FIRES_AS)

    def _is_last(self, stages: pl.DataFrame) -> pl.Series:
        return stages[LAST]


def _by_time(rows: _Rows, counted: Bools, delay_ms: int) -> tuple[Int64s, Int64s]:
    """Return for each pair the number of its pane, and when that is due: so long after its first event was read."""
    read_ms = rows.column(READ_MS)
    begins = rows.first(counted, read_ms)
    read_ms = np.where(counted, read_ms, begins[rows.row])
    number, due_ms = np.zeros(len(read_ms), np.int64), np.full(len(read_ms), _NEVER)
    left, step = read_ms < _NEVER, 0
    while left.any():
        due = (rows.first(left, read_ms) + delay_ms)[rows.row]
        taken = left & (read_ms < due)
        number[taken], due_ms[taken] = step, due[taken]
        left, step = left & ~taken, step + 1
    return number, due_ms


def _each_once(timers: pl.DataFrame) -> pl.DataFrame:
    """Fold timers: a row that is touched again before its pane is due has set the same one."""
    return timers.unique(maintain_order=True)
