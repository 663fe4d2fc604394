"""Enrichment: each row gets the columns that a function of the user's looks up outside, by its key.

In a batch a bucket asks each distinct key once, unless an answer is in the cache. What was asked is written
to the journal before a row is emitted, failures among it: a batch that is repeated after a crash reads the
journal, and so gives all its sinks the same. The rule is: *the answer is stored before it is told*.

========================  ========================================================================
a row                     leaves as
========================  ========================================================================
with a null in its key    ``emitted`` with nulls; it is not asked
of a key with an answer   ``emitted`` with it
of a key without one      ``emitted`` with nulls, which the cache keeps like an answer
of a key whose call       ``dead`` (a dead letter with the last error), ``emitted`` with nulls, or the job
failed to the end         stops, as ``on_error`` says; it is not cached, so its next batch asks again
========================  ========================================================================

====================================  ===============================================================
a crash after                         leaves
====================================  ===============================================================
1. the function was called            nothing: the repeated batch asks again, and nobody was told
2. the answers are in the journal     answers that the repeated batch reads instead of asking; where its
                                      program or keys are others, a name that it does not read
3. some sinks committed the batch     the same; the others get the same rows by it
4. the state store committed          the batch is done; its entries are removed now or by the next run
====================================  ===============================================================

With ``on_error="stop"`` a failure is not written to the journal: the next run asks again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import polars as pl

from millstream.errors import CorruptionError, UserCodeError
from millstream.kernels.code_digest import digest
from millstream.kernels.enrichment.answers import (
    ANSWERED,
    FAILED_TO_DEAD,
    FAILED_TO_NULL,
    REASON,
    STATUS,
    LookupColumns,
    decode_answers,
    encode_answers,
    with_status,
)
from millstream.kernels.enrichment.cache import AnswerCache
from millstream.kernels.enrichment.calls import (
    CallPolicy,
    FailedLookup,
    LookupCalls,
    LookupFunction,
)
from millstream.kernels.errors.dead_letter_collector import FailedRows
from millstream.kernels.errors.user_code import error_reason, source_location
from millstream.kernels.operator import NOT_DEFINING, BatchContext, OperatorResult, Prepared
from millstream.kernels.pass_through import PassThroughOperator, in_arrival_order
from millstream.kernels.state.journal import Journal
from millstream.kernels.state.keyhash import digest_columns
from millstream.kernels.state.operator_state import OperatorState

LookupErrorPolicy = Literal["dead-letter", "stop", "null"]


@dataclass(frozen=True)
class Enrichment(PassThroughOperator):
    """One enriching operator. ``by`` is the key that is looked up.

    ``code`` is a digest of the function, made where it was declared. ``cache_ms``: for how long an answer is
    used again; None: only in its batch.
    """

    columns: LookupColumns
    function: LookupFunction
    cache_ms: int | None
    policy: CallPolicy = field(metadata=NOT_DEFINING)
    on_error: LookupErrorPolicy = field(metadata=NOT_DEFINING)
    code: str = field(metadata=NOT_DEFINING)

    def columns_read(self, number: int) -> set[str]:  # noqa: ARG002 - it has one input
        return set(self.by)

    def prepare(self, rows: pl.DataFrame, number: int = 0) -> Prepared:  # noqa: ARG002
        """Take all rows: none is late for an answer."""
        return Prepared(rows)

    def process(
        self,
        state: OperatorState,
        inputs: Mapping[int, Sequence[pl.DataFrame]],
        context: BatchContext,
    ) -> OperatorResult:
        """Return the rows with their answers, in the order of arrival."""
        result = OperatorResult(counts=Counter())
        cache = self._cache(state, context)
        if tables := inputs.get(0, ()):
            rows = in_arrival_order(tables)
            keys = self.columns.keys_of(rows)
            answers = self._answers(self.columns.distinct(keys), cache, state.journal, context)
            self._enrich(rows, keys, answers, result)
        if cache is not None:
            cache.check()
        return result

    def _cache(self, state: OperatorState, context: BatchContext) -> AnswerCache | None:
        if self.cache_ms is None:
            return None
        columns = self.columns
        return AnswerCache(
            self.name, state, context, columns.key_names, columns.schema, self.cache_ms
        )

    def _answers(
        self, keys: pl.DataFrame, cache: AnswerCache | None, journal: Journal, context: BatchContext
    ) -> pl.DataFrame:
        """Return what became of each key: from the cache, from the journal, or by asking."""
        if cache is None:
            return self._asked_once(keys, journal, context.seed)
        held = cache.look_up(keys)
        wanted = keys.join(held, on=self.columns.key_names, how="anti")
        asked = self._asked_once(wanted.sort(self.columns.key_names), journal, context.seed)
        cache.add(asked.filter(asked[STATUS] == ANSWERED))
        return pl.concat([with_status(held), asked])

    def _asked_once(self, keys: pl.DataFrame, journal: Journal, seed: int) -> pl.DataFrame:
        """Return what became of keys, as the journal has it; ask if it has nothing, and write it there."""
        if not keys.height:
            return with_status(self.columns.no_answers(keys))
        # All that an answer depends on: another program, or other keys, read no entry of these.
        hashes = digest_columns(keys, self.columns.key_names, seed)
        name = digest(self.code.encode() + hashes.tobytes())
        entry = journal.read(name)
        if entry is None:
            entry = journal.write(name, encode_answers(self._ask(keys)))
        answers = decode_answers(entry)
        if not answers.select(self.columns.key_names).equals(keys):
            raise CorruptionError(
                f"The journal of step {self.name!r} has answers for other keys than those of the batch. "
                "Restore the app's whole folder from where you keep copies of it, or start over from the "
                "log: `millstream reset` with the app's name."
            )
        return answers

    def _ask(self, keys: pl.DataFrame) -> pl.DataFrame:
        """Ask for keys; return what became of each, in their order."""
        calls = LookupCalls(
            self.function,
            self.policy,
            lambda asked, given: self.columns.answers(self.name, asked, given),
        )
        done = calls.ask(self.columns.for_user(keys))
        if self.on_error == "stop":
            self._require_answers(done)
        return pl.concat(
            self._failed(part, answers)
            if isinstance(answers, FailedLookup)
            else with_status(answers)
            for part, answers in done
        )

    def _failed(self, part: pl.DataFrame, failed: FailedLookup) -> pl.DataFrame:
        """Return what becomes of the keys of a call that failed to the end."""
        nulls = self.columns.no_answers(self.columns.keys_of(part))
        if self.on_error == "null":
            return with_status(nulls, FAILED_TO_NULL)
        return with_status(nulls, FAILED_TO_DEAD, _reason(failed))

    def _require_answers(
        self, done: Sequence[tuple[pl.DataFrame, pl.DataFrame | FailedLookup]]
    ) -> None:
        """Stop the job at the first part whose call failed; after it others were not asked."""
        for part, failed in done:
            if isinstance(failed, FailedLookup) and failed.calls:
                raise self._refusal(part, failed) from failed.error

    def _refusal(self, part: pl.DataFrame, failed: FailedLookup) -> UserCodeError:
        place = source_location(failed.error)
        where = f", at {place}" if place else ""
        return UserCodeError(
            f"step {self.name!r} failed: {_reason(failed)}{where}. It was asked for {part.height} keys, "
            f"of which the first is {part.row(0, named=True)}. Run again once it answers, or go on without: "
            'on_error="dead-letter" or "null".',
            step=self.name,
        )

    def _enrich(
        self,
        rows: pl.DataFrame,
        keys: pl.DataFrame,
        answers: pl.DataFrame,
        result: OperatorResult,
    ) -> None:
        """Put the rows with their answers into the result, and those whose call failed."""
        found = self.columns.left_join(keys, answers)
        dead = (found[STATUS] == FAILED_TO_DEAD).fill_null(value=False)
        named = zip(self.columns.answer_names, self.columns.answer, strict=True)
        enriched = rows.hstack([found[ours].alias(name) for ours, (name, _) in named])
        if dead.any():
            reasons = found.filter(dead)[REASON].to_list()
            result.failed = (FailedRows(self.name, rows.filter(dead), reasons),)
            enriched = enriched.filter(~dead)
        result.rows = enriched
        result.counts.update(emitted=enriched.height, dead=rows.height - enriched.height)


def _reason(failed: FailedLookup) -> str:
    """Return why a key has no answer, in one line."""
    reason = error_reason(failed.error)
    return f"{reason} (the last of {failed.calls} calls)" if failed.calls > 1 else reason
