"""Enrichment of rows that may be taken back: a row is taken back with the answer that it came with.

The service may say something else by then, so the rows are stored with their answers
(:mod:`millstream.kernels.given_rows`). A row whose call failed has its dead letter when it comes, and nothing when it
is taken back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl

from millstream.kernels.enrichment.answers import FAILED_TO_DEAD, REASON, STATUS
from millstream.kernels.enrichment.cache import AnswerCache
from millstream.kernels.enrichment.operator import Enrichment
from millstream.kernels.errors.dead_letter_collector import FailedRows
from millstream.kernels.final_rows import changes_in_time, with_sign
from millstream.kernels.frames import TIME, WEIGHT
from millstream.kernels.given_rows import COMES_OUT, GivenRows
from millstream.kernels.operator import BatchContext, OperatorResult, Prepared
from millstream.kernels.state.operator_state import OperatorState


@dataclass(frozen=True)
class SignedEnrichment(Enrichment):
    """The operator. ``names`` are all columns; of a table nothing is late, and rows are stored while they are there."""

    names: tuple[str, ...]
    is_table: bool

    @property
    def ordered(self) -> bool:
        return False

    def columns_read(self, number: int) -> set[str]:  # noqa: ARG002 - it has one input
        """Return all: a row and its retraction are known by them."""
        return set(self.names)

    def prepare(self, rows: pl.DataFrame, number: int = 0) -> Prepared:  # noqa: ARG002
        """Take the columns, the time, the sign, and what decides on lateness."""
        return Prepared(with_sign(rows, self.names))

    def process(
        self,
        state: OperatorState,
        inputs: Mapping[int, Sequence[pl.DataFrame]],
        context: BatchContext,
    ) -> OperatorResult:
        """Return the rows with their answers, and those that are taken back with the ones that they had."""
        result = OperatorResult(counts=Counter())
        lateness_us = None if self.is_table else self.lateness_us
        changes = changes_in_time(inputs.get(0, ()), self.by, lateness_us, context, result)
        cache = self._cache(state, context)
        given = GivenRows(self.name, self.names, self.by, lateness_us)
        result.rows = given.process(
            state,
            changes,
            context.watermark_us,
            context.seed,
            lambda added: self._given(added, state, cache, context, result),
        )
        if cache is not None:
            cache.check()
        return result

    def _given(
        self,
        added: pl.DataFrame,
        state: OperatorState,
        cache: AnswerCache | None,
        context: BatchContext,
        result: OperatorResult,
    ) -> pl.DataFrame:
        """Return rows with their answers; those whose call failed go to the dead letters."""
        keys = self.columns.keys_of(added)
        answers = self._answers(self.columns.distinct(keys), cache, state.journal, context)
        found = self.columns.left_join(keys, answers)
        dead = (found[STATUS] == FAILED_TO_DEAD).fill_null(value=False)
        if dead.any():
            times = added[WEIGHT].to_numpy() * dead.to_numpy()
            rows = np.repeat(np.arange(added.height), times)
            reasons = found[REASON].gather(rows).to_list()
            failed = added[rows][[*self.names, TIME]]
            result.failed = (FailedRows(self.name, failed, reasons),)
            result.counts.update(dead=len(rows), held=-len(rows))
        named = zip(self.columns.answer_names, self.columns.answer, strict=True)
        columns = [found[ours].alias(name) for ours, (name, _) in named]
        return added.hstack([*columns, (~dead).alias(COMES_OUT)])
