"""The state store of an app in one SQLite file, for apps on one machine.

How values are kept: `sqlite_values.py`; the statements on a view's own table: `view_table.py`; the file's
connections: `connections.py`. What a store is and does: `store.py`.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import polars as pl

from millstream.errors import ConfigError, CorruptionError, FencedError
from millstream.views.query import Query
from millstream.views.runs.control_files import reset_command
from millstream.views.schema import ViewSchema
from millstream.views.sink import check_written
from millstream.views.state_store import sqlite_values
from millstream.views.state_store.connections import (
    ReadConnections,
    open_writer,
    translate_errors,
)
from millstream.views.state_store.database import Database, StoreName
from millstream.views.state_store.reader import FORMAT, encode_values
from millstream.views.state_store.sqlite_upsert import stage_rows, upsert_rows
from millstream.views.state_store.store import CHANGES_KEPT, StateStore
from millstream.views.state_store.view_table import ViewTable

APPLICATION_ID = 0x4D494C4C  # "MILL"

T = TypeVar("T")

_TABLES = """
CREATE TABLE IF NOT EXISTS _views (
    name TEXT PRIMARY KEY, schema TEXT NOT NULL, seq_next INTEGER NOT NULL, app TEXT, job TEXT);
CREATE TABLE IF NOT EXISTS _changes (
    view TEXT NOT NULL, seq INTEGER NOT NULL, rows INTEGER NOT NULL, batch_id INTEGER NOT NULL,
    frame BLOB NOT NULL, PRIMARY KEY (view, seq));
CREATE TABLE IF NOT EXISTS _fences (
    app TEXT NOT NULL, job TEXT NOT NULL, run INTEGER NOT NULL, checkpoint_id TEXT NOT NULL,
    batch_id INTEGER, commit_number INTEGER, position TEXT, status TEXT, PRIMARY KEY (app, job));
CREATE TABLE IF NOT EXISTS _ledger (
    app TEXT NOT NULL, job TEXT NOT NULL, batch_id INTEGER NOT NULL, number INTEGER NOT NULL,
    line TEXT NOT NULL, PRIMARY KEY (app, job, batch_id, number)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS _batches (
    app TEXT NOT NULL, job TEXT NOT NULL, batch_id INTEGER NOT NULL, record TEXT NOT NULL,
    PRIMARY KEY (app, job, batch_id)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS _source_offsets (
    app TEXT NOT NULL, job TEXT NOT NULL, batch_id INTEGER NOT NULL, source_offset TEXT NOT NULL,
    PRIMARY KEY (app, job, batch_id)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS _sinks (
    app TEXT NOT NULL, job TEXT NOT NULL, identity TEXT NOT NULL, name TEXT NOT NULL,
    batch_id INTEGER NOT NULL, PRIMARY KEY (app, job, identity)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS _state (
    app TEXT NOT NULL, job TEXT NOT NULL, stage INTEGER NOT NULL, bucket INTEGER NOT NULL,
    manifest BLOB NOT NULL, PRIMARY KEY (app, job, stage, bucket)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS _programs (
    app TEXT NOT NULL, job TEXT NOT NULL, program TEXT NOT NULL, PRIMARY KEY (app, job));
CREATE TABLE IF NOT EXISTS _outputs (
    app TEXT NOT NULL, job TEXT NOT NULL, name TEXT NOT NULL, sink TEXT NOT NULL,
    value TEXT NOT NULL, PRIMARY KEY (app, job, name, sink)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS _descriptions (
    app TEXT NOT NULL, name TEXT NOT NULL, value TEXT NOT NULL, PRIMARY KEY (app, name));
"""


class SqliteStateStore(StateStore):
    """One app's state store in one SQLite file.

    Guarantees: thread-safe; one process writes at a time (the fence tells them apart), any number
    read. What :meth:`commit` returned True for survives a crash of the process or the machine.
    """

    _poll_s = 0.01

    def __init__(
        self, path: Path, *, readonly: bool = False, changes_kept: int = CHANGES_KEPT
    ) -> None:
        """Open the store at ``path``; create it, unless ``readonly``.

        A reader goes on with a store that is created again under its path.

        Raises:
            ConfigError: ``readonly`` and there is no such file, or it was made by a newer version.
            CorruptionError: The file is no view store.
        """
        self._path = Path(path)
        self.store_name = StoreName(str(self._path), self._path.parent)
        # A writer keeps its file; it gets a FencedError when another file is in its place.
        self._readers = ReadConnections(self._path, follows=readonly)
        self._changes_kept = changes_kept
        self._lock = threading.RLock()
        self._writer: sqlite3.Connection | None = None
        if readonly:
            self.check_format()
            return
        with translate_errors(self._path):
            self._writer = open_writer(self._path)
            self.check_format(needs_tables=False)
            with self._transaction() as db:
                db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
                db.execute(f"PRAGMA user_version = {FORMAT}")
                for statement in filter(str.strip, _TABLES.split(";")):
                    db.execute(statement)
        self._inode = self._path.stat().st_ino

    def close(self) -> None:
        """Close every connection. Closing twice is allowed."""
        self._readers.close()
        with self._lock:
            if self._writer is not None:
                self._writer.close()
                self._writer = None

    def check_format(self, *, needs_tables: bool = True) -> None:
        """Make sure that the file is a view store that this version reads.

        Args:
            needs_tables: Whether its tables must be there. For a moment, the file exists before they do;
                after a crash in that moment, until the next run.

        Raises:
            ConfigError: it is not there, or of a newer version.
            CorruptionError: it is something else.
        """
        there_is_none = ConfigError(
            f"There is no view store at {self._path}. Run the pipeline that fills it, or "
            "correct the folder or the app's name."
        )
        if not self._path.exists():
            raise there_is_none
        with self._readers.snapshot() as db:
            found = db.execute("PRAGMA user_version").fetchone()[0]
            mark = db.execute("PRAGMA application_id").fetchone()[0]
            tables = db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
        if needs_tables and not tables:
            raise there_is_none
        if tables and mark != APPLICATION_ID:
            raise CorruptionError(
                f"{self._path} is a database, but no view store. Move it away, or use another "
                "folder."
            )
        if found > FORMAT:
            raise ConfigError(
                f"{self._path} has format {found}; this version reads {FORMAT}. Upgrade millstream."
            )
        if tables and found < FORMAT:
            raise ConfigError(
                f"{self._path} has format {found}, of an earlier version; this one reads {FORMAT}. Go "
                f"on with that version, or start over from the log: {reset_command(self._path.parent)}."
            )

    # Reading.

    def _read(self, work: Callable[[Database], T]) -> T:
        with self._readers.snapshot() as db:
            return work(db)

    def _has_table(self, db: Database, table: str) -> bool:
        row = db.execute("SELECT 1 FROM sqlite_master WHERE name = ?", (table,)).fetchone()
        return row is not None

    def _table_name(self, schema: ViewSchema) -> str:
        return ViewTable(schema).name

    def _select(self, db: Database, schema: ViewSchema, query: Query) -> pl.DataFrame:
        values = encode_values(schema, query.where)
        bounds = query.checked_bounds(schema)
        text = ViewTable(schema).select(
            tuple(values),
            [(name, comparison) for name, comparison, _ in bounds],
            query.checked_order(schema),
            limited=query.limit is not None,
        )
        given = [*values.values(), *(_encoded(schema, n, value) for n, _, value in bounds)]
        given += [] if query.limit is None else [query.limit]
        return sqlite_values.decode_rows(db.execute(text, given).fetchall(), schema)

    # Writing.

    def _write(self, work: Callable[[Database], T]) -> T:
        with self._transaction() as db:
            return work(db)

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """Run one write transaction; anything raised inside undoes all of it."""
        with self._lock, translate_errors(self._path):
            if self._writer is None:
                raise ConfigError(
                    f"{self._path} is closed or was opened for reading. Open it without readonly."
                )
            self._writer.execute("BEGIN IMMEDIATE")
            try:
                yield self._writer
                self._writer.execute("COMMIT")
            finally:
                if self._writer.in_transaction:
                    self._writer.execute("ROLLBACK")

    def _check_not_replaced(self, db: Database) -> None:  # noqa: ARG002
        """Make sure that the file was not replaced: SQLite would go on writing to the deleted one."""
        try:
            in_place = self._path.stat().st_ino == self._inode
        except FileNotFoundError:
            in_place = False
        if not in_place:
            raise FencedError(
                f"{self._path} was deleted or replaced while this run was writing to it. Stop "
                "this run and start again: its views are rebuilt from the log."
            )

    def _create_table(self, db: Database, schema: ViewSchema) -> None:
        db.execute(ViewTable(schema).create)

    def _delete(self, db: Database, schema: ViewSchema, keys: pl.DataFrame) -> pl.DataFrame:
        table = ViewTable(schema)
        gone = stage_rows(db, table, keys, table.select_present)
        deleted = db.executemany(table.delete, sqlite_values.encode_rows(gone, schema))
        check_written(f"the view {schema.name!r}", gone.height, max(deleted.rowcount, 0))
        return gone

    def _upsert(self, db: Database, schema: ViewSchema, rows: pl.DataFrame) -> pl.DataFrame:
        return upsert_rows(db, ViewTable(schema), rows)


def _encoded(schema: ViewSchema, name: str, value: Any) -> Any:
    return encode_values(schema, {name: value})[name]
