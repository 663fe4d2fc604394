"""The view store: rows, change log, position, ledger and fence of an app, moved by one commit.

One SQLite file per app. A batch's whole effect is one transaction: either all of it is there, with
the fence row that says so, or nothing is. A repeated batch finds its fence and does nothing; a run
that another has replaced is refused. Readers, in any thread or process, see whole batches only.

How values are kept: `columns.py`; the statements on a view's own table: `tables.py`; its change
log: `changelog.py`; what readers use: `reading.py`.
"""

from __future__ import annotations

import json
import sqlite3
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import polars as pl

from millstream.errors import (
    ConfigError,
    CorruptionError,
    FencedError,
    UnknownViewError,
)
from millstream.views import changelog, columns
from millstream.views.connections import Readers, in_our_words, open_writer
from millstream.views.position import laid_over, wait_until
from millstream.views.rows import row_of
from millstream.views.schema import Fence, ViewChange, ViewSchema
from millstream.views.tables import STAGE, ViewTable

__all__ = ["Fence", "ViewChange", "ViewSchema", "ViewStore"]

CHANGES_KEPT = 1_000_000
"""How many rows of each view's change log stay readable, at least."""

_FORMAT = 1
_APPLICATION_ID = 0x4D494C4C  # "MILL"
_SLICE_ROWS = 131_072  # bounds the memory of a large batch, and the size of one change frame
_WAIT_S = 0.01

_TABLES = """
CREATE TABLE IF NOT EXISTS _views (
    name TEXT PRIMARY KEY, schema TEXT NOT NULL, seq_next INTEGER NOT NULL, app TEXT, job TEXT);
CREATE TABLE IF NOT EXISTS _changes (
    view TEXT NOT NULL, seq INTEGER NOT NULL, rows INTEGER NOT NULL, batch_id INTEGER NOT NULL,
    frame BLOB NOT NULL, PRIMARY KEY (view, seq));
CREATE TABLE IF NOT EXISTS _fences (
    app TEXT NOT NULL, job TEXT NOT NULL, run INTEGER NOT NULL, checkpoint_id TEXT NOT NULL,
    batch_id INTEGER, commit_number INTEGER, position TEXT, status TEXT, PRIMARY KEY (app, job));
CREATE TABLE IF NOT EXISTS _ledger (
    app TEXT NOT NULL, job TEXT NOT NULL, batch_id INTEGER NOT NULL, number INTEGER NOT NULL,
    line TEXT NOT NULL, PRIMARY KEY (app, job, batch_id, number)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS _targets (
    app TEXT NOT NULL, job TEXT NOT NULL, identity TEXT NOT NULL, name TEXT NOT NULL,
    batch_id INTEGER NOT NULL, PRIMARY KEY (app, job, identity)) WITHOUT ROWID;
"""


class ViewStore:
    """One app's views in one SQLite file.

    Guarantees: thread-safe; one process writes at a time (the fence tells them apart), any number
    read. What :meth:`commit` returned True for survives a crash of the process or the machine.
    """

    def __init__(
        self, path: Path, *, readonly: bool = False, changes_kept: int = CHANGES_KEPT
    ) -> None:
        """Open the store at ``path``; create it, unless ``readonly``.

        Raises:
            ConfigError: ``readonly`` and there is no such file, or it was made by a newer version.
            CorruptionError: The file is no view store.
        """
        self._path = Path(path)
        self._changes_kept = changes_kept
        self._lock = threading.RLock()
        self._readers = Readers(self._path)
        self._writer: sqlite3.Connection | None = None
        if readonly:
            self._check_format()
            return
        with in_our_words(self._path):
            self._writer = open_writer(self._path)
            self._check_format()
            with self._transaction() as db:
                db.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
                db.execute(f"PRAGMA user_version = {_FORMAT}")
                for statement in filter(str.strip, _TABLES.split(";")):
                    db.execute(statement)
        self._inode = self._path.stat().st_ino

    def _check_format(self) -> None:
        if not self._path.exists():
            raise ConfigError(
                f"There is no view store at {self._path}. Run the pipeline that fills it, or "
                "correct the folder or the app's name."
            )
        with self._readers.snapshot() as db:
            found = db.execute("PRAGMA user_version").fetchone()[0]
            mark = db.execute("PRAGMA application_id").fetchone()[0]
            tables = db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
        if tables and mark != _APPLICATION_ID:
            raise CorruptionError(
                f"{self._path} is a database, but no view store. Move it away, or use another "
                "folder."
            )
        if found > _FORMAT:
            raise ConfigError(
                f"{self._path} has format {found}; this version reads up to {_FORMAT}. Upgrade "
                "millstream."
            )

    def close(self) -> None:
        """Close every connection. Closing twice is allowed."""
        self._readers.close()
        with self._lock:
            if self._writer is not None:
                self._writer.close()
                self._writer = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Writing.

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """Run one write transaction; anything raised inside undoes all of it."""
        with self._lock, in_our_words(self._path):
            if self._writer is None:
                raise ConfigError(
                    f"{self._path} is closed or was opened for reading. Open it without readonly."
                )
            self._writer.execute("BEGIN IMMEDIATE")
            try:
                yield self._writer
                self._writer.execute("COMMIT")
            finally:
                if self._writer.in_transaction:
                    self._writer.execute("ROLLBACK")

    def declare(self, schema: ViewSchema) -> None:
        """Make the view exist. Declaring the same view again does nothing.

        Raises:
            ConfigError: A view of that name exists and is different; the message says how.
        """
        with self._transaction() as db:
            rows = db.execute(
                "SELECT schema FROM _views WHERE name = ? COLLATE NOCASE", (schema.name,)
            ).fetchall()
            if not rows:
                db.execute(ViewTable(schema).create)
                db.execute(
                    "INSERT INTO _views (name, schema, seq_next) VALUES (?, ?, 1)",
                    (schema.name, schema.to_json()),
                )
                return
        existing = ViewSchema.from_json(rows[0][0])
        if existing != schema:
            raise ConfigError(
                f"The view {schema.name!r} of {self._path} exists and differs: "
                f"{existing.difference(schema)}. Give the new view another name, or delete the "
                "app's folder to rebuild all its views from the log."
            )

    def begin_run(self, app: str, job: str, checkpoint_id: str) -> tuple[int, int]:
        """Take the next run number of a job; return it and the batch_id that it must commit next.

        From here on every older run of the job is refused, even one that is still alive.

        Raises:
            ConfigError: The views hold batches that were made with another checkpoint.
        """
        with self._transaction() as db:
            row = db.execute(
                "SELECT run, checkpoint_id, batch_id FROM _fences WHERE app = ? AND job = ?",
                (app, job),
            ).fetchone()
            run, known, last = row or (0, checkpoint_id, None)
            if last is not None and known != checkpoint_id:
                raise ConfigError(
                    f"The checkpoint of the job {job!r} of the app {app!r} was replaced (deleted?) "
                    f"while its views still hold {last + 1} batches: they were made with the "
                    f"checkpoint {known}, and the run brings {checkpoint_id}. Either restore the "
                    f"checkpoint, or delete the app's folder ({self._path.parent}) to rebuild its "
                    "views from the log."
                )
            # A crash before this transaction is durable leaves the older run in charge; after it,
            # the older run is refused and no newer one works yet: the next start takes run + 2.
            db.execute(
                "INSERT INTO _fences (app, job, run, checkpoint_id) VALUES (?, ?, ?, ?) "
                "ON CONFLICT (app, job) DO UPDATE SET run = excluded.run, "
                "checkpoint_id = excluded.checkpoint_id",
                (app, job, run + 1, checkpoint_id),
            )
        return run + 1, 0 if last is None else last + 1

    def commit(
        self,
        fence: Fence,
        changes: Sequence[ViewChange],
        *,
        position: Mapping[str, Any],
        ledger: Sequence[Mapping[str, Any]] = (),
        status: Mapping[str, Any],
        targets: Mapping[str, str] | None = None,
    ) -> bool:
        """Move all views of the batch, their change logs, position and status at once.

        Rows that are there already, unchanged, are left out of the change log.

        Args:
            position: What of the log the views reflect after this batch; kept as JSON. It may
                name only what the batch moved on: a mapping is laid over the one before.
            ledger: Lines that account for the batch; kept as JSON, in order.
            status: What to show about the running job; replaces the last one.
            targets: The other targets that have a part of this batch, as identity → name.

        Returns:
            True when committed now, False when this batch was committed before (nothing is done).

        Raises:
            FencedError: Another run has taken over. Close; never retry.
            CorruptionError: The batch does not follow the last committed one.
            ConfigError: Rows do not fit their view.
        """
        # What a crash after each step leaves behind:
        # 1. Rows, change frames and ledger are written: they are in SQLite's write-ahead log or
        #    memory without a commit mark. The next opening ignores them; the batch is repeated.
        # 2. The fence row is written, in the same transaction: the same.
        # 3. COMMIT wrote its mark but fsync has not returned: after a crash of the process all of
        #    it is there; after a loss of power all or nothing. The caller never got True, so it
        #    repeats the batch; the fence row, there exactly when the rows are, decides.
        # 4. COMMIT returned: all of it is durable, and a repetition returns False.
        with self._transaction() as db:
            number = self._admit(db, fence)
            if number is None:
                return False
            for change in changes:
                self._apply(db, fence, change)
            db.executemany(
                "INSERT INTO _ledger VALUES (?, ?, ?, ?, ?)",
                [
                    (fence.app, fence.job, fence.batch_id, n, _to_json(line))
                    for n, line in enumerate(ledger)
                ],
            )
            db.executemany(
                "INSERT OR REPLACE INTO _targets VALUES (?, ?, ?, ?, ?)",
                [
                    (fence.app, fence.job, identity, name, fence.batch_id)
                    for identity, name in (targets or {}).items()
                ],
            )
            reached = laid_over(_fence_json(db, "position", fence.app, fence.job), position)
            db.execute(
                "UPDATE _fences SET batch_id = ?, commit_number = ?, position = ?, status = ? "
                "WHERE app = ? AND job = ?",
                (
                    fence.batch_id,
                    number,
                    _to_json(reached),
                    _to_json(status),
                    fence.app,
                    fence.job,
                ),
            )
        return True

    def amend(self, view: str, upserts: pl.DataFrame) -> None:
        """Change rows of a view beside its batches: what a person's command does, not the job.

        One transaction, noted in the change log under the batch that was committed last. The job
        may run meanwhile: neither undoes what the other did.

        Raises:
            UnknownViewError: There is no such view.
            ConfigError: The rows do not fit the view.
        """
        with self._transaction() as db:
            _schema(db, view, self._path)
            found = db.execute("SELECT app, job FROM _views WHERE name = ?", (view,)).fetchone()
            app, job = found[0] or "", found[1] or ""
            last = _fence_row(db, "batch_id", app, job)
            self._apply(db, Fence(app, job, 0, last or 0), ViewChange(view, upserts))

    def awaits(self, fence: Fence) -> bool:
        """Say whether this batch is the next to be committed; False when it is in already.

        Raises:
            FencedError: Another run has taken over.
            CorruptionError: The batch does not follow the last committed one.
        """
        with self._readers.snapshot() as db:
            return self._admit(db, fence) is not None

    def targets(self, app: str, job: str) -> list[tuple[str, str, int]]:
        """Return for each other target of a job its identity, its name, and its last batch."""
        with self._readers.snapshot() as db:
            return db.execute(
                "SELECT identity, name, batch_id FROM _targets WHERE app = ? AND job = ?",
                (app, job),
            ).fetchall()

    def databases(self) -> list[str]:
        """Return the databases that jobs of this store keep views in, without credentials."""
        with self._readers.snapshot() as db:
            if not db.execute("SELECT 1 FROM sqlite_master WHERE name = '_targets'").fetchone():
                return []  # a store that no job has opened since there are other targets
            rows = db.execute("SELECT DISTINCT name FROM _targets WHERE name LIKE 'postgresql:%'")
            return sorted(name for (name,) in rows)

    def _admit(self, db: sqlite3.Connection, fence: Fence) -> int | None:
        """Return the number of this commit, or None if the batch is already in."""
        self._check_in_place()
        row = db.execute(
            "SELECT run, batch_id FROM _fences WHERE app = ? AND job = ?", (fence.app, fence.job)
        ).fetchone()
        run, last = row or (None, None)
        who = f"the job {fence.job!r} of the app {fence.app!r}"
        if run is None:
            raise FencedError(
                f"Run {fence.run} of {who} is not known to {self._path}; newest run: none. The "
                "store was replaced since the run began. Stop this run and start again."
            )
        if run != fence.run:
            raise FencedError(
                f"Run {fence.run} of {who} was replaced by run {run}, so its batch "
                f"{fence.batch_id} is refused. Close this run; the newer one goes on."
            )
        expected = 0 if last is None else last + 1
        if fence.batch_id < expected:
            return None
        if fence.batch_id > expected:
            raise CorruptionError(
                f"Batch {fence.batch_id} of {who} does not follow the last one committed: batch "
                f"{expected} is expected. The checkpoint is ahead of the views, as after restoring "
                f"{self._path} from an older copy. Restore both from the same time, or delete the "
                "app's folder to rebuild its views from the log."
            )
        newest = db.execute("SELECT max(commit_number) FROM _fences").fetchone()[0]
        return int(newest or 0) + 1

    def _check_in_place(self) -> None:
        """SQLite goes on writing to a deleted file without a word; notice it before that."""
        try:
            in_place = self._path.stat().st_ino == self._inode
        except FileNotFoundError:
            in_place = False
        if not in_place:
            raise FencedError(
                f"{self._path} was deleted or replaced while this run was writing to it. Stop "
                "this run and start again: its views are rebuilt from the log."
            )

    def _apply(self, db: sqlite3.Connection, fence: Fence, change: ViewChange) -> None:
        """Write one view's rows and log what that changed, deletes first."""
        schema = _schema(db, change.view, self._path)
        table = ViewTable(schema)
        upserts = columns.normalised(change.upserts, schema, schema.names)
        seq = seq_before = self._seq_next(db, schema.name)
        if change.deletes is not None and not change.deletes.is_empty():
            if not schema.key:
                raise ConfigError(
                    f"The view {schema.name!r} has no key, so nothing in it can be deleted. "
                    "Declare a key, or only upsert."
                )
            deletes = columns.normalised(change.deletes, schema, schema.key)
            deletes = columns.without(deletes, upserts)
            for part in deletes.iter_slices(_SLICE_ROWS):
                gone = _stage(db, table, part, table.select_present)
                db.executemany(table.delete, columns.encoded(gone, schema))
                seq = changelog.append(db, schema, gone, "delete", seq=seq, batch_id=fence.batch_id)
        for part in upserts.iter_slices(_SLICE_ROWS):
            changed = _stage(db, table, part, table.select_changed)
            if not changed.is_empty():
                db.execute(table.upsert)
            seq = changelog.append(db, schema, changed, "upsert", seq=seq, batch_id=fence.batch_id)
        if seq != seq_before:
            changelog.forget(db, schema.name, end=seq, rows_kept=self._changes_kept)
        db.execute(
            "UPDATE _views SET seq_next = ?, app = ?, job = ? WHERE name = ?",
            (seq, fence.app, fence.job, schema.name),
        )

    def _seq_next(self, db: sqlite3.Connection, view: str) -> int:
        row = db.execute("SELECT seq_next FROM _views WHERE name = ?", (view,)).fetchone()
        return int(row[0])

    # Reading.

    def views(self) -> list[ViewSchema]:
        """Return the schemas of all views of this store, by name."""
        with self._readers.snapshot() as db:
            rows = db.execute("SELECT schema FROM _views ORDER BY name").fetchall()
        return [ViewSchema.from_json(text) for (text,) in rows]

    def schema(self, view: str) -> ViewSchema:
        """Return the schema of one view.

        Raises:
            UnknownViewError: There is no such view; the message lists those there are.
        """
        with self._readers.snapshot() as db:
            return _schema(db, view, self._path)

    def count(self, view: str) -> int:
        """Return how many rows a view has.

        Raises:
            UnknownViewError: There is no such view.
        """
        with self._readers.snapshot() as db:
            table = ViewTable(_schema(db, view, self._path))
            return int(db.execute(f"SELECT count(*) FROM {table.name}").fetchone()[0])  # noqa: S608

    def scan(
        self,
        view: str,
        *,
        where: Mapping[str, Any] | None = None,
        limit: int | None = None,
    ) -> pl.DataFrame:
        """Return the view's rows in key order, typed; all of one commit.

        Args:
            where: Only rows where these columns equal these values (None finds nulls).
            limit: At most so many rows.

        Raises:
            UnknownViewError: There is no such view.
            ConfigError: ``where`` names no column, or a value that the column cannot hold.
        """
        with self._readers.snapshot() as db:
            schema = _schema(db, view, self._path)
            values = encoded_values(schema, where or {})
            text = ViewTable(schema).select(tuple(values), limited=limit is not None)
            limits = [] if limit is None else [limit]
            rows = db.execute(text, [*values.values(), *limits]).fetchall()
        return columns.decoded(rows, schema)

    def get(self, view: str, /, **key: Any) -> dict[str, Any] | None:
        """Return the row of a key, or None. Lists and structs come back as Python values.

        Raises:
            UnknownViewError: There is no such view.
            ConfigError: The arguments are not exactly the view's key columns.
        """
        return row_of(self, view, key)

    def changes(self, view: str, *, since: int = 0) -> pl.DataFrame:
        """Return every change after the change number ``since``, oldest first.

        Columns: ``_seq`` (rising by one), ``_batch_id``, ``_op`` ("upsert" or "delete"), then the
        view's own; a delete has its key columns only, the others are null.

        Raises:
            UnknownViewError: There is no such view.
            OffsetOutOfRangeError: Changes after ``since`` are gone (or ``since`` was never
                reached): read the whole view with scan() and go on from the newest change.
        """
        with self._readers.snapshot() as db:
            schema = _schema(db, view, self._path)
            return changelog.read(db, schema, since, self._seq_next(db, view))

    def position(self, view_or_app: str) -> dict[str, Any]:
        """Return what of the log a view (or the newest job of an app) reflects; {} before that."""
        with self._readers.snapshot() as db:
            found = db.execute("SELECT app, job FROM _views WHERE name = ?", (view_or_app,))
            app, job = found.fetchone() or (view_or_app, None)
            return _fence_json(db, "position", app, job)

    def status(self, app: str, job: str | None = None) -> dict[str, Any]:
        """Return the status of a job, by default the one that committed last; {} before that."""
        with self._readers.snapshot() as db:
            return _fence_json(db, "status", app, job)

    def last_batch_id(self, app: str, job: str | None = None) -> int | None:
        """Return the last batch that was committed; None before the first."""
        with self._readers.snapshot() as db:
            found = _fence_row(db, "batch_id", app, job)
        return None if found is None else int(found)

    def ledger(self, app: str, *, since: int = 0) -> list[dict[str, Any]]:
        """Return the ledger lines of the batches from ``since`` on, in the order of batches."""
        with self._readers.snapshot() as db:
            rows = db.execute(
                "SELECT line FROM _ledger WHERE app = ? AND batch_id >= ? "
                "ORDER BY batch_id, job, number",
                (app, since),
            ).fetchall()
        return [json.loads(line) for (line,) in rows]

    def wait_for(
        self,
        view_or_app: str,
        *,
        batch_id: int | None = None,
        position: Mapping[str, Any] | None = None,
        timeout_s: float = 10.0,
    ) -> bool:
        """Wait until a view reflects a batch, or a position of the log; False after the timeout.

        A position is reached when each of its numbers is; numbers it does not name do not matter.
        """

        def look() -> tuple[int | None, Any]:
            with self._readers.snapshot() as db:
                found = db.execute("SELECT app, job FROM _views WHERE name = ?", (view_or_app,))
                app, job = found.fetchone() or (view_or_app, None)
                return _fence_row(db, "batch_id", app, job), _fence_json(db, "position", app, job)

        return wait_until(look, batch_id, position, pause_s=_WAIT_S, timeout_s=timeout_s)


def _schema(db: sqlite3.Connection, view: str, path: Path) -> ViewSchema:
    row = db.execute("SELECT schema FROM _views WHERE name = ?", (view,)).fetchone()
    if row is None:
        names = [name for (name,) in db.execute("SELECT name FROM _views ORDER BY name")]
        raise UnknownViewError(
            f"There is no view {view!r} in {path}; there are: {', '.join(names) or 'none yet'}. "
            "Correct the name, or run the pipeline that fills the view."
        )
    return ViewSchema.from_json(row[0])


def _stage(
    db: sqlite3.Connection, table: ViewTable, rows: pl.DataFrame, select: str
) -> pl.DataFrame:
    """Write rows to the temporary table; return those that ``select`` names by their number."""
    db.execute(f"DROP TABLE IF EXISTS {STAGE}")
    db.execute(table.create_stage(rows.width))
    db.executemany(table.fill_stage(rows.width), columns.encoded(rows, table.schema))
    numbers = [number - 1 for (number,) in db.execute(select)]
    return rows if len(numbers) == rows.height else rows[numbers]


def encoded_values(schema: ViewSchema, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return single values in the form in which the view's table keeps them."""
    out = {}
    for name, value in values.items():
        if name not in schema.names:
            raise ConfigError(
                f"The view {schema.name!r} has no column {name!r}; it has "
                f"{', '.join(schema.names)}. Choose one of them."
            )
        one = ViewSchema(schema.name, ((name, schema.kinds[name]),), ())
        frame = columns.normalised(pl.DataFrame({name: [value]}), one, (name,))
        keyed = ViewSchema(one.name, one.columns, (name,) if name in schema.key else ())
        out[name] = next(columns.encoded(frame, keyed))[0]
    return out


def _fence_row(db: sqlite3.Connection, column: str, app: str | None, job: str | None) -> Any:
    row = db.execute(
        f"SELECT {column} FROM _fences WHERE app = ? AND (job = ? OR ? IS NULL) "  # noqa: S608
        "ORDER BY commit_number DESC LIMIT 1",
        (app, job, job),
    ).fetchone()
    return None if row is None else row[0]


def _fence_json(
    db: sqlite3.Connection, column: str, app: str | None, job: str | None
) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(_fence_row(db, column, app, job) or "{}")
    return value


def _to_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)
