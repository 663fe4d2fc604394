"""Rows that may be taken back, with what they were given when they came: a look-up, or an answer from outside.

What is looked up may be another thing later. So each row is stored with what it was given, and a row that is taken
back leaves with the same. Of several equal rows with different answers the first in the store goes first: what
stays is then the others, each with its own.

================================  =====================================================================
a row                             does
================================  =====================================================================
comes and goes in one batch       nothing
is added                          is given its answer, comes out with +1, and is stored
... and nothing was to be given   is stored all the same: its retraction must find that it never came out
is taken back                     is found, comes out as it did with -1, and leaves the store
================================  =====================================================================

Of a stream a row is stored until nothing can take it back any more: until the watermark is above its time and
the lateness. Of a table, as long as it is there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import polars as pl

from millstream.kernels.arrays import Bools, Int64s
from millstream.kernels.changes import (
    concat_present,
    consolidate,
    divide_by,
    group_numbers,
    total_weight,
    with_diff,
)
from millstream.kernels.columns import filter_rows
from millstream.kernels.final_rows import slot_width_us
from millstream.kernels.frames import HASH, TIME, WEIGHT
from millstream.kernels.state.arrangement import nothing_owed
from millstream.kernels.state.hash_order import sorted_distinct
from millstream.kernels.state.keyhash import hash_columns
from millstream.kernels.state.ledger import StateLedger
from millstream.kernels.state.operator_state import OperatorState
from millstream.kernels.state.row_digest import digest_rows
from millstream.kernels.state.sorted_runs import Share, SortedRuns

COMES_OUT = "__comes_out"  # Boolean: the row is in the result
_FAMILY = "given"


@dataclass(frozen=True)
class GivenRows:
    """The rows of one bucket with what they were given. Durations in microseconds.

    ``columns`` are those that rows have when they come; ``by`` are the ones whose values chose the bucket.
    ``lateness_us`` is None of a table, whose rows stay until they are taken back.
    """

    step: str
    columns: tuple[str, ...]
    by: tuple[str, ...]
    lateness_us: int | None

    def process(
        self,
        state: OperatorState,
        changes: pl.DataFrame | None,
        watermark_us: int,
        seed: int,
        give: Callable[[pl.DataFrame], pl.DataFrame],
    ) -> pl.DataFrame | None:
        """Return the changes with what is given, those that take back first, each in the order of time.

        Args:
            state: The operator's state in the bucket.
            changes: Rows with time and weight, equal ones added up.
            watermark_us: The operator's, after the batch.
            seed: The seed of the hashes of keys.
            give: Adds to rows, in their order, what they are given, and ``__comes_out``.

        Raises:
            CorruptionError: a row was taken back that never came.
        """
        runs = self._runs(state, seed)
        ledger = StateLedger(self.step, (runs,))
        made = None
        if changes is not None and changes.height:
            digests = digest_rows([changes[name] for name in self._identity])
            changes = changes.with_columns(pl.Series(HASH, digests.view(np.uint64)))
            added = changes.filter(changes[WEIGHT] > 0)
            back = changes.filter(changes[WEIGHT] < 0)
            parts = [self._taken_back(runs, back), give(added) if added.height else None]
            made = concat_present(parts)
            ledger.events_in += total_weight(made)
            self._store(runs, made)
        if self.lateness_us is not None:
            ledger.events_out += self._forget(runs, watermark_us - self.lateness_us)
        ledger.check()
        return None if made is None else _emitted(made)

    @property
    def _identity(self) -> list[str]:
        """The columns in which a row and its retraction are equal."""
        return [*self.columns, TIME]

    def _runs(self, state: OperatorState, seed: int) -> SortedRuns:
        """Return the runs: sorted by a digest of the whole row, as many rows may have one key."""

        def owned(rows: pl.DataFrame, share: Share) -> Bools:
            return share.has(hash_columns(rows, self.by, seed))

        return state.runs(_FAMILY, WEIGHT, signed=True, owned=owned)

    def _slots(self, rows: pl.DataFrame) -> Int64s:
        if self.lateness_us is None:
            return np.zeros(rows.height, np.int64)
        slots: Int64s = rows[TIME].to_numpy() // self._slot_us
        return slots

    @property
    def _slot_us(self) -> int:
        return slot_width_us(self.lateness_us or 0)

    def _taken_back(self, runs: SortedRuns, back: pl.DataFrame) -> pl.DataFrame | None:
        """Return the stored rows that are taken back, with their weights below zero."""
        if not back.height:
            return None
        wanted = sorted_distinct(back[HASH].to_numpy())
        slots = np.unique(self._slots(back)).tolist()
        held = concat_present([found for slot in slots for found in runs.look_up(slot, wanted)])
        if held is None:
            nothing_owed(back)
            return None
        held = nothing_owed(consolidate(held))
        both = pl.concat([back[self._identity], held[self._identity]])
        numbers = group_numbers(both, self._identity)
        of_back, of_held = numbers[: back.height], numbers[back.height :]
        needed = np.zeros(int(numbers.max()) + 1, np.int64)
        np.add.at(needed, of_back, -back[WEIGHT].to_numpy())
        taken = _first_ones(of_held, held[WEIGHT].to_numpy(), needed)
        found = np.zeros(len(needed), np.int64)
        np.add.at(found, of_held, taken)
        nothing_owed(filter_rows(back, (found < needed)[of_back]))
        weights = pl.Series(WEIGHT, -taken)
        return held.with_columns(weights).filter(weights < 0)

    def _store(self, runs: SortedRuns, rows: pl.DataFrame | None) -> None:
        if rows is None:
            return
        for slot, part in divide_by(rows, self._slots(rows)):
            runs.add(slot, part, partial(_folded, runs, slot))

    def _forget(self, runs: SortedRuns, before_us: int) -> int:
        """Forget the slots that end by a time; return the weight of their rows."""
        passed = [slot for slot in runs.slots if (slot + 1) * self._slot_us <= before_us]
        return sum(runs.drop_slot(slot) for slot in passed)


def _folded(runs: SortedRuns, slot: int, rows: pl.DataFrame) -> pl.DataFrame:
    held = consolidate(rows)
    return held if runs.slots.get(slot) else nothing_owed(held)  # no run is older


def _first_ones(numbers: Int64s, weights: Int64s, needed: Int64s) -> Int64s:
    """Return how many of each row are taken, if of each number so many are, the first ones."""
    order = np.argsort(numbers, kind="stable")
    own, sorted_weights = numbers[order], weights[order]
    before = np.cumsum(sorted_weights) - sorted_weights
    first = np.searchsorted(own, own)
    taken = np.empty(len(order), np.int64)
    taken[order] = np.clip(needed[own] - (before - before[first]), 0, sorted_weights)
    return taken


def _emitted(rows: pl.DataFrame) -> pl.DataFrame | None:
    """Return the rows that come out, with their sign."""
    rows = rows.filter(rows[COMES_OUT]).drop(HASH, COMES_OUT)
    if not rows.height:
        return None
    added = (rows[WEIGHT] > 0).to_numpy()
    return with_diff(rows[np.lexsort((rows[TIME].to_numpy(), added))])
