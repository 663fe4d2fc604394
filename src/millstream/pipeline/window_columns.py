"""What windows add to rows, and the types of what they aggregate."""

from __future__ import annotations

from dataclasses import replace

import polars as pl

from millstream.kernels.aggregation import Aggregation
from millstream.kernels.frames import DIFF, TIME, WINDOW
from millstream.pipeline.aggregate_types import bound_aggregates
from millstream.pipeline.checks import column_error
from millstream.pipeline.schema import ColumnTypes

WINDOW_COLUMNS = ("window_start", "window_end")


def typed_aggregation(
    step: str, aggregation: Aggregation, columns: ColumnTypes
) -> tuple[Aggregation, pl.DataFrame]:
    """Bind the aggregates to the types of their values, and find those of the partials.

    The types are found by aggregating no rows, which are given, too.
    """
    changes = aggregation.weighted
    bound = bound_aggregates(dict(aggregation.aggregates), columns, step=step, changes=changes)
    aggregation = replace(aggregation, aggregates=bound)
    diff = {DIFF: pl.Int8()} if changes else {}
    rows = pl.DataFrame(schema={**columns, TIME: pl.Int64(), WINDOW: pl.Int64(), **diff})
    try:
        partials = aggregation.reduce(rows, WINDOW)
    except pl.exceptions.PolarsError as error:
        raise column_error(step, error, columns) from error
    own = [name for name in partials.columns if name not in (WINDOW, *aggregation.by)]
    schema = tuple((name, partials.schema[name]) for name in own)
    keys = tuple((name, columns[name]) for name in aggregation.by)
    return replace(aggregation, schema=schema, keys=keys), rows
