"""A number for a whole row, nested columns and all: equal rows have equal numbers, in every process.

It orders rows that nothing else orders, so that it does not matter which of them came first.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import polars as pl

from millstream.kernels.arrays import Int64s
from millstream.kernels.state.keyhash import Hashes, digest_columns, mix


def digest_rows(columns: Sequence[pl.Series]) -> Int64s:
    """Return a number for each row of the columns."""
    return _words(columns).view(np.int64)


def _words(columns: Sequence[pl.Series]) -> Hashes:
    # Numbers for names: polars takes a name such as "^a.*$" for a pattern.
    flat = pl.DataFrame([_flat(column).alias(str(n)) for n, column in enumerate(columns)])
    return digest_columns(flat, tuple(flat.columns))


def _flat(column: pl.Series) -> pl.Series:
    """Return a column that is not nested, and has equal values where this one has."""
    column = column.alias("0")
    if isinstance(column.dtype, pl.Array):
        column = column.arr.to_list()
    if isinstance(column.dtype, pl.Struct):
        fields = [column.struct.field(field.name) for field in column.dtype.fields]
        words = _words(fields) if fields else np.zeros(len(column), np.uint64)
    elif isinstance(column.dtype, pl.List):
        words = _list_words(column)
    else:
        return column
    return pl.select(pl.when(column.is_not_null()).then(pl.Series(words))).to_series()


def _list_words(column: pl.Series) -> Hashes:
    lengths = column.list.len().fill_null(0).to_numpy().astype(np.int64)
    words = lengths.astype(np.uint64)
    filled = np.flatnonzero(lengths)
    if len(filled):
        ends = np.cumsum(lengths[filled])
        starts = ends - lengths[filled]
        places = np.arange(ends[-1]) - np.repeat(starts, lengths[filled])
        elements = _words([column.gather(filled).explode()])
        placed = mix(elements ^ mix(places.astype(np.uint64)))
        words[filled] = mix(words[filled] ^ np.add.reduceat(placed, starts))
    return words
