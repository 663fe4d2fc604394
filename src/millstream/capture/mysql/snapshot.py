"""Chunks of a snapshot: each a short transaction, at a known place in the binary log.

MariaDB's ``START TRANSACTION WITH CONSISTENT SNAPSHOT`` gives a snapshot of InnoDB and, as
``binlog_snapshot_file`` and ``binlog_snapshot_position``, the end of the last transaction that is in it
(mariadb.com/kb, "Enhancements for START TRANSACTION WITH CONSISTENT SNAPSHOT"). No row and no table is locked; while a
chunk is read, an ALTER of its table waits.

MySQL tells no place with a snapshot: a transaction is in its binary log before InnoDB has committed it. So a second session
holds ``LOCK TABLES … READ`` while the snapshot is taken and the place is read. It gets the lock when each transaction that
wrote the table has ended, commit and all, and no other may write it until then: of this table the snapshot has what the log
has up to the place, and nothing more. It waits a second at most (``lock_wait_timeout``), in which writers of the table
wait with it. If capture stands still while it holds the lock, the server ends that session after ``LOCKED_S_MAX``, and the
chunk is read again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from millstream.capture.mysql.session import (
    LOCK_WAIT_TIMEOUT,
    WAIT_TIMEOUT_S,
    MariaDbSession,
    TableAlteredError,
    TableInUseError,
)
from millstream.capture.mysql.snapshot_rows import snapshot_block
from millstream.capture.mysql.table_schema import TableSchema, read_schema
from millstream.capture.units import RowBlock, TableChange

T = TypeVar("T")
LOCKED_S_MAX = 5  # of MySQL: after which the server takes a lock back that is held for no statement
_BLOCK_ROWS_MAX = 2000  # as of row events: what is in memory once more, as JSON


class BinlogPosition(NamedTuple):
    """A place in the binary log. Files are compared by the number that their name ends with."""

    number: int
    position: int
    file: str

    @classmethod
    def of(cls, file: str, position: int) -> BinlogPosition:
        return cls(int(file.rpartition(".")[2]), position, file)

    def __str__(self) -> str:
        return f"{self.file}:{self.position}"


@dataclass(frozen=True, slots=True)
class SnapshotChunk:
    """Rows of a table as they were at ``position``; ``last_key`` is that of the last row, None at the table's end.

    ``selected`` are the rows as the server gave them: the table's columns, and those of its key.
    """

    schema: TableSchema
    position: BinlogPosition
    selected: list[tuple[Any, ...]]
    last_key: list[str] | None

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield the rows, with captured values."""
        return self._rendered(self.selected)

    def _rendered(self, selected: list[tuple[Any, ...]]) -> Iterator[dict[str, Any]]:
        columns = self.schema.columns
        renderers = [(one.name, one.renderer(self.schema.name)) for one in columns]
        for row in selected:
            yield {
                name: None if value is None else render(value)
                for (name, render), value in zip(renderers, row, strict=False)
            }

    def contents(self) -> Iterator[RowBlock | TableChange]:
        """Yield what the chunk adds to the table: as blocks, where that can be."""
        schema = self.schema
        for first in range(0, len(self.selected), _BLOCK_ROWS_MAX):
            selected = self.selected[first : first + _BLOCK_ROWS_MAX]
            block = snapshot_block(schema, selected)
            if block is not None:
                yield block
                continue
            for row in self._rendered(selected):
                yield TableChange(schema.database, schema.table, "r", schema.key, None, row)


class BinlogEnd(NamedTuple):
    """Where the binary log ends; of MySQL with the GTIDs that were executed a moment before, as text."""

    position: BinlogPosition
    gtids: str


def current_end(session: MariaDbSession) -> BinlogEnd:
    """Return where the binary log ends now."""
    renamed = session.is_mysql and session.release >= (8, 2)
    status = "BINARY LOG" if renamed else "MASTER"
    file, position, *_, last = session.rows(f"SHOW {status} STATUS")[0]
    gtids = str(last) if session.is_mysql else ""
    return BinlogEnd(BinlogPosition.of(file, int(position)), gtids)


def current_position(session: MariaDbSession) -> BinlogPosition:
    """Return the same without the GTIDs."""
    return current_end(session).position


def prepared_transactions(session: MariaDbSession) -> set[tuple[Any, ...]]:
    """Return MariaDB's transactions of XA that are prepared; none of MySQL, whose lock waits for them."""
    return set() if session.is_mysql else set(session.rows("XA RECOVER"))


def refuse_prepared(session: MariaDbSession, before: set[tuple[Any, ...]]) -> None:
    """Return if none of the transactions is prepared any more that were so before the log was read.

    Their rows are in no snapshot, and in the log before the place of it.

    Raises:
        TableInUseError: one is.
    """
    found = before & prepared_transactions(session) if before else None
    if found:
        raise TableInUseError(
            f"{session.address.shown} has {len(found)} transactions of XA that were prepared before the capture began, and are "
            "neither committed nor rolled back: no snapshot can be taken. See XA RECOVER. It is tried again."
        )


def begin_snapshot(session: MariaDbSession, tables: Sequence[tuple[str, str]]) -> BinlogPosition:
    """Begin a transaction with a snapshot of tables, and return the place in the binary log that it is at.

    Raises:
        TableInUseError: of MySQL: a transaction that has written one of the tables does not end.
    """
    if session.is_mysql:
        return begin_locked(session, tables, current_position)
    session.rows("START TRANSACTION WITH CONSISTENT SNAPSHOT")
    status = dict(session.rows("SHOW STATUS LIKE 'binlog_snapshot_%'"))
    return BinlogPosition.of(
        status["Binlog_snapshot_file"], int(status["Binlog_snapshot_position"])
    )


def begin_locked(
    session: MariaDbSession, names: Sequence[tuple[str, str]], ask: Callable[[MariaDbSession], T]
) -> T:
    """Begin a transaction with a snapshot of tables of MySQL; return what the server says to ``ask`` in that moment.

    No transaction that has written one of the tables is under way then.

    Raises:
        TableInUseError: such a one does not end.
    """
    tables = [TableSchema(*name, (), ()).quoted for name in names]
    second = session.second
    # A capture that stands still, or whose network is cut, unlocks nothing: the server ends a session that is silent.
    second.rows(f"SET SESSION wait_timeout = {LOCKED_S_MAX}")
    try:
        if tables:
            _lock(second, tables)
        session.rows("START TRANSACTION WITH CONSISTENT SNAPSHOT")
        for table in tables:  # from here on an ALTER waits
            session.rows(f"SELECT 1 FROM {table} LIMIT 0")  # noqa: S608 - quoted
        return ask(session)
    finally:  # an error if the lock was lost meanwhile: then the place is not known to be the snapshot's
        second.rows("UNLOCK TABLES")
        second.rows(f"SET SESSION wait_timeout = {WAIT_TIMEOUT_S}")


def _lock(session: MariaDbSession, tables: list[str]) -> None:
    try:
        session.rows(f"LOCK TABLES {', '.join(f'{table} READ' for table in tables)}")
    except TableAlteredError as error:
        if error.code != LOCK_WAIT_TIMEOUT:
            raise
        raise TableInUseError(
            f"{error} A transaction that has written {', '.join(tables)} has not ended for a second, so that no snapshot of it "
            "can be taken; see performance_schema.metadata_locks. It is tried again."
        ) from None


def read_chunk(
    session: MariaDbSession,
    database: str,
    table: str,
    after: list[str] | None,
    limit: int,
    *,
    where: str = "",
) -> SnapshotChunk:
    """Return the next rows of a table in the order of its key, from a snapshot of their own.

    Args:
        where: Of which this expression is true; empty for all.
        after: The key that the last chunk ended with, None for the first one.

    Raises:
        TableAlteredError: the table was altered since the snapshot was taken, or is gone.
        RetriableError: the server is gone.
    """
    try:
        position = begin_snapshot(session, [(database, table)])
        return next_chunk(session, position, (database, table), after, limit, where=where)
    finally:
        session.rows("ROLLBACK")


def next_chunk(
    session: MariaDbSession,
    position: BinlogPosition,
    table: tuple[str, str],
    after: list[str] | None,
    limit: int,
    *,
    where: str = "",
) -> SnapshotChunk:
    """Return the same from the snapshot at ``position`` that the session is in. ``table``: its database and name.

    Raises:
        TableAlteredError: as :func:`read_chunk`.
        RetriableError: the server is gone.
    """
    name = TableSchema(*table, (), ()).quoted
    session.rows(f"SELECT 1 FROM {name} LIMIT 0")  # noqa: S608 - quoted; from here on an ALTER waits
    schema = read_schema(session, *table)
    if not schema.key or (after is not None and len(after) != len(schema.key)):
        raise TableAlteredError(f"{schema.name} has another key than before. It is read again.")
    found = session.whole_rows(_statement(schema, after, limit, where))
    width = len(schema.columns)
    last = None
    if len(found) == limit:
        last = [_as_bytes(value).hex() for value in found[-1][width:]]
    return SnapshotChunk(schema, position, found, last)


def _as_bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else value


def _statement(schema: TableSchema, after: list[str] | None, limit: int, where: str) -> str:
    selected = [column.expression for column in schema.columns]
    selected += [column.key_value for column in schema.key_columns]
    order = ", ".join(column.key_expression for column in schema.key_columns)
    conditions = [f"({where})"] if where else []
    if after is not None:
        conditions.append(f"({_after(schema, after)})")
    where = f" WHERE {' AND '.join(conditions)}" if conditions else ""
    columns = ", ".join(selected)
    return f"SELECT {columns} FROM {schema.quoted}{where} ORDER BY {order} LIMIT {limit}"  # noqa: S608 - quoted


def _after(schema: TableSchema, after: list[str]) -> str:
    """Return the condition of the rows after a key: ``a > x OR (a = x AND b > y)``, which an index serves."""
    literals = [
        (column.key_expression, column.key_literal(bytes.fromhex(value)))
        for column, value in zip(schema.key_columns, after, strict=True)
    ]
    choices = []
    for place, (column, literal) in enumerate(literals):
        equal = [f"{other} = {value}" for other, value in literals[:place]]
        choices.append(" AND ".join([*equal, f"{column} > {literal}"]))
    return " OR ".join(f"({choice})" for choice in choices)
