"""A table that follows a view of another app: declared here, copied into a topic by `views/followed_view.py`."""

from __future__ import annotations

from dataclasses import dataclass, replace

import polars as pl
import pyarrow as pa

from millstream.errors import ConfigError
from millstream.kernels.decode.fields import Field
from millstream.kernels.decode.records import META_TYPES
from millstream.pipeline.declaration import AppDeclaration
from millstream.pipeline.expressions import column_named
from millstream.pipeline.table import Table
from millstream.pipeline.topic import Topic
from millstream.views.followed_view import FollowedView, is_text
from millstream.views.reader import View
from millstream.views.schema import ViewSchema

_ARROW: dict[pl.DataType, pa.DataType] = {
    pl.Int64(): pa.int64(),
    pl.Boolean(): pa.bool_(),
    pl.String(): pa.string(),
    pl.Datetime("us", "UTC"): pa.timestamp("us", "UTC"),
    pl.Date(): pa.date32(),
    pl.Duration("us"): pa.duration("us"),
    pl.Binary(): pa.binary(),
}


@dataclass(frozen=True)
class FollowingTable:
    """A table of a view: the topic that it is read from, what fills it, and the table."""

    topic: Topic
    followed: FollowedView
    table: Table


def topic_of_view(app: str, view: View) -> str:
    """Return the name of the topic into which an app copies a view."""
    return f"{app}.view.{view.app}.{view.name}"


def build_view_table(app: AppDeclaration, view: View, name: str | None) -> FollowingTable:
    """Build the topic, and the table that is made of it.

    Raises:
        ConfigError: what is given is no view, or is one of this app; the view has no key.
    """
    if not isinstance(view, View):
        raise ConfigError(
            f'view_table is given {view!r}. Give a view that another app keeps: ms.view("prices", app="shop").'
        )
    if view.app == app.name:
        raise ConfigError(
            f"view_table is given the view {view.name!r} of this app, which would read what it writes. Take the table "
            "that the view is made of, or make one of the stream: stream.table(key=…)."
        )
    schema = view.schema
    if not schema.key:
        raise ConfigError(
            f"The view {view.name!r} has no key, so one row at most. Give it a key to make a table of it."
        )
    key = _free_name(schema)
    topic = Topic(app, topic_of_view(app.name, view), (*_fields(schema), _key_field(key)), key, 1)
    table = topic.table(name=name or f"view {view.name}")
    whole = table.select(*(_column(column, dtype) for column, dtype in schema.dtypes.items()))
    shape = replace(whole.shape, primary_key=schema.key)  # rows with one record key agree in it
    followed = FollowedView(app.name, topic.name, view, schema)
    return FollowingTable(topic, followed, replace(whole, shape=shape, origin=None))


def _free_name(schema: ViewSchema) -> str:
    """Return a name for the record's key that is no column's."""
    name = "view_key"
    while name in schema.names:
        name += "_"
    return name


def _key_field(name: str) -> Field:
    return Field(name, META_TYPES["key"], required=False, meta="key")


def _fields(schema: ViewSchema) -> tuple[Field, ...]:
    types = {
        name: pl.String() if is_text(dtype) else dtype for name, dtype in schema.dtypes.items()
    }
    return tuple(Field(name, _ARROW[dtype], required=False) for name, dtype in types.items())


def _column(name: str, dtype: pl.DataType) -> pl.Expr:
    column = column_named(name)
    return column.cast(dtype) if is_text(dtype) else column
