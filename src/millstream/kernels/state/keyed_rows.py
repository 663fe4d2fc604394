"""State by key: the rows of a key, replaced as a whole; of several versions the newest counts.

Keys are distinguished by their hash alone: the rows of all keys with one hash are read and replaced
together. A caller reads the rows, changes those of its keys, and puts all of them back; so the rows of
other keys that share a hash are kept.

If rows are counted, a put names the rows that were read: their events are then spent, and a fold finds
rows that were replaced without having been read.

A put is one more sorted run (:mod:`millstream.kernels.state.sorted_runs`), so it costs what it touches;
reading a key costs a binary search in each run down to the newest one that has it. A hash without rows is a mark that older runs do not
count; marks go when they are folded into the oldest run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl
import pyarrow as pa

from millstream.kernels.frames import HASH
from millstream.kernels.state.hash_order import (
    differs_from_previous,
    sort_by_hash,
    sorted_distinct,
)
from millstream.kernels.state.hash_parts import parts_by_hash
from millstream.kernels.state.keyhash import Hashes
from millstream.kernels.state.operator_state import OperatorState
from millstream.kernels.state.sorted_runs import Run, SortedRuns, newest_run, positions_of

_VERSION = "__version"  # Int64: grows with every put
_GONE = "__gone"  # Boolean: a mark that the hash has no rows
_SLOT = 0


@dataclass
class KeyedRows:
    """The rows of keys in one family of an operator's state, with ``__hash`` and fixed columns.

    ``counted``, ``signed`` and ``numbered`` are as in :class:`SortedRuns`.
    """

    state: OperatorState
    family: str
    counted: str | None = None
    signed: bool = False
    numbered: str | None = None

    @property
    def runs(self) -> SortedRuns:
        return self.state.runs(
            self.family, self.counted, signed=self.signed, numbered=self.numbered
        )

    def get(self, hashes: Hashes, columns: Sequence[str] | None = None) -> pl.DataFrame | None:
        """Return the rows of these hashes (sorted, distinct); None if there are none.

        ``columns`` are those that are wanted, with ``__hash``; by default all.
        """
        wanted = None if columns is None else [*columns, _GONE]
        found = list(self._newest_first(hashes, wanted))
        if not found:
            return None
        return _without_marks(found[0] if len(found) == 1 else sort_by_hash(pl.concat(found)))

    def _newest_first(
        self, hashes: Hashes, columns: Sequence[str] | None
    ) -> Iterator[pl.DataFrame]:
        """Yield the rows of these hashes, each hash from the newest run that has it: of that all its rows are."""
        older = list(self.runs.slots.get(_SLOT, ()))
        while older and len(hashes):
            parts = newest_run(older)
            del older[-len(parts) :]
            rows = [found for part in parts for found in self._in_part(part, hashes, columns)]
            yield from rows
            for found in rows if older else ():
                there = np.ones(len(hashes), np.bool_)
                there[np.searchsorted(hashes, found[HASH].to_numpy())] = False
                hashes = hashes[there]

    def _in_part(
        self, part: Run, hashes: Hashes, columns: Sequence[str] | None
    ) -> Iterator[pl.DataFrame]:
        table = self.runs.table(part)
        places = positions_of(table.column(HASH).chunk(0).to_numpy(), hashes)
        if len(places):
            table = table if columns is None else table.select(list(columns))
            yield self.runs.own_rows(part, table.take(pa.array(places)))

    def put(self, hashes: Hashes, rows: pl.DataFrame, known: pl.DataFrame | None = None) -> None:
        """Let ``rows`` be all that is held of these hashes (sorted, distinct).

        ``known`` is what :meth:`get` gave of them.
        """
        if not len(hashes):
            return
        if known is not None:
            self.runs.spend(_SLOT, self.runs.count(known))
        version = self._next_version()
        versioned = rows.with_columns(
            pl.lit(version, pl.Int64).alias(_VERSION), pl.lit(value=False).alias(_GONE)
        )
        gone = _without(hashes, rows[HASH].to_numpy())
        if len(gone) and self.runs.slots.get(_SLOT):
            marks = pl.DataFrame({HASH: gone}).with_columns(
                pl.lit(version, pl.Int64).alias(_VERSION), pl.lit(value=True).alias(_GONE)
            )
            versioned = pl.concat([versioned, marks], how="diagonal")[versioned.columns]
        if versioned.height:
            self.runs.add(_SLOT, versioned, lambda rows: rows, alive=self._alive)

    def remove(self, hashes: Hashes) -> None:
        """Forget all rows of these hashes."""
        found = self.get(hashes)
        if found is not None:
            self.put(sorted_distinct(found[HASH].to_numpy()), found.clear(), found)

    def scan(self) -> pl.DataFrame | None:
        """Return all rows. It costs all that is held: for tests and for looking at state."""
        parts = list(self.runs.scan(_SLOT))
        return _without_marks(_newest(pl.concat(parts))) if parts else None

    def parts(self, rows_max: int) -> Iterator[pl.DataFrame]:
        """Yield all rows in parts, each made of about ``rows_max`` stored rows: those of a range of hashes."""
        for pieces in parts_by_hash(self.runs, _SLOT, rows_max):
            rows = _without_marks(_newest(pl.concat(pieces)))
            if rows is not None:
                yield rows

    def _next_version(self) -> int:
        name = f"{self.family}.version"
        version: int = self.state.values.get(name, 0) + 1
        self.state.values[name] = version
        return version

    def _alive(self, rows: pl.DataFrame) -> pl.DataFrame:
        newest = _newest(rows)
        if self.runs.slots.get(_SLOT):  # an older run is left, which marks must go on hiding
            return newest
        return newest.filter(~pl.col(_GONE))


def _newest(rows: pl.DataFrame) -> pl.DataFrame:
    """Keep, of each hash, the rows of the newest version, of rows oldest first; in the order of hashes."""
    if not rows.height:
        return rows
    order = np.argsort(rows[HASH].to_numpy(), kind="stable")
    hashes, versions = rows[HASH].to_numpy()[order], rows[_VERSION].to_numpy()[order]
    starts = differs_from_previous(hashes)
    ends = np.append(np.flatnonzero(starts)[1:], len(order)) - 1
    is_newest = np.zeros(len(order), np.bool_)
    if (~starts[1:] & (versions[1:] == versions[:-1])).any():
        counts = np.diff(ends, prepend=-1)
        newest = np.maximum.reduceat(versions, ends - counts + 1)
        is_newest = versions == np.repeat(newest, counts)
    else:
        is_newest[ends] = True
    kept: pl.DataFrame = rows[order[is_newest]]
    return kept


def _without(hashes: Hashes, others: Hashes) -> Hashes:
    """Return the hashes (sorted, distinct) that are not among others."""
    if np.array_equal(hashes, others):
        return hashes[:0]
    if not len(others):
        return hashes
    rising = np.sort(others)
    places = np.minimum(np.searchsorted(rising, hashes), len(rising) - 1)
    left: Hashes = hashes[rising[places] != hashes]
    return left


def _without_marks(rows: pl.DataFrame) -> pl.DataFrame | None:
    kept = rows.filter(~rows[_GONE]) if rows[_GONE].any() else rows
    wanted = [name for name in kept.columns if name not in (_VERSION, _GONE)]
    return kept[wanted] if kept.height else None
