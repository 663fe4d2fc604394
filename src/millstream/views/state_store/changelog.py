"""A view's change log: every change that a batch made, as Arrow frames in the store itself.

A frame holds the changes of one batch (a large one is split), numbered without gaps from its
``seq`` on, so writing 100,000 changes is one insert, and reading them needs no conversion. The
oldest frames are deleted as a whole, once the rest holds as many rows as are to be kept.
"""

from __future__ import annotations

import io
from collections.abc import Iterable

import polars as pl

from millstream.errors import OffsetOutOfRangeError
from millstream.kernels.columns import constant
from millstream.views.schema import ViewSchema
from millstream.views.state_store.database import Database


def append(
    db: Database,
    schema: ViewSchema,
    rows: pl.DataFrame,
    operation: str,
    *,
    seq: int,
    batch_id: int,
) -> int:
    """Append that a batch did ``operation`` to these rows; return the number of the next change.

    Rows of a delete have the key columns only. Runs within the transaction of the commit.
    """
    if rows.is_empty():
        return seq
    db.execute(
        "INSERT INTO _changes VALUES (?, ?, ?, ?, ?)",
        (schema.name, seq, rows.height, batch_id, encode_changes(schema, rows, operation)),
    )
    return seq + rows.height


def encode_changes(schema: ViewSchema, rows: pl.DataFrame, operation: str) -> bytes:
    """Return the frame that says that a batch did ``operation`` to these rows."""
    frame = {"_op": constant(operation, rows.height, pl.String)}
    for name, dtype in schema.dtypes.items():
        there = name in rows.columns
        frame[name] = rows[name] if there else constant(None, rows.height, dtype)
    buffer = io.BytesIO()
    pl.DataFrame(frame).write_ipc_stream(buffer, compression="lz4")
    return buffer.getvalue()


def trim(db: Database, view: str, *, end: int, rows_kept: int) -> None:
    """Delete the frames of a view that end before its newest ``rows_kept`` changes.

    ``end`` is the number of the next change.
    """
    start = end - rows_kept
    db.execute(
        "DELETE FROM _changes WHERE view = ? AND seq < ? AND seq + rows <= ?", (view, start, start)
    )


def read(
    db: Database, schema: ViewSchema, since: int, end: int, limit: int | None = None
) -> pl.DataFrame:
    """Return the changes numbered above ``since``, at most ``limit``.

    ``end`` is the number of the next change.

    Raises:
        OffsetOutOfRangeError: Some of them are gone, or ``since`` was never reached.
    """
    view = schema.name
    first = db.execute("SELECT min(seq) FROM _changes WHERE view = ?", (view,)).fetchone()[0]
    check_since(view, since, int(first or end), end)
    last = end if limit is None else since + limit
    rows = db.execute(
        "SELECT seq, batch_id, frame FROM _changes "
        "WHERE view = ? AND seq + rows > ? AND seq <= ? ORDER BY seq",
        (view, since + 1, last),
    ).fetchall()
    return decode_changes(schema, rows, since, limit)


def decode_changes(
    schema: ViewSchema,
    frames: Iterable[tuple[int, int, bytes]],
    since: int,
    limit: int | None = None,
) -> pl.DataFrame:
    """Return the changes numbered above ``since``, at most ``limit``, of frames.

    Frames are given as ``(seq, batch_id, frame)``.
    """
    none = pl.DataFrame(schema={"_op": pl.String(), **schema.dtypes})
    tables = [_numbered(none, seq=1, batch_id=0)]
    tables += [_numbered(pl.read_ipc_stream(blob), seq=s, batch_id=b) for s, b, blob in frames]
    found = pl.concat(tables).filter(pl.col("_seq") > since)
    return found if limit is None else found.head(limit)


def _numbered(rows: pl.DataFrame, *, seq: int, batch_id: int) -> pl.DataFrame:
    return rows.select(
        pl.int_range(seq, seq + pl.len(), dtype=pl.Int64).alias("_seq"),
        pl.lit(batch_id, pl.Int64).alias("_batch_id"),
        pl.all(),
    )


def check_since(view: str, since: int, start: int, end: int) -> None:
    """Make sure that the changes after ``since`` are kept, given that ``[start, end)`` are.

    Raises:
        OffsetOutOfRangeError: They are not.
    """
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
