"""The types of captured columns, whichever database they are of.

A definition in the log names a type as its database does. Here it becomes one of a few kinds, for which each target
has a type of its own. What is not known is text: the text that the database has for it.

Source: the tables "Values" of docs/capture.md, docs/capture-mysql.md and docs/capture-sqlite.md.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal[
    "int16",
    "int32",
    "int64",
    "uint64",
    "float32",
    "float64",
    "decimal",
    "boolean",
    "bytes",
    "text",
    "date",
    "time",
    "timestamp",
    "timestamptz",
    "interval",
    "uuid",
    "json",
    "array",
]
DECIMAL_DIGITS_MAX = 38  # of Arrow, Spark, Iceberg and Delta


@dataclass(frozen=True, slots=True)
class CapturedType:
    """The type of a column. ``native`` is its name in the source.

    ``precision`` and ``scale`` are those of a decimal, where the definition has them; ``element`` is of an array.
    """

    kind: Kind
    native: str
    precision: int | None = None
    scale: int | None = None
    element: CapturedType | None = None

    @property
    def is_narrow_decimal(self) -> bool:
        """Whether it is a decimal whose digits fit into those that lakes have."""
        return (
            self.kind == "decimal"
            and self.precision is not None
            and self.precision <= DECIMAL_DIGITS_MAX
        )


def captured_type(connector: str, column: Mapping[str, Any]) -> CapturedType:
    """Return the type of a column of a definition; ``connector`` is the kind of database."""
    native = str(column["type"])
    if connector in ("mariadb", "mysql"):
        return _of_mariadb(native)
    if connector == "sqlite":
        return CapturedType(_affinity(native), native)
    return _of_postgres(native, column.get("length"), column.get("scale"))


# ── PostgreSQL ────────────────────────────────────────────────────────────────────────────────

_POSTGRES: dict[str, Kind] = {
    "int2": "int16",
    "int4": "int32",
    "int8": "int64",
    "oid": "int64",
    "float4": "float32",
    "float8": "float64",
    "numeric": "decimal",
    "bool": "boolean",
    "bytea": "bytes",
    "date": "date",
    "time": "time",
    "timestamp": "timestamp",
    "timestamptz": "timestamptz",
    "interval": "interval",
    "uuid": "uuid",
    "json": "json",
    "jsonb": "json",
}


def _of_postgres(native: str, length: int | None, scale: int | None) -> CapturedType:
    if native.startswith("_"):
        return CapturedType("array", native, element=_of_postgres(native[1:], length, scale))
    kind = _POSTGRES.get(native, "text")
    if kind == "decimal":
        return CapturedType(kind, native, length, scale)
    return CapturedType(kind, native)


# ── MariaDB ───────────────────────────────────────────────────────────────────────────────────

_MARIADB: dict[str, Kind] = {
    "tinyint": "int16",
    "boolean": "int16",
    "smallint": "int16",
    "mediumint": "int32",
    "int": "int32",
    "integer": "int32",
    "bigint": "int64",
    "year": "int32",
    "float": "float32",
    "double": "float64",
    "decimal": "decimal",
    "numeric": "decimal",
    "date": "date",
    "datetime": "timestamp",
    "timestamp": "timestamptz",
    "time": "int64",
    "binary": "bytes",
    "varbinary": "bytes",
    "tinyblob": "bytes",
    "blob": "bytes",
    "mediumblob": "bytes",
    "longblob": "bytes",
    "uuid": "uuid",
}
_UNSIGNED: dict[Kind, Kind] = {"int16": "int32", "int32": "int64", "int64": "uint64"}
_MARIADB_TYPE = re.compile(r"([a-z0-9]+)(?:\((\d+)(?:,(\d+))?\))?(.*)", re.DOTALL)


def _of_mariadb(native: str) -> CapturedType:
    parts = _MARIADB_TYPE.match(native.lower())
    if parts is None:
        return CapturedType("text", native)
    kind = _MARIADB.get(parts[1], "text")
    if "unsigned" in parts[4]:
        kind = _UNSIGNED.get(kind, kind)
    if kind == "decimal":
        return CapturedType(kind, native, int(parts[2] or 10), int(parts[3] or 0))
    return CapturedType(kind, native)


# ── SQLite ────────────────────────────────────────────────────────────────────────────────────


def _affinity(declared: str) -> Kind:
    """Return what a declared type lets expect: SQLite's "Determination Of Column Affinity"."""
    name = declared.upper()
    if "INT" in name:
        return "int64"
    if any(part in name for part in ("CHAR", "CLOB", "TEXT")):
        return "text"
    if "BLOB" in name:
        return "bytes"
    if any(part in name for part in ("REAL", "FLOA", "DOUB")):
        return "float64"
    return "text"


# ── values ────────────────────────────────────────────────────────────────────────────────────


def text_of(value: Any) -> str:
    """Return a captured value as text: what is no text is JSON."""
    if isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


_FRACTION = re.compile(r"(\d\d:\d\d:\d\d)\.(\d+)")


def comparable(kind: CapturedType, value: Any) -> Any:
    """Return a captured value in the one form that equal values of different databases have."""
    if value is None:
        return None
    if kind.kind in ("timestamp", "timestamptz", "time") and isinstance(value, str):
        return _FRACTION.sub(_trimmed, value)
    if kind.kind in ("float32", "float64") and isinstance(value, int | float):
        return float(value) + 0.0  # -0.0 is 0.0, and not every database keeps its sign
    if kind.kind == "text":
        return text_of(value)
    if kind.kind == "array" and kind.element is not None and isinstance(value, list):
        return [comparable(kind if isinstance(one, list) else kind.element, one) for one in value]
    return value


def _trimmed(found: re.Match[str]) -> str:
    fraction = found[2].rstrip("0")
    return f"{found[1]}.{fraction}" if fraction else found[1]
