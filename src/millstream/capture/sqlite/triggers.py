"""The triggers of a captured table: which SQL writes its changes down.

``INSERT OR REPLACE`` and ``UPDATE OR REPLACE`` delete the rows that are in the way, and SQLite runs no DELETE trigger for
them unless a writer has set ``recursive_triggers``. So a BEFORE trigger notes the rows that share a unique value with the
new one (``?``), and the AFTER trigger makes deletions of those that are gone. Notes of a statement that replaced nothing
are overwritten by the next one, and never captured. SQLite runs the trigger first that was made last: so ours run before
those of the application, which may write to the table again.
"""

from __future__ import annotations

from collections.abc import Iterator

from millstream.capture.sqlite.encoding import encoded, quote_identifier, quote_text
from millstream.capture.sqlite.table_info import OUR_PREFIX, SqliteTable

CHANGES = f"{OUR_PREFIX}changes"
_EVENTS = ("insert", "update", "delete", "before_insert", "before_update")
NOW_MS = "CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER)"


def trigger_names(table: str) -> list[str]:
    """Return the names of a table's triggers, whether it has them all or not."""
    return [f"{OUR_PREFIX}{event}_{table}" for event in _EVENTS]


def create_triggers(table: SqliteTable) -> Iterator[str]:
    """Yield the statements that make a table's triggers."""
    resolve = _resolve(table) if _may_replace(table) else ""
    new, old = encoded(table.column_names, "NEW"), encoded(table.column_names, "OLD")
    key = {row: encoded(table.key, row) for row in ("NEW", "OLD")}
    yield _trigger(
        table, "insert", "AFTER INSERT", resolve + _insert(table, "c", key["NEW"], "NULL", new)
    )
    yield _trigger(
        table, "update", "AFTER UPDATE", resolve + _insert(table, "u", key["NEW"], old, new)
    )
    yield _trigger(table, "delete", "AFTER DELETE", _insert(table, "d", key["OLD"], old, "NULL"))
    if resolve:
        yield _trigger(table, "before_insert", "BEFORE INSERT", _note(table, "1"))
        yield _trigger(
            table,
            "before_update",
            "BEFORE UPDATE",
            _note(table, f"t.{table.rowid} <> OLD.{table.rowid}"),
        )


def _trigger(table: SqliteTable, event: str, when: str, body: str) -> str:
    name = quote_identifier(f"{OUR_PREFIX}{event}_{table.name}")
    return f"CREATE TRIGGER {name} {when} ON {quote_identifier(table.name)} BEGIN {body} END"


def _insert(table: SqliteTable, op: str, key: str, before: str, after: str) -> str:
    return (
        f"INSERT INTO {CHANGES} (tbl, op, at_ms, key, before, after) VALUES "  # noqa: S608 - quoted
        f"({quote_text(table.name)}, '{op}', {NOW_MS}, {key}, {before}, {after});"
    )


def _may_replace(table: SqliteTable) -> bool:
    """Say whether a row can take the place of one with another key."""
    return bool(table.uniques)  # an INTEGER PRIMARY KEY has no index, and compares exactly


def _note(table: SqliteTable, condition: str) -> str:
    """Return what notes the rows that share a unique value with the new one."""
    shared = " OR ".join(
        "("
        + " AND ".join(
            f"t.{quote_identifier(str(column))} = NEW.{quote_identifier(str(column))} COLLATE {collation}"
            for column, collation in unique.columns
        )
        + ")"
        for unique in table.uniques
    )
    name = quote_text(table.name)
    return (
        f"DELETE FROM {CHANGES} WHERE op = '?' AND tbl = {name}; "  # noqa: S608 - quoted
        f"INSERT INTO {CHANGES} (tbl, op, at_ms, ref, key, before) "
        f"SELECT {name}, '?', {NOW_MS}, t.{table.rowid}, {encoded(table.key, 't')}, {encoded(table.column_names, 't')} "
        f"FROM {quote_identifier(table.name)} AS t WHERE ({shared}) AND {condition};"
    )


def _resolve(table: SqliteTable) -> str:
    """Return what makes deletions of the noted rows that are gone, unless a DELETE trigger has written them."""
    name = quote_text(table.name)
    key = encoded(table.key, "t")
    return (
        f"UPDATE {CHANGES} SET op = 'd' WHERE op = '?' AND tbl = {name} "  # noqa: S608 - quoted
        f"AND NOT EXISTS (SELECT 1 FROM {quote_identifier(table.name)} AS t "
        f"WHERE t.{table.rowid} = {CHANGES}.ref AND {key} = {CHANGES}.key) "
        f"AND NOT EXISTS (SELECT 1 FROM {CHANGES} AS later WHERE later.seq > {CHANGES}.seq "
        f"AND later.op = 'd' AND later.tbl = {name} AND later.key = {CHANGES}.key); "
    )
