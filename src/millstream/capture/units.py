"""What a source gives: units, each a transaction, a chunk of a snapshot, or progress alone.

A unit's contents and the progress after it belong together: whoever stores them stores both, or none.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

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
class TableDefinition:
    """A table is defined, or altered, from here on; ``dropped`` has no columns."""

    database: str
    table: str
    columns: tuple[dict[str, Any], ...]
    key: tuple[str, ...]
    statement: str = ""
    """The DDL, where the source has it."""
    dropped: bool = False


@dataclass(frozen=True, slots=True)
class LoggedMessage:
    """A message that an application wrote into the database's log, within its transaction."""

    prefix: str
    data: bytes


UnitContent: TypeAlias = TableChange | TableDefinition | LoggedMessage


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
