"""Tables as SQL sees them: views and topics with columns of DuckDB's types, and their rows as of one position."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import pyarrow as pa

from millstream.views.schema import ViewSchema
from millstream.views.state_store.view_table import column_names, quote_identifier

VIEWS: Literal["views"] = "views"
TOPICS: Literal["topics"] = "topics"

_TYPES = {
    "int": "BIGINT",
    "float": "DOUBLE",
    "str": "VARCHAR",
    "bool": "BOOLEAN",
    "datetime": "TIMESTAMP WITH TIME ZONE",
    "date": "DATE",
    "duration": "INTERVAL",
    "decimal": "DECIMAL(38,9)",
    "bytes": "BLOB",
    "json": "JSON",
}
_ARROW_TYPES = {
    pa.int64(): "BIGINT",
    pa.float64(): "DOUBLE",
    pa.bool_(): "BOOLEAN",
    pa.string(): "VARCHAR",
    pa.binary(): "BLOB",
    pa.date32(): "DATE",
    pa.time64("us"): "TIME",
    pa.duration("us"): "INTERVAL",
    pa.timestamp("us", "UTC"): "TIMESTAMP WITH TIME ZONE",
}


@dataclass(frozen=True)
class SqlTable:
    """A view or a topic. ``source`` is its own name, ``name`` that in SQL, where names that differ only in case are the same.

    ``columns`` are pairs of a name and DuckDB's type; ``key`` are the columns that identify a row, if there are any.
    """

    schema: Literal["views", "topics"]
    source: str
    name: str
    columns: tuple[tuple[str, str], ...]
    key: tuple[str, ...] = ()

    @property
    def quoted(self) -> str:
        """The name as SQL has it."""
        return f"{self.schema}.{quote_identifier(self.name)}"


@dataclass(frozen=True)
class Snapshot:
    """All tables there are, and the rows of those that a statement names, as of one position.

    ``batch_id`` is the last batch that was committed, None before the first. ``position`` is what of the log the rows
    reflect, topic → partition → offset of the next record. ``notes`` say what rows lack, as sentences.
    """

    tables: tuple[SqlTable, ...]
    rows: Mapping[SqlTable, pa.Table]
    batch_id: int | None = None
    position: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def quote_text(text: str) -> str:
    """Return a text as an SQL string."""
    return "'" + text.replace("'", "''") + "'"


def view_tables(schemas: Sequence[ViewSchema]) -> tuple[SqlTable, ...]:
    """Return the tables of views."""
    names = column_names(tuple(schema.name for schema in schemas))
    return tuple(_view_table(schema, name) for schema, name in zip(schemas, names, strict=True))


def _view_table(schema: ViewSchema, name: str) -> SqlTable:
    columns = column_names(schema.names)
    by_name = dict(zip(schema.names, columns, strict=True))
    kinds = [duckdb_type(kind) for _, kind in schema.columns]
    return SqlTable(
        VIEWS,
        schema.name,
        name,
        tuple(zip(columns, kinds, strict=True)),
        tuple(by_name[one] for one in schema.key),
    )


def type_of_arrow(kind: pa.DataType) -> str:
    """Return the type that columns of a topic have in DuckDB."""
    if pa.types.is_list(kind):
        return f"{type_of_arrow(kind.value_type)}[]"
    if pa.types.is_struct(kind):
        fields = ", ".join(
            f"{quote_identifier(one.name)} {type_of_arrow(one.type)}" for one in kind
        )
        return f"STRUCT({fields})"
    if pa.types.is_decimal(kind):
        return f"DECIMAL({kind.precision},{kind.scale})"
    return _ARROW_TYPES[kind]


def duckdb_type(kind: str) -> str:
    """Return the type of a column of a view of this kind."""
    return _TYPES[kind] if kind in _TYPES else kind.upper()
