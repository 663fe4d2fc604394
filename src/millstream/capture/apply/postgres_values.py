"""Captured values as PostgreSQL's COPY takes them.

Each is the text that PostgreSQL reads as that value. What COPY gives back is read as capture reads it
(``capture/postgres/values.py``), so a value that was written and read is the captured value again.

Source: PostgreSQL 15, "COPY", text format; "Array Input and Output Syntax".
"""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Sequence
from typing import Any

from millstream.capture.apply.applied_table import AppliedTable, Row
from millstream.capture.apply.captured_types import CapturedType, Kind, text_of

_ESCAPED = re.compile(r"[\\\t\n\r]")
_ESCAPES = {"\\": "\\\\", "\t": "\\t", "\n": "\\n", "\r": "\\r"}
_ValueText = Callable[[Any], str]

TYPES: dict[Kind, str] = {
    "int16": "smallint",
    "int32": "integer",
    "int64": "bigint",
    "uint64": "numeric",
    "float32": "real",
    "float64": "double precision",
    "decimal": "numeric",
    "boolean": "boolean",
    "bytes": "bytea",
    "date": "date",
    "time": "time",
    "timestamp": "timestamp",
    "timestamptz": "timestamptz",
    "interval": "interval",
    "uuid": "uuid",
    "json": "json",
}
_SAME_NAME = frozenset(
    (  # noqa: SIM905 - a list of them would be 40 lines
        "int2 int4 int8 oid float4 float8 numeric money bool bytea text varchar bpchar date time timetz timestamp "
        "timestamptz interval uuid json jsonb xml inet cidr macaddr macaddr8 bit varbit point line lseg box path polygon "
        "circle tsvector tsquery int4range int8range numrange tsrange tstzrange daterange pg_lsn"
    ).split()
)


def postgres_type(table: AppliedTable, kind: CapturedType) -> str:
    """Return the type of a column, as statements have it: that of the source, if this is a type of PostgreSQL's own."""
    if table.connector == "postgresql":
        base = kind.native.removeprefix("_")
        if base not in _SAME_NAME:
            return "text"
        array = "[]" if kind.native.startswith("_") else ""
        # "bpchar" without a length keeps what it is given; "bit" alone would be one bit.
        return f"pg_catalog.{'varbit' if base == 'bit' else base}{array}"
    return TYPES.get(kind.kind, "text")


def copy_encoder(table: AppliedTable, names: Sequence[str]) -> Callable[[Row], str]:
    """Return what makes a line of COPY of the columns of a row, without its end."""
    writers = [(name, _writer(table, table.types[name])) for name in names]

    def encode(row: Row) -> str:
        return "\t".join(
            ["\\N" if (value := row[name]) is None else write(value) for name, write in writers]
        )

    return encode


def _writer(table: AppliedTable, kind: CapturedType) -> _ValueText:
    if kind.kind in ("int16", "int32", "int64", "uint64"):
        return _number
    if kind.kind in ("float32", "float64"):
        return _number
    if kind.kind == "boolean":
        return _boolean
    if kind.kind == "bytes":
        return _copied_bytes
    if kind.kind == "array" and kind.element is not None and postgres_type(table, kind) != "text":
        element = _element_writer(kind.element)
        return lambda value: _escaped(_array(value, element))
    return _copied_text


def _number(value: Any) -> str:
    """Return a number; "NaN" and infinities are text already. What else is text, PostgreSQL refuses by its name."""
    return value if isinstance(value, str) else repr(value)


def _boolean(value: Any) -> str:
    return "t" if value else "f"


def _hexadecimal(value: str) -> str:
    return "\\x" + base64.b64decode(value).hex()


def _copied_bytes(value: Any) -> str:
    return "\\" + _hexadecimal(value)


def _copied_text(value: Any) -> str:
    return _escaped(text_of(value))


def _escaped(text: str) -> str:
    return _ESCAPED.sub(lambda found: _ESCAPES[found[0]], text)


def _element_writer(kind: CapturedType) -> _ValueText:
    if kind.kind == "bytes":
        return _hexadecimal
    if kind.kind == "boolean":
        return _boolean
    return text_of


def _array(value: Any, element: _ValueText) -> str:
    """Return an array as text, with every element in quotes."""
    if not isinstance(value, list):
        return text_of(value)
    parts = []
    for one in value:
        if one is None:
            parts.append("NULL")
        elif isinstance(one, list):
            parts.append(_array(one, element))
        else:
            text = element(one).replace("\\", "\\\\").replace('"', '\\"')
            parts.append(f'"{text}"')
    return "{" + ",".join(parts) + "}"
