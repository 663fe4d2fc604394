"""The conditions of some queries as arrays, read where they are stored.

A query's conditions are a list of structs in a column of a run. Of the queries that rows may match, numbers are gathered from
the arrays behind that column, and no struct or list is copied; texts are gathered when they are asked for.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa

from millstream.kernels.arrays import Float64s, Int64s
from millstream.kernels.search.compiled_queries import CONDITIONS, SHAPE
from millstream.kernels.state.sorted_runs import to_arrow


@dataclass(frozen=True)
class StoredConditions:
    """The conditions of some queries, query by query; those of query q are in ``[starts[q], starts[q + 1])``.

    The numbers of condition c are in ``[number_starts[c], number_ends[c])`` of ``numbers``. ``shapes`` are those that the queries
    have, of which query q has that of the number ``shape_of[q]``.
    """

    starts: Int64s
    kinds: Int64s
    fields: Int64s
    low: Int64s
    high: Int64s
    numbers: Float64s
    number_starts: Int64s
    number_ends: Int64s
    shapes: list[str]
    shape_of: Int64s
    parts: list[_Part]

    @classmethod
    def of(cls, queries: pl.DataFrame) -> StoredConditions:
        """Take them from the columns ``__shape`` and ``__conditions``."""
        return cls.of_places([(to_arrow(queries[[SHAPE, CONDITIONS]]), np.arange(queries.height))])

    @classmethod
    def of_places(cls, places: Iterable[tuple[pa.Table, Int64s]]) -> StoredConditions:
        """Take those of the queries at some places of tables."""
        parts = [_Part.of(table, at) for table, at in places if len(at)]
        shapes = pl.concat([_NO_SHAPE, *(part.shapes for part in parts)]).fill_null("")
        distinct = shapes.unique().sort()
        number_of = shapes.cast(pl.Enum(distinct)).to_physical().cast(pl.Int64)
        before = np.cumsum([0, *(len(part.numbers) for part in parts)])
        counts = _joined(part.counts for part in parts)

        def joined(name: str) -> Any:
            return _joined(getattr(part, name) for part in parts)

        return cls(
            np.concatenate(([0], np.cumsum(counts))),
            joined("kinds"),
            joined("fields"),
            joined("low"),
            joined("high"),
            np.concatenate([np.empty(0), *(part.numbers for part in parts)]),
            _joined(part.number_starts + at for part, at in zip(parts, before, strict=False)),
            _joined(part.number_ends + at for part, at in zip(parts, before, strict=False)),
            distinct.to_list(),
            number_of.to_numpy(),
            parts,
        )

    def shape(self, query: int) -> str:
        """Return how a query combines its conditions."""
        return self.shapes[int(self.shape_of[query])]

    def text(self, condition: int) -> str:
        """Return the text of one condition."""
        found: str = self.texts(np.array([condition]))[0]
        return found

    def texts(self, conditions: Int64s) -> pl.Series:
        """Return the texts of conditions, which rise."""
        found, first = [pl.Series("text", [], pl.String)], 0
        for part in self.parts:
            end = first + len(part.at)
            bounds = np.searchsorted(conditions, [first, end])
            mine = conditions[bounds[0] : bounds[1]] - first
            if len(mine):
                texts = part.texts.take(pa.array(part.at[mine]))
                found.append(pl.Series("text", texts).cast(pl.String))
            first = end
        return pl.concat(found)

    def numbers_of(self, condition: int) -> list[float]:
        """Return the numbers of one condition."""
        found = self.numbers[self.number_starts[condition] : self.number_ends[condition]]
        return list(found.tolist())


_NO_SHAPE = pl.Series("shape", [], pl.String)


@dataclass(frozen=True)
class _Part:
    """The conditions of the queries of one table. ``at``: where each is among those of the whole table."""

    counts: Int64s
    at: Int64s
    kinds: Int64s
    fields: Int64s
    low: Int64s
    high: Int64s
    numbers: Float64s
    number_starts: Int64s
    number_ends: Int64s
    texts: pa.Array
    shapes: pl.Series

    @classmethod
    def of(cls, table: pa.Table, places: Int64s) -> _Part:
        lists = table.column(CONDITIONS).chunk(0)
        bounds = _whole(lists.offsets)
        first, counts = bounds[places], bounds[places + 1] - bounds[places]
        if lists.null_count:  # of deletions
            counts = np.where(_numpy(lists.is_valid())[places], counts, 0)
        at = np.arange(counts.sum()) + np.repeat(first - (np.cumsum(counts) - counts), counts)
        structs = lists.values
        names = [structs.type.field(number).name for number in range(structs.type.num_fields)]
        columns = dict(zip(names, structs.flatten(), strict=True))
        of_numbers = _whole(columns["numbers"].offsets)
        shapes = table.column(SHAPE).chunk(0).take(pa.array(places))
        return cls(
            counts,
            at,
            _whole(columns["kind"], at),
            _whole(columns["field"], at),
            _whole(columns["low"], at),
            _whole(columns["high"], at),
            _numpy(columns["numbers"].values),
            of_numbers[at],
            of_numbers[at + 1],
            columns["text"],
            pl.Series("shape", shapes).cast(pl.String),
        )


def _numpy(array: pa.Array) -> Any:
    return array.to_numpy(zero_copy_only=False)


def _whole(array: pa.Array, at: Int64s | None = None) -> Int64s:
    """Return whole numbers, or those at some places."""
    values = _numpy(array)
    found: Int64s = (values if at is None else values[at]).astype(np.int64)
    return found


def _joined(arrays: Iterable[Int64s]) -> Int64s:
    return np.concatenate([np.empty(0, np.int64), *arrays])
