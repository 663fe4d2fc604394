"""Each window beside an earlier one of its key: the value then, and the ratio of the two.

The earlier window begins at the same local time some days or months before
(:mod:`millstream.kernels.trend.local_time`). It is over before the later one is, so a row waits for nothing:
with rows that come once, it is compared in the batch in which it comes. Of cumulating windows, each is compared
with the one that is as long: the earlier one at the same elapsed time. Where rows can change, the comparison
is of what both windows are so far; when either changes, the row is taken back and comes again.

State is in two families of sorted runs:

==========  ====================================================================================
``open``    the rows of windows that can still change: see :class:`OpenWindows`
``values``  of windows that are over, the key, the start and the compared values; in slots that are
            dropped whole when all windows that are compared with theirs are over
==========  ====================================================================================
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl

from millstream.kernels.arrays import Bools
from millstream.kernels.changes import consolidate, total_weight, with_diff
from millstream.kernels.columns import filter_rows
from millstream.kernels.frames import HASH, TIME, WEIGHT
from millstream.kernels.operator import BatchContext, OperatorResult, Prepared
from millstream.kernels.state.hash_order import sorted_distinct
from millstream.kernels.state.keyhash import hash_columns
from millstream.kernels.state.ledger import StateLedger
from millstream.kernels.state.operator_state import OperatorState
from millstream.kernels.state.sorted_runs import EACH_ROW, Share, SortedRuns
from millstream.kernels.trend.local_time import LocalSpan
from millstream.kernels.trend.open_windows import (
    START,
    OpenWindows,
    Revision,
    WindowSlots,
    in_window_order,
    numbered_keys,
    window_rows,
)
from millstream.kernels.untimed_operator import UntimedOperator

_VALUES = "values"
_SLOTS_KEPT = 8  # about
_ROW = "__row"


@dataclass(frozen=True)
class Compare(UntimedOperator):
    """The operator that compares windows with earlier ones.

    ``columns`` are those of its input, with their types; ``compared`` names some of them, each with the two
    columns that it gets: the earlier value, and the ratio.
    """

    name: str
    by: tuple[str, ...]
    columns: tuple[tuple[str, pl.DataType], ...]
    compared: tuple[tuple[str, str, str], ...]
    span: LocalSpan
    slots: WindowSlots
    revision: Revision

    def earlier(self, label_us: int) -> int | None:
        """Return the label of the window that one is compared with; None if there is none."""
        window = self.slots.window
        start_us = int(window.starts(np.array([label_us], np.int64))[0])
        before_us = self.span.before(start_us)
        if before_us is None:
            return None
        found_us = before_us + label_us - start_us  # as much of it has elapsed
        begins_there = int(window.starts(np.array([found_us], np.int64))[0]) == before_us
        return found_us if begins_there else None

    # ── before the shuffle ──────────────────────────────────────────────────────────────────

    def prepare(self, rows: pl.DataFrame, number: int = 0) -> Prepared:  # noqa: ARG002
        """Take the columns and the time; whether a row is taken back; nothing is left out."""
        return Prepared(self.taken(rows))

    # ── after the shuffle ───────────────────────────────────────────────────────────────────

    def process(
        self,
        state: OperatorState,
        inputs: Mapping[int, Sequence[pl.DataFrame]],
        context: BatchContext,
    ) -> OperatorResult:
        """Return the compared rows that the batch adds, and those that it takes back."""
        result = OperatorResult(counts=Counter())
        kept = OpenWindows(state, self.slots, self.by)
        values = _EarlierValues(self, state, context)
        ledger = StateLedger(self.name, (kept.runs, values.runs))
        rows = self._rows(inputs, context.seed)
        if rows is not None:
            result.counts.update(held=rows.height)
        changes = over = rows
        if self.revision == "once":
            made = None if rows is None else values.compare(rows)
        else:
            changes, made = self._revise(kept, values, rows)
            like = pl.DataFrame(schema=self._schema) if changes is None else changes
            over = kept.take_over(like, context.watermark_us)
        if made is not None and made.height:
            result.rows = with_diff(made) if self.revision != "once" else made.drop(WEIGHT)
        ledger.events_in = total_weight(changes)
        ledger.events_out = values.forget()
        if over is not None:
            ledger.events_out += values.keep(over)
        ledger.check()
        return result

    @property
    def _schema(self) -> dict[str, pl.DataType]:
        hidden = {TIME: pl.Int64(), START: pl.Int64(), WEIGHT: pl.Int64(), HASH: pl.UInt64()}
        return {**dict(self.columns), **hidden}

    def _rows(self, inputs: Mapping[int, Sequence[pl.DataFrame]], seed: int) -> pl.DataFrame | None:
        tables = inputs.get(0, ())
        if not tables:
            return None
        rows = window_rows(tables, self.slots)
        rows = rows.hstack([pl.Series(HASH, hash_columns(rows, self.by, seed))])
        return in_window_order(rows.select(*(rows[name] for name in self._schema)))

    def _revise(
        self, kept: OpenWindows, values: _EarlierValues, rows: pl.DataFrame | None
    ) -> tuple[pl.DataFrame | None, pl.DataFrame | None]:
        """Return the changes of the rows that can change, and those of the compared ones."""
        if rows is None:
            return None, None
        held = kept.look_up(rows)
        changes = kept.changes(rows, held, self.revision)
        after = in_window_order(consolidate(pl.concat([held, changes])))
        was = values.compare(in_window_order(held)).with_columns(-pl.col(WEIGHT))
        kept.add(changes)
        made = pl.concat([was, values.compare(after)])
        hashed = made.hstack([pl.Series(HASH, hash_columns(made, self.by))])
        return changes, consolidate(hashed).drop(HASH)


@dataclass
class _EarlierValues:
    """The values of windows that are over, for as long as later windows are compared with them."""

    operator: Compare
    state: OperatorState
    context: BatchContext

    @property
    def runs(self) -> SortedRuns:
        return self.state.runs(_VALUES, EACH_ROW, owned=self._owned)

    def _owned(self, rows: pl.DataFrame, share: Share) -> Bools:
        """Return which rows are in a share: it goes by the hash of the key, and ``__hash`` is of key and start."""
        key = tuple(str(number) for number in range(len(self.operator.by)))
        return share.has(hash_columns(rows, key, self.context.seed))

    @property
    def _width_us(self) -> int:
        longest_us, slide_us = self.operator.span.longest_us, self.operator.slots.window.slide_us
        return max(slide_us, longest_us // _SLOTS_KEPT)

    def _is_needed(self, slot: int) -> bool:
        last_us = slot + self._width_us - 1 + self.operator.span.longest_us
        return self.operator.slots.window.latest_end(last_us) > self.context.watermark_us

    # ── what is kept ────────────────────────────────────────────────────────────────────────

    def _values(self, rows: pl.DataFrame) -> pl.DataFrame:
        """Return key, start and values of rows, under names that no column of the user has."""
        keys = numbered_keys(rows, self.operator.by)
        values = [
            rows[column].alias(f"v{number}")
            for number, (column, _, _) in enumerate(self.operator.compared)
        ]
        return keys.hstack([rows[START], *values])

    def _hashed(self, keys: pl.DataFrame) -> pl.Series:
        names = (*(str(number) for number in range(len(self.operator.by))), START)
        return pl.Series(HASH, hash_columns(keys, names, self.context.seed))

    def keep(self, rows: pl.DataFrame) -> int:
        """Keep the values of rows whose windows are over; return how many are no longer needed."""
        values = self._values(rows)
        values = values.hstack([self._hashed(values)])
        slots = values[START].to_numpy() // self._width_us * self._width_us
        unneeded = 0
        for slot in np.unique(slots).tolist():
            part = filter_rows(values, slots == slot)
            if self._is_needed(slot):
                self.runs.add(slot, part, lambda held: held)
            else:
                unneeded += part.height
        return unneeded

    def forget(self) -> int:
        """Drop the values that are no longer needed; return how many they are."""
        old = [slot for slot in sorted(self.runs.slots) if not self._is_needed(slot)]
        return sum(self.runs.drop_slot(slot) for slot in old)

    # ── what is compared ────────────────────────────────────────────────────────────────────

    def compare(self, rows: pl.DataFrame) -> pl.DataFrame:
        """Add the earlier values and the ratios to rows, which are all that can change of their keys."""
        starts = rows[START].unique().to_list()
        earlier = {start: self.operator.earlier(start) for start in starts}
        keys = numbered_keys(rows, self.operator.by).hstack(
            [rows[START].replace_strict(earlier, return_dtype=pl.Int64)]
        )
        found = keys.join(
            self._candidates(rows, keys.drop_nulls(START)),
            on=keys.columns,
            how="left",
            nulls_equal=True,
            maintain_order="left",
        )
        made = []
        for number, (column, before, ratio) in enumerate(self.operator.compared):
            then = found[f"v{number}"].alias(before)
            made += [then, ratio_of(rows[column], then).alias(ratio)]
        columns = [rows[name] for name, _ in self.operator.columns]
        return pl.DataFrame([*columns, *made, rows[TIME], rows[WEIGHT]])

    def _candidates(self, rows: pl.DataFrame, wanted: pl.DataFrame) -> pl.DataFrame:
        """Return the values of the windows that are wanted, and of others."""
        hashed = wanted.hstack([self._hashed(wanted)])
        slots = hashed[START].to_numpy() // self._width_us * self._width_us
        found = [self._values(rows)]
        for slot in np.unique(slots).tolist():
            hashes = sorted_distinct(filter_rows(hashed, slots == slot)[HASH].to_numpy())
            found += [table.drop(HASH) for table in self.runs.look_up(slot, hashes)]
        return pl.concat(found)


def ratio_of(now: pl.Series, before: pl.Series) -> pl.Series:
    """Return how many times the earlier value the one now is, as Float64.

    Null if either is null. Of an earlier zero: infinity with the sign of the value now, and null if that is
    zero, too.
    """
    numbers = pl.DataFrame({"now": now.cast(pl.Float64), "then": before.cast(pl.Float64)})
    at, then = pl.col("now"), pl.col("then")
    of_zero = pl.when(at != 0).then(at.sign() * float("inf"))  # of NaN, NaN
    return numbers.select(
        pl.when(then != 0).then(at / then).when(then == 0).then(of_zero)
    ).to_series()
