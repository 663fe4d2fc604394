"""From streams to tables: which row of a key counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import get_args

import polars as pl

from millstream.choices import choose
from millstream.errors import ConfigError
from millstream.kernels.tables.upserts import Upserts, VersionOrder
from millstream.pipeline.checks import type_of
from millstream.pipeline.expressions import Column, as_expression
from millstream.pipeline.shape import StreamShape


def build_upserts(
    shape: StreamShape,
    key: str | Sequence[str],
    *,
    order: VersionOrder,
    deleted: Column | None,
    name: str | None,
) -> tuple[Upserts, StreamShape]:
    """Build the operator that makes a table of a stream, and the shape of the table's rows."""
    columns = shape.key_columns(key, "table's key")
    if not columns:
        raise ConfigError('table has no key. Say which columns identify a row: table(key="id").')
    choose("table's order", order, get_args(VersionOrder))
    deletion = None
    if deleted is not None:
        deletion = as_expression(deleted, what="table's deleted")
        dtype = type_of(deletion, shape.columns, "table's deleted")
        if dtype != pl.Boolean:
            raise ConfigError(
                f"table's deleted is of type {dtype}. Give a condition, such as "
                'pl.col("op") == "d".'
            )
    kernel = Upserts(
        shape.names.unique(name or f"table by {', '.join(columns)}"),
        columns,
        tuple(shape.columns.items()),
        order,
        deletion,
    )
    return kernel, table_shape(shape, columns)


def table_shape(shape: StreamShape, key: tuple[str, ...]) -> StreamShape:
    """Return the shape of a table with a stream's columns."""
    return replace(
        shape,
        key=(),
        mode="retract",
        lateness_us=0,
        late_policy="drop",
        late_columns=None,
        window_key=(),
        primary_key=key,
        is_table=True,
    )
