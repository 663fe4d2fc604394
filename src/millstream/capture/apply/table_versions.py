"""The definitions of captured tables, and which of them a row was written by.

Definitions are in a topic of their own. One that was written with a transaction has its position, and holds from
that transaction on. One that was written alone has no place among the transactions: it holds from the first row on
that has its columns. Within the transaction that alters a table, rows of both definitions may come: each row has
all columns of its own, or names them as unavailable.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from millstream.capture.apply.applied_table import AppliedTable
from millstream.capture.apply.captured_types import CapturedType, captured_type
from millstream.errors import CorruptionError


@dataclass
class _Versions:
    """Those of one table: up to ``holds`` for sure, up to ``reached`` if the row's columns say so."""

    all: list[AppliedTable] = field(default_factory=list)
    holds: int = 0
    reached: int = 0
    known: dict[tuple[str, ...], AppliedTable] = field(default_factory=dict)

    def of(self, columns: tuple[str, ...]) -> AppliedTable | None:
        found = self.known.get(columns)
        if found is not None:
            return found
        wanted = frozenset(columns)
        within = range(self.reached, self.holds - 1, -1)
        for number in (*within, *range(self.reached + 1, len(self.all))):
            if number < len(self.all) and self.all[number].names == wanted:
                if number > self.reached:
                    self.holds = self.reached = number
                    self.known.clear()
                return self.known.setdefault(columns, self.all[number])
        return None


@dataclass
class TableVersions:
    """The definitions that were read. ``read_more`` reads those that are new, and gives each to :meth:`add`."""

    topic: str
    read_more: Callable[[], None]
    _tables: dict[str, _Versions] = field(default_factory=dict)
    _at: dict[str, list[tuple[_Versions, int]]] = field(default_factory=dict)
    _begun: list[_Versions] = field(default_factory=list)

    def add(self, offset: int, found: Any) -> None:
        """Take a record of the topic of definitions.

        Raises:
            CorruptionError: it is not one that capture writes.
        """
        if found is None:
            return
        try:
            database, position = found["databaseName"], found["source"]["position"]
            for changed in found["tableChanges"]:
                name = changed["id"].removeprefix(f'"{database}"."').removesuffix('"')
                if changed["table"] is not None:
                    versions = self._tables.setdefault(f"{database}.{name}", _Versions())
                    table = _table(
                        found["source"]["connector"],
                        database,
                        name,
                        changed,
                        offset=offset,
                        earlier=versions.all,
                    )
                    self._at.setdefault(position, []).append((versions, len(versions.all)))
                    versions.all.append(table)
        except (KeyError, TypeError, IndexError) as error:
            raise CorruptionError(
                f"the record at offset {offset} of {self.topic!r} is no definition that capture writes "
                f"({type(error).__name__}: {error}). Apply topics that `millstream capture` has written, and no other "
                "program."
            ) from error

    def resume(self, collection: str, offset: int) -> AppliedTable:
        """Return the definition at an offset, which holds from here on.

        Raises:
            CorruptionError: it is not there.
        """
        versions = self._tables.get(collection, _Versions())
        for number, version in enumerate(versions.all):
            if version.offset == offset:
                versions.holds = versions.reached = number
                return version
        raise CorruptionError(
            f"the definition of {collection} at offset {offset} of {self.topic!r}, by which it was applied, is not there. "
            "Apply into another target, from the beginning."
        )

    def current(self) -> list[AppliedTable]:
        """Return the definition that holds now of each table, by name."""
        return [one.all[one.holds] for _, one in sorted(self._tables.items())]

    def last(self, collection: str) -> AppliedTable | None:
        """Return the definition of a table that was read last; None if there is none."""
        versions = self._tables.get(collection)
        return None if versions is None else versions.all[-1]

    def holding(self) -> dict[str, int]:
        """Return the offsets of the definitions that hold now, of tables that were altered, by name."""
        return {name: one.all[one.holds].offset for name, one in self._tables.items() if one.holds}

    def first(self, collection: str) -> AppliedTable:
        """Return the definition that holds now: of a table's names and connector, whatever its columns are.

        Raises:
            CorruptionError: there is none.
        """
        if collection not in self._tables:
            self.read_more()
        versions = self._tables.get(collection)
        if versions is None:
            raise CorruptionError(
                f"{self.topic!r} has no definition of {collection}, which has changes. The topic was made anew, or lost "
                "its beginning. Capture into another name, from a new snapshot."
            )
        return versions.all[versions.holds]

    def begin(self, position: str) -> None:
        """Let the definitions that were written with a transaction hold for it."""
        for versions, number in self._at.get(position, ()):
            if number > versions.reached:
                versions.reached = number
                versions.known.clear()
                self._begun.append(versions)

    def end(self) -> None:
        """Let only the last definition of the transaction hold from here on."""
        for versions in self._begun:
            versions.holds = versions.reached
            versions.known.clear()
        self._begun.clear()

    def of_row(self, collection: str, columns: tuple[str, ...]) -> AppliedTable:
        """Return the definition that a row with these columns was written by.

        Raises:
            CorruptionError: there is none.
        """
        self.first(collection)
        versions = self._tables[collection]
        found = versions.of(columns)
        if found is None:
            self.read_more()
            found = versions.of(columns)
        if found is None:
            raise CorruptionError(
                f"a row of {collection} has the columns {', '.join(columns)}, and no definition in {self.topic!r} has "
                "these. Capture into another name, from a new snapshot."
            )
        return found


def _table(
    connector: str,
    database: str,
    name: str,
    changed: dict[str, Any],
    *,
    offset: int,
    earlier: Sequence[AppliedTable],
) -> AppliedTable:
    described = changed["table"]
    columns = tuple(
        (one["name"], _known_type(one, earlier) or captured_type(connector, one))
        for one in described["columns"]
    )
    key = tuple(described["primaryKeyColumnNames"])
    return AppliedTable(connector, database, name, columns, key, offset)


def _known_type(column: dict[str, Any], earlier: Sequence[AppliedTable]) -> CapturedType | None:
    """Return what a column was before, where the source had dropped it by the time that it was defined."""
    if column["type"] is not None:
        return None
    name = column["name"]
    return next((one.types[name] for one in reversed(earlier) if name in one.types), None)
