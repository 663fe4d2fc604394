"""First, last and list by event time, and the value where another is least or greatest.

Order is that of event time, and of place in the log where times are equal. It belongs to the rows and
not to their arrival, so the result is the same however they were batched. Rows that an operator made
have no place; see :func:`with_order`. Nulls are left out. (Rows
that share time and place, such as those that one record was exploded into, stay in the order in which
they stand; they are never divided among batches.)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import polars as pl

from millstream.errors import ConfigError
from millstream.kernels.aggregates.bags import BagAggregate
from millstream.kernels.aggregates.groups import (
    Lengths,
    flat,
    flat_twice,
    kept,
    numbered,
    over_groups,
    over_rows,
    reduced,
    regrouped,
    starts,
)
from millstream.kernels.aggregates.protocol import (
    PLAIN_TYPES,
    Aggregate,
    OverValue,
    TypeOf,
    bound_type,
    checked_type,
    is_plain,
)
from millstream.kernels.arrays import Int64s
from millstream.kernels.frames import ORDER, TIME, visible
from millstream.kernels.state.keyhash import digest_columns

PickKind = Literal["first", "last", "min_by", "max_by"]
_AT = ("time", "order")


def with_order(rows: pl.DataFrame) -> pl.DataFrame:
    """Return rows that did not come straight from a source, and have no place in the log, an order.

    It is arbitrary and always the same: that of a hash of their columns (without lists and structs).
    """
    if ORDER in rows.columns:
        return rows
    compared = [name for name in visible(rows.columns) if not rows.schema[name].is_nested()]
    places = (digest_columns(rows, tuple(compared)) >> np.uint64(1)).astype(np.int64)
    return rows.hstack([pl.Series(ORDER, places)])


@dataclass(frozen=True)
class Pick:
    """The value of one row: the first, the last, or the first of those where ``by`` is extreme."""

    value: pl.Expr
    kind: PickKind
    by: pl.Expr | None = None
    state: pl.DataType | None = None

    @property
    def columns_read(self) -> set[str]:
        read = set(self.value.meta.root_names())
        return read if self.by is None else read | set(self.by.meta.root_names())

    @property
    def needs_order(self) -> bool:
        return True

    def bound(self, name: str, type_of: TypeOf) -> Pick:
        dtype = checked_type(name, self.value, type_of, _anything, "values of any type")
        fields = {"value": dtype, "time": pl.Int64(), "order": pl.Int64()}
        if self.by is not None:
            fields["by"] = checked_type(
                name, self.by, type_of, is_plain, f"an order by {PLAIN_TYPES}"
            )
        return replace(self, state=pl.Struct(fields))

    def for_retractions(self) -> Aggregate:
        instead = {
            "first": "ms.min over the time",
            "last": "ms.max over the time",
            "min_by": "ms.min",
            "max_by": "ms.max",
        }
        raise ConfigError(
            f"{self.kind} is over rows that can be retracted, which leave no order of their own. "
            f"Use {instead[self.kind]}, or ms.list and choose from it."
        )

    def partial(self, name: str) -> list[pl.Expr]:
        columns = [
            self.value.alias("value"),
            pl.col(TIME).alias("time"),
            pl.col(ORDER).alias("order"),
        ]
        if self.by is not None:
            columns.append(self.by.alias("by"))
        picked = over_groups(pl.struct(*columns), self._picked, bound_type(self.state))
        return [picked.alias(f"{name}.{self.kind}")]

    def merge(self, name: str) -> list[pl.Expr]:
        column = pl.col(f"{name}.{self.kind}")
        return [over_groups(column, self._picked, bound_type(self.state))]

    def result(self, name: str) -> pl.Expr:
        return pl.col(f"{name}.{self.kind}").struct.field("value").alias(name)

    def _picked(self, lists: pl.Series) -> pl.Series:
        """Narrow the rows of each group down, one key after the other, and take the first left."""
        rows, lengths = flat(lists)
        present = rows.struct.field("value").is_not_null()
        if self.by is not None:
            present &= rows.struct.field("by").is_not_null()
        rows, lengths = kept(rows, lengths, present)
        places = np.arange(len(rows))
        left = lengths
        for key in self._keys(rows):
            best = reduced(np.minimum, key[places], left, 0)
            equal = key[places] == np.repeat(best, left)
            left = reduced(np.add, equal.astype(np.int64), left, 0)
            places = places[equal]
        first = np.zeros(len(lengths), np.int64)
        first[lengths > 0] = places[starts(left)[lengths > 0]]
        return rows.gather(pl.Series(first).set(pl.Series(lengths == 0), None))

    def _keys(self, rows: pl.Series) -> list[Int64s]:
        """Return what to be least by, one after the other, as whole numbers."""
        keys = [rows.struct.field(field).to_numpy() for field in _AT]
        if self.kind == "last":
            return [-key for key in keys]
        if self.by is None:
            return keys
        ranks = rows.struct.field("by").rank("dense").to_numpy().astype(np.int64)
        return [-ranks if self.kind == "max_by" else ranks, *keys]


@dataclass(frozen=True)
class CollectList(OverValue):
    """All values, in order. The state holds every one of them, with its time and place."""

    dtype: pl.DataType | None = None

    @property
    def needs_order(self) -> bool:
        return True

    def bound(self, name: str, type_of: TypeOf) -> CollectList:
        dtype = checked_type(name, self.value, type_of, _anything, "values of any type")
        return replace(self, dtype=dtype)

    def for_retractions(self) -> Aggregate:
        return ListOfBag(self.value, self.dtype, signed=True)

    @property
    def _state(self) -> pl.DataType:
        return pl.List(
            pl.Struct({"value": bound_type(self.dtype), "time": pl.Int64, "order": pl.Int64})
        )

    def partial(self, name: str) -> list[pl.Expr]:
        rows = pl.struct(
            self.value.alias("value"), pl.col(TIME).alias("time"), pl.col(ORDER).alias("order")
        )
        ordered = over_groups(rows, lambda lists: _in_order(*flat(lists)), self._state)
        return [ordered.alias(f"{name}.list")]

    def merge(self, name: str) -> list[pl.Expr]:
        column = pl.col(f"{name}.list")
        return [over_groups(column, lambda lists: _in_order(*flat_twice(lists)), self._state)]

    def result(self, name: str) -> pl.Expr:
        dtype = pl.List(bound_type(self.dtype))
        return over_rows(pl.col(f"{name}.list"), _values, dtype).alias(name)


def _in_order(rows: pl.Series, lengths: Lengths) -> pl.Series:
    rows, lengths = kept(rows, lengths, rows.struct.field("value").is_not_null())
    keys = pl.DataFrame(
        {"group": numbered(lengths), **{field: rows.struct.field(field) for field in _AT}}
    )
    places = keys.select(pl.arg_sort_by("group", *_AT, maintain_order=True)).to_series()
    return regrouped(rows.gather(places), lengths)


def _values(lists: pl.Series) -> pl.Series:
    rows, lengths = flat(lists)
    return regrouped(rows.struct.field("value"), lengths)


@dataclass(frozen=True)
class ListOfBag(BagAggregate):
    """All values of rows that may be retracted, sorted: a bag, spelt out."""

    def result_type(self, dtype: pl.DataType) -> pl.DataType:
        return pl.List(dtype)

    def read(self, table: pl.DataFrame, lengths: Lengths) -> pl.Series:
        counts = table["count"].to_numpy()
        values = table["value"].gather(np.repeat(np.arange(len(counts)), counts))
        return regrouped(values, reduced(np.add, counts, lengths, 0))


def _anything(_: pl.DataType) -> bool:
    return True
