"""Databases that projections are kept in: SQLite files and PostgreSQL, each with one transaction at a time.

Both change tables and views within a transaction, so data, position and the switch to a rebuilt projection
are committed together.
"""

from __future__ import annotations

import sqlite3
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from millstream.errors import ConfigError, RetriableError
from millstream.sqlite_mode import write_ahead
from millstream.views.address import postgres_address
from millstream.views.postgres.connection import PostgresConnection

LOCK_TIMEOUT_S = 60.0  # for another process to end its transaction


class ProjectionTarget(ABC):
    """One database. Thread-safe: one transaction at a time."""

    shown: str
    """Its address, without a password."""

    @abstractmethod
    def transaction(self) -> Any:
        """Return a block with a cursor, committed at its end; nobody else writes the positions meanwhile."""

    @abstractmethod
    def close(self) -> None:
        """Close the connection."""

    @abstractmethod
    def overwrite_deleted(self) -> None:
        """Have the bytes of deleted rows overwritten, as far as the database does that on request."""

    @staticmethod
    @abstractmethod
    def sql(statement: str) -> str:
        """Return a statement with ``?`` in this database's form."""


class SqliteProjectionTarget(ProjectionTarget):
    """A SQLite file. What is committed survives the loss of power."""

    def __init__(self, path: Path) -> None:
        self.shown = str(path)
        self._lock = threading.Lock()
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._db = sqlite3.connect(
                path, timeout=LOCK_TIMEOUT_S, isolation_level=None, check_same_thread=False
            )
            write_ahead(self._db)
            self._db.execute("PRAGMA secure_delete = ON")  # what is forgotten is overwritten
        except sqlite3.Error as error:
            raise ConfigError(f"the projections' file {path} cannot be opened: {error}") from error

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Cursor]:
        with self._lock:
            cursor = self._db.cursor()
            try:
                cursor.execute("BEGIN IMMEDIATE")
            except sqlite3.OperationalError as error:
                raise RetriableError(
                    f"{self.shown} could not be written to: {error}. Another process has it, which may have been "
                    "stopped in the middle; have it go on, or end it, and try again"
                ) from error
            try:
                yield cursor
            except BaseException:
                self._db.rollback()
                raise
            try:
                self._db.commit()
            except sqlite3.Error as error:
                self._db.rollback()
                raise RetriableError(
                    f"{self.shown} could not commit: {error}; try again"
                ) from error

    def overwrite_deleted(self) -> None:
        with self._lock:
            self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    @staticmethod
    def sql(statement: str) -> str:
        return statement

    def close(self) -> None:
        with self._lock:
            self._db.close()


class PostgresProjectionTarget(ProjectionTarget):
    """A PostgreSQL database."""

    def __init__(self, url: str) -> None:
        address = postgres_address(url)
        self.shown = address.shown
        self._connection = PostgresConnection(address, readonly=False)

    @contextmanager
    def transaction(self) -> Iterator[Any]:
        with self._connection.transaction() as session:
            # One at a time for the whole database, as in SQLite; the number is that of this lock.
            session.execute("SELECT pg_advisory_xact_lock(%s)", (_LOCK,))
            yield session.cursor()

    def overwrite_deleted(self) -> None:
        """Leave it to the server, whose vacuum frees the rows and whose disk is its own."""

    @staticmethod
    def sql(statement: str) -> str:
        return statement.replace("?", "%s")

    def close(self) -> None:
        self._connection.close()


_LOCK = 0x6D696C6C73  # "mills"


def open_target(into: str | Path) -> ProjectionTarget:
    """Return the database at a path of SQLite, or at a URL of PostgreSQL.

    Raises:
        ConfigError: it cannot be opened.
    """
    if isinstance(into, str) and "://" in into:
        return PostgresProjectionTarget(into)
    return SqliteProjectionTarget(Path(into))


class ProjectionTables:
    """What a projection writes with: statements on its own tables, in the transaction of its position.

    In a statement, ``{name}`` stands for the table of that name.
    """

    def __init__(self, cursor: Any, names: dict[str, str]) -> None:
        self._cursor = cursor
        self._names = names
        self._known: dict[str, str] = {}

    def execute(self, statement: str, parameters: Sequence[Any] = ()) -> Any:
        """Execute a statement of the database, with its own marks for parameters; return the cursor."""
        known = self._known.get(statement)
        if known is None:
            known = statement
            for name, real in self._names.items():
                known = known.replace("{" + name + "}", f'"{real}"')
            self._known[statement] = known
        self._cursor.execute(known, tuple(parameters))
        return self._cursor
