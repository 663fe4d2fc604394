"""A snapshot of a SQLite database, to compare a target with.

Capture makes one transaction of all changes between two of its looks, and a snapshot may be between two looks, too. So
it is asked whether a transaction of the log ends where the snapshot is; another one is taken if not. Nobody waits for
that. While the tables are read, writers of a database in the journal mode WAL go on; in others they wait.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from millstream.capture.apply.applied_table import AppliedTable, Row
from millstream.capture.apply.change_stream import SourceTransaction
from millstream.capture.sqlite.change_table import MARK, last_change
from millstream.capture.sqlite.encoding import json_value, quote_identifier
from millstream.capture.sqlite.table_info import SqliteTable, read_tables
from millstream.capture.sqlite.triggers import CHANGES
from millstream.capture.table_patterns import TablePatterns
from millstream.errors import ConfigError, RetriableError

_BUSY_S = 5.0


class ComparedSqlite:
    """See :class:`millstream.capture.apply.compared_source.ComparedSource`."""

    wait_s = 30.0

    def __init__(self, path: Path, wanted: TablePatterns) -> None:
        self.shown = str(path)
        try:
            uri = path.resolve().as_uri() + "?mode=rw"
            self._reader = sqlite3.connect(uri, uri=True, timeout=_BUSY_S, isolation_level=None)
            self._reader.execute("BEGIN")
            self._last = last_change(self._reader).seq
            self._tables = read_tables(self._reader, lambda table: wanted("main", table))
        except sqlite3.OperationalError as error:
            if getattr(error, "sqlite_errorname", "").startswith("SQLITE_BUSY"):
                raise RetriableError(
                    f"{self.shown} is locked by a writer. Run it again."
                ) from error
            raise ConfigError(
                f"{self.shown} is no database that is captured: {error}. Give the one that the capture reads."
            ) from error
        self.position = str(self._last)

    def close(self) -> None:
        self._reader.close()

    def columns(self, table: AppliedTable) -> tuple[str, ...]:
        found = self._tables.get(table.table)
        return () if found is None else found.column_names

    def rows(self, table: AppliedTable) -> Iterator[Row]:
        found = self._tables.get(table.table)
        if found is None:
            return
        names = found.column_names
        columns = ", ".join(map(quote_identifier, names))
        for row in self._reader.execute(
            f"SELECT {columns} FROM {quote_identifier(found.name)}"  # noqa: S608 - quoted
        ):
            yield _captured(found, names, row)

    def is_covered(self, progress: dict[str, Any]) -> bool:
        return bool(progress["seq"] >= self._last)

    def is_after(self, transaction: SourceTransaction) -> bool:
        return _last_change_of(transaction.position) > self._last

    def is_at(self, position: str) -> bool:
        """Say so if there is no change between the last one of that transaction and the snapshot."""
        found = self._reader.execute(
            f"SELECT 1 FROM {CHANGES} WHERE seq > ? AND seq <= ? AND op NOT IN ('?', ?) LIMIT 1",  # noqa: S608 - our name
            (_last_change_of(position), self._last, MARK),
        ).fetchone()
        return found is None


def _last_change_of(position: str) -> int:
    """Return the number of the last change of a transaction; of a chunk, of the last change before it."""
    return int(position.partition("/")[0] or 0)


def _captured(table: SqliteTable, names: tuple[str, ...], row: tuple[Any, ...]) -> Row:
    return {
        name: json_value(value, is_blob=table.is_blob(name))
        for name, value in zip(names, row, strict=True)
    }
