"""The stateless operators: each checked against the columns that are there, and made into a step."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, get_args

import polars as pl

from millstream.choices import choose
from millstream.errors import ConfigError
from millstream.kernels.map_frames import ROW_COLUMN, FrameFunction, MapFrames, RowsRule
from millstream.kernels.row_keys import row_key_after
from millstream.kernels.steps import (
    AssignBranch,
    Drop,
    Explode,
    Filter,
    Rename,
    Select,
    Step,
    WithColumns,
)
from millstream.kernels.trigger import Mode
from millstream.pipeline.checks import (
    column_differences,
    column_names,
    columns_after,
    require_columns,
    require_unreserved,
)
from millstream.pipeline.expressions import Column, as_expression, names_given
from millstream.pipeline.failing_steps import may_fail
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
        require_unreserved(new, "rename")
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
        require_unreserved(column, what)


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


def shape_after(step: Step, shape: StreamShape, columns: ColumnTypes) -> StreamShape:
    """Return the shape of the rows behind a step that makes these columns."""
    if _changes_rows(step):
        shape = shape.as_changes()
    keys = (row_key_after(step, key) for key in shape.row_keys)
    primary_key = row_key_after(step, shape.primary_key)
    return dataclasses.replace(
        shape,
        columns=columns,
        primary_key=primary_key,
        key_not_null=shape.key_not_null and primary_key is not None,
        row_keys=tuple(key for key in keys if key is not None),
        stable=_stable_after(step, shape.stable),
        timed=_timed_after(step, shape.timed),
        may_fail=shape.mode == "update" and (shape.may_fail or may_fail(step, shape.columns)),
    )


def _changes_rows(step: Step) -> bool:
    """Return whether a step may give no row for a row, or several."""
    if isinstance(step, MapFrames):
        return step.rows != "same"
    return isinstance(step, (Filter, Explode, AssignBranch))


def _timed_after(step: Step, timed: tuple[str, ...]) -> tuple[str, ...]:
    """Return the columns that still say the same as the event time behind a step."""
    found = (row_key_after(step, (column,)) for column in timed)
    return tuple(name for one in found if one is not None for name in one)


def _stable_after(step: Step, stable: tuple[str, ...]) -> tuple[str, ...]:
    """Return the columns that a row and the one in its place have in common, behind a step.

    A step that may keep one of two such rows leaves none.
    """
    if isinstance(step, Rename):
        names = dict(step.names)
        return tuple(names.get(column, column) for column in stable)
    if isinstance(step, Drop):
        return tuple(column for column in stable if column not in step.columns)
    if not isinstance(step, (Select, WithColumns)) or not stable:
        return ()
    if any(e.meta.has_multiple_outputs() for e in step.expressions):
        return ()
    made = {e.meta.output_name(): e.meta.undo_aliases() for e in step.expressions}
    if not all(e.meta.is_column() for e in made.values()):
        return ()  # what is computed may fail, and then the row in its place is missing
    kept = [c for c in stable if c not in made] if isinstance(step, WithColumns) else []
    return (*kept, *(name for name, e in made.items() if e.meta.root_names()[0] in stable))


def union_of(shapes: Sequence[StreamShape]) -> StreamShape:
    """Return the shape of a union of streams.

    Raises:
        ConfigError: there is one stream, or they differ in their columns or in what a row means.
    """
    first = shapes[0]
    if len(shapes) < 2:
        raise ConfigError("union has one stream. Give the others: a.union(b, c).")
    for number, shape in enumerate(shapes[1:], 2):
        if differences := column_differences(first.columns, shape.columns):
            raise ConfigError(
                f"union takes streams with the same columns and types. Stream {number} differs "
                f"from the first: {'; '.join(differences)}. Make them equal, with select or rename."
            )
    shapes = [shape.as_changes() for shape in shapes]
    modes = {shape.mode for shape in shapes}
    if "discard" in modes and len(modes) > 1:
        raise ConfigError(
            f"union takes streams whose rows mean the same; these emit {_listed(modes)}. Parts cannot be "
            'mixed with what they are parts of: emit another mode than "discard".'
        )
    together: Mode = "retract" if "retract" in modes else "final"
    return dataclasses.replace(
        first,
        lateness_us=max(shape.lateness_us for shape in shapes),
        key=first.key if len({shape.key for shape in shapes}) == 1 else (),
        mode=first.mode if len(modes) == 1 else together,
        window_key=max((shape.window_key for shape in shapes), key=len),
        row_keys=(),
        stable=(),
        timed=(),
        equal_rows=None,
        is_late=any(shape.is_late for shape in shapes),
        takes_back=any(shape.takes_back for shape in shapes),
        no_windows=next((shape.no_windows for shape in shapes if shape.no_windows), ""),
    )


def _listed(modes: set[Any]) -> str:
    return ", ".join(sorted("plain rows" if mode is None else repr(mode) for mode in modes))
