"""How the rows of a batch are written into a view's table, and which of them are changes.

Rows that are there already, as they are, are no changes. To find them, rows are written to a temporary table
first, and compared with those that are there, which takes half as long again as writing them. Mostly there are none.
So where the first rows are all changes, the others are written at once, part by part, and the number of rows that
SQLite has changed says whether all of them are. If not, the part is undone, and what is left is compared.
"""

from __future__ import annotations

import polars as pl

from millstream.views.sink import check_written
from millstream.views.state_store import sqlite_values
from millstream.views.state_store.database import Database
from millstream.views.state_store.view_table import STAGE, ViewTable

_COMPARED_ROWS = 1_000
_PART_ROWS = 16_384  # to undo a part, SQLite keeps the pages that it changes in memory


def upsert_rows(db: Database, table: ViewTable, rows: pl.DataFrame) -> pl.DataFrame:
    """Write rows, which are normalised, into a view; return those that are changes."""
    first = rows.head(_COMPARED_ROWS)
    changed = [_compared(db, table, first)]
    at = first.height
    if changed[0].height == first.height:
        while at < rows.height and _all_changed(db, table, rows.slice(at, _PART_ROWS)):
            at = min(at + _PART_ROWS, rows.height)
        changed = [rows.head(at)]
    if at < rows.height:
        changed.append(_compared(db, table, rows.slice(at)))
    return pl.concat(changed)


def _all_changed(db: Database, table: ViewTable, rows: pl.DataFrame) -> bool:
    """Write rows, if they are all changes."""
    db.execute("SAVEPOINT part")
    encoded = sqlite_values.encode_rows(rows, table.schema)
    all_are = db.executemany(table.upsert_given, encoded).rowcount == rows.height
    if not all_are:
        db.execute("ROLLBACK TO part")
    db.execute("RELEASE part")
    return all_are


def _compared(db: Database, table: ViewTable, rows: pl.DataFrame) -> pl.DataFrame:
    """Write the rows that are changes, and return them."""
    changed = stage_rows(db, table, rows, table.select_changed)
    if not changed.is_empty():
        written = db.execute(table.upsert).rowcount
        check_written(f"the view {table.schema.name!r}", changed.height, written)
    return changed


def stage_rows(db: Database, table: ViewTable, rows: pl.DataFrame, select: str) -> pl.DataFrame:
    """Write rows to the temporary table; return those whose numbers ``select`` returns."""
    db.execute(f"DROP TABLE IF EXISTS {STAGE}")
    db.execute(table.create_stage(rows.width))
    staged = db.executemany(
        table.fill_stage(rows.width), sqlite_values.encode_rows(rows, table.schema)
    )
    check_written(f"the view {table.schema.name!r}", rows.height, max(staged.rowcount, 0))
    numbers = [number - 1 for (number,) in db.execute(select)]
    return rows if len(numbers) == rows.height else rows[numbers]
