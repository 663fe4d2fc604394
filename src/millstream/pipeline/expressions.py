"""Columns in the pipeline API: by name, or as polars expressions."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import cast

import polars as pl

from millstream.errors import ConfigError

Column = str | pl.Expr


def is_pattern(name: str) -> bool:
    """Return whether polars takes a name for a pattern of names, where it is given as one."""
    return name == "*" or (name.startswith("^") and name.endswith("$"))


def column_named(name: str) -> pl.Expr:
    """Return the column of exactly this name, also where it looks like a pattern."""
    return pl.col(f"^{re.escape(name)}$" if is_pattern(name) else name)


def as_expression(column: Column, *, what: str) -> pl.Expr:
    """Take a column by name or as a polars expression."""
    if isinstance(column, str):
        return pl.col(column)
    if isinstance(column, pl.Expr):
        return column
    raise ConfigError(
        f"{what} is {column!r}. Give a column's name or a polars expression, such as pl.col('cost')."
    )


def names_given(given: object, what: str) -> tuple[str, ...]:
    """Return the names of columns that a caller gave: one name, or several.

    Raises:
        ConfigError: something in it is not a name.
    """
    several = isinstance(given, Iterable) and not isinstance(given, (str, bytes))
    names: tuple[object, ...] = tuple(cast("Iterable[object]", given)) if several else (given,)
    for name in names:
        if not isinstance(name, str):
            shown = f"the expression {name}" if isinstance(name, pl.Expr) else repr(name)
            raise ConfigError(
                f'{what} is given {shown}. Give the name of a column, such as "id". For a computed '
                'value, make a column first: with_columns(id=…), then give the name "id".'
            )
    return cast("tuple[str, ...]", names)
