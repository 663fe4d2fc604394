"""The versions of keys in state: those that some row may still match, and no others for long.

A version is added without anything being read. Versions that no row matches any more leave the state when
runs are folded: rows still to be matched have times after a horizon, so of each key only the newest
version that counts from the horizon or before is needed, and those that count later. Where rows match later
versions alone, none up to it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import polars as pl

from millstream.kernels.changes import concat_present
from millstream.kernels.frames import DELETED, ORDER, TIME, nulls_like, visible
from millstream.kernels.state.hash_order import last_of_key, sort_by_hash, sorted_distinct
from millstream.kernels.state.keyhash import Hashes
from millstream.kernels.state.operator_state import OperatorState
from millstream.kernels.state.row_digest import digest_rows
from millstream.kernels.state.rows_in_place import PlacedRows, look_up_in_place
from millstream.kernels.state.sorted_runs import EACH_ROW, Owned, SortedRuns

TIE = "__tie"  # Int64: orders versions of one time: the place in the log, or a digest of the row
VALID_FROM = "__valid_from"  # Int64: from which time of a row to be matched on the version counts
_SLOT = 0


@dataclass(frozen=True)
class Horizon:
    """Rows to be matched have times after ``at_us``, and match versions from ``oldest_us`` on.

    ``at_us`` may rise. ``newest``: of a key they match the newest version up to the horizon.
    """

    at_us: int
    oldest_us: int | None
    newest: bool


@dataclass
class Versions:
    """The versions of keys, with ``__time``, a tie, ``__valid_from``, ``__deleted`` and fixed columns.

    ``keeps_deletions``: an older version may yet come, which a deletion must go on hiding. ``left`` counts
    the versions that have left the state. ``owned`` says which are in a share of a run, where buckets are not chosen by
    the ``__hash`` of the versions.
    """

    state: OperatorState
    family: str
    keys: tuple[str, ...]
    keeps_deletions: bool = False
    left: int = 0
    owned: Owned | None = None

    @property
    def runs(self) -> SortedRuns:
        return self.state.runs(self.family, EACH_ROW, owned=self.owned)

    def look_up(self, hashes: Hashes, columns: Sequence[str] | None = None) -> pl.DataFrame | None:
        """Return the versions with these hashes, those no longer needed among them; None: there are none.

        Versions of other keys with the same hash come along: compare the keys. ``columns`` are those that are wanted,
        with those that ``owned`` looks at; by default all.
        """
        if not len(hashes):
            return None
        return concat_present(list(self.runs.look_up(_SLOT, sorted_distinct(hashes), columns)))

    def look_up_in_place(self, hashes: Hashes, columns: Sequence[str]) -> Iterator[PlacedRows]:
        """Yield the versions with these hashes (sorted, distinct), of which some columns are copied."""
        return look_up_in_place(self.runs, _SLOT, hashes, columns)

    def add(self, versions: pl.DataFrame, horizon: Horizon) -> int:
        """Add versions (with ``__hash``), and return how many of them are kept."""
        kept = self._needed(versions, horizon)
        if kept.height:
            self.runs.add(
                _SLOT, kept, lambda rows: rows, alive=lambda rows: self._folded(rows, horizon)
            )
        return kept.height

    def _folded(self, rows: pl.DataFrame, horizon: Horizon) -> pl.DataFrame:
        kept = self._needed(rows, horizon)
        gone = rows.height - kept.height
        self.runs.spend(_SLOT, gone)
        self.left += gone
        return kept

    def _needed(self, rows: pl.DataFrame, horizon: Horizon) -> pl.DataFrame:
        after = rows[VALID_FROM] > horizon.at_us
        if not horizon.newest:
            return rows.filter(after)
        past = rows.filter(~after).sort(TIME, TIE, maintain_order=True)
        past = past.filter(last_of_key(past, self.keys))
        if horizon.oldest_us is not None:
            past = past.filter(past[TIME] >= horizon.oldest_us)
        older = self.runs.slots.get(_SLOT)  # runs, whose versions deletions must go on hiding
        if not older and not self.keeps_deletions:
            past = past.filter(~past[DELETED])
        return sort_by_hash(pl.concat([past, rows.filter(after)]))


def row_order(rows: pl.DataFrame) -> pl.Series:
    """Return what orders rows of one time: their place in the log, or a digest where they have none."""
    if ORDER in rows.columns:
        return rows[ORDER].alias(TIE)
    return pl.Series(TIE, digest_rows([rows[name] for name in visible(rows.columns)]))


def with_deletions(rows: pl.DataFrame, names: Sequence[str]) -> pl.DataFrame:
    """Return rows with ``__deleted``, of which deletions have no values: those are no longer wanted."""
    if DELETED not in rows.columns:
        return rows.with_columns(pl.lit(value=False).alias(DELETED))
    if not rows[DELETED].any():
        return rows
    there = ~rows[DELETED]
    return rows.with_columns(rows[name].zip_with(there, nulls_like(rows[name])) for name in names)
