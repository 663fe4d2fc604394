"""The state store of an app in PostgreSQL: one schema of a database, for apps that any machine may run.

A write transaction first locks the one row of ``_millstream_state``, so that one of them writes at a time,
as with SQLite: of two drivers, the second one's :meth:`begin_run` waits for the first one's commit, and
after it every commit of the first is refused by the number of its run. The lock is a row's, and everything
that is set holds for one transaction, so sessions may come from a pool that gives each transaction another.

What a connection that breaks leaves, by when it breaks:

=====================================  ============================================================
before COMMIT was sent                 nothing: the server undoes it, at once or when it notices
                                       (keepalive, or a transaction idle for 60 seconds)
while COMMIT is under way              nothing, or all of the batch; the fence says which
after COMMIT was answered              all of the batch
=====================================  ============================================================

So a store that writes opens another connection and repeats the transaction. It waits for the row that the
broken one may still hold, and then finds the batch in the fence, or not.

The statements on a view's table: `view_table.py`; values: `values.py`. What a store is and does:
`views/state_store/store.py`.
"""

from __future__ import annotations

import json
import logging
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from hashlib import sha256
from typing import TYPE_CHECKING, Any, TypeVar

import polars as pl

from millstream.errors import ConfigError, FencedError, MillstreamError, RetriableError
from millstream.kernels.plan import SinkPlan
from millstream.views.address import PostgresAddress, StateStoreAddress
from millstream.views.postgres.connection import PostgresConnection, missing_table, pipelined
from millstream.views.postgres.privileges import check_privileges, create_schema
from millstream.views.postgres.reader import query_statement
from millstream.views.postgres.staging import (
    PostgresStager,
    StagedTables,
    create_tables,
    merge_staged,
    remove_tables,
)
from millstream.views.postgres.values import decode_rows
from millstream.views.postgres.view_table import PostgresViewTable, check_view_name
from millstream.views.postgres.writer import delete_rows, upsert_rows
from millstream.views.query import Query
from millstream.views.retractions import view_schema
from millstream.views.runs.control_files import reset_command
from millstream.views.schema import Fence, ViewChange, ViewSchema
from millstream.views.staging import StagedChange
from millstream.views.state_store import changelog
from millstream.views.state_store.database import Database, Rows, StoreName
from millstream.views.state_store.program_tables import RunProgram
from millstream.views.state_store.reader import FORMAT, schema_of, seq_next
from millstream.views.state_store.store import CHANGES_KEPT, StateStore
from millstream.views.state_store.view_table import quote_identifier

if TYPE_CHECKING:
    from collections.abc import Iterator

    from millstream.views.postgres.connection import Session

T = TypeVar("T")
_log = logging.getLogger(__name__)

STATE_TABLE = "_millstream_state"
_SETUP_LOCK = 0x4D494C53  # "MILS": the advisory lock for creating our tables
_PAUSE_S = 0.5  # between two attempts
_CLOSE_TO_END_S = 1e-3

_TABLES = """
CREATE TABLE IF NOT EXISTS _millstream_state (
    app text NOT NULL, identity text NOT NULL, format integer NOT NULL, reset_begun boolean NOT NULL);
CREATE TABLE IF NOT EXISTS _views (
    name text COLLATE "C" PRIMARY KEY, schema text NOT NULL, seq_next bigint NOT NULL,
    app text, job text);
CREATE TABLE IF NOT EXISTS _changes (
    view text COLLATE "C" NOT NULL, seq bigint NOT NULL, rows bigint NOT NULL,
    batch_id bigint NOT NULL, frame bytea NOT NULL, PRIMARY KEY (view, seq));
ALTER TABLE _changes ALTER COLUMN frame SET STORAGE EXTERNAL;
CREATE TABLE IF NOT EXISTS _fences (
    app text NOT NULL, job text NOT NULL, run bigint NOT NULL, checkpoint_id text NOT NULL,
    batch_id bigint, commit_number bigint, position text, status text, PRIMARY KEY (app, job));
CREATE TABLE IF NOT EXISTS _ledger (
    app text NOT NULL, job text COLLATE "C" NOT NULL, batch_id bigint NOT NULL,
    number bigint NOT NULL, line text NOT NULL, PRIMARY KEY (app, job, batch_id, number));
CREATE TABLE IF NOT EXISTS _batches (
    app text NOT NULL, job text COLLATE "C" NOT NULL, batch_id bigint NOT NULL, record text NOT NULL,
    PRIMARY KEY (app, job, batch_id));
CREATE TABLE IF NOT EXISTS _source_offsets (
    app text NOT NULL, job text COLLATE "C" NOT NULL, batch_id bigint NOT NULL, source_offset text NOT NULL,
    PRIMARY KEY (app, job, batch_id));
CREATE TABLE IF NOT EXISTS _sinks (
    app text NOT NULL, job text NOT NULL, identity text NOT NULL, name text NOT NULL,
    batch_id bigint NOT NULL, PRIMARY KEY (app, job, identity));
CREATE TABLE IF NOT EXISTS _state (
    app text NOT NULL, job text NOT NULL, stage bigint NOT NULL, bucket bigint NOT NULL,
    manifest bytea NOT NULL, PRIMARY KEY (app, job, stage, bucket));
CREATE TABLE IF NOT EXISTS _programs (
    app text NOT NULL, job text NOT NULL, program text NOT NULL, PRIMARY KEY (app, job));
CREATE TABLE IF NOT EXISTS _outputs (
    app text NOT NULL, job text NOT NULL, name text COLLATE "C" NOT NULL,
    sink text COLLATE "C" NOT NULL, value text NOT NULL, PRIMARY KEY (app, job, name, sink));
CREATE TABLE IF NOT EXISTS _descriptions (
    app text NOT NULL, name text NOT NULL, value text NOT NULL, PRIMARY KEY (app, name));
"""
_OURS = (
    "_views _changes _fences _ledger _batches _source_offsets _sinks _state _programs _outputs _descriptions "
    f"{STATE_TABLE}"
).split()

_SETTINGS = {
    "TimeZone": "UTC",
    "client_min_messages": "warning",
    "statement_timeout": "0",  # a large batch takes as long as it takes
    "lock_timeout": "10s",
    # A driver that is cut off must not hold the lock for hours.
    "idle_in_transaction_session_timeout": "60s",
    "tcp_keepalives_idle": "10",
    "tcp_keepalives_interval": "5",
    "tcp_keepalives_count": "3",
}


class PostgresDatabase:
    """Runs the stores' common statements in a transaction of PostgreSQL; values come in binary form."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.stages: set[str] = set()  # temporary tables that this transaction has filled

    def execute(self, statement: str, parameters: Sequence[Any] = (), /) -> Rows:
        cursor = self.session.cursor(binary=True)
        if not parameters:
            return cursor.execute(statement.encode())
        return cursor.execute(_translated(statement, parameters), parameters)

    def executemany(self, statement: str, parameters: Iterable[Sequence[Any]], /) -> Rows:
        cursor = self.session.cursor(binary=True)
        given = list(parameters)
        if given:
            cursor.executemany(_translated(statement, given[0]), given)
        return cursor


def _translated(statement: str, parameters: Sequence[Any]) -> bytes:
    """Return a statement with the driver's marks for parameters instead of ``?``."""
    first, *rest = statement.replace("%", "%%").split("?")
    marks = ("%b" if isinstance(one, bytes) else "%s" for one in parameters)
    return (first + "".join(m + text for m, text in zip(marks, rest, strict=True))).encode()


class PostgresStateStore(StateStore):
    """One app's state store in a schema of PostgreSQL.

    Guarantees: thread-safe; one transaction writes at a time, any number read, from any machine. What
    :meth:`commit` returned True for is as durable as the server is, whose ``synchronous_commit`` is on
    at least.
    """

    _poll_s = 0.05

    def __init__(
        self,
        address: StateStoreAddress,
        *,
        readonly: bool = False,
        changes_kept: int = CHANGES_KEPT,
        on_wait: Callable[[str], None] = _log.warning,
    ) -> None:
        """Connect; create the schema and its tables, unless ``readonly``.

        Args:
            on_wait: Called with one line when the server is away and the store begins to wait.

        Raises:
            ConfigError: there is no such store and it is ``readonly``; a right is missing (the message has the
                statement that grants it); the server is too old; the schema belongs to another app.
            RetriableError: the server is away, and still was after ``address.wait_s``.
        """
        self.address = address
        self.store_name = StoreName(str(address), address)
        self._changes_kept = changes_kept
        self._on_wait = on_wait
        # A reader does not wait: who reads decides whether to.
        self._wait_s = 0.0 if readonly else address.wait_s
        self._unconfirmed: Any = None
        self._reader = PostgresConnection(
            address.database, readonly=True, settings=_settings(address)
        )
        self._writer: PostgresConnection | None = None
        self._identity = ""
        with self._reader.closed_on_error():
            if not readonly:
                self._writer = PostgresConnection(
                    address.database,
                    readonly=False,
                    settings=_settings(address),
                    durable=True,
                )
                with self._writer.closed_on_error():
                    self._retrying(self._create)
            self._identity = self._read(self._checked)

    def _checked(self, db: Database) -> str:
        if self._writer is None:
            check_privileges(_session(db), self.address, writes=False)
        return check_format(db, self.address)

    def close(self) -> None:
        """Close the connections. Closing twice is allowed."""
        self._reader.close()
        if self._writer is not None:
            self._writer.close()

    # Transactions.

    def _retrying(self, attempt: Callable[[], T]) -> T:
        """Call ``attempt`` until it does not fail for the server's absence, or the time is over."""
        end = None
        while True:
            try:
                return attempt()
            except RetriableError as error:
                if not self._wait_s:
                    raise
                now = time.monotonic()
                if end is None:
                    end = now + self._wait_s
                    self._on_wait(
                        f"waiting for {self.address}, for up to {self._wait_s:.0f} seconds: "
                        f"{str(error).rsplit('PostgreSQL says: ', 1)[-1]}"
                    )
                left = end - now
                if left <= _CLOSE_TO_END_S:
                    raise RetriableError(
                        f"{self.address} could not be used for {self._wait_s:.0f} seconds. Nothing is "
                        "lost: the next run finds out which batch was the last one, and goes on after "
                        f"it. Run again when the server is back. The last attempt: {error}"
                    ) from None
                time.sleep(min(_PAUSE_S, left))

    def _read(self, work: Callable[[Database], T]) -> T:
        def attempt() -> T:
            with self._reader.transaction() as session:
                return work(PostgresDatabase(session))

        return self._retrying(attempt)

    def _write(self, work: Callable[[Database], T]) -> T:
        self._unconfirmed = None

        def attempt() -> T:
            worked, result = False, None
            try:
                with self._locked() as db:
                    result = work(db)
                    worked = True
            except RetriableError:
                if worked:  # it broke during COMMIT
                    self._unconfirmed = result
                raise
            return result

        return self._retrying(attempt)

    @contextmanager
    def _locked(self) -> Iterator[PostgresDatabase]:
        """Begin the one transaction that may write now."""
        if self._writer is None:
            raise ConfigError(f"{self.address} was opened for reading. Open it without readonly.")
        with self._writer.transaction() as session:
            db = PostgresDatabase(session)
            self._check_identity(_locked_identity(session))
            yield db

    def _check_not_replaced(self, db: Database) -> None:
        if isinstance(db, PostgresDatabase) and db.session.read_only:
            self._check_identity(_identity(db.session))

    def _check_identity(self, found: str | None) -> None:
        if found != self._identity:
            raise FencedError(
                f"{self.address} was deleted or replaced while this run was writing to it. Stop "
                "this run and start again: its views are rebuilt from the log."
            )

    # The schema.

    def _create(self) -> None:
        """Create the schema and our tables if they are missing, and check what we may do."""
        assert self._writer is not None
        with self._writer.transaction() as session:
            session.execute("SELECT pg_advisory_xact_lock(%s)", (_SETUP_LOCK,))
            create_schema(session, self.address)
            check_privileges(session, self.address, writes=True)
            db = PostgresDatabase(session)
            if self._has_table(db, STATE_TABLE):
                check_format(db, self.address)
                return
            for statement in filter(str.strip, _TABLES.split(";")):
                session.execute(statement.encode())
            session.execute(
                f"INSERT INTO {STATE_TABLE} VALUES (%s, %s, %s, false)",  # noqa: S608
                (self.address.app, uuid.uuid4().hex, FORMAT),
            )

    def mark_reset(self) -> None:
        """Say that the app is being reset: no run begins until its state is gone."""
        self._write(lambda db: db.execute(f"UPDATE {STATE_TABLE} SET reset_begun = true"))  # noqa: S608

    def drop(self) -> None:
        """Remove the app's state: the tables of its views and ours; the schema, if nothing else is in it."""

        def drop(db: Database) -> None:
            for (text,) in db.execute("SELECT schema FROM _views").fetchall():
                db.execute(f"DROP TABLE {self._table_name(ViewSchema.from_json(text))}")
            db.execute(f"DROP TABLE {', '.join(_OURS)}")

        self._write(drop)
        assert self._writer is not None
        remove_tables(self._writer, self.address.app, sys.maxsize)
        try:
            with self._writer.transaction() as session:
                session.execute(f"DROP SCHEMA {quote_identifier(self.address.schema)}".encode())
        except (
            MillstreamError
        ) as error:  # something else is in it, or it is not ours: it stays, empty of us
            _log.info("the schema %s stays: %s", self.address, error)

    def _begin_run(
        self, db: Database, app: str, job: str, checkpoint_id: str, beginning: RunProgram | None
    ) -> tuple[int, int]:
        (begun,) = db.execute(f"SELECT reset_begun FROM {STATE_TABLE}").fetchone()  # noqa: S608
        if begun:
            raise ConfigError(
                f"A reset of the app {app!r} in {self.address} was begun and has not ended, so part of its "
                f"state is gone. End it: {reset_command(self.address)}."
            )
        return super()._begin_run(db, app, job, checkpoint_id, beginning)

    # Views.

    def commit(
        self,
        fence: Fence,
        changes: Sequence[ViewChange | StagedChange],
        *,
        position: Mapping[str, Any],
        ledger: Sequence[Mapping[str, Any]] = (),
        status: Mapping[str, Any],
        sinks: Mapping[str, str] | None = None,
        state: Mapping[tuple[int, int], bytes] | None = None,
        record: Mapping[str, Any] | None = None,
        source_offsets: Mapping[int, Mapping[str, Any]] | None = None,
    ) -> bool:
        done = super().commit(
            fence,
            changes,
            position=position,
            ledger=ledger,
            status=status,
            sinks=sinks,
            state=state,
            record=record,
            source_offsets=source_offsets,
        )
        if self._writer is not None and any(isinstance(each, StagedChange) for each in changes):
            with suppress(MillstreamError):  # left to the next batch, or run
                remove_tables(self._writer, fence.app, fence.run)
        # Of this run, a batch that a broken commit had begun and the repetition found is this one.
        return done or self._unconfirmed is True

    def begin_run(
        self, app: str, job: str, checkpoint_id: str, beginning: RunProgram | None = None
    ) -> tuple[int, int]:
        run, batch_id = super().begin_run(app, job, checkpoint_id, beginning)
        assert self._writer is not None, "it can write"
        with suppress(MillstreamError):  # left to the next batch, or run
            remove_tables(self._writer, app, run)
        return run, batch_id

    def stager(self, fence: Fence, sink: SinkPlan) -> PostgresStager | None:
        if not sink.key:  # a view without a key has one row
            return None
        tables = StagedTables.of(fence, sink.name)
        self._write(lambda db: create_tables(_session(db), view_schema(sink), tables))
        return PostgresStager(self.address.database, _settings(self.address), sink, tables)

    def _apply(self, db: Database, fence: Fence, change: ViewChange | StagedChange) -> None:
        if isinstance(change, ViewChange):
            super()._apply(db, fence, change)
            return
        schema = schema_of(db, change.view, self.store_name)
        seq_before = seq_next(db, schema.name)
        merged = merge_staged(_session(db), schema, change.staged, self._changes_kept)
        seq = seq_before + merged.unlogged
        for operation, rows in merged.logged:
            seq = changelog.append(db, schema, rows, operation, seq=seq, batch_id=fence.batch_id)
        self._end_changes(db, fence, schema, seq_before, seq)

    def _together(self, db: Database) -> AbstractContextManager[None]:
        return pipelined(_session(db))

    def _has_table(self, db: Database, table: str) -> bool:
        return _has_table(db, table)

    def _table_name(self, schema: ViewSchema) -> str:
        return PostgresViewTable(schema).name

    def _select(self, db: Database, schema: ViewSchema, query: Query) -> pl.DataFrame:
        text, given = query_statement(schema, query)
        with _session(db).cursor(binary=True) as cursor:
            rows = cursor.execute(text.encode(), given).fetchall()
        return decode_rows(rows, schema, schema.names)

    def _create_table(self, db: Database, schema: ViewSchema) -> None:
        check_view_name(schema.name)
        table = PostgresViewTable(schema)
        if _has_table(db, schema.name):
            raise ConfigError(
                f"{self.address} has a table {schema.name!r} that is no view of Millstream. Give "
                "the view another name."
            )
        db.execute(table.create)
        db.execute(table.create_index)

    def _delete(self, db: Database, schema: ViewSchema, keys: pl.DataFrame) -> pl.DataFrame:
        table = PostgresViewTable(schema, _shape(schema))
        _empty_stage(db, table.delete_stage, table.create_delete_stage)
        return delete_rows(_session(db), table, keys)

    def _upsert(self, db: Database, schema: ViewSchema, rows: pl.DataFrame) -> pl.DataFrame:
        table = PostgresViewTable(schema, _shape(schema))
        _empty_stage(db, table.stage, table.create_stage)
        return upsert_rows(_session(db), table, rows)


def _session(db: Database) -> Session:
    assert isinstance(db, PostgresDatabase), "a store gives its own to what it calls"
    return db.session


def _settings(address: StateStoreAddress) -> dict[str, str]:
    return {**_SETTINGS, "search_path": quote_identifier(address.schema)}


def _shape(schema: ViewSchema) -> str:
    """Name the temporary tables of a view by its columns' types, as they stay in pooled sessions."""
    kinds = [kind for _, kind in schema.columns]
    keys = [schema.kinds[name] for name in schema.key]
    return sha256(json.dumps([kinds, keys]).encode()).hexdigest()[:24]


def _empty_stage(db: Database, name: str, create: str) -> None:
    """Make a temporary table that a transaction finds empty; empty it where this one has filled it."""
    assert isinstance(db, PostgresDatabase)
    db.execute(f"TRUNCATE {name}" if name in db.stages else create)
    db.stages.add(name)


def _locked_identity(session: Session) -> str | None:
    """Lock the store against other writers; return its identity, None if it is gone."""
    return _identity(session, " FOR UPDATE")


def _identity(session: Session, lock: str = "") -> str | None:
    """Return the identity of the store; None if it is gone: then the transaction is over, too."""
    try:
        row = session.execute(f"SELECT identity FROM {STATE_TABLE}{lock}".encode()).fetchone()  # noqa: S608
    except missing_table():
        return None
    return None if row is None else str(row[0])


def _has_table(db: Database, table: str) -> bool:
    row = db.execute("SELECT to_regclass(?) IS NOT NULL", (quote_identifier(table),)).fetchone()
    return row is not None and bool(row[0])


def check_format(db: Database, address: StateStoreAddress) -> str:
    """Make sure that a schema holds the app's state, in a form that this version reads; return its identity.

    Raises:
        ConfigError: it does not.
    """
    row = None
    if _has_table(db, STATE_TABLE):
        row = db.execute(f"SELECT app, identity, format FROM {STATE_TABLE}").fetchone()  # noqa: S608
    if row is None:
        raise ConfigError(
            f"There is no state of an app {address.app!r} in {address}. Run the app, or correct its name "
            "or the address."
        )
    app, identity, found = row
    if app != address.app:
        raise ConfigError(
            f"{address} holds the state of the app {app!r}, and {address.app!r} was asked for. Give each app "
            "a schema of its own: ?schema=NAME."
        )
    if found != FORMAT:
        raise ConfigError(
            f"{address} has format {found}; this version reads {FORMAT}. Go on with the version that wrote "
            f"it, or start over from the log: {reset_command(address)}."
        )
    return str(identity)


def find_state_stores(
    database: PostgresAddress, schema: str | None = None, wait_s: float = 0.0
) -> list[StateStoreAddress]:
    """Return the state stores of a database that we may read, by app; of one schema, if it is named.

    Raises:
        ConfigError: the database cannot be reached with this address.
        RetriableError: the server is away.
    """
    settings = {**_SETTINGS, "search_path": "pg_catalog"}
    connection = PostgresConnection(database, readonly=True, settings=settings)
    with closing(connection), connection.transaction() as session:
        rows = session.execute(
            "SELECT n.nspname FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace "
            "WHERE c.relname = %s AND has_schema_privilege(n.oid, 'USAGE') "
            "AND has_table_privilege(c.oid, 'SELECT')",
            (STATE_TABLE,),
        ).fetchall()
        names = [name for (name,) in rows if schema in (None, name)]
        found = []
        for name in names:
            table = f"{quote_identifier(name)}.{STATE_TABLE}"
            apps = session.execute(f"SELECT app FROM {table}".encode()).fetchall()  # noqa: S608
            found += [StateStoreAddress(app, database, name, wait_s) for (app,) in apps]
    return sorted(found, key=lambda one: (one.app, one.schema))
