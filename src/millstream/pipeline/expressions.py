"""Columns in the pipeline API: by name, or as polars expressions."""

from __future__ import annotations

import polars as pl

from millstream.errors import ConfigError

Column = str | pl.Expr


def as_expression(column: Column, *, what: str) -> pl.Expr:
    """Take a column by name or as a polars expression."""
    if isinstance(column, str):
        return pl.col(column)
    if isinstance(column, pl.Expr):
        return column
    raise ConfigError(
        f"{what} is {column!r}. Give a column's name or a polars expression, such as pl.col('cost')."
    )
