"""Checks of what is declared, against the columns that are there, and their errors."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import get_args

import polars as pl

from millstream.choices import choose, did_you_mean
from millstream.client.address import log_folder, shown
from millstream.durations import Duration, format_us, to_us
from millstream.errors import ConfigError
from millstream.kernels.errors.user_code import OnError
from millstream.kernels.frames import HIDDEN_PREFIX
from millstream.kernels.plan import JobPlan
from millstream.kernels.steps import Filter, Select, Step, WithColumns
from millstream.notebook.cells import cell_name, cell_run
from millstream.object_store.address import state_url
from millstream.pipeline.expressions import names_given
from millstream.pipeline.schema import ColumnTypes
from millstream.views.questions.requests import check_requests

_OURS = f"{Path(__file__).resolve().parents[1]}{os.sep}"


SPAN_US_MAX = 36_525 * 86_400_000_000  # 100 years, so that no sum of times overflows


def span_us(duration: Duration, what: str) -> int:
    """Return a duration that is added to event times, in microseconds.

    Raises:
        ConfigError: it is none, or longer than 100 years.
    """
    span = to_us(duration, what=what)
    if span > SPAN_US_MAX:
        raise ConfigError(f"{what} is {format_us(span)}. Give at most 36,525 days.")
    return span


def columns_after(step: Step, columns: ColumnTypes) -> ColumnTypes:
    """Find the columns that come out of a step, by running it on no rows."""
    try:
        made = dict(step.apply(pl.DataFrame(schema=columns)).table.schema)
    except pl.exceptions.PolarsError as error:
        raise column_error(step.name, error, columns) from error
    if isinstance(step, (Filter, Select, WithColumns)):
        expressions = step.conditions if isinstance(step, Filter) else step.expressions
        _require_rowwise(expressions, columns, step.name)
    for name in made:
        require_unreserved(name, step.name)
    return made


def require_unreserved(column: str, what: str) -> None:
    """Make sure that a column which a step makes has no name that is reserved for hidden ones."""
    if column.startswith(HIDDEN_PREFIX):
        raise ConfigError(
            f"{what} makes the column {column!r}: names that begin with {HIDDEN_PREFIX!r} are "
            "reserved. Choose another name."
        )


def _require_rowwise(expressions: Sequence[pl.Expr], columns: ColumnTypes, what: str) -> None:
    """Make sure that what an expression gives for a row depends on that row alone.

    polars itself says so: it takes only some rows before such an expression instead of after it.
    """
    for expression in expressions:
        if not _is_rowwise(expression, columns) and _is_rowwise(pl.lit(1), columns):
            raise ConfigError(
                f"{what} looks at more than one row: {expression}. Which rows share a table is "
                "arbitrary, so an expression must treat each by itself; over several rows, use a "
                "window and its aggregates. A text's format must be given (to_datetime(format)), "
                "and map_batches must say is_elementwise=True."
            )


def _is_rowwise(expression: pl.Expr, columns: ColumnTypes) -> bool:
    plan = pl.LazyFrame(schema=columns).with_columns(expression).slice(1, 1).explain()
    return not plan.startswith("SLICE")


def declared_at() -> str:
    """Give the file and line, outside of Millstream, that called into it: ``/my/app.py:12``; of a cell, its number."""
    frame = sys._getframe(1)  # noqa: SLF001 - the documented way to the frame
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_OURS):
        frame = frame.f_back
    path, cell = frame.f_code.co_filename, cell_name(cell_run())
    if cell and not Path(path).exists():  # what a cell is compiled from is in no file
        return f"line {frame.f_lineno} of {cell}"
    return f"{path}:{frame.f_lineno}"


def column_error(step: str, error: Exception, columns: ColumnTypes) -> ConfigError:
    """Explain why an expression does not fit its columns."""
    text = str(error).strip().splitlines()[0].strip('"')
    if isinstance(error, pl.exceptions.ColumnNotFoundError):
        name = text.split('"', 2)[1] if '"' in text else text
        return ConfigError(f"{step} uses the column {name!r}. {available_columns(name, columns)}")
    return ConfigError(f"{step} does not fit its columns: {text}. {available_columns('', columns)}")


def available_columns(name: str, columns: ColumnTypes) -> str:
    """List the columns, and the nearest one."""
    return f"The columns there are {', '.join(columns)}.{did_you_mean(name, columns)}"


def require_column(name: str, columns: ColumnTypes, what: str) -> None:
    """Make sure that a column is there."""
    if name not in columns:
        raise ConfigError(f"{what} names {name!r}. {available_columns(name, columns)}")


def require_columns(names: Sequence[str], columns: ColumnTypes, what: str) -> None:
    """Make sure that columns are there, and that there are names at all."""
    if not names:
        raise ConfigError(f"{what} names no column. {available_columns('', columns)}")
    for name in names_given(names, what):
        require_column(name, columns, what)


def require_free(added: Iterable[str], columns: ColumnTypes, what: str) -> None:
    """Make sure that the columns which a step adds are not there yet."""
    for name in added:
        if name in columns:
            raise ConfigError(
                f"{what} a column {name!r}, and the stream has one of that name. Rename it first."
            )


def column_differences(columns: ColumnTypes, others: ColumnTypes) -> list[str]:
    """Say how other columns differ from the first, in names and types."""
    missing = [f"it has no {name!r}" for name in columns if name not in others]
    added = [f"it has {name!r} besides" for name in others if name not in columns]
    typed = [
        f"its {name!r} is {others[name]} and not {dtype}"
        for name, dtype in columns.items()
        if name in others and others[name] != dtype
    ]
    return [*missing, *added, *typed]


def require_text(given: object, what: str, example: str) -> None:
    """Make sure that a name is text, and not empty."""
    if not isinstance(given, str) or not given:
        raise ConfigError(f"{what} is {given!r}. Give a text, such as {example!r}.")


def whole_number(number: int, least: int, most: int, what: str) -> int:
    """Return a whole number within its limits, both included."""
    if isinstance(number, bool) or not isinstance(number, int) or not least <= number <= most:
        raise ConfigError(f"{what} is {number!r}. Give a whole number from {least} to {most}.")
    return number


def positive_us(duration: Duration, what: str) -> int:
    """Return a duration above zero in microseconds."""
    duration_us = to_us(duration, what=what)
    if duration_us == 0:
        raise ConfigError(f"{what} is 0. Give one above zero, such as '1 minute'.")
    return duration_us


def type_of(expression: pl.Expr, columns: ColumnTypes, what: str) -> pl.DataType:
    """Return the type of an expression's value for a row; ``what`` names it in an error.

    Raises:
        ConfigError: it does not fit the columns, or what it gives for a row depends on others.
    """
    try:
        dtype = pl.DataFrame(schema=columns).select(expression).dtypes[0]
    except pl.exceptions.PolarsError as error:
        raise column_error(what, error, columns) from error
    _require_rowwise([expression], columns, what)
    return dtype


def check_time(expression: pl.Expr, columns: ColumnTypes, step: str) -> None:
    """Make sure that an expression gives a datetime."""
    dtype = type_of(expression, columns, f"the time of {step!r}")
    if not isinstance(dtype, pl.Datetime):
        raise ConfigError(
            f"The time of {step!r} is of type {dtype}. Give a datetime field, or an expression "
            'that makes one, such as pl.col("ts_ms").cast(pl.Datetime("ms")).'
        )


def checked_on_error(on_error: OnError) -> OnError:
    """Take what failing rows lead to, or refuse what is neither."""
    return choose("on_error", on_error, get_args(OnError))


def column_names(expressions: Sequence[pl.Expr]) -> str:
    """Name the columns that expressions read."""
    roots = dict.fromkeys(name for e in expressions for name in e.meta.root_names())
    return ", ".join(roots)


def at_least_one(count: int, what: str) -> int:
    """Return a count.

    Raises:
        ConfigError: it is less than one.
    """
    if count < 1:
        raise ConfigError(f"{what} is {count}. Give 1 or more.")
    return count


def check_places(log: str | Path, state: str | Path | None, local: str | Path | None) -> None:
    """Make sure that it is said in which folder the state of an app is.

    Raises:
        ConfigError: it is not, or twice.
    """
    url = state_url(state)
    if url is None and local is not None:
        raise ConfigError(
            f"local is {str(local)!r}, and state is no URL. Give the folder as state=, or a URL such as "
            'state="s3://bucket/prefix".'
        )
    if log_folder(log) is None and (state if url is None else local) is None:
        what = "local" if url else "state"
        raise ConfigError(
            f"The log is {shown(log)}, and brokers keep no state and views. Say in which folder "
            f'they are to be: {what}="./data".'
        )


def check_plan(plan: JobPlan) -> None:
    """Make sure that a plan reads something, and that what its requests ask can be asked.

    Raises:
        ConfigError: it reads nothing, or a request cannot be answered.
    """
    if not plan.sources and not plan.frames:
        raise ConfigError(
            f"The app {plan.app!r} reads no topic, and a batch begins with records of one. Read one, or "
            "write the static table where it is wanted without an app."
        )
    check_requests(plan)
