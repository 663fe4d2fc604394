"""Rows of sorted runs that are looked up, but for columns that are too large to be copied: these stay where they are stored."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import polars as pl
import pyarrow as pa

from millstream.kernels.arrays import Int64s
from millstream.kernels.columns import filter_rows
from millstream.kernels.frames import HASH, polars_table
from millstream.kernels.state.hash_search import positions_of
from millstream.kernels.state.keyhash import Hashes
from millstream.kernels.state.sorted_runs import SortedRuns


class PlacedRows(NamedTuple):
    """Some columns of rows, and where all columns of them are: the places of the rows in a table."""

    rows: pl.DataFrame
    table: pa.Table
    places: Int64s


def look_up_in_place(
    runs: SortedRuns, slot: int, hashes: Hashes, columns: Sequence[str]
) -> Iterator[PlacedRows]:
    """Yield what :meth:`SortedRuns.look_up` yields, with the places of the rows; ``columns`` are those that are copied."""
    assert runs.sort_column == HASH
    for run in runs.slots.get(slot, ()):
        table = runs.table(run)
        found = positions_of(table.column(HASH).chunk(0).to_numpy(), hashes)
        if not len(found):
            continue
        rows = polars_table(table.select(list(columns)).take(pa.array(found)))
        if run.share is not None and runs.owned is not None:
            own = runs.owned(rows, run.share)
            rows, found = filter_rows(rows, own), found[own]
        if rows.height:
            yield PlacedRows(rows, table, found)
