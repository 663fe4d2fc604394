"""PostgreSQL as a target: a batch is a transaction of the server, which the state is in, too.

1. ``BEGIN``; the state's row is locked, and the token checked. A crash, of either side, leaves nothing.
2. Rows go by COPY into a temporary table, and from there into the table; the state is written. A crash leaves
   nothing: the server rolls back what has no COMMIT.
3. ``COMMIT``. If the connection breaks meanwhile, it may or may not be done. The next run sees which in the state.

Source: PostgreSQL 15, "INSERT ... ON CONFLICT", "COPY", "Explicit Locking".
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import psycopg
from psycopg.sql import SQL, Composed, Identifier

from millstream.capture.apply.applied_table import AppliedTable, Row, RowBatch
from millstream.capture.apply.batch_writer import key_hash
from millstream.capture.apply.postgres_values import copy_encoder, postgres_type
from millstream.capture.postgres.catalog import read_types
from millstream.capture.postgres.values import PgTypes, ValueOf, parse_copy_line
from millstream.errors import ConfigError, CorruptionError, FencedError, RetriableError
from millstream.views.address import PostgresAddress, is_refused_login

STATE_TABLE = "_millstream_apply"
_CONNECT_S = 10
# Texts that do not depend on the server's settings, and a synced commit whatever the server's default is.
_OPTIONS = (
    "-c datestyle=ISO,YMD -c intervalstyle=iso_8601 -c timezone=UTC -c bytea_output=hex -c extra_float_digits=3 "
    "-c client_encoding=UTF8 -c synchronous_commit=on -c statement_timeout=0 -c lock_timeout=30s "
    "-c idle_in_transaction_session_timeout=0 -c client_min_messages=warning"
)
# Classes of SQLSTATE: connection, conflict, resources, an object in use, the server shut down, its system.
_RETRIABLE = ("08", "40", "53", "55", "57", "58", "25006", "25P0")
_STAGE_ROWS = 2000  # lines of one write of COPY


class PostgresApplyTarget:
    """Applies to a database; see :class:`millstream.capture.apply.target.ApplyTarget` for the methods.

    Tables are in the schema that they have in the source; of MariaDB, in one that is named as their database.
    """

    batch_s = 0.0

    def __init__(self, address: PostgresAddress) -> None:
        self._address = address
        self.shown = address.shown
        self._name = self._token = ""
        self._stages: dict[str, AppliedTable] = {}
        self._types: PgTypes | None = None
        with self._translated():
            self._session = psycopg.connect(
                address.url,
                autocommit=True,
                options=_OPTIONS,
                application_name="millstream apply",
                connect_timeout=_CONNECT_S,
                keepalives_idle=10,
                keepalives_interval=5,
                keepalives_count=3,
                tcp_user_timeout=30_000,
            )

    def close(self) -> None:
        self._session.close()

    # ── the state ───────────────────────────────────────────────────────────────────────────

    def acquire(self, name: str, token: str, *, again: bool) -> str | None:
        self._name, self._token = name, token
        with self._translated(), self._session.transaction():
            self._refuse_source()
            self._session.execute(
                f"CREATE TABLE IF NOT EXISTS {STATE_TABLE} (name text PRIMARY KEY, token text NOT NULL, state text)"
            )
            found = self._stored()
            if again and (found is None or found[0] != token):
                raise self._fenced()
            self._session.execute(
                f"INSERT INTO {STATE_TABLE} (name, token) VALUES (%s, %s) "  # noqa: S608 - our name
                "ON CONFLICT (name) DO UPDATE SET token = EXCLUDED.token",
                (name, token),
            )
        return None if found is None else found[1]

    def _stored(self) -> tuple[str, str | None] | None:
        found = self._session.execute(
            f"SELECT token, state FROM {STATE_TABLE} WHERE name = %s FOR UPDATE",  # noqa: S608 - our name
            (self._name,),
        ).fetchone()
        return None if found is None else (found[0], found[1])

    def _fenced(self) -> FencedError:
        return FencedError(
            f"another `millstream apply` or `millstream reconcile` of {self._name!r} has begun to write to "
            f"{self.shown}. This one ends; run one at a time."
        )

    def _refuse_source(self) -> None:
        """Return if this is not the database that is captured: what is applied would be captured again, for ever."""
        found = self._session.execute(
            "SELECT slot_name FROM pg_replication_slots WHERE database = current_database() "
            "AND slot_name LIKE 'millstream\\_%'"
        ).fetchone()
        if found is not None:
            raise ConfigError(
                f"{self.shown} is a database that is captured, by the slot {found[0]}. Apply into another database; if "
                f"that capture has ended for good, drop its slot first: SELECT pg_drop_replication_slot('{found[0]}');"
            )

    # ── a batch ─────────────────────────────────────────────────────────────────────────────

    def begin(self) -> None:
        with self._translated():
            self._session.execute("BEGIN")
            found = self._stored()
            if found is None or found[0] != self._token:
                self.rollback()
                raise self._fenced()

    def commit(self, state: str) -> None:
        with self._translated():
            self._session.execute(
                f"UPDATE {STATE_TABLE} SET state = %s WHERE name = %s",  # noqa: S608 - our name
                (state, self._name),
            )
            self._session.execute("COMMIT")

    def rollback(self) -> None:
        self._stages.clear()  # they may be of this transaction
        with suppress(psycopg.Error):
            self._session.execute("ROLLBACK")

    def define(self, table: AppliedTable, before: AppliedTable | None) -> None:
        self._stages.pop(table.collection, None)
        with self._translated():
            found = self._columns(table)
            if not found:
                self._session.execute(_create_statement(table))
                return
            empty = self._is_empty(table)
            if before is None and not empty:
                raise ConfigError(
                    f"{self.shown} has a table {table.collection} with rows that `millstream apply` has not written. "
                    "Apply into another database; or name the tables to apply (--tables) without it; or empty it."
                )
            differing = self._differing(table, found)
            key = self._key(table)
            if not differing and set(key) == set(table.key):
                self._add_columns(table, found)
                return
            if before is None or not empty:
                raise ConfigError(self._plan(table, differing, key))
            self._session.execute(SQL("DROP TABLE {}").format(_name(table)))
            self._session.execute(_create_statement(table))

    def _add_columns(self, table: AppliedTable, found: dict[str, tuple[int, str]]) -> None:
        for name, kind in table.columns:
            if name not in found:
                self._session.execute(
                    SQL("ALTER TABLE {} ADD COLUMN {} {}").format(
                        _name(table), Identifier(name), SQL(postgres_type(table, kind))
                    )
                )

    def _plan(self, table: AppliedTable, differing: dict[str, str], key: Sequence[str]) -> str:
        """Say what a person is to do, where only a person knows what becomes of the rows."""
        statements = [
            SQL("ALTER TABLE {} ALTER COLUMN {} TYPE {} USING {}::{};")
            .format(_name(table), Identifier(name), SQL(kind), Identifier(name), SQL(kind))
            .as_string(self._session)
            for name, kind in differing.items()
        ]
        if set(key) != set(table.key):
            columns = SQL(", ").join(map(Identifier, table.key))
            statements.append(
                SQL("ALTER TABLE {} ADD PRIMARY KEY ({});")
                .format(_name(table), columns)
                .as_string(self._session)
                + (" (drop the other one first)" if key else "")
            )
        what = ", ".join(differing) or f"its key, which is {', '.join(key) or 'none'}"
        return (
            f"the table {table.collection} of {self.shown} differs from its definition in the source in {what}. Run this "
            f"there, and apply again: {' '.join(statements)}"
        )

    def _columns(self, table: AppliedTable) -> dict[str, tuple[int, str]]:
        """Return type's oid and name by column."""
        rows = self._session.execute(
            "SELECT attname::text, atttypid::int8, format_type(atttypid, NULL) FROM pg_attribute "
            "WHERE attrelid = to_regclass(%s) AND attnum > 0 AND NOT attisdropped",
            (_name(table).as_string(self._session),),
        ).fetchall()
        return {name: (oid, kind) for name, oid, kind in rows}

    def _differing(self, table: AppliedTable, found: dict[str, tuple[int, str]]) -> dict[str, str]:
        """Return the columns that are of another type, with that which they should have. Text holds any value."""
        wanted = {name: postgres_type(table, kind) for name, kind in table.columns if name in found}
        rows = self._session.execute(
            "SELECT name, to_regtype(name)::oid::int8 FROM unnest(%s::text[]) name",
            (sorted(set(wanted.values())),),
        ).fetchall()
        oids: dict[str, int] = dict(rows)
        return {
            name: kind
            for name, kind in wanted.items()
            if found[name][0] != oids[kind] and found[name][1] not in ("text", "character varying")
        }

    def _key(self, table: AppliedTable) -> list[str]:
        rows = self._session.execute(
            "SELECT a.attname::text FROM pg_index i CROSS JOIN unnest(i.indkey) WITH ORDINALITY k(number, place) "
            "JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = k.number "
            "WHERE i.indrelid = to_regclass(%s) AND i.indisprimary ORDER BY k.place",
            (_name(table).as_string(self._session),),
        ).fetchall()
        return [name for (name,) in rows]

    def _is_empty(self, table: AppliedTable) -> bool:
        statement = SQL("SELECT 1 FROM {} LIMIT 1").format(_name(table))
        return self._session.execute(statement).fetchone() is None

    def truncate(self, table: AppliedTable) -> None:
        with self._translated():
            self._session.execute(SQL("TRUNCATE {}").format(_name(table)))

    def write(self, batch: RowBatch) -> None:
        table = batch.table
        with self._translated(table):
            if batch.deletes:
                stage = self._staged(table, batch.deletes, table.key)
                self._session.execute(
                    SQL("DELETE FROM {} t USING {} s WHERE {}").format(
                        _name(table), stage, _same_key(table)
                    )
                )
            if batch.upserts:
                stage = self._staged(table, batch.upserts, tuple(table.types))
                self._session.execute(_upsert_statement(table, stage))

    def _staged(self, table: AppliedTable, rows: Sequence[Row], names: Sequence[str]) -> Identifier:
        """Put rows into a temporary table, and return its name. It has the types of the target's columns."""
        stage = self._stage(table)
        columns = SQL(", ").join(map(Identifier, names))
        encode = copy_encoder(table, names)
        with (
            self._encoded(table),
            self._session.cursor().copy(
                SQL("COPY {} ({}) FROM STDIN").format(stage, columns)
            ) as copy,
        ):
            for first in range(0, len(rows), _STAGE_ROWS):
                lines = [encode(row) for row in rows[first : first + _STAGE_ROWS]]
                copy.write("\n".join([*lines, ""]).encode("utf-8"))
        return stage

    def _stage(self, table: AppliedTable) -> Identifier:
        """Return the table's stage, which is empty."""
        # Names are cut after 63 bytes: those of two tables would be one.
        stage = Identifier(f"_stage_{key_hash(table.collection.encode()):016x}_{table.offset}")
        if self._stages.get(table.collection) == table:
            self._session.execute(SQL("TRUNCATE {}").format(stage))
            return stage
        self._session.execute(SQL("DROP TABLE IF EXISTS pg_temp.{}").format(stage))
        columns = SQL(", ").join(map(Identifier, table.types))
        self._session.execute(
            SQL("CREATE TEMPORARY TABLE {} AS SELECT {} FROM {} LIMIT 0").format(
                stage, columns, _name(table)
            )
        )
        self._stages[table.collection] = table
        return stage

    def rows(self, table: AppliedTable, keys: Sequence[Row]) -> Iterator[Row]:
        with self._translated(table):
            stage = self._staged(table, keys, table.key)
            condition = _same_key(table)
            query = SQL("SELECT {} FROM {} t JOIN {} s ON {}").format(
                _columns_of(table, "t"), _name(table), stage, condition
            )
            yield from self._copied(table, query)

    def scan(self, table: AppliedTable) -> Iterator[Row]:
        with self._translated(table):
            if self._columns(table):
                query = SQL("SELECT {} FROM {} t").format(_columns_of(table, "t"), _name(table))
                yield from self._copied(table, query)

    def _copied(self, table: AppliedTable, query: Composed) -> Iterator[Row]:
        readers = self._readers(table)
        with self._session.cursor().copy(SQL("COPY ({}) TO STDOUT").format(query)) as copy:
            for line in copy:
                values = parse_copy_line(bytes(line))
                yield {
                    name: None if value is None else read(value)
                    for (name, read), value in zip(readers, values, strict=True)
                }

    def _readers(self, table: AppliedTable) -> list[tuple[str, ValueOf]]:
        if self._types is None:
            self._types = read_types(self._session)
        found = self._columns(table)
        return [
            (name, int if kind.kind == "uint64" else self._types.reader(found[name][0]))
            for name, kind in table.columns
        ]

    # ── errors ──────────────────────────────────────────────────────────────────────────────

    @contextmanager
    def _encoded(self, table: AppliedTable) -> Iterator[None]:
        try:
            yield
        except (ValueError, TypeError, KeyError) as error:
            raise ConfigError(_unfit(table, str(error))) from error

    @contextmanager
    def _translated(self, table: AppliedTable | None = None) -> Iterator[None]:
        try:
            yield
        except psycopg.Error as error:
            state = error.sqlstate or ("08" if isinstance(error, psycopg.OperationalError) else "")
            said = self._address.redacted(str(error)).strip().replace("\n", "; ")
            # From None: the driver's error can contain the password.
            if state.startswith("XX"):
                raise CorruptionError(f"{self.shown} is damaged: {said}") from None
            if is_refused_login(str(error)):
                raise ConfigError(
                    f"{self.shown} refuses: {said}. Correct the user, the password (it may be in MILLSTREAM_APPLY_PASSWORD), the "
                    "database, or the server's pg_hba.conf."
                ) from None
            if state.startswith(_RETRIABLE) or not state:
                raise RetriableError(
                    f"{self.shown} does not respond as it should: {said}. It is tried again."
                ) from None
            if table is not None and state.startswith("22"):
                raise ConfigError(_unfit(table, said)) from None
            raise ConfigError(
                f"{self.shown} refused what was applied: {said}. Correct that, and apply again."
            ) from None


def _unfit(table: AppliedTable, said: str) -> str:
    return (
        f"a row of {table.collection} has a value that does not fit its column: {said}. Give the column a type that holds "
        "it (text holds any value): ALTER TABLE … ALTER COLUMN … TYPE text; and apply again; or name the tables to apply "
        "(--tables) without this one."
    )


# ── statements ────────────────────────────────────────────────────────────────────────────────


def _name(table: AppliedTable) -> Identifier:
    return Identifier(table.database, table.table)


def _columns_of(table: AppliedTable, alias: str) -> Composed:
    return SQL(", ").join(Identifier(alias, name) for name in table.types)


def _same_key(table: AppliedTable) -> Composed:
    return SQL(" AND ").join(
        SQL("{} = {}").format(Identifier("t", name), Identifier("s", name)) for name in table.key
    )


def _create_statement(table: AppliedTable) -> Composed:
    columns = [
        SQL("{} {}").format(Identifier(name), SQL(postgres_type(table, kind)))
        for name, kind in table.columns
    ]
    key = SQL(", ").join(map(Identifier, table.key))
    return SQL("CREATE SCHEMA IF NOT EXISTS {}; CREATE TABLE {} ({}, PRIMARY KEY ({}))").format(
        Identifier(table.database), _name(table), SQL(", ").join(columns), key
    )


def _upsert_statement(table: AppliedTable, stage: Identifier) -> Composed:
    columns = SQL(", ").join(map(Identifier, table.types))
    key = SQL(", ").join(map(Identifier, table.key))
    changes = [
        SQL("{} = EXCLUDED.{}").format(Identifier(name), Identifier(name))
        for name in table.types
        if name not in table.key
    ]
    change = SQL("UPDATE SET {}").format(SQL(", ").join(changes)) if changes else SQL("NOTHING")
    return SQL("INSERT INTO {} ({}) SELECT {} FROM {} ON CONFLICT ({}) DO {}").format(
        _name(table), columns, columns, stage, key, change
    )
