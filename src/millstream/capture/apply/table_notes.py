"""Captured tables as JSON, for a run that has to do again what an earlier one had committed."""

from __future__ import annotations

from typing import Any

from millstream.capture.apply.applied_table import AppliedTable
from millstream.capture.apply.captured_types import CapturedType


def note_of(table: AppliedTable) -> dict[str, Any]:
    """Return a table as JSON has it, to make it again in another run."""
    return {
        "connector": table.connector,
        "database": table.database,
        "table": table.table,
        "columns": [[name, _type_note(kind)] for name, kind in table.columns],
        "key": list(table.key),
        "offset": table.offset,
    }


def _type_note(kind: CapturedType) -> dict[str, Any]:
    return {
        "kind": kind.kind,
        "native": kind.native,
        "precision": kind.precision,
        "scale": kind.scale,
        "element": None if kind.element is None else _type_note(kind.element),
    }


def table_from_note(note: dict[str, Any]) -> AppliedTable:
    """Return the table of :func:`note_of`."""
    columns = tuple((name, _type_from(kind)) for name, kind in note["columns"])
    return AppliedTable(
        note["connector"],
        note["database"],
        note["table"],
        columns,
        tuple(note["key"]),
        note["offset"],
    )


def _type_from(note: dict[str, Any]) -> CapturedType:
    element = note["element"]
    return CapturedType(
        note["kind"],
        note["native"],
        note["precision"],
        note["scale"],
        None if element is None else _type_from(element),
    )
