"""What a table of DuckDB takes: its columns and its key.

Source: DuckDB, "DuckDB_% Metadata Functions", "Data Types".
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from millstream.connectors.sinks.column_values import (
    ToColumn,
    byte_strings,
    dates,
    decimals,
    floats,
    json_documents,
    labels,
    moments,
    texts,
    times_of_day,
    truth_value,
    uuids,
    whole_numbers,
)
from millstream.connectors.sinks.table_changes import SinkColumn, SinkTable
from millstream.connectors.sinks.table_choice import (
    TableChoice,
    check_primary,
    choose_columns,
    no_table,
)
from millstream.errors import ConfigError

_SIGNED = {"TINYINT": 8, "SMALLINT": 16, "INTEGER": 32, "BIGINT": 64, "HUGEINT": 128}
_DECIMAL = re.compile(r"DECIMAL\(([0-9]+),([0-9]+)\)")
_ENUM = re.compile(r"ENUM\((.*)\)", re.DOTALL)
_LABEL = re.compile(r"'((?:[^']|'')*)'")
_TO_COLUMN: dict[str, ToColumn] = {
    **{
        name: whole_numbers(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
        for name, bits in _SIGNED.items()
    },
    **{f"U{name}": whole_numbers(0, 2**bits - 1) for name, bits in _SIGNED.items()},
    "BOOLEAN": truth_value,
    "FLOAT": floats(bits=32),
    "DOUBLE": floats(bits=64),
    "VARCHAR": texts(),
    "JSON": json_documents,
    "BLOB": byte_strings(),
    "DATE": dates,
    "TIME": times_of_day(6),
    "TIMESTAMP": moments(6, zone=False),
    "TIMESTAMP_S": moments(0, zone=False),
    "TIMESTAMP_MS": moments(3, zone=False),
    "TIMESTAMP_NS": moments(9, zone=False),
    "TIMESTAMP WITH TIME ZONE": moments(6, zone=True),
    "UUID": uuids,
}
_NO_KEYS = ("BOOLEAN", "FLOAT", "DOUBLE", "JSON")


def quoted(name: str) -> str:
    """Return a name as a statement has it."""
    return '"' + name.replace('"', '""') + '"'


def read_table(session: Any, shown: str, choice: TableChoice) -> SinkTable:
    """Read what a table of the schema ``main`` is; see :func:`millstream.connectors.sinks.mariadb_table.read_table`.

    Raises:
        ConfigError: there is none, or it cannot be written so.
    """
    name = choice.table
    where = "database_name = current_database() AND schema_name = 'main' AND table_name = $1"
    if not session.execute(f"SELECT 1 FROM duckdb_tables() WHERE {where}", [name]).fetchall():  # noqa: S608
        there = session.execute("SELECT table_name FROM duckdb_tables() WHERE schema_name = 'main'")
        raise no_table(shown, name, [found for (found,) in there.fetchall()])
    made = session.execute(
        "SELECT column_name FROM information_schema.columns WHERE table_catalog = current_database() AND table_schema = 'main' "
        "AND table_name = $1 AND is_generated = 'ALWAYS'",
        [name],
    ).fetchall()
    rows = session.execute(
        f"SELECT column_name, data_type, is_nullable, column_default FROM duckdb_columns() WHERE {where} ORDER BY column_index",  # noqa: S608
        [name],
    ).fetchall()
    primary = session.execute(
        f"SELECT constraint_column_names FROM duckdb_constraints() WHERE {where} AND constraint_type = 'PRIMARY KEY'",  # noqa: S608
        [name],
    ).fetchall()
    found = {row[0]: _column(*row) for row in rows if (row[0],) not in made}
    _check_key(shown, choice.key, primary[0][0] if primary else [], found)
    _refuse_collations(session, shown, choice)
    return SinkTable(shown, choose_columns(shown, found, choice), choice.key, choice.extra)


def _check_key(
    shown: str, key: Sequence[str], primary: Sequence[str], found: dict[str, SinkColumn]
) -> None:
    if not key:
        return
    check_primary(shown, key, primary)
    for name in key:
        kind = found[name].type
        if found[name].to_column is None or kind in _NO_KEYS:
            raise ConfigError(
                f"key is {name}, which is of the type {kind} in {shown}. The key of a sink is of whole numbers, decimals, text, "
                "bytes, UUIDs, dates or times."
            )


def _refuse_collations(session: Any, shown: str, choice: TableChoice) -> None:
    """Refuse a key by whose collation texts are the same that are two keys of the topic: a row would replace another one's.

    The statement that makes the table alone says what collation a column has.
    """
    ((made,),) = session.execute(
        "SELECT sql FROM duckdb_tables() WHERE database_name = current_database() AND schema_name = 'main' AND table_name = $1",
        [choice.table],
    ).fetchall()
    for name in choice.key:
        names = f"(?:{re.escape(name)}|{re.escape(quoted(name))})"
        if found := re.search(rf"[(,]\s*{names} VARCHAR COLLATE (\S+?)(?=[\s,)])", made):
            raise ConfigError(
                f"key is {name}, which has the collation {found[1]} in {shown}: by it two keys of the topic may be one, such as a and A. "
                "Give the column none."
            )


def _column(name: str, data_type: str, is_nullable: bool, default: str | None) -> SinkColumn:  # noqa: FBT001 - a row
    has_default = default is not None and default.upper() != "NULL"
    return SinkColumn(
        name,
        data_type,
        _to_column(data_type),
        is_required=not (is_nullable or has_default),
        is_nullable=is_nullable,
        default=default if has_default else None,
        from_key=bytes if data_type == "BLOB" else None,
    )


def _to_column(data_type: str) -> ToColumn | None:
    if found := _DECIMAL.fullmatch(data_type):
        return decimals(int(found[1]), int(found[2]))
    if found := _ENUM.fullmatch(data_type):
        return labels([label.replace("''", "'") for label in _LABEL.findall(found[1])], many=False)
    return _TO_COLUMN.get(data_type)
