"""The keys of a question: from what a caller gives to the columns that are looked up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import polars as pl

from millstream.errors import ConfigError
from millstream.kernels.column_types import view_kind
from millstream.kernels.state_query import QueryTarget
from millstream.views.state_store.sqlite_values import parse_value

_LEVELS_MAX = 16  # of lists and structs, in a column of a key

GivenKeys = pl.DataFrame | pl.Series | Mapping[str, Any] | Sequence[Any]
"""A frame with the columns of the key; values by column, one or a list each; or a list of keys."""


def key_rows(target: QueryTarget, given: GivenKeys) -> pl.DataFrame:
    """Return keys as a frame with the columns of the target's key, in their types.

    Raises:
        ConfigError: the columns are not those of the key, or a value cannot be one of its column.
    """
    columns = _by_column(target, given)
    names = target.key_names
    if {*columns} != {*names}:
        gives = ", ".join(columns) or "nothing"
        part = (
            f" The rows of a part of the key are for a question of the app's (app.question), which filters "
            f"state.rows({target.name!r})."
        )
        raise ConfigError(
            f"{target.name!r} is asked by {', '.join(names) or 'nothing'}, and the question gives {gives}. Give a value "
            f"for each of these columns, and no other.{part if {*columns} < {*names} else ''}"
        )
    made = [_typed(target, name, dtype, columns[name]) for name, dtype in target.key]
    height = max((len(column) for column in made), default=1)
    if any(len(column) not in (1, height) for column in made):
        lengths = ", ".join(f"{column.name}: {len(column)}" for column in made)
        raise ConfigError(
            f"The keys for {target.name!r} have columns of different lengths ({lengths}). Give each as many values, or one."
        )
    return pl.DataFrame([c if len(c) == height else c.new_from_index(0, height) for c in made])


def _by_column(target: QueryTarget, given: GivenKeys) -> dict[str, Any]:
    """Return what is given of each column of a key."""
    if isinstance(given, pl.DataFrame):
        return {name: given[name] for name in given.columns}
    if isinstance(given, Mapping):
        return dict(given)
    if not isinstance(given, pl.Series | Sequence):
        raise ConfigError(
            f"The keys for {target.name!r} are of type {type(given).__name__}. Give a polars DataFrame, a list, or values by "
            "name."
        )
    if not isinstance(given, pl.Series) and any(isinstance(one, Mapping) for one in given):
        names = dict.fromkeys(name for one in given if isinstance(one, Mapping) for name in one)
        if not all(isinstance(one, Mapping) and {*one} == {*names} for one in given):
            raise ConfigError(
                f"The keys for {target.name!r} do not have the same columns. Give each the columns {', '.join(names)}."
            )
        return {name: [one[name] for one in given] for name in names}
    if isinstance(given, str) or len(target.key) != 1:
        raise ConfigError(
            f"{target.name!r} is asked by {', '.join(target.key_names) or 'nothing'}. Give a frame with these columns, or "
            "a list of keys that name them."
        )
    return {target.key[0][0]: given}


def _typed(target: QueryTarget, name: str, dtype: pl.DataType, given: Any) -> pl.Series:
    """Return values as a column of a type."""
    values = given if isinstance(given, pl.Series) else _listed(given)
    try:
        if isinstance(values, pl.Series):
            column = values.alias(name)
        else:
            if dtype != pl.Boolean and any(isinstance(value, bool) for value in values):
                raise TypeError("true and false are no such values")  # noqa: TRY301 - said with the column
            # What is nested deeply takes polars minutes, of a thread that no deadline stops.
            levels = _LEVELS_MAX if dtype.is_nested() else 0
            if any(_is_deeper(value, levels) for value in values):
                raise TypeError("such lists and objects are no such values")  # noqa: TRY301 - the same
            read = [key_value(value, dtype) for value in values]
            column = pl.Series(name, read, strict=True) if read else pl.Series(name, [], dtype)
        if column.dtype != dtype:
            column = _exactly(column, dtype)
    except (TypeError, ValueError, OverflowError, pl.exceptions.PolarsError, ConfigError) as error:
        shown = repr(values if len(values) > 1 else values[0])[:200] if len(values) else "nothing"
        raise ConfigError(
            f"The column {name!r} of {target.name!r} is of type {dtype}, and the question gives {shown} ({error}). Give a "
            "value of that type."
        ) from error
    return column


def _exactly(column: pl.Series, dtype: pl.DataType) -> pl.Series:
    """Return values as those of another type, which they are.

    Raises:
        TypeError, ValueError: they are not, or would be rounded.
    """
    if not _is_castable(column.dtype, dtype):
        raise TypeError(f"they are of type {column.dtype}")
    made = column.cast(dtype, strict=True)
    # A Float32 that Python has is a Float64, whose digits may be those of the Float32 alone.
    if column.dtype != pl.Null and not column.dtype.is_float():
        back = made.cast(column.dtype, strict=False)
        if not back.eq_missing(column).all():
            raise ValueError("it would be rounded")
    return made


def _is_deeper(value: Any, levels: int) -> bool:
    """Return whether lists and objects are nested in more than so many levels."""
    if isinstance(value, Mapping):
        value = value.values()
    elif not isinstance(value, list | tuple):
        return False
    return levels < 1 or any(_is_deeper(one, levels - 1) for one in value)


def _listed(given: Any) -> list[Any]:
    if isinstance(given, Sequence) and not isinstance(given, str | bytes):
        return list(given)
    return [given]


def key_value(value: Any, dtype: pl.DataType) -> Any:
    """Return a value as Python has it; a text stands for what JSON and a command line cannot say.

    Raises:
        ConfigError: the text says no value of the type.
    """
    if isinstance(value, str) and not _is_text(dtype):
        value = parse_value(value, view_kind(dtype))
    if isinstance(value, datetime) and value.tzinfo is None and isinstance(dtype, pl.Datetime):
        return value.replace(tzinfo=UTC) if dtype.time_zone else value
    return value


def _is_text(dtype: pl.DataType) -> bool:
    return dtype == pl.String or isinstance(dtype, pl.Categorical | pl.Enum)


def _is_castable(source: pl.DataType, wanted: pl.DataType) -> bool:
    """Return whether values of a type are values of another, if they are in its range."""
    if source == pl.Null or (source.is_integer() and wanted.is_numeric()):
        return True
    if isinstance(source, pl.Datetime) and isinstance(wanted, pl.Datetime):
        return (source.time_zone is None) == (wanted.time_zone is None)
    families = (
        _is_text(source) and _is_text(wanted),
        source.is_float() and wanted.is_float(),
        source.is_decimal() and wanted.is_decimal(),
        source == pl.Duration and wanted == pl.Duration,
    )
    return any(families)
