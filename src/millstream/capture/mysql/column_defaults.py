"""The defaults of columns: what an insertion has where its session logged only what the statement named.

With ``binlog_row_image=MINIMAL`` the server logs the columns that an INSERT names, and those whose default is computed
(tried with MariaDB 10.11: CURRENT_TIMESTAMP, UUID(), expressions, generated columns). A column that is left out has its
literal default. It is not in the log, so it is read from the server, and holds from the place on at which it was read,
until the log has a statement that alters the table.
"""

from __future__ import annotations

import re
from typing import Any

from millstream.capture.mysql.row_images import RowImage
from millstream.capture.mysql.session import MariaDbSession
from millstream.capture.mysql.snapshot import BinlogPosition, current_position
from millstream.capture.mysql.table_map import TableMap
from millstream.capture.mysql.table_schema import SchemaColumn, read_schema

_NUMBER = re.compile(r"-?[0-9]+(\.[0-9]+)?")
_AS_TEXT = frozenset(
    ("char", "varchar", "tinytext", "text", "mediumtext", "longtext", "enum", "set", "date")
)
# Their defaults are written as their values are selected.
_AS_SELECTED = frozenset(
    ("tinyint", "smallint", "mediumint", "int", "bigint", "year", "decimal", "double", "datetime")
)
_UNKNOWN = object()


class ColumnDefaults:
    """What is known of the defaults of tables, by database and name."""

    def __init__(self, session: MariaDbSession) -> None:
        self._session = session
        self._known: dict[tuple[str, str], tuple[BinlogPosition, dict[str, Any]]] = {}

    def learn(self, *tables: tuple[str, str]) -> None:
        """Read the defaults of tables, as they are now."""
        read = {name: _defaults(self._session, *name) for name in tables}
        # After them: a table that is altered in between has its statement in the log before this place, and is forgotten.
        position = current_position(self._session)
        self._known |= {name: (position, defaults) for name, defaults in read.items()}

    def forget(self, table: tuple[str, str]) -> None:
        """Forget the defaults of a table that is altered here."""
        self._known.pop(table, None)

    def completed(self, table: TableMap, row: RowImage, place: BinlogPosition) -> RowImage:
        """Return an inserted row with the columns that it leaves out, as far as their values are known.

        ``place``: the row was logged there, or later.
        """
        name = (table.database, table.table)
        if name not in self._known:
            self.learn(name)
        position, defaults = self._known[name]
        if place < position:
            return row
        return {
            column.name: row[column.name] if column.name in row else defaults[column.name]
            for column in table.columns
            if column.name in row or column.name in defaults
        }


def _defaults(session: MariaDbSession, database: str, table: str) -> dict[str, Any]:
    columns = read_schema(session, database, table).columns
    found = {column.name: _value(column) for column in columns}
    return {name: value for name, value in found.items() if value is not _UNKNOWN}


def _value(column: SchemaColumn) -> Any:
    """Return a literal default as a captured value."""
    default = column.default
    if default is None or column.generated or "\\" in default:  # none, or with escapes
        return _UNKNOWN
    if default == "NULL":
        return None
    text = default
    if default.startswith("'"):
        text = default[1:-1].replace("''", "'")
    elif _NUMBER.fullmatch(default) is None:
        return _UNKNOWN
    return _rendered(column, text)


def _rendered(column: SchemaColumn, text: str) -> Any:
    if column.data_type == "char":
        return text.rstrip(" ")
    if column.data_type in _AS_TEXT:
        return text
    if column.data_type in _AS_SELECTED:
        return column.renderer("")(text)
    return _UNKNOWN
