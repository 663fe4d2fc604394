"""Aggregates meet the columns that they are over: the type check, where ``agg`` is called."""

from __future__ import annotations

from collections.abc import Mapping

import polars as pl

from millstream.kernels.aggregates.protocol import Aggregate
from millstream.pipeline.checks import type_of
from millstream.pipeline.schema import ColumnTypes


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
