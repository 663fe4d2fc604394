"""Snapshots tied to places in the WAL.

A temporary slot begins at a place P and exports a snapshot that holds exactly the transactions that committed before
P. It is dropped at once: it keeps no WAL. Rows read in that snapshot belong after the transactions before P, and
before those after it, so nothing has to be compared or dropped.

Source: PostgreSQL 15, "Streaming Replication Protocol", CREATE_REPLICATION_SLOT.
"""

from __future__ import annotations

import select
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Self

from psycopg import errors
from psycopg.sql import SQL, Composed, Identifier, Literal

from millstream.capture.postgres.catalog import PgTable
from millstream.capture.postgres.messages import PgColumn
from millstream.capture.postgres.stream import (
    Session,
    check_end,
    create_slot,
    identity_of,
    open_session,
    refuse_other_timeline,
    run_command,
    translated,
)
from millstream.capture.postgres.values import parse_copy_line
from millstream.errors import RetriableError
from millstream.views.address import PostgresAddress

_LINES_BYTES_MAX = 16 << 20
_ROWS = 1000


@dataclass(frozen=True, slots=True)
class ReadTable:
    """A table as a snapshot reads it."""

    table: PgTable
    columns: tuple[PgColumn, ...]


@dataclass
class PgSnapshot:
    """A snapshot at ``lsn``, of a timeline if one is given; use it in ``with``. Tables that are read stay locked in ACCESS SHARE until it ends.

    Raises:
        RetriableError: transactions that write do not end; the message names the oldest.
    """

    address: PostgresAddress
    slot: str
    timeline: int | None = None
    lsn: int = field(default=0, init=False)

    def __enter__(self) -> Self:
        self._session = open_session(self.address)
        try:
            with translated(self.address):
                self._import()
        except BaseException:
            self._session.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._session.close()

    def _import(self) -> None:
        with open_session(self.address, replication=True) as maker:
            refuse_other_timeline(self.address, identity_of(maker).timeline, self.timeline)
            try:
                self.lsn, name = create_slot(maker, self.slot, temporary=True)
            except errors.QueryCanceled:
                raise RetriableError(waiting(self._session, self.address)) from None
            self._session.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
            self._session.execute(SQL("SET TRANSACTION SNAPSHOT {}").format(Literal(name)))

    def lock(self, table: PgTable) -> ReadTable | None:
        """Return a table with its columns; None if it is gone, or was rewritten since the snapshot.

        A rewritten table shows no rows to an older snapshot: PostgreSQL's documentation, "Caveats" of MVCC.
        """
        try:
            with self._session.transaction():
                self._session.execute(
                    SQL("SELECT 1 FROM {} LIMIT 0").format(Identifier(table.schema, table.table))
                )
        except errors.UndefinedTable:
            return None
        same = self._session.execute(
            "SELECT 1 FROM pg_class c WHERE oid = %s AND oid = to_regclass(%s) AND relname = %s "
            "AND (relkind = 'p' OR relfilenode = pg_relation_filenode(oid)) AND NOT EXISTS ("
            "SELECT 1 FROM pg_partition_tree(c.oid) t JOIN pg_class p ON p.oid = t.relid "
            "WHERE p.relkind = 'r' AND p.relfilenode <> pg_relation_filenode(p.oid))",
            (table.oid, table.quoted, table.table),
        ).fetchone()
        if same is None:
            return None
        rows = self._session.execute(
            "SELECT attname::text, atttypid::int8, atttypmod, false FROM pg_attribute "
            "WHERE attrelid = %s AND attnum > 0 AND NOT attisdropped AND attgenerated = '' ORDER BY attnum",
            (table.oid,),
        ).fetchall()
        return ReadTable(table, tuple(PgColumn(*row) for row in rows))

    def lines(
        self, read: ReadTable, after: list[str] | None, where: str = "", *, rows_max: int
    ) -> Iterator[list[bytes]]:
        """Yield the rows of a table, or those with a condition, as lines of COPY: so many at a time, or fewer large ones.

        They are in the order of the table's key if it has one, from behind a key on. Take all, or close the
        generator and use the snapshot no more.
        """
        conditions = [SQL("({})").format(_expression(where))] if where else []
        if after is not None:
            conditions.append(SQL("{} > {}").format(_key(read), _place(after)))
        yield from self._copied(_statement(read, conditions), rows_max)

    def lines_of(
        self, read: ReadTable, keys: Sequence[Sequence[str]], *, rows_max: int
    ) -> Iterator[list[bytes]]:
        """Yield the rows that have one of some keys, as :meth:`lines` does."""
        places = SQL(", ").join(map(_place, keys))
        condition = SQL("{} IN ({})").format(_key(read), places)
        yield from self._copied(_statement(read, [condition]), rows_max)

    def _copied(self, statement: Composed, rows_max: int) -> Iterator[list[bytes]]:
        connection = self._session.pgconn
        run_command(connection, statement.as_string(self._session))
        lines: list[bytes] = []
        size = 0
        while True:
            length, line = connection.get_copy_data(1)
            if length > 0:
                lines.append(bytes(line))
                size += length
            elif length == 0:
                select.select([connection.socket], [], [])
                connection.consume_input()
            if lines and (length < 0 or len(lines) == rows_max or size >= _LINES_BYTES_MAX):
                yield lines
                lines, size = [], 0
            if length < 0:
                check_end(connection)
                return

    def rows(self, read: ReadTable, after: list[str] | None) -> Iterator[list[str | None]]:
        """Yield the rows of a table as texts, in the order of :meth:`lines`."""
        for lines in self.lines(read, after, rows_max=_ROWS):
            for line in lines:
                yield parse_copy_line(line) if read.columns else []


def _key(read: ReadTable) -> Composed:
    return SQL("({})").format(SQL(", ").join(map(Identifier, read.table.key)))


def _place(key: Sequence[str]) -> Composed:
    return SQL("({})").format(SQL(", ").join(map(Literal, key)))


def _statement(read: ReadTable, conditions: Sequence[Composed]) -> Composed:
    columns = SQL(", ").join(Identifier(column.name) for column in read.columns)
    name = Identifier(read.table.schema, read.table.table)
    only = SQL(
        "" if read.table.partitioned else "ONLY "
    )  # tables that inherit are captured as their own
    query = SQL("SELECT {} FROM {}{}").format(columns, only, name)
    if conditions:
        query += SQL(" WHERE ") + SQL(" AND ").join(conditions)
    if read.table.key:
        query += SQL(" ORDER BY {}").format(SQL(", ").join(map(Identifier, read.table.key)))
    return SQL("COPY ({}) TO STDOUT").format(query)


def _expression(text: str) -> Composed:
    """Return a condition that somebody gave, as it is: the session can only read."""
    return Composed([SQL(text)])


def waiting(session: Session, address: PostgresAddress) -> str:
    """Say whom the creation of a slot waits for."""
    rows = session.execute(
        "SELECT pid, date_trunc('second', now() - xact_start)::text FROM pg_stat_activity "
        "WHERE backend_xid IS NOT NULL ORDER BY xact_start LIMIT 3"
    ).fetchall()
    listed = ", ".join(f"{pid} (open for {age})" for pid, age in rows) or "none any more"
    return (
        f"a snapshot of {address.shown} waits for transactions that write, of the server's processes {listed}. "
        "Let them end, or end them: SELECT pg_terminate_backend(pid). It is tried again."
    )
