"""The join of two streams: pairs of rows with equal keys whose times are within an interval.

A pair matches when its keys are equal and ``lower <= right time - left time <= upper``, both inclusive. Its
time is the later of the two. With W the operator's watermark (the minimum over both inputs) and L the allowed
lateness of an input:

====================  ==========================================================================
a row                 what becomes of it
====================  ==========================================================================
late                  ``late``: the watermark that it saw is above its time + its input's L
in time               paired with every partner, those of its own batch, and those held; held until W is
                      above its *end*, as a partner may come until then
left, in time         its end is its time + upper + L of the right
right, in time        its end is its time - lower + L of the left
without a partner     of a left, right or full join: comes out once, at its own time, when W is above its end
                      (``final``); or in the batch of its arrival, and is taken back when the first
                      partner comes (``eager``)
with a null key       has no partner: comes out without one in the batch of its arrival, or is filtered
====================  ==========================================================================

Each pair comes out once, in the batch that brings the second of its rows: a row that is in time finds each
partner that came before it, as one is held while a row in time may match it. So the result depends on which
rows are in time, and not on the order in which inputs are read.

The watermark of the output is W less the longest that a row may be behind it:

- A pair comes out with a row that arrives. That is in time, so its time is at least W before the batch, less
  its L; and the pair's time is not earlier.
- A row without a partner comes out when W passes its end, or arrives after that. So its time is at least W
  before the batch, less the larger of its wait (end - time) and its L. What is taken back has the time of the
  row, and comes before its end.

Source: the interval join of Apache Flink (``IntervalJoinOperator``); KIP-633 and the outer joins of Kafka
Streams (``KStreamKStreamJoin``), which emit at a strictly later time; Spark's for the time of a pair.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import polars as pl

from millstream.kernels.arrays import Bools
from millstream.kernels.changes import concat_present
from millstream.kernels.columns import constant, filter_rows
from millstream.kernels.frames import DIFF, SPLIT, TIME, WATERMARK_SEEN
from millstream.kernels.joins.held_rows import HeldRows, numbered_families
from millstream.kernels.joins.interval_pairs import Pairs, pairs_within
from millstream.kernels.joins.join_input import JoinedColumns, null_keys
from millstream.kernels.joins.join_operator import JoinOperator, split_late, take_in_time
from millstream.kernels.operator import BatchContext, OperatorResult, Prepared
from millstream.kernels.state.layout import StateLayout
from millstream.kernels.state.ledger import StateLedger
from millstream.kernels.state.operator_state import OperatorState
from millstream.kernels.state.timers import slot_width_us
from millstream.kernels.time.watermarks import delayed_watermark

IntervalJoinKind = Literal["inner", "left", "right", "full"]
UnmatchedEmit = Literal["final", "eager"]

_LEFT, _RIGHT = 0, 1


@dataclass(frozen=True)
class IntervalJoin(JoinOperator):
    """The operator of the join of two streams. Durations in microseconds.

    ``left_lateness_us`` and ``right_lateness_us`` are the allowed lateness of the inputs. ``emit`` says when
    rows without a partner come out.
    """

    name: str
    how: IntervalJoinKind
    columns: JoinedColumns
    lower_us: int
    upper_us: int
    left_lateness_us: int = 0
    right_lateness_us: int = 0
    emit: UnmatchedEmit = "final"
    nulls_equal: bool = False

    @property
    def lateness_us(self) -> tuple[int, int]:
        """The allowed lateness of both inputs."""
        return self.left_lateness_us, self.right_lateness_us

    @property
    def waits_us(self) -> tuple[int, int]:
        """For how long after its time a left row waits for a partner, and a right one; may be below 0."""
        return self.upper_us + self.right_lateness_us, self.left_lateness_us - self.lower_us

    @property
    def keeps(self) -> tuple[bool, bool]:
        """Whether left rows without a partner are in the result, and right ones."""
        return self.how in ("left", "full"), self.how in ("right", "full")

    @property
    def slot_us(self) -> int:
        return slot_width_us(max(*self.waits_us, *self.lateness_us))

    @property
    def layout(self) -> StateLayout:
        return StateLayout(numbered=numbered_families("left", "right"))

    def output_watermark(self, watermark_us: int) -> int:
        """Return W less the longest that a row may be behind it: see the module's docstring."""
        waits = [wait for wait, kept in zip(self.waits_us, self.keeps, strict=True) if kept]
        return delayed_watermark(watermark_us, max(*self.lateness_us, *waits))

    # ── before the shuffle ──────────────────────────────────────────────────────────────────

    def prepare(self, rows: pl.DataFrame, number: int) -> Prepared:
        """Take keys, columns and time; leave out what is in no result, or late by what this batch read."""
        taken = self._taken(rows, number)
        filtered = 0
        if not self.nulls_equal and not self.keeps[number]:
            before = taken.height
            taken = taken.filter(~null_keys(taken, self.by))
            filtered = before - taken.height
        if WATERMARK_SEEN not in taken.columns:
            return Prepared(taken, counts={"filtered": filtered})
        found = split_late(taken, taken[WATERMARK_SEEN].to_numpy(), self.lateness_us[number])
        counts = {"filtered": filtered}
        return Prepared(found.in_time, found.late.height, counts, found.late_by_us)

    def _taken(self, rows: pl.DataFrame, number: int) -> pl.DataFrame:
        """Return what is taken of an input's rows."""
        return self.inputs[number].project(rows, (TIME, SPLIT, WATERMARK_SEEN))

    # ── after the shuffle ───────────────────────────────────────────────────────────────────

    def process(
        self,
        state: OperatorState,
        inputs: Mapping[int, Sequence[pl.DataFrame]],
        context: BatchContext,
    ) -> OperatorResult:
        """Emit the pairs that the batch completes and the rows that stay alone; hold what may match yet."""
        result = OperatorResult(counts=Counter())
        arrived = [self._in_time(inputs.get(n, ()), n, context, result) for n in (_LEFT, _RIGHT)]
        held = self._held(state, _LEFT), self._held(state, _RIGHT)
        batch = _IntervalBatch(self, held, context)
        ledger = StateLedger(self.name, (held[_LEFT].runs, held[_RIGHT].runs))
        batch.take(*arrived)
        ledger.events_in, ledger.events_out = batch.rows_in, batch.rows_out
        ledger.check()
        rows = concat_present(batch.made)
        if rows is not None:
            # Of one time, what is taken back goes first.
            result.rows = rows.sort(
                [TIME, DIFF] if DIFF in rows.columns else TIME, maintain_order=True
            )
        return result

    def _held(self, state: OperatorState, number: int) -> HeldRows:
        return HeldRows(
            state,
            ("left", "right")[number],
            self.waits_us[number],
            self.slot_us,
            marked=self.keeps[number],
            timed=self.keeps[number] and self.emit == "final",
        )

    def _in_time(
        self,
        tables: Sequence[pl.DataFrame],
        number: int,
        context: BatchContext,
        result: OperatorResult,
    ) -> pl.DataFrame:
        """Return the rows of an input that are in time, with the hash of the key; count the others."""
        taken = [self._nothing(number)]
        for table in sorted(tables, key=_first_split):
            found = take_in_time(table, self.lateness_us[number], context, result)
            taken.append(found.in_time.drop(SPLIT, WATERMARK_SEEN, strict=False))
        return self.hashed(pl.concat(taken), context.seed)

    def _nothing(self, number: int) -> pl.DataFrame:
        """Return no rows of an input, as they are in time."""
        return self.inputs[number].empty()


def _first_split(rows: pl.DataFrame) -> int:
    """Return by what tables are put in an order that is the same if the batch is repeated."""
    return int(rows[SPLIT][0]) if rows.height and SPLIT in rows.columns else -1


@dataclass
class _IntervalBatch:
    """One batch of one bucket: what it emits, and how many rows the state takes in and lets go."""

    join: IntervalJoin
    held: tuple[HeldRows, HeldRows]
    context: BatchContext
    made: list[pl.DataFrame] = field(default_factory=list)
    rows_in: int = 0
    rows_out: int = 0

    def take(self, left: pl.DataFrame, right: pl.DataFrame) -> None:
        """Pair new rows with each other and with those held, and hold them; let go of what is past."""
        join = self.join
        new = self._with_key(left, _LEFT), self._with_key(right, _RIGHT)
        lower_us, upper_us = join.lower_us, join.upper_us
        before = (
            self._near(new[_LEFT], _LEFT, new[_RIGHT], (-upper_us, -lower_us)),
            self._near(new[_RIGHT], _RIGHT, new[_LEFT], (lower_us, upper_us)),
        )
        every = pl.concat([before[_LEFT], new[_LEFT]]), pl.concat([before[_RIGHT], new[_RIGHT]])
        pairs = self._pairs(before, new, every)
        self._emit_pairs(every, pairs)
        for number, positions in enumerate(pairs):
            matched = np.zeros(every[number].height, np.bool_)
            matched[positions] = True
            known = before[number].height
            if join.keeps[number]:
                self._mark_held(number, filter_rows(before[number], matched[:known]))
            self._settle(number, new[number], matched[known:])

    def _with_key(self, rows: pl.DataFrame, number: int) -> pl.DataFrame:
        """Return the rows that may have a partner; emit the others, if they are in the result."""
        if not self.join.nulls_equal:
            null = null_keys(rows, self.join.by)
            if null.any():
                self._emit_alone(number, rows.filter(null))
                rows = rows.filter(~null)
        return self.held[number].numbered(rows) if self.join.keeps[number] else rows

    def _near(
        self, new: pl.DataFrame, number: int, others: pl.DataFrame, within_us: tuple[int, int]
    ) -> pl.DataFrame:
        """Return the held rows that may be partners of the other input's new rows."""
        found = self.held[number].near(others, *within_us) if others.height else None
        return new.clear() if found is None else found[new.columns]

    def _pairs(
        self,
        before: tuple[pl.DataFrame, pl.DataFrame],
        new: tuple[pl.DataFrame, pl.DataFrame],
        every: tuple[pl.DataFrame, pl.DataFrame],
    ) -> Pairs:
        """Return the pairs in which a row is new, by positions in ``every``: held rows, then new ones."""
        join = self.join
        of_new_left = pairs_within(new[_LEFT], every[_RIGHT], join.by, join.lower_us, join.upper_us)
        of_held_left = pairs_within(
            before[_LEFT], new[_RIGHT], join.by, join.lower_us, join.upper_us
        )
        return Pairs(
            np.concatenate((of_held_left.left, of_new_left.left + before[_LEFT].height)),
            np.concatenate((of_held_left.right + before[_RIGHT].height, of_new_left.right)),
        )

    # ── state ───────────────────────────────────────────────────────────────────────────────

    def _mark_held(self, number: int, matched: pl.DataFrame) -> None:
        """Mark held rows that have their first partner; take back that they were alone."""
        first = self.held[number].without_mark(matched)
        self.held[number].mark(first)
        if self.join.emit == "eager":
            self._emit_alone(number, first, diff=-1)

    def _settle(self, number: int, new: pl.DataFrame, matched: Bools) -> None:
        """Hold new rows, and emit all rows that are alone; let go of those that can have no partner."""
        held, join = self.held[number], self.join
        watermark_us = self.context.watermark_us
        if held.timed and (alone := held.take_due(self.context)) is not None:
            self._emit_alone(number, alone)
            self.rows_out += alone.height
        due = held.is_due(new, watermark_us)
        if join.keeps[number]:
            alone_now = ~matched if join.emit == "eager" else ~matched & due
            self._emit_alone(number, filter_rows(new, alone_now))
        waiting = filter_rows(new, ~due)
        held.add(waiting, matched[~due])
        self.rows_in += waiting.height
        self.rows_out += held.drop_expired(watermark_us, join.name)

    # ── output ──────────────────────────────────────────────────────────────────────────────

    def _emit_pairs(self, every: tuple[pl.DataFrame, pl.DataFrame], pairs: Pairs) -> None:
        if not len(pairs.left):
            return
        left, right = every[_LEFT][pairs.left], every[_RIGHT][pairs.right]
        times = np.maximum(left[TIME].to_numpy(), right[TIME].to_numpy())
        named = [left[name] for name in self.join.columns.left.names]
        named += [right[name] for name in self.join.columns.right.names]
        self._emit(pl.DataFrame([*named, pl.Series(TIME, times)]), 1)

    def _emit_alone(self, number: int, rows: pl.DataFrame, diff: int = 1) -> None:
        if rows.height:
            columns = self.join.columns
            alone = columns.of_left_alone if number == _LEFT else columns.of_right_alone
            self._emit(alone(rows, TIME), diff)

    def _emit(self, rows: pl.DataFrame, diff: int) -> None:
        signed = self.join.emit == "eager"
        self.made.append(
            rows.hstack([constant(diff, rows.height, pl.Int8, DIFF)]) if signed else rows
        )
