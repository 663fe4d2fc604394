"""``control.db``: everything that the log must know besides its records, in one SQLite file.

WAL mode with synchronous=FULL: a commit that returned survives a power cut, and one commit may hold several
changes that must become visible together (a transaction's decision, the offsets of a group, a fence). Topics
are kept by ``topics``, groups by ``groups``, producers and transactions by ``transactions``; each brings its
own tables. The owner writes; readers in other processes read, and commit the offsets of groups.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from millstream.errors import (
    ConfigError,
    CorruptionError,
    DiskFullError,
    MillstreamError,
    RetriableError,
)
from millstream.sqlite_mode import write_ahead

CONTROL_NAME = "control.db"
_WAIT_S = 30  # for another process to finish its commit
_TABLES = """
CREATE TABLE IF NOT EXISTS folder (key TEXT PRIMARY KEY, value INTEGER NOT NULL) STRICT;
CREATE TABLE IF NOT EXISTS topics (
    name TEXT PRIMARY KEY, topic_id TEXT NOT NULL UNIQUE, config TEXT NOT NULL,
    deleted INTEGER NOT NULL DEFAULT 0) STRICT;
CREATE TABLE IF NOT EXISTS partitions (
    topic_id TEXT NOT NULL REFERENCES topics (topic_id) ON DELETE CASCADE,
    partition INTEGER NOT NULL, slot INTEGER NOT NULL UNIQUE,
    PRIMARY KEY (topic_id, partition)) STRICT;
CREATE TABLE IF NOT EXISTS group_offsets (
    group_name TEXT NOT NULL,
    topic_id TEXT NOT NULL REFERENCES topics (topic_id) ON DELETE CASCADE,
    partition INTEGER NOT NULL, committed_offset INTEGER NOT NULL,
    metadata TEXT NOT NULL, leader_epoch INTEGER NOT NULL, committed_ms INTEGER NOT NULL,
    PRIMARY KEY (group_name, topic_id, partition)) STRICT;
CREATE TABLE IF NOT EXISTS removed_tombstones (
    topic_id TEXT NOT NULL REFERENCES topics (topic_id) ON DELETE CASCADE,
    partition INTEGER NOT NULL, removal INTEGER NOT NULL, last_offset INTEGER NOT NULL,
    PRIMARY KEY (topic_id, partition, removal)) STRICT;
CREATE TABLE IF NOT EXISTS fences (writer TEXT PRIMARY KEY, batch_id INTEGER NOT NULL) STRICT;
CREATE TABLE IF NOT EXISTS producers (
    producer_id INTEGER PRIMARY KEY, transactional_id TEXT UNIQUE,
    producer_epoch INTEGER NOT NULL, timeout_ms INTEGER NOT NULL, in_process INTEGER NOT NULL,
    used_ms INTEGER NOT NULL,
    previous_id INTEGER NOT NULL, previous_epoch INTEGER NOT NULL) STRICT;
CREATE TABLE IF NOT EXISTS decisions (
    producer_id INTEGER NOT NULL, topic_id TEXT NOT NULL, partition INTEGER NOT NULL,
    first_offset INTEGER NOT NULL, producer_epoch INTEGER NOT NULL, committed INTEGER NOT NULL,
    PRIMARY KEY (producer_id, topic_id, partition)) STRICT;
CREATE TABLE IF NOT EXISTS remote_transactions (
    producer_id INTEGER PRIMARY KEY, producer_epoch INTEGER NOT NULL, state TEXT NOT NULL) STRICT;
CREATE TABLE IF NOT EXISTS pending_offsets (
    producer_id INTEGER NOT NULL, group_name TEXT NOT NULL,
    topic_id TEXT NOT NULL REFERENCES topics (topic_id) ON DELETE CASCADE,
    partition INTEGER NOT NULL, committed_offset INTEGER NOT NULL, metadata TEXT NOT NULL,
    leader_epoch INTEGER NOT NULL,
    PRIMARY KEY (producer_id, group_name, topic_id, partition)) STRICT;
CREATE TABLE IF NOT EXISTS share_partitions (
    group_name TEXT NOT NULL,
    topic_id TEXT NOT NULL REFERENCES topics (topic_id) ON DELETE CASCADE,
    partition INTEGER NOT NULL, start_offset INTEGER NOT NULL,
    PRIMARY KEY (group_name, topic_id, partition)) STRICT;
CREATE TABLE IF NOT EXISTS share_spans (
    group_name TEXT NOT NULL, topic_id TEXT NOT NULL, partition INTEGER NOT NULL,
    first_offset INTEGER NOT NULL, end_offset INTEGER NOT NULL,
    state TEXT NOT NULL, delivery_count INTEGER NOT NULL,
    PRIMARY KEY (group_name, topic_id, partition, first_offset),
    FOREIGN KEY (group_name, topic_id, partition) REFERENCES share_partitions ON DELETE CASCADE)
    STRICT;
CREATE TABLE IF NOT EXISTS share_members (
    group_name TEXT NOT NULL, member_id TEXT NOT NULL, client_id TEXT NOT NULL,
    client_host TEXT NOT NULL, assignment TEXT NOT NULL,
    PRIMARY KEY (group_name, member_id)) STRICT;
CREATE TABLE IF NOT EXISTS group_settings (
    group_name TEXT NOT NULL, name TEXT NOT NULL, value TEXT NOT NULL,
    PRIMARY KEY (group_name, name)) STRICT;
"""


class ControlDb:
    """One connection, safe to use from many threads. Errors of SQLite become ours.

    Args:
        before_commit: Called before each commit; only tests give one, to crash there.
    """

    def __init__(
        self,
        connection: sqlite3.Connection,
        *,
        write: bool,
        before_commit: Callable[[], None] = lambda: None,
    ) -> None:
        self._connection = connection
        self._lock = threading.RLock()
        self._before_commit = before_commit
        connection.execute("PRAGMA foreign_keys = ON")
        if write:
            write_ahead(connection)
            connection.execute("PRAGMA synchronous = FULL")
            connection.executescript(_TABLES)

    @classmethod
    def open(cls, folder: Path, *, write: bool) -> ControlDb:
        """Open the file of a folder; with ``write`` it is made if missing.

        Raises:
            ConfigError: there is none, or SQLite cannot open it.
            CorruptionError: it is damaged; restore it from a backup.
        """
        path = folder / CONTROL_NAME
        mode = "rwc" if write else "ro"
        try:
            connection = sqlite3.connect(
                f"{path.absolute().as_uri()}?mode={mode}",
                uri=True,
                timeout=_WAIT_S,
                isolation_level=None,
                check_same_thread=False,
            )
            return cls(connection, write=write)
        except (sqlite3.Error, UnicodeDecodeError) as error:
            ours = _to_millstream_error(error)
            if isinstance(ours, ConfigError):
                ours = ConfigError(f"{path} cannot be opened: {error}; is {folder} a log?")
            raise ours from error

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._connection.close()

    def rows(self, query: str, values: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        """Return the rows of a query.

        Raises:
            RetriableError: another process held the file for too long.
            DiskFullError: the disk is full.
            CorruptionError: the file is damaged; restore it from a backup.
        """
        with self._lock, _translate_errors():
            return self._connection.execute(query, values).fetchall()

    @contextmanager
    def commit(self) -> Iterator[sqlite3.Connection]:
        """Yield the connection for several statements that take effect together, or not at all.

        Raises:
            RetriableError: another process held the file for too long; nothing has changed.
            DiskFullError: the disk is full; nothing has changed.
            CorruptionError: the file is damaged; restore it from a backup.
        """
        with self._lock, _translate_errors():
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield self._connection
                self._before_commit()
                self._connection.execute("COMMIT")
            except BaseException:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise


@contextmanager
def corruption_if_unreadable(what: str) -> Iterator[None]:
    """Report rows of control.db that cannot be parsed as damage.

    Raises:
        CorruptionError: restore the file from a backup.
    """
    try:
        yield
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CorruptionError(
            f"{CONTROL_NAME} is damaged: {what} cannot be read ({error}); restore it from a backup "
            "of the folder"
        ) from error


@contextmanager
def _translate_errors() -> Iterator[None]:
    try:
        yield
    except sqlite3.IntegrityError:
        raise  # a constraint of the tables, which the caller handles
    except (sqlite3.Error, UnicodeDecodeError) as error:
        raise _to_millstream_error(error) from error


def _to_millstream_error(error: Exception) -> MillstreamError:
    """Return what an error means to the caller.

    What is neither busy nor full nor forbidden is damage: our statements are right, so a missing table or
    column, or invalid text, was caused by another program, or by the disk.
    """
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT)
    primary = code & 0xFF
    # The memory that SQLite's processes share is a file, too: without room for it SQLite speaks of an I/O error.
    if primary == sqlite3.SQLITE_FULL or code == sqlite3.SQLITE_IOERR_SHMSIZE:
        return DiskFullError(
            f"{CONTROL_NAME} could not be written: {error}; nothing has changed. Make room on "
            "the disk, then try again"
        )
    if primary in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return RetriableError(
            f"{CONTROL_NAME} could not be used: {error}; nothing has changed, try again"
        )
    if primary in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM, sqlite3.SQLITE_READONLY):
        return ConfigError(f"{CONTROL_NAME} cannot be used: {error}; check the folder's rights")
    return CorruptionError(
        f"{CONTROL_NAME} is damaged, or its disk is ({error}); restore it from a backup of the folder"
    )
