"""The words of the pipeline surface: windows and aggregates."""

from __future__ import annotations

import polars as pl

from millstream.durations import Duration, to_us
from millstream.errors import ConfigError
from millstream.kernels import aggregates
from millstream.kernels.windows import Tumbling

Column = str | pl.Expr


def tumbling(size: Duration, *, offset: Duration = "0 seconds") -> Tumbling:
    """Windows of one size, side by side: ``[k·size, (k+1)·size)``, shifted by ``offset``, in UTC."""
    size_us = to_us(size, what="tumbling's size")
    if size_us == 0:
        raise ConfigError("tumbling's size is 0. Give a size above zero, such as '1 minute'.")
    return Tumbling(size_us, to_us(offset, what="tumbling's offset") % size_us)


def as_expression(column: Column, *, what: str) -> pl.Expr:
    """Take a column by name or as a polars expression."""
    if isinstance(column, str):
        return pl.col(column)
    if isinstance(column, pl.Expr):
        return column
    raise ConfigError(
        f"{what} is {column!r}. Give a column's name or a polars expression, such as pl.col('cost')."
    )


def count(condition: Column | None = None) -> aggregates.Count:
    """Count the rows; with a condition, those for which it is true (null counts as false).

    Example: ``ms.count(pl.col("kind") == "click")``.
    """
    return aggregates.Count(
        None if condition is None else as_expression(condition, what="count's condition")
    )


def sum(value: Column) -> aggregates.Sum:  # noqa: A001 - its name in every query language
    """Sum a number over the rows. Nulls are left out; the sum of none is 0."""
    return aggregates.Sum(as_expression(value, what="sum's value"))


def mean(value: Column) -> aggregates.Mean:
    """Average a number over the rows that have one; null where none has."""
    return aggregates.Mean(as_expression(value, what="mean's value"))
