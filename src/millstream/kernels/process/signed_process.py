"""The operator of a process function that takes rows back, and may take back what it has emitted.

Rows come when they come: those that are taken back with a sign, each batch with what it has added and taken back on balance
(:func:`millstream.kernels.final_rows.changes_in_time`). The changes of a key in a batch are in the order of event time; of one time, rows that
are taken back come first, and then the order is that of a digest of their values, as they have no place in the log.

A function over frames is given the rows of a batch that are taken back in one call, and then those that it adds: on balance none of these is
taken back by it.

A row on which ``on_row`` fails is no part of the key's state. So its digest is kept with the key until it is taken back, and
``on_retraction`` is not called for it. Of each row that was emitted and holds, its digest and event time are kept with the key: so
nothing is taken back that does not hold, and what is has the time that it came with. What a batch emits and takes back again comes to nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import polars as pl

from millstream.kernels.changes import consolidate, with_diff, with_weight
from millstream.kernels.final_rows import changes_in_time, with_sign
from millstream.kernels.frames import DIFF, HASH, TIME, WEIGHT
from millstream.kernels.joins.versions import TIE
from millstream.kernels.operator import BatchContext, OperatorResult, Prepared
from millstream.kernels.process.calls import DIGEST, FAILED_ROWS
from millstream.kernels.process.context import EMITTED_ROWS
from millstream.kernels.process.declarations import StateDeclaration
from millstream.kernels.process.emitted_rows import HELD_ROWS, HELD_STATE
from millstream.kernels.process.frame_function import FrameFunction
from millstream.kernels.process.operator import KeyedProcess, ProcessBatch
from millstream.kernels.process.stored_keys import StateColumns
from millstream.kernels.state.operator_state import OperatorState
from millstream.kernels.state.row_digest import digest_rows


@dataclass(frozen=True)
class SignedProcess(KeyedProcess):
    """The operator of a function that may take back what it emits. ``changes``: the rows above may be taken back, too."""

    changes: bool

    @property
    def signed(self) -> bool:
        return True

    @property
    def ordered(self) -> bool:
        return not self.changes

    @cached_property
    def state_columns(self) -> StateColumns:
        """The columns of stored keys, with the rows that failed, and those that were emitted and hold."""
        types = dict(self.columns)
        emitted = (EMITTED_ROWS, StateDeclaration("map", pl.List(pl.Int64), pl.Int64()))
        if isinstance(self.function, FrameFunction):
            emitted = (HELD_ROWS, HELD_STATE)
        failed = (FAILED_ROWS, StateDeclaration("list", pl.Int64()))
        own = (emitted, failed) if self.changes else (emitted,)
        return StateColumns(
            tuple((name, types[name]) for name in self.by), tuple(sorted((*self.states, *own)))
        )

    def prepare(self, rows: pl.DataFrame, number: int = 0) -> Prepared:
        """Take the rows; with their sign, where they may be taken back."""
        if not self.changes:
            return super().prepare(rows, number)
        return Prepared(with_sign(rows, [name for name, _ in self.columns]))

    def process(
        self,
        state: OperatorState,
        inputs: Mapping[int, Sequence[pl.DataFrame]],
        context: BatchContext,
    ) -> OperatorResult:
        """Make the calls of the batch; what comes of it is what it has emitted and taken back on balance."""
        if not self.changes:
            result = super().process(state, inputs, context)
        else:
            result = OperatorResult(counts=Counter())
            changes = changes_in_time(inputs.get(0, ()), self.by, self.lateness_us, context, result)
            given = None if changes is None else self._in_order(changes)
            ProcessBatch(self, state, context, result).take(given)
        if result.rows is not None:
            result.rows = _on_balance(result.rows)
        return result

    def _in_order(self, changes: pl.DataFrame) -> pl.DataFrame:
        rows = with_diff(changes.drop(HASH))
        # Rows that are equal but for their time are not the same: one may have failed where the other has not.
        digests = digest_rows([rows[TIME], *(rows[name] for name, _ in self.columns)])
        order = np.lexsort((digests, rows[DIFF].to_numpy(), rows[TIME].to_numpy()))
        places = pl.Series(TIE, np.arange(rows.height))
        return rows[order].hstack([places, pl.Series(DIGEST, digests[order])])


def _on_balance(rows: pl.DataFrame) -> pl.DataFrame | None:
    hashes = digest_rows([rows[name] for name in rows.columns if name != DIFF]).view(np.uint64)
    changes = consolidate(with_weight(rows).hstack([pl.Series(HASH, hashes)]))
    changes = changes.filter(pl.col(WEIGHT) != 0)
    return with_diff(changes.drop(HASH)) if changes.height else None
