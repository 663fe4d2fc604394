"""The index of queries in an operator's state: by the hash of a necessary term, the queries that have it.

A posting is a term and the hash of a query's key, with the version of the query that has it. It says only where to
look: which version is valid, and whether it matches, is decided by what is stored of the query. So postings of versions that
are gone do no harm; they are left out when runs are folded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import polars as pl

from millstream.kernels.arrays import Int64s
from millstream.kernels.changes import concat_present
from millstream.kernels.frames import HASH
from millstream.kernels.joins.versions import TIE
from millstream.kernels.search.compiled_queries import NECESSARY
from millstream.kernels.search.documents import hash_terms
from millstream.kernels.state.hash_order import sorted_distinct
from millstream.kernels.state.keyhash import Hashes
from millstream.kernels.state.operator_state import OperatorState
from millstream.kernels.state.sorted_runs import Owned, SortedRuns

_TERM = "__term"  # UInt64: the hash of a term
_SLOT = 0
Alive = Callable[[pl.DataFrame], pl.DataFrame]
"""Leaves out, of rows with ``__hash`` and ``__tie``, those whose version is not stored any more."""


@dataclass(frozen=True)
class Postings:
    """The postings of a bucket. ``others`` are the columns that say which of them are a bucket's."""

    state: OperatorState
    family: str
    others: tuple[str, ...]
    owned: Owned
    seed: int

    @property
    def runs(self) -> SortedRuns:
        return self.state.runs(self.family, sort_column=_TERM, owned=self.owned)

    def rows_of(self, versions: pl.DataFrame) -> pl.DataFrame:
        """Return the postings of versions of queries; deletions have none."""
        rows = versions.select(NECESSARY, HASH, TIE, *self.others)
        rows = rows.filter(rows[NECESSARY].is_not_null()).explode(NECESSARY)
        terms = pl.Series(_TERM, hash_terms(rows[NECESSARY], self.seed))
        return rows.drop(NECESSARY).hstack([terms])

    def add(self, rows: pl.DataFrame, alive: Alive) -> None:
        """Add postings whose versions are stored."""
        if rows.height:
            self.runs.add(_SLOT, rows, lambda found: found, alive=alive)

    def candidates(
        self, docs: Int64s, terms: Hashes, new: pl.DataFrame | None
    ) -> tuple[Int64s, Hashes]:
        """Return pairs of a document and the hash of a query's key, each once, by document.

        ``docs`` and ``terms`` are which document has which term, by term; ``new`` are postings that are not added yet.
        """
        held = self.runs.look_up(_SLOT, sorted_distinct(terms), (_TERM, HASH, *self.others))
        found = [rows[[_TERM, HASH]] for rows in (*held, *([] if new is None else [new]))]
        queries = concat_present(found)
        if queries is None:
            return docs[:0], terms[:0]
        mine = pl.DataFrame({_TERM: terms, "doc": docs})
        pairs = mine.join(queries, on=_TERM).select("doc", HASH).unique().sort("doc", HASH)
        return pairs["doc"].to_numpy(), pairs[HASH].to_numpy()
