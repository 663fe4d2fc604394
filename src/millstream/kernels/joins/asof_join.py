"""The as-of join: each left row with the right row that is nearest in event time, of equal key.

The right input is a stream, of which each row is a quote, or the versions of a table, of which each is valid
from its time until the next version of its key, and a deletion until then leaves nothing.

A left row waits until nothing can come any more that it might match, and is then emitted once. Let L₀
and L₁ be the allowed lateness of the inputs, and T the tolerance if a later right row may match, else 0.
With W the operator's watermark, the minimum over both inputs, a left row of time t is emitted when

    W > t + D,    D = max(L₀, L₁) + T

A right row of time r is taken as long as the watermark of its partition is not above r + L₁. If the row could
match, r ≤ t + T; so if it comes after the left row was emitted, W > r + L₁. Its partition's watermark is no less
than W, so the row is late. Hence all rows in time that a left row might match are here when it is emitted,
however the input was divided into batches. What is late is counted, and corrects nothing.

After that no row with t < W - D follows, so W - D is the watermark of the output, and a left row of the
output is never late for the next operator.

State holds the left rows that wait, and of the right ones those that some row may still match. Left rows to
be matched have times t ≥ W - D; so of each key the newest version before W - D is kept, and all later ones
(:mod:`millstream.kernels.joins.versions`).

Source: RisingWave's event-time temporal join (emitted once, when both watermarks have passed); Snodgrass,
"Developing Time-Oriented Database Applications in SQL", 1999 (valid time).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import polars as pl

from millstream.kernels import late
from millstream.kernels.arrays import Int64s
from millstream.kernels.changes import concat_present
from millstream.kernels.frames import (
    DELETED,
    ORDER,
    RELEASED,
    RELEASED_TIE,
    SPLIT,
    TIME,
    WATERMARK_SEEN,
)
from millstream.kernels.joins.asof_match import (
    Direction,
    key_numbers,
    nearest_rows,
    taken,
    with_match,
    without_deletions,
)
from millstream.kernels.joins.join_input import JoinedColumns
from millstream.kernels.joins.join_operator import JoinOperator, take_in_time
from millstream.kernels.joins.versions import (
    TIE,
    Horizon,
    Versions,
    row_order,
    with_deletions,
)
from millstream.kernels.joins.waiting_rows import WaitingRows
from millstream.kernels.operator import BatchContext, OperatorResult, Prepared
from millstream.kernels.state.keyhash import hash_columns
from millstream.kernels.state.ledger import StateLedger
from millstream.kernels.state.operator_state import OperatorState
from millstream.kernels.time.log_order import in_log_order
from millstream.kernels.time.watermarks import delayed_watermark

AsofKind = Literal["left", "inner"]

_SEEN = (SPLIT, WATERMARK_SEEN)


@dataclass(frozen=True)
class AsofJoin(JoinOperator):
    """The operator of an as-of join. Durations in microseconds.

    ``lateness_of_us`` has the lateness that each input allows; ``side_output``: late left rows go to the side
    output.
    """

    name: str
    how: AsofKind
    columns: JoinedColumns
    direction: Direction
    tolerance_us: int | None
    allow_equal: bool
    nulls_equal: bool
    lateness_of_us: tuple[int, int]
    side_output: bool = False

    @property
    def ordered(self) -> bool:
        return True

    @property
    def wait_us(self) -> int:
        """How far the watermark must have passed a left row: D above."""
        ahead_us = 0 if self.direction == "backward" else self.tolerance_us or 0
        return max(self.lateness_of_us) + ahead_us

    def output_watermark(self, watermark_us: int) -> int:
        """Return W - D: no left row with an earlier time follows."""
        return delayed_watermark(watermark_us, self.wait_us)

    # ── before the shuffle ──────────────────────────────────────────────────────────────────

    def prepare(self, rows: pl.DataFrame, number: int) -> Prepared:
        """Take keys, columns, time and place in the log; leave out rows that can be in no result."""
        hidden = (TIME, *_SEEN, DELETED) if number else (TIME, *_SEEN)
        prepared = self.inputs[number].project(rows, hidden)
        prepared = prepared.hstack([row_order(rows)])
        if number:
            prepared = with_deletions(prepared, self.inputs[number].names)
        if self.nulls_equal or (self.how == "left" and not number):
            return Prepared(prepared)
        return self.without_null_keys(prepared)

    # ── after the shuffle ───────────────────────────────────────────────────────────────────

    def process(
        self,
        state: OperatorState,
        inputs: Mapping[int, Sequence[pl.DataFrame]],
        context: BatchContext,
    ) -> OperatorResult:
        """Emit the left rows whose time has come, each with its match; hold the others, and versions."""
        result = OperatorResult(counts=Counter())
        waiting, versions = WaitingRows(state, "left"), Versions(state, "right", self.by)
        ledger = StateLedger(self.name, (waiting.runs, versions.runs))
        left, right = (self._in_time(inputs.get(n, ()), n, context, result) for n in (0, 1))
        until_us = self.output_watermark(context.watermark_us) - 1
        held = waiting.take(until_us)
        ledger.events_out += 0 if held is None else held.height
        due = held
        if left is not None:
            comes_due = left[TIME] <= until_us
            due = concat_present([held, left.filter(comes_due)])
            kept = left.filter(~comes_due)
            waiting.add(kept)
            ledger.events_in += kept.height
        if due is not None:
            result.rows = self._joined(due, versions, right, context.seed)
        if right is not None:
            ledger.events_in += versions.add(
                self.hashed(right, context.seed), self._horizon(until_us)
            )
            ledger.events_out += versions.left
        ledger.check()
        return result

    def _in_time(
        self,
        tables: Sequence[pl.DataFrame],
        number: int,
        context: BatchContext,
        result: OperatorResult,
    ) -> pl.DataFrame | None:
        """Return the rows of an input that are in time; count all."""
        in_time: list[pl.DataFrame] = []
        for rows in tables:
            found = take_in_time(rows, self.lateness_of_us[number], context, result)
            if found.late.height and self.side_output and not number:
                self._give_late(found, result)
            own = self.inputs[number]
            hidden = (TIME, TIE, DELETED) if number else (TIME, TIE)
            in_time.append(found.in_time[[*own.keys, *own.names, *hidden]])
        return concat_present(in_time)

    def _give_late(self, found: late.LateSplit, result: OperatorResult) -> None:
        rows = late.side_output(found.late, found.late_us, late.JOIN)
        placed = SPLIT in rows.columns
        rows = rows.drop(*self.by).rename({TIE: ORDER}) if placed else rows.drop(*self.by, TIE)
        every = rows if result.late is None else pl.concat([result.late, rows], how="diagonal")
        result.late = in_log_order(every)

    def _horizon(self, until_us: int) -> Horizon:
        oldest_us = None if self.tolerance_us is None else until_us + 1 - self.tolerance_us
        return Horizon(until_us, oldest_us, newest=self.direction != "forward")

    # ── pairs ───────────────────────────────────────────────────────────────────────────────

    def _joined(
        self, left: pl.DataFrame, versions: Versions, new: pl.DataFrame | None, seed: int
    ) -> pl.DataFrame | None:
        """Return left rows with their matches, in the order of time."""
        left = left.sort(TIME, TIE, maintain_order=True)
        known = versions.look_up(hash_columns(left, self.by, seed))
        wanted = [*self.by, *self.columns.right.names, TIME, TIE, DELETED]
        tables = [table[wanted] for table in (known, new) if table is not None]
        right = pl.concat(tables or [self.columns.right.empty(**_RIGHT)])
        matches = self._matches(left, right)
        if self.how == "inner":
            left, matches = with_match(left, matches)
        return pl.DataFrame(
            [
                *(left[name] for name in self.columns.left.names),
                *taken(right, self.columns.right.names, matches),
                left[TIME],
                left[TIME].alias(RELEASED),
                left[TIE].alias(RELEASED_TIE),
            ]
        )

    def _matches(self, left: pl.DataFrame, right: pl.DataFrame) -> Int64s:
        of_left, of_right = key_numbers(left, right, self.by, nulls_equal=self.nulls_equal)
        matches = nearest_rows(
            (of_left, left[TIME].to_numpy()),
            (of_right, right[TIME].to_numpy(), right[TIE].to_numpy()),
            direction=self.direction,
            allow_equal=self.allow_equal,
            tolerance_us=self.tolerance_us,
        )
        return without_deletions(matches, right[DELETED])


_RIGHT: Mapping[str, pl.DataType] = {TIE: pl.Int64(), DELETED: pl.Boolean()}
