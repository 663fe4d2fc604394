"""What an aggregate is: partial columns, a way to merge them, and a result.

``partial`` turns the rows of a group into partial columns; ``merge`` turns partials of one key into
one; ``result`` computes the result from it. Merging is associative and commutative, so partials may be
made before the shuffle, kept apart in state and merged in any order. Everything that a partial
depends on, such as the size of a sketch, stands in the names and types of its columns, by which a
changed pipeline is distinguished from the one that made its state.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, Self

import polars as pl

from millstream.errors import ConfigError
from millstream.kernels.column_types import column_type

TypeOf = Callable[[pl.Expr], pl.DataType]  # finds the type of an expression over a step's rows
Accepts = Callable[[pl.DataType], bool]


class Aggregate(Protocol):
    """What the kernels ask of an aggregate."""

    @property
    def columns_read(self) -> set[str]:
        """The columns of the rows that ``partial`` reads, without hidden ones."""
        ...

    @property
    def needs_order(self) -> bool:
        """Whether ``partial`` also reads the hidden columns ``__time`` and ``__order``."""
        ...

    def bound(self, name: str, type_of: TypeOf) -> Self:
        """Return the aggregate for values of the type that they have, checked; called once.

        Raises:
            ConfigError: values of that type cannot be aggregated so.
        """
        ...

    def partial(self, name: str) -> list[pl.Expr]:
        """Expressions over the rows of a group, named ``name`` or ``name.…``."""
        ...

    def merge(self, name: str) -> list[pl.Expr]:
        """Expressions over the partials of a key, with the same names."""
        ...

    def result(self, name: str) -> pl.Expr:
        """Return the result of merged partials, under ``name``."""
        ...

    def for_retractions(self) -> Aggregate:
        """Return the form that takes rows with ``__diff``: +1 for added, -1 for retracted.

        Raises:
            ConfigError: the aggregate cannot take anything back; the message says what can.
        """
        ...


@dataclass(frozen=True)
class OverValue:
    """An aggregate of what one expression gives for each row, in whatever order the rows come."""

    value: pl.Expr

    @property
    def columns_read(self) -> set[str]:
        return set(self.value.meta.root_names())

    @property
    def needs_order(self) -> bool:
        return False


def checked_type(
    name: str, value: pl.Expr, type_of: TypeOf, accepts: Accepts, takes: str
) -> pl.DataType:
    """Find the type of an aggregate's values, and make sure that it is one of those taken.

    Raises:
        ConfigError: it is not, or the expression reads no column or several at once.
    """
    if value.meta.has_multiple_outputs() or not value.meta.root_names():
        raise ConfigError(
            f"The aggregate {name!r} is over {value}. Give one column, or an expression that makes "
            "one value per row from columns; ms.count() counts rows."
        )
    dtype = type_of(value)
    if accepts(dtype):
        return dtype
    raise ConfigError(f"The aggregate {name!r} is over values of type {dtype}. It takes {takes}.")


def bound_type(dtype: pl.DataType | None) -> pl.DataType:
    """Return the type that an aggregate's values have, which :meth:`Aggregate.bound` found."""
    assert dtype is not None, "bind the aggregate first"
    return dtype


def is_number(dtype: pl.DataType) -> bool:
    """Whether values can be added up."""
    return dtype.is_numeric() or dtype == pl.Boolean


def is_plain(dtype: pl.DataType) -> bool:
    """Whether values can be sorted, compared and kept as they are."""
    return column_type(dtype).key


PLAIN_TYPES = "numbers, booleans, text, bytes, dates, times and durations"
