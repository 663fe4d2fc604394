"""Tables of a SQLite database, as capture needs to know them, and what keeps one from being captured."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass

from millstream.capture.sqlite.encoding import quote_identifier
from millstream.errors import ConfigError

OUR_PREFIX = "_millstream_"
_AFTER = re.compile(r"\bAFTER\s+(INSERT|UPDATE|DELETE)\b", re.IGNORECASE)
_COLLATIONS = frozenset(("BINARY", "NOCASE", "RTRIM"))


@dataclass(frozen=True, slots=True)
class UniqueIndex:
    """Columns whose values no two rows share, each with the collation that compares them."""

    columns: tuple[tuple[str | None, str], ...]


@dataclass(frozen=True, slots=True)
class SqliteTable:
    """A table: its columns with their declared types, and its key."""

    name: str
    columns: tuple[tuple[str, str], ...]
    key: tuple[str, ...]
    uniques: tuple[UniqueIndex, ...]
    without_rowid: bool = False

    @property
    def column_names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.columns)

    @property
    def rowid(self) -> str | None:
        """A name of the number that each row has: a column may have taken it, and None is left if columns have all."""
        taken = {name.lower() for name in self.column_names}
        return next((name for name in ("rowid", "_rowid_", "oid") if name not in taken), None)

    def is_blob(self, column: str) -> bool:
        """Say whether a column is declared as BLOB."""
        return "BLOB" in dict(self.columns)[column].upper()


def read_tables(
    connection: sqlite3.Connection, wanted: Callable[[str], bool]
) -> dict[str, SqliteTable]:
    """Return the tables that are to be captured, by name; no views, virtual or internal tables."""
    rows = connection.execute(
        "SELECT name, wr FROM pragma_table_list WHERE schema = 'main' AND type = 'table' ORDER BY name"
    ).fetchall()
    return {
        name: _read_table(connection, name, bool(without_rowid))
        for name, without_rowid in rows
        if not name.startswith(("sqlite_", OUR_PREFIX)) and wanted(name)
    }


def _read_table(
    connection: sqlite3.Connection,
    name: str,
    without_rowid: bool,  # noqa: FBT001 - private
) -> SqliteTable:
    columns = connection.execute(
        "SELECT name, type, pk FROM pragma_table_xinfo(?) WHERE hidden <> 1 ORDER BY cid", (name,)
    ).fetchall()
    key = tuple(row[0] for row in sorted(columns, key=lambda row: row[2]) if row[2])
    indexes = connection.execute(
        'SELECT name FROM pragma_index_list(?) WHERE "unique"', (name,)
    ).fetchall()
    uniques = tuple(
        UniqueIndex(
            tuple(
                connection.execute(
                    "SELECT name, coll FROM pragma_index_xinfo(?) WHERE key ORDER BY seqno", index
                )
            )
        )
        for index in indexes
    )
    return SqliteTable(
        name, tuple((row[0], row[1]) for row in columns), key, uniques, without_rowid
    )


def refuse_faults(connection: sqlite3.Connection, tables: dict[str, SqliteTable]) -> None:
    """Return if the database and each table can be captured without loss.

    Raises:
        ConfigError: one cannot; the message has each reason, and what mends it.
    """
    faults = []
    (encoding,) = connection.execute("PRAGMA encoding").fetchone()
    if encoding != "UTF-8":
        faults.append(
            f"the database is encoded as {encoding}. Mend it: copy it into one whose encoding is UTF-8, with "
            "sqlite3 old.db .dump | sqlite3 new.db"
        )
    for table in tables.values():
        faults += _faults(connection, table)
    if faults:
        listed = "\n".join(f"  {number}. {fault}" for number, fault in enumerate(faults, 1))
        raise ConfigError(f"the database cannot be captured as it is:\n{listed}")


def _trigger_faults(connection: sqlite3.Connection, table: SqliteTable) -> list[str]:
    """Return what keeps our triggers from seeing the rows that another one takes the place of."""
    faults = []
    if table.rowid is None:
        faults.append(
            f"{table.name} has columns called rowid, _rowid_ and oid. Mend it: rename one of them"
        )
    triggers = connection.execute(
        "SELECT name, sql FROM sqlite_schema WHERE type = 'trigger' AND tbl_name = ? COLLATE NOCASE "
        "AND substr(name, 1, ?) <> ?",
        (table.name, len(OUR_PREFIX), OUR_PREFIX),
    ).fetchall()
    writes = re.compile(
        r"\b(INSERT|REPLACE|UPDATE)\b(\s+OR\s+\w+)?(\s+INTO)?\s*[\"`\[']?"
        + re.escape(table.name)
        + r"(?!\w)",
        re.IGNORECASE,
    )
    for name, sql in triggers:
        if not _AFTER.search(sql) and writes.search(sql):
            faults.append(
                f"{table.name} has a unique index, and the trigger {name}, which writes to it again before a row is "
                "written. Mend it: make the trigger an AFTER trigger"
            )
    return faults


def _faults(connection: sqlite3.Connection, table: SqliteTable) -> list[str]:
    name = quote_identifier(table.name)
    faults = []
    if not table.key:
        faults.append(
            f"{table.name} has no primary key: its rows cannot be told apart. Mend it: make the table anew with one"
        )
    if table.without_rowid:
        faults.append(
            f"{table.name} is WITHOUT ROWID. Mend it: make the table anew as an ordinary one"
        )
    if table.uniques:
        faults += _trigger_faults(connection, table)
    for unique in table.uniques:
        if any(column is None for column, _ in unique.columns):
            faults.append(
                f"{table.name} has a unique index on an expression. Mend it: make it one on a generated column"
            )
        unknown = {collation for _, collation in unique.columns} - _COLLATIONS
        if unknown:
            faults.append(
                f"{table.name} has an index with the collation {', '.join(sorted(unknown))}, which only its own program "
                "has. Mend it: use BINARY, NOCASE or RTRIM"
            )
    if table.key and not faults:
        nulls = " OR ".join(f"{quote_identifier(column)} IS NULL" for column in table.key)
        if connection.execute(f"SELECT 1 FROM {name} WHERE {nulls} LIMIT 1").fetchone():  # noqa: S608 - quoted
            faults.append(
                f"{table.name} has rows with NULL in the primary key. Mend it: give them keys, and declare the columns "
                "NOT NULL"
            )
    return faults
