"""The numbers of a dashboard's panels, computed from the rows of the views that they show.

A sum of decimals is exact, and text. A share, such as clicks per impression, is the sum of one
column divided by that of another over the same rows, not a mean of shares; null where the divisor is 0.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import polars as pl

from millstream.durations import to_us
from millstream.kernels.column_types import view_kind
from millstream.views.panels import Counters, Limits, Lines, Measure, Newest, Panel, Top
from millstream.views.query import Query, ViewReader
from millstream.views.server.json_rows import texts

_KEY = "key"
_MEASURE = "m{}"


def panel_data(store: ViewReader, panel: Panel) -> dict[str, Any]:
    """Return what a panel shows now.

    ``labels`` name the columns, with their ``units``; ``rows`` have a value for each. The first column of
    lines is the time, that of other panels the subject of the row.

    Raises:
        UnknownViewError: its view is not there.
        ConfigError: a column is not there, or is no number.
    """
    if isinstance(panel, Lines):
        return _lines(store, panel)
    if isinstance(panel, Top):
        return _top(store, panel)
    if isinstance(panel, Limits):
        return _limits(store, panel)
    if isinstance(panel, Counters):
        frame = store.select(panel.view, Query()).rows
        return _result(frame.select(_measured(panel.measures)), panel.measures)
    assert isinstance(panel, Newest)
    return _newest(store, panel)


def _lines(store: ViewReader, panel: Lines) -> dict[str, Any]:
    frame = _newest_interval(store, panel.view, panel.time, panel.last)
    grouped = frame.group_by(pl.col(panel.time).alias(_KEY)).agg(_measured(panel.measures))
    return _result(grouped.sort(_KEY), panel.measures, panel.time)


def _top(store: ViewReader, panel: Top) -> dict[str, Any]:
    if panel.time is None:
        frame = store.select(panel.view, Query()).rows
    else:
        frame = _newest_interval(store, panel.view, panel.time, panel.last)
    grouped = frame.group_by(pl.col(panel.by).alias(_KEY)).agg(_measured(panel.measures))
    # Equal values are ordered by name, so that the order is the same each time.
    most = grouped.sort([_MEASURE.format(0), _KEY], descending=[True, False], nulls_last=True)
    return _result(most.head(panel.rows), panel.measures, panel.by)


def _limits(store: ViewReader, panel: Limits) -> dict[str, Any]:
    frame = store.select(panel.view, Query()).rows
    if panel.newest is not None:
        newest = pl.DataFrame({"label": frame[panel.label], "by": frame[panel.newest]})
        frame = frame.filter(newest.select(pl.col("by") == pl.col("by").max().over("label"))["by"])
    used = pl.col(panel.value).cast(pl.Float64) / pl.col(panel.limit).cast(pl.Float64)
    chosen = (
        frame.with_columns(used.alias("__used"))
        .sort(["__used", panel.label], descending=[True, False], nulls_last=True)
        .head(panel.rows)
    )
    chosen = chosen.with_columns(
        _rounded(pl.col(name), panel.places) for name in {panel.value, panel.limit}
    )
    columns = [(panel.label, ""), (panel.value, panel.unit), (panel.limit, panel.unit)]
    return _columns(chosen, columns)


def _newest(store: ViewReader, panel: Newest) -> dict[str, Any]:
    frame = store.select(panel.view, Query(order=(f"-{panel.by}",), limit=panel.rows)).rows
    return _columns(frame, [(name, "") for name in dict.fromkeys((panel.by, *panel.show))])


def _newest_interval(store: ViewReader, view: str, time: str, last: str) -> pl.DataFrame:
    """Return the rows of the newest interval of a column of times."""
    newest = store.select(view, Query(order=(f"-{time}",), limit=1)).rows
    at = newest[time].drop_nulls()
    if at.is_empty():
        return newest.clear()
    start = at[0] - timedelta(microseconds=to_us(last, what="last"))
    return store.select(view, Query(between={time: (start, None)})).rows.filter(
        pl.col(time) > start
    )


def _measured(measures: Sequence[Measure]) -> list[pl.Expr]:
    """Return the expressions of the measures, named by their number."""
    out = []
    for number, measure in enumerate(measures):
        if measure.column is None:
            value = pl.len().cast(pl.Int64)
        elif measure.per is None:
            value = pl.col(measure.column).sum()
        else:
            below = pl.col(measure.per).sum().cast(pl.Float64)
            share = pl.col(measure.column).sum().cast(pl.Float64) / below
            value = pl.when(below != 0).then(share)
        out.append(_rounded(value, measure.places).alias(_MEASURE.format(number)))
    return out


def _rounded(value: pl.Expr, places: int | None) -> pl.Expr:
    return value if places is None else value.round(places)


def _result(
    frame: pl.DataFrame, measures: Sequence[Measure], first: str | None = None
) -> dict[str, Any]:
    heads = [] if first is None else [(first, "")]
    heads += [(measure.label, measure.unit) for measure in measures]
    frame = frame.select(
        ([_KEY] if first else []) + [_MEASURE.format(n) for n in range(len(measures))]
    )
    return {
        "labels": [label for label, _ in heads],
        "units": [unit for _, unit in heads],
        "rows": _plain(frame),
    }


def _columns(frame: pl.DataFrame, columns: Sequence[tuple[str, str]]) -> dict[str, Any]:
    return {
        "labels": [name for name, _ in columns],
        "units": [unit for _, unit in columns],
        "rows": _plain(frame.select([name for name, _ in columns])),
    }


def _plain(frame: pl.DataFrame) -> list[list[Any]]:
    lists = [
        [json.loads(text) for text in texts(column, view_kind(column.dtype))]
        for column in frame.iter_columns()
    ]
    return [list(row) for row in zip(*lists, strict=True)]
