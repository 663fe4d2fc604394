"""True sliding windows: for every event, an aggregate over its key's events in the time up to it.

Each event at ``t`` is given the aggregate over its key's events in ``[t - size, t]``, both ends
included, as in SQL's ``RANGE BETWEEN size PRECEDING AND CURRENT ROW``: events at the same time
see each other. With L the allowed lateness, W the watermark and r the watermark of an event's own
split before it:

====================  ==========================================================================
its row is settled    when ``r > t + L``: rows of later events may still count it
an event is too late  when ``r > t + size + L``: all rows that may count it are settled
``final``             its row comes once ``W > t + L``, when nothing that it counts can come any more
``final`` corrected   its row comes once ``W > t``, and again for each late event that it counts
``update``            with each batch a row for each new event, and each that counts a new one
``retract``           the same, and rows that are replaced are retracted right before
events are kept       while a row that is not settled may count them: until ``W > t + L + size``
====================  ==========================================================================

Events lie in runs by slots of their time and are never written again, but where small runs are
folded. Overlapping ranges are aggregated by polars, which knows moving sums from recomputed ones;
keys with events that count in some of their rows only are joined pair by pair.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl

from millstream.durations import format_us
from millstream.kernels import late
from millstream.kernels.aggregates.event_order import with_order
from millstream.kernels.arrays import Int64s
from millstream.kernels.columns import constant
from millstream.kernels.frames import (
    DIFF,
    HASH,
    ORDER,
    REPLACED,
    SPLIT,
    TIME,
    WATERMARK_SEEN,
)
from millstream.kernels.operator import BatchContext, OperatorResult, Prepared
from millstream.kernels.queryable import QueryKeys, held_in_runs
from millstream.kernels.state.hash_order import sorted_distinct
from millstream.kernels.state.keyhash import Hashes, hash_columns
from millstream.kernels.state.ledger import StateLedger
from millstream.kernels.state.operator_state import OperatorState
from millstream.kernels.state.sorted_runs import EACH_ROW, SortedRuns
from millstream.kernels.time.watermarks import delayed_watermark
from millstream.kernels.windows.aggregate_operator import AggregateOperator

_SLOTS_PER_SIZE = 4
_SLOT = "__slot"
FROM = "__from"  # Int64: the earliest row that an event counts in
NEW = "__new"
_OLD_VALUE = "__old"
_KEY = "__key"  # UInt32: the number of a key among those at hand
_AT = "__at"
_LOOKS = "__looks"  # Int64: the time that a row looks back from
_HAS_ROW = pl.col(FROM) <= pl.col(TIME)


@dataclass(frozen=True)
class Sliding:
    """The time up to each event that its row looks back on, in microseconds."""

    size_us: int

    def __str__(self) -> str:
        return f"sliding({format_us(self.size_us)})"

    @property
    def rank(self) -> str | None:
        """The column that numbers the rows of events of a key at one time; None: such rows are equal."""
        return None


@dataclass(frozen=True)
class RankedSliding(Sliding):
    """Sliding windows that number the rows of events of a key at one time, from 1."""

    rank_column: str

    @property
    def rank(self) -> str:
        return self.rank_column


@dataclass(frozen=True)
class SlidingWindowOperator(AggregateOperator):
    """One operator of sliding windows. Durations in microseconds."""

    window: Sliding
    lateness_us: int

    @property
    def settles(self) -> bool:
        """Whether an event has no row before the watermark has passed it."""
        return self.emission.mode == "final"

    @property
    def settles_once(self) -> bool:
        """Whether an event has one row: then it leaves the ledger with that."""
        return self.settles and self.emission.late_policy != "correct"

    @property
    def waits_us(self) -> int:
        """How far the watermark must have passed an event for its first row."""
        return 0 if self.emission.late_policy == "correct" else self.lateness_us

    def output_watermark(self, watermark_us: int) -> int:
        """Return the watermark of the output: a row may be emitted again until its event is settled."""
        return delayed_watermark(watermark_us, self.lateness_us)

    @property
    def slot_us(self) -> int:
        """The width of a slot of state."""
        return max(1, (self.window.size_us + self.lateness_us) // _SLOTS_PER_SIZE)

    # ── before the shuffle ──────────────────────────────────────────────────────────────────

    def prepare(self, rows: pl.DataFrame, number: int = 0) -> Prepared:  # noqa: ARG002
        """Leave out what is too late already, and columns that are not needed."""
        if self.ordered:
            rows = with_order(rows)
        if self.side_output:
            return Prepared(rows)
        late_rows = 0
        if WATERMARK_SEEN in rows.columns:
            found = self._split_late(rows, rows[WATERMARK_SEEN].to_numpy())
            rows, late_rows = found.in_time, found.late.height
        wanted = [*self.columns_sent, WATERMARK_SEEN, SPLIT]
        return Prepared(rows.select(name for name in wanted if name in rows.columns), late_rows)

    def _split_late(self, rows: pl.DataFrame, seen_us: Int64s) -> late.LateSplit:
        """Divide events into those that some row still counts, and those that are too late for any."""
        deadline_us = rows[TIME].to_numpy() + self.window.size_us + self.lateness_us
        return late.split_late(rows, seen_us, deadline_us, late.SLIDING)

    @property
    def columns_sent(self) -> list[str]:
        """The columns that an event has in state."""
        order = [ORDER] if self.ordered else []
        return [*dict.fromkeys([*self.by, *sorted(self.aggregation.columns_read)]), TIME, *order]

    def pack(self, tables: Sequence[pl.DataFrame], number: int = 0) -> pl.DataFrame:  # noqa: ARG002
        """Concatenate tables."""
        return pl.concat(tables)

    # ── after the shuffle ───────────────────────────────────────────────────────────────────

    def process(
        self,
        state: OperatorState,
        inputs: Mapping[int, Sequence[pl.DataFrame]],
        context: BatchContext,
    ) -> OperatorResult:
        """Take the batch's events in; give the rows to emit."""
        result = OperatorResult(counts=Counter())
        events = self.in_time(inputs.get(0, ()), context, result)
        runs = state.runs("events", EACH_ROW)
        ledger = StateLedger(self.name, (runs,), result.counts["held"])
        if self.settles:
            result.rows = self._settled(runs, events, context, ledger)
        elif events is not None:
            result.rows = self._changed(runs, events)
        self._hold(runs, events, context)
        kept_from = context.watermark_us - self.lateness_us - self.window.size_us
        for slot in [slot for slot in runs.slots if (slot + 1) * self.slot_us <= kept_from]:
            let_go = runs.drop_slot(slot)
            ledger.events_out += 0 if self.settles_once else let_go
        ledger.check()
        return result

    def current_rows(
        self, state: OperatorState, keys: QueryKeys | None, watermark_us: int
    ) -> pl.DataFrame:
        """Return the rows that later events may still count in, as they are with all that has come."""
        held = held_in_runs(state.runs("events", EACH_ROW), keys, self.by)
        if not held:
            return self._no_rows()
        events = pl.concat(held).with_columns(pl.lit(0, pl.Int64).alias(NEW))
        values = self.values(events).filter(_HAS_ROW)
        settled_us = delayed_watermark(watermark_us, self.lateness_us)
        return self.rows(values.filter(pl.col(TIME) >= settled_us))

    def _no_rows(self) -> pl.DataFrame:
        types = {**dict(self.aggregation.keys), **dict(self.aggregation.schema), TIME: pl.Int64()}
        return self.rows(pl.DataFrame(schema=types))

    def in_time(
        self, tables: Sequence[pl.DataFrame], context: BatchContext, result: OperatorResult
    ) -> pl.DataFrame | None:
        kept, late_rows = [], []
        for rows in tables:
            seen_us = context.watermarks_seen(rows)
            found = self._split_late(rows.with_columns(pl.Series(WATERMARK_SEEN, seen_us)), seen_us)
            if self.side_output and found.late.height:
                late_rows.append(self._side_output(found.late))
            in_time = self.kept(found.in_time)
            result.counts.update(held=in_time.height, late=found.late.height)
            kept.append(in_time)
        if late_rows:
            result.late = pl.concat(late_rows)
        events = pl.concat(kept) if kept else None
        if events is None or not events.height:
            return None
        return events.with_columns(pl.Series(HASH, hash_columns(events, self.by, context.seed)))

    def kept(self, in_time: pl.DataFrame) -> pl.DataFrame:
        """Return what is kept of events."""
        return in_time.select(*self.event_columns)

    @property
    def event_columns(self) -> list[str | pl.Expr]:
        """What is kept of an event, besides the hash of its key."""
        first = pl.max_horizontal(TIME, pl.col(WATERMARK_SEEN) - self.lateness_us)
        return [*self.columns_sent, first.alias(FROM)]

    def _side_output(self, rows: pl.DataFrame) -> pl.DataFrame:
        """Return late events as the side output has them; the window is the event's own."""
        times_us, seen_us = rows[TIME].to_numpy(), rows[WATERMARK_SEEN].to_numpy()
        rows = rows.drop(WATERMARK_SEEN, SPLIT, strict=False)
        window_us = times_us - self.window.size_us, times_us
        return late.side_output(rows, seen_us - times_us, late.SLIDING, window_us)

    def _hold(self, runs: SortedRuns, events: pl.DataFrame | None, context: BatchContext) -> None:
        until = context.watermark_us - self.waits_us
        if events is not None:
            slots = events.with_columns((pl.col(TIME) // self.slot_us).alias(_SLOT))
            parts = slots.partition_by(_SLOT, as_dict=True, include_key=False)
            for (slot,), part in sorted(parts.items()):
                if self.settles_once:
                    runs.spend(int(slot), int((part[TIME] < until).sum()))
                runs.add(int(slot), part, lambda pieces: pieces, all_spent_goes=False)

    # ── rows ────────────────────────────────────────────────────────────────────────────────

    def _settled(
        self,
        runs: SortedRuns,
        events: pl.DataFrame | None,
        context: BatchContext,
        ledger: StateLedger,
    ) -> pl.DataFrame | None:
        """Return the rows of the events that the watermark has passed now, and of those corrected."""
        since, until = (
            at - self.waits_us for at in (context.watermark_before_us, context.watermark_us)
        )
        passed = pl.col(TIME).is_between(since, until, closed="left")
        due: list[pl.DataFrame] = []
        for slot in list(runs.slots):
            if slot * self.slot_us < until and (slot + 1) * self.slot_us > since:
                found = [rows.filter(passed) for rows in runs.scan(slot)]
                due += found
                if self.settles_once:
                    runs.spend(slot, sum(rows.height for rows in found))
        if events is not None:
            # Of the rows that were given already, those that count what came late.
            due.append(events.filter(pl.col(TIME) < until))
        if not due:
            return None
        settled = pl.concat(due)
        given = self._settled_rows(runs, settled, events, since, until)
        if self.settles_once:  # each with its row, unless it came too late to have one
            ledger.events_out += 0 if given is None else given.height
            ledger.events_out += settled.filter(~_HAS_ROW).height
        return given

    def _settled_rows(
        self,
        runs: SortedRuns,
        due: pl.DataFrame,
        events: pl.DataFrame | None,
        since: int,
        until: int,
    ) -> pl.DataFrame | None:
        """Return the rows since then of the keys of ``due``, and those before that count new events."""
        if not due.height:
            return None
        size_us = self.window.size_us
        first_us = int(due[TIME].min()) - size_us  # type: ignore[arg-type]
        last_us = int(due[TIME].max()) + size_us  # type: ignore[arg-type]
        known = self.known(runs, sorted_distinct(due[HASH].to_numpy()), first_us, last_us)
        parts = [] if known is None else [known.with_columns(pl.lit(0, pl.Int64).alias(NEW))]
        if events is not None:
            parts.append(events.with_columns(pl.lit(1, pl.Int64).alias(NEW)))
        values = self.values(pl.concat([part.select(parts[0].columns) for part in parts]))
        is_due = (pl.col(TIME) >= since) | (pl.col(NEW) > 0)
        values = values.filter(is_due & (pl.col(TIME) < until) & _HAS_ROW)
        return self.rows(values) if values.height else None

    def _changed(self, runs: SortedRuns, events: pl.DataFrame) -> pl.DataFrame | None:
        """Return the rows of new events, and of held events that count new ones."""
        size_us = self.window.size_us
        first_us = int(events[TIME].min()) - size_us  # type: ignore[arg-type]
        last_us = int(events[TIME].max()) + size_us  # type: ignore[arg-type]
        known = self.known(runs, sorted_distinct(events[HASH].to_numpy()), first_us, last_us)
        came = events.with_columns(pl.lit(1, pl.Int64).alias(NEW))
        if known is None:
            values = self.values(came).filter(_HAS_ROW)
            return self._signed(self.rows(values), 1) if values.height else None
        known = known.with_columns(pl.lit(0, pl.Int64).alias(NEW))
        order = [HASH, *self.by, TIME]
        known = known.sort(order, maintain_order=True)
        marked = pl.concat([known, came.select(known.columns)])
        marked = marked.with_columns((pl.col(NEW) == 1).alias(_OLD_VALUE))
        marked = marked.sort([*order, _OLD_VALUE], maintain_order=True)
        values = self.values(marked).with_columns(marked[_OLD_VALUE]).filter(_HAS_ROW)
        now = self.rows(values).with_columns(values[_OLD_VALUE])
        before = self.rows(self.values(known).filter(_HAS_ROW))
        return self._corrections(now, before, values[NEW] > 0)

    def _corrections(
        self, now: pl.DataFrame, before: pl.DataFrame, touched: pl.Series
    ) -> pl.DataFrame | None:
        """Pair the new rows of held events with their earlier ones."""
        was_known = ~now[_OLD_VALUE]
        rows = now.drop(_OLD_VALUE)
        changed = touched
        if self.emission.suppress_unchanged:
            same = constant(True, before.height, pl.Boolean)
            known = rows.filter(was_known)
            for name in self.aggregation.names:
                # Another name meanwhile: polars takes one such as "^a.*$" for a pattern.
                same &= known[name].alias("0").eq_missing(before[name].alias("0"))
            unchanged = np.zeros(now.height, np.bool_)
            unchanged[was_known.to_numpy()] = same.to_numpy()
            changed = touched & ~pl.Series(unchanged)
        rows = rows.with_columns(pl.int_range(pl.len()).alias(_AT))
        said = self._signed(rows.filter(changed), 1)
        if self.emission.mode != "retract":
            return said.drop(_AT) if said.height else None
        numbered = before.with_columns(rows.filter(was_known)[_AT])
        back = self._signed(numbered.filter(changed.filter(was_known)), -1)  # each has its new row
        both = pl.concat([back, said[back.columns]]).sort(_AT, DIFF)
        return both.drop(_AT) if both.height else None

    def _signed(self, rows: pl.DataFrame, sign: int) -> pl.DataFrame:
        if self.emission.mode != "retract":
            return rows
        signed = rows.with_columns(pl.lit(sign, pl.Int8).alias(DIFF))
        if not self.emission.marks_replaced:
            return signed
        return signed.with_columns(pl.lit(sign < 0).alias(REPLACED))

    def known(
        self, runs: SortedRuns, hashes: Hashes, first_us: int, last_us: int
    ) -> pl.DataFrame | None:
        """Return what is held of these keys in ``[first, last]``."""
        found = [
            rows.filter(pl.col(TIME).is_between(first_us, last_us))
            for slot in runs.slots
            if slot * self.slot_us <= last_us and (slot + 1) * self.slot_us > first_us
            for rows in runs.look_up(slot, hashes)
        ]
        found = [rows for rows in found if rows.height]
        return pl.concat(found) if found else None

    def values(self, events: pl.DataFrame) -> pl.DataFrame:
        """Aggregate over what each event looks back on; in the order of key and time."""
        ordered = events.sort([HASH, *self.by, TIME], maintain_order=True)
        # Keys go by a number: keys may share a hash, and polars gives groups in an order of its own.
        number = ordered.select(pl.struct(HASH, *self.by).rle_id().alias(_KEY)).to_series()
        ordered = ordered.with_row_index(_AT).with_columns(number)
        some_only = ordered.select((pl.col(FROM) > pl.col(TIME)).any().over(_KEY)).to_series()
        values = self._rolled(ordered.filter(~some_only))
        if some_only.any():
            values = pl.concat([values, self._joined_pairs(ordered.filter(some_only))])
        types = {n: t for n, t in self.aggregation.schema if n in values.columns}
        values = values.sort(_AT).cast(types)  # type: ignore[arg-type]
        return ordered.select(*self.row_columns).hstack(values.drop(_AT))

    @property
    def row_columns(self) -> list[str]:
        """The columns of an event that go with its values."""
        return [HASH, *self.by, TIME, FROM]

    def _rolled(self, events: pl.DataFrame) -> pl.DataFrame:
        """Aggregate for keys whose events count in all the rows that look back on them."""
        period = f"{self.window.size_us}i"
        rolled = events.rolling(TIME, period=period, closed="both", group_by=_KEY)
        made = rolled.agg(*self.partials).sort(_KEY, maintain_order=True)
        return made.drop(_KEY, TIME).hstack([events[_AT]])

    @property
    def partials(self) -> list[pl.Expr]:
        return [*self.aggregation.partial_expressions, pl.col(NEW).sum()]

    def _joined_pairs(self, events: pl.DataFrame) -> pl.DataFrame:
        """Aggregate for keys whose events do not count in all the rows that look back on them."""
        rows = events.select(_AT, _KEY, pl.col(TIME).alias(_LOOKS))
        pairs = rows.join(events.drop(_AT), on=_KEY, maintain_order="left_right")
        back_to = pl.col(_LOOKS) - self.window.size_us
        counts = (pl.col(FROM) <= pl.col(_LOOKS)) & (pl.col(TIME) >= back_to)
        made = pairs.filter(counts).group_by(_AT).agg(*self.partials)
        made = events.select(_AT).join(made, on=_AT, how="left", maintain_order="left")
        return made.select(*made.columns[1:], _AT)

    def rows(self, values: pl.DataFrame) -> pl.DataFrame:
        return values.select(
            *self._span(), *self.by, *self.aggregation.results, *self._rank(), TIME
        )

    def _rank(self) -> list[pl.Expr]:
        if self.window.rank is None:
            return []
        place = pl.int_range(1, pl.len() + 1, dtype=pl.Int64).over(HASH, *self.by, TIME)
        return [place.alias(self.window.rank)]

    def _span(self) -> list[pl.Expr]:
        start = pl.from_epoch(pl.col(TIME) - self.window.size_us, "us")
        end = pl.from_epoch(TIME, "us")
        names = ((start, "window_start"), (end, "window_end"))
        return [at.dt.replace_time_zone("UTC").alias(name) for at, name in names]

    def result_schema(self, events: pl.DataFrame) -> dict[str, pl.DataType]:
        """Find the types of the output, given the columns of no events."""
        own = {TIME: pl.Int64(), ORDER: pl.Int64(), HASH: pl.UInt64(), NEW: pl.Int64()}
        own |= {DIFF: pl.Int8()}
        none = pl.DataFrame(schema={**events.schema, **own})
        made = none.group_by(HASH, *self.by).agg(
            *self.aggregation.partial_expressions,
            pl.col(TIME).first(),
        )
        types = {n: t for n, t in self.aggregation.schema if n in made.columns}
        return dict(self.rows(made.cast(types)).drop(TIME).schema)  # type: ignore[arg-type]
