"""Tables in the order of key hashes, as runs are: where they meet they are merged, not hashed again.

Two keys may share a hash. Such a collision is detected, and the tables are then merged by the keys alone,
which takes several times as long.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from millstream.kernels.arrays import Bools, Int64s
from millstream.kernels.columns import gather_rows
from millstream.kernels.frames import HASH, WINDOW
from millstream.kernels.state.keyhash import Hashes

_WINDOWS_MAX = 16  # each is searched by itself


def differs_from_previous(values: npt.NDArray[Any]) -> Bools:
    """Return which values differ from the one before."""
    differ = np.ones(len(values), np.bool_)
    np.not_equal(values[1:], values[:-1], out=differ[1:])
    return differ


def sorted_distinct(hashes: Hashes) -> Hashes:
    """Return each hash once, rising."""
    # np.unique goes by a hash table since NumPy 2.3, and takes eight times as long for these.
    rising = np.sort(hashes)
    return rising[differs_from_previous(rising)]


def rising_order(hashes: Hashes) -> Int64s:
    """Return the places of hashes in rising order, equal ones as they stand.

    The highest bits of a hash and its place are sorted as one whole number, which takes half the time of ``argsort``. Where
    hashes differ in the other bits alone, that may not be their order, and they are sorted whole.
    """
    bits = np.uint64(len(hashes).bit_length())
    together = hashes >> bits << bits
    together |= np.arange(len(hashes), dtype=np.uint64)
    together.sort()
    together &= (np.uint64(1) << bits) - np.uint64(1)
    order = together.view(np.int64)
    rising = hashes[order]
    if (rising[1:] < rising[:-1]).any():
        order = np.argsort(hashes, kind="stable")
    return order


def sort_by_hash(rows: pl.DataFrame, column: str = HASH) -> pl.DataFrame:
    """Order rows by a column of hashes; rows of one hash keep their order."""
    hashes = rows[column].to_numpy()
    if (hashes[1:] >= hashes[:-1]).all():
        return rows
    order = rising_order(hashes) if column == HASH else np.argsort(hashes, kind="stable")
    return gather_rows(rows, order)


def sort_by_window_and_hash(rows: pl.DataFrame) -> pl.DataFrame:
    """Order rows by window and then by hash."""
    windows = rows[WINDOW].to_numpy()
    order = np.argsort(rows[HASH].to_numpy())
    if not _alike(windows):
        order = order[np.argsort(windows[order], kind="stable")]
    return gather_rows(rows, order)


def latest_per_key(rows: pl.DataFrame, key: list[str]) -> pl.DataFrame:
    """Return the last row of each key. A window is part of every key, and equal keys have equal hashes."""
    hashes, windows = rows[HASH].to_numpy(), rows[WINDOW].to_numpy()
    one = _alike(windows)
    # A stable sort of what consists of a few rising runs only merges them.
    order = np.argsort(hashes, kind="stable") if one else np.lexsort((windows, hashes))
    ends = _ends(hashes[order])
    if not one:
        ends |= _ends(windows[order])
    again = np.flatnonzero(~ends)
    if not _equal(rows, order[again], rows, order[again + 1], key).all():
        return rows.unique(key, keep="last", maintain_order=True)
    return gather_rows(rows, order[ends])


def last_of_key(rows: pl.DataFrame, key: Sequence[str]) -> pl.Series:
    """Return which rows are the last of their key, in the order in which they stand."""
    # Numbers for names: polars takes a name such as "^a.*$" for a pattern.
    if len(key) == 1:
        return rows[key[0]].alias("0").is_last_distinct()
    keys = pl.DataFrame({str(number): rows[name] for number, name in enumerate(key)})
    return keys.to_struct("key").is_last_distinct()


def positions_in(table: pl.DataFrame, rows: pl.DataFrame, key: list[str]) -> Int64s | None:
    """Return the place of each row's key in a table, or -1 where it is not there.

    The table is ordered by window and hash, and has each key once. None: it must be found by a join,
    since keys share a hash, or the windows are many.
    """
    hashes, windows = table[HASH].to_numpy(), table[WINDOW].to_numpy()
    starts = np.flatnonzero(differs_from_previous(windows))
    first = differs_from_previous(hashes)
    first[starts] = True
    if len(starts) > _WINDOWS_MAX or not first.all():
        return None
    places = np.full(rows.height, -1, np.int64)
    wanted, of = rows[HASH].to_numpy(), rows[WINDOW].to_numpy()
    bounds = [*starts, len(windows)]
    for start, end in pairwise(bounds):
        mine = np.flatnonzero(of == windows[start])
        found = start + np.searchsorted(hashes[start:end], wanted[mine])
        there = found < end
        mine, found = mine[there], found[there]
        there = hashes[found] == wanted[mine]
        places[mine[there]] = found[there]
    met = np.flatnonzero(places >= 0)
    differ = ~_equal(table, places[met], rows, met, key)
    places[met[differ]] = -1
    return places


def last_of_each(places: Int64s) -> tuple[Int64s, Int64s]:
    """Return the places that occur, rising, and where each occurs last."""
    order = np.argsort(places, kind="stable")
    last = order[_ends(places[order])]
    return places[last], last


def _alike(values: Int64s) -> bool:
    return not len(values) or bool(values.min() == values.max())


def _ends(values: npt.NDArray[Any]) -> Bools:
    """Return which values differ from the one after."""
    differ = np.ones(len(values), np.bool_)
    np.not_equal(values[1:], values[:-1], out=differ[:-1])
    return differ


def _equal(
    one: pl.DataFrame, at: Int64s, other: pl.DataFrame, other_at: Int64s, key: list[str]
) -> Bools:
    """Say where two tables, at some places of theirs, have the same key."""
    equal = np.ones(len(at), np.bool_)
    for name in key:
        # By another name: polars takes a name such as "^a.*$" for a pattern.
        ours, theirs = one[name].alias("0"), other[name].alias("0")
        equal &= ours.gather(at).eq_missing(theirs.gather(other_at)).to_numpy()
    return equal
