"""Rows that are only added, found by the hash of a key: the rows as they came, and an index of them.

A row is written once, into the newest *chunk*, in the order of arrival, and has its place: where its chunk begins, plus
how many rows of the chunk come before it. The index has the hash and the place of each row, as sorted runs; so what a fold
sorts and writes again are 16 bytes a row, however wide the rows are. A look-up searches the index, and reads of the
chunks the rows that it found.

Small chunks that go on one behind the other are put together, eight of a size into one, which leaves the places as they
are, until they are large; so a row is copied a few times, and never sorted. Nothing is ever taken out.

Chunks of a bucket that is divided are of several buckets then, and no place changes. After a rescale each bucket has places of
its own for new rows, with room between them (:func:`places_after`), so that chunks of several buckets can be put together
again under the places that they have. What gaps keep from being put together, the next batch moves, once there are many
small chunks: the rows of these that the index has get new places, and the index is written anew.

Source: Lu et al., "WiscKey: separating keys from values in SSD-conscious storage", FAST 2016 (only the index is a
log-structured merge tree; the values are in a log).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import polars as pl
import pyarrow as pa

from millstream.errors import ConfigError, CorruptionError
from millstream.kernels.arrays import Bools, Int64s
from millstream.kernels.columns import constant
from millstream.kernels.frames import HASH, WEIGHT, polars_table
from millstream.kernels.state.hash_order import sorted_distinct
from millstream.kernels.state.keyhash import Hashes
from millstream.kernels.state.operator_state import OperatorState
from millstream.kernels.state.sorted_runs import EACH_ROW, Run, SortedRuns, every_row, to_arrow

_PLACE = "__place"  # Int64: the number by which a row is found
_SLOT = 0
_CHUNKS = "rows"  # of the name of a family
_FAN_IN = 8  # so many chunks of a size become one
_CHUNK_BYTES = (
    64 << 20
)  # a chunk is not made larger than that, and is held in memory while it is made
_SMALL_CHUNKS_MAX = 128  # without gaps there are some 50
_BUCKET_PLACES = 1 << 36  # for the rows that a bucket gets between two rescales
_PLACES = 1 << 62
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
        """The chunks, each the one run of a slot, which is the place of its first row."""
        runs = self.state.runs(chunks_of(self.family), owned=every_row)
        if any(len(of_slot) > 1 for of_slot in runs.slots.values()):
            runs.slots = {chunk.slot: [chunk] for chunk in chunks_by_place(runs.slots[_SLOT])}
        return runs

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
        self._check_index()
        first = self._next_place()
        places = pl.Series(_PLACE, np.arange(first, first + rows.height))
        self.runs.add(_SLOT, pl.DataFrame([rows[HASH], places]), _as_they_are)
        own = [name for name in rows.columns if name not in (HASH, WEIGHT, *self.copies)]
        self._append(first, rows[own])
        small = [chunk for chunk in self._sorted_chunks() if 2 * chunk.size_bytes < _CHUNK_BYTES]
        if len(small) > _SMALL_CHUNKS_MAX:
            self._move(small)

    def scan(self) -> pl.DataFrame | None:
        """Return all rows. It costs all that is held: for tests and for looking at state."""
        found = list(self.runs.scan(_SLOT))
        return self._at(pl.concat(found)) if found else None

    # ── the rows themselves ─────────────────────────────────────────────────────────────────

    def _sorted_chunks(self) -> list[Run]:
        slots = self.chunks.slots
        return [chunk for place in sorted(slots) for chunk in slots[place]]

    def _next_place(self) -> int:
        given: int = self.state.values.get(next_place_of(self.family), 0)
        return max(given, end_of(self._sorted_chunks()))

    def _check_index(self) -> None:
        """Check that the index has each row; of chunks that are divided, other buckets have some, and it is not known how many."""
        chunks = self._sorted_chunks()
        held = (*chunks, *self.runs.slots.get(_SLOT, ()))
        rows = sum(chunk.stored_rows for chunk in chunks)
        known = (
            f"{self.family}.divided" not in self.state.values
        )  # by a version that did not note which chunks are
        if known and rows != self.runs.rows and all(run.is_whole for run in held):
            raise _wrong_index(f"{self.runs.rows} rows", rows)

    def _at(self, found: pl.DataFrame) -> pl.DataFrame:
        """Return the rows at the places that the index gave."""
        self._check_index()
        order = np.argsort(found[_PLACE].to_numpy())
        places = found[_PLACE].to_numpy()[order]
        rows = pl.concat(list(self._parts(self._sorted_chunks(), places)))
        copied = [rows[name].alias(copy) for copy, name in self.copies.items()]
        weights = constant(1, rows.height, pl.Int64, WEIGHT)
        return rows.hstack([*copied, pl.Series(HASH, found[HASH].to_numpy()[order]), weights])

    def _parts(self, chunks: list[Run], places: Int64s) -> Iterator[pl.DataFrame]:
        """Yield the rows at places, which rise, chunk by chunk."""
        numbers = _chunk_numbers(chunks, places)
        if (numbers < 0).any():
            wrong = int(places[numbers < 0][0])
            raise _wrong_index(f"a row {wrong}", sum(chunk.stored_rows for chunk in chunks))
        for number in np.unique(numbers).tolist():
            wanted = places[numbers == number] - chunks[number].slot
            yield polars_table(self.chunks.table(chunks[number]).take(pa.array(wanted)))

    def _append(self, first: int, rows: pl.DataFrame) -> None:
        """Add rows as a chunk, together with the chunks before them where they are as many as become one."""
        made = to_arrow(rows)
        before = self._before(first)
        count = _become_one([*(chunk.size_bytes for chunk in before), made.nbytes]) - 1
        small = before[len(before) - count :]
        if small:
            tables = [self.chunks.table(chunk) for chunk in small]
            made = pa.concat_tables([*tables, made]).combine_chunks()
        self._replace(small, {small[0].slot if small else first: made})

    def _before(self, place: int) -> list[Run]:
        """Return the chunks that end where a place is, without a gap, and that no other bucket has."""
        found: list[Run] = []
        for chunk in reversed(self._sorted_chunks()):
            if end_of([chunk]) != place or not chunk.is_whole:
                break
            found.insert(0, chunk)
            place = chunk.slot
        return found

    def _replace(self, chunks: Iterable[Run], made: Mapping[int, pa.Table]) -> None:
        slots, store = self.chunks.slots, self.chunks.store
        for chunk in chunks:
            del slots[chunk.slot]
            store.drop(chunk)
        slots |= {place: [store.save(place, table)] for place, table in made.items()}

    def _move(self, small: list[Run]) -> None:
        """Write the rows of small chunks that the index has one behind the other, and the index anew."""
        index = pl.concat(list(self.runs.scan(_SLOT))).sort(_PLACE)
        places = index[_PLACE].to_numpy().copy()
        moved: Bools = _chunk_numbers(small, places) >= 0
        first = self._next_place()
        made: dict[int, pa.Table] = {}
        if moved.any():  # not all are of other buckets
            rows = to_arrow(pl.concat(list(self._parts(small, places[moved]))))
            height = max(1, rows.num_rows * _CHUNK_BYTES // max(1, rows.nbytes))
            for at in range(0, rows.num_rows, height):
                made[first + at] = rows.slice(at, height).combine_chunks()
        self._replace(small, made)
        places[moved] = np.arange(first, first + moved.sum())
        self.runs.drop_slot(_SLOT)
        self.runs.add(_SLOT, index.with_columns(pl.Series(_PLACE, places)), _as_they_are)


def chunks_of(family: str) -> str:
    """Return the name of the family of chunks."""
    return f"{family}.{_CHUNKS}"


def next_place_of(family: str) -> str:
    """Return the name of the value before which no place is given out."""
    return f"{chunks_of(family)}.next"


def chunks_by_place(chunks: Iterable[Run]) -> list[Run]:
    """Return chunks by the places of their first rows.

    Before the first rescale of a version that could not put chunks together again, all were in one slot, one behind the other.
    """
    made: list[Run] = []
    for chunk in chunks:
        behind = chunk.slot == _SLOT and made
        made.append(replace(chunk, slot=end_of(made)) if behind else chunk)
    return sorted(made, key=lambda chunk: chunk.slot)


def end_of(chunks: list[Run]) -> int:
    """Return the place behind the last of some chunks, which are sorted."""
    return chunks[-1].slot + chunks[-1].stored_rows if chunks else 0


def places_after(step: str, end: int, buckets: int) -> list[int]:
    """Return where the places of new rows begin in each bucket after a rescale; ``end`` is behind all that there are.

    Raises:
        ConfigError: there are no more places.
    """
    starts = [end + bucket * _BUCKET_PLACES for bucket in range(buckets)]
    if starts[-1] + _BUCKET_PLACES > _PLACES:
        raise ConfigError(
            f"The rows of step {step!r} have places up to {end}, and {buckets} buckets would need {_BUCKET_PLACES} more "
            f"each; there are {_PLACES}. Take fewer buckets, or reset the app to rebuild its state from the log."
        )
    return starts


def _chunk_numbers(chunks: list[Run], places: Int64s) -> Int64s:
    """Return in which of some chunks, which are sorted, each place is; below 0: in none."""
    starts = np.array([chunk.slot for chunk in chunks], np.int64)
    ends = np.array([chunk.slot + chunk.stored_rows for chunk in chunks], np.int64)
    found = np.searchsorted(starts, places, side="right") - 1
    if not chunks:
        return found
    return np.where(places < ends[found], found, -1)


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
