"""Deduplication of rows that are taken back: which rows are kept follows from those that are there.

The rows of an id are taken in the order of their event times, and one is kept unless a kept one of its id is at most
``within`` before it. Of rows of one time that is first which is least in its columns, from the first to the last: a
row that an operator has made has no place in the log. The same rule over the order of arrival, for rows that
stay, is in :mod:`millstream.kernels.dedup.operator`.

A batch finds of each id that it touches the earliest time at which something changes. What was kept before that
stays. From there on the kept rows are found anew, of the rows before the batch and of those after it, and the difference
is emitted: the row that was kept, with -1, and the row that is kept now, with +1.

With W the watermark, L the allowed lateness and r the watermark that a row saw:

====================  ==========================================================================
a row is late         when ``r > time + L``, whether it is added or taken back; it changes nothing
a row is held         until ``W > time + L``: then it can no longer be taken back
a kept row is known   until ``W > time + within + L``, by its id and time: then it repeats nothing
====================  ==========================================================================

Both leave the state by slots of a quarter of ``within + L``, or of ten seconds. A row without an id is passed on as it comes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl

from millstream.kernels import late
from millstream.kernels.arrays import Int64s
from millstream.kernels.changes import (
    concat_present,
    consolidate,
    group_numbers,
    total_weight,
    with_diff,
    with_weight,
)
from millstream.kernels.columns import filter_rows
from millstream.kernels.dedup.event_ids import SearchRanges, keep_first
from millstream.kernels.frames import HASH, SPLIT, TIME, WATERMARK_SEEN, WEIGHT
from millstream.kernels.operator import BatchContext, OperatorResult, Prepared
from millstream.kernels.operator_base import OperatorBase
from millstream.kernels.state.arrangement import nothing_owed
from millstream.kernels.state.hash_order import differs_from_previous, sorted_distinct
from millstream.kernels.state.keyhash import hash_columns
from millstream.kernels.state.ledger import StateLedger
from millstream.kernels.state.operator_state import OperatorState
from millstream.kernels.state.row_digest import order_of_values
from millstream.kernels.state.timed_arrangement import TimedArrangement
from millstream.kernels.time.watermarks import delayed_watermark

_SLOTS = 4  # in the time that a kept row is known for
_SLOT_US_MIN = 10_000_000  # a slot costs a few runs however little it holds
_NEVER = np.iinfo(np.int64).min // 2


@dataclass(frozen=True)
class SignedDedup(OperatorBase):
    """The operator that deduplicates rows which may be taken back. Durations in microseconds.

    Inside, columns are named by their places: "0", "1", …; ``by`` are such names.

    Attributes:
        columns: All columns, with their types.
        by: The columns of the id.
    """

    name: str
    columns: tuple[tuple[str, pl.DataType], ...]
    by: tuple[str, ...]
    within_us: int
    lateness_us: int
    side_output: bool

    def output_watermark(self, watermark_us: int) -> int:
        """Return the watermark of the output: rows that are still in time may change which are kept."""
        return delayed_watermark(watermark_us, self.lateness_us)

    def columns_read(self, number: int) -> set[str]:  # noqa: ARG002 - it has one input
        return {name for name, _ in self.columns}

    @property
    def slot_us(self) -> int:
        """The width of a slot of state."""
        return max(_SLOT_US_MIN, (self.within_us + self.lateness_us) // _SLOTS)

    # ── before the shuffle ──────────────────────────────────────────────────────────────────

    def prepare(self, rows: pl.DataFrame, number: int = 0) -> Prepared:  # noqa: ARG002
        """Take the columns, the sign, and what decides on lateness."""
        rows = with_weight(rows)
        own = [rows[name].alias(str(place)) for place, (name, _) in enumerate(self.columns)]
        hidden = [rows[n] for n in (TIME, WEIGHT, SPLIT, WATERMARK_SEEN) if n in rows.columns]
        return Prepared(pl.DataFrame([*own, *hidden]))

    # ── after the shuffle ───────────────────────────────────────────────────────────────────

    def process(
        self,
        state: OperatorState,
        inputs: Mapping[int, Sequence[pl.DataFrame]],
        context: BatchContext,
    ) -> OperatorResult:
        """Return how the kept rows change with the batch; let go of what is past.

        Raises:
            CorruptionError: a row was taken back that never came.
        """
        result = OperatorResult(counts=Counter())
        rows = TimedArrangement(state, "rows", self.slot_us)
        kept = TimedArrangement(state, "kept", self.slot_us)
        ledgers = [StateLedger(self.name, (one.runs,)) for one in (rows, kept)]
        changes = self._in_time(inputs.get(0, ()), context, result)
        with_id = changed = None
        if changes is not None:
            has_id = ~_any_null(changes, self.by)
            with_id = changes.filter(has_id)
            changed = self._changed(rows, kept, with_id)
            result.rows = self._emitted([changes.filter(~has_id), changed])
            changed = consolidate(changed[self._kept])
        settled_us = context.watermark_us - self.lateness_us
        ledgers[0].events_in, ledgers[1].events_in = map(total_weight, (with_id, changed))
        ledgers[0].events_out = rows.advance(with_id, settled_us)
        ledgers[1].events_out = kept.advance(changed, settled_us - self.within_us)
        for ledger in ledgers:
            ledger.check()
        return result

    def _in_time(
        self, tables: Sequence[pl.DataFrame], context: BatchContext, result: OperatorResult
    ) -> pl.DataFrame | None:
        """Return the changes that are in time, with their hashes; equal ones of opposite sign cancel."""
        in_time, too_late = [], []
        for rows in tables:
            seen_us = context.watermarks_seen(rows)
            deadline_us = rows[TIME].to_numpy() + self.lateness_us
            found = late.split_late(rows, seen_us, deadline_us, late.DEDUP)
            result.counts.update(held=found.in_time.height, late=found.late.height)
            result.late_by_us = max(result.late_by_us, found.late_by_us)
            in_time.append(found.in_time.drop(SPLIT, WATERMARK_SEEN, strict=False))
            if self.side_output and found.late.height:
                given = with_diff(self._named(found.late))
                too_late.append(late.side_output(given, found.late_us, late.DEDUP))
        result.late = concat_present(too_late)
        changes = concat_present(in_time)
        if changes is None:
            return None
        hashes = pl.Series(HASH, hash_columns(changes, self.by, context.seed))
        changes = consolidate(changes.hstack([hashes]))
        return changes if changes.height else None

    def _named(self, rows: pl.DataFrame) -> pl.DataFrame:
        """Return rows under the user's names, with their time and weight."""
        named = [rows[str(place)].alias(name) for place, (name, _) in enumerate(self.columns)]
        return pl.DataFrame([*named, rows[TIME], rows[WEIGHT]])

    def _emitted(self, parts: Sequence[pl.DataFrame]) -> pl.DataFrame | None:
        """Return changes as they are emitted: those that take back first, each in the order of time."""
        changes = concat_present(parts)
        if changes is None:
            return None
        added = (changes[WEIGHT] > 0).to_numpy()
        order = np.lexsort((changes[TIME].to_numpy(), added))
        return with_diff(self._named(changes[order]))

    # ── which rows are kept ─────────────────────────────────────────────────────────────────

    def _changed(
        self, rows: TimedArrangement, kept: TimedArrangement, changes: pl.DataFrame
    ) -> pl.DataFrame:
        """Return how the kept rows change with changes of the rows."""
        if not changes.height:
            return changes
        hashes = sorted_distinct(changes[HASH].to_numpy())
        first_us = int(changes[TIME].min())  # type: ignore[arg-type]
        held = _or_none(rows.look_up(hashes, first_us), changes)
        known = _or_none(kept.look_up(hashes, first_us - self.within_us), changes[self._kept])
        ids = group_numbers(
            pl.concat([part[list(self.by)] for part in (changes, held, known)]), self.by
        )
        of_changes, of_held, of_known = np.split(ids, np.cumsum([changes.height, held.height]))
        since_us = _extreme(np.minimum, of_changes, changes[TIME].to_numpy(), -_NEVER)
        touched = _at(of_held, since_us, -_NEVER) <= held[TIME].to_numpy()
        before = filter_rows(held, touched)
        passed = _at(of_known, since_us, _NEVER) > known[TIME].to_numpy()
        anchors = _extreme(
            np.maximum, of_known[passed], known[TIME].to_numpy()[passed], _NEVER, len(since_us)
        )
        after = nothing_owed(consolidate(pl.concat([before, changes])))
        kept_before = self._kept_rows(before, anchors, changes)
        kept_after = self._kept_rows(after, anchors, changes)
        back = kept_before.with_columns(-pl.col(WEIGHT))
        return consolidate(pl.concat([back, kept_after]))

    @property
    def _kept(self) -> list[str]:
        """The columns that are held of a kept row."""
        return [*self.by, TIME, HASH, WEIGHT]

    def _kept_rows(
        self, rows: pl.DataFrame, anchors: Int64s, touched: pl.DataFrame
    ) -> pl.DataFrame:
        """Return which of some rows are kept, once each; ``anchors`` are the times kept last before them.

        The ids that the batch touches are numbered by their first rows in ``touched``, and so are anchors.
        """
        both = pl.concat([touched[list(self.by)], rows[list(self.by)]])
        ids = group_numbers(both, self.by)[touched.height :]
        times = rows[TIME].to_numpy()
        order = self._in_order(rows, ids)
        order = order[times[order] > anchors[ids[order]] + self.within_us]
        ids, times = ids[order], times[order]
        spans = SearchRanges(times, times - self.within_us, times)
        first = order[keep_first(differs_from_previous(ids), spans)]
        return rows[first].with_columns(pl.lit(1, pl.Int64).alias(WEIGHT))

    def _in_order(self, rows: pl.DataFrame, ids: Int64s) -> Int64s:
        """Return the places of rows by id, then time, then their columns."""
        own = [order_of_values(rows[str(place)]) for place in range(len(self.columns))]
        table = pl.DataFrame([pl.Series(HASH, ids), rows[TIME], *own])
        order: Int64s = table.select(pl.arg_sort_by(table.columns)).to_series().to_numpy()
        return order


def _any_null(rows: pl.DataFrame, columns: Sequence[str]) -> pl.Series:
    return rows.select(pl.any_horizontal(pl.col(columns).is_null())).to_series()


def _or_none(rows: pl.DataFrame | None, like: pl.DataFrame) -> pl.DataFrame:
    return like.clear() if rows is None else rows[like.columns]


def _extreme(
    better: np.ufunc, ids: Int64s, times: Int64s, none: int, count: int | None = None
) -> Int64s:
    """Return the least or greatest time of each id."""
    found = np.full(int(ids.max()) + 1 if count is None else count, none, np.int64)
    inside = ids < len(found)
    better.at(found, ids[inside], times[inside])
    return found


def _at(ids: Int64s, values: Int64s, other: int) -> Int64s:
    """Return the value of each id; another one for those that have none."""
    found = np.full(len(ids), other, np.int64)
    inside = ids < len(values)
    found[inside] = values[ids[inside]]
    return found
