"""Rows that are only added, found by the hash of a key: the rows as they came, and an index of them.

A row is written once, into the newest *chunk*, in the order of arrival, and has its number in that order as its
place. The index has the hash and the place of each row, as sorted runs; so what a fold sorts and writes again
are 16 bytes a row, however wide the rows are. A look-up searches the index, and reads of the chunks the rows that it
found.

Small chunks are put together, eight of a size into one, which leaves the places as they are, until they are
large; so a row is copied a few times, and never sorted. Nothing is ever taken out.

Source: Lu et al., "WiscKey: separating keys from values in SSD-conscious storage", FAST 2016 (only the index is a
log-structured merge tree; the values are in a log).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import polars as pl
import pyarrow as pa

from millstream.errors import CorruptionError
from millstream.kernels.arrays import Int64s
from millstream.kernels.frames import HASH, WEIGHT, polars_table
from millstream.kernels.state.hash_order import sorted_distinct
from millstream.kernels.state.keyhash import Hashes
from millstream.kernels.state.operator_state import OperatorState
from millstream.kernels.state.sorted_runs import EACH_ROW, SortedRuns, to_arrow

_PLACE = "__place"  # Int64: how many rows came before a row
_SLOT = 0
_CHUNKS = "rows"  # of the name of a family
_FAN_IN = 8  # so many chunks of a size become one
_CHUNK_BYTES = (
    64 << 20
)  # a chunk is not made larger than that, and is held in memory while it is made
_NO_COPIES: Mapping[str, str] = {}


@dataclass
class AppendedRows:
    """The rows of one family of an operator's state, with ``__hash``, ``__weight`` and fixed columns.

    ``copies`` are columns that have the values of others, by name: they are not stored.
    """

    state: OperatorState
    family: str
    copies: Mapping[str, str] = field(default_factory=lambda: _NO_COPIES)

    @property
    def runs(self) -> SortedRuns:
        """The runs of the index, which count the rows."""
        return self.state.runs(self.family, EACH_ROW, numbered=_PLACE)

    @property
    def chunks(self) -> SortedRuns:
        """The chunks, oldest first, as the runs of one slot."""
        return self.state.runs(chunks_of(self.family))

    def look_up(self, hashes: Hashes) -> pl.DataFrame | None:
        """Return the rows with these hashes, in the order of their arrival; None if there are none.

        Rows of other keys with the same hash come along: compare the keys.

        Raises:
            CorruptionError: the index names rows that are not there.
        """
        if not len(hashes):
            return None
        found = list(self.runs.look_up(_SLOT, sorted_distinct(hashes)))
        return self._at(pl.concat(found)) if found else None

    def add(self, rows: pl.DataFrame) -> None:
        """Add rows with ``__hash`` and ``__weight``.

        Raises:
            CorruptionError: a row is not to be added once, or the index has not as many rows as there are.
        """
        if not rows.height:
            return
        if not (rows[WEIGHT].to_numpy() == 1).all():
            raise CorruptionError(
                "The ledger of the state does not balance: a row is to be taken out of a table whose rows are "
                "only added. Nothing of this batch was committed. Please report this; the log still holds "
                "every event."
            )
        first = self._height()
        places = pl.Series(_PLACE, np.arange(first, first + rows.height))
        self.runs.add(_SLOT, pl.DataFrame([rows[HASH], places]), _as_they_are)
        own = [name for name in rows.columns if name not in (HASH, WEIGHT, *self.copies)]
        self._append(rows[own])

    def scan(self) -> pl.DataFrame | None:
        """Return all rows. It costs all that is held: for tests and for looking at state."""
        found = list(self.runs.scan(_SLOT))
        return self._at(pl.concat(found)) if found else None

    # ── the rows themselves ─────────────────────────────────────────────────────────────────

    def _height(self) -> int:
        """Return how many rows there are, of which the index must have each.

        Of chunks from before a rescale other buckets may have some of the rows.
        """
        height = self.chunks.rows
        if height != self.runs.rows and divided_flag(self.family) not in self.state.values:
            raise _wrong_index(f"{self.runs.rows} rows", height)
        return height

    def _at(self, found: pl.DataFrame) -> pl.DataFrame:
        """Return the rows at the places that the index gave."""
        order = np.argsort(found[_PLACE].to_numpy())
        places = found[_PLACE].to_numpy()[order]
        height = self._height()
        if places[0] < 0 or places[-1] >= height:
            raise _wrong_index(f"a row {int(places[-1])}", height)
        rows = pl.concat([polars_table(part) for part in self._parts(places)])
        copied = [rows[name].alias(copy) for copy, name in self.copies.items()]
        weights = pl.repeat(1, rows.height, dtype=pl.Int64, eager=True).alias(WEIGHT)
        return rows.hstack([*copied, pl.Series(HASH, found[HASH].to_numpy()[order]), weights])

    def _parts(self, places: Int64s) -> Iterator[pa.Table]:
        """Yield the rows at places, which rise, chunk by chunk."""
        chunks = self.chunks.slots[_SLOT]
        starts = np.cumsum([0, *(chunk.rows for chunk in chunks)])
        bounds = np.searchsorted(places, starts)
        for number in np.flatnonzero(np.diff(bounds)).tolist():
            wanted = places[bounds[number] : bounds[number + 1]] - starts[number]
            yield self.chunks.table(chunks[number]).take(pa.array(wanted))

    def _append(self, rows: pl.DataFrame) -> None:
        """Add rows as a chunk, together with the chunks before them where they are as many as become one."""
        chunks = self.chunks.slots.setdefault(_SLOT, [])
        made = to_arrow(rows)
        count = _become_one([*(chunk.size_bytes for chunk in chunks), made.nbytes]) - 1
        small = chunks[len(chunks) - count :]
        if small:
            tables = [self.chunks.table(chunk) for chunk in small]
            made = pa.concat_tables([*tables, made]).combine_chunks()
        chunks[len(chunks) - count :] = [self.chunks.store.save(_SLOT, made)]
        for chunk in small:
            self.chunks.store.drop(chunk)


def chunks_of(family: str) -> str:
    """Return the name of the family of chunks."""
    return f"{family}.{_CHUNKS}"


def divided_flag(family: str) -> str:
    """Return the name of the value that is there if other buckets have rows of the chunks."""
    return f"{family}.divided"


def _become_one(sizes: list[int]) -> int:
    """Return how many of the last chunks become one: the most that may.

    Either they are many and of about one size, so that a row is copied once for each multiple of that; or they
    are small and give a large one, which stays as it is.
    """
    most, whole, largest = 1, 0, 0
    for count, size in enumerate(reversed(sizes), 1):
        whole, largest = whole + size, max(largest, size)
        if whole > _CHUNK_BYTES:
            break
        alike = count >= _FAN_IN and largest * _FAN_IN <= 2 * whole
        final = 2 * whole >= _CHUNK_BYTES >= 4 * largest
        if count > 1 and (alike or final):
            most = count
    return most


def _as_they_are(rows: pl.DataFrame) -> pl.DataFrame:
    return rows


def _wrong_index(found: str, height: int) -> CorruptionError:
    return CorruptionError(
        f"An index of the state has {found}, and there are {height} rows: one of the two is another one. Restore "
        "the app's whole folder from where you keep copies of it, or reset the app to rebuild it from the "
        "log."
    )
