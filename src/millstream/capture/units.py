"""What a source gives: units, each a transaction, a chunk of a snapshot, or progress alone.

A unit's contents and the progress after it belong together: whoever stores them stores both, or none.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import pyarrow as pa

UnitKind = Literal["transaction", "snapshot", "progress"]
Operation = Literal["c", "u", "d", "r", "t"]
Progress: TypeAlias = dict[str, Any]
"""How far a source has been read: JSON, which only the source understands."""


@dataclass(frozen=True, slots=True)
class TableChange:
    """A row created, updated, deleted or read (``r``), or a table truncated (``t``).

    A column that the source did not give is absent from the row, which is not the same as null.
    """

    database: str
    table: str
    op: Operation
    key: tuple[str, ...]
    """The names of the columns of the key."""
    before: dict[str, Any] | None = None
    after: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class RowBlock:
    """Many rows of one table, with one operation: what as many :class:`TableChange` say, as JSON.

    ``rows`` are those after it, of ``d`` those before it. Each has these columns.
    """

    database: str
    table: str
    op: Literal["c", "u", "d", "r"]
    columns: frozenset[str]
    rows: pa.Array
    keys: pa.Array | None
    """None of a table without a key."""
    before: pa.Array | None = None
    """Of ``u``, where the source has them: the rows before it, with the keys and columns of those after it."""

    def changes(self) -> Iterator[TableChange]:
        """Yield what it says row by row: for what looks at values."""
        key = (
            ()
            if self.keys is None or not len(self.keys)
            else tuple(json.loads(self.keys[0].as_py()))
        )
        rows = [json.loads(text) for text in self.rows.to_pylist()]
        absent = [None] * len(rows)
        old = absent if self.before is None else map(json.loads, self.before.to_pylist())
        pairs = zip(rows, absent, strict=True) if self.op == "d" else zip(old, rows, strict=True)
        for before, after in pairs:
            yield TableChange(self.database, self.table, self.op, key, before, after)


@dataclass(frozen=True, slots=True)
class TableDefinition:
    """A table is defined, or altered, from here on; ``dropped`` has no columns.

    ``placed``: the table is so at the place of the unit, whenever that is read; else it is so when the unit is read.
    """

    database: str
    table: str
    columns: tuple[dict[str, Any], ...]
    key: tuple[str, ...]
    statement: str = ""
    """The DDL, where the source has it."""
    dropped: bool = False
    placed: bool = False


@dataclass(frozen=True, slots=True)
class LoggedMessage:
    """A message that an application wrote into the database's log, within its transaction."""

    prefix: str
    data: bytes


UnitContent: TypeAlias = TableChange | RowBlock | TableDefinition | LoggedMessage


def content_rows(content: UnitContent) -> int:
    """Return how many rows a content is about; at least one."""
    return max(1, len(content.rows)) if isinstance(content, RowBlock) else 1


@dataclass(slots=True)
class CaptureUnit:
    """A transaction, a chunk of a snapshot, or progress alone, from a source.

    ``contents`` are read once, and to their end; then ``progress`` is that after the unit. ``position`` identifies the
    unit in the source.
    """

    kind: UnitKind
    position: str
    timestamp_ms: int
    contents: Iterator[UnitContent]
    progress: Progress = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)
    """What more its changes have in ``source``. With ``db``, the ``database`` of a change is a schema of that."""
