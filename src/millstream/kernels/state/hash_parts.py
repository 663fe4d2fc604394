"""All rows of a slot of sorted runs, a part at a time: each part has all rows of a range of hashes.

So state of any size is read in bounded memory, and what is decided by the rows of one hash, such as which of several versions
counts, is decided within a part.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import polars as pl

from millstream.kernels.frames import HASH, polars_table
from millstream.kernels.state.keyhash import Hashes
from millstream.kernels.state.sorted_runs import SortedRuns

_SAMPLES = 64  # hashes looked at, per part, to find where parts begin


def parts_by_hash(runs: SortedRuns, slot: int, rows_max: int) -> Iterator[list[pl.DataFrame]]:
    """Yield the rows of a slot in parts of about ``rows_max``, by rising hashes: of each part the rows run by run, oldest first.

    Rows of one hash are in one part, also where they are more. Only for families that are sorted by ``__hash`` and whose
    numbers, if rows have any, do not matter.
    """
    tables = [table for run in runs.slots.get(slot, ()) if (table := runs.table(run)).num_rows]
    hashes = [table.column(HASH).chunk(0).to_numpy() for table in tables]
    bounds = [_bounds(own, _starts(hashes, rows_max)) for own in hashes]
    for number in range(len(bounds[0]) if bounds else 0):
        cuts = [(table, *own[number]) for table, own in zip(tables, bounds, strict=True)]
        pieces = [polars_table(table.slice(at, end - at)) for table, at, end in cuts if end > at]
        if pieces:
            yield pieces


def _starts(hashes: list[Hashes], rows_max: int) -> Hashes:
    """Choose the hashes with which parts begin, but for the first."""
    count = sum(map(len, hashes))
    parts = -(-count // rows_max)
    stride = max(1, count // (parts * _SAMPLES))
    sample = np.sort(np.concatenate([own[::stride] for own in hashes]))
    return np.unique(sample[len(sample) * np.arange(1, parts) // parts])


def _bounds(hashes: Hashes, starts: Hashes) -> list[tuple[int, int]]:
    """Return where the rows of each part begin and end."""
    return [*pairwise((0, *np.searchsorted(hashes, starts).tolist(), len(hashes)))]
