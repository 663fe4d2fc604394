"""Working on all groups of a ``group_by`` at once, as columns, instead of group by group.

:func:`over_groups` hands a function one list per group, all in one Series, and takes one value per
group back; the other functions take such lists apart into flat columns and put them together again.
A function is called once per table, however many groups there are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl
import pyarrow as pa

from millstream.kernels.arrays import Int64s

Lengths = Int64s

_SHARED_WITH_ARROW = {  # types whose arrays are the same in polars and in Arrow, and need not be copied
    *(pl.Int8, pl.Int16, pl.Int32, pl.Int64, pl.UInt8, pl.UInt16, pl.UInt32, pl.UInt64),
    *(pl.Float32, pl.Float64),
}


def over_groups(
    values: pl.Expr, function: Callable[[pl.Series], pl.Series], dtype: pl.DataType
) -> pl.Expr:
    """Return what ``function`` makes of the lists of each group's values, as an aggregation."""
    return over_rows(values.implode(), function, dtype)


def over_rows(
    values: pl.Expr, function: Callable[[pl.Series], pl.Series], dtype: pl.DataType
) -> pl.Expr:
    """Return what ``function`` makes of a column, value by value."""

    def named(column: pl.Series) -> pl.Series:
        return function(column).alias(column.name)

    return values.map_batches(named, return_dtype=dtype, is_elementwise=True)


def flat(lists: pl.Series) -> tuple[pl.Series, Lengths]:
    """Return the values of all lists end to end, and how long each list is (a null list: 0)."""
    lengths = lists.list.len().fill_null(0).to_numpy().astype(np.int64)
    return lists.filter(pl.Series(lengths > 0)).explode(), lengths


def flat_twice(lists: pl.Series) -> tuple[pl.Series, Lengths]:
    """Return the values of lists of lists end to end, and how many each outer list holds."""
    inner, outer_lengths = flat(lists)
    values, inner_lengths = flat(inner)
    return values, reduced(np.add, inner_lengths, outer_lengths, 0)


def regrouped(values: pl.Series, lengths: Lengths) -> pl.Series:
    """Put values that lie end to end into lists of these lengths."""
    if values.dtype in _SHARED_WITH_ARROW:
        ends = pa.array(np.append(0, np.cumsum(lengths)), pa.int64())
        return pl.Series(pa.LargeListArray.from_arrays(ends, values.to_arrow()))
    table = pl.DataFrame({"group": pl.Series(numbered(lengths)).set_sorted(), "value": values})
    lists = table.group_by("group", maintain_order=True).agg("value")["value"]
    filled = lengths > 0
    if filled.all():
        return lists
    lists = lists.append(pl.Series([[]], dtype=pl.List(values.dtype)))
    places = np.where(filled, np.cumsum(filled) - 1, len(lists) - 1)
    return lists.gather(pl.Series(places))


def numbered(lengths: Lengths) -> Int64s:
    """Return the number of its group for each value."""
    return np.repeat(np.arange(len(lengths)), lengths)


def starts(lengths: Lengths) -> Int64s:
    """Return the position of each group's first value."""
    return np.asarray(np.cumsum(lengths) - lengths, np.int64)


def reduced(
    function: np.ufunc, values: npt.NDArray[Any], lengths: Lengths, empty: Any
) -> npt.NDArray[Any]:
    """Reduce each group's values to one by ``np.add``, ``np.maximum`` and such."""
    out = np.full((len(lengths), *values.shape[1:]), empty, values.dtype)
    filled = lengths > 0
    if filled.any():
        out[filled] = function.reduceat(values, starts(lengths)[filled])
    return out


def kept(values: pl.Series, lengths: Lengths, keep: pl.Series) -> tuple[pl.Series, Lengths]:
    """Keep the values where ``keep`` is true; all groups are kept, also empty ones."""
    if keep.all():
        return values, lengths
    left = reduced(np.add, keep.to_numpy().astype(np.int64), lengths, 0)
    return values.filter(keep), left


def without_nulls(values: pl.Series, lengths: Lengths) -> tuple[pl.Series, Lengths]:
    """Keep the values that are not null."""
    if not values.null_count():
        return values, lengths
    return kept(values, lengths, values.is_not_null())


def grouped(values: Any, lengths: Lengths) -> Iterator[Any]:
    """Divide values that lie end to end into their groups."""
    ends = np.cumsum(lengths).tolist()
    start = 0
    for end in ends:
        yield values[start:end]
        start = end
