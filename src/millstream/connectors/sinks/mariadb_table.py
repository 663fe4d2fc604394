"""What a table of MariaDB or MySQL takes: its columns, its key, and whether it can be written in transactions.

Source: MariaDB, "Information Schema COLUMNS Table", "Data Types"; MySQL 8.4, "The INFORMATION_SCHEMA COLUMNS Table".
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from millstream.connectors.sinks.column_values import (
    ColumnValue,
    ToColumn,
    byte_strings,
    checked_bytes,
    dates,
    decimals,
    floats,
    json_documents,
    labels,
    moments,
    shown_value,
    texts,
    times_of_day,
    uuids,
    whole_numbers,
)
from millstream.connectors.sinks.mariadb_session import SinkSession
from millstream.connectors.sinks.table_changes import SinkColumn, SinkTable
from millstream.connectors.sinks.table_choice import (
    TableChoice,
    check_primary,
    choose_columns,
    no_table,
)
from millstream.errors import ConfigError

_WHOLE_BITS = {"tinyint": 8, "smallint": 16, "mediumint": 24, "int": 32, "bigint": 64}
_TEXTS = ("char", "varchar", "tinytext", "text", "mediumtext", "longtext")
_BYTES = ("binary", "varbinary", "tinyblob", "blob", "mediumblob", "longblob")
_KEY_TYPES = (*_WHOLE_BITS, *_TEXTS, *_BYTES, "uuid", "date", "datetime", "timestamp")
_LABEL = re.compile(r"'((?:[^']|'')*)'")
# What makes text of a key that the server gives back equal to the value that was written.
_TextOf = Callable[[Any], ColumnValue]


def quoted(name: str) -> str:
    """Return a name as a statement has it."""
    return "`" + name.replace("`", "``") + "`"


def read_table(session: SinkSession, shown: str, choice: TableChoice) -> SinkTable:
    """Read what a table is.

    Args:
        shown: The table, for errors.

    Raises:
        ConfigError: there is none, or it cannot be written so.
    """
    name = choice.table
    of_table = f"TABLE_SCHEMA = DATABASE() AND TABLE_NAME = BINARY {session.literal(name)}"
    _check_kind(session, shown, of_table, name)
    json_columns = _json_columns(session, of_table)
    rows = session.rows(
        "SELECT COLUMN_NAME, DATA_TYPE, COLUMN_TYPE, IS_NULLABLE, COLUMN_DEFAULT, EXTRA, CHARACTER_MAXIMUM_LENGTH, "  # noqa: S608 - our names
        "CHARACTER_OCTET_LENGTH, NUMERIC_PRECISION, NUMERIC_SCALE, DATETIME_PRECISION, CHARACTER_SET_NAME "
        f"FROM information_schema.COLUMNS WHERE {of_table} ORDER BY ORDINAL_POSITION"
    )
    found = {
        row[0]: _column(row, is_json=row[0] in json_columns) for row in rows if not _is_made(row)
    }
    primary = session.rows(
        f"SELECT COLUMN_NAME FROM information_schema.STATISTICS WHERE {of_table} AND INDEX_NAME = 'PRIMARY' "  # noqa: S608
        "ORDER BY SEQ_IN_INDEX"
    )
    types = {row[0]: row[1] for row in rows}
    _check_key(shown, choice.key, [part for (part,) in primary], types)
    return SinkTable(shown, choose_columns(shown, found, choice), choice.key, choice.extra)


def _check_kind(session: SinkSession, shown: str, of_table: str, name: str) -> None:
    found = session.rows(
        f"SELECT TABLE_TYPE, t.ENGINE, TRANSACTIONS FROM information_schema.TABLES t LEFT JOIN information_schema.ENGINES e "  # noqa: S608
        f"ON e.ENGINE = t.ENGINE WHERE {of_table}"
    )
    if not found:
        there = [
            row[0]
            for row in session.rows(
                "SELECT TABLE_NAME FROM information_schema.TABLES WHERE TABLE_SCHEMA = DATABASE() LIMIT 10000"
            )
        ]
        raise no_table(shown, name, there)
    kind, engine, transactions = found[0]
    if kind != "BASE TABLE" or transactions != "YES":
        what = f"of the engine {engine}" if kind == "BASE TABLE" else f"a {kind}"
        raise ConfigError(
            f"{shown} is {what}, which has no transactions: a batch that was cut short could not be taken back. Write to a table of "
            "InnoDB (ALTER TABLE … ENGINE = InnoDB)."
        )


def _check_key(
    shown: str, key: Sequence[str], primary: Sequence[str], types: dict[str, str]
) -> None:
    if not key:
        return
    check_primary(shown, key, primary)
    for name in key:
        if types[name] not in _KEY_TYPES:
            raise ConfigError(
                f"key is {name}, which is of the type {types[name]} in {shown}. The key of a sink is of whole numbers, "
                "text, bytes, UUIDs, dates, or dates with times."
            )


def _json_columns(session: SinkSession, of_table: str) -> set[str]:
    """Return the columns of MariaDB's type JSON: text, with a check that it is some."""
    there = session.rows(
        "SELECT 1 FROM information_schema.COLUMNS WHERE TABLE_SCHEMA = 'information_schema' "
        "AND TABLE_NAME = 'CHECK_CONSTRAINTS' AND COLUMN_NAME = 'TABLE_NAME'"
    )
    if not there:  # MySQL, where it is a type
        return set()
    clauses = session.rows(
        "SELECT CHECK_CLAUSE FROM information_schema.CHECK_CONSTRAINTS "  # noqa: S608 - our names
        f"WHERE {of_table.replace('TABLE_SCHEMA', 'CONSTRAINT_SCHEMA')}"
    )
    found = (re.fullmatch(r"json_valid\(`(.*)`\)", str(clause)) for (clause,) in clauses)
    return {one[1].replace("``", "`") for one in found if one is not None}


def _is_made(row: tuple[Any, ...]) -> bool:
    """Whether the server makes the column's values of others."""
    return "GENERATED" in row[5].upper().replace("DEFAULT_GENERATED", "")


def _column(row: tuple[Any, ...], *, is_json: bool) -> SinkColumn:
    name, data_type, column_type, nullable, default, extra = row[:6]
    is_nullable = nullable == "YES"
    counts = "auto_increment" in extra.lower()
    has_default = counts or (default is not None and default != "NULL")
    exactly = int(row[7]) if data_type == "binary" else None
    size = int(row[7]) if data_type in _BYTES and exactly is None else None
    from_key = None
    if data_type in _BYTES:
        from_key = lambda key: checked_bytes(key, size, exactly)  # noqa: E731 - of two lengths
    return SinkColumn(
        name,
        "json" if is_json else str(column_type)[:100],
        json_documents if is_json else _to_column(row),
        is_required=not (is_nullable or has_default),
        is_nullable=is_nullable,
        # The session writes 0 where it is given, and that is the default of a column that counts. Null is the next number.
        default="NULL" if counts else "DEFAULT",
        from_key=from_key,
    )


def _to_column(row: tuple[Any, ...]) -> ToColumn | None:
    """Return what makes values of a column; None for types that are not written, as those of places on a map."""
    data_type, column_type = row[1], row[2]
    characters, octets, precision, scale, digits = (
        None if value is None else int(value) for value in row[6:11]
    )
    if data_type in _WHOLE_BITS:
        bits, is_unsigned = _WHOLE_BITS[data_type], "unsigned" in column_type
        low, high = (0, 2**bits) if is_unsigned else (-(2 ** (bits - 1)), 2 ** (bits - 1))
        return whole_numbers(low, high - 1, bools=data_type == "tinyint")
    if data_type in _TEXTS:
        is_short = data_type in ("char", "varchar")
        return texts(
            characters_max=characters if is_short else None,
            bytes_max=octets if not is_short and row[11] == "utf8mb4" else None,
            keeps_spaces=data_type != "char",
        )
    if data_type in _BYTES:
        exactly = octets if data_type == "binary" else None
        return byte_strings(bytes_max=octets, bytes_exactly=exactly)
    if data_type == "decimal":
        assert precision is not None
        to_decimal = decimals(precision, scale or 0)
        return _unsigned(to_decimal) if "unsigned" in column_type else to_decimal
    if data_type in ("enum", "set"):
        known = [label.replace("''", "'") for label in _LABEL.findall(column_type)]
        return labels(known, many=data_type == "set")
    return {
        "float": floats(bits=32),
        "double": floats(bits=64),
        "bit": whole_numbers(0, 2 ** (precision or 1) - 1, bools=True),
        "year": whole_numbers(1901, 2155),
        "date": dates,
        "time": times_of_day(digits or 0),
        "datetime": moments(digits or 0, zone=False),
        "timestamp": moments(digits or 0, zone=True),
        "json": json_documents,
        "uuid": uuids,
        "inet4": texts(),
        "inet6": texts(),
    }.get(data_type)


def _unsigned(to_decimal: ToColumn) -> ToColumn:
    def to_column(value: Any) -> ColumnValue:
        found = to_decimal(value)
        if str(found).startswith("-"):
            raise ValueError(f"{shown_value(value)} is below 0")
        return found

    return to_column


def key_reader(table: SinkTable) -> Callable[[Sequence[Any]], tuple[ColumnValue, ...]]:
    """Return what makes a key, as changes have it, of what the server gives back for its columns."""
    readers = [_text_of(table.columns[name].type) for name in table.key]
    return lambda row: tuple(read(value) for read, value in zip(readers, row, strict=True))


def _text_of(column_type: str) -> _TextOf:
    data_type = re.split(r"[( ]", column_type, maxsplit=1)[0]
    if data_type in _WHOLE_BITS:
        return int
    if data_type in ("datetime", "timestamp"):
        return _without_zeros
    return lambda value: value  # text, or bytes


def _without_zeros(value: str) -> str:
    return value.rstrip("0").rstrip(".") if "." in value else value
