"""State by key: the rows of a key, replaced as a whole; of several runs the newest that has it counts.

Keys are distinguished by their hash alone: the rows of all keys with one hash are read and replaced
together. A caller reads the rows, changes those of its keys, and puts all of them back; so the rows of
other keys that share a hash are kept.

If rows are counted, a put names the rows that were read: their events are then spent, and a fold finds
rows that were replaced without having been read.

A put is one more sorted run (:mod:`millstream.kernels.state.sorted_runs`), so it costs what it touches;
reading a key costs a search in each run down to the newest one that has it. A hash without rows is a mark that older runs do not
count; marks go when they are folded into the oldest run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa

from millstream.kernels.arrays import Int64s
from millstream.kernels.columns import constant, filter_rows, gather_rows
from millstream.kernels.frames import HASH, in_one_chunk
from millstream.kernels.state.found_rows import FoundRows, in_order
from millstream.kernels.state.hash_order import sort_by_hash, sorted_distinct
from millstream.kernels.state.hash_parts import parts_by_hash
from millstream.kernels.state.hash_search import find, newest
from millstream.kernels.state.keyhash import Hashes
from millstream.kernels.state.operator_state import OperatorState
from millstream.kernels.state.sorted_runs import SortedRuns, newest_run

_VERSION = "__version"  # Int64: grows with every put
_GONE = "__gone"  # Boolean: a mark that the hash has no rows
_SLOT = 0

Usual = tuple[str, pl.DataType, Any]
"""A column, its type, and its value in nearly all rows."""


@dataclass
class KeyedRows:
    """The rows of keys in one family of an operator's state, with ``__hash`` and fixed columns.

    ``counted``, ``signed`` and ``numbered`` are as in :class:`SortedRuns`. ``usual`` are columns that a run leaves out if all
    of its rows have the value that is given here. If there are any, versions, and marks where there are none, are left
    out, too: programs that read these must not be those that miss such columns.
    """

    state: OperatorState
    family: str
    counted: str | None = None
    signed: bool = False
    numbered: str | None = None
    usual: tuple[Usual, ...] = ()

    @property
    def runs(self) -> SortedRuns:
        return self.state.runs(
            self.family, self.counted, signed=self.signed, numbered=self.numbered
        )

    def get(self, hashes: Hashes, columns: Sequence[str] | None = None) -> pl.DataFrame | None:
        """Return the rows of these hashes (sorted, distinct), in their order; None if there are none.

        ``columns`` are those that are wanted, with ``__hash``; by default all.
        """
        found = list(self._newest_first(hashes))
        if not found:
            return None
        names = [*(columns or self._columns(found[0].table)), *self._marks(found)]
        return _without_marks(in_order(found, hashes, names, self._read))

    def _newest_first(self, hashes: Hashes) -> Iterator[FoundRows]:
        """Yield where these hashes are, each in the newest run that has it: in that all its rows are."""
        older = list(self.runs.slots.get(_SLOT, ()))
        left: Int64s | None = None  # of all hashes
        while older and (left is None or len(left)):
            parts = newest_run(older)
            del older[-len(parts) :]
            wanted = hashes if left is None else hashes[left]
            missed = np.ones(len(wanted), np.bool_)
            for part in parts:
                table = self.runs.table(part)
                places, numbers = find(table.column(HASH).chunk(0).to_numpy(), wanted)
                if len(places):
                    missed[numbers] = False
                    yield FoundRows(part, table, places, numbers if left is None else left[numbers])
            if older:
                left = np.flatnonzero(missed) if left is None else left[missed]

    def _read(self, found: FoundRows, names: Sequence[str]) -> pl.DataFrame:
        # With the hashes, as a table of no columns would have no rows.
        there = [n for n in found.table.column_names if n == HASH or n in names]
        rows = self.runs.own_rows(found.run, found.table.select(there).take(pa.array(found.places)))
        return self._filled(rows, names)[[*names]]

    def _columns(self, table: pa.Table) -> list[str]:
        """Return the columns of rows, also those that a run may leave out."""
        others = [name for name, *_ in self.usual if name not in table.column_names]
        return [name for name in (*table.column_names, *others) if name not in (_VERSION, _GONE)]

    def _marks(self, found: Sequence[FoundRows]) -> list[str]:
        return [_GONE] if any(_GONE in one.table.column_names for one in found) else []

    def put(self, hashes: Hashes, rows: pl.DataFrame, known: pl.DataFrame | None = None) -> None:
        """Let ``rows`` be all that is held of these hashes (sorted, distinct).

        ``known`` is what :meth:`get` gave of them.
        """
        if not len(hashes):
            return
        if known is not None:
            self.runs.spend(_SLOT, self.runs.count(known))
        version = 0 if self.usual else self._next_version()
        stored = self._slim(rows.hstack(self._stamps(version, rows.height, gone=False)))
        gone = _without(hashes, rows[HASH].to_numpy())
        if len(gone) and self.runs.slots.get(_SLOT):
            marks = pl.Series(HASH, gone), *self._stamps(version, len(gone), gone=True)
            given = self._filled(stored, [name for name in (self.counted, _GONE) if name])
            stored = pl.concat([given, pl.DataFrame(marks)], how="diagonal")[given.columns]
        if stored.height:
            self.runs.replace(_SLOT, stored, self._folded)

    def remove(self, hashes: Hashes) -> None:
        """Forget all rows of these hashes."""
        found = self.get(hashes)
        if found is not None:
            self.put(sorted_distinct(found[HASH].to_numpy()), found.clear(), found)

    def scan(self) -> pl.DataFrame | None:
        """Return all rows. It costs all that is held: for tests and for looking at state."""
        pieces = list(self.runs.scan(_SLOT))
        return self._shown(pieces) if pieces else None

    def parts(self, rows_max: int) -> Iterator[pl.DataFrame]:
        """Yield all rows in parts, each made of about ``rows_max`` stored rows: those of a range of hashes."""
        for pieces in parts_by_hash(self.runs, _SLOT, rows_max):
            rows = self._shown(pieces)
            if rows is not None:
                yield rows

    def _shown(self, pieces: Sequence[pl.DataFrame]) -> pl.DataFrame | None:
        names = [name for name, *_ in self._may_lack]
        return _without_marks(_newest([self._filled(piece, names) for piece in pieces]))

    def _next_version(self) -> int:
        name = f"{self.family}.version"
        version: int = self.state.values.get(name, 0) + 1
        self.state.values[name] = version
        return version

    def _stamps(self, version: int, count: int, *, gone: bool) -> list[pl.Series]:
        versions = [] if self.usual else [constant(version, count, pl.Int64, _VERSION)]
        return [*versions, constant(gone, count, pl.Boolean, _GONE)]

    def _folded(self, pieces: Sequence[pl.DataFrame]) -> pl.DataFrame:
        had = {name for rows in pieces for name in rows.columns}
        names = [name for name, *_ in self._may_lack if name in had]
        kept = _newest([self._filled(rows, names) for rows in pieces])
        older = self.runs.slots.get(_SLOT)  # which marks must go on hiding
        if not older and _GONE in kept.columns:
            kept = filter_rows(kept, ~kept[_GONE].to_numpy())
        return self._slim(kept)

    # ── columns that a run may leave out ────────────────────────────────────────────────────

    @property
    def _may_lack(self) -> Sequence[Usual]:
        return (*self.usual, (_GONE, pl.Boolean(), False)) if self.usual else ()

    def _filled(self, rows: pl.DataFrame, names: Sequence[str]) -> pl.DataFrame:
        """Return rows with those of the columns that their run has left out; without versions, if it may leave out columns."""
        missing = [
            pl.Series(name, [value], dtype).new_from_index(0, rows.height)
            for name, dtype, value in self._may_lack
            if name in names and name not in rows.columns
        ]
        rows = rows.hstack(missing) if missing else rows
        return rows.drop(_VERSION) if self.usual and _VERSION in rows.columns else rows

    def _slim(self, rows: pl.DataFrame) -> pl.DataFrame:
        """Return rows without the columns that have their usual value in all of them."""
        usual = [
            name
            for name, _, value in self._may_lack
            if name in rows.columns and _has_only(rows[name], value)
        ]
        return rows.drop(usual) if usual else rows


def _has_only(column: pl.Series, value: Any) -> bool:
    if value == []:  # a mark has no list
        return not column.list.len().sum()
    return not column.null_count() and bool((column == value).all())


def _newest(pieces: Sequence[pl.DataFrame]) -> pl.DataFrame:
    """Keep, of each hash, the rows of the last piece that has it; in the order of hashes."""
    if len(pieces) == 1:
        return pieces[0]
    pieces = _alike([sort_by_hash(rows) for rows in pieces])
    names = pieces[0].columns
    hashes, places = newest([rows[HASH].to_numpy() for rows in pieces])
    rows = gather_rows(in_one_chunk([rows.drop(HASH) for rows in pieces]), places)
    return rows.insert_column(names.index(HASH), pl.Series(HASH, hashes))


def _alike(tables: Sequence[pl.DataFrame]) -> list[pl.DataFrame]:
    """Return tables with their columns in the order of those of the first one."""
    names = tables[0].columns
    return [rows if rows.columns == names else rows[names] for rows in tables]


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
    marked = _GONE in rows.columns and rows[_GONE].any()
    kept = rows.filter(~rows[_GONE]) if marked else rows
    wanted = [name for name in kept.columns if name not in (_VERSION, _GONE)]
    return kept[wanted] if kept.height else None
