"""The words of the pipeline surface for watermarks and aggregates."""

from __future__ import annotations

import polars as pl

from millstream.durations import Duration, to_us
from millstream.errors import ConfigError
from millstream.kernels import aggregates
from millstream.kernels.watermarks import WatermarkRule

Column = str | pl.Expr


def watermark(delay: Duration, *, idle: Duration | None = "1 minute") -> WatermarkRule:
    """Say how far behind the newest event of a partition the watermark stays.

    Args:
        delay: How much disorder to expect: an event this much older than the newest one of its
            partition is still in time.
        idle: A partition that has had no new record for this long, while the job ran, no longer
            holds the others back. None: it holds them back for ever, and the answer depends on the
            events alone.

    Example::

        events.stream(time="occurred_at", watermark=ms.watermark("2 minutes", idle="30 seconds"))
    """
    idle_ms = None if idle is None else to_us(idle, what="watermark's idle") // 1000
    return WatermarkRule(to_us(delay, what="watermark's delay"), idle_ms)


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
