"""Count windows: every so many events of a key, in the order of their arrival.

A window takes ``count`` events of its key, and one begins with every ``slide``-th; in between a window
stays open, forever, or until the watermark reaches its ``timeout``: counted in event time from the
event that opened it. A window that is timed out is complete as it is, and the next event opens a new
one; whether an event comes before that is judged by the watermark of its split before it.

The order of arrival is that of the log, partition by partition: for a key whose events are all in one
partition the result depends on the events alone. Events of one key from several partitions are
counted in the order of reading. No event is late: these windows depend on arrival, not on event time.

The time of a row is that at which its window was complete: the latest of its events' times, of their
splits' watermarks, and of the timeout. So it is never late for downstream operators.

Windows over rows that are taken back: :mod:`millstream.kernels.windows.signed_count_windows`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl

from millstream.durations import format_us
from millstream.kernels.aggregates.event_order import with_order
from millstream.kernels.aggregation import event_count
from millstream.kernels.arrays import Int64s
from millstream.kernels.frames import (
    DIFF,
    HASH,
    ORDER,
    REPLACED,
    ROWS,
    SPLIT,
    TIME,
    UNPLACED,
    WATERMARK_SEEN,
)
from millstream.kernels.operator import BatchContext, OperatorResult, Prepared
from millstream.kernels.queryable import QueryKeys, held_by_key
from millstream.kernels.state.hash_order import sorted_distinct
from millstream.kernels.state.keyed_rows import KeyedRows
from millstream.kernels.state.keyhash import hash_columns
from millstream.kernels.state.ledger import StateLedger
from millstream.kernels.state.operator_state import OperatorState
from millstream.kernels.state.timers import Timers, WaitingLedger
from millstream.kernels.time.watermarks import NO_WATERMARK
from millstream.kernels.windows.aggregate_operator import AggregateOperator

NUMBER = "window_number"
FIRST_TIME = "__first_time"  # Int64: time of the event that opened it
LAST_TIME = "__last_time"  # Int64: the latest time of its events
KNOWN_TIME = "__known_time"  # Int64: the time at which all of it was known
_DUE = "__due"  # Int64: when it is timed out
SEEN = (
    "__seen"  # Int64: events of the key so far; it is in the key's head row, which is not a window
)
HEAD = "__head"  # Boolean
PLACE = "__place"
TIMEOUT = "__timeout"  # Int64: when a window in panes is timed out
EVENTS = "__events"  # Int64: how many events of its key a window has, in panes or not
_AT = "__at"
_IN_WINDOW = "__in_window"  # Int64: how many events the key's open window has
_ROOM = "__room"  # Int64: how many more events the key's window takes
_IS_OPEN = "__is_open"  # Boolean: whether the key has an open window
_TAKEN = "__taken"  # Boolean: whether the window takes the row
_PASSED = "__passed"  # Boolean: rows of the key are left over for its next window
_NEVER = 2**62
_SLOTS_PER_TIMEOUT = 4


@dataclass(frozen=True)
class CountWindow:
    """Windows of ``count`` events, one begun with every ``slide``-th; the timeout in microseconds."""

    count: int
    slide: int
    timeout_us: int | None = None

    def __str__(self) -> str:
        slide = "" if self.slide == self.count else f", slide {self.slide}"
        timeout = "" if self.timeout_us is None else f", {format_us(self.timeout_us)}"
        return f"count_window({self.count}{slide}{timeout})"

    def filled_windows(self, events: Int64s) -> Int64s:
        """Return how many windows so many events of a key have filled; window n begins with event
        ``n * slide``, and has ``count``.
        """
        filled: Int64s = np.clip((events - self.count) // self.slide + 1, 0, None)
        return filled

    def taken_places(self, events: Int64s) -> Int64s:
        """Return how many places so many events of a key have taken, in all its windows together."""
        begun, full = -(-events // self.slide), self.filled_windows(events)
        opened = begun - full
        # Of the events, what came before each.
        before = self.slide * opened * (full + begun - 1) // 2
        taken: Int64s = full * self.count + opened * events - before
        return taken


@dataclass(frozen=True)
class CountWindowOperator(AggregateOperator):
    """One operator of count windows."""

    window: CountWindow

    @property
    def ordered(self) -> bool:
        return True

    def output_watermark(self, watermark_us: int) -> int:
        """Return the watermark of the output, which is that of the input."""
        return watermark_us

    def prepare(self, rows: pl.DataFrame, number: int = 0) -> Prepared:  # noqa: ARG002
        """Drop columns that are not needed; give rows without a log order one."""
        rows = with_order(rows)
        names = dict.fromkeys([*self.by, *sorted(self.aggregation.columns_read)])
        wanted = [*names, TIME, SPLIT, WATERMARK_SEEN, ORDER]
        return Prepared(rows.select(name for name in wanted if name in rows.columns))

    def pack(self, tables: Sequence[pl.DataFrame], number: int = 0) -> pl.DataFrame:  # noqa: ARG002
        """Concatenate tables."""
        return pl.concat(tables)

    @property
    def state_schema(self) -> dict[str, pl.DataType]:
        """The columns of state besides the key's own."""
        numbers = dict.fromkeys([NUMBER, FIRST_TIME, LAST_TIME, KNOWN_TIME, _DUE, SEEN], pl.Int64())
        own = {HASH: pl.UInt64(), HEAD: pl.Boolean(), **numbers}
        return {**own, **dict(self.aggregation.schema)}

    def process(
        self,
        state: OperatorState,
        inputs: Mapping[int, Sequence[pl.DataFrame]],
        context: BatchContext,
    ) -> OperatorResult:
        """Take the batch's events into windows; give the rows to emit."""
        return self.take(state, self.in_order(inputs.get(0, ()), context), context)

    def take(
        self, state: OperatorState, rows: pl.DataFrame | None, context: BatchContext
    ) -> OperatorResult:
        """Take events into windows in the order in which they stand; give the rows to emit."""
        timers = self.timers(state)
        touched = [] if timers is None else [timers.due(context.watermark_us)]
        if rows is not None:
            touched.append(rows[HASH].to_numpy())
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
        complete, rest = self._advanced(known, rows)
        if timers is not None:
            over, rest = self._timed_out(rest, context.watermark_us)
            complete = pl.concat([complete, over])
            opened = rest.filter(~pl.col(HEAD))
            timers.add(opened[_DUE].to_numpy(), opened[HASH].to_numpy())
        held.put(hashes, self.aggregation.for_state(rest), known)
        self.note_timeouts(state, known, rest, context)
        ledger.events_in, ledger.events_out = (
            self.events_in(known, rest, rows, complete),
            event_count(complete),
        )
        ledger.check()
        counts = Counter(held=0 if rows is None else rows.height)
        return OperatorResult(self._emitted(known, complete, rest, rows), None, counts)

    @property
    def timeout_column(self) -> str:
        """The column of state that says when a window is timed out."""
        return _DUE

    def current_rows(
        self,
        state: OperatorState,
        keys: QueryKeys | None,
        watermark_us: int,  # noqa: ARG002 - a window has no end in time
    ) -> pl.DataFrame:
        """Return the windows that are not full."""
        held = held_by_key(KeyedRows(state, "windows", ROWS), keys, self.by)
        if held is None:
            held = pl.DataFrame(schema={**dict(self.aggregation.keys), **self.state_schema})
        return self.result_rows(self.open_windows(held.filter(~pl.col(HEAD))))

    def open_windows(self, windows: pl.DataFrame) -> pl.DataFrame:
        """Return one row for each open window, from the rows that are held of them."""
        return windows.sort(NUMBER, HASH)

    def note_timeouts(
        self,
        state: OperatorState,
        known: pl.DataFrame | None,
        rest: pl.DataFrame | None,
        context: BatchContext,
    ) -> None:
        """Note the timeouts of open windows."""
        if self.window.timeout_us is not None:
            before, after = (
                np.empty(0, np.int64)
                if rows is None
                else rows.filter(~pl.col(HEAD))[self.timeout_column].to_numpy()
                for rows in (known, rest)
            )
            WaitingLedger(self.name, state, self._slot_us).update(
                before, after, context.watermark_us
            )

    def events_in(
        self,
        known: pl.DataFrame,
        rest: pl.DataFrame,
        rows: pl.DataFrame | None,
        complete: pl.DataFrame,
    ) -> int:
        """Count the events that came, once for each window that has them, and what heads grew by.

        That is a number of events, or of windows where they may be timed out. Where they may not, how
        much is in the windows of a key follows from its number of events; so a window that was held, and
        is not among what is ``known``, is missed.
        """
        if rows is None or self.window.timeout_us is not None:
            return (0 if rows is None else rows.height) + complete.height
        before, after = (
            held.filter(HEAD)[SEEN].to_numpy().astype(np.int64) for held in (known, rest)
        )
        # Each event that came is one more that the head of its key has seen.
        StateLedger(self.name, (), rows.height, int(after.sum() - before.sum())).check()
        full_before = int(self.window.filled_windows(before).sum()) * self.window.count
        to_fill = int(self.window.taken_places(after).sum()) - full_before
        return to_fill - event_count(known.filter(~pl.col(HEAD))) + rows.height

    def timers(self, state: OperatorState) -> Timers | None:
        timeout_us = self.window.timeout_us
        if timeout_us is None:
            return None
        return Timers(state, "timers", self._slot_us)

    @property
    def _slot_us(self) -> int:
        """The width of the slots of time that timeouts are divided into."""
        return max(1, (self.window.timeout_us or 0) // _SLOTS_PER_TIMEOUT)

    def in_order(
        self, tables: Sequence[pl.DataFrame], context: BatchContext
    ) -> pl.DataFrame | None:
        """Return the rows in the order of arrival; those without a log order follow, by their time."""
        if not tables:
            return None
        rows = pl.concat([self._placed(rows, context) for rows in tables])
        return rows.sort(UNPLACED, ORDER, maintain_order=True).drop(UNPLACED)

    def _placed(self, rows: pl.DataFrame, context: BatchContext) -> pl.DataFrame:
        rows = rows.with_columns(
            pl.Series(WATERMARK_SEEN, context.watermarks_seen(rows)),
            (pl.lit(NO_WATERMARK) if SPLIT in rows.columns else pl.col(TIME)).alias(UNPLACED),
            pl.Series(HASH, hash_columns(rows, self.by, context.seed)),
        )
        return rows.select(sorted(name for name in rows.columns if name != SPLIT))

    # ── windows ─────────────────────────────────────────────────────────────────────────────

    def _advanced(
        self, known: pl.DataFrame, rows: pl.DataFrame | None
    ) -> tuple[pl.DataFrame, pl.DataFrame]:
        """Take events into windows; give those that are complete, and what is kept."""
        if rows is None:
            return known.clear(), known
        if self.window.timeout_us is None:
            return self._by_place(known, rows)
        complete = [known.clear()]
        left: pl.DataFrame | None = rows
        while left is not None:
            done, known, left = self._one_window_each(known, left)
            complete.append(done)
        return pl.concat(complete), known

    def _by_place(
        self, known: pl.DataFrame, rows: pl.DataFrame
    ) -> tuple[pl.DataFrame, pl.DataFrame]:
        """Windows that follow from an event's place among those of its key."""
        count = self.window.count
        heads = known.filter(HEAD)
        placed, totals = self.placed(heads, rows)
        spread = self.in_windows(placed)
        opened = self._merged(known.filter(~pl.col(HEAD)), self._partials(spread, known.columns))
        complete = pl.col(ROWS) == count
        kept = [opened.filter(~complete), self.heads(heads, totals)]
        return opened.filter(complete), pl.concat(kept)

    def placed(self, heads: pl.DataFrame, rows: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
        """Return the events with their places among those of their key, and how many each key has now."""
        keys = [HASH, *self.by]
        seen = rows.join(
            heads.select(*keys, SEEN), on=keys, how="left", nulls_equal=True, maintain_order="left"
        ).with_columns(pl.col(SEEN).fill_null(0))
        placed = seen.with_columns((pl.col(SEEN) + pl.int_range(pl.len()).over(keys)).alias(PLACE))
        totals = placed.group_by(keys).agg((pl.col(PLACE).max() + 1).alias(SEEN))
        return placed, totals

    def in_windows(self, placed: pl.DataFrame) -> pl.DataFrame:
        """Return every event once for each window that has its place."""
        count, slide = self.window.count, self.window.slide
        first = ((pl.col(PLACE) - count) // slide + 1).clip(0, None)
        windows = pl.int_ranges(first, pl.col(PLACE) // slide + 1).alias(NUMBER)
        return placed.with_columns(windows).explode(NUMBER)

    def _timed_out(
        self, known: pl.DataFrame, watermark_us: int
    ) -> tuple[pl.DataFrame, pl.DataFrame]:
        """Return the windows whose timeout the watermark has reached, and what is kept."""
        timed_out = ~pl.col(HEAD) & (pl.col(_DUE) <= watermark_us)
        over = _timed_out(known.filter(timed_out))
        if not over.height:
            return over, known
        opened = known.filter(~timed_out & ~pl.col(HEAD))
        return over, pl.concat([opened, self.heads(known.filter(HEAD), self._counted(over))])

    def _counted(self, done: pl.DataFrame) -> pl.DataFrame:
        """How many windows there are of each key, now that these are complete."""
        return done.select(HASH, *self.by, (pl.col(NUMBER) + 1).alias(SEEN))

    def heads(self, heads: pl.DataFrame, totals: pl.DataFrame) -> pl.DataFrame:
        """Note how many events there were of each key (or windows, where they may be timed out)."""
        keys = [HASH, *self.by]
        others = heads.join(totals, on=keys, how="anti", nulls_equal=True)
        # A head counts for as much as it has seen, so that one that is lost is missed.
        made = totals.with_columns(pl.lit(value=True).alias(HEAD), pl.col(SEEN).alias(ROWS))
        return pl.concat([others, made], how="diagonal").select(heads.columns)

    def _one_window_each(
        self, known: pl.DataFrame, rows: pl.DataFrame
    ) -> tuple[pl.DataFrame, pl.DataFrame, pl.DataFrame | None]:
        """Fill the open window of every key, or open one, until it is full or timed out."""
        keys = [HASH, *self.by]
        opened = known.filter(~pl.col(HEAD)).select(
            *keys, NUMBER, _DUE, pl.col(ROWS).alias(_IN_WINDOW)
        )
        state = self._taken(rows, opened, known.filter(HEAD))
        left = state.filter(~pl.col(_TAKEN))
        more = self._partials(state.filter(_TAKEN), known.columns)
        windows = self._merged(known.filter(~pl.col(HEAD)), more)
        passed = left.select(keys).unique()
        full = windows[ROWS] == self.window.count
        over = (
            windows.select(keys)
            .join(
                passed.with_columns(pl.lit(value=True).alias(_PASSED)),
                on=keys,
                how="left",
                nulls_equal=True,
                maintain_order="left",
            )[_PASSED]
            .fill_null(value=False)
        )
        done = pl.concat([windows.filter(full), _timed_out(windows.filter(over & ~full))])
        heads = self.heads(known.filter(HEAD), self._counted(done))
        kept = [windows.filter(~(full | over)), heads]
        return done, pl.concat(kept), left.select(rows.columns) if left.height else None

    def _taken(self, rows: pl.DataFrame, opened: pl.DataFrame, heads: pl.DataFrame) -> pl.DataFrame:
        """Return the rows with the open window of their key, or the next one, and whether that takes them."""
        keys = [HASH, *self.by]
        state = rows.join(opened, on=keys, how="left", nulls_equal=True, maintain_order="left")
        state = state.join(
            heads.select(*keys, SEEN), on=keys, how="left", nulls_equal=True, maintain_order="left"
        )
        is_open = pl.col(_DUE).is_not_null()
        opens = pl.col(TIME).first() + self.window.timeout_us
        state = state.with_columns(
            pl.int_range(pl.len()).over(keys).alias(PLACE),
            pl.coalesce(NUMBER, SEEN, 0).alias(NUMBER),
            pl.when(is_open).then(_DUE).otherwise(opens.over(keys)).alias(_DUE),
            (self.window.count - pl.col(_IN_WINDOW).fill_null(0)).alias(_ROOM),
            is_open.alias(_IS_OPEN),
        )
        in_time = (pl.col(WATERMARK_SEEN) < pl.col(_DUE)) | (
            ~pl.col(_IS_OPEN) & (pl.col(PLACE) == 0)
        )
        taken = in_time.cum_min().over(keys) & (pl.col(PLACE) < pl.col(_ROOM))
        return state.with_columns(taken.alias(_TAKEN))

    def until_timeouts(
        self, rows: pl.DataFrame, opened: pl.DataFrame, heads: pl.DataFrame
    ) -> pl.DataFrame:
        """Return the rows with their window, their place in it, and when it is timed out.

        ``opened`` are the open windows: their number, when they are timed out, and how many events they have.
        """
        keys, count = [HASH, *self.by], self.window.count
        now = opened.rename({TIMEOUT: _DUE, EVENTS: _IN_WINDOW})
        found: list[pl.DataFrame] = []
        left = rows
        while left.height:
            state = self._taken(left, now, heads)
            took = state.filter(_TAKEN).with_columns(
                (count - pl.col(_ROOM) + pl.col(PLACE)).alias(PLACE)
            )
            found.append(took.select(*rows.columns, NUMBER, PLACE, pl.col(_DUE).alias(TIMEOUT)))
            latest = took.group_by(keys, maintain_order=True).agg(
                pl.col(NUMBER, _DUE).first(), (pl.col(PLACE).last() + 1).alias(_IN_WINDOW)
            )
            others = now.join(latest, on=keys, how="anti", nulls_equal=True)
            now = pl.concat([others, latest.select(now.columns)])
            left = state.filter(~pl.col(_TAKEN)).select(rows.columns)
            passed = left.select(*keys, pl.lit(value=True).alias(_PASSED)).unique()
            now = now.join(passed, on=keys, how="left", nulls_equal=True)
            over = pl.col(_PASSED).fill_null(value=False) | (pl.col(_IN_WINDOW) == count)
            now = now.select(
                *keys,
                pl.col(NUMBER) + over.cast(pl.Int64),
                pl.when(~over).then(_DUE).alias(_DUE),
                pl.when(over).then(0).otherwise(_IN_WINDOW).cast(pl.Int64).alias(_IN_WINDOW),
            )
        return pl.concat(found)

    def _partials(self, rows: pl.DataFrame, columns: Sequence[str]) -> pl.DataFrame:
        due = pl.col(_DUE).first() if _DUE in rows.columns else pl.lit(_NEVER).alias(_DUE)
        partials = rows.group_by(HASH, *self.by, NUMBER, maintain_order=True).agg(
            *self.aggregation.partial_expressions,
            pl.len().cast(pl.Int64).alias(ROWS),
            pl.col(TIME).first().alias(FIRST_TIME),
            pl.col(TIME).max().alias(LAST_TIME),
            pl.max_horizontal(TIME, WATERMARK_SEEN).max().alias(KNOWN_TIME),
            due,
        )
        partials = partials.cast(
            {**dict(self.aggregation.schema), NUMBER: pl.Int64, _DUE: pl.Int64}
        )
        head = (pl.lit(value=False).alias(HEAD), pl.lit(None, pl.Int64).alias(SEEN))
        return partials.with_columns(*head).select(columns)

    def _merged(self, opened: pl.DataFrame, more: pl.DataFrame) -> pl.DataFrame:
        one = (
            pl.concat([opened, more])
            .group_by(HASH, *self.by, NUMBER, maintain_order=True)
            .agg(
                *self.aggregation.merge_expressions,
                pl.col(ROWS).sum(),
                pl.col(FIRST_TIME).first(),
                pl.col(LAST_TIME, KNOWN_TIME).max(),
                pl.col(_DUE, HEAD, SEEN).first(),
            )
        )
        return one.cast(dict(self.aggregation.schema)).select(opened.columns)

    # ── rows ────────────────────────────────────────────────────────────────────────────────

    @property
    def _shows_open(self) -> bool:
        """Whether windows that are not full have a row, too, from each batch that adds to them."""
        return self.emission.mode != "final" and self.emission.early is not None

    def _emitted(
        self,
        known: pl.DataFrame,
        complete: pl.DataFrame,
        rest: pl.DataFrame,
        rows: pl.DataFrame | None,
    ) -> pl.DataFrame | None:
        said = [complete]
        if self._shows_open and rows is not None:
            came = rows.select(HASH, *self.by).unique()
            opened = rest.filter(~pl.col(HEAD))
            said.append(opened.join(came, on=[HASH, *self.by], how="semi", nulls_equal=True))
        every = pl.concat(said).sort(NUMBER, HASH)
        if not every.height:
            return None
        changes = self.emission.mode == "retract"
        return self._changes(known, every) if changes else self.result_rows(every)

    def _changes(self, known: pl.DataFrame, windows: pl.DataFrame) -> pl.DataFrame:
        """Return rows of windows, each behind the retraction of the one that it replaces.

        An open window that is held had its row with the batch that last added to it.
        """
        key = [HASH, *self.by, NUMBER]
        at = windows.select(*key, pl.int_range(pl.len()).alias(_AT))
        shown = known.filter(~pl.col(HEAD)) if self._shows_open else known.clear()
        before = shown.join(at, on=key, how="inner", nulls_equal=True, maintain_order="left")
        said = [
            self.result_rows(part).with_columns(places, pl.lit(sign, pl.Int8).alias(DIFF))
            for part, places, sign in ((before, before[_AT], -1), (windows, at[_AT], 1))
        ]
        changes = pl.concat(said).sort(_AT, DIFF).drop(_AT)
        if not self.emission.marks_replaced:
            return changes
        return changes.with_columns((pl.col(DIFF) < 0).alias(REPLACED))

    def result_rows(self, windows: pl.DataFrame) -> pl.DataFrame:
        """Turn windows into result rows."""
        end = pl.from_epoch(pl.col(LAST_TIME) + 1, "us").dt.replace_time_zone("UTC")
        return windows.select(
            pl.from_epoch(FIRST_TIME, "us").dt.replace_time_zone("UTC").alias("window_start"),
            end.alias("window_end"),
            *self.by,
            *self.aggregation.results,
            NUMBER,
            pl.col(KNOWN_TIME).alias(TIME),
        )


def _timed_out(windows: pl.DataFrame) -> pl.DataFrame:
    return windows.with_columns(pl.max_horizontal(KNOWN_TIME, _DUE).alias(KNOWN_TIME))
