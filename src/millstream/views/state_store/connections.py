"""Connections to a view store's SQLite file: durable settings, reader connections, translated errors.

The writer has one connection; every reading call takes a connection of its own for one short
transaction, which sees one consistent state whatever the writer does meanwhile. Everything that
SQLite raises leaves through :func:`translate_errors`.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from decimal import Decimal
from pathlib import Path
from threading import Lock

from millstream.errors import ConfigError, CorruptionError, MillstreamError, RetriableError
from millstream.log.files import DISK
from millstream.sqlite_mode import write_ahead
from millstream.views.runs.control_files import reset_command
from millstream.views.state_store.view_table import DECIMAL_ORDER

# A commit of 100,000 rows writes 10 to 20 MB; moving the log into the file every 64 MB instead of
# SQLite's 4 MB keeps that out of most commits.
_CHECKPOINT_PAGES = 16_384
_JOURNAL_BYTES_MAX = 64 << 20
_CACHE_KIB = 64 << 10
_BUSY_TIMEOUT_S = 30.0


@contextmanager
def translate_errors(path: Path) -> Iterator[None]:
    """Turn what SQLite raises into the errors of this package.

    Raises:
        RetriableError: The file is locked, or the disk is full or failing.
        CorruptionError: The file is damaged, or no view store.
        ConfigError: The file cannot be opened, or a value is too large to keep.
    """
    try:
        yield
    except sqlite3.Error as error:
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        detail = f"SQLite says: {error}."
        if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            raise RetriableError(
                f"{path} is locked by another process. Try again, or close it. {detail}"
            ) from error
        if code in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR):
            raise RetriableError(
                f"Writing to {path} failed and nothing of the batch was kept. Free some space or "
                f"repair the disk, then run again. {detail}"
            ) from error
        if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
            raise CorruptionError(
                f"{path} is damaged or is no view store. Keep a copy; to start over from the log: "
                f"{reset_command(path.parent)}. {detail}"
            ) from error
        if code in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM):
            raise ConfigError(
                f"{path} cannot be opened as needed. Check that it exists and may be read and "
                f"written by you. {detail}"
            ) from error
        if code == sqlite3.SQLITE_TOOBIG:
            raise ConfigError(
                f"A value is too large for {path}: at most 1,000,000,000 bytes. {detail}"
            ) from error
        raise MillstreamError(f"{path} could not be used as a view store. {detail}") from error


def open_writer(path: Path) -> sqlite3.Connection:
    """Open the file for writing, creating it and its folders durably."""
    created = not path.exists()
    folders = [folder for folder in path.parents if not folder.exists()]
    path.parent.mkdir(parents=True, exist_ok=True)
    connection = _connect(path, "rwc")
    write_ahead(connection)
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute(f"PRAGMA wal_autocheckpoint = {_CHECKPOINT_PAGES}")
    connection.execute(f"PRAGMA journal_size_limit = {_JOURNAL_BYTES_MAX}")
    connection.execute("PRAGMA temp_store = MEMORY")
    if created:
        # The names of new files and folders are durable only once the folder that holds them is.
        for folder in {path.parent, *(made.parent for made in folders)}:
            DISK.sync_folder(folder)
    return connection


def _connect(path: Path, mode: str) -> sqlite3.Connection:
    # The path goes into a URI: these three characters would end or change it.
    escaped = str(path.absolute()).replace("%", "%25").replace("?", "%3f").replace("#", "%23")
    connection = sqlite3.connect(
        f"file:{escaped}?mode={mode}",
        uri=True,
        isolation_level=None,
        check_same_thread=False,
        timeout=_BUSY_TIMEOUT_S,
        cached_statements=256,
    )
    connection.execute(f"PRAGMA cache_size = -{_CACHE_KIB}")
    # Also for a writer: a switch reads a view to find what differs from its new rows.
    connection.create_collation(DECIMAL_ORDER, _compare_decimals)
    return connection


def _compare_decimals(one: str, other: str) -> int:
    first, second = Decimal(one), Decimal(other)
    return (first > second) - (first < second)


class ReadConnections:
    """A pool of connections for reading; each is used by one call at a time.

    Guarantees: thread-safe; a connection of the pool is inside one read transaction, so all that a call
    reads belongs to one commit. With ``follows``, a file that was deleted and created again is opened
    again; SQLite would go on reading the deleted one.
    """

    def __init__(self, path: Path, *, follows: bool = False) -> None:
        self._path = path
        self._follows = follows
        self._idle: list[tuple[int | None, sqlite3.Connection]] = []  # each with its file's inode
        self._lock = Lock()
        self._closed = False

    @contextmanager
    def snapshot(self) -> Iterator[sqlite3.Connection]:
        """Take a connection from the pool, within one read transaction, until the block ends."""
        with self._lock:
            if self._closed:
                raise ConfigError(f"The view store {self._path} is closed. Open it again.")
        # Read before a connection is opened: if the file is replaced in between, the next call sees it.
        inode = self._inode()
        connection = self._reuse(inode)
        with translate_errors(self._path):
            connection = connection or _connect(self._path, "ro")
            try:
                connection.execute("BEGIN")
                yield connection
            finally:
                self._release(inode, connection)

    def _inode(self) -> int | None:
        if not self._follows:
            return None
        try:
            return self._path.stat().st_ino
        except FileNotFoundError:  # opening it says so
            return None

    def _reuse(self, inode: int | None) -> sqlite3.Connection | None:
        """Take an idle connection to this file, and close those to another."""
        with self._lock:
            others = [connection for number, connection in self._idle if number != inode]
            self._idle = [one for one in self._idle if one[0] == inode]
            found = self._idle.pop()[1] if self._idle else None
        for connection in others:
            connection.close()
        return found

    def _release(self, inode: int | None, connection: sqlite3.Connection) -> None:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        with self._lock:
            if not self._closed:
                self._idle.append((inode, connection))
                return
        connection.close()

    def close(self) -> None:
        """Close all idle connections; those in use are closed when their block ends."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for _, connection in idle:
            connection.close()
