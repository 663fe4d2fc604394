"""Count windows over rows that are taken back: of the rows that are there, in the order of their times.

In the order of arrival, one event that is taken back would move all events after it to other windows, without an
end. So a row waits until no retraction of it can be in time any more, and only then gets its place. With W the
watermark, L the allowed lateness, r the watermark that a row saw, and t its time:

=============  ==============================================================================================
a row is late  when ``r > t + L``: an event and its retraction alike, so one of them is late whenever the other
               that came before it was
a row is       when ``W > t + L``. What was taken back has gone by then, as if it had never come.
final
its place      is by its time among the final rows of its key, and of equal times by a hash of its values: rows that
               an operator made have no place in the log
a window       comes with the row that fills it, or, with a timeout, when that is final which is as late as the
               timeout: here an event is in a window if its time is before that
=============  ==============================================================================================

So results depend on the rows alone, also for keys in several partitions. The rows that wait are held in slots
of time; a batch reads the slots that it makes final. Final rows are as if they had come straight from a source, and
aggregates need not take anything back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import polars as pl

from millstream.kernels import late
from millstream.kernels.changes import (
    check_nothing_owed,
    concat_present,
    consolidate,
    total_weight,
    with_diff,
    with_weight,
)
from millstream.kernels.frames import DIFF, HASH, ORDER, SPLIT, TIME, WATERMARK_SEEN, WEIGHT
from millstream.kernels.operator import BatchContext, OperatorResult, Prepared
from millstream.kernels.state.keyhash import hash_columns
from millstream.kernels.state.ledger import StateLedger
from millstream.kernels.state.operator_state import OperatorState
from millstream.kernels.state.row_digest import digest_rows
from millstream.kernels.time.watermarks import delayed_watermark
from millstream.kernels.windows.count_windows import CountWindowOperator
from millstream.kernels.windows.window_operator import divide_by

_SLOTS_PER_LATENESS = 4
_SLOT_US_MIN = 60_000_000


@dataclass(frozen=True)
class SignedCountWindowOperator(CountWindowOperator):
    """One operator of count windows over rows that may be taken back."""

    lateness_us: int = 0

    @property
    def ordered(self) -> bool:
        return False

    def output_watermark(self, watermark_us: int) -> int:
        """Return the watermark of the output: rows wait for the lateness."""
        return delayed_watermark(watermark_us, self.lateness_us)

    # ── before the shuffle ──────────────────────────────────────────────────────────────────

    @property
    def _identity(self) -> list[str]:
        """The columns in which an event and its retraction are equal, besides the time."""
        return list(dict.fromkeys([*self.by, *sorted(self.aggregation.columns_read)]))

    def prepare(self, rows: pl.DataFrame, number: int = 0) -> Prepared:  # noqa: ARG002
        """Give rows an order by their values; drop columns that are not needed."""
        if DIFF not in rows.columns:
            rows = rows.with_columns(pl.lit(1, pl.Int8).alias(DIFF))
        own = [rows[name] for name in self._identity]
        hidden = [
            rows[name] for name in (TIME, DIFF, SPLIT, WATERMARK_SEEN) if name in rows.columns
        ]
        values = own or [pl.zeros(rows.height, pl.Int8, eager=True)]
        return Prepared(pl.DataFrame([*own, *hidden, pl.Series(ORDER, digest_rows(values))]))

    # ── after the shuffle ───────────────────────────────────────────────────────────────────

    def process(
        self,
        state: OperatorState,
        inputs: Mapping[int, Sequence[pl.DataFrame]],
        context: BatchContext,
    ) -> OperatorResult:
        """Hold the batch's rows; take those that are final into windows, and give the rows to emit.

        Raises:
            CorruptionError: an event was taken back that never came.
        """
        counts: Counter[str] = Counter()
        changes = self._in_time(inputs.get(0, ()), context, counts)
        final = self._final(state, changes, context.watermark_us - self.lateness_us)
        passed = replace(
            context,
            watermark_before_us=self.output_watermark(context.watermark_before_us),
            watermark_us=self.output_watermark(context.watermark_us),
        )
        result = self.take(state, final, passed)
        result.counts = counts
        return result

    def _in_time(
        self, tables: Sequence[pl.DataFrame], context: BatchContext, counts: Counter[str]
    ) -> pl.DataFrame | None:
        """Return the changes that are in time; equal ones of opposite sign cancel."""
        kept = []
        for rows in tables:
            seen_us = context.watermarks_seen(rows)
            deadline_us = rows[TIME].to_numpy() + self.lateness_us
            found = late.split_late(rows, seen_us, deadline_us, late.COUNT_WINDOW)
            counts.update(held=found.in_time.height, late=found.late.height)
            kept.append(found.in_time.drop(SPLIT, WATERMARK_SEEN, strict=False))
        changes = concat_present(kept)
        if changes is None:
            return None
        hashes = pl.Series(HASH, hash_columns(changes, self.by, context.seed))
        changes = consolidate(with_weight(changes.hstack([hashes])))
        return changes if changes.height else None

    @property
    def _wait_slot_us(self) -> int:
        return max(_SLOT_US_MIN, self.lateness_us // _SLOTS_PER_LATENESS)

    def _final(
        self, state: OperatorState, changes: pl.DataFrame | None, before_us: int
    ) -> pl.DataFrame | None:
        """Hold changes; give out, in their order, the rows before a time, and forget them."""
        runs = state.runs("waiting rows", WEIGHT, signed=True)
        ledger = StateLedger(self.name, (runs,), total_weight(changes))
        width_us = self._wait_slot_us
        if changes is not None:
            for slot, part in divide_by(changes, changes[TIME].to_numpy() // width_us):
                runs.add(slot, part, consolidate)
        final = []
        for slot in sorted(slot for slot in runs.slots if slot * width_us < before_us):
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
        check_nothing_owed(rows, self.name)
        rows = with_diff(rows).drop(DIFF).sort(TIME, ORDER, HASH, maintain_order=True)
        return rows.with_columns(pl.col(TIME).alias(WATERMARK_SEEN))
