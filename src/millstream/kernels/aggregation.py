"""Aggregates by columns: rows are reduced to partials, partials are merged, and give results.

There are two more columns besides the partials of the aggregates: the number of their events, and, if
the input has retractions, their weight, the sum of ``__diff``. A key of weight zero is deleted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import polars as pl

from millstream.kernels.aggregates.event_order import with_order
from millstream.kernels.aggregates.protocol import Aggregate
from millstream.kernels.aggregates.sketches.deferred import DeferredSketch
from millstream.kernels.columns import constant
from millstream.kernels.frames import DIFF, ROWS, WEIGHT


@dataclass(frozen=True)
class Aggregation:
    """Named aggregates by the columns ``by``.

    ``schema`` gives the types of the partial columns, and ``keys`` those of ``by``, as found when the
    pipeline was built.
    ``weighted``: the input rows have ``__diff``, and some are retractions.
    """

    by: tuple[str, ...]
    aggregates: tuple[tuple[str, Aggregate], ...]
    weighted: bool = False
    schema: tuple[tuple[str, pl.DataType], ...] = ()
    keys: tuple[tuple[str, pl.DataType], ...] = ()

    @property
    def columns_read(self) -> set[str]:
        return set(self.by).union(*(a.columns_read for _, a in self.aggregates))

    @property
    def ordered(self) -> bool:
        """Whether an aggregate needs the place of rows in the log."""
        return any(aggregate.needs_order for _, aggregate in self.aggregates)

    @property
    def partials(self) -> list[str]:
        """The names of the partial columns, the counts of events and weights among them."""
        return [name for name, _ in self.schema]

    @property
    def partial_expressions(self) -> list[pl.Expr]:
        """Expressions that make the partials of the aggregates from rows."""
        return [e for name, a in self.aggregates for e in a.partial(name)]

    @property
    def merge_expressions(self) -> list[pl.Expr]:
        """Expressions that merge the partials of the aggregates."""
        return [e for name, a in self.aggregates for e in a.merge(name)]

    def reduce(self, rows: pl.DataFrame, *columns: str) -> pl.DataFrame:
        """Make one partial per key and value of the given columns."""
        if self.ordered:
            rows = with_order(rows)
        made = [*self.partial_expressions, pl.len().cast(pl.Int64).alias(ROWS)]
        if self.weighted:
            made.append(pl.col(DIFF).sum().cast(pl.Int64).alias(WEIGHT))
        return _cast(_grouped(rows, [*columns, *self.by], made), self.schema)

    def merge(
        self, partials: pl.DataFrame, *columns: str, first: Sequence[str] = ()
    ) -> pl.DataFrame:
        """Make the partials of each value of the given columns into one; ``by`` is not implied.

        Of the columns ``first``, which are equal within a group, one value is kept.
        """
        merged = [*self.merge_expressions, pl.col(ROWS).sum()]
        if self.weighted:
            merged.append(pl.col(WEIGHT).sum())
        merged += (pl.col(name).first() for name in first)
        return _grouped(partials, columns, merged)

    @property
    def has_deferred(self) -> bool:
        """Whether anything of a batch waits until its state is stored."""
        return any(isinstance(aggregate, DeferredSketch) for _, aggregate in self.aggregates)

    def for_state(self, merged: pl.DataFrame) -> pl.DataFrame:
        """Return a batch's partials, merged by key, as state keeps them."""
        if not self.has_deferred or not merged.height:
            return merged
        return merged.with_columns(
            e
            for name, a in self.aggregates
            if isinstance(a, DeferredSketch)
            for e in a.for_state(name)
        )

    @property
    def empty_partials(self) -> pl.DataFrame:
        """One row: the partials of no events."""
        counts = [ROWS, WEIGHT] if self.weighted else [ROWS]
        none = pl.DataFrame(schema=dict(self.schema))
        return none.select(*self.merge_expressions, *(pl.col(name).sum() for name in counts))[
            self.partials
        ]

    @property
    def results(self) -> list[pl.Expr]:
        """Expressions that compute the results from merged partials."""
        return [aggregate.result(name) for name, aggregate in self.aggregates]

    @property
    def names(self) -> list[str]:
        """The names of the results."""
        return [name for name, _ in self.aggregates]


def _grouped(rows: pl.DataFrame, columns: Sequence[str], made: Sequence[pl.Expr]) -> pl.DataFrame:
    """Group rows; most batches lie in one window, and grouping by one column takes half as long."""
    alike = {name: rows[name].item(0) for name in columns if _is_constant(rows[name])}
    varying = [name for name in columns if name not in alike]
    if not varying:
        return rows.group_by(*columns).agg(*made)
    grouped = rows.group_by(*varying).agg(*made)
    same = [
        constant(value, grouped.height, rows.schema[name], name) for name, value in alike.items()
    ]
    return grouped.hstack(same)[[*columns, *grouped.columns[len(varying) :]]] if same else grouped


def _cast(rows: pl.DataFrame, dtypes: Iterable[tuple[str, pl.DataType]]) -> pl.DataFrame:
    wanted = {**rows.schema, **dict(dtypes)}
    if wanted == rows.schema:
        return rows
    return pl.DataFrame([column.cast(wanted[column.name]) for column in rows.iter_columns()])


def _is_constant(column: pl.Series) -> bool:
    """Return whether a column of whole numbers has one value, and no null."""
    if not column.dtype.is_integer() or not len(column) or column.null_count():
        return False
    return bool(column.min() == column.max())


def event_count(partials: pl.DataFrame) -> int:
    """Count the events that a table of partials stands for."""
    return int(partials[ROWS].sum())
