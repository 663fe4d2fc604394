"""Operators of tables where they are declared: the first rows of groups, and set operations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, cast, get_args

import polars as pl

from millstream.choices import choose
from millstream.errors import ConfigError
from millstream.kernels.frames import HIDDEN_PREFIX
from millstream.kernels.tables.row_order import Ties
from millstream.kernels.tables.set_operations import (
    INPUT_TYPE,
    SetOperation,
    SetRule,
    counted_by,
)
from millstream.kernels.tables.top import TopRows
from millstream.pipeline.checks import column_differences, whole_number
from millstream.pipeline.group_by import aggregation_by, check_not_late, derived_table
from millstream.pipeline.schema import ColumnTypes
from millstream.pipeline.shape import StreamShape

Direction = Literal["asc", "desc"]
OrderBy = str | tuple[str, Direction] | Sequence[str | tuple[str, Direction]]

_RANK_MAX = 1_000_000
_RANK_TYPE = pl.Int64()


def build_top(
    shape: StreamShape,
    count: int,
    *,
    by: OrderBy,
    per: str | Sequence[str],
    ties: Ties,
    rank: str | None,
    name: str | None,
) -> tuple[TopRows, StreamShape]:
    """Build the operator of the first rows of groups, and the shape of its table."""
    check_not_late(shape, "top")
    whole_number(count, 1, _RANK_MAX, "top's n")
    choose("top's ties", ties, get_args(Ties))
    order = _order(shape, by)
    groups = tuple(dict.fromkeys(shape.key_columns(per, "top's per")))
    columns = dict(shape.columns)
    if rank is not None:
        _check_rank(rank, columns)
        columns[rank] = _RANK_TYPE
    told_apart = shape.primary_key or tuple(shape.columns)
    place = {column: str(number) for number, column in enumerate(shape.columns)}
    kernel = TopRows(
        shape.names.unique(name or f"top {count} by {', '.join(order)}"),
        tuple(shape.columns.items()),
        tuple(place[column] for column in groups),
        tuple((place[column], down) for column, down in order.items()),
        tuple(place[column] for column in told_apart),
        count,
        ties,
        rank,
        shape.has_retractions,
    )
    key, not_null = shape.primary_key, shape.key_not_null
    if key is None and rank is not None and ties == "row_number":
        key, not_null = (*groups, rank), False
    elif key is None and shape.row_keys and shape.equal_rows is None:
        key, not_null = shape.row_keys[0], False
    elif key is None and count == 1 and groups and ties == "row_number":
        key, not_null = groups, False
    return kernel, replace(derived_table(shape, columns, key), key_not_null=not_null)


def _order(shape: StreamShape, by: OrderBy) -> dict[str, bool]:
    """Return the columns that order rows, each with whether the greatest comes first."""
    directions = get_args(Direction)
    pair = isinstance(by, tuple) and len(by) == 2 and by[1] in directions
    given = [by] if isinstance(by, str) or (pair and by[1] not in shape.columns) else by
    if not isinstance(given, Sequence) or not given:
        raise ConfigError(
            f'top\'s by is {by!r}. Name the columns that order rows, such as by="price" or '
            'by=[("price", "desc"), ("id", "asc")].'
        )
    order: dict[str, bool] = {}
    for each in given:
        column, direction = each if isinstance(each, tuple) and len(each) == 2 else (each, "desc")
        (column,) = shape.key_columns([cast("str", column)], "top's by")
        if column in order:
            raise ConfigError(f"top's by has {column!r} twice. Give each column once.")
        order[column] = choose(f"top's direction of {column!r}", direction, directions) == "desc"
    return order


def _check_rank(rank: object, columns: ColumnTypes) -> None:
    taken = isinstance(rank, str) and (rank in columns or rank.startswith(HIDDEN_PREFIX))
    if not isinstance(rank, str) or not rank or taken:
        raise ConfigError(
            f'top\'s rank is {rank!r}. Give a name that no column has yet, such as rank="place".'
        )


def build_distinct(
    shape: StreamShape, columns: tuple[str, ...], name: str | None
) -> tuple[SetOperation, StreamShape]:
    """Build the operator that keeps each row once, and the shape of its table."""
    names = tuple(dict.fromkeys(shape.key_columns(columns, "distinct"))) or tuple(shape.columns)
    said = ", ".join(columns)
    return _set_operation(shape, names, name or f"distinct {said}".rstrip(), "union", bag=False)


def build_set_operation(
    shapes: Sequence[StreamShape], rule: SetRule, *, bag: bool, name: str | None
) -> tuple[SetOperation, StreamShape]:
    """Build a set operation of tables, and the shape of its table."""
    check_same_columns(shapes, rule)
    first = shapes[0]
    said = name or f"{rule}{' all' if bag else ''}"
    return _set_operation(first, tuple(first.columns), said, rule, bag=bag)


def check_same_columns(shapes: Sequence[StreamShape], what: str) -> None:
    """Make sure that tables have the same columns and types.

    Raises:
        ConfigError: they do not.
    """
    for number, shape in enumerate(shapes[1:], 2):
        if differences := column_differences(shapes[0].columns, shape.columns):
            raise ConfigError(
                f"{what} takes tables with the same columns and types. Table {number} differs from the "
                f"first: {'; '.join(differences)}. Make them equal, with select, rename or cast."
            )


def _set_operation(
    shape: StreamShape, names: tuple[str, ...], step: str, rule: SetRule, *, bag: bool
) -> tuple[SetOperation, StreamShape]:
    step = shape.names.unique(step)
    columns = {name: shape.columns[name] for name in names}
    keys = tuple(columns.items())
    aggregation = aggregation_by(step, keys, counted_by(rule), {**columns, **INPUT_TYPE})
    kernel = SetOperation(step, keys, aggregation, rule, bag)
    # What is left of the first table is identified as its rows were.
    key = None if rule == "union" else shape.primary_key
    return kernel, derived_table(shape, columns, key or (None if bag else names))
