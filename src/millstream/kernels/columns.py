"""Small steps on columns that do without a query of polars.

What polars does by a query (``DataFrame.filter``, ``pl.repeat``, rows by an array of NumPy) costs some tens of microseconds
whatever the rows, and, in a process whose other threads want Python's lock, more than a millisecond: a query waits for its
threads, and then for the lock. A batch of a thousand rows makes hundreds of such steps. What is here takes single columns,
for which polars has direct calls; for many rows it leaves the work to polars, which then uses all cores.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from millstream.kernels.arrays import Bools

_BY_COLUMN_ROWS_MAX = 20_000


def constant(
    value: Any, height: int, dtype: pl.DataType | type[pl.DataType], name: str = ""
) -> pl.Series:
    """Return a column that holds one value in each row."""
    return pl.Series(name, [value], dtype=dtype).new_from_index(0, height)


def filter_rows(rows: pl.DataFrame, mask: Bools) -> pl.DataFrame:
    """Return the rows at which the mask is true; all of them without copying."""
    assert len(mask) == rows.height, "the mask has a value for each row"
    if mask.all():
        return rows
    kept = pl.Series(mask)
    if rows.height > _BY_COLUMN_ROWS_MAX or not rows.width:
        return rows.filter(kept)
    return pl.DataFrame([column.filter(kept) for column in rows.iter_columns()])


def gather_rows(rows: pl.DataFrame, indices: npt.NDArray[np.int64]) -> pl.DataFrame:
    """Return the rows at these indices, none of them negative, in their order."""
    if rows.height > _BY_COLUMN_ROWS_MAX or not rows.width:
        return rows[indices]
    places = pl.Series(indices.astype(np.uint32))
    return pl.DataFrame([column[places] for column in rows.iter_columns()])


def is_among(values: npt.NDArray[Any], wanted: npt.NDArray[Any]) -> Bools:
    """Return which values are among those that are wanted; both of one type, in any order, and with repetitions."""
    if len(values) <= _BY_COLUMN_ROWS_MAX:
        return np.isin(values, wanted)
    # NumPy sorts both together; the hash table of polars takes a fifth of the time.
    found: Bools = pl.Series(values).is_in(pl.Series(wanted).implode()).to_numpy()
    return found
