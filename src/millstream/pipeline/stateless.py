"""The stateless operators: each checked against the columns that are there, and made into a step."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, get_args

import polars as pl

from millstream.choices import choose
from millstream.errors import ConfigError
from millstream.kernels.frames import HIDDEN_PREFIX
from millstream.kernels.map_frames import ROW_COLUMN, FrameFunction, MapFrames, RowsRule
from millstream.kernels.steps import (
    Drop,
    Explode,
    Filter,
    Rename,
    Select,
    Step,
    WithColumns,
)
from millstream.pipeline.checks import column_names, columns_after, require_columns
from millstream.pipeline.expressions import Column, as_expression, names_given
from millstream.pipeline.schema import ColumnTypes, columns_of, fields_of
from millstream.pipeline.shape import StreamShape

FrameSchema = type | Mapping[str, Any]


def expressions_of(
    given: Sequence[Column],
    named: Mapping[str, pl.Expr],
    what: str,
    name: str | None,
    columns: ColumnTypes,
) -> tuple[tuple[pl.Expr, ...], str]:
    """Return the expressions of ``select`` or ``with_columns``, and the name of the step."""
    if isinstance(name, pl.Expr):
        raise ConfigError(
            f'{what} has name= for the name of the step. Give a column that is called "name" as '
            'an expression: (…).alias("name").'
        )
    plain = [as_expression(e, what=f"an expression of {what}") for e in given]
    every = (*plain, *(as_expression(e, what=n).alias(n) for n, e in named.items()))
    if not every:
        raise ConfigError(f"{what} has no expression. Give at least one.")
    made = columns_after(Select(name or what, every), columns)
    return every, name or f"{what}({', '.join(made)})"


def split_conditions(
    conditions: Sequence[pl.Expr], name: str | None, columns: ColumnTypes
) -> tuple[tuple[pl.Expr, ...], str]:
    """Return the conditions of ``split``, and the name of the step."""
    if not conditions:
        raise ConfigError('split has no condition. Give one: split(pl.col("kind") == "click").')
    every = tuple(as_expression(c, what="split's condition") for c in conditions)
    step_name = name or f"split({column_names(every)})"
    columns_after(Filter(step_name, every), columns)
    return every, step_name


def rename_step(name: str | None, names: Mapping[str, str], columns: ColumnTypes) -> Rename:
    """Make the step of ``rename``."""
    if not isinstance(names, Mapping):
        raise ConfigError(
            f'rename is given {names!r}. Give the new name of each old one: {{"old": "new"}}.'
        )
    require_columns(tuple(names), columns, "rename")
    names_given(names.values(), "rename")
    after = [names.get(column, column) for column in columns]
    for new in names.values():
        if after.count(new) > 1:
            raise ConfigError(
                f"rename would make two columns {new!r}. Choose another name, or drop one first."
            )
        _require_free(new, "rename")
    said = ", ".join(f"{old} → {new}" for old, new in names.items())
    return Rename(name or f"rename({said})", tuple(names.items()))


def drop_step(name: str | None, names: Sequence[str], columns: ColumnTypes) -> Drop:
    """Make the step of ``drop``."""
    require_columns(names, columns, "drop")
    if len(set(names)) == len(columns):
        raise ConfigError("drop leaves no column. Keep at least one.")
    return Drop(name or f"drop({', '.join(names)})", tuple(names))


def explode_step(name: str | None, names: Sequence[str], columns: ColumnTypes) -> Explode:
    """Make the step of ``explode``."""
    require_columns(names, columns, "explode")
    for column in names:
        if not isinstance(columns[column], (pl.List, pl.Array)):
            raise ConfigError(
                f"explode names {column!r}, a {columns[column]}. It takes columns of lists."
            )
    return Explode(name or f"explode({', '.join(names)})", tuple(names))


def map_frames_step(
    name: str | None,
    function: FrameFunction,
    schema: FrameSchema | None,
    rows: RowsRule,
    columns: ColumnTypes,
) -> MapFrames:
    """Make the step of ``map_frames``; without a schema, find it by calling the function."""
    if not callable(function):
        raise ConfigError(f"map_frames is given {function!r}. Give a function of a polars frame.")
    choose("map_frames' rows", rows, get_args(RowsRule))
    if rows == "any" and ROW_COLUMN in columns:
        raise ConfigError(
            f'map_frames with rows="any" adds a column {ROW_COLUMN!r}, and the stream has one. '
            "Rename it first."
        )
    if not name:
        name = f"map_frames({getattr(function, '__name__', 'function')})"
    if schema is None:
        made = _found(name, function, rows, columns)
        _require_names(made, name)
    else:
        made = declared_columns(schema, name)
    return MapFrames(name, function, tuple(columns), tuple(made.items()), rows)


def declared_columns(schema: FrameSchema, what: str) -> ColumnTypes:
    """Return the columns that a schema declares; ``what`` names the step in errors.

    Raises:
        ConfigError: it is neither a class of fields nor a mapping to polars types, or a name is reserved.
    """
    if isinstance(schema, Mapping):
        made = {column: _polars_type(column, dtype) for column, dtype in schema.items()}
    else:
        made = columns_of(fields_of(schema, what=what))
    _require_names(made, what)
    return made


def _require_names(made: ColumnTypes, what: str) -> None:
    for column in names_given(made, what):
        _require_free(column, what)


def _found(name: str, function: FrameFunction, rows: RowsRule, columns: ColumnTypes) -> ColumnTypes:
    empty = pl.DataFrame(schema=columns)
    try:
        given = function(empty.with_row_index(ROW_COLUMN) if rows == "any" else empty)
    except Exception as error:
        raise ConfigError(
            f"{name} was called with no rows, to find the columns that it makes, and failed: "
            f"{type(error).__name__}: {error}. Declare them: map_frames(…, schema=…)."
        ) from error
    if not isinstance(given, pl.DataFrame):
        raise ConfigError(
            f"{name} gives a {type(given).__name__}. It must give a polars DataFrame."
        )
    if rows == "any" and ROW_COLUMN not in given.columns:
        raise ConfigError(
            f"{name} does not give the column {ROW_COLUMN!r} back, which says from which row each "
            'row was made. Keep it, or say rows="same".'
        )
    return {
        column: dtype
        for column, dtype in given.schema.items()
        if column != ROW_COLUMN or rows == "same"
    }


def _polars_type(column: str, dtype: Any) -> pl.DataType:
    try:
        return pl.Series([], dtype=dtype).dtype
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"schema gives the column {column!r} the type {dtype!r}. Give a polars type, such as "
            "pl.Int64."
        ) from error


def _require_free(column: str, what: str) -> None:
    if column.startswith(HIDDEN_PREFIX):
        raise ConfigError(
            f"{what} makes the column {column!r}: names that begin with {HIDDEN_PREFIX!r} are "
            "reserved. Choose another name."
        )


def primary_key_after(step: Step, key: tuple[str, ...] | None) -> tuple[str, ...] | None:
    """Return the columns that identify a row behind a step; None if that is not known.

    A step that leaves a column of the key out, or makes it anew, may make rows equal.
    """
    if key is None or isinstance(step, Filter):
        return key
    if isinstance(step, Rename):
        names = dict(step.names)
        return tuple(names.get(column, column) for column in key)
    kept: set[str] = set()
    if isinstance(step, Drop):
        kept = set(key) - set(step.columns)
    elif isinstance(step, WithColumns):
        kept = set(key) - {
            e.meta.output_name(raise_if_undetermined=False) for e in step.expressions
        }
        kept = set() if any(e.meta.has_multiple_outputs() for e in step.expressions) else kept
    elif isinstance(step, Select):
        kept = {column for column in key for e in step.expressions if e.meta.eq(pl.col(column))}
    return key if kept == set(key) else None


def union_of(shapes: Sequence[StreamShape]) -> StreamShape:
    """Return the shape of a union of streams.

    Raises:
        ConfigError: there is one stream, or they differ in their columns or in what a row means.
    """
    first = shapes[0]
    if len(shapes) < 2:
        raise ConfigError("union has one stream. Give the others: a.union(b, c).")
    for number, shape in enumerate(shapes[1:], 2):
        if differences := _differences(first.columns, shape.columns):
            raise ConfigError(
                f"union takes streams with the same columns and types. Stream {number} differs "
                f"from the first: {'; '.join(differences)}. Make them equal, with select or rename."
            )
    modes = {shape.mode for shape in shapes}
    if "update" in modes or (len(modes) > 1 and modes != {None, "final"}):
        raise ConfigError(
            f"union takes streams whose rows mean the same; these emit {_listed(modes)}. Results "
            'that replace one another cannot be mixed with others: emit("final").'
        )
    return dataclasses.replace(
        first,
        lateness_us=max(shape.lateness_us for shape in shapes),
        key=first.key if len({shape.key for shape in shapes}) == 1 else (),
        mode=first.mode if len(modes) == 1 else "final",
        window_key=max((shape.window_key for shape in shapes), key=len),
    )


def _listed(modes: set[Any]) -> str:
    return ", ".join(sorted("plain rows" if mode is None else repr(mode) for mode in modes))


def _differences(columns: ColumnTypes, others: ColumnTypes) -> list[str]:
    missing = [f"it has no {name!r}" for name in columns if name not in others]
    added = [f"it has {name!r} besides" for name in others if name not in columns]
    typed = [
        f"its {name!r} is {others[name]} and not {dtype}"
        for name, dtype in columns.items()
        if name in others and others[name] != dtype
    ]
    return [*missing, *added, *typed]
