"""The checks behind the stateless verbs: what each may be asked for, given the columns there are."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, get_args

import polars as pl

from millstream.choices import choose
from millstream.errors import ConfigError
from millstream.kernels.frames import HIDDEN_PREFIX
from millstream.kernels.map_frames import ROW_COLUMN, FrameFunction, MapFrames, RowsRule
from millstream.kernels.steps import Drop, Explode, Rename
from millstream.pipeline.checks import there_are
from millstream.pipeline.schema import Columns, columns_of, fields_of

if TYPE_CHECKING:
    from millstream.pipeline.streams import Stream

FrameSchema = type | Mapping[str, Any]


def require_columns(names: Sequence[str], columns: Columns, verb: str) -> None:
    """Make sure that columns are there, and that there are names at all."""
    if not names:
        raise ConfigError(f"{verb} names no column. {there_are('', columns)}")
    for name in names:
        if name not in columns:
            raise ConfigError(f"{verb} names {name!r}. {there_are(name, columns)}")


def rename_step(name: str | None, names: Mapping[str, str], columns: Columns) -> Rename:
    """Make the step of ``rename``."""
    require_columns(list(names), columns, "rename")
    after = [names.get(column, column) for column in columns]
    for new in names.values():
        if after.count(new) > 1:
            raise ConfigError(
                f"rename would make two columns {new!r}. Choose another name, or drop one first."
            )
        _require_free(new, "rename")
    said = ", ".join(f"{old} → {new}" for old, new in names.items())
    return Rename(name or f"rename({said})", tuple(names.items()))


def drop_step(name: str | None, names: Sequence[str], columns: Columns) -> Drop:
    """Make the step of ``drop``."""
    require_columns(names, columns, "drop")
    if len(set(names)) == len(columns):
        raise ConfigError("drop leaves no column. Keep at least one.")
    return Drop(name or f"drop({', '.join(names)})", tuple(names))


def explode_step(name: str | None, names: Sequence[str], columns: Columns) -> Explode:
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
    columns: Columns,
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
    elif isinstance(schema, Mapping):
        made = {column: _polars_type(column, dtype) for column, dtype in schema.items()}
    else:
        made = columns_of(fields_of(schema, what=name))
    for column in made:
        _require_free(column, name)
    return MapFrames(name, function, tuple(columns), tuple(made.items()), rows)


def _found(name: str, function: FrameFunction, rows: RowsRule, columns: Columns) -> Columns:
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


def joined(streams: Sequence[Stream]) -> Stream:
    """Say what the union of streams is like, or why there is none; its node is the first one's."""
    first = streams[0]
    if len(streams) < 2:
        raise ConfigError("union has one stream. Give the others: a.union(b, c).")
    for number, stream in enumerate(streams[1:], 2):
        if stream.app is not first.app:
            raise ConfigError(
                f"union takes streams of one app; these are of {first.app.name!r} and "
                f"{stream.app.name!r}."
            )
        if any(stream.node is other.node for other in streams[: number - 1]):
            raise ConfigError(
                "union has the same stream twice, which would count its rows twice. Give each once."
            )
        if differences := _differences(first.columns, stream.columns):
            raise ConfigError(
                f"union takes streams with the same columns and types. Stream {number} differs "
                f"from the first: {'; '.join(differences)}. Make them equal, with select or rename."
            )
    modes = {stream.mode for stream in streams}
    if "update" in modes or (len(modes) > 1 and modes != {None, "final"}):
        raise ConfigError(
            f"union takes streams whose rows mean the same; these emit {_listed(modes)}. Results "
            'that replace one another cannot be mixed with others: emit("final").'
        )
    return dataclasses.replace(
        first,
        lateness_us=max(stream.lateness_us for stream in streams),
        key=first.key if len({stream.key for stream in streams}) == 1 else (),
        mode=first.mode if len(modes) == 1 else "final",
        apart_by=max((stream.apart_by for stream in streams), key=len),
    )


def _listed(modes: set[Any]) -> str:
    return ", ".join(sorted("plain rows" if mode is None else repr(mode) for mode in modes))


def _differences(columns: Columns, others: Columns) -> list[str]:
    missing = [f"it has no {name!r}" for name in columns if name not in others]
    added = [f"it has {name!r} besides" for name in others if name not in columns]
    typed = [
        f"its {name!r} is {others[name]} and not {dtype}"
        for name, dtype in columns.items()
        if name in others and others[name] != dtype
    ]
    return [*missing, *added, *typed]
