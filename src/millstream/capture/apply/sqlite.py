"""SQLite as a target: a batch is a transaction of the file, which the state is in, too.

1. ``BEGIN IMMEDIATE`` takes the write lock, and the token is checked. A crash leaves nothing.
2. Rows and the state are written. A crash leaves a journal, which SQLite rolls back.
3. ``COMMIT`` syncs. A crash before it leaves what 2 leaves; after it the batch is there, with its state.

Source: SQLite, "Atomic Commit In SQLite", "UPSERT".
"""

from __future__ import annotations

import base64
import json
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from millstream.capture.apply.applied_table import AppliedTable, Row, RowBatch
from millstream.capture.apply.captured_types import CapturedType, Kind, text_of
from millstream.capture.sqlite.encoding import json_value, quote_identifier
from millstream.errors import ConfigError, CorruptionError, FencedError, RetriableError
from millstream.sqlite_mode import write_ahead

STATE_TABLE = "_millstream_apply"
_CAPTURE_TABLE = "_millstream_capture"
_BUSY_S = 5.0
_DECLARED: dict[Kind, str] = {
    "int16": "INTEGER",
    "int32": "INTEGER",
    "int64": "INTEGER",
    "boolean": "INTEGER",
    "float32": "REAL",
    "float64": "REAL",
    "bytes": "BLOB",
}
_Convert = Callable[[Any], Any]


class SqliteApplyTarget:
    """Applies to a SQLite database; see :class:`millstream.capture.apply.target.ApplyTarget` for the methods."""

    batch_s = 0.0

    def __init__(self, path: Path) -> None:
        self.shown = str(path)
        self._token = self._name = ""
        with self._translated():
            is_new = not path.exists() or path.stat().st_size == 0
            self._session = sqlite3.connect(path, timeout=_BUSY_S, isolation_level=None)
            if is_new:
                write_ahead(self._session)
            self._session.execute("PRAGMA synchronous = FULL")

    def close(self) -> None:
        self._session.close()

    # ── the state ───────────────────────────────────────────────────────────────────────────

    def acquire(self, name: str, token: str, *, again: bool) -> str | None:
        with self._translated():
            self._session.execute("BEGIN IMMEDIATE")
            try:
                self._refuse_source()
                self._session.execute(
                    f"CREATE TABLE IF NOT EXISTS {STATE_TABLE} "
                    "(name TEXT PRIMARY KEY NOT NULL, token TEXT NOT NULL, state TEXT)"
                )
                self._name, self._token = name, token
                if again:
                    self._check_token()
                self._session.execute(
                    f"INSERT INTO {STATE_TABLE} (name, token) VALUES (?, ?) "  # noqa: S608 - our name
                    "ON CONFLICT (name) DO UPDATE SET token = excluded.token",
                    (name, token),
                )
                self._session.execute("COMMIT")
            except BaseException:
                self.rollback()
                raise
            return self._stored()[1]

    def _stored(self) -> tuple[str | None, str | None]:
        found = self._session.execute(
            f"SELECT token, state FROM {STATE_TABLE} WHERE name = ?",  # noqa: S608 - our name
            (self._name,),
        ).fetchone()
        return found or (None, None)

    def _check_token(self) -> None:
        if self._stored()[0] != self._token:
            raise FencedError(
                f"another `millstream apply` or `millstream reconcile` of {self._name!r} has begun to write to "
                f"{self.shown}. This one ends; run one at a time."
            )

    def _refuse_source(self) -> None:
        """Return if this is no database that is captured: what is applied would be captured again, for ever."""
        if self._declared_columns(_CAPTURE_TABLE):
            raise ConfigError(
                f"{self.shown} is a database that is captured. Apply into another file, or take capture out of this one "
                "first: docs/capture-sqlite.md."
            )

    # ── a batch ─────────────────────────────────────────────────────────────────────────────

    def begin(self) -> None:
        with self._translated():
            self._session.execute("BEGIN IMMEDIATE")
            self._check_token()

    def commit(self, state: str) -> None:
        with self._translated():
            self._session.execute(
                f"UPDATE {STATE_TABLE} SET state = ? WHERE name = ?",  # noqa: S608 - our name
                (state, self._name),
            )
            self._session.execute("COMMIT")

    def rollback(self) -> None:
        with suppress(sqlite3.Error):
            if self._session.in_transaction:
                self._session.execute("ROLLBACK")

    def define(self, table: AppliedTable, before: AppliedTable | None) -> None:
        with self._translated():
            found = self._declared_columns(table.table)
            if not found:
                self._session.execute(_create_statement(table))
                return
            empty = self._is_empty(table)
            if before is None and not empty:
                raise ConfigError(
                    f"{self.shown} has a table {table.table!r} with rows that `millstream apply` has not written. Apply "
                    f"into another file; or name the tables to apply (--tables) without it; or empty it."
                )
            wanted = _declared(table)
            differing = {
                name for name in wanted if found.get(name, (wanted[name],))[0] != wanted[name]
            }
            key = tuple(name for name, (_, place) in sorted(found.items(), key=_place) if place)
            if not differing and key == table.key:
                for name in [name for name in wanted if name not in found]:
                    self._session.execute(
                        f"ALTER TABLE {_quoted(table)} ADD COLUMN {quote_identifier(name)} {wanted[name]}"
                    )
                return
            if before is None or not empty:
                raise ConfigError(self._plan(table, differing, key))
            self._session.execute(f"DROP TABLE {_quoted(table)}")
            self._session.execute(_create_statement(table))

    def _plan(self, table: AppliedTable, differing: set[str], key: tuple[str, ...]) -> str:
        what = ", ".join(sorted(differing)) or f"the key, which is {', '.join(key) or 'none'}"
        old, columns = (
            quote_identifier(f"{table.table} before"),
            ", ".join(map(quote_identifier, _declared(table))),
        )
        copied = f"INSERT INTO {_quoted(table)} ({columns}) SELECT {columns} FROM {old}"  # noqa: S608 - quoted, shown
        return (
            f"the table {table.table!r} of {self.shown} differs from its definition in the source in {what}. SQLite cannot "
            f"alter that. Run this in it, and apply again: ALTER TABLE {_quoted(table)} RENAME TO {old}; "
            f"{_create_statement(table)}; {copied}; DROP TABLE {old};"
        )

    def _declared_columns(self, table: str) -> dict[str, tuple[str, int]]:
        """Return declared type and place in the key, by column."""
        rows = self._session.execute("SELECT name, type, pk FROM pragma_table_info(?)", (table,))
        return {name: (declared, place) for name, declared, place in rows}

    def _is_empty(self, table: AppliedTable) -> bool:
        statement = f"SELECT 1 FROM {_quoted(table)} LIMIT 1"  # noqa: S608 - quoted
        return self._session.execute(statement).fetchone() is None

    def truncate(self, table: AppliedTable) -> None:
        with self._translated():
            self._session.execute(f"DELETE FROM {_quoted(table)}")  # noqa: S608 - quoted

    def write(self, batch: RowBatch) -> None:
        table = batch.table
        key = " AND ".join(f"{quote_identifier(name)} = ?" for name in table.key)
        with self._translated(), _named(table):
            self._session.executemany(
                f"DELETE FROM {_quoted(table)} WHERE {key}",  # noqa: S608 - quoted
                map(_row_encoder(table, table.key), batch.deletes),
            )
            names = tuple(table.types)
            self._session.executemany(
                _upsert_statement(table), map(_row_encoder(table, names), batch.upserts)
            )

    def rows(self, table: AppliedTable, keys: Sequence[Row]) -> Iterator[Row]:
        where = " AND ".join(f"{quote_identifier(name)} = ?" for name in table.key)
        with self._translated(), _named(table):
            for key in map(_row_encoder(table, table.key), keys):
                yield from self._select(table, f"WHERE {where}", key)

    def scan(self, table: AppliedTable) -> Iterator[Row]:
        with self._translated():
            if self._declared_columns(table.table):
                yield from self._select(table, "", ())

    def _select(self, table: AppliedTable, where: str, values: Sequence[Any]) -> Iterator[Row]:
        columns = ", ".join(map(quote_identifier, table.types))
        decoders = [(name, _decoder(table, kind)) for name, kind in table.columns]
        for row in self._session.execute(
            f"SELECT {columns} FROM {_quoted(table)} {where}",  # noqa: S608 - quoted
            tuple(values),
        ):
            yield {
                name: None if value is None else decode(value)
                for (name, decode), value in zip(decoders, row, strict=True)
            }

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            name = getattr(error, "sqlite_errorname", "")
            if name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED", "SQLITE_FULL", "SQLITE_IOERR")):
                raise RetriableError(
                    f"{self.shown} cannot be written at the moment: {error}. It is tried again."
                ) from error
            if name.startswith(("SQLITE_CORRUPT", "SQLITE_NOTADB")):
                raise CorruptionError(f"{self.shown} is damaged: {error}. Restore it.") from error
            raise ConfigError(
                f"{self.shown} refused what was applied: {error}. Correct the table, or apply into another file."
            ) from error


# ── statements ────────────────────────────────────────────────────────────────────────────────


def _quoted(table: AppliedTable) -> str:
    return quote_identifier(table.table)


def _declared(table: AppliedTable) -> dict[str, str]:
    """Return the declared types of a table: those of the source, if that is SQLite."""
    if table.connector == "sqlite":
        return {name: kind.native for name, kind in table.columns}
    return {name: _DECLARED.get(kind.kind, "TEXT") for name, kind in table.columns}


def _place(column: tuple[str, tuple[str, int]]) -> int:
    return column[1][1]


def _create_statement(table: AppliedTable) -> str:
    columns = [f"{quote_identifier(name)} {kind}" for name, kind in _declared(table).items()]
    key = ", ".join(map(quote_identifier, table.key))
    return f"CREATE TABLE {_quoted(table)} ({', '.join(columns)}, PRIMARY KEY ({key}))"


def _upsert_statement(table: AppliedTable) -> str:
    columns = [quote_identifier(name) for name in table.types]
    key = ", ".join(map(quote_identifier, table.key))
    others = [quote_identifier(name) for name in table.types if name not in table.key]
    change = f"UPDATE SET {', '.join(f'{one} = excluded.{one}' for one in others)}"
    return (
        f"INSERT INTO {_quoted(table)} ({', '.join(columns)}) VALUES ({', '.join('?' * len(columns))}) "  # noqa: S608
        f"ON CONFLICT ({key}) DO {change if others else 'NOTHING'}"
    )


# ── values ────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def _named(table: AppliedTable) -> Iterator[None]:
    """Name the table in errors about its values."""
    try:
        yield
    except (ValueError, TypeError, OverflowError, KeyError) as error:
        raise ConfigError(
            f"a row of {table.collection} has a value that does not fit its type in the definition: {error}. Correct it in "
            "the source, or name the tables to apply (--tables) without this one."
        ) from error


def _row_encoder(table: AppliedTable, names: Sequence[str]) -> Callable[[Row], list[Any]]:
    """Return what makes SQLite's values of the columns of a row."""
    encoders = [(name, _encoder(table, table.types[name])) for name in names]

    def encode(row: Row) -> list[Any]:
        return [
            None if (value := row[name]) is None else convert(value) for name, convert in encoders
        ]

    return encode


def _same(value: Any) -> Any:
    return value


def _encoder(table: AppliedTable, kind: CapturedType) -> _Convert:
    if table.connector == "sqlite":
        return _SQLITE_ENCODERS.get(kind.kind, _of_any)
    return _ENCODERS.get(kind.kind, text_of)


def _decoder(table: AppliedTable, kind: CapturedType) -> _Convert:
    if table.connector == "sqlite":
        is_blob = "BLOB" in kind.native.upper()
        return lambda value: json_value(value, is_blob=is_blob)
    return _DECODERS.get(kind.kind, _same)


def _of_any(value: Any) -> Any:
    """Return a value of a column of SQLite, which may hold any type."""
    if isinstance(value, dict):
        return base64.b64decode(value["blob"]) if "blob" in value else value["text"]
    return value


def _of_blob(value: Any) -> Any:
    return base64.b64decode(value) if isinstance(value, str) else _of_any(value)


def _of_real(value: Any) -> Any:
    return float(value) if value in ("Infinity", "-Infinity") else _of_any(value)


_SQLITE_ENCODERS: dict[Kind, _Convert] = {"bytes": _of_blob, "float64": _of_real}
_ENCODERS: dict[Kind, _Convert] = {
    "int16": _same,
    "int32": _same,
    "int64": _same,
    "boolean": int,
    "float32": _same,
    "float64": _same,
    "bytes": base64.b64decode,
}
_DECODERS: dict[Kind, _Convert] = {
    "boolean": bool,
    "bytes": lambda value: base64.b64encode(value).decode(),
    "uint64": int,
    "array": json.loads,
}
