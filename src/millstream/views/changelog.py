"""A view's change log: every change that a batch made, as Arrow frames in the store's own file.

A frame holds the changes of one batch (a large one is split), numbered without gaps from its
``seq`` on, so writing 100,000 changes is one insert, and reading them needs no conversion. The
oldest frames are forgotten whole, as soon as the rest holds as many rows as are to be kept.
"""

from __future__ import annotations

import io
import sqlite3

import polars as pl

from millstream.errors import OffsetOutOfRangeError
from millstream.views.schema import ViewSchema


def append(
    db: sqlite3.Connection,
    schema: ViewSchema,
    rows: pl.DataFrame,
    operation: str,
    *,
    seq: int,
    batch_id: int,
) -> int:
    """Log that a batch did ``operation`` to these rows; return the number of the next change.

    Rows of a delete have the key columns only. Runs within the transaction of the commit.
    """
    if rows.is_empty():
        return seq
    height = rows.height
    frame = {"_op": pl.repeat(operation, height, eager=True)}
    for name, dtype in schema.dtypes.items():
        there = name in rows.columns
        frame[name] = rows[name] if there else pl.repeat(None, height, dtype=dtype, eager=True)
    buffer = io.BytesIO()
    pl.DataFrame(frame).write_ipc_stream(buffer, compression="lz4")
    db.execute(
        "INSERT INTO _changes VALUES (?, ?, ?, ?, ?)",
        (schema.name, seq, height, batch_id, buffer.getvalue()),
    )
    return seq + height


def forget(db: sqlite3.Connection, view: str, *, end: int, rows_kept: int) -> None:
    """Delete the frames of a view that lie wholly before its newest ``rows_kept`` changes.

    ``end`` is the number of the next change to come.
    """
    start = end - rows_kept
    db.execute(
        "DELETE FROM _changes WHERE view = ? AND seq < ? AND seq + rows <= ?", (view, start, start)
    )


def read(db: sqlite3.Connection, schema: ViewSchema, since: int, end: int) -> pl.DataFrame:
    """Return the changes numbered above ``since``; ``end`` is the number of the next one to come.

    Raises:
        OffsetOutOfRangeError: Some of them are gone, or ``since`` was never reached.
    """
    view = schema.name
    first = db.execute("SELECT min(seq) FROM _changes WHERE view = ?", (view,)).fetchone()[0]
    _check_since(view, since, int(first or end), end)
    rows = db.execute(
        "SELECT seq, batch_id, frame FROM _changes WHERE view = ? AND seq + rows > ? ORDER BY seq",
        (view, since + 1),
    ).fetchall()
    none = pl.DataFrame(schema={"_op": pl.String(), **schema.dtypes})
    frames = [_numbered(none, seq=1, batch_id=0)]
    frames += [_numbered(pl.read_ipc_stream(blob), seq=s, batch_id=b) for s, b, blob in rows]
    return pl.concat(frames).filter(pl.col("_seq") > since)


def _numbered(rows: pl.DataFrame, *, seq: int, batch_id: int) -> pl.DataFrame:
    return rows.select(
        pl.int_range(seq, seq + pl.len(), dtype=pl.Int64).alias("_seq"),
        pl.lit(batch_id, pl.Int64).alias("_batch_id"),
        pl.all(),
    )


def _check_since(view: str, since: int, start: int, end: int) -> None:
    if start - 1 <= since < end:
        return
    what = (
        f"the changes {since + 1} to {start - 1} are gone"
        if since < start
        else f"the newest change is {end - 1}"
    )
    raise OffsetOutOfRangeError(
        f"The changes of the view {view!r} since {since} cannot be read: {what}. Read the whole "
        f"view with scan() and go on from there, or ask since {start - 1} to {end - 1}.",
        start=start,
        end=end,
    )
