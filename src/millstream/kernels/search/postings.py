"""The index of queries in an operator's state: by the hash of a necessary term, the queries that have it.

A posting is a term and the hash of a query's key, with the version of the query that has it. It says only where to
look: which version is valid, and whether it matches, is decided by what is stored of the query. So postings of versions that
are gone do no harm; they are left out when runs are folded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import polars as pl

from millstream.kernels.arrays import Int64s
from millstream.kernels.frames import HASH
from millstream.kernels.joins.versions import TIE
from millstream.kernels.search.compiled_queries import NECESSARY
from millstream.kernels.search.documents import hash_terms
from millstream.kernels.search.verify import parts_of
from millstream.kernels.state.hash_order import (
    differs_from_previous,
    sort_by_hash,
    sorted_distinct,
)
from millstream.kernels.state.hash_search import positions_of
from millstream.kernels.state.keyhash import Hashes
from millstream.kernels.state.operator_state import OperatorState
from millstream.kernels.state.sorted_runs import Owned, SortedRuns

_TERM = "__term"  # UInt64: the hash of a term
_SLOT = 0
_PAIR = {_TERM: pl.UInt64(), HASH: pl.UInt64()}
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
        self, terms: Iterable[tuple[Int64s, Hashes]], new: pl.DataFrame | None
    ) -> Candidates:
        """Return the queries that have one of some terms.

        ``terms`` are in parts, of which each says which document has which term. ``new`` are postings that are not added yet.
        """
        new = None if new is None else sort_by_hash(new[[_TERM, HASH]], _TERM)
        docs, having, postings = [], [], [pl.DataFrame(schema=_PAIR)]
        for of_term, every in terms:
            wanted = sorted_distinct(every)
            found = list(self._look_up(wanted, new))
            if found:
                there = sorted_distinct(np.concatenate([rows[_TERM].to_numpy() for rows in found]))
                place = np.minimum(np.searchsorted(there, every), len(there) - 1)
                at = np.flatnonzero(there[place] == every)
                docs.append(of_term[at])
                having.append(every[at])
                postings += found
        none = np.empty(0, np.int64)
        return Candidates(
            np.concatenate([none, *docs]),
            np.concatenate([none.view(np.uint64), *having]),
            pl.concat(postings),
        )

    def _look_up(self, wanted: Hashes, new: pl.DataFrame | None) -> Iterator[pl.DataFrame]:
        for rows in self.runs.look_up(_SLOT, wanted, (_TERM, HASH, *self.others)):
            yield rows[[_TERM, HASH]]
        if new is not None:
            at = positions_of(new[_TERM].to_numpy(), wanted)
            if len(at):
                yield new[at]


@dataclass(frozen=True)
class Candidates:
    """The queries that documents may match. Pairs are made of some documents at a time: there may be very many.

    ``docs`` and ``terms`` are which document has which term.
    """

    docs: Int64s
    terms: Hashes
    postings: pl.DataFrame

    @cached_property
    def hashes(self) -> Hashes:
        """The hashes of the keys of all of the queries, rising."""
        return sorted_distinct(self.postings[HASH].to_numpy())

    def pairs(self, most: int) -> Iterator[tuple[Int64s, Int64s]]:
        """Yield pairs of a document and a query, each once, by document; queries by their numbers in :attr:`hashes`.

        At a time all pairs of some documents are made: at most so many, or those of one document.
        """
        order = np.argsort(self.postings[_TERM].to_numpy())
        indexed = self.postings[_TERM].to_numpy()[order]
        queries = np.searchsorted(self.hashes, self.postings[HASH].to_numpy()[order])
        first = np.searchsorted(indexed, self.terms)
        count = np.searchsorted(indexed, self.terms, side="right") - first
        having = np.flatnonzero(count)
        having = having[np.argsort(self.docs[having], kind="stable")]
        docs, first, count = self.docs[having], first[having], count[having]
        starts = np.flatnonzero(differs_from_previous(docs))
        of_doc = np.add.reduceat(count, starts) if len(starts) else count
        bounds = np.append(starts, len(docs))
        for one, end in parts_of(of_doc, most):
            mine = slice(bounds[one], bounds[end])
            each = count[mine]
            place = np.arange(each.sum()) + np.repeat(first[mine] - (np.cumsum(each) - each), each)
            pairs = np.sort(np.repeat(docs[mine], each) * len(self.hashes) + queries[place])
            pairs = pairs[differs_from_previous(pairs)]
            yield pairs // len(self.hashes), pairs % len(self.hashes)
