"""The sink for views in PostgreSQL: rows, change logs, position and fence in one transaction.

A batch's rows are copied to a temporary table for each view. One statement then moves them into the view
and returns those that were new or different, which become the change log. Tasks may have copied them before, into
tables of the batch (`views/postgres/staging.py`).
"""

from __future__ import annotations

import json
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import polars as pl

from millstream.errors import ConfigError, FencedError
from millstream.kernels.plan import SinkPlan
from millstream.views.address import PostgresAddress, postgres_address
from millstream.views.coverage import OutputSink, database_view_label, spans_to_json
from millstream.views.position import merge_positions
from millstream.views.postgres.connection import PostgresConnection
from millstream.views.postgres.reader import FORMAT, check_format
from millstream.views.postgres.staging import (
    PostgresStager,
    StagedTables,
    create_tables,
    merge_staged,
    remove_tables,
)
from millstream.views.postgres.view_table import PostgresViewTable, check_view_name
from millstream.views.postgres.writer import delete_rows, upsert_rows
from millstream.views.retractions import view_change, view_schema
from millstream.views.schema import Fence, ViewChange, ViewSchema
from millstream.views.sink import RunStart, SinkBatch
from millstream.views.staging import StagedRows
from millstream.views.state_store import changelog, sqlite_values
from millstream.views.state_store.store import CHANGES_KEPT

if TYPE_CHECKING:
    from millstream.views.postgres.connection import Session

_SLICE_ROWS = 131_072  # bounds the memory of a large batch, and the size of one change frame
_SETUP_LOCK = 0x4D494C4C  # "MILL": the advisory lock for creating our tables

_TABLES = """
CREATE TABLE IF NOT EXISTS _millstream_store (identity text NOT NULL, format integer NOT NULL);
CREATE TABLE IF NOT EXISTS _millstream_views (
    name text COLLATE "C" PRIMARY KEY, schema text NOT NULL, seq_next bigint NOT NULL,
    app text NOT NULL, job text NOT NULL, coverage text);
CREATE TABLE IF NOT EXISTS _millstream_changes (
    view text COLLATE "C" NOT NULL, seq bigint NOT NULL, rows bigint NOT NULL,
    batch_id bigint NOT NULL, frame bytea NOT NULL, PRIMARY KEY (view, seq));
CREATE TABLE IF NOT EXISTS _millstream_fences (
    app text NOT NULL, job text NOT NULL, run bigint NOT NULL, checkpoint_id text NOT NULL,
    batch_id bigint, commit_number bigint, position text, PRIMARY KEY (app, job));
"""


class PostgresSink:
    """Writes views; see :class:`millstream.views.sink.Sink` for the methods.

    Every batch has a part for it: the position that the views reflect.
    """

    has_fence = True

    def __init__(
        self, url: str, sinks: Sequence[SinkPlan], *, changes_kept: int = CHANGES_KEPT
    ) -> None:
        """Connect to the database, and create our tables if they are missing.

        Raises:
            ConfigError: it cannot be used; the message says why, without user and password.
            RetriableError: the server is away.
        """
        self.address = postgres_address(url)
        self.name = self.address.shown
        self._sinks = {sink.name: sink for sink in sinks}
        self._tables = {
            sink.name: PostgresViewTable(view_schema(sink), number)
            for number, sink in enumerate(sinks)
        }
        self._changes_kept = changes_kept
        self._checkpoint_id = ""
        self._connection = PostgresConnection(self.address, readonly=False)
        with self._connection.closed_on_error(), self._connection.transaction() as session:
            self.identity = _identity(_create_tables(session, self.address))

    def close(self) -> None:
        self._connection.close()

    def begin_run(self, start: RunStart) -> int | None:
        # One transaction: a crash before its commit leaves the older run in charge, and no view
        # declared; after it, the older run is refused.
        self._checkpoint_id = start.checkpoint_id
        with self._connection.transaction() as session:
            for table in self._tables.values():
                _declare(session, table, start, self.address)
            for (view, label), spans in start.coverage.items():
                if label == database_view_label(self.name):  # also views that this run leaves out
                    session.execute(
                        "UPDATE _millstream_views SET coverage = %s WHERE name = %s AND app = %s",
                        (json.dumps(spans_to_json(spans)), view, start.app),
                    )
            row = session.execute(
                "SELECT run, checkpoint_id, batch_id FROM _millstream_fences "
                "WHERE app = %s AND job = %s FOR UPDATE",
                (start.app, start.job),
            ).fetchone()
            last = None if row is None else self._check_older_run(start, *row)
            session.execute(
                "INSERT INTO _millstream_fences (app, job, run, checkpoint_id) "
                "VALUES (%s, %s, %s, %s) ON CONFLICT (app, job) DO UPDATE "
                "SET run = excluded.run, checkpoint_id = excluded.checkpoint_id",
                (start.app, start.job, start.run, start.checkpoint_id),
            )
        remove_tables(self._connection, start.app, start.run)
        return last

    def _check_older_run(
        self, start: RunStart, run: int, checkpoint_id: str, last: int | None
    ) -> int | None:
        if checkpoint_id != start.checkpoint_id and last is not None:
            raise ConfigError(
                f"{self.name} holds batches up to {last} of {start.job_label} that were made with another "
                f"checkpoint. Restore the app's folder. {start.reset_advice} --store URL."
            )
        if checkpoint_id == start.checkpoint_id and run > start.run:
            raise FencedError(
                f"Run {start.run} of {start.job_label} was replaced by run {run}, which {self.name} "
                "knows. Close this run. If no newer one runs, the app's own views were restored "
                "from an older time: restore both from the same."
            )
        return last

    def end_offsets(self) -> Mapping[OutputSink, Sequence[int]]:
        """Return {}: rows have no offsets here."""
        return {}

    def participates(self, part: SinkBatch) -> bool:  # noqa: ARG002 - see the class
        return True

    def stager(self, fence: Fence, output: str) -> PostgresStager | None:
        sink = self._sinks.get(output)
        if sink is None or not sink.key:  # a view without a key has one row
            return None
        tables = StagedTables.of(fence, output)
        with self._connection.transaction() as session:
            create_tables(session, self._tables[output].schema, tables)
        return PostgresStager(self.address, None, sink, tables)

    def commit(self, fence: Fence, part: SinkBatch) -> bool:
        # A crash before the server has the COMMIT leaves nothing of the batch; after it, all of it, with
        # the fence. If the connection breaks in between, the fence shows which.
        with self._connection.transaction() as session:
            position = self._admit(session, fence)
            if position is None:
                return False
            for name, rows in part.rows.items():
                if name in self._sinks:
                    self._apply(session, fence, view_change(self._sinks[name], rows))
            for name, staged in part.staged.items():
                if name in self._sinks:
                    self._merge(session, fence, name, staged)
            session.execute(
                "UPDATE _millstream_fences SET batch_id = %s, position = %s, commit_number = "
                "(SELECT coalesce(max(commit_number), 0) + 1 FROM _millstream_fences) "
                "WHERE app = %s AND job = %s",
                (
                    fence.batch_id,
                    json.dumps(merge_positions(position, part.position)),
                    fence.app,
                    fence.job,
                ),
            )
        if not self._sinks.keys().isdisjoint(part.staged):
            remove_tables(self._connection, fence.app, fence.run)
        return True

    def _admit(self, session: Session, fence: Fence) -> dict[str, Any] | None:
        """Return the position before this batch, or None if the batch is committed. Locks the fence."""
        row = session.execute(
            "SELECT run, batch_id, position, checkpoint_id FROM _millstream_fences "
            "WHERE app = %s AND job = %s FOR UPDATE",
            (fence.app, fence.job),
        ).fetchone()
        # The checkpoint, too: an app that starts over counts its runs from 1 again.
        if row is None or (row[0], row[3]) != (fence.run, self._checkpoint_id):
            newest = "none" if row is None else row[0]
            raise FencedError(
                f"Run {fence.run} of the job {fence.job!r} of the app {fence.app!r} was replaced: "
                f"the newest run that {self.name} knows is {newest}, so batch {fence.batch_id} is "
                "refused. Close this run."
            )
        if row[1] is not None and row[1] >= fence.batch_id:
            return None
        position: dict[str, Any] = json.loads(row[2] or "{}")
        return position

    def _apply(self, session: Session, fence: Fence, change: ViewChange) -> None:
        """Write one view's rows and log what that changed, deletes first."""
        table = self._tables[change.view]
        schema = table.schema
        upserts = sqlite_values.normalize(change.upserts, schema, schema.names)
        with self._change_log(session, fence, schema) as log:
            if change.deletes is not None and change.deletes.height:
                deletes = sqlite_values.normalize(change.deletes, schema, schema.key)
                session.execute(table.create_delete_stage)
                for number, part in enumerate(
                    sqlite_values.exclude_keys(deletes, upserts).iter_slices(_SLICE_ROWS)
                ):
                    if number:
                        session.execute(f"TRUNCATE {table.delete_stage}")
                    log.add(delete_rows(session, table, part), "delete")
            session.execute(table.create_stage)
            for number, part in enumerate(upserts.iter_slices(_SLICE_ROWS)):
                if number:
                    session.execute(f"TRUNCATE {table.stage}")  # a transaction begins with it empty
                log.add(upsert_rows(session, table, part), "upsert")

    def _merge(self, session: Session, fence: Fence, view: str, staged: StagedRows) -> None:
        """Move rows that tasks have copied into their view, and log what that changed."""
        schema = self._tables[view].schema
        with self._change_log(session, fence, schema) as log:
            merged = merge_staged(session, schema, staged, self._changes_kept)
            log.seq += merged.unlogged
            for operation, rows in merged.logged:
                log.add(rows, operation)

    @contextmanager
    def _change_log(
        self, session: Session, fence: Fence, schema: ViewSchema
    ) -> Iterator[_ChangeLogWriter]:
        """Give the change log of a view, and note its end after the block."""
        row = session.execute(
            "SELECT seq_next FROM _millstream_views WHERE name = %s", (schema.name,)
        ).fetchone()
        assert row is not None, "it was declared when the run began"
        log = _ChangeLogWriter(session, schema, fence.batch_id, seq=row[0])
        yield log
        if log.seq != row[0]:
            log.trim(self._changes_kept)
            session.execute(
                "UPDATE _millstream_views SET seq_next = %s WHERE name = %s",
                (log.seq, schema.name),
            )


class _ChangeLogWriter:
    """Adds to the change log of one view, within a transaction; ``seq`` is the next number."""

    def __init__(self, session: Session, schema: ViewSchema, batch_id: int, *, seq: int) -> None:
        self._session = session
        self._schema = schema
        self._batch_id = batch_id
        self.seq = seq

    def add(self, rows: pl.DataFrame, operation: str) -> None:
        if rows.is_empty():
            return
        frame = changelog.encode_changes(self._schema, rows, operation)
        self._session.execute(
            "INSERT INTO _millstream_changes VALUES (%s, %s, %s, %s, %b)",
            (self._schema.name, self.seq, rows.height, self._batch_id, frame),
        )
        self.seq += rows.height

    def trim(self, rows_kept: int) -> None:
        start = self.seq - rows_kept
        self._session.execute(
            "DELETE FROM _millstream_changes WHERE view = %s AND seq < %s AND seq + rows <= %s",
            (self._schema.name, start, start),
        )


def _identity(store: str) -> str:
    return f"postgresql:{store}"


def _create_tables(session: Session, address: PostgresAddress) -> str:
    """Create our tables if they are missing; return the database's identity."""
    session.execute("SELECT pg_advisory_xact_lock(%s)", (_SETUP_LOCK,))
    for statement in filter(str.strip, _TABLES.split(";")):
        session.execute(statement)
    session.execute(
        "INSERT INTO _millstream_store SELECT %s, %s "
        "WHERE NOT EXISTS (SELECT FROM _millstream_store)",
        (uuid.uuid4().hex, FORMAT),
    )
    check_format(session, address)
    row = session.execute("SELECT identity FROM _millstream_store").fetchone()
    assert row is not None, "it was inserted"
    return str(row[0])


def _declare(
    session: Session, table: PostgresViewTable, start: RunStart, address: PostgresAddress
) -> None:
    """Create the view if it is missing; refuse one of another app, or one declared differently."""
    wanted = table.schema
    check_view_name(wanted.name)
    row = session.execute(
        "SELECT schema, app FROM _millstream_views WHERE name = %s", (wanted.name,)
    ).fetchone()
    if row is None:
        there = session.execute("SELECT to_regclass(%s)", (table.name,)).fetchone()
        if there is not None and there[0] is not None:
            raise ConfigError(
                f"{address.shown} has a table {wanted.name!r} that is no view of Millstream. Give "
                "the view another name."
            )
        session.execute(table.create)
        session.execute(table.create_index)
        session.execute(
            "INSERT INTO _millstream_views VALUES (%s, %s, 1, %s, %s, NULL)",
            (wanted.name, wanted.to_json(), start.app, start.job),
        )
        return
    if row[1] != start.app:
        raise ConfigError(
            f"The view {wanted.name!r} in {address.shown} belongs to the app {row[1]!r}. Give one of "
            "them another name."
        )
    existing = ViewSchema.from_json(row[0])
    if existing != wanted:
        raise ConfigError(
            f"The view {wanted.name!r} in {address.shown} exists and differs: "
            f"{existing.difference(wanted)}. Give the new view another name."
        )


@dataclass(frozen=True)
class AppInDatabase:
    """What a database holds of an app: its views, and the number of its jobs."""

    identity: str
    shown: str
    views: tuple[str, ...]
    jobs: int

    def __bool__(self) -> bool:
        return bool(self.views or self.jobs)


def app_in_database(url: str, app: str) -> AppInDatabase:
    """Return what a database holds of an app.

    Raises:
        ConfigError: it cannot be used, or holds no views at all.
        RetriableError: the server is away.
    """
    address = postgres_address(url)
    connection = PostgresConnection(address, readonly=True)
    try:
        with connection.transaction() as session:
            check_format(session, address)
            (identity,) = session.execute("SELECT identity FROM _millstream_store").fetchall()[0]
            views = session.execute(
                "SELECT name FROM _millstream_views WHERE app = %s ORDER BY name", (app,)
            ).fetchall()
            ((jobs,),) = session.execute(
                "SELECT count(*) FROM _millstream_fences WHERE app = %s", (app,)
            ).fetchall()
    finally:
        connection.close()
    return AppInDatabase(
        _identity(identity), address.shown, tuple(name for (name,) in views), int(jobs)
    )


def forget_app(url: str, app: str) -> list[str]:
    """Remove an app's views from a database, with change logs and fences; return the names of the views.

    Raises:
        ConfigError: there is nothing of such an app.
    """
    address = postgres_address(url)
    connection = PostgresConnection(address, readonly=False)
    try:
        with connection.transaction() as session:
            check_format(session, address)
            fences = session.execute("DELETE FROM _millstream_fences WHERE app = %s", (app,))
            rows = session.execute(
                "DELETE FROM _millstream_views WHERE app = %s RETURNING name, schema", (app,)
            ).fetchall()
            if not rows and not fences.rowcount:
                raise ConfigError(
                    f"There is nothing of an app {app!r} in {address.shown}. Correct the name."
                )
            for name, schema in rows:
                table = PostgresViewTable(ViewSchema.from_json(schema))
                session.execute(f"DROP TABLE {table.name}")
                session.execute("DELETE FROM _millstream_changes WHERE view = %s", (name,))
        remove_tables(connection, app, sys.maxsize)
    finally:
        connection.close()
    return sorted(name for name, _ in rows)
