"""Sliding windows in panes, and over rows that are taken back.

A *row* here is a key and a time at which it has events; it is emitted once for each of them. Its value is the
aggregate over the events that count in it, each with its sign. So a retraction (``__diff`` -1) is one more
event: it takes one from the times that a row is emitted, and its values from the rows that look back on it. Which
rows those are follows from the same deadlines as for an event (see :mod:`.sliding_windows`): a retraction that comes
when its own row is settled leaves that row, and corrects the later ones that are not settled. With nothing left of
a row, it is retracted.

With W the watermark, L the allowed lateness and r the watermark that an event saw, the row at ``t`` has these panes:

==========  ====================================================================================
early       while ``W <= t``, with every batch that changes it: events with ``r <= t``
on time     once ``W > t``: events with ``r <= t``, all of which have been read by then
late        after that, with every batch that changes it: all that count in it
==========  ====================================================================================

Where panes are not named and come early with every batch, early ones have all that count in the row. ``final``
has one pane, once ``W > t + L``.

In each batch the rows that it can have changed are computed from the events before it and from those after it,
and the difference is emitted. It costs two aggregations over what is held of the keys that the batch touches, in the
time that the window looks back and on from the batch's events.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import polars as pl

from millstream.kernels.arrays import Bools, Int64s
from millstream.kernels.changes import (
    check_nothing_owed,
    consolidate,
    divide_by,
    total_weight,
    with_diff,
    with_weight,
)
from millstream.kernels.columns import filter_rows
from millstream.kernels.frames import DIFF, HASH, REPLACED, TIME, WATERMARK_SEEN, WEIGHT
from millstream.kernels.operator import BatchContext, OperatorResult, Prepared
from millstream.kernels.queryable import KeyColumns
from millstream.kernels.state.hash_order import sorted_distinct
from millstream.kernels.state.keyhash import Hashes
from millstream.kernels.state.ledger import StateLedger
from millstream.kernels.state.operator_state import OperatorState
from millstream.kernels.state.sorted_runs import EACH_ROW, SortedRuns
from millstream.kernels.windows.pane_values import PANE_COLUMNS
from millstream.kernels.windows.sliding_windows import FROM, NEW, SlidingWindowOperator

TIMES = "__times"  # Int64: how many times a row is emitted
_COUNTED = "__counted"  # Int64: how many events count in it
STAGE = "__stage"  # Int64: the order of what is said of a row in a batch
BEFORE, ON_TIME, AFTER = 0, 1, 2
_EMITTED = "__emitted"  # Int64: how many panes of a row have come out
_KIND = "__kind"  # String: of the last of them
_ROW = "__row"  # UInt32: the number of a row among those at hand
_HERE = "__here"
_MORE = "__more"


@dataclass(frozen=True)
class SlidingPaneOperator(SlidingWindowOperator):
    """An operator of sliding windows that computes what it has emitted anew, and emits the difference."""

    @property
    def query_key(self) -> KeyColumns | None:
        return None

    @property
    def weighted(self) -> bool:
        """Whether events may be taken back."""
        return self.aggregation.weighted

    @property
    def fires_early(self) -> bool:
        """Whether rows come out before the watermark has passed their time."""
        return not self.settles and self.emission.early is not None

    @property
    def defers_late(self) -> bool:
        """Whether events that saw a later watermark than a row's time wait for its on-time pane."""
        return not self.settles_once and (self.emission.panes or not self.fires_early)

    @property
    def fires_on_time(self) -> bool:
        """Whether a row may have something to say when the watermark passes its time."""
        return self.defers_late or not self.fires_early or not self.emission.suppress_unchanged

    @property
    def replaces(self) -> bool:
        """Whether rows come that replace others without a retraction before them."""
        return self.emission.mode != "retract"

    @property
    def has_diff(self) -> bool:
        """Whether retractions are emitted."""
        return self.emission.mode == "retract" or (self.weighted and not self.settles_once)

    @property
    def waits_us(self) -> int:
        """How far the watermark must have passed a row's time for its on-time pane."""
        return self.lateness_us if self.settles_once else 0

    # ── before the shuffle ──────────────────────────────────────────────────────────────────

    def prepare(self, rows: pl.DataFrame, number: int = 0) -> Prepared:
        """Leave out what is too late already, and columns that are not needed."""
        if self.weighted and DIFF not in rows.columns:
            rows = rows.with_columns(pl.lit(1, pl.Int8).alias(DIFF))
        return super().prepare(rows, number)

    @property
    def columns_sent(self) -> list[str]:
        return [*super().columns_sent, *([DIFF] if self.weighted else [])]

    # ── after the shuffle ───────────────────────────────────────────────────────────────────

    @property
    def event_columns(self) -> list[str | pl.Expr]:
        seen = [WATERMARK_SEEN] if self.defers_late else []
        return [*super().event_columns, *seen]

    @property
    def row_columns(self) -> list[str]:
        return [*super().row_columns, *([DIFF] if self.weighted else [])]

    @property
    def partials(self) -> list[pl.Expr]:
        return [*super().partials, pl.len().cast(pl.Int64).alias(_COUNTED)]

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
        changes = self.in_time(inputs.get(0, ()), context, result)
        if changes is not None and self.weighted:
            changes = consolidate(with_weight(changes))
        if changes is not None and not changes.height:
            changes = None
        counted = WEIGHT if self.weighted else EACH_ROW
        runs = state.runs("events", counted, signed=self.weighted)
        ledger = StateLedger(self.name, (runs,))
        if changes is not None:
            ledger.events_in = total_weight(changes) if self.weighted else changes.height
        batch = self.batch(state, context, runs, changes)
        result.rows = batch.rows()
        result.counts.update(batch.left_out)
        for slot, part in () if batch.changes is None else self.by_slot(batch.changes):
            runs.add(slot, part, consolidate if self.weighted else _as_they_are)
        kept_from = context.watermark_us - self.lateness_us - self.window.size_us
        for slot in [slot for slot in runs.slots if (slot + 1) * self.slot_us <= kept_from]:
            ledger.events_out += runs.drop_slot(slot)
        ledger.check()
        return result

    def batch(
        self,
        state: OperatorState,
        context: BatchContext,
        runs: SortedRuns,
        changes: pl.DataFrame | None,
    ) -> SlidingBatch:
        """Return what a batch of these changes does."""
        return SlidingBatch(self, state, context, runs, changes)

    def by_slot(self, rows: pl.DataFrame) -> list[tuple[int, pl.DataFrame]]:
        return list(divide_by(rows, rows[TIME].to_numpy() // self.slot_us))

    def held(
        self, runs: SortedRuns, hashes: Hashes, first_us: int, last_us: int
    ) -> pl.DataFrame | None:
        """Return what is held of these keys in ``[first, last]``, without what was taken back."""
        found = self.known(runs, hashes, first_us, last_us)
        return consolidate(found) if found is not None and self.weighted else found


@dataclass(frozen=True)
class SlidingCorrections(SlidingPaneOperator):
    """The changes of final rows that are corrected: in place of a :class:`SlidingWindowOperator`, with its state.

    So a late event counts in the on-time row, too, if that has not come when it is read.
    """

    @property
    def defers_late(self) -> bool:
        return False


@dataclass
class SlidingBatch:
    """What one batch of one bucket does to rows. ``left_out`` counts what came for rows that take nothing more."""

    step: SlidingPaneOperator
    state: OperatorState
    context: BatchContext
    events: SortedRuns
    changes: pl.DataFrame | None
    left_out: Counter[str] = field(default_factory=Counter, kw_only=True)

    def __post_init__(self) -> None:
        waits_us = self.step.waits_us
        self.since = self.context.watermark_before_us - waits_us
        self.until = self.context.watermark_us - waits_us
        self.row = [HASH, *self.step.by, TIME]

    def rows(self) -> pl.DataFrame | None:
        """Return the rows to emit."""
        ledger = StateLedger(self.step.name, (self._emitted,)) if self.step.emission.panes else None
        stages = self._stages()
        emitted = None if stages is None else self._said(stages, ledger)
        if ledger is not None:
            settled_us = self.context.watermark_us - self.step.lateness_us
            for slot in list(self._emitted.slots):
                if (slot + 1) * self.step.slot_us <= settled_us:
                    self._emitted.check_slot(slot, self._newest)
                    ledger.events_out += self._emitted.drop_slot(slot)
            ledger.check()
        return emitted

    # ── the rows before the batch, on time, and after the batch ─────────────────────────────

    def _stages(self) -> pl.DataFrame | None:
        """Return what is said of each row, stage by stage, in the order of keys and times."""
        passed = self._passed()
        touched = [rows for rows in (passed, self.changes) if rows is not None]
        if not touched:
            return None
        times = pl.concat([rows[TIME] for rows in touched])
        first_us, last_us = int(times.min()), int(times.max())  # type: ignore[arg-type]
        size_us = self.step.window.size_us
        hashes = sorted_distinct(np.concatenate([rows[HASH].to_numpy() for rows in touched]))
        known = self.step.held(self.events, hashes, first_us - size_us, last_us + size_us)
        before, after = self._before_and_after(known)
        stages = []
        if before is not None and before.height:
            # Of a row that has passed before the batch, all that counts in it had been said.
            early = pl.col(TIME) >= self.since if self.step.fires_early else pl.lit(value=False)
            stages += self._stage(before, BEFORE, late=pl.col(TIME) < self.since, early=early)
        if after is not None and after.height:
            passing = pl.col(TIME).is_between(self.since, self.until, closed="left")
            if self.step.fires_on_time:
                stages += self._stage(after, ON_TIME, late=pl.lit(value=False), early=passing)
            early = pl.col(TIME) >= self.until if self.step.fires_early else pl.lit(value=False)
            stages += self._stage(after, AFTER, late=pl.col(TIME) < self.until, early=early)
        if not stages:
            return None
        every = pl.concat(stages).filter(pl.col(TIME) >= first_us)
        return every.sort(*self.row, STAGE) if every.height else None

    def _passed(self) -> pl.DataFrame | None:
        """Return the events that the watermark has passed now, if rows wait for that."""
        if not self.step.fires_on_time or self.until <= self.since:
            return None
        width = self.step.slot_us
        found = [
            rows.filter(pl.col(TIME).is_between(self.since, self.until, closed="left"))
            for slot in self.events.slots
            if slot * width < self.until and (slot + 1) * width > self.since
            for rows in self.events.scan(slot)
        ]
        found = [rows for rows in found if rows.height]
        return pl.concat(found) if found else None

    def _before_and_after(
        self, known: pl.DataFrame | None
    ) -> tuple[pl.DataFrame | None, pl.DataFrame | None]:
        """Return the events before the batch, and those after it; new ones are marked."""
        if known is not None:
            known = known.with_columns(pl.lit(0, pl.Int64).alias(NEW))
        after = known
        if self.changes is not None:
            came = self.changes.with_columns(pl.lit(1, pl.Int64).alias(NEW))
            after = came if known is None else pl.concat([known, came.select(known.columns)])
            if self.step.weighted:
                self._check_taken_back(after)
        if not self.step.weighted:
            return known, after
        return (
            None if known is None else with_diff(known),
            None if after is None else with_diff(after),
        )

    def _check_taken_back(self, after: pl.DataFrame) -> None:
        """Make sure that every event which is taken back has come.

        Raises:
            CorruptionError: one has not.
        """
        assert self.changes is not None
        back = self.changes.filter(pl.col(WEIGHT) < 0)
        if not back.height:
            return
        touched = filter_rows(after, np.isin(after[HASH].to_numpy(), back[HASH].to_numpy()))
        own = touched.drop(FROM, NEW, WATERMARK_SEEN, strict=False)
        check_nothing_owed(consolidate(own), self.step.name)

    def _stage(
        self, events: pl.DataFrame, stage: int, *, late: pl.Expr, early: pl.Expr
    ) -> list[pl.DataFrame]:
        """Return rows with all that counts in them where ``late``, and with what is not late where ``early``."""
        if not self.step.defers_late:
            return [self._values(events, late | early, stage)]
        in_time = pl.max_horizontal(FROM, WATERMARK_SEEN).alias(FROM)
        return [
            self._values(events, late, stage),
            self._values(events.with_columns(in_time), early, stage),
        ]

    def _values(self, events: pl.DataFrame, wanted: pl.Expr, stage: int) -> pl.DataFrame:
        """Return the values of the wanted rows, each once, with how many times it is emitted."""
        values = self.step.values(events).filter((pl.col(FROM) <= pl.col(TIME)) & wanted)
        times = pl.col(DIFF).cast(pl.Int64).sum() if self.step.weighted else pl.len()
        made = [name for name in values.columns if name not in (*self.row, FROM, DIFF)]
        rows = values.group_by(self.row, maintain_order=True).agg(
            pl.col(made).first(), times.cast(pl.Int64).alias(TIMES)
        )
        return rows.with_columns(pl.lit(stage, pl.Int64).alias(STAGE))

    # ── what is emitted ─────────────────────────────────────────────────────────────────────

    def _said(self, stages: pl.DataFrame, ledger: StateLedger | None) -> pl.DataFrame | None:
        step = self.step
        number = stages.select(pl.struct(self.row).rle_id().alias(_ROW)).to_series()
        stages = stages.with_columns(number)
        results = self._results(stages)
        says, back, whole = self._times(stages, results)
        if ledger is not None:
            stages = self._with_panes(stages, says)
            self._keep_panes(stages, ledger)
            results = results.hstack(self._pane_columns(stages))
        if not (says.any() or back.any()):
            return None
        at = np.arange(len(says))
        sources = np.stack([at - 1, at], axis=1).ravel()
        counts = np.stack([back, says], axis=1).ravel()
        rows = results[np.repeat(sources, counts)]
        now = stages[TIMES].to_numpy()
        if step.window.rank is not None:
            ranks = self._ranks(now, counts, whole)
            rows = rows.with_columns(pl.Series(step.window.rank, ranks))
        if not step.has_diff:
            return rows
        signs = np.repeat(np.tile(np.array([-1, 1], np.int8), len(says)), counts)
        signed = rows.hstack([pl.Series(DIFF, signs)])
        if step.emission.marks_replaced and step.window.rank is not None:
            stays = ranks <= np.repeat(now, counts[::2] + counts[1::2])
            signed = signed.hstack([pl.Series(REPLACED, stays & (signs < 0))])
        elif step.emission.marks_replaced:
            signed = signed.hstack([_replaced(now, says, back)])
        if "pane_last" not in signed.columns or not step.emission.panes:
            return signed
        return signed.with_columns(pl.col("pane_last") & (pl.col(DIFF) > 0))

    def _results(self, stages: pl.DataFrame) -> pl.DataFrame:
        """Return the result of each stage; null where no event of the row is left."""
        there = stages[TIMES] > 0
        results = self.step.rows(stages.filter(there))
        if there.all():
            return results
        place = pl.Series(np.cumsum(there.to_numpy()) - 1).set(~there, None)
        return results.select(pl.all().gather(place))

    def _times(self, stages: pl.DataFrame, results: pl.DataFrame) -> tuple[Int64s, Int64s, Bools]:
        """Return how many times the row of each stage is emitted, and the one before is retracted.

        The third says whether that is each of its rows, and not only those that are more or fewer.
        """
        emission = self.step.emission
        row, stage = stages[_ROW].to_numpy(), stages[STAGE].to_numpy()
        follows = np.zeros(len(row), np.bool_)
        follows[1:] = row[1:] == row[:-1]
        now = stages[TIMES].to_numpy()
        before = np.where(follows, np.roll(now, 1), 0)
        same = follows & (before > 0) & (now > 0)
        for name in self.step.aggregation.names:
            result = results[name].alias("0")  # polars takes a name such as "^a.*$" for a pattern
            same &= result.eq_missing(result.shift(1)).to_numpy()
        again = np.zeros(len(row), np.bool_)
        if not emission.suppress_unchanged:
            again = (now > 0) & self._is_touched(stages, follows)
        if emission.panes:  # a row of another number is another pane
            again |= same & (now != before)
        whole = ~same | again
        is_said = stage != BEFORE
        says = np.where(whole, now, np.maximum(now - before, 0)) * is_said
        fewer = np.maximum(before - now, 0)
        if not self.step.replaces:
            back = np.where(whole, before, fewer) * is_said
        elif self.step.window.rank is not None:
            back = fewer * is_said
        else:
            back = ((now == 0) & (before > 0)).astype(np.int64) * is_said
        return says, back, whole

    def _ranks(self, now: Int64s, counts: Int64s, whole: Bools) -> Int64s:
        """Return which of the rows of its event's time each row to emit is: the last ones come and go first."""
        says = counts[1::2]
        from_back = np.where(whole & (not self.step.replaces), 0, now)
        from_says = np.where(whole, 0, now - says)
        begins = np.stack([from_back, from_says], axis=1).ravel()
        ends = np.cumsum(counts)
        return np.arange(ends[-1]) + np.repeat(begins - ends + counts, counts) + 1

    def _is_touched(self, stages: pl.DataFrame, follows: Bools) -> Bools:
        """Return which rows have something new to count, or are on time."""
        stage, counted = stages[STAGE].to_numpy(), stages[_COUNTED].to_numpy()
        after_on_time = follows & (np.roll(stage, 1) == ON_TIME)
        more = np.where(after_on_time, counted != np.roll(counted, 1), stages[NEW].to_numpy() > 0)
        touched: Bools = (stage == ON_TIME) | more
        return touched

    # ── numbers and kinds of panes ──────────────────────────────────────────────────────────

    @property
    def _emitted(self) -> SortedRuns:
        return self.state.runs("emitted", _EMITTED)

    def _with_panes(self, stages: pl.DataFrame, says: Int64s) -> pl.DataFrame:
        """Add how many panes of its row have come out by each stage, and of which kind the last one is."""
        stages = stages.with_columns(pl.Series(_HERE, says > 0))
        known = self._known_panes(stages)
        if known is None:
            stages = stages.with_columns(
                pl.lit(0, pl.Int64).alias(_EMITTED), pl.lit(None, pl.String).alias(_KIND)
            )
        else:
            stages = stages.join(
                known, on=self.row, how="left", nulls_equal=True, maintain_order="left"
            ).with_columns(pl.col(_EMITTED).fill_null(0))
        said = pl.col(_HERE)
        return stages.with_columns(
            (pl.col(_EMITTED) + said.cast(pl.Int64).cum_sum().over(_ROW)).alias(_EMITTED),
            pl.col(_EMITTED).alias(_MORE),
            pl.when(said)
            .then(self._kind())
            .forward_fill()
            .over(_ROW)
            .fill_null(pl.col(_KIND))
            .alias(_KIND),
        )

    def _kind(self) -> pl.Expr:
        """Return the kind of the pane that each stage is."""
        late = pl.when(pl.col(TIME) < self.until).then(pl.lit("late")).otherwise(pl.lit("early"))
        return pl.when(pl.col(STAGE) == ON_TIME).then(pl.lit("on_time")).otherwise(late)

    def _is_last(self, stages: pl.DataFrame) -> pl.Series:
        """Return whether it is known that no pane follows the one that each stage is."""
        settled_us = self.context.watermark_us - self.step.lateness_us
        on_time = stages[STAGE] == ON_TIME
        return (on_time & (self.step.lateness_us == 0)) | (
            ~on_time & (stages[TIME] < min(settled_us, self.until))
        )

    def _known_panes(self, stages: pl.DataFrame) -> pl.DataFrame | None:
        found: list[pl.DataFrame] = []
        for slot, part in self.step.by_slot(stages):
            found += self._emitted.look_up(slot, sorted_distinct(part[HASH].to_numpy()))
        return self._newest(pl.concat(found)) if found else None

    def _newest(self, rows: pl.DataFrame) -> pl.DataFrame:
        return rows.unique(self.row, keep="last", maintain_order=True)

    def _keep_panes(self, stages: pl.DataFrame, ledger: StateLedger) -> None:
        """Store the number of panes of the rows that have new ones, instead of the one before."""
        runs = self._emitted
        ledger.events_in = int(stages[_HERE].sum())
        told = stages.group_by(self.row, maintain_order=True).agg(
            pl.col(_EMITTED, _KIND).last(), pl.col(_MORE).first(), pl.col(_HERE).any()
        )
        told = told.filter(_HERE)
        for slot, part in self.step.by_slot(told):
            runs.spend(slot, int(part[_MORE].sum()))
            runs.add(slot, part.drop(_MORE, _HERE), _as_they_are, alive=self._newest)

    def _pane_columns(self, stages: pl.DataFrame) -> list[pl.Series]:
        index = stages[_EMITTED] - 1
        last = self._is_last(stages)
        values = (stages[_KIND], index, index == 0, last)
        return [v.alias(name) for name, v in zip(PANE_COLUMNS, values, strict=True)]


def _replaced(now: Int64s, says: Int64s, back: Int64s) -> pl.Series:
    """Return which of the rows to emit are retractions that ``"update"`` would leave out: all, or all but one.

    ``now`` is how many times the row of each stage is there; where it is not any more, one retraction says so.
    """
    gone = np.minimum(back, now == 0)
    counts = np.stack([gone, back - gone, says], axis=1).ravel()
    marks = np.tile(np.array([False, True, False]), len(says))
    return pl.Series(REPLACED, np.repeat(marks, counts))


def _as_they_are(rows: pl.DataFrame) -> pl.DataFrame:
    return rows
