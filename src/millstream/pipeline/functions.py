"""The words of the pipeline surface: windows and watermarks."""

from __future__ import annotations

import polars as pl

from millstream.durations import Duration, to_us
from millstream.errors import ConfigError
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
