"""Rows that were found in several runs, as one table in the order of the hashes that were looked for.

Numbers without nulls are read from where they are stored to where they go. Other columns are gathered from each run, put
together, and gathered again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import polars as pl
import pyarrow as pa

from millstream.kernels.arrays import Int64s
from millstream.kernels.columns import gather_rows
from millstream.kernels.frames import HASH, in_one_chunk
from millstream.kernels.state.hash_search import place
from millstream.kernels.state.keyhash import Hashes
from millstream.kernels.state.sorted_runs import Run


class FoundRows(NamedTuple):
    """Rows of a run: the table that has them, their places there, and which of the wanted hashes each has."""

    run: Run
    table: pa.Table
    places: Int64s
    numbers: Int64s


Read = Callable[[FoundRows, list[str]], pl.DataFrame]
"""Returns some columns of the rows that were found, those that the table has not got with their usual value."""


def in_order(
    found: Sequence[FoundRows], hashes: Hashes, names: list[str], read: Read
) -> pl.DataFrame:
    """Return columns of rows that were found of hashes (sorted, distinct), no hash in two tables, in the order of hashes."""
    if len(found) == 1:
        return read(found[0], names)
    numbers = np.concatenate([one.numbers for one in found])
    held = np.zeros(len(hashes), np.bool_)
    held[numbers] = True
    there = np.flatnonzero(held)
    if len(numbers) > len(there):  # a hash has several rows
        return _gathered(found, names, read, np.argsort(numbers, kind="stable"))
    goes = numbers
    if len(there) < len(hashes):
        goes = np.empty(len(hashes), np.int64)
        goes[there] = np.arange(len(there))
        goes = goes[numbers]
    columns = {HASH: pl.Series(HASH, hashes[there])}
    for name in names:
        arrays = _numbers(found, name) if name != HASH else None
        if arrays is not None:
            columns[name] = pl.Series(name, _placed(found, arrays, goes))
    others = [name for name in names if name not in columns]
    if others:
        order = np.empty(len(goes), np.int64)
        order[goes] = np.arange(len(goes))
        rest = _gathered(found, others, read, order)
        columns |= {name: rest[name] for name in others}
    return pl.DataFrame([columns[name] for name in names])


def _gathered(
    found: Sequence[FoundRows], names: list[str], read: Read, order: Int64s
) -> pl.DataFrame:
    return gather_rows(in_one_chunk([read(one, names) for one in found]), order)


def _numbers(found: Sequence[FoundRows], name: str) -> list[npt.NDArray[np.generic]] | None:
    """Return a column of each table as an array that shows what is stored; None if it is not of such."""
    arrays: list[npt.NDArray[np.generic]] = []
    for one in found:
        if one.run.share is not None or name not in one.table.column_names:
            return None
        column = one.table.column(name).chunk(0)
        if not _is_plain(column.type) or column.null_count:
            return None
        arrays.append(column.to_numpy(zero_copy_only=True))
    return arrays


def _is_plain(dtype: pa.DataType) -> bool:
    return pa.types.is_integer(dtype) or dtype in (pa.float32(), pa.float64())


def _placed(
    found: Sequence[FoundRows], arrays: Sequence[npt.NDArray[np.generic]], goes: Int64s
) -> npt.NDArray[np.generic]:
    made = np.empty(len(goes), arrays[0].dtype)
    start = 0
    for one, values in zip(found, arrays, strict=True):
        end = start + len(one.places)
        place(values, one.places, goes[start:end], made)
        start = end
    return made
