"""Writing rows of a view: COPY to a temporary table, then one statement that moves them into the view.

The temporary table has been made, and is empty. All happens within the caller's transaction.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import polars as pl

from millstream.views.postgres.values import decode_rows, encode_copy
from millstream.views.postgres.view_table import PostgresViewTable
from millstream.views.schema import ViewSchema
from millstream.views.sink import check_written
from millstream.views.state_store import sqlite_values

if TYPE_CHECKING:
    from millstream.views.postgres.connection import Session


def _copy(session: Session, table: str, rows: pl.DataFrame, schema: ViewSchema) -> None:
    names = ", ".join(["i", *(f"c{n}" for n in range(rows.width))])
    statement = f"COPY {table} ({names}) FROM STDIN"
    with session.cursor() as cursor, cursor.copy(statement) as copy:
        copy.write(encode_copy(rows, schema))
    counted = session.execute(f"SELECT count(*) FROM {table}").fetchone()  # noqa: S608
    check_written(f"the view {schema.name!r}", rows.height, counted[0] if counted else 0)


def upsert_rows(session: Session, table: PostgresViewTable, rows: pl.DataFrame) -> pl.DataFrame:
    """Move rows into the view; return those that changed something."""
    schema = table.schema
    _copy(session, table.stage, rows, schema)
    with session.cursor(binary=True) as cursor:
        cursor.execute(table.upsert)
        if cursor.rowcount in (0, rows.height):
            return rows.head(cursor.rowcount)
        changed = decode_rows(cursor.fetchall(), schema, schema.key)
    return sqlite_values.select_keys(rows, changed)


def null_patterns(keys: pl.DataFrame) -> Iterator[tuple[bool, ...]]:
    """Yield which key columns are null together, for :meth:`PostgresViewTable.delete`."""
    columns = [keys[name].alias(str(n)).is_null() for n, name in enumerate(keys.columns)]
    yield from pl.DataFrame(columns).unique().iter_rows()


def delete_rows(session: Session, table: PostgresViewTable, keys: pl.DataFrame) -> pl.DataFrame:
    """Delete the rows of some keys; return the keys that were there."""
    _copy(session, table.delete_stage, keys, table.schema)
    gone: list[int] = []
    for nulls in null_patterns(keys):
        found = session.execute(table.delete(nulls)).fetchall()
        gone += [number for (number,) in found]
    return keys[sorted(gone)]
