"""What a captured table is in its database: its key and columns, by the definition that capture wrote last.

=====================================  ==================================================================
the declaration says                   and the definition
=====================================  ==================================================================
a key                                  is compared with it, where there is one: it may be declared first
no key, or no schema                   gives it
=====================================  ==================================================================

Whatever was compared here, each record's key is compared again where it is decoded: a key may change later.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import date, datetime
from pathlib import Path
from typing import Any

from millstream.capture.apply.applied_table import AppliedTable
from millstream.capture.apply.captured_types import CapturedType, Kind
from millstream.capture.apply.table_versions import TableVersions
from millstream.capture.envelope import CaptureTopics
from millstream.client.address import is_kafka, shown
from millstream.client.open import open_reader
from millstream.errors import ConfigError

_HINTS: Mapping[Kind, type] = {
    "int16": int,
    "int32": int,
    "int64": int,
    "uint64": int,
    "float32": float,
    "float64": float,
    "boolean": bool,
    "bytes": bytes,
    "date": date,
    "timestamp": datetime,
    "timestamptz": datetime,
}


def declared_by_database(
    log: Path | str,
    capture: str,
    table: str,
    key: tuple[str, ...] | None,
    schema: Any,
) -> tuple[tuple[str, ...], Any]:
    """Return key and schema of a captured table: those given, or those of the database.

    Args:
        capture: The name of the capture.
        table: Its name in the log, such as ``public.orders``.

    Raises:
        ConfigError: the key is another one than the database's, or is not given and not known.
    """
    needed = key is None or schema is None
    if not needed and is_kafka(str(log)):
        return key or (), schema  # a declaration waits for no broker
    found = last_definition(log, capture, table)
    if found is None:
        if needed:
            raise ConfigError(
                f"The table {table!r} has no {'key' if key is None else 'schema'}, and {shown(log)!r} has no definition of it "
                f"by the capture {capture!r}. Give key= and the columns; or run the capture first."
            )
        return key or (), schema
    if key is not None and set(key) != set(found.key):
        raise ConfigError(refused_key(table, key, found.key))
    if not found.key:
        raise ConfigError(refused_key(table, key or (), ()))
    return key or found.key, schema_of_table(found) if schema is None else schema


def refused_key(table: str, declared: tuple[str, ...], actual: tuple[str, ...]) -> str:
    """Say that a table's key is not the one that it was declared with."""
    said = f"is declared with the key {', '.join(declared)}, and" if declared else "has no key, as"
    known = f"the key {', '.join(actual)}" if actual else "none"
    remedy = "leave key= out, which takes it" if actual else "give it a primary key, and capture it"
    return f"The table {table!r} {said} its database has {known}. With another key, rows would replace each other: {remedy}."


def last_definition(log: Path | str, capture: str, table: str) -> AppliedTable | None:
    """Return the last definition of a table; None where the log has none."""
    topic = CaptureTopics(capture).schema
    if not is_kafka(str(log)) and not Path(log).is_dir():
        return None
    reader = open_reader(log)
    try:
        if topic not in reader.topics():
            return None
        versions = TableVersions(topic, lambda: None)
        start, end = reader.offsets(topic)[0]
        for batch in reader.read(topic, 0, start, end, columns=("offset", "value")):
            columns = (batch.column(name).to_pylist() for name in ("offset", "value"))
            for offset, value in zip(*columns, strict=True):
                versions.add(offset, None if value is None else json.loads(value))
        return versions.last(table)
    finally:
        reader.close()


def schema_of_table(table: AppliedTable) -> dict[str, Any]:
    """Return the columns of a table and their types; all but those of the key may be null."""
    return {
        name: hint if name in table.key else hint | None
        for name, hint in ((name, _hint(kind)) for name, kind in table.columns)
    }


def _hint(kind: CapturedType) -> Any:
    """Return the type of a column. Decimals are text: a definition need not say how many digits they have."""
    if kind.element is not None:
        return list[_hint(kind.element) | None]  # type: ignore[misc]
    return _HINTS.get(kind.kind, str)
