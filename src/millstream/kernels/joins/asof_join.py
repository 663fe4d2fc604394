"""The as-of join: each left row with the right row that is nearest in event time, of equal key.

The right input is a stream, of which each row is a quote, or the versions of a table, of which each is valid
from its time until the next version of its key, and a deletion until then leaves nothing.

A left row waits until nothing can come any more that it might match, and is then emitted once. Let L₀
and L₁ be the allowed lateness of the inputs, and T the tolerance if a later right row may match, else 0.
With W the operator's watermark, the minimum over both inputs, a left row of time t is emitted when

    W > t + D,    D = max(L₀, L₁) + T

A right row of time r is late if the watermark w of its partition before it is above r + L₁. If it could match a
left row, r ≤ t + T; so if it comes after the left row was emitted, W > r + L₁. Its partition's watermark is no less
than W, so the row is late. Hence all rows in time that a left row might match are here when it is emitted,
however the input was divided into batches.

What becomes of a late right row, ``late_versions`` says:

``drop``     it is left out
``keep``     it counts for left rows with t ≥ w - D. None of these was emitted before: W is not above w then
``correct``  it counts for left rows with t ≥ w - D - C, and those that were emitted are taken back and put right;
             a left row is held for that until W > t + D + C. A right row with w ≤ r + L₁ + C is in time then

Of the right rows that count for a left row the one with the latest time matches, so each has the right rows that
the records alone determine: those before a right row in its partition say from when on it counts. A right row in
time counts from its own time on, in this formula, too: w - D ≤ r.

After that no row with t < W - D follows (W - D - C, with corrections), so that is the watermark of the output, and
a left row of the output is never late for the next operator.

State holds the left rows that wait, and of the right ones those that some row may still match. Left rows to
be matched have times from the watermark of the output on; so of each key the newest version that counts
before it is kept, and all that count later (:mod:`millstream.kernels.joins.versions`). Where late ones count, a
deletion is kept for good: it goes on hiding versions of an earlier time that come after it.

Source: RisingWave's event-time temporal join (emitted once, when both watermarks have passed); Snodgrass,
"Developing Time-Oriented Database Applications in SQL", 1999 (valid time).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import polars as pl

from millstream.kernels import late
from millstream.kernels.arrays import Bools, Int64s
from millstream.kernels.changes import concat_present
from millstream.kernels.columns import constant, filter_rows
from millstream.kernels.frames import (
    DELETED,
    DIFF,
    HASH,
    ORDER,
    RELEASED,
    RELEASED_TIE,
    SPLIT,
    TIME,
    WATERMARK_SEEN,
)
from millstream.kernels.joins.asof_match import (
    NO_MATCH,
    Direction,
    key_numbers,
    nearest_rows,
    taken,
    with_match,
    without_deletions,
)
from millstream.kernels.joins.held_rows import HeldRows
from millstream.kernels.joins.join_input import JoinedColumns
from millstream.kernels.joins.join_operator import JoinOperator, take_in_time
from millstream.kernels.joins.versions import (
    TIE,
    VALID_FROM,
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
from millstream.kernels.state.timers import slot_width_us
from millstream.kernels.time.log_order import in_log_order
from millstream.kernels.time.watermarks import delayed_watermark

AsofKind = Literal["left", "inner"]

LateVersions = Literal["drop", "keep", "correct"]

_FAR_US = 400_000_000_000_000_000  # longer than from the year 1 to 9999
_SEEN = (SPLIT, WATERMARK_SEEN)


@dataclass(frozen=True)
class AsofJoin(JoinOperator):
    """The operator of an as-of join. Durations in microseconds.

    ``lateness_of_us`` has the lateness that each input allows; ``side_output``: late left rows go to the side
    output. ``late_versions`` says what becomes of late right rows, and ``corrected_us`` is C above; only rows before a
    left row can be late and count.
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
    late_versions: LateVersions = "drop"
    corrected_us: int = 0

    @property
    def ordered(self) -> bool:
        return True

    @property
    def wait_us(self) -> int:
        """How far the watermark must have passed a left row: D above."""
        ahead_us = 0 if self.direction == "backward" else self.tolerance_us or 0
        return max(self.lateness_of_us) + ahead_us

    @property
    def corrects(self) -> bool:
        return self.late_versions == "correct"

    def output_watermark(self, watermark_us: int) -> int:
        """Return W - D - C: no left row with an earlier time follows."""
        return delayed_watermark(watermark_us, self.wait_us + self.corrected_us)

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
        """Emit the left rows whose time has come, each with its match, and corrections; hold the others."""
        result = OperatorResult(counts=Counter())
        batch = _AsofBatch(self, state, context)
        left = self._in_time(inputs.get(0, ()), context, result)
        right = self._versions(inputs.get(1, ()), context, result)
        batch.take(left, right)
        rows = concat_present(batch.made)
        if rows is not None and self.corrects:  # of one time, what is taken back goes first
            rows = rows.sort(TIME, RELEASED_TIE, DIFF, maintain_order=True)
        result.rows = rows
        return result

    def _in_time(
        self, tables: Sequence[pl.DataFrame], context: BatchContext, result: OperatorResult
    ) -> pl.DataFrame | None:
        """Return the left rows that are in time; count all."""
        left, in_time = self.columns.left, []
        for rows in tables:
            found = take_in_time(rows, self.lateness_of_us[0], context, result)
            if found.late.height and self.side_output:
                self._give_late(found, result)
            in_time.append(found.in_time[[*left.keys, *left.names, TIME, TIE]])
        return concat_present(in_time)

    def _versions(
        self, tables: Sequence[pl.DataFrame], context: BatchContext, result: OperatorResult
    ) -> pl.DataFrame | None:
        """Return the right rows that count for some left row, and from which time on; count all."""
        right, found = self.columns.right, []
        for rows in tables:
            lateness_us = self.lateness_of_us[1] + self.corrected_us
            in_time = take_in_time(rows, lateness_us, context, result).in_time
            counting = in_time if self.late_versions == "drop" else rows
            valid_from = counting[TIME].to_numpy()
            if self.late_versions != "drop":
                known_us = context.watermarks_seen(rows) - (self.wait_us + self.corrected_us)
                valid_from = np.maximum(valid_from, known_us)
            columns = counting[[*right.keys, *right.names, TIME, TIE, DELETED]]
            found.append(columns.hstack([pl.Series(VALID_FROM, valid_from)]))
        return concat_present(found)

    def _give_late(self, found: late.LateSplit, result: OperatorResult) -> None:
        rows = late.side_output(found.late, found.late_us, late.JOIN)
        placed = SPLIT in rows.columns
        rows = rows.drop(*self.by).rename({TIE: ORDER}) if placed else rows.drop(*self.by, TIE)
        every = rows if result.late is None else pl.concat([result.late, rows], how="diagonal")
        result.late = in_log_order(every)

    def horizon(self, until_us: int) -> Horizon:
        """Return which versions left rows after a time may match."""
        oldest_us = None if self.tolerance_us is None else until_us + 1 - self.tolerance_us
        return Horizon(until_us, oldest_us, newest=self.direction != "forward")

    # ── pairs ───────────────────────────────────────────────────────────────────────────────

    def matches(self, left: pl.DataFrame, right: pl.DataFrame) -> Int64s:
        """Return for each left row the position of its match, or ``NO_MATCH``."""
        of_left, of_right = key_numbers(left, right, self.by, nulls_equal=self.nulls_equal)
        matches = nearest_rows(
            (of_left, left[TIME].to_numpy()),
            (of_right, right[TIME].to_numpy(), right[TIE].to_numpy()),
            direction=self.direction,
            allow_equal=self.allow_equal,
            tolerance_us=self.tolerance_us,
            valid_from=right[VALID_FROM].to_numpy(),
        )
        return without_deletions(matches, right[DELETED])

    def joined(
        self, left: pl.DataFrame, right: pl.DataFrame, matches: Int64s, diff: int = 1
    ) -> pl.DataFrame:
        """Return left rows with their matches."""
        if self.how == "inner":
            left, matches = with_match(left, matches)
        columns = [
            *(left[name] for name in self.columns.left.names),
            *taken(right, self.columns.right.names, matches),
            left[TIME],
            left[TIME].alias(RELEASED),
            left[TIE].alias(RELEASED_TIE),
        ]
        if self.corrects:
            columns.append(constant(diff, left.height, pl.Int8, DIFF))
        return pl.DataFrame(columns)


_RIGHT: Mapping[str, pl.DataType] = {
    TIE: pl.Int64(),
    DELETED: pl.Boolean(),
    VALID_FROM: pl.Int64(),
}


@dataclass
class _AsofBatch:
    """One batch of one bucket: what it emits, and how its state changes."""

    join: AsofJoin
    state: OperatorState
    context: BatchContext
    made: list[pl.DataFrame] = field(default_factory=list)

    def __post_init__(self) -> None:
        join = self.join
        self.waiting = WaitingRows(
            self.state, "left", lambda rows: hash_columns(rows, join.by, self.context.seed)
        )
        self.versions = Versions(self.state, "right", join.by, join.late_versions != "drop")
        wait_us = join.wait_us + join.corrected_us
        self.emitted = HeldRows(
            self.state, "emitted", wait_us, slot_width_us(wait_us), marked=False, timed=False
        )
        families = [self.waiting.runs, self.versions.runs]
        if join.corrects:
            families.append(self.emitted.runs)
        self.ledger = StateLedger(join.name, tuple(families))

    def take(self, left: pl.DataFrame | None, right: pl.DataFrame | None) -> None:
        """Correct what was emitted, emit what is due, and hold what is needed."""
        join, ledger, context = self.join, self.ledger, self.context
        right = None if right is None else join.hashed(right, context.seed)
        if join.corrects and right is not None:
            self._correct(right)
        due = self._due(left)
        if due is not None:
            self._emit(due, right)
        if join.corrects:
            ledger.events_out += self.emitted.drop_expired(context.watermark_us, join.name)
        if right is not None:
            until_us = join.output_watermark(context.watermark_us) - 1
            ledger.events_in += self.versions.add(right, join.horizon(until_us))
            ledger.events_out += self.versions.left
        ledger.check()

    def _due(self, left: pl.DataFrame | None) -> pl.DataFrame | None:
        """Return the left rows whose time has come, and let the others wait."""
        until_us = delayed_watermark(self.context.watermark_us, self.join.wait_us) - 1
        return self.waiting.due(left, until_us, self.ledger)

    def _emit(self, due: pl.DataFrame, right: pl.DataFrame | None) -> None:
        """Emit left rows with their matches, in the order of time; hold those that may be corrected."""
        join = self.join
        due = join.hashed(due.sort(TIME, TIE, maintain_order=True), self.context.seed)
        known = self._known(due[HASH], right)
        self._make(join.joined(due, known, join.matches(due, known)))
        if join.corrects:
            held = filter_rows(due, ~self.emitted.is_due(due, self.context.watermark_us))
            self.emitted.add(held)
            self.ledger.events_in += held.height

    def _correct(self, right: pl.DataFrame) -> None:
        """Take back the rows that were emitted with another match than they have now, and put them right."""
        join = self.join
        found = self._near(right)
        if found is None:
            return
        before = self._known(found[HASH], None)
        after = self._known(found[HASH], right)  # in which those before have the same places
        was, now = join.matches(found, before), join.matches(found, after)
        changed = was != now
        found, was, now = filter_rows(found, changed), was[changed], now[changed]
        differs = _differs(after, join.columns.right.names, was, now)
        found, was, now = filter_rows(found, differs), was[differs], now[differs]
        self._make(join.joined(found, after, was, -1))
        self._make(join.joined(found, after, now))

    def _near(self, right: pl.DataFrame) -> pl.DataFrame | None:
        """Return the left rows that were emitted and may match new right rows, in the order of time."""
        join = self.join
        reach_us = _FAR_US if join.tolerance_us is None else join.tolerance_us
        counting = right.select(HASH, pl.col(VALID_FROM).alias(TIME))
        found = self.emitted.near(counting, 0, reach_us)
        if found is None:
            return None
        # The versions of those before that may be forgotten, and no new one counts for them.
        first_us = join.output_watermark(self.context.watermark_before_us)
        found = found.filter(found[TIME] >= first_us)
        return found.sort(TIME, TIE, maintain_order=True) if found.height else None

    def _known(self, hashes: pl.Series, right: pl.DataFrame | None) -> pl.DataFrame:
        """Return the versions with these hashes, and then the new ones."""
        own = self.join.columns.right
        wanted = [*self.join.by, *own.names, TIME, TIE, DELETED, VALID_FROM]
        held = self.versions.look_up(hashes.to_numpy())
        tables = [table[wanted] for table in (held, right) if table is not None]
        return pl.concat(tables or [own.empty(**_RIGHT)[wanted]])

    def _make(self, rows: pl.DataFrame) -> None:
        if rows.height:
            self.made.append(rows)


def _differs(rows: pl.DataFrame, names: Sequence[str], one: Int64s, other: Int64s) -> Bools:
    """Return where two rows, or a row and none, differ in what a joined row has of them."""
    differs: Bools = (one == NO_MATCH) != (other == NO_MATCH)
    for ours, theirs in zip(taken(rows, names, one), taken(rows, names, other), strict=True):
        differs |= ours.alias("0").ne_missing(theirs.alias("0")).to_numpy()
    return differs
