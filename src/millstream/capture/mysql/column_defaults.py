"""The defaults of columns: what an insertion has where its session logged only what the statement named.

With ``binlog_row_image=MINIMAL`` the server logs the columns that an INSERT names, and those whose default is computed
(tried with MariaDB 10.11: CURRENT_TIMESTAMP, UUID(), expressions, generated columns). A column that is left out has its
literal default. It is not in the log, so it is read from the server, and holds from the place on at which it was read,
until the log has a statement that alters the table.

A REPLACE over a row is logged as an update. It has the columns that the statement names, and not those that it sets to
their literal defaults, or to null: what is left out may have changed, and such an update is to be told from others.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from millstream.capture.mysql.row_images import RowImage
from millstream.capture.mysql.session import MariaDbSession
from millstream.capture.mysql.snapshot import BinlogPosition, current_position
from millstream.capture.mysql.table_map import ENUM, TableMap
from millstream.capture.mysql.table_schema import SchemaColumn, read_schema

_TEXT = re.compile(r"'(?:[^']|'')*'")
_NUMBER = re.compile(r"-?[0-9]+(\.[0-9]+)?")
_AS_TEXT = frozenset(
    ("char", "varchar", "tinytext", "text", "mediumtext", "longtext", "enum", "set", "date")
)
# Their defaults are written as their values are selected.
_AS_SELECTED = frozenset(
    ("tinyint", "smallint", "mediumint", "int", "bigint", "year", "decimal", "double", "datetime")
)
_UNKNOWN = object()
# Of which the values are that a session without strict mode gives a column that has no default: 0, "", zero dates, "::",
# and zero bytes as base64.
_ZERO_LETTERS = frozenset("0-:.TZA=")


class ColumnDefaults:
    """What is known of the defaults of tables, by database and name."""

    def __init__(self, session: MariaDbSession) -> None:
        self._session = session
        self._known: dict[tuple[str, str], _Known] = {}

    def learn(self, *tables: tuple[str, str]) -> None:
        """Read the defaults of tables, as they are now."""
        read = {name: read_schema(self._session, *name).columns for name in tables}
        # After them: a table that is altered in between has its statement in the log before this place, and is forgotten.
        position = current_position(self._session)
        for name, columns in read.items():
            # MySQL writes a default without quotes, so that a text is not told from an expression.
            is_read = not self._session.is_mysql
            literal = {column.name: _value(column) for column in columns} if is_read else {}
            self._known[name] = _Known(
                position,
                {column: value for column, value in literal.items() if value is not _UNKNOWN},
                frozenset(column.name for column in columns if column.default is not None),
            )

    def forget(self, table: tuple[str, str]) -> None:
        """Forget the defaults of a table that is altered here."""
        self._known.pop(table, None)

    def completed(self, table: TableMap, row: RowImage, place: BinlogPosition) -> RowImage:
        """Return an inserted row with the columns that it leaves out, as far as their values are known.

        ``place``: where the transaction of the row ends, or before that. What ends at the place at which the defaults were
        read, or behind it, was logged with them: an ALTER waits for transactions that have changed its table.
        """
        known = self._of(table)
        if place < known.position:
            return row
        defaults = known.literal
        return {
            column.name: row[column.name] if column.name in row else defaults[column.name]
            for column in table.columns
            if column.name in row or column.name in defaults
        }

    def may_replace(self, table: TableMap, old: RowImage, new: RowImage) -> bool:
        """Say whether an update that leaves columns out may be a REPLACE that was logged as one.

        A REPLACE that names no column of the key sets all of it to defaults: to 0 and the like where it has none and the
        session is lenient. With ``binlog_row_image=NOBLOB`` each update names its key.
        """
        if any(name in new for name in table.key):
            return True
        if all(name in self._of(table).defaulted for name in table.key):
            return True
        labels = {column.name for column in table.columns if column.type == ENUM}
        return all(name in labels or _ZERO_LETTERS.issuperset(str(old[name])) for name in table.key)

    def _of(self, table: TableMap) -> _Known:
        name = (table.database, table.table)
        if name not in self._known:
            self.learn(name)
        return self._known[name]


class _Known(NamedTuple):
    """The literal defaults of a table, which columns have any default, and from where on that is so."""

    position: BinlogPosition
    literal: dict[str, Any]
    defaulted: frozenset[str]


def _value(column: SchemaColumn) -> Any:
    """Return a literal default as a captured value."""
    default = column.default
    if default is None or column.generated:
        return _UNKNOWN
    # With escapes; or with a letter beyond U+FFFF, for which information_schema has a question mark.
    if "\\" in default or "?" in default:
        return _UNKNOWN
    if default == "NULL":
        return None
    text = default
    if _TEXT.fullmatch(default):
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
