"""The operator of stored searches: each row with the queries that match it.

The right input has the versions of a table of queries. A version is in force from its event time until the next version of
its key; a deletion ends it at its own time. A row of time t is matched with the queries that are in force at t. As in an as-of
join (:mod:`millstream.kernels.joins.asof_join`), it waits until nothing can come any more that would change this: with W
the operator's watermark and D the larger of the lateness of both inputs, until W > t + D. A version that is late,
because its partition's watermark w is above its time, counts for rows from w - D on: none of these has come out.
So the result depends on the records alone, and not on batches.

A text that is no query becomes a dead letter, and the version before it stays in force.

Queries are divided into *shards* by their key, and each row goes to all shards; buckets are chosen by the shard. A bucket
matches each row once, with the queries of all its shards. The row's copy for the first shard is the one that the ledger counts.

State has the rows that wait, the versions that some row may still match, and of each version the postings of its necessary
terms (:mod:`millstream.kernels.search.postings`). A batch reads the postings of the terms that its rows have, the
queries found by them, and nothing else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import polars as pl

from millstream.kernels.arrays import Bools
from millstream.kernels.changes import concat_present
from millstream.kernels.errors.dead_letter_collector import FailedRows
from millstream.kernels.errors.user_code import UnusableRowError, UserCode
from millstream.kernels.frames import (
    DELETED,
    HASH,
    ORDER,
    RELEASED,
    RELEASED_TIE,
    SPLIT,
    TIME,
    WATERMARK_SEEN,
)
from millstream.kernels.joins.asof_match import NO_MATCH
from millstream.kernels.joins.join_input import JoinInput
from millstream.kernels.joins.join_operator import add_late_rows, take_in_time
from millstream.kernels.joins.versions import (
    TIE,
    VALID_FROM,
    Horizon,
    Versions,
    row_order,
    with_deletions,
)
from millstream.kernels.joins.waiting_rows import WaitingRows
from millstream.kernels.operator import NOT_DEFINING, BatchContext, OperatorResult, Prepared
from millstream.kernels.operator_base import OperatorBase
from millstream.kernels.search.compiled_queries import (
    NECESSARY,
    QUERY_ERROR,
    STORED,
    QueryLanguage,
    compile_queries,
)
from millstream.kernels.search.documents import Documents, text_bytes
from millstream.kernels.search.highlight import Highlight, fragments
from millstream.kernels.search.known_versions import KnownVersions, QueryPairs
from millstream.kernels.search.postings import Candidates, Postings
from millstream.kernels.search.verify import QueryVerifier, parts_of
from millstream.kernels.state.keyhash import Hashes, hash_columns
from millstream.kernels.state.ledger import StateLedger
from millstream.kernels.state.operator_state import OperatorState
from millstream.kernels.state.rows_in_place import PlacedRows
from millstream.kernels.state.sorted_runs import Share, to_arrow
from millstream.kernels.time.watermarks import delayed_watermark

SHARD = "__shard"  # Int64: of a query, and of a copy of a row
_SEEN = (SPLIT, WATERMARK_SEEN)
_TEXT_BYTES_MAX = 16 << 20  # are divided into words at a time: some 450 MB
_PAIRS_MAX = 1_000_000  # are made and verified at a time: some 400 MB


@dataclass(frozen=True)
class Percolate(OperatorBase):
    """The operator. ``columns`` are those of the rows, with their types; durations in microseconds.

    ``query`` is the column with the text of a query, and ``lateness_of_us`` has the lateness of both inputs.
    ``within_us``: for how long after its time a version is in force at most.
    """

    name: str
    columns: tuple[tuple[str, pl.DataType], ...]
    queries: JoinInput
    query: str
    language: QueryLanguage
    lateness_of_us: tuple[int, int]
    shards: int = 1
    highlight: Highlight | None = None
    within_us: int | None = None
    side_output: bool = False
    code: UserCode = field(default=UserCode(""), metadata=NOT_DEFINING)

    @property
    def by(self) -> tuple[str, ...]:
        return (SHARD,) if self.shards > 1 else ()

    @property
    def ordered(self) -> bool:
        return True

    @property
    def names(self) -> list[str]:
        """The columns of the rows."""
        return [name for name, _ in self.columns]

    @property
    def wait_us(self) -> int:
        """How far the watermark must have passed a row: D above."""
        return max(self.lateness_of_us)

    def columns_read(self, number: int) -> set[str]:
        return {*self.queries.columns_read, self.query} if number else set(self.names)

    def output_watermark(self, watermark_us: int) -> int:
        """Return W - D: no row with an earlier time follows."""
        return delayed_watermark(watermark_us, self.wait_us)

    # ── before the shuffle ──────────────────────────────────────────────────────────────────

    def prepare(self, rows: pl.DataFrame, number: int) -> Prepared:
        """Copy a row to all shards; make of the text of a query what is stored of it."""
        return Prepared(self._prepared_queries(rows) if number else self._copies(rows))

    def _copies(self, rows: pl.DataFrame) -> pl.DataFrame:
        hidden = [name for name in (TIME, *_SEEN) if name in rows.columns]
        made = rows[[*self.names, *hidden]].hstack([row_order(rows)])
        shards = pl.Series(SHARD, np.repeat(np.arange(self.shards), made.height))
        return pl.concat([made] * self.shards).hstack([shards])

    def _prepared_queries(self, rows: pl.DataFrame) -> pl.DataFrame:
        kept = with_deletions(
            self.queries.project(rows, (TIME, *_SEEN, DELETED)), self.queries.names
        )
        there = ~kept[DELETED].to_numpy()
        compiled = compile_queries(rows[self.query].filter(pl.Series(there)), self.language)
        places = np.full(rows.height, NO_MATCH, np.int64)
        places[there] = np.arange(compiled.height)
        at = pl.Series(places).replace(NO_MATCH, None)
        shard = hash_columns(kept, self.queries.keys) % np.uint64(self.shards)
        return kept.hstack(
            [
                *(column.gather(at) for column in compiled.get_columns()),
                row_order(rows),
                pl.Series(SHARD, shard.astype(np.int64)),
            ]
        )

    # ── after the shuffle ───────────────────────────────────────────────────────────────────

    def process(
        self,
        state: OperatorState,
        inputs: Mapping[int, Sequence[pl.DataFrame]],
        context: BatchContext,
    ) -> OperatorResult:
        """Emit the rows whose time has come, each with the queries that match it; hold the others."""
        result = OperatorResult(counts=Counter())
        rows = [self._in_time(table, context, result) for table in inputs.get(0, ())]
        queries = [self._versions(table, context, result) for table in inputs.get(1, ())]
        batch = _PercolateBatch(self, state, context)
        made = batch.take(concat_present(rows), concat_present(queries))
        result.rows = concat_present(made)
        return result

    def _in_time(
        self, rows: pl.DataFrame, context: BatchContext, result: OperatorResult
    ) -> pl.DataFrame:
        """Return the rows that are in time; count those for the first shard."""
        found = take_in_time(rows.filter(rows[SHARD] == 0), self.lateness_of_us[0], context, result)
        if self.side_output:
            add_late_rows(found, result, without=(SHARD,))
        copies = rows.filter(rows[SHARD] != 0)
        uncounted = OperatorResult(counts=Counter())
        others = take_in_time(copies, self.lateness_of_us[0], context, uncounted)
        in_time = pl.concat([found.in_time, others.in_time])
        return in_time[[*self.names, TIME, TIE, SHARD]]

    def _versions(
        self, rows: pl.DataFrame, context: BatchContext, result: OperatorResult
    ) -> pl.DataFrame:
        """Return the versions that are queries, and from which time on they count; count all."""
        wrong = rows[QUERY_ERROR].is_not_null()
        if wrong.any():
            self._fail(rows.filter(wrong), result)
            rows = rows.filter(~wrong)
        take_in_time(rows, self.lateness_of_us[1], context, result)
        known_us = context.watermarks_seen(rows) - self.wait_us
        valid_from = np.maximum(rows[TIME].to_numpy(), known_us)
        wanted = [*self.queries.keys, *self.queries.names, TIME, TIE, DELETED, SHARD]
        stored = rows[[*wanted, *STORED, NECESSARY]]
        hashes = hash_columns(rows, self.queries.keys, context.seed)
        return stored.hstack([pl.Series(VALID_FROM, valid_from), pl.Series(HASH, hashes)])

    def _fail(self, rows: pl.DataFrame, result: OperatorResult) -> None:
        """Make dead letters of texts that are no queries.

        Raises:
            UserCodeError: the first is to stop the job.
        """
        hidden = [name for name in _SEEN if name in rows.columns]
        given = rows[[*self.queries.names, TIE, TIME, *hidden]].rename({TIE: ORDER})
        reasons = rows[QUERY_ERROR].to_list()
        if self.code.on_error == "stop":
            raise self.code.refusal(UnusableRowError(reasons[0]), given, 0)
        placed = given if SPLIT in rows.columns else given.drop(ORDER)
        result.failed = (*result.failed, FailedRows(self.name, placed, reasons))
        result.counts["dead"] += rows.height


class _NewQueries(NamedTuple):
    """The versions of queries that a batch brings, and their postings."""

    versions: pl.DataFrame
    postings: pl.DataFrame


@dataclass
class _PercolateBatch:
    """One batch of one bucket: what it emits, and how its state changes."""

    step: Percolate
    state: OperatorState
    context: BatchContext

    def __post_init__(self) -> None:
        step, state = self.step, self.state
        self.waiting = WaitingRows(state, "rows", self._shard_hashes)
        self.versions = Versions(state, "queries", step.queries.keys, True, owned=self._owned)
        self.postings = Postings(state, "postings", step.by, self._owned, self.context.seed)
        self.until_us = step.output_watermark(self.context.watermark_us) - 1
        self.ledger = StateLedger(step.name, (self.waiting.runs, self.versions.runs))

    def _shard_hashes(self, rows: pl.DataFrame) -> Hashes:
        return hash_columns(rows, self.step.by, self.context.seed)

    def _owned(self, rows: pl.DataFrame, share: Share) -> Bools:
        return share.has(self._shard_hashes(rows))

    def take(
        self, rows: pl.DataFrame | None, queries: pl.DataFrame | None
    ) -> list[pl.DataFrame | None]:
        """Store new queries, let rows wait, and return those whose time has come with what matches them."""
        due, new = self._due(rows), None
        if queries is not None:
            new = _NewQueries(queries.drop(NECESSARY), self.postings.rows_of(queries))
        # Before the versions are stored: what rows that are due match may leave the state with that.
        made = [] if due is None else list(self._matched(due, new))
        if new is not None:
            horizon = Horizon(self.until_us, self._oldest_us, newest=True)
            self.ledger.events_in += self.versions.add(new.versions, horizon)
            self.ledger.events_out += self.versions.left
            self.postings.add(new.postings, self._stored)
        self.ledger.check()
        return made

    @property
    def _oldest_us(self) -> int | None:
        within_us = self.step.within_us
        return None if within_us is None else self.until_us + 1 - within_us

    def _stored(self, postings: pl.DataFrame) -> pl.DataFrame:
        """Leave out postings of versions that are not stored any more."""
        held = self.versions.look_up(postings[HASH].to_numpy(), (HASH, TIE, *self.step.by))
        if held is None:
            return postings.clear()
        return postings.join(held[[HASH, TIE]], on=[HASH, TIE], how="semi")

    def _due(self, rows: pl.DataFrame | None) -> pl.DataFrame | None:
        """Return the rows whose time has come, each once, in their order; let the others wait."""
        due = self.waiting.due(rows, self.until_us, self.ledger)
        if due is None:
            return None
        # All shards of this bucket have a copy of each row.
        return due.filter(due[SHARD] == due[SHARD].min()).sort(TIME, TIE, maintain_order=True)

    # ── matches ─────────────────────────────────────────────────────────────────────────────

    def _matched(self, due: pl.DataFrame, new: _NewQueries | None) -> Iterator[pl.DataFrame | None]:
        """Yield the rows, a part of them at a time, with the queries that match them."""
        # Rows that waited long come due together, and their words take many times the memory of their text.
        for first, end in parts_of(text_bytes(due, self.step.language.fields), _TEXT_BYTES_MAX):
            yield from self._matched_part(due[first:end], new)

    def _matched_part(
        self, due: pl.DataFrame, new: _NewQueries | None
    ) -> Iterator[pl.DataFrame | None]:
        step = self.step
        documents = Documents(due, step.language.fields)
        candidates = self._candidates(documents, new)
        known = self._known(candidates.hashes, new)
        if known is None:
            return
        verifier = QueryVerifier(documents, known.conditions)
        for docs, queries in candidates.pairs(_PAIRS_MAX):
            found = known.in_force(docs, queries, due[TIME].to_numpy()[docs])
            found = found.where(verifier.matches(found.rows, found.versions))
            if len(found.rows):
                yield self._joined(documents, known, verifier, found)

    def _candidates(self, documents: Documents, new: _NewQueries | None) -> Candidates:
        """Return the queries that may match the rows."""
        terms = documents.index_terms(self.context.seed)
        return self.postings.candidates(terms, None if new is None else new.postings)

    def _known(self, hashes: Hashes, new: _NewQueries | None) -> KnownVersions | None:
        """Return the versions of queries with these hashes, rising, and the new ones of them."""
        keys, others = self.step.queries.keys, (HASH, TIME, TIE, VALID_FROM, DELETED)
        columns = list(dict.fromkeys([*others, *keys, *self.step.by]))
        parts = [*self.versions.look_up_in_place(hashes, columns)]
        if new is not None:
            places = np.flatnonzero(np.isin(new.versions[HASH].to_numpy(), hashes))
            table = to_arrow(new.versions)
            parts.append(PlacedRows(new.versions[columns][places], table, places))
        if not any(part.rows.height for part in parts):
            return None
        return KnownVersions.of(keys, self.step.within_us, parts, hashes)

    def _joined(
        self, documents: Documents, known: KnownVersions, verifier: QueryVerifier, found: QueryPairs
    ) -> pl.DataFrame:
        """Return the rows of matches, by row and then by the query's key."""
        step, rows = self.step, documents.rows
        keys = known.rows[list(step.queries.keys)][found.versions]
        order = pl.DataFrame({"doc": found.rows}).hstack(keys).with_row_index("place")
        order = order.sort("doc", *keys.columns, nulls_last=True, maintain_order=True)
        at = order["place"].to_numpy()
        found = QueryPairs(found.rows[at], found.versions[at])
        columns = [
            *rows[step.names][found.rows].get_columns(),
            *known.columns(step.queries.names, found.versions).get_columns(),
        ]
        if step.highlight is not None:
            columns.append(fragments(step.highlight, verifier, found.rows, found.versions))
        times = rows[[TIME, TIE]][found.rows]
        hidden = [times[TIME], times[TIME].alias(RELEASED), times[TIE].alias(RELEASED_TIE)]
        return pl.DataFrame([*columns, *hidden])
