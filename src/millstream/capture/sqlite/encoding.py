"""Rows as text, written by SQL that any SQLite has, and read back here without loss.

A value is a letter and its text; values are separated by commas: ``i42,t6162,n``. Numbers are written so that they
are the same number again; text and bytes are hexadecimal, as SQLite's own functions end a text at its first NUL.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence
from typing import Any, TypeAlias

from millstream.errors import ConfigError, CorruptionError

_GROUP = 50  # columns in one pair of parentheses: an expression may be 1000 levels deep, and a table be wider
SqliteValue: TypeAlias = int | float | str | bytes | None


def quote_identifier(name: str) -> str:
    """Return a name as it stands in a statement."""
    return '"' + name.replace('"', '""') + '"'


def quote_text(text: str) -> str:
    """Return a text as it stands in a statement."""
    return "'" + text.replace("'", "''") + "'"


def encoded(columns: Sequence[str], row: str) -> str:
    """Return SQL that writes the columns of a row: ``NEW``, ``OLD`` or a table's name."""
    values = [_encoded(f"{row}.{quote_identifier(name)}") for name in columns]
    groups = [values[at : at + _GROUP] for at in range(0, len(values), _GROUP)]
    return " || ',' || ".join("(" + " || ',' || ".join(group) + ")" for group in groups)


def _encoded(column: str) -> str:
    return (
        f"CASE typeof({column}) WHEN 'null' THEN 'n' WHEN 'integer' THEN 'i' || {column} "
        f"WHEN 'real' THEN 'r' || quote({column}) WHEN 'text' THEN 't' || hex({column}) "
        f"ELSE 'b' || hex({column}) END"
    )


def decoded(text: str, table: str) -> list[SqliteValue]:
    """Return the values of a row.

    Raises:
        ConfigError: a text is not UTF-8.
        CorruptionError: the row is not one that a trigger wrote.
    """
    return [decoded_value(value, table) for value in text.split(",")]


def decoded_value(value: str, table: str) -> SqliteValue:
    """Return one value of a row; raises what :func:`decoded` raises."""
    kind, rest = value[:1], value[1:]
    try:
        if kind == "n" and not rest:
            return None
        if kind == "i":
            return int(rest)
        if kind == "r":
            return float(rest)
        data = bytes.fromhex(rest)
    except ValueError:
        kind = ""
    if kind == "b":
        return data
    if kind != "t":
        raise CorruptionError(
            f"a captured row of {table} has the value {value[:40]!r}, which no trigger of capture writes. Take "
            "a new snapshot, into a new prefix."
        )
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise ConfigError(
            f"a row of {table} has a text that is not UTF-8: {data[:40]!r}. Store it as a BLOB."
        ) from None


def json_value(value: SqliteValue, *, is_blob: bool) -> Any:
    """Return a value as it is captured.

    Columns of SQLite hold values of any type: what its declared type does not let expect is an object that says so.

    Args:
        is_blob: Whether the column is declared as BLOB.
    """
    if isinstance(value, bytes):
        text = base64.b64encode(value).decode()
        return text if is_blob else {"blob": text}
    if isinstance(value, str):
        return {"text": value} if is_blob else value
    if isinstance(value, float) and math.isinf(value):
        return "Infinity" if value > 0 else "-Infinity"
    return value
