"""A captured table as targets know it, and how one definition of it differs from the next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeAlias

from millstream.capture.apply.captured_types import CapturedType

Row: TypeAlias = dict[str, Any]
"""A row, or its key: captured values by the names of columns."""


@dataclass(frozen=True)
class AppliedTable:
    """A table by one of its definitions. ``database`` is the schema, where the database has schemas.

    ``offset`` is that of the definition in its topic.
    """

    connector: str
    database: str
    table: str
    columns: tuple[tuple[str, CapturedType], ...]
    key: tuple[str, ...]
    offset: int = field(compare=False)

    @property
    def collection(self) -> str:
        """The name of the table in the log."""
        return f"{self.database}.{self.table}"

    @cached_property
    def types(self) -> dict[str, CapturedType]:
        return dict(self.columns)

    @cached_property
    def names(self) -> frozenset[str]:
        return frozenset(self.types)


@dataclass(frozen=True)
class TableDifference:
    """What the second of two definitions has that the first had not."""

    added: tuple[tuple[str, CapturedType], ...]
    retyped: tuple[tuple[str, CapturedType, CapturedType], ...]
    rekeyed: bool


def difference(before: AppliedTable, after: AppliedTable) -> TableDifference:
    """Return how a table changed. Columns that were dropped are no difference: targets keep them."""
    return TableDifference(
        tuple((name, kind) for name, kind in after.columns if name not in before.types),
        tuple(
            (name, before.types[name], kind)
            for name, kind in after.columns
            if name in before.types and before.types[name] != kind
        ),
        before.key != after.key,
    )


@dataclass(frozen=True)
class RowBatch:
    """The last state of some keys of a table, each key once: whole rows, and keys of rows that are gone.

    A target deletes first: a database may hold two spellings of a key to be equal.
    """

    table: AppliedTable
    upserts: Sequence[Row]
    deletes: Sequence[Row]
