"""Tables as the server describes them today: columns, key, and how a snapshot reads each column.

A snapshot's values are rendered by the functions that render those of the binary log (``values``): a row reads the
same however it was captured.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address
from typing import Any

from millstream.capture.mysql import values
from millstream.capture.mysql.charsets import text_decoder
from millstream.capture.mysql.session import MariaDbSession

_INTEGERS = frozenset(("tinyint", "smallint", "mediumint", "int", "bigint", "year"))
_TEXTS = frozenset(("char", "varchar", "tinytext", "text", "mediumtext", "longtext"))
_BINARIES = frozenset(("binary", "varbinary", "tinyblob", "blob", "mediumblob", "longblob"))
_LABELLED = frozenset(("enum", "set"))
_AS_WRITTEN = frozenset(("date", "uuid", "inet6", "inet4"))
_TIMES = frozenset(("time", "datetime", "timestamp"))
SUPPORTED_TYPES = (
    _INTEGERS | _TEXTS | _BINARIES | _LABELLED | _AS_WRITTEN | _TIMES
    | {"float", "double", "decimal", "bit", "json"}
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class SchemaColumn:
    """A column as information_schema has it."""

    name: str
    data_type: str
    column_type: str
    nullable: bool
    charset: str | None
    collation: str | None
    width: int
    """Characters of a text, bytes of a binary column, bits of a bit; 0 for others."""
    default: str | None
    generated: bool = False

    @property
    def quoted(self) -> str:
        return quote_name(self.name)

    @property
    def compressed(self) -> bool:
        return "COMPRESSED" in self.column_type.upper()

    @property
    def is_integer(self) -> bool:
        return self.data_type in _INTEGERS

    @property
    def is_text(self) -> bool:
        return self.data_type in _TEXTS

    @property
    def expression(self) -> str:
        """What a snapshot selects, so that the whole value comes across."""
        if self.data_type in _TEXTS:
            return f"CAST({self.quoted} AS BINARY)"
        if self.data_type in _LABELLED:
            return f"CONVERT({self.quoted} USING utf8mb4)"
        if self.data_type == "float":  # which the server would write with six digits
            return f"{self.quoted} * 1e0"
        return f"{self.quoted} + 0" if self.data_type == "bit" else self.quoted

    @property
    def key_expression(self) -> str:
        """What the rows of a chunk are ordered by: labels by their numbers, as the index has them."""
        by_number = self.data_type in _LABELLED or self.data_type == "bit"
        return f"{self.quoted} + 0" if by_number else self.quoted

    @property
    def key_value(self) -> str:
        """What is selected, as text or bytes, to go on after this row."""
        plain = f"CAST({self.quoted} AS BINARY)"
        by_text = self.data_type in _TEXTS or self.data_type in _BINARIES
        return plain if by_text else f"CAST({self.key_expression} AS CHAR)"

    def key_literal(self, value: bytes) -> str:
        """Return SQL for a value of ``key_value``, which compares as the column's index does."""
        shown = f"X'{value.hex()}'"
        if self.data_type in _TEXTS:
            return f"CONVERT({shown} USING {self.charset}) COLLATE {self.collation}"
        if self.data_type in _BINARIES:
            return shown
        text = f"CONVERT({shown} USING utf8mb4)"
        if self.data_type in ("bit", *_LABELLED) or self.data_type in _INTEGERS:
            return f"CAST({text} AS {'SIGNED' if value.startswith(b'-') else 'UNSIGNED'})"
        if self.data_type == "decimal":
            places = self.column_type.partition(",")[2].partition(")")[0] or "0"
            return f"CAST({text} AS DECIMAL(65, {places}))"
        return text

    def renderer(self, table: str) -> Callable[[Any], Any]:
        """Return what makes the captured value of a selected one that is not null."""
        if self.data_type in _TEXTS:
            return text_decoder(self.charset or "utf8mb4", f"{table}.{self.name}")
        simple: dict[str, Callable[[Any], Any]] = {
            "float": lambda text: values.shortest_float(float(text)),
            "double": float,
            "decimal": _plain_decimal,
            "bit": lambda text: f"{int(text):0{self.width}b}",
            "time": values.micros_of_time,
            "inet6": lambda text: str(IPv6Address(text)),
            "datetime": lambda text: text.replace(" ", "T"),
            "timestamp": lambda text: text.replace(" ", "T") + "Z",
        }
        if self.data_type in _INTEGERS:
            return int
        if self.data_type in _BINARIES:
            width = self.width if self.data_type == "binary" else 0
            return lambda data: values.encode_binary(data, width)
        return simple.get(self.data_type, str)


@dataclass(frozen=True, slots=True)
class TableSchema:
    """A table with its columns and the columns of its primary key, in its order."""

    database: str
    table: str
    columns: tuple[SchemaColumn, ...]
    key: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{self.database}.{self.table}"

    @property
    def quoted(self) -> str:
        return f"{quote_name(self.database)}.{quote_name(self.table)}"

    @property
    def key_columns(self) -> tuple[SchemaColumn, ...]:
        by_name = {column.name: column for column in self.columns}
        return tuple(by_name[name] for name in self.key)


def quote_name(name: str) -> str:
    """Return a name as it stands in a statement."""
    return "`" + name.replace("`", "``") + "`"


def _plain_decimal(text: str) -> str:
    sign, digits = ("-", text[1:]) if text.startswith("-") else ("", text)
    whole, point, places = digits.partition(".")
    return f"{sign}{whole.lstrip('0') or '0'}{point}{places}"


def read_schema(session: MariaDbSession, database: str, table: str) -> TableSchema:
    """Return a table as it is now; it has no columns if there is no such table."""
    rows = session.rows(
        "SELECT COLUMN_NAME, DATA_TYPE, COLUMN_TYPE, IS_NULLABLE, CHARACTER_SET_NAME, COLLATION_NAME, "
        "COALESCE(CHARACTER_MAXIMUM_LENGTH, NUMERIC_PRECISION, 0), COLUMN_DEFAULT, COALESCE(GENERATION_EXPRESSION, '') <> '' "
        "FROM information_schema.COLUMNS WHERE TABLE_SCHEMA = %s AND TABLE_NAME = %s "
        "ORDER BY ORDINAL_POSITION",
        (database, table),
    )
    key = session.rows(
        "SELECT COLUMN_NAME FROM information_schema.STATISTICS WHERE TABLE_SCHEMA = %s AND "
        "TABLE_NAME = %s AND INDEX_NAME = 'PRIMARY' ORDER BY SEQ_IN_INDEX",
        (database, table),
    )
    columns = tuple(
        SchemaColumn(
            row[0],
            row[1],
            row[2],
            row[3] == "YES",
            row[4],
            row[5],
            int(row[6]),
            row[7],
            row[8] == "1",
        )
        for row in rows
    )
    return TableSchema(database, table, columns, tuple(row[0] for row in key))


def fixed_binary_renderer(data_type: str) -> Callable[[str], str] | None:
    """Return what makes text of a type that the binary log has as bytes; None if bytes it is."""
    return {"uuid": _uuid, "inet6": _inet6, "inet4": _inet4}.get(data_type)


def _uuid(encoded: str) -> str:
    return str(uuid.UUID(bytes=values.decode_binary(encoded)))


def _inet6(encoded: str) -> str:
    return str(IPv6Address(values.decode_binary(encoded)))


def _inet4(encoded: str) -> str:
    return str(IPv4Address(values.decode_binary(encoded)))
