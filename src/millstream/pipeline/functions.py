"""The words of the pipeline surface: windows and watermarks."""

from __future__ import annotations

import polars as pl

from millstream.durations import Duration, to_us
from millstream.errors import ConfigError
from millstream.kernels.watermarks import WatermarkRule
from millstream.kernels.windows import Tumbling

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
