"""Groups without windows: what ``group_by`` aggregates, and the types of its rows."""

from __future__ import annotations

from collections.abc import Mapping

import polars as pl

from millstream.errors import ConfigError
from millstream.kernels.aggregates.extremes import Extreme
from millstream.kernels.aggregates.protocol import Aggregate
from millstream.kernels.aggregation import Aggregation
from millstream.kernels.frames import DIFF, TIME
from millstream.kernels.tables.group_by import GroupBy, group_keys
from millstream.pipeline.aggregate_types import bound_aggregates, check_aggregates
from millstream.pipeline.checks import column_error
from millstream.pipeline.schema import ColumnTypes
from millstream.pipeline.shape import StreamShape

_TIME_OF_ADDED = (TIME, Extreme(pl.col(TIME), greatest=True, dtype=pl.Int64()))


def group_columns(shape: StreamShape, columns: tuple[str, ...]) -> tuple[str, ...]:
    """Return the columns of ``group_by``, each once.

    Raises:
        ConfigError: there are none, or one is not there or cannot be a key; or the rows of the stream are
            late ones.
    """
    if not columns:
        raise ConfigError(
            "group_by names no column. Name those whose values make the groups; for one group of all rows, "
            'give all rows the same value: with_columns(all=pl.lit(1)).group_by("all").'
        )
    check_not_late(shape, "group_by")
    return tuple(dict.fromkeys(shape.key_columns(columns, "group_by")))


def check_not_late(shape: StreamShape, what: str) -> None:
    """Make sure that rows are not those that came too late for a window.

    Raises:
        ConfigError: they are.
    """
    if shape.is_late:
        raise ConfigError(f"{what} comes after late rows. View them, or send them to a topic.")


def build_group_by(
    shape: StreamShape,
    columns: tuple[str, ...],
    aggregates: Mapping[str, Aggregate],
    name: str | None,
) -> tuple[GroupBy, StreamShape]:
    """Build the operator that aggregates groups, and the shape of its table."""
    check_aggregates(aggregates, columns)
    step = shape.names.unique(name or f"group by {', '.join(columns)}")
    weighted = shape.has_retractions
    bound = bound_aggregates(aggregates, shape.columns, step=step, changes=weighted)
    keys = tuple((column, shape.columns[column]) for column in columns)
    aggregation = aggregation_by(
        step,
        keys,
        bound if weighted else (*bound, _TIME_OF_ADDED),
        shape.columns,
        weighted=weighted,
    )
    kernel = GroupBy(step, keys, aggregation)
    results = kernel.results(pl.DataFrame(schema=kernel.stored))
    types = {**dict(keys), **{column.name: column.dtype for column in results}}
    return kernel, derived_table(shape, types, columns)


def aggregation_by(
    step: str,
    keys: tuple[tuple[str, pl.DataType], ...],
    aggregates: tuple[tuple[str, Aggregate], ...],
    columns: ColumnTypes,
    *,
    weighted: bool = True,
) -> Aggregation:
    """Return aggregates by the hidden names of keys, with the types of the partials.

    The types are found by aggregating no rows.
    """
    hidden = dict(zip(group_keys(len(keys)), (dtype for _, dtype in keys), strict=True))
    diff = {DIFF: pl.Int8()} if weighted else {}
    rows = pl.DataFrame(schema={**columns, **hidden, TIME: pl.Int64(), **diff})
    aggregation = Aggregation(tuple(hidden), aggregates, weighted, keys=tuple(hidden.items()))
    try:
        partials = aggregation.reduce(rows)
    except pl.exceptions.PolarsError as error:
        raise column_error(step, error, columns) from error
    schema = tuple((n, dtype) for n, dtype in partials.schema.items() if n not in hidden)
    return Aggregation(aggregation.by, aggregates, weighted, schema, aggregation.keys)


def derived_table(
    shape: StreamShape, columns: ColumnTypes, primary_key: tuple[str, ...] | None
) -> StreamShape:
    """Return the shape of a table that is derived from rows of a shape."""
    return StreamShape(
        columns,
        mode="retract",
        window_key=(),
        primary_key=primary_key,
        is_table=True,
        names=shape.names,
    )
