"""The rows of keys that row patterns are matched in, as a batch has them and as state keeps them.

State has of each key the rows from where the next match may begin, as many before these as conditions and measures look at,
and one entry: where that is, the number of the last match, and where rows end that a match has. The rows are those that wait for what
comes, and the search begins anew with them: a search is a function of its rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl

from millstream.kernels.arrays import Bools, Int64s, first_places, stable_order
from millstream.kernels.changes import group_numbers
from millstream.kernels.frames import HASH, TIME
from millstream.kernels.patterns import row_tables as t
from millstream.kernels.patterns.keyed_matches import Known
from millstream.kernels.patterns.tables import Places

_NUMBER = "__number"  # Int64: of a row within its key
_ENTRY = {"__start": t.NEXT_START, "__matches": t.MATCH_NUMBER, "__matched": t.MATCHED_UNTIL}
_NEW = np.iinfo(np.int64).max  # the number of a row that has none yet: it comes after the others


@dataclass(frozen=True)
class RowPatternBatch:
    """The rows of a batch, key by key and in their order; those that state had come first.

    ``keys`` has an entry for each key; its places are of ``rows``.
    """

    key: tuple[str, ...]
    rows: pl.DataFrame
    group: Int64s
    rows_of: Int64s
    new_from: Int64s
    key_columns: pl.DataFrame
    keys: Places

    @classmethod
    def of(cls, known: Known, new: pl.DataFrame, by: Sequence[str]) -> RowPatternBatch:
        """Put what was held together with the new rows, which are in their order."""
        key = (HASH, *by)
        numbered = new.with_columns(pl.lit(_NEW, pl.Int64).alias(_NUMBER))
        rows = numbered
        if known.rows is not None:
            rows = pl.concat([known.rows[numbered.columns], numbered])
        every = rows[list(key)]
        if known.entries is not None:
            every = pl.concat([every, known.entries[list(key)]])
        numbers = group_numbers(every, key)
        of_rows, of_entries = numbers[: rows.height], numbers[rows.height :]
        groups = int(numbers.max(initial=-1)) + 1
        order = stable_order(of_rows)
        held_of = np.bincount(of_rows[rows[_NUMBER].to_numpy() != _NEW], minlength=groups)
        rows_of = np.concatenate([[0], np.cumsum(np.bincount(of_rows, minlength=groups))])
        keys = np.zeros((groups, len(_ENTRY)), np.int64)
        if known.entries is not None:
            for name, place in _ENTRY.items():
                keys[of_entries, place] = known.entries[name].to_numpy()
        keys[:, t.NEXT_START] += rows_of[:-1]
        keys[:, t.MATCHED_UNTIL] += rows_of[:-1]
        ordered = rows[order]
        assert _rise_within(ordered[_NUMBER].to_numpy(), of_rows[order]), "state keeps their order"
        return cls(
            key=key,
            rows=ordered,
            group=of_rows[order],
            rows_of=rows_of.astype(np.int64),
            new_from=(rows_of[:-1] + held_of).astype(np.int64),
            key_columns=every[first_places(numbers)],
            keys=keys,
        )

    def were_held(self) -> Bools:
        """Return which rows state had."""
        held: Bools = np.arange(self.rows.height) < self.new_from[self.group]
        return held

    def kept(
        self,
        keys: Places,
        rows_behind: int,
        within_us: int | None,
        until_us: int,
        *,
        numbered: bool,
    ) -> Known:
        """Return what state is to have when the matcher has left the keys so.

        ``rows_behind``: how many rows before the start are looked at, those at most ``within_us`` before it. A start that is not
        there yet is after ``until_us``. ``numbered``: the number of a key's last match is to be kept, for ever.
        """
        start = keys[:, t.NEXT_START]
        begins = np.maximum(self.rows_of[:-1], start - rows_behind)
        place = np.arange(self.rows.height)
        is_kept = place >= begins[self.group]
        if within_us is not None and self.rows.height:
            times = self.rows[TIME].to_numpy()
            is_there = start < self.rows_of[1:]
            began = np.where(is_there, times[np.where(is_there, start, 0)], until_us + 1)
            is_kept &= times >= (began - within_us)[self.group]
        rows = self.rows[np.flatnonzero(is_kept)]
        count = np.bincount(self.group[is_kept], minlength=len(keys))
        has_entry = count > 0
        if numbered:
            has_entry |= keys[:, t.MATCH_NUMBER] > 0
        if not has_entry.any():
            return Known(None, None)
        first = self.rows_of[1:] - count  # rows that are kept are the last ones of their keys
        entry = keys[has_entry] - np.stack([first, np.zeros_like(first), first], 1)[has_entry]
        columns = {
            "__start": entry[:, t.NEXT_START],
            "__matches": entry[:, t.MATCH_NUMBER] if numbered else np.zeros(len(entry), np.int64),
            "__matched": np.maximum(entry[:, t.MATCHED_UNTIL], 0),
        }
        number = np.flatnonzero(is_kept) - first[self.group[is_kept]]
        return Known(
            rows.with_columns(pl.Series(_NUMBER, number)) if rows.height else None,
            self.key_columns[np.flatnonzero(has_entry)].hstack(
                [pl.Series(name, made) for name, made in columns.items()]
            ),
        )

    def starts(self, keys: Places) -> tuple[Int64s, Int64s]:
        """Return which keys have a row where the next match may begin, or a last row, and which row that is."""
        has_rows = np.flatnonzero(np.diff(self.rows_of))
        return has_rows, np.minimum(keys[has_rows, t.NEXT_START], self.rows_of[has_rows + 1] - 1)


def _rise_within(numbers: Int64s, groups: Int64s) -> bool:
    """Return whether numbers don't fall within a group; rows of a group are together."""
    return bool(((numbers[1:] >= numbers[:-1]) | (groups[1:] != groups[:-1])).all())
