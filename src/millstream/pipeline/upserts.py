"""From streams to tables: which row of a key counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, get_args

import polars as pl

from millstream.choices import choose
from millstream.client.tables import to_arrow
from millstream.durations import Duration
from millstream.errors import ConfigError
from millstream.kernels.changes import consolidate, with_diff, with_weight
from millstream.kernels.frames import DIFF, HASH, WEIGHT, polars_table
from millstream.kernels.tables.latest import LatestRows
from millstream.kernels.tables.static_rows import StaticRows
from millstream.kernels.tables.upserts import Upserts, VersionOrder
from millstream.pipeline.checks import require_unreserved, span_us, type_of
from millstream.pipeline.expressions import Column, as_expression
from millstream.pipeline.shape import StepNames, StreamShape
from millstream.views.reader import View
from millstream.views.retractions import DIFF_COLUMN
from millstream.views.sinks.dataset import Dataset

RowsKept = Literal["latest", "all"]
STATIC_BYTES_MAX = 16 << 20  # of rows that travel with a plan


def build_upserts(
    shape: StreamShape,
    key: str | Sequence[str],
    *,
    order: VersionOrder,
    deleted: Column | None,
    ttl: Duration | None = None,
    name: str | None = None,
) -> tuple[Upserts, StreamShape]:
    """Build the operator that makes a table of a stream, and the shape of the table's rows."""
    columns = _key_columns(shape, key)
    choose("table's order", order, get_args(VersionOrder))
    deletion = None if deleted is None else _condition(deleted, shape)
    kernel = Upserts(
        shape.names.unique(name or f"table by {', '.join(columns)}"),
        columns,
        tuple(shape.columns.items()),
        order,
        deletion,
        None if ttl is None else span_us(ttl, "table's ttl"),
    )
    return kernel, table_shape(shape, columns, not_null=True)


def build_latest(
    shape: StreamShape, key: str | Sequence[str], *, unbounded: bool, name: str | None
) -> tuple[LatestRows, StreamShape]:
    """Build the operator that makes a table of rows that may be taken back, and the shape of the table's rows.

    Raises:
        ConfigError: there is no key, or one that may have several rows, all of which would be kept.
    """
    columns = _key_columns(shape, key)
    if not unbounded and not any(set(one) <= set(columns) for one in shape.row_keys):
        identified = f", such as {', '.join(shape.row_keys[0])}" if shape.row_keys else ""
        raise ConfigError(
            f"table comes after rows that may be taken back, and a key of {', '.join(columns)} may have several of "
            "them. The one before the latest counts again when that is taken back, so all are kept, without "
            f'end. Give a key that has one row{identified}; emit "final" above; or say that this much may be '
            "kept: unbounded=True."
        )
    places = {column: str(place) for place, column in enumerate(shape.columns)}
    kernel = LatestRows(
        shape.names.unique(name or f"table by {', '.join(columns)}"),
        tuple(shape.columns.items()),
        tuple(places[column] for column in columns),
    )
    return kernel, table_shape(shape, columns, not_null=True)


def not_deleted(deleted: Column, shape: StreamShape) -> pl.Expr:
    """Return the condition of rows that do not delete their key."""
    return ~_condition(deleted, shape).fill_null(value=False)


def _condition(deleted: Column, shape: StreamShape) -> pl.Expr:
    condition = as_expression(deleted, what="table's deleted")
    dtype = type_of(condition, shape.columns, "table's deleted")
    if dtype != pl.Boolean:
        raise ConfigError(
            f'table\'s deleted is of type {dtype}. Give a condition, such as pl.col("op") == "d".'
        )
    return condition


def _key_columns(shape: StreamShape, key: str | Sequence[str]) -> tuple[str, ...]:
    columns = shape.key_columns(key, "table's key")
    if not columns:
        raise ConfigError('table has no key. Say which columns identify a row: table(key="id").')
    return columns


def build_static_table(
    rows: Any, key: str | Sequence[str], name: str, names: StepNames
) -> tuple[StaticRows, StreamShape]:
    """Build the operator of a table of given rows, and its shape."""
    frame = _rows_given(rows, name)
    for column in frame.columns:
        require_unreserved(column, repr(name))
    shape = StreamShape(dict(frame.schema), names=names)
    columns = shape.key_columns(key, f"the key of {name!r}")
    if not columns:
        raise ConfigError(f'{name!r} has no key. Say which columns identify a row: key="id".')
    size = int(frame.estimated_size())
    if size > STATIC_BYTES_MAX:
        raise ConfigError(
            f"{name!r} has {size >> 20} MiB of rows. Up to {STATIC_BYTES_MAX >> 20} MiB "
            "travel with a plan. Write them to a compacted topic, and read that: app.table(…)."
        )
    keys = pl.DataFrame({str(n): frame[column] for n, column in enumerate(columns)})
    if keys.null_count().sum_horizontal().sum():
        raise ConfigError(f"{name!r} has a row whose key is null. Leave it out, or give it a key.")
    if keys.is_duplicated().any():
        twice = keys.filter(keys.is_duplicated()).row(0)
        raise ConfigError(
            f"{name!r} has two rows with the key {', '.join(map(repr, twice))}. Leave one out, or "
            "give more columns as key=."
        )
    # By the key, so that it does not matter in which order they are given.
    ordered = frame[keys.with_row_index("at").sort(keys.columns)["at"]]
    kernel = StaticRows(names.unique(name), columns, ordered)
    return kernel, table_shape(shape, columns, not_null=True)


def _rows_given(rows: Any, name: str) -> pl.DataFrame:
    """Return the rows of a frame; of a view or a dataset those that it has now."""
    if isinstance(rows, View):
        return rows.scan()
    if isinstance(rows, Dataset):
        return _rows_left(rows.scan().collect())
    return polars_table(to_arrow(rows, f"rows of {name!r}"))


def _rows_left(frame: pl.DataFrame) -> pl.DataFrame:
    """Return the rows of a dataset that were not taken back."""
    if DIFF_COLUMN not in frame.columns:
        return frame
    signed = frame.rename({DIFF_COLUMN: DIFF}).with_columns(pl.lit(0, pl.UInt64).alias(HASH))
    left = consolidate(with_weight(signed))
    return with_diff(left.filter(left[WEIGHT] > 0)).drop(DIFF, HASH)


def check_all_kept(
    key: str | Sequence[str] | None,
    deleted: Column | None,
    ttl: Duration | None,
    *,
    unbounded: bool,
) -> None:
    """Make sure that a table of all rows is meant."""
    if key is not None or deleted is not None or ttl is not None:
        raise ConfigError(
            'table has keep="all" and key=, deleted= or ttl=, by which rows would replace one another or go. Leave '
            'them out, or say keep="latest".'
        )
    if not unbounded:
        raise ConfigError(
            'table has keep="all": what joins or groups it keeps every event of the stream, without end. Join '
            "the streams within an interval (stream.join), keep the latest row of a key, or say that this "
            "much may be kept: unbounded=True."
        )


def check_may_expire(view: str, shape: StreamShape) -> None:
    """Make sure that no ttl is asked of a view of rows that may be replaced or taken back."""
    if shape.mode not in (None, "final"):
        raise ConfigError(
            f"The view {view!r} has a ttl and comes after rows that may be replaced or taken back: one that has expired "
            'would have to be kept, to know what becomes of it. Emit "final" above, or leave the ttl out.'
        )


def check_never_expires(ttl: Duration | None) -> None:
    """Make sure that no ttl is asked of a table of rows that may be taken back."""
    if ttl is not None:
        raise ConfigError(
            "table has ttl= and comes after rows that may be taken back: a row that has expired would have to "
            "be kept, to know that it is not taken back. Make the table of rows that come once: emit "
            '"final" above.'
        )


def table_shape(
    shape: StreamShape,
    key: tuple[str, ...] | None,
    *,
    not_null: bool = False,
    append_only: bool = False,
) -> StreamShape:
    """Return the shape of a table with a stream's columns. ``not_null``: the key has no nulls."""
    return replace(
        shape,
        key=(),
        mode="retract",
        lateness_us=0,
        late_policy="drop",
        late_columns=None,
        window_key=(),
        primary_key=key,
        key_not_null=not_null,
        is_table=True,
        append_only=append_only,
        row_keys=(),
        stable=(),
        timed=(),
        equal_rows=None,
        takes_back=False,
    )
