"""The tables that capture keeps in the captured database: the changes, and which database it is.

``_millstream_changes`` gets a row for each change, from triggers, in the writer's own transaction: so it holds committed
changes only, in the order of the commits, numbered by ``seq``, which is never used twice. The last row that was
stored stays, with its ``nonce``: a database that was restored from a backup does not have it.
"""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass

from millstream.capture.sqlite.encoding import quote_identifier
from millstream.capture.sqlite.table_info import OUR_PREFIX, SqliteTable
from millstream.capture.sqlite.triggers import CHANGES, NOW_MS, create_triggers, trigger_names
from millstream.errors import ConflictError

CAPTURES = f"{OUR_PREFIX}capture"
MARK = "-"
_MADE_ANEW = "Changes may be missing: capture into a new prefix, from a new snapshot."


@dataclass(frozen=True, slots=True)
class ChangeMark:
    """The last change that was read: its number, and what tells it from another one with that number."""

    seq: int
    nonce: str


def create_change_table(connection: sqlite3.Connection) -> None:
    """Make the tables if they are not there, within the caller's transaction."""
    connection.execute(
        f"CREATE TABLE IF NOT EXISTS {CHANGES} (seq INTEGER PRIMARY KEY AUTOINCREMENT, "
        "nonce TEXT NOT NULL DEFAULT (lower(hex(randomblob(8)))), tbl TEXT NOT NULL, op TEXT NOT NULL, "
        "at_ms INTEGER NOT NULL, ref INTEGER, key TEXT, before TEXT, after TEXT)"
    )
    connection.execute(
        f"CREATE INDEX IF NOT EXISTS {CHANGES}_notes ON {CHANGES} (tbl) WHERE op = '?'"
    )
    connection.execute(
        f"CREATE TABLE IF NOT EXISTS {CAPTURES} (id TEXT NOT NULL DEFAULT (lower(hex(randomblob(16)))))"
    )
    connection.execute(
        f"INSERT INTO {CAPTURES} (id) SELECT lower(hex(randomblob(16))) "  # noqa: S608 - our own name
        f"WHERE NOT EXISTS (SELECT 1 FROM {CAPTURES})"
    )


def add_mark(connection: sqlite3.Connection, about: str) -> ChangeMark:
    """Write a change of no table, and return it: ``about`` says, as JSON, which triggers write from here on."""
    row = connection.execute(
        f"INSERT INTO {CHANGES} (tbl, op, at_ms, after) "  # noqa: S608 - our own names
        f"VALUES ('', '{MARK}', {NOW_MS}, ?) RETURNING seq, nonce",
        (about,),
    ).fetchone()
    return ChangeMark(*row)


def take_over(connection: sqlite3.Connection) -> str:
    """Give the database a new identity, so that an older capture of it stops; return it."""
    (identity,) = connection.execute(
        f"UPDATE {CAPTURES} SET id = lower(hex(randomblob(16))) RETURNING id"  # noqa: S608 - our own name
    ).fetchone()
    return str(identity)


def capture_id(connection: sqlite3.Connection) -> str | None:
    """Return which database this is to capture; None if it was never captured."""
    try:
        row = connection.execute(f"SELECT id FROM {CAPTURES}").fetchone()  # noqa: S608 - our own name
    except sqlite3.OperationalError:
        return None
    return None if row is None else str(row[0])


def check_mark(connection: sqlite3.Connection, identity: str, mark: ChangeMark) -> None:
    """Return if the database is the one that was captured, and has not gone back.

    Raises:
        ConflictError: it is another one, or was restored from a backup.
    """
    found = capture_id(connection)
    if found != identity:
        raise ConflictError(
            f"the database was captured as {identity}, and is {found or 'not captured'} now: it is another file, or "
            f"was made anew, or another capture of it has begun. {_MADE_ANEW}"
        )
    row = connection.execute(
        f"SELECT nonce FROM {CHANGES} WHERE seq = ?",  # noqa: S608 - our own name
        (mark.seq,),
    ).fetchone()
    if row is None or row[0] != mark.nonce:
        raise ConflictError(
            f"the database does not have change {mark.seq}, which was captured from it: it was restored from a backup, "
            f"or {CHANGES} was altered. {_MADE_ANEW}"
        )


def last_change(connection: sqlite3.Connection) -> ChangeMark:
    """Return the last change that there is."""
    row = connection.execute(
        f"SELECT seq, nonce FROM {CHANGES} WHERE op <> '?' ORDER BY seq DESC LIMIT 1"  # noqa: S608 - our own name
    ).fetchone()
    return ChangeMark(*row)


def changes_between(connection: sqlite3.Connection, after: int, last: int) -> sqlite3.Cursor:
    """Return (seq, tbl, op, at_ms, before, after) of changes in ``(after, last]``, without notes."""
    return connection.execute(
        f"SELECT seq, tbl, op, at_ms, before, after FROM {CHANGES} "  # noqa: S608 - our own name
        "WHERE seq > ? AND seq <= ? AND op <> '?' ORDER BY seq",
        (after, last),
    )


def delete_before(connection: sqlite3.Connection, seq: int) -> None:
    """Delete the changes before one, which are stored."""
    connection.execute(f"DELETE FROM {CHANGES} WHERE seq < ?", (seq,))  # noqa: S608 - our own name


def installed_triggers(connection: sqlite3.Connection) -> dict[str, tuple[str, str]]:
    """Return the table and the SQL of each trigger of ours, by name."""
    rows = connection.execute(
        "SELECT name, tbl_name, sql FROM sqlite_schema WHERE type = 'trigger' AND substr(name, 1, ?) = ?",
        (len(OUR_PREFIX), OUR_PREFIX),
    ).fetchall()
    return {name: (table, sql) for name, table, sql in rows}


def has_triggers(
    connection: sqlite3.Connection, installed: dict[str, tuple[str, str]], table: SqliteTable
) -> bool:
    """Say whether a table has exactly the triggers that it should have, and the application made none after them."""
    if table.uniques and _is_overtaken(connection, table):
        return False
    mine = sorted(sql for owner, sql in installed.values() if owner == table.name)
    return mine == sorted(create_triggers(table))


def _is_overtaken(connection: sqlite3.Connection, table: SqliteTable) -> bool:
    found = connection.execute(
        "SELECT 1 FROM sqlite_schema WHERE type = 'trigger' AND tbl_name = ? COLLATE NOCASE "
        "AND substr(name, 1, ?) <> ? AND rowid > (SELECT min(rowid) FROM sqlite_schema "
        "WHERE type = 'trigger' AND tbl_name = ? COLLATE NOCASE AND substr(name, 1, ?) = ?)",
        (table.name, len(OUR_PREFIX), OUR_PREFIX) * 2,
    )
    return found.fetchone() is not None


def install_triggers(connection: sqlite3.Connection, table: SqliteTable) -> None:
    """Make a table's triggers, in place of those that it has, within the caller's transaction."""
    remove_triggers(connection, table.name)
    for statement in create_triggers(table):
        connection.execute(statement)


def remove_triggers(connection: sqlite3.Connection, table: str) -> None:
    """Remove a table's triggers: by their names, and those that came with the table's own name."""
    names = set(trigger_names(table))
    names |= {name for name, (owner, _) in installed_triggers(connection).items() if owner == table}
    for name in sorted(names):
        connection.execute(f"DROP TRIGGER IF EXISTS {quote_identifier(name)}")


def remove_capture(connection: sqlite3.Connection) -> list[str]:
    """Remove all that capture has made in the database, within the caller's transaction; return what it was."""
    triggers = sorted(installed_triggers(connection))
    for name in triggers:
        connection.execute(f"DROP TRIGGER {quote_identifier(name)}")
    tables = connection.execute(
        "SELECT name FROM sqlite_schema WHERE type = 'table' AND name IN (?, ?) ORDER BY name",
        (CHANGES, CAPTURES),
    ).fetchall()
    for (name,) in tables:
        connection.execute(f"DROP TABLE {name}")
    return [
        *(f"the trigger {name}" for name in triggers),
        *(f"the table {name}" for (name,) in tables),
    ]
