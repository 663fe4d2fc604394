"""Partial matches in state: of each key, the entries that are alive, and the rows that they took.

Both are read and replaced key by key (:mod:`millstream.kernels.state.keyed_rows`). Within a key, entries and rows are
numbered from 0, in their order: an entry names the entry before it and its row by these numbers. What is known of
the rows of an entry (aggregates, when it began) is worked out again when it is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl

from millstream.errors import CorruptionError
from millstream.kernels.arrays import Bools, Int64s
from millstream.kernels.changes import group_numbers
from millstream.kernels.frames import HASH, WEIGHT
from millstream.kernels.patterns import tables as m
from millstream.kernels.state.keyed_rows import KeyedRows
from millstream.kernels.state.keyhash import Hashes
from millstream.kernels.state.operator_state import OperatorState

FORMAT = 1  # of what is stored; a change of it needs a way from the one before
_FORMAT_VALUE = "patterns.format"
_NUMBER = "__number"  # Int64: of a row, or an entry, within its key
_PARENT, _ROW, _STATE, _COUNT = "__parent", "__row", "__state", "__count"
_MASK, _FRESH, _COMPLETE, _LIVE = "__mask", "__fresh", "__complete", "__live"
_STORED = {
    _STATE: m.STATE,
    _COUNT: m.COUNT,
    _MASK: m.MASK,
    _FRESH: m.FRESH,
    _COMPLETE: m.COMPLETE,
    _LIVE: m.LIVE,
}
_NEW = np.iinfo(np.int64).max  # the number of a row that has none yet: it comes after the others


@dataclass(frozen=True)
class KeyedMatches:
    """The partial matches of one operator in one bucket; ``by`` are the columns of the key."""

    state: OperatorState
    by: tuple[str, ...]

    def __post_init__(self) -> None:
        stored = self.state.values.setdefault(_FORMAT_VALUE, FORMAT)
        if stored != FORMAT:
            raise CorruptionError(
                f"The partial matches in state have format {stored}, and this version of Millstream reads format "
                f"{FORMAT}. Run the version that wrote them, or rebuild the state (millstream reset)."
            )

    @property
    def rows(self) -> KeyedRows:
        return KeyedRows(self.state, "rows", WEIGHT)

    @property
    def entries(self) -> KeyedRows:
        return KeyedRows(self.state, "entries")

    def read(self, hashes: Hashes) -> Known:
        """Return what is held of keys with these hashes (sorted, distinct)."""
        entries = self.entries.get(hashes)
        return Known(None if entries is None else self.rows.get(hashes), entries)

    def write(self, hashes: Hashes, known: Known, kept: Known) -> None:
        """Let what is kept be all that is held of keys with these hashes."""
        for stored, before, after in (
            (self.rows, known.rows, kept.rows),
            (self.entries, known.entries, kept.entries),
        ):
            if after is not None:
                stored.put(hashes, after, before)
            elif before is not None:
                stored.put(hashes, before.clear(), before)

    def scan(self) -> Known:
        """Return everything that is held: for looking at it."""
        return Known(self.rows.scan(), self.entries.scan())


@dataclass(frozen=True)
class Known:
    """Rows and entries as state has them; None where there are none."""

    rows: pl.DataFrame | None
    entries: pl.DataFrame | None


@dataclass(frozen=True)
class KeyedBatch:
    """Rows and entries of a batch as the matcher takes them, key by key.

    ``rows`` are the rows that were held and the new ones, by key and in their order; ``group`` is the number of each one's
    key. ``entries`` are those that were held, of which the first has number 1.
    """

    key: tuple[str, ...]
    rows: pl.DataFrame
    group: Int64s
    rows_of: Int64s
    new_from: Int64s
    entries_of: Int64s
    entries: m.Places

    @classmethod
    def of(cls, known: Known, new: pl.DataFrame, by: Sequence[str]) -> KeyedBatch:
        """Put what was held together with the new rows, which are in their order."""
        key = (HASH, *by)
        numbered = new.with_columns(pl.lit(_NEW, pl.Int64).alias(_NUMBER))
        rows, entries = numbered, known.entries
        if known.rows is not None:
            rows = pl.concat([known.rows[numbered.columns], numbered])
        every = rows[list(key)]
        if entries is not None:
            every = pl.concat([every, entries[list(key)]])
        numbers = group_numbers(every, key)
        of_rows, of_entries = numbers[: rows.height], numbers[rows.height :]
        groups = int(numbers.max(initial=-1)) + 1
        order = np.lexsort((rows[_NUMBER].to_numpy(), of_rows))
        held_of = np.bincount(of_rows[rows[_NUMBER].to_numpy() != _NEW], minlength=groups)
        rows_of, entries_of = _starts(of_rows, groups), 1 + _starts(of_entries, groups)
        return cls(
            key=key,
            rows=rows[order],
            group=of_rows[order],
            rows_of=rows_of,
            new_from=rows_of[:-1] + held_of,
            entries_of=entries_of,
            entries=_placed(entries, of_entries, rows_of, entries_of),
        )

    def were_held(self) -> Bools:
        """Return which rows state had."""
        held: Bools = np.arange(self.rows.height) < self.new_from[self.group]
        return held

    def kept(self, work: m.Work, is_kept: m.Bytes) -> Known:
        """Return what state is to have: the entries that are kept, and their rows."""
        places = np.flatnonzero(is_kept[1:]) + 1
        if not len(places):
            return Known(None, None)
        places = places[np.argsort(self.group[work.entries[places, m.ROW]], kind="stable")]
        entries = work.entries[places]
        number = np.full(len(is_kept), -1)
        number[places] = _within(self.group[entries[:, m.ROW]])
        taken = np.unique(entries[:, m.ROW])
        row_number = np.zeros(self.rows.height, np.int64)
        row_number[taken] = _within(self.group[taken])
        parents = entries[:, m.PARENT]
        columns = {
            _NUMBER: number[places],
            _PARENT: np.where(parents > 0, number[parents], -1),
            _ROW: row_number[entries[:, m.ROW]],
            **{name: entries[:, place] for name, place in _STORED.items()},
        }
        keys = self.rows[list(self.key)][entries[:, m.ROW]]
        return Known(
            self.rows[taken].with_columns(pl.Series(_NUMBER, row_number[taken])),
            keys.hstack([pl.Series(name, made) for name, made in columns.items()]),
        )


def _placed(
    entries: pl.DataFrame | None, groups: Int64s, rows_of: Int64s, entries_of: Int64s
) -> m.Places:
    """Return the entries that were held, in their order, with the places of their rows and of the entries before them."""
    if entries is None:
        return np.zeros((0, m.ENTRY_WIDTH), np.int64)
    order = np.lexsort((entries[_NUMBER].to_numpy(), groups))
    entries, groups = entries[order], groups[order]
    placed = np.zeros((entries.height, m.ENTRY_WIDTH), np.int64)
    parents = entries[_PARENT].to_numpy()
    placed[:, m.PARENT] = np.where(parents >= 0, entries_of[groups] + parents, 0)
    placed[:, m.ROW] = rows_of[groups] + entries[_ROW].to_numpy()
    for name, place in _STORED.items():
        placed[:, place] = entries[name].to_numpy()
    return placed


def _starts(groups: Int64s, count: int) -> Int64s:
    """Return where each of so many groups begins, and where the last one ends, if all are in their order."""
    return np.concatenate([[0], np.cumsum(np.bincount(groups, minlength=count))]).astype(np.int64)


def _within(groups: Int64s) -> Int64s:
    """Return numbers of things within their groups, which are in their order, from 0."""
    first = np.flatnonzero(np.diff(groups, prepend=-1))
    return np.arange(len(groups)) - np.repeat(first, np.diff(first, append=len(groups)))
