"""Where hashes are among rising ones, and which rows of several tables count, each in the order of its hashes.

Hashes are spread evenly, and few are wanted of many at least once: a search in two rising tables goes over both in one
pass. That needs a compiled loop; NumPy has binary search and sorting. So a process that has searched and merged as many as
pays for loading numba takes the loop from then on, where numba is installed. The results are the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import polars as pl

from millstream.kernels import jit
from millstream.kernels.arrays import Int64s
from millstream.kernels.state import hash_scan
from millstream.kernels.state.keyhash import Hashes

Scalar = TypeVar("Scalar", bound=np.generic)

# Hashes, in a process. With NumPy, this many take longer by about as much as loading numba does.
COMPILED_HASHES_MIN = 10_000_000

_SAMPLES = 64  # hashes looked at, per part to be made, to find where parts may begin

_WORD_BYTES = 8

_seen = 0  # hashes, by this process


class FoundHashes(NamedTuple):
    """Places that hold wanted hashes, rising, and which of the wanted ones each has."""

    places: Int64s
    numbers: Int64s


def find(held: Hashes, wanted: Hashes) -> FoundHashes:
    """Return every place of ``held`` (sorted) whose hash is among ``wanted`` (sorted, distinct)."""
    if not len(held) or not len(wanted):  # a share of no rows
        return FoundHashes(np.empty(0, np.int64), np.empty(0, np.int64))
    skipped = int(np.searchsorted(wanted, held[0]))  # held may be one part of many
    wanted = wanted[skipped : int(np.searchsorted(wanted, held[-1], "right"))]
    places, numbers, repeated = (_scanned if _compiles(len(wanted)) else _searched)(held, wanted)
    if repeated:
        counts = np.searchsorted(held, wanted[numbers], side="right") - places
        starts = np.repeat(places - np.concatenate(([0], np.cumsum(counts)[:-1])), counts)
        places, numbers = starts + np.arange(counts.sum()), np.repeat(numbers, counts)
    return FoundHashes(places, numbers + skipped if skipped else numbers)


def positions_of(held: Hashes, wanted: Hashes) -> Int64s:
    """Return the places alone of what :func:`find` finds."""
    return find(held, wanted).places


def newest(tables: Sequence[Hashes]) -> tuple[Hashes, Int64s]:
    """Return the hashes of the rows that count, rising, and their places in tables that stand one behind the other.

    The oldest table is the first, and in each hashes rise. Of each hash those rows count that are in the newest table which has it.
    """
    return (_merged if _compiles(sum(map(len, tables))) else _sorted)(tables)


def place(
    values: npt.NDArray[np.generic], places: Int64s, goes: Int64s, out: npt.NDArray[np.generic]
) -> None:
    """Write the values that are at some places to where each goes in ``out``, which is of the same type."""
    if values.dtype.itemsize == out.itemsize == _WORD_BYTES and _compiles(0):
        put = jit.compiled(hash_scan.place, hash_scan, allocates=False)
        words = out.view(np.uint64)
        put(_fixed(values.view(np.uint64)), _fixed(places), _fixed(goes), words)
    else:
        out[goes] = values[places]


def even_starts(run: list[pl.Series], parts: int) -> Hashes:
    """Choose the hashes with which ranges begin that divide a run into so many even parts."""
    stride = max(1, sum(map(len, run)) // (parts * _SAMPLES))
    sample = np.concatenate([part.to_numpy()[::stride] for part in run])
    return np.unique(sample[len(sample) * np.arange(1, parts) // parts])


def cuts(hashes: Hashes, starts: Hashes) -> Iterator[tuple[int, int, int]]:
    """Return which of a part's rows, [first, end), are in which range of hashes.

    Only the ranges that the part reaches into are looked at, which are few: a part is a range itself.
    """
    if not len(hashes):
        return
    lowest, highest = np.searchsorted(starts, hashes[[0, -1]], "right").tolist()
    inner = np.searchsorted(hashes, starts[lowest:highest]).tolist()
    for number, (first, end) in enumerate(pairwise((0, *inner, len(hashes))), lowest):
        if end > first:
            yield number, first, end


def _compiles(count: int) -> bool:
    """Return whether the compiled loops are taken for so many hashes."""
    global _seen  # noqa: PLW0603 - what is loaded is the process's, too
    _seen += count
    return _seen >= COMPILED_HASHES_MIN and jit.is_available()


def _searched(held: Hashes, wanted: Hashes) -> tuple[Int64s, Int64s, bool]:
    """Return where wanted hashes stand first, which they are, and whether one of them stands in several places."""
    first = np.searchsorted(held, wanted)
    numbers = np.flatnonzero(held[first] == wanted)  # none is above all that is held
    places = first[numbers]
    followed = places[: np.searchsorted(places, len(held) - 1)]
    return places, numbers, bool((held[followed] == held[followed + 1]).any())


def _scanned(held: Hashes, wanted: Hashes) -> tuple[Int64s, Int64s, bool]:
    places, numbers = np.empty(len(wanted), np.int64), np.empty(len(wanted), np.int64)
    search = jit.compiled(hash_scan.search, hash_scan, allocates=False)
    count, repeated = search(_fixed(held), _fixed(wanted), places, numbers)
    return places[:count], numbers[:count], repeated


def _sorted(tables: Sequence[Hashes]) -> tuple[Hashes, Int64s]:
    hashes = np.concatenate(tables)
    if not len(hashes):
        return hashes, np.empty(0, np.int64)
    order = np.argsort(hashes, kind="stable")
    rising = hashes[order]
    ends = np.append(np.flatnonzero(rising[1:] != rising[:-1]), len(order) - 1)
    begins = np.concatenate([[0], np.cumsum([len(table) for table in tables])])
    first = begins[np.searchsorted(begins, order[ends], "right") - 1]
    counts = order >= np.repeat(first, np.diff(ends, prepend=-1))
    return rising[counts], order[counts]


def _merged(tables: Sequence[Hashes]) -> tuple[Hashes, Int64s]:
    merge = jit.compiled(hash_scan.merge, hash_scan, allocates=False)
    start = sum(map(len, tables))
    hashes, places = np.empty(0, np.uint64), np.empty(0, np.int64)
    for older in reversed(_joined(tables)):
        start -= len(older)
        size = len(older) + len(hashes)
        both, of_both = np.empty(size, np.uint64), np.empty(size, np.int64)
        count = merge(_fixed(older), start, _fixed(hashes), _fixed(places), both, of_both)
        hashes, places = both[:count], of_both[:count]
    return hashes, places


def _joined(tables: Sequence[Hashes]) -> list[Hashes]:
    """Return tables of which each that goes on where the one before it ends, as parts of a run do, is one with that."""
    groups: list[list[Hashes]] = []
    for table in filter(len, tables):
        if groups and groups[-1][-1][-1] < table[0]:
            groups[-1].append(table)
        else:
            groups.append([table])
    return [group[0] if len(group) == 1 else np.concatenate(group) for group in groups]


def _fixed(array: npt.NDArray[Scalar]) -> npt.NDArray[Scalar]:
    """Return an array that can't be written, whoever owns its memory: numba compiles a function for each."""
    view = array.view()
    view.flags.writeable = False
    return view
