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
from millstream.capture.sqlite.change_table import MARK, capture_id, last_change
from millstream.capture.sqlite.encoding import json_value, quote_identifier
from millstream.capture.sqlite.table_info import SqliteTable, read_tables
from millstream.capture.sqlite.triggers import CHANGES
from millstream.capture.table_patterns import TablePatterns
from millstream.capture.units import Progress
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
            self._id = capture_id(self._reader)
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

    def tables(self, progress: Progress) -> dict[tuple[str, str], bool]:
        return {("main", name): "read" in table for name, table in progress["tables"].items()}

    def refuse_other(self, progress: Progress) -> None:
        """Return by the last change that was captured: a capture that goes on deletes it, and then has later ones."""
        found = self._reader.execute(
            f"SELECT nonce FROM {CHANGES} WHERE seq = ?",  # noqa: S608 - our own name
            (progress["seq"],),
        ).fetchone()
        gone_back = found is None and self._last < progress["seq"]
        if self._id != progress["id"] or gone_back or (found and found[0] != progress["nonce"]):
            raise ConfigError(
                f"{self.shown} is not the database that the capture reads, or does not have change {progress['seq']}, which was "
                "captured: it is another file, was restored from a backup, or another capture of it has begun. Give the file that "
                "the capture reads; if it is that one, capture it under a new name, and apply that to a new target."
            )

    def has(self, position: str) -> bool:
        return _last_change_of(position) <= self._last

    def columns(self, table: AppliedTable) -> tuple[str, ...]:
        found = self._tables.get(table.table)
        return () if found is None else found.column_names

    def rows(self, table: AppliedTable) -> Iterator[Row]:
        found = self._tables[table.table]
        names = found.column_names
        columns = ", ".join(map(quote_identifier, names))
        for row in self._reader.execute(
            f"SELECT {columns} FROM {quote_identifier(found.name)}"  # noqa: S608 - quoted
        ):
            yield _captured(found, names, row)

    def is_covered(self, progress: Progress) -> bool:
        return bool(progress["seq"] >= self._last)

    def is_after(self, transaction: SourceTransaction) -> bool:
        return not self.has(transaction.position)

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
