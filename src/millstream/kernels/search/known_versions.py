"""The versions of stored queries that the rows of a batch are tried with: which is in force at a time, and what it has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import polars as pl
import pyarrow as pa

from millstream.kernels.arrays import Bools, Int64s
from millstream.kernels.changes import group_numbers
from millstream.kernels.frames import DELETED, HASH, TIME, polars_table
from millstream.kernels.joins.asof_match import NO_MATCH, nearest_rows, without_deletions
from millstream.kernels.joins.versions import TIE, VALID_FROM
from millstream.kernels.search.stored_conditions import StoredConditions
from millstream.kernels.state.keyhash import Hashes
from millstream.kernels.state.rows_in_place import PlacedRows


class QueryPairs(NamedTuple):
    """Rows and versions of queries, by their numbers."""

    rows: Int64s
    versions: Int64s

    def where(self, true: Bools) -> QueryPairs:
        return QueryPairs(self.rows[true], self.versions[true])


@dataclass(frozen=True)
class KnownVersions:
    """The versions of queries that rows are tried with.

    ``rows`` have what is asked of all of them, ``parts`` where all columns are. ``hashes`` are those of the queries, rising, and
    ``only`` has of each the version if there is one alone. A version counts for rows that are at most ``within_us`` later.
    """

    keys: tuple[str, ...]
    within_us: int | None
    rows: pl.DataFrame
    parts: Sequence[PlacedRows]
    hashes: Hashes
    only: Int64s

    @classmethod
    def of(
        cls,
        keys: tuple[str, ...],
        within_us: int | None,
        parts: Sequence[PlacedRows],
        hashes: Hashes,
    ) -> KnownVersions:
        """Find the versions of queries whose hashes, rising, are given."""
        rows = pl.concat([part.rows for part in parts])
        held = rows[HASH].to_numpy()
        order = np.argsort(held, kind="stable")
        first = np.searchsorted(held[order], hashes)
        count = np.searchsorted(held[order], hashes, side="right") - first
        only = np.full(len(hashes), NO_MATCH, np.int64)
        only[count == 1] = order[first[count == 1]]
        return cls(keys, within_us, rows, parts, hashes, only)

    @cached_property
    def conditions(self) -> StoredConditions:
        """The conditions of the versions."""
        return StoredConditions.of_places([(part.table, part.places) for part in self.parts])

    def columns(self, names: Sequence[str], versions: Int64s) -> pl.DataFrame:
        """Return columns of versions, by their numbers."""
        found, at, first = [], [np.empty(0, np.int64)], 0
        for part in self.parts:
            mine = np.flatnonzero((versions >= first) & (versions < first + len(part.places)))
            places = part.places[versions[mine] - first]
            found.append(polars_table(part.table.select(list(names)).take(pa.array(places))))
            at.append(mine)
            first += len(part.places)
        order = np.argsort(np.concatenate(at))
        rows: pl.DataFrame = pl.concat(found)[order]
        return rows

    def in_force(self, docs: Int64s, queries: Int64s, times: Int64s) -> QueryPairs:
        """Return the candidates with the version of the query that is in force at the time of the row."""
        versions = self.only[queries]
        there = np.flatnonzero(versions != NO_MATCH)
        held = versions[there]
        age_us = times[there] - self._times[held]
        is_valid = (age_us >= 0) & (times[there] >= self._valid_from[held]) & ~self._deleted[held]
        if self.within_us is not None:
            is_valid &= age_us <= self.within_us
        found = QueryPairs(docs[there], held).where(is_valid)
        others = np.flatnonzero(versions == NO_MATCH)
        if not len(others):
            return found
        more = self._of_several(docs[others], queries[others], times[others])
        return QueryPairs(*(np.concatenate(both) for both in zip(found, more, strict=True)))

    @cached_property
    def _times(self) -> Int64s:
        return self.rows[TIME].to_numpy()

    @cached_property
    def _valid_from(self) -> Int64s:
        return self.rows[VALID_FROM].to_numpy()

    @cached_property
    def _deleted(self) -> Bools:
        return self.rows[DELETED].to_numpy()

    @cached_property
    def _several(self) -> tuple[Int64s, Int64s, pl.DataFrame]:
        """The versions that are not alone, the numbers of their keys, and the keys of each hash."""
        alone = np.zeros(self.rows.height, np.bool_)
        alone[self.only[self.only != NO_MATCH]] = True
        versions = np.flatnonzero(~alone)
        rows = self.rows[[HASH, *self.keys]][versions]
        number = group_numbers(rows, self.keys)
        return versions, number, pl.DataFrame({HASH: rows[HASH], "key": number}).unique()

    def _of_several(self, docs: Int64s, queries: Int64s, times: Int64s) -> QueryPairs:
        versions, number, keys = self._several
        given = {"doc": docs, "time": times, HASH: self.hashes[queries]}
        pairs = pl.DataFrame(given).join(keys, on=HASH, maintain_order="left")
        if not pairs.height:  # postings of versions that are gone
            return QueryPairs(docs[:0], docs[:0])
        nearest = nearest_rows(
            (pairs["key"].to_numpy(), pairs["time"].to_numpy()),
            (number, self._times[versions], self.rows[TIE].to_numpy()[versions]),
            direction="backward",
            allow_equal=True,
            tolerance_us=self.within_us,
            valid_from=self._valid_from[versions],
        )
        nearest = without_deletions(nearest, pl.Series(self._deleted[versions]))
        found = nearest != NO_MATCH
        return QueryPairs(pairs["doc"].to_numpy()[found], versions[nearest[found]])
