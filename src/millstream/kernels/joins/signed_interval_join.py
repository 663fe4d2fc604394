"""The join of two streams within an interval, of rows that may be taken back.

Which pairs match, and until when a row without a partner waits, is as in :mod:`millstream.kernels.joins.interval_join`. The
rows are signed changes, and so is the result: it is, after each batch, that of the join over the rows that are there
by then. With ΔL and ΔR the changes of a batch, L and R the rows before it, and L' and R' those after it:

=====================  =============================================================================
of the result          its change
=====================  =============================================================================
pairs                  ΔL ⋈ R' + L ⋈ ΔR
rows without partner   those of L' without one in R' that are due by now (``eager``: all), less those of L
                       without one in R that were due before the batch; and the same of the right input
=====================  =============================================================================

Both are computed over the keys that the batch touches, or for which a timer has come. A row is due, as there, when W is
above its end. It is held for longer: until nothing can change it (its own lateness, and a partner's), and, as a partner
is asked about whenever the other input's rows are judged, until these are due. State are the rows of both inputs, as
signed changes in slots of time, which go slot by slot.

Source: Budiu et al., "DBSP" (arXiv 2203.16684), for the change of a join.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import polars as pl

from millstream.kernels.changes import consolidate, total_weight, with_diff, with_weight
from millstream.kernels.columns import filter_rows
from millstream.kernels.frames import DIFF, HASH, SPLIT, TIME, WATERMARK_SEEN, WEIGHT
from millstream.kernels.joins.interval_join import IntervalJoin
from millstream.kernels.joins.interval_pairs import Pairs, pairs_within
from millstream.kernels.joins.join_input import null_keys
from millstream.kernels.operator import BatchContext, OperatorResult
from millstream.kernels.state.arrangement import nothing_owed
from millstream.kernels.state.hash_order import sorted_distinct
from millstream.kernels.state.layout import StateLayout
from millstream.kernels.state.ledger import StateLedger
from millstream.kernels.state.operator_state import OperatorState
from millstream.kernels.state.timed_arrangement import TimedArrangement
from millstream.kernels.state.timers import Timers

_LEFT, _RIGHT = 0, 1
_FAMILIES = ("left", "right")
_ALWAYS_US = -(1 << 62)
_HIDDEN = (TIME, WEIGHT, HASH)


@dataclass(frozen=True)
class SignedIntervalJoin(IntervalJoin):
    """The operator. Its options are those of the join of rows that are only added."""

    @property
    def held_us(self) -> tuple[int, int]:
        """For how long after its time a left row is held, and a right one."""
        span_us = self.upper_us - self.lower_us
        found = []
        for number in (_LEFT, _RIGHT):
            own_us = self.lateness_us[number]
            asked_us = span_us + own_us if self.keeps[1 - number] else 0
            found.append(max(own_us, self.waits_us[number], asked_us))
        return found[0], found[1]

    @property
    def layout(self) -> StateLayout:
        return StateLayout()

    def _taken(self, rows: pl.DataFrame, number: int) -> pl.DataFrame:
        return with_weight(self.inputs[number].project(rows, (TIME, DIFF, SPLIT, WATERMARK_SEEN)))

    def _nothing(self, number: int) -> pl.DataFrame:
        return self.inputs[number].empty(**{WEIGHT: pl.Int64()})

    def process(
        self,
        state: OperatorState,
        inputs: Mapping[int, Sequence[pl.DataFrame]],
        context: BatchContext,
    ) -> OperatorResult:
        """Emit how the result changes with the batch; hold the changes."""
        result = OperatorResult(counts=Counter())
        batch = _SignedBatch(self, state, context)
        arrived = [self._in_time(inputs.get(n, ()), n, context, result) for n in (_LEFT, _RIGHT)]
        batch.take(*(consolidate(rows) for rows in arrived))
        made = [rows for rows in batch.made if rows.height]
        if made:
            changes = consolidate(pl.concat(made)).drop(HASH)
            rows = with_diff(changes).sort(TIME, DIFF, maintain_order=True)
            result.rows = rows if rows.height else None
        return result


@dataclass
class _SignedBatch:
    """One batch of one bucket: what it emits, and how its state changes."""

    join: SignedIntervalJoin
    state: OperatorState
    context: BatchContext
    made: list[pl.DataFrame] = field(default_factory=list)

    def _held(self, number: int) -> TimedArrangement:
        return TimedArrangement(self.state, _FAMILIES[number], self.join.slot_us)

    def _timers(self, number: int) -> Timers:
        return Timers(self.state, f"{_FAMILIES[number]}.due", self.join.slot_us)

    @property
    def _waits(self) -> list[int]:
        """The inputs whose rows without a partner come out when they are due."""
        kept = enumerate(self.join.keeps) if self.join.emit == "final" else ()
        return [number for number, keeps in kept if keeps]

    def take(self, left: pl.DataFrame, right: pl.DataFrame) -> None:
        """Compute what the changes change, and hold them; forget what nothing can change any more."""
        held = self._held(_LEFT), self._held(_RIGHT)
        ledger = StateLedger(self.join.name, (held[_LEFT].runs, held[_RIGHT].runs))
        changes = self._with_key(left, _LEFT), self._with_key(right, _RIGHT)
        due = [self._timers(number).due(self.context.watermark_us - 1) for number in self._waits]
        touched = sorted_distinct(
            np.concatenate([*(rows[HASH].to_numpy() for rows in changes), *due])
        )
        if len(touched):
            before = (
                self._known(held[_LEFT], touched, changes[_LEFT]),
                self._known(held[_RIGHT], touched, changes[_RIGHT]),
            )
            self._change(before, changes)
        for number, rows in enumerate(changes):
            ledger.events_in += total_weight(rows)
            self._wait(number, rows)
            until_us = self.context.watermark_us - self.join.held_us[number]
            ledger.events_out += held[number].advance(rows, until_us)
        ledger.check()

    def _with_key(self, rows: pl.DataFrame, number: int) -> pl.DataFrame:
        """Return the rows that may have a partner; emit the others, which are alone at once."""
        if self.join.nulls_equal:
            return rows
        null = null_keys(rows, self.join.by)
        if not null.any():
            return rows
        if self.join.keeps[number]:
            self._make_alone(number, rows.filter(null))
        return rows.filter(~null)

    def _known(
        self,
        held: TimedArrangement,
        touched: np.ndarray[tuple[int], np.dtype[np.uint64]],
        like: pl.DataFrame,
    ) -> pl.DataFrame:
        found = held.look_up(touched, _ALWAYS_US)
        return like.clear() if found is None else found[like.columns]

    def _change(
        self, before: tuple[pl.DataFrame, pl.DataFrame], changes: tuple[pl.DataFrame, pl.DataFrame]
    ) -> None:
        after = tuple(
            nothing_owed(consolidate(pl.concat([was, change])))
            for was, change in zip(before, changes, strict=True)
        )
        self._make_pairs(changes[_LEFT], after[_RIGHT])
        self._make_pairs(before[_LEFT], changes[_RIGHT])
        for number in (_LEFT, _RIGHT):
            if not self.join.keeps[number]:
                continue
            was = self._alone(number, before, self.context.watermark_before_us)
            now = self._alone(number, (after[_LEFT], after[_RIGHT]), self.context.watermark_us)
            self._make_alone(number, was.with_columns(-pl.col(WEIGHT)))
            self._make_alone(number, now)

    def _pairs(self, left: pl.DataFrame, right: pl.DataFrame) -> Pairs:
        join = self.join
        return pairs_within(left, right, join.by, join.lower_us, join.upper_us)

    def _alone(
        self, number: int, rows: tuple[pl.DataFrame, pl.DataFrame], watermark_us: int
    ) -> pl.DataFrame:
        """Return the rows of an input that are due and have no partner."""
        own = rows[number]
        alone = np.ones(own.height, np.bool_)
        alone[self._pairs(*rows)[number]] = False
        if self.join.emit == "final":
            alone &= own[TIME].to_numpy() + self.join.waits_us[number] < watermark_us
        return filter_rows(own, alone)

    def _wait(self, number: int, rows: pl.DataFrame) -> None:
        """Set timers for rows that will be due."""
        if number in self._waits and rows.height:
            ends = rows[TIME].to_numpy() + self.join.waits_us[number]
            later = ends >= self.context.watermark_us
            self._timers(number).add(ends[later], rows[HASH].to_numpy()[later])

    # ── output ──────────────────────────────────────────────────────────────────────────────

    def _make_pairs(self, left: pl.DataFrame, right: pl.DataFrame) -> None:
        pairs = self._pairs(left, right)
        if not len(pairs.left):
            return
        ours, theirs = left[pairs.left], right[pairs.right]
        times = np.maximum(ours[TIME].to_numpy(), theirs[TIME].to_numpy())
        weights = ours[WEIGHT].to_numpy() * theirs[WEIGHT].to_numpy()
        columns = self.join.columns
        named = [ours[name] for name in columns.left.names]
        named += [theirs[name] for name in columns.right.names]
        hidden = [pl.Series(TIME, times), pl.Series(WEIGHT, weights), ours[HASH]]
        self.made.append(pl.DataFrame([*named, *hidden]))

    def _make_alone(self, number: int, rows: pl.DataFrame) -> None:
        columns = self.join.columns
        alone = columns.of_left_alone if number == _LEFT else columns.of_right_alone
        self.made.append(alone(rows, *_HIDDEN))
