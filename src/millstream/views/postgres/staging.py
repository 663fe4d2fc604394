"""Rows of a view that tasks copy into the database, and the transaction that merges them into the view.

Each large batch has tables of its own for a view: for rows, and for keys to be deleted. They are not logged, which
halves what a COPY writes; so a server that crashes empties them, and a replica that takes over has them empty.
Each attempt of a task copies under a number of its own, in one transaction. What a crash leaves:

========================================  ============================================================
a crash, or a failure, after              leaves
========================================  ============================================================
1. the tables are created                 empty tables; removed when the next run begins
2. attempts have copied their rows        the same with rows: of attempts that are not named, too
3. the batch's transaction has moved the  nothing more: the transaction is undone
   rows of the named attempts
4. it is committed, with the fence        the batch is done; the tables are removed after it, or by the
                                          next large batch, or when the next run begins
========================================  ============================================================

A table is removed only if nobody uses it: an executor that was cut off while it copied holds no commit up. Tables
are removed up to the run that removes them, so a run that was replaced does not remove those of its successor. The
transaction counts the rows of each named attempt before it moves them: rows that a server has lost are missed
there, and the driver writes the batch itself.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from hashlib import sha256
from typing import TYPE_CHECKING

import polars as pl

from millstream.errors import MillstreamError, StagedRowsLostError
from millstream.kernels.plan import SinkPlan
from millstream.views.address import PostgresAddress
from millstream.views.postgres.connection import PostgresConnection
from millstream.views.postgres.values import decode_rows, encode_copy
from millstream.views.postgres.view_table import PostgresViewTable
from millstream.views.postgres.writer import null_patterns
from millstream.views.retractions import view_change, view_schema
from millstream.views.schema import Fence, ViewSchema
from millstream.views.staging import StagedRows
from millstream.views.state_store import sqlite_values

if TYPE_CHECKING:
    from millstream.views.postgres.connection import Session

_SLICE_ROWS = 131_072  # bounds the memory of a COPY, and the size of one change frame
_TABLE = re.compile(r"_staged_[0-9a-f]{12}_(\d+)_\d+_.*")  # ... _run_batch_view


@dataclass(frozen=True)
class StagedTables:
    """The names of the tables of one view in one batch."""

    rows: str
    keys: str

    @classmethod
    def of(cls, fence: Fence, view: str) -> StagedTables:
        own = sha256(view.encode()).hexdigest()[:12]
        name = f"{_prefix(fence.app)}{fence.run}_{fence.batch_id}_{own}"
        return cls(f"{name}_u", f"{name}_d")


@dataclass(frozen=True)
class StagedAttempt:
    """What one attempt of a task has copied. ``nulls`` are the patterns of nulls in the keys to be deleted."""

    number: int
    tables: StagedTables
    rows: int
    keys: int
    nulls: tuple[tuple[bool, ...], ...]


@dataclass(frozen=True)
class PostgresStager:
    """Has tasks copy rows of a view; see :class:`millstream.views.staging.Stager`.

    The address may hold a password, so it is not shown.
    """

    address: PostgresAddress = field(repr=False)
    settings: Mapping[str, str] | None
    sink: SinkPlan
    tables: StagedTables

    @property
    def key(self) -> tuple[str, ...]:
        return self.sink.key

    def is_reachable(self) -> bool:
        """Return whether this process can connect to the database, and write to the tables."""
        may = "SELECT has_table_privilege(%s, 'INSERT') AND has_table_privilege(%s, 'INSERT')"
        try:
            with closing(self._connect()) as connection, connection.transaction() as session:
                row = session.execute(may, (self.tables.rows, self.tables.keys)).fetchone()
        except MillstreamError:
            return False
        return row == (True,)

    def stage(self, rows: pl.DataFrame) -> StagedAttempt:
        """Copy what some rows do to the view, in one transaction."""
        schema = view_schema(self.sink)
        change = view_change(self.sink, rows)
        upserts = sqlite_values.normalize(change.upserts, schema, schema.names)
        keys = upserts.select([upserts[name] for name in schema.key]).clear()
        if change.deletes is not None:
            deletes = sqlite_values.normalize(change.deletes, schema, schema.key)
            keys = sqlite_values.exclude_keys(deletes, upserts)
        attempt = secrets.randbits(62)
        with closing(self._connect()) as connection, connection.transaction() as session:
            for table, given in ((self.tables.rows, upserts), (self.tables.keys, keys)):
                _copy(session, table, attempt, given, schema)
        return StagedAttempt(
            attempt, self.tables, upserts.height, keys.height, tuple(null_patterns(keys))
        )

    def _connect(self) -> PostgresConnection:
        return PostgresConnection(self.address, readonly=False, settings=self.settings)


def _copy(
    session: Session, table: str, attempt: int, rows: pl.DataFrame, schema: ViewSchema
) -> None:
    names = ", ".join(["attempt", "i", *(f"c{n}" for n in range(rows.width))])
    with session.cursor() as cursor, cursor.copy(f"COPY {table} ({names}) FROM STDIN") as copy:
        for start in range(0, rows.height, _SLICE_ROWS):
            part = rows.slice(start, _SLICE_ROWS)
            copy.write(encode_copy(part, schema, start=start, attempt=attempt))


def create_tables(session: Session, schema: ViewSchema, tables: StagedTables) -> None:
    """Create the tables for a batch, unless they are there."""
    table = PostgresViewTable(schema)
    session.execute(table.create_staged(tables.rows, schema.names))
    session.execute(table.create_staged(tables.keys, schema.key))


def remove_tables(connection: PostgresConnection, app: str, run: int) -> None:
    """Remove the tables of an app's batches, up to those of a run, unless they are in use."""
    with connection.transaction() as session:
        found = session.execute(
            "SELECT relname FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace "
            "WHERE n.nspname = current_schema() AND c.relkind = 'r' AND starts_with(c.relname, %s)",
            (_prefix(app),),
        ).fetchall()
    for (name,) in found:
        match = _TABLE.fullmatch(name)
        if match is not None and int(match[1]) <= run:
            with suppress(MillstreamError), connection.transaction() as session:  # left to the next
                session.execute("SELECT set_config('lock_timeout', '100ms', true)")
                session.execute(f"DROP TABLE IF EXISTS {name}")


def _prefix(app: str) -> str:
    return f"_staged_{sha256(app.encode()).hexdigest()[:12]}_"


@dataclass(frozen=True)
class MergedRows:
    """What a merge changed, in order: changes that are not to be logged, and then those to log, by operation."""

    unlogged: int
    logged: Sequence[tuple[str, pl.DataFrame]]


def merge_staged(
    session: Session, schema: ViewSchema, staged: StagedRows, rows_logged: int
) -> MergedRows:
    """Merge the rows that were staged for a view into it, within the batch's transaction.

    At least the last ``rows_logged`` changes are returned, if there are as many; of the others only how many.

    Raises:
        StagedRowsLostError: staged rows are gone.
    """
    attempts: Sequence[StagedAttempt] = staged.parts
    _check_complete(session, schema, attempts)
    merge = _Merge(session, schema, rows_logged)
    # Attempts have different keys, so their order does not matter; backwards, the last changes come first.
    for attempt in reversed(attempts):
        merge.upsert(attempt)
    for attempt in reversed(attempts):
        merge.delete(attempt)
    return MergedRows(merge.unlogged, merge.logged[::-1])


def _check_complete(
    session: Session, schema: ViewSchema, attempts: Sequence[StagedAttempt]
) -> None:
    for tables in {attempt.tables for attempt in attempts}:
        for name, counted in (
            (tables.rows, {each.number: each.rows for each in attempts}),
            (tables.keys, {each.number: each.keys for each in attempts}),
        ):
            there = session.execute("SELECT to_regclass(%s) IS NOT NULL", (name,)).fetchone()
            found = session.execute(
                f"SELECT attempt, count(*) FROM {name} GROUP BY attempt"  # noqa: S608
                if there == (True,)
                else "SELECT 0, 0 WHERE false"
            ).fetchall()
            lost = sum(counted.values()) - sum(
                min(n, counted.get(attempt, 0)) for attempt, n in found
            )
            if lost:
                raise StagedRowsLostError(
                    f"{lost} of the rows that tasks had staged for the view {schema.name!r} are gone, as after a crash "
                    "or a failover of the server. Nothing of this batch was committed. Run the app again, and it is "
                    "repeated whole."
                )


@dataclass
class _Merge:
    """A merge, from the last change to the first."""

    session: Session
    schema: ViewSchema
    left: int
    unlogged: int = 0
    logged: list[tuple[str, pl.DataFrame]] = field(default_factory=list)

    @property
    def _table(self) -> PostgresViewTable:
        return PostgresViewTable(self.schema)

    def upsert(self, attempt: StagedAttempt) -> None:
        """Move the rows of an attempt into the view, slice by slice while changes are to be logged."""
        for rows in self._slices(attempt.rows):
            statement = self._table.merge(
                attempt.tables.rows, attempt.number, rows, returning=self.left > 0
            )
            self._run([statement], "upsert", self.schema.names)

    def delete(self, attempt: StagedAttempt) -> None:
        """Delete the rows of an attempt's keys likewise."""
        for rows in self._slices(attempt.keys):
            statements = [
                self._table.delete_staged(attempt.tables.keys, attempt.number, rows, nulls)
                for nulls in attempt.nulls
            ]
            self._run(statements, "delete", self.schema.key)

    def _slices(self, rows: int) -> Iterator[range]:
        """Yield ranges of rows from the last to the first: slices while changes are to be logged, then all."""
        end = rows
        while end > 0:
            start = max(0, end - _SLICE_ROWS) if self.left > 0 else 0
            yield range(start, end)
            end = start

    def _run(self, statements: Sequence[str], operation: str, names: Sequence[str]) -> None:
        changed: list[pl.DataFrame] = []
        for statement in statements:
            with self.session.cursor(binary=True) as cursor:
                cursor.execute(statement.encode())
                if self.left > 0:
                    changed.append(decode_rows(cursor.fetchall(), self.schema, names))
                else:
                    self.unlogged += cursor.rowcount
        rows = pl.concat(changed) if changed else None
        if rows is not None and rows.height:
            self.left -= rows.height
            self.logged.append((operation, rows))
