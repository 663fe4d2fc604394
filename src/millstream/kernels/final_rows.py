"""Rows that may be taken back, and come out once nothing can take them back any more.

What goes by the order of rows, or comes out once, cannot follow every change: a row less would move all that come
after it. So a row waits, and what has been taken back by then is as if it had never come. With W the
watermark, L the allowed lateness, r the watermark that a row saw, and t its time:

=============  ==============================================================================================
a row is late  when ``r > t + L``: a row and its retraction alike, so one of them is late whenever the other
               that came before it was
a row is       when ``W > t + L``. It comes out in that batch, in the order of its time, and of equal times in
final          that of a hash of its values: rows that an operator made have no place in the log
=============  ==============================================================================================

So results depend on the rows alone. Those that wait are held in slots of time; a batch reads the slots that it
makes final. Final rows are as if they had come straight from a source.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl

from millstream.kernels import late
from millstream.kernels.changes import (
    check_nothing_owed,
    concat_present,
    consolidate,
    divide_by,
    total_weight,
    with_diff,
    with_weight,
)
from millstream.kernels.frames import DIFF, HASH, SPLIT, TIME, WATERMARK_SEEN, WEIGHT
from millstream.kernels.operator import BatchContext, OperatorResult, Prepared
from millstream.kernels.operator_base import OperatorBase
from millstream.kernels.state.keyhash import hash_columns
from millstream.kernels.state.ledger import StateLedger
from millstream.kernels.state.operator_state import OperatorState
from millstream.kernels.state.row_digest import digest_rows
from millstream.kernels.time.watermarks import delayed_watermark

_SLOTS_PER_LATENESS = 4
_SLOT_US_MIN = 60_000_000
_FAMILY = "waiting rows"


def slot_width_us(lateness_us: int) -> int:
    """Return how wide the slots of rows are that wait until nothing can take them back."""
    return max(_SLOT_US_MIN, lateness_us // _SLOTS_PER_LATENESS)


def changes_in_time(
    tables: Sequence[pl.DataFrame],
    by: tuple[str, ...],
    lateness_us: int | None,
    context: BatchContext,
    result: OperatorResult,
    *,
    rule: late.LatenessRule = late.JOIN,
) -> pl.DataFrame | None:
    """Return the changes that are in time, with hash and weight; count all. Equal ones of opposite sign cancel.

    ``lateness_us`` is None where nothing is late.
    """
    kept = []
    for rows in tables:
        if lateness_us is None:
            result.counts.update(held=rows.height)
        else:
            deadline_us = rows[TIME].to_numpy() + lateness_us
            found = late.split_late(rows, context.watermarks_seen(rows), deadline_us, rule)
            result.counts.update(held=found.in_time.height, late=found.late.height)
            result.late_by_us = max(result.late_by_us, found.late_by_us)
            rows = found.in_time  # noqa: PLW2901 - those that are left of them
        kept.append(rows.drop(SPLIT, WATERMARK_SEEN, strict=False))
    changes = concat_present(kept)
    if changes is None:
        return None
    hashes = pl.Series(HASH, hash_columns(changes, by, context.seed))
    changes = consolidate(with_weight(changes.hstack([hashes])))
    return changes if changes.height else None


def with_sign(rows: pl.DataFrame, names: Sequence[str]) -> pl.DataFrame:
    """Return columns of rows with their time and sign, and what decides on lateness."""
    if DIFF not in rows.columns:
        rows = rows.with_columns(pl.lit(1, pl.Int8).alias(DIFF))
    hidden = [rows[n] for n in (TIME, DIFF, SPLIT, WATERMARK_SEEN) if n in rows.columns]
    return pl.DataFrame([*(rows[name] for name in names), *hidden])


@dataclass(frozen=True)
class ChangingRows:
    """The rows of one bucket that wait until they are final, as signed changes. Durations in microseconds."""

    step: str
    lateness_us: int

    @property
    def slot_us(self) -> int:
        """The width of a slot of state."""
        return slot_width_us(self.lateness_us)

    def take(
        self, state: OperatorState, changes: pl.DataFrame | None, watermark_us: int
    ) -> pl.DataFrame | None:
        """Hold changes; give out the rows that the watermark makes final, each once, and forget them.

        Raises:
            CorruptionError: a row was taken back that never came.
        """
        before_us = watermark_us - self.lateness_us
        runs = state.runs(_FAMILY, WEIGHT, signed=True)
        ledger = StateLedger(self.step, (runs,), total_weight(changes))
        if changes is not None:
            for slot, part in divide_by(changes, changes[TIME].to_numpy() // self.slot_us):
                runs.add(slot, part, consolidate)
        final = []
        for slot in sorted(slot for slot in runs.slots if slot * self.slot_us < before_us):
            found = concat_present(list(runs.scan(slot)))
            if found is None:  # all of it was taken back
                runs.drop_slot(slot)
                continue
            held = consolidate(found)
            over = held.filter(pl.col(TIME) < before_us)
            if over.height == held.height:
                ledger.events_out += runs.drop_slot(slot)
            elif over.height:
                ledger.events_out += total_weight(over)
                runs.add(slot, over.with_columns(-pl.col(WEIGHT)), consolidate)
            final.append(over)
        ledger.check()
        rows = concat_present(final)
        if rows is None:
            return None
        check_nothing_owed(rows, self.step)
        return with_diff(rows).drop(DIFF)


@dataclass(frozen=True)
class FinalRows(OperatorBase):
    """The operator that gives the rows of a stream when they are final. Durations in microseconds.

    ``columns`` are all columns, with their types; ``by`` are those of the key by which rows are divided into buckets.
    """

    name: str
    columns: tuple[tuple[str, pl.DataType], ...]
    by: tuple[str, ...]
    lateness_us: int

    def output_watermark(self, watermark_us: int) -> int:
        """Return W - L: all rows before that have come out."""
        return delayed_watermark(watermark_us, self.lateness_us)

    def columns_read(self, number: int) -> set[str]:  # noqa: ARG002 - it has one input
        return {name for name, _ in self.columns}

    def prepare(self, rows: pl.DataFrame, number: int = 0) -> Prepared:  # noqa: ARG002
        """Take the columns, the time, the sign, and what decides on lateness."""
        return Prepared(with_sign(rows, [name for name, _ in self.columns]))

    def process(
        self,
        state: OperatorState,
        inputs: Mapping[int, Sequence[pl.DataFrame]],
        context: BatchContext,
    ) -> OperatorResult:
        """Hold the batch's rows; emit those that are final, in the order of time."""
        result = OperatorResult(counts=Counter())
        changes = changes_in_time(inputs.get(0, ()), self.by, self.lateness_us, context, result)
        final = ChangingRows(self.name, self.lateness_us).take(state, changes, context.watermark_us)
        if final is not None and final.height:
            own = final[[name for name, _ in self.columns] + [TIME]]
            ties = digest_rows([own[name] for name, _ in self.columns])
            result.rows = own[np.lexsort((ties, own[TIME].to_numpy()))]
        return result
