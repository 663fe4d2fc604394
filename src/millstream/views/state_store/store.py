"""The state store of an app: views, change logs, position, ledger, fence and state, in one commit.

One SQLite file per app. A batch is one transaction: either all of it is there, with its fence row, or
nothing is. A repeated batch finds its fence and does nothing; a run that another has replaced is refused.
Readers, in any thread or process, see whole batches only.

How values are kept: `sqlite_values.py`; the statements on a view's own table: `view_table.py`; its change
log: `changelog.py`; reading: `reader.py`, and for users `views/reader.py`.
"""

from __future__ import annotations

import json
import sqlite3
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import polars as pl

from millstream.errors import ConfigError, CorruptionError, FencedError
from millstream.views.position import merge_positions
from millstream.views.runs.control_files import reset_command
from millstream.views.schema import Fence, ViewChange, ViewSchema
from millstream.views.sink import RunStart, check_written
from millstream.views.state_store import changelog, sqlite_values
from millstream.views.state_store.connections import open_writer, translate_errors
from millstream.views.state_store.program_tables import (
    RunProgram,
    register_program,
    update_partitioning,
)
from millstream.views.state_store.reader import (
    APPLICATION_ID,
    FORMAT,
    StateStoreReader,
    fence_json,
    fence_value,
    schema_of,
    seq_next,
    to_json,
)
from millstream.views.state_store.sqlite_upsert import stage_rows, upsert_rows
from millstream.views.state_store.view_table import ViewTable

__all__ = ["Fence", "StateStore", "ViewChange", "ViewSchema"]

CHANGES_KEPT = 1_000_000
"""How many changes of each view stay readable, at least."""

_SLICE_ROWS = 131_072  # bounds the memory of a large batch, and the size of one change frame

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
CREATE TABLE IF NOT EXISTS _sinks (
    app TEXT NOT NULL, job TEXT NOT NULL, identity TEXT NOT NULL, name TEXT NOT NULL,
    batch_id INTEGER NOT NULL, PRIMARY KEY (app, job, identity)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS _state (
    app TEXT NOT NULL, job TEXT NOT NULL, stage INTEGER NOT NULL, bucket INTEGER NOT NULL,
    manifest BLOB NOT NULL, PRIMARY KEY (app, job, stage, bucket)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS _programs (
    app TEXT NOT NULL, job TEXT NOT NULL, program TEXT NOT NULL, PRIMARY KEY (app, job));
CREATE TABLE IF NOT EXISTS _outputs (
    app TEXT NOT NULL, job TEXT NOT NULL, name TEXT NOT NULL, sink TEXT NOT NULL,
    value TEXT NOT NULL, PRIMARY KEY (app, job, name, sink)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS _descriptions (
    app TEXT NOT NULL, name TEXT NOT NULL, value TEXT NOT NULL, PRIMARY KEY (app, name));
"""


class StateStore(StateStoreReader):
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
        # A writer keeps its file; it gets a FencedError when another file is in its place.
        super().__init__(Path(path), follows=readonly)
        self._changes_kept = changes_kept
        self._lock = threading.RLock()
        self._writer: sqlite3.Connection | None = None
        if readonly:
            self.check_format()
            return
        with translate_errors(self._path):
            self._writer = open_writer(self._path)
            self.check_format(needs_tables=False)
            with self._transaction() as db:
                db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
                db.execute(f"PRAGMA user_version = {FORMAT}")
                for statement in filter(str.strip, _TABLES.split(";")):
                    db.execute(statement)
        self._inode = self._path.stat().st_ino

    def close(self) -> None:
        """Close every connection. Closing twice is allowed."""
        super().close()
        with self._lock:
            if self._writer is not None:
                self._writer.close()
                self._writer = None

    # Writing.

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """Run one write transaction; anything raised inside undoes all of it."""
        with self._lock, translate_errors(self._path):
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
                f"{existing.difference(schema)}. Give the new view another name, or start over with "
                f"all views, from the log: {reset_command(self._path.parent)}."
            )

    def begin_run(
        self, app: str, job: str, checkpoint_id: str, beginning: RunProgram | None = None
    ) -> tuple[int, int]:
        """Take the next run number of a job; return it and the batch_id that it must commit next.

        From here on every older run of the job is refused, even one that is still alive. With
        ``beginning``, the program and the coverage of its outputs are stored, too.

        Raises:
            ConfigError: The views hold batches that were made with another checkpoint, or by
                another program.
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
                    f"checkpoint, or start over from the log: {reset_command(self._path.parent)}."
                )
            if beginning is not None:
                register_program(db, app, job, beginning, self._path)
            # A crash before this transaction is durable leaves the older run in charge; after it,
            # the older run is refused and no newer one works yet: the next start takes run + 2.
            db.execute(
                "INSERT INTO _fences (app, job, run, checkpoint_id) VALUES (?, ?, ?, ?) "
                "ON CONFLICT (app, job) DO UPDATE SET run = excluded.run, "
                "checkpoint_id = excluded.checkpoint_id",
                (app, job, run + 1, checkpoint_id),
            )
        return run + 1, 0 if last is None else last + 1

    def register_program(self, start: RunStart, beginning: RunProgram) -> None:
        """Store the program of a run that has begun in all sinks, and the coverage of its outputs.

        Raises:
            FencedError: a newer run has begun.
            ConfigError: the program does not fit the stored state.
        """
        with self._transaction() as db:
            (newest,) = db.execute(
                "SELECT run FROM _fences WHERE app = ? AND job = ?", (start.app, start.job)
            ).fetchone()
            if newest != start.run:
                raise FencedError(
                    f"Run {start.run} of {start.job_label} was replaced by run {newest}. Close this run."
                )
            register_program(db, start.app, start.job, beginning, self._path)

    def fence_runs(self, app: str, job: str) -> None:
        """Fence all existing runs of a job: what they commit from now on is refused."""
        with self._transaction() as db:
            db.execute("UPDATE _fences SET run = run + 1 WHERE app = ? AND job = ?", (app, job))

    def set_partitioning(self, app: str, job: str, partitioning: Mapping[str, int]) -> None:
        """Store how a job's work is divided from now on. Nothing else of its program changes.

        Raises:
            ConfigError: There is no such job.
        """
        with self._transaction() as db:
            update_partitioning(db, app, job, partitioning, self._path)

    def commit(
        self,
        fence: Fence,
        changes: Sequence[ViewChange],
        *,
        position: Mapping[str, Any],
        ledger: Sequence[Mapping[str, Any]] = (),
        status: Mapping[str, Any],
        sinks: Mapping[str, str] | None = None,
        state: Mapping[tuple[int, int], bytes] | None = None,
    ) -> bool:
        """Commit a batch: changes of views, position, ledger, status and state, in one transaction.

        Rows that are there already, unchanged, are left out of the change log.

        Args:
            position: What of the log the views reflect after this batch; kept as JSON. It may name only
                what the batch has read: it is merged into the position before.
            ledger: The entries that account for the batch; kept as JSON, in order.
            status: What to show about the running job; replaces the last one.
            sinks: The other sinks that have a part of this batch, as identity → name.
            state: The manifests of the state that the batch changed, by stage and bucket.

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
                    (fence.app, fence.job, fence.batch_id, n, to_json(line))
                    for n, line in enumerate(ledger)
                ],
            )
            db.executemany(
                "INSERT OR REPLACE INTO _sinks VALUES (?, ?, ?, ?, ?)",
                [
                    (fence.app, fence.job, identity, name, fence.batch_id)
                    for identity, name in (sinks or {}).items()
                ],
            )
            db.executemany(
                "INSERT OR REPLACE INTO _state VALUES (?, ?, ?, ?, ?)",
                [
                    (fence.app, fence.job, stage, bucket, manifest)
                    for (stage, bucket), manifest in (state or {}).items()
                ],
            )
            merged = merge_positions(fence_json(db, "position", fence.app, fence.job), position)
            db.execute(
                "UPDATE _fences SET batch_id = ?, commit_number = ?, position = ?, status = ? "
                "WHERE app = ? AND job = ?",
                (
                    fence.batch_id,
                    number,
                    to_json(merged),
                    to_json(status),
                    fence.app,
                    fence.job,
                ),
            )
        return True

    def amend(self, view: str, upserts: pl.DataFrame) -> None:
        """Change rows of a view outside of its batches, for a command of the user's.

        One transaction, recorded in the change log under the batch that was committed last. The job
        may run meanwhile: neither undoes what the other did.

        Raises:
            UnknownViewError: There is no such view.
            ConfigError: The rows do not fit the view.
        """
        with self._transaction() as db:
            schema_of(db, view, self._path)
            found = db.execute("SELECT app, job FROM _views WHERE name = ?", (view,)).fetchone()
            app, job = found[0] or "", found[1] or ""
            last = fence_value(db, "batch_id", app, job)
            self._apply(db, Fence(app, job, 0, last or 0), ViewChange(view, upserts))

    def put_description(self, app: str, name: str, value: Any) -> None:
        """Store a description of an app, such as its graph, as JSON; see :meth:`description`.

        Nothing is written if it is there already.
        """
        if self.description(app, name) == json.loads(to_json(value)):
            return
        with self._transaction() as db:
            db.execute(
                "INSERT OR REPLACE INTO _descriptions VALUES (?, ?, ?)", (app, name, to_json(value))
            )

    def is_next(self, fence: Fence) -> bool:
        """Return whether this batch is the next to be committed; False if it is committed already.

        Raises:
            FencedError: Another run has taken over.
            CorruptionError: The batch does not follow the last committed one.
        """
        with self._readers.snapshot() as db:
            return self._admit(db, fence) is not None

    def state_manifests(self, app: str, job: str) -> dict[tuple[int, int], bytes]:
        """Return the manifests of a job's state, by stage and bucket, as of the last commit."""
        with self._readers.snapshot() as db:
            found = db.execute(
                "SELECT stage, bucket, manifest FROM _state WHERE app = ? AND job = ?", (app, job)
            ).fetchall()
        return {(stage, bucket): manifest for stage, bucket, manifest in found}

    def _admit(self, db: sqlite3.Connection, fence: Fence) -> int | None:
        """Return the number of this commit, or None if the batch is committed already."""
        self._check_not_replaced()
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
                f"{self._path} from an older copy. Restore both from the same time, or start over "
                f"from the log: {reset_command(self._path.parent)}."
            )
        newest = db.execute("SELECT max(commit_number) FROM _fences").fetchone()[0]
        return int(newest or 0) + 1

    def _check_not_replaced(self) -> None:
        """Make sure that the file was not replaced: SQLite would go on writing to the deleted one."""
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
        schema = schema_of(db, change.view, self._path)
        table = ViewTable(schema)
        upserts = sqlite_values.normalize(change.upserts, schema, schema.names)
        seq = seq_before = seq_next(db, schema.name)
        if change.deletes is not None and not change.deletes.is_empty():
            if not schema.key:
                raise ConfigError(
                    f"The view {schema.name!r} has no key, so nothing in it can be deleted. "
                    "Declare a key, or only upsert."
                )
            deletes = sqlite_values.normalize(change.deletes, schema, schema.key)
            deletes = sqlite_values.exclude_keys(deletes, upserts)
            for part in deletes.iter_slices(_SLICE_ROWS):
                gone = stage_rows(db, table, part, table.select_present)
                deleted = db.executemany(table.delete, sqlite_values.encode_rows(gone, schema))
                check_written(f"the view {schema.name!r}", gone.height, max(deleted.rowcount, 0))
                seq = changelog.append(db, schema, gone, "delete", seq=seq, batch_id=fence.batch_id)
        for part in upserts.iter_slices(_SLICE_ROWS):
            changed = upsert_rows(db, table, part)
            seq = changelog.append(db, schema, changed, "upsert", seq=seq, batch_id=fence.batch_id)
        if seq != seq_before:
            changelog.trim(db, schema.name, end=seq, rows_kept=self._changes_kept)
        db.execute(
            "UPDATE _views SET seq_next = ?, app = ?, job = ? WHERE name = ?",
            (seq, fence.app, fence.job, schema.name),
        )
