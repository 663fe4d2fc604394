"""Checks of what is declared, against the columns that are there, and their errors."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

import polars as pl

from millstream.errors import ConfigError
from millstream.kernels.steps import Step
from millstream.pipeline.schema import Columns


def columns_after(step: Step, columns: Columns) -> Columns:
    """Find the columns that come out of a step, by running it on no rows."""
    try:
        return dict(step.apply(pl.DataFrame(schema=columns)).schema)
    except pl.exceptions.PolarsError as error:
        raise wrong_columns(step.name, error, columns) from error


def wrong_columns(step: str, error: Exception, columns: Columns) -> ConfigError:
    """Say in our words why an expression does not fit its columns."""
    text = str(error).strip().splitlines()[0].strip('"')
    if isinstance(error, pl.exceptions.ColumnNotFoundError):
        name = text.split('"', 2)[1] if '"' in text else text
        return ConfigError(f"{step} uses the column {name!r}. {there_are(name, columns)}")
    return ConfigError(f"{step} does not fit its columns: {text}. {there_are('', columns)}")


def there_are(name: str, columns: Columns) -> str:
    """List the columns, and the one that was probably meant."""
    near = difflib.get_close_matches(name, columns, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return f"The columns there are {', '.join(columns)}.{hint}"


def check_time(expression: pl.Expr, columns: Columns, step: str) -> None:
    """Make sure that an expression gives a datetime."""
    try:
        dtype = pl.DataFrame(schema=columns).select(expression).dtypes[0]
    except pl.exceptions.PolarsError as error:
        raise wrong_columns(f"the time of {step!r}", error, columns) from error
    if not isinstance(dtype, pl.Datetime):
        raise ConfigError(
            f"The time of {step!r} is of type {dtype}. Give a datetime field, or an expression "
            'that makes one, such as pl.from_epoch("ts_ms", time_unit="ms").'
        )


def named(expressions: Sequence[pl.Expr]) -> str:
    """Name the columns that expressions read."""
    roots = dict.fromkeys(name for e in expressions for name in e.meta.root_names())
    return ", ".join(roots)
