"""Aggregates meet the columns that they are over: the type check, where ``agg`` is called."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import polars as pl

from millstream.errors import ConfigError
from millstream.kernels.aggregates.protocol import Aggregate
from millstream.kernels.frames import HIDDEN_PREFIX
from millstream.pipeline.checks import type_of
from millstream.pipeline.schema import ColumnTypes


def check_aggregates(aggregates: Mapping[str, Aggregate], taken: Iterable[str]) -> None:
    """Make sure that ``agg`` was given aggregates, whose names are free.

    Raises:
        ConfigError: it was given none, something else, or a name that is taken.
    """
    if not aggregates:
        raise ConfigError("agg has no aggregates. Name at least one: agg(n=ms.count()).")
    names = {*taken}
    for name, aggregate in aggregates.items():
        if name in names or name.startswith(HIDDEN_PREFIX):
            raise ConfigError(f"The aggregate's name {name!r} is taken. Choose another.")
        if not hasattr(aggregate, "partial"):
            raise ConfigError(
                f"The aggregate {name!r} is {aggregate!r}. Use one of Millstream's, such as "
                "ms.count, ms.sum or ms.mean."
            )


def bound_aggregates(
    aggregates: Mapping[str, Aggregate], columns: ColumnTypes, *, step: str, changes: bool = False
) -> tuple[tuple[str, Aggregate], ...]:
    """Give the aggregates bound to the types of their values.

    With ``changes`` rows may be retracted, and the aggregates take ``__diff`` into account.

    Raises:
        ConfigError: an aggregate does not take values of that type, reads columns that are not
            there, or cannot take rows back.
    """

    def found(value: pl.Expr) -> pl.DataType:
        return type_of(value, columns, step)

    chosen = {n: a.for_retractions() if changes else a for n, a in aggregates.items()}
    return tuple((name, one.bound(name, found)) for name, one in chosen.items())
