"""The state store of an app: views, change logs, position, ledger, fence and state, in one commit.

A batch is one transaction: either all of it is there, with its fence row, or nothing is. A repeated batch
finds its fence and does nothing; a run that another has replaced is refused. Readers, in any thread or
process, see whole batches only.

This is what all stores do alike, in the SQL that all understand. A store is a SQLite file
(`sqlite_store.py`), or a schema of a PostgreSQL database (`views/postgres/state_store.py`). Reading:
`reader.py`, and for users `views/reader.py`; change logs: `changelog.py`; programs: `program_tables.py`.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import polars as pl

from millstream.errors import ConfigError, CorruptionError, FencedError
from millstream.kernels.plan import SinkPlan
from millstream.views.position import merge_positions
from millstream.views.query import Query
from millstream.views.runs.control_files import reset_command
from millstream.views.schema import Fence, ViewChange, ViewSchema
from millstream.views.sink import RunStart
from millstream.views.staging import StagedChange, Stager
from millstream.views.state_store import changelog, sqlite_values
from millstream.views.state_store.batch_tables import add_record, add_source_offsets
from millstream.views.state_store.database import Database
from millstream.views.state_store.program_switch import (
    SWITCHED_BY,
    ComparedProgram,
    FilledView,
    ProgramSwitch,
    RebuiltView,
    coverage_of,
    difference,
)
from millstream.views.state_store.program_tables import (
    RunProgram,
    put_program,
    put_state,
    register_program,
    update_partitioning,
)
from millstream.views.state_store.reader import (
    StateStoreReader,
    fence_json,
    fence_value,
    schema_of,
    seq_next,
    stored_description,
    to_json,
)
from millstream.views.state_store.switch_conflicts import check_unchanged

__all__ = ["Fence", "StateStore", "ViewChange", "ViewSchema"]

T = TypeVar("T")

CHANGES_KEPT = 1_000_000
"""How many changes of each view stay readable, at least."""

_SLICE_ROWS = 131_072  # bounds the memory of a large batch, and the size of one change frame


class StateStore(StateStoreReader):
    """One app's state: views, change logs, position, ledger, fences, programs and manifests.

    Guarantees: thread-safe; one process writes at a time (the fence tells them apart), any number
    read. What :meth:`commit` returned True for is durable.
    """

    _changes_kept: int

    @abstractmethod
    def _write(self, work: Callable[[Database], T]) -> T:
        """Run some work within one write transaction; anything raised inside undoes all of it.

        One transaction at a time writes to a store, in all processes. A store may repeat the work if its
        connection breaks, so repeating it does no harm.
        """

    @abstractmethod
    def _check_not_replaced(self, db: Database) -> None:
        """Make sure that the store is the one that was opened.

        Raises:
            FencedError: it was deleted or replaced.
        """

    @abstractmethod
    def _create_table(self, db: Database, schema: ViewSchema) -> None:
        """Create the table of a view."""

    @abstractmethod
    def _delete(self, db: Database, schema: ViewSchema, keys: pl.DataFrame) -> pl.DataFrame:
        """Delete the rows of some keys of a view; return the keys that were there."""

    @abstractmethod
    def _upsert(self, db: Database, schema: ViewSchema, rows: pl.DataFrame) -> pl.DataFrame:
        """Write rows of a view; return those that are new or differ from what was there."""

    def stager(self, fence: Fence, sink: SinkPlan) -> Stager | None:  # noqa: ARG002 - a store may have one
        """Return what stages rows of a view in a batch that is about to be committed; None if nothing can."""
        return None

    def declare(self, schema: ViewSchema) -> None:
        """Make the view exist. Declaring the same view again does nothing.

        Raises:
            ConfigError: A view of that name exists and is different; the message says how.
        """

        def declare(db: Database) -> str | None:
            # Names that differ only in case are one name.
            row = db.execute(
                "SELECT schema FROM _views WHERE lower(name) = ?", (schema.name.lower(),)
            ).fetchone()
            if row is not None:
                return str(row[0])
            self._create_table(db, schema)
            db.execute(
                "INSERT INTO _views (name, schema, seq_next) VALUES (?, ?, 1)",
                (schema.name, schema.to_json()),
            )
            return None

        stored = self._write(declare)
        existing = schema if stored is None else ViewSchema.from_json(stored)
        if existing != schema:
            raise self._exists(existing, schema)

    def _exists(self, existing: ViewSchema, schema: ViewSchema) -> ConfigError:
        return ConfigError(
            f"The view {schema.name!r} of {self.store_name.shown} exists and differs: "
            f"{existing.difference(schema)}. Give the new view another name, or start over with "
            f"all views, from the log: {reset_command(self.store_name.place)}."
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
        # A crash before this transaction is durable leaves the older run in charge; after it,
        # the older run is refused and no newer one works yet: the next start takes run + 2.
        return self._write(lambda db: self._begin_run(db, app, job, checkpoint_id, beginning))

    def _begin_run(
        self, db: Database, app: str, job: str, checkpoint_id: str, beginning: RunProgram | None
    ) -> tuple[int, int]:
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
                f"checkpoint, or start over from the log: {reset_command(self.store_name.place)}."
            )
        if beginning is not None:
            register_program(db, app, job, beginning, self.store_name)
        db.execute(
            "INSERT INTO _fences (app, job, run, checkpoint_id) VALUES (?, ?, ?, ?) "
            "ON CONFLICT (app, job) DO UPDATE SET run = excluded.run, "
            "checkpoint_id = excluded.checkpoint_id",
            (app, job, run + 1, checkpoint_id),
        )
        return run + 1, 0 if last is None else last + 1

    def register_program(
        self, start: RunStart, beginning: RunProgram, filled: Sequence[FilledView] = ()
    ) -> None:
        """Store the program of a run that has begun in all sinks, the coverage of its outputs, and views that were filled.

        Raises:
            FencedError: a newer run has begun.
            ConfigError: the program does not fit the stored state.
        """
        app, job = start.app, start.job

        def register(db: Database) -> None:
            _check_newest(db, start)
            fence = Fence(app, job, start.run, int(fence_value(db, "batch_id", app, job) or 0))
            for view in filled:
                self._replace_view(db, fence, view)
            coverage = coverage_of(filled)
            register_program(db, app, job, beginning, self.store_name, filled=coverage)

        self._write(register)

    def fence_runs(self, app: str, job: str) -> None:
        """Fence all existing runs of a job: what they commit from now on is refused."""
        self._write(
            lambda db: db.execute(
                "UPDATE _fences SET run = run + 1 WHERE app = ? AND job = ?", (app, job)
            )
        )

    def set_partitioning(
        self, app: str, job: str, partitioning: Mapping[str, int], *, was: Mapping[str, int]
    ) -> None:
        """Store how a job's work is divided from now on. Nothing else of its program changes.

        Raises:
            ConfigError: There is no such job.
            ConflictError: It is no longer divided as it ``was``.
        """
        self._write(
            lambda db: update_partitioning(db, app, job, partitioning, self.store_name, was=was)
        )

    def replace_state(
        self,
        start: RunStart,
        state: Mapping[tuple[int, int], bytes],
        partitioning: Mapping[str, int],
        *,
        was: Mapping[str, int],
    ) -> None:
        """Replace all manifests of a job's state for the run that has begun, and how its work is divided.

        One transaction: a crash before it is durable leaves the manifests that there were, all of them.

        Raises:
            FencedError: a newer run has begun.
            ConflictError: the work is no longer divided as it ``was``, as the manifests were made for.
        """

        def replace(db: Database) -> None:
            self._check_not_replaced(db)
            _check_newest(db, start)
            put_state(db, start.app, start.job, state)
            update_partitioning(db, start.app, start.job, partitioning, self.store_name, was=was)

        self._write(replace)

    def check_unchanged(
        self, app: str, job: str, position: Mapping[str, Any], compared: ComparedProgram
    ) -> None:
        """Make sure that a switch to a program that was compared with this one would not be refused by now.

        Raises:
            ConflictError: as :meth:`switch_program`.
        """
        self._read(lambda db: check_unchanged(db, app, job, position, compared))

    def switch_program(self, start: RunStart, switch: ProgramSwitch) -> None:
        """Put a program with its state and views in the place of the one before: see `program_switch.py`.

        Raises:
            FencedError: a newer run has begun.
            ConflictError: the app has committed a batch since the position of the new state, or another program was
                deployed or run since this one was compared.
        """
        app, job = start.app, start.job

        def put(db: Database) -> None:
            self._check_not_replaced(db)
            if stored_description(db, app, SWITCHED_BY) == start.run:
                return  # the connection broke after the commit; a newer run may have begun since
            _check_newest(db, start)
            check_unchanged(db, app, job, switch.position, switch.compared)
            put_state(db, app, job, switch.manifests)
            fence = Fence(app, job, start.run, int(fence_value(db, "batch_id", app, job) or 0))
            for view in switch.views:
                self._replace_view(db, fence, view)
            put_program(db, app, job, switch.beginning, switch.coverage)
            # The new program has not run the batches before.
            db.execute(
                "DELETE FROM _source_offsets WHERE app = ? AND job = ? AND batch_id <= ?",
                (app, job, fence.batch_id),
            )
            _put_description(db, app, SWITCHED_BY, start.run)

        self._write(put)

    def _replace_view(self, db: Database, fence: Fence, view: RebuiltView) -> None:
        """Give a view all its rows anew, and create it again if its columns or key are others.

        Raises:
            ConfigError: there is a view whose name differs from its name in case alone.
        """
        # Names that differ only in case are one name.
        name = view.schema.name.lower()
        row = db.execute("SELECT schema FROM _views WHERE lower(name) = ?", (name,)).fetchone()
        known = None if row is None else ViewSchema.from_json(row[0])
        if known is not None and known.name != view.schema.name:
            raise self._exists(known, view.schema)
        if known == view.schema and known.key:
            before = self._select(db, known, Query())
            self._apply(db, fence, difference(known, before, view.rows))
            return
        seq = 1
        if known is not None:
            seq = seq_next(db, known.name) + 1  # a gap, by which subscribers notice
            db.execute(f"DROP TABLE {self._table_name(known)}")
            db.execute("DELETE FROM _changes WHERE view = ?", (known.name,))
            db.execute("DELETE FROM _views WHERE name = ?", (known.name,))
        self._create_table(db, view.schema)
        db.execute(
            "INSERT INTO _views (name, schema, seq_next) VALUES (?, ?, ?)",
            (view.schema.name, view.schema.to_json(), seq),
        )
        self._apply(db, fence, ViewChange(view.schema.name, view.rows))

    def commit(
        self,
        fence: Fence,
        changes: Sequence[ViewChange | StagedChange],
        *,
        position: Mapping[str, Any],
        ledger: Sequence[Mapping[str, Any]] = (),
        status: Mapping[str, Any],
        sinks: Mapping[str, str] | None = None,
        state: Mapping[tuple[int, int], bytes] | None = None,
        record: Mapping[str, Any] | None = None,
        source_offsets: Mapping[int, Mapping[str, Any]] | None = None,
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
            record: What the history keeps of the batch; kept as JSON, for the last BATCHES_KEPT batches.
            source_offsets: By batch, where the source was before it: before the batch that comes next, and before the
                first one. Kept as long.

        Returns:
            True when committed now, False when this batch was committed before (nothing is done).

        Raises:
            FencedError: Another run has taken over. Close; never retry.
            CorruptionError: The batch does not follow the last committed one.
            ConfigError: Rows do not fit their view.
        """

        # What a crash after each step leaves behind:
        # 1. Rows, change frames and ledger are written: they have no commit mark. The next opening
        #    ignores them; the batch is repeated.
        # 2. The fence row is written, in the same transaction: the same.
        # 3. The commit is written, and the caller was not told: after a crash of the process, or a
        #    connection that broke, all of it is there; after a loss of power all or nothing. The
        #    caller repeats the batch; the fence row, there exactly when the rows are, decides.
        # 4. The commit returned: all of it is durable, and a repetition returns False.
        def commit(db: Database) -> bool:
            number = self._admit(db, fence)
            if number is None:
                return False
            for change in changes:
                self._apply(db, fence, change)
            merged = merge_positions(fence_json(db, "position", fence.app, fence.job), position)
            given = (fence.batch_id, number, to_json(merged), to_json(status))
            with self._together(db):
                self._add_entries(db, fence, ledger, sinks or {}, state or {})
                if record is not None:
                    add_record(db, fence, record)
                add_source_offsets(db, fence, source_offsets or {})
                db.execute(
                    "UPDATE _fences SET batch_id = ?, commit_number = ?, position = ?, status = ? "
                    "WHERE app = ? AND job = ?",
                    (*given, fence.app, fence.job),
                )
            return True

        return self._write(commit)

    def _add_entries(
        self,
        db: Database,
        fence: Fence,
        ledger: Sequence[Mapping[str, Any]],
        sinks: Mapping[str, str],
        state: Mapping[tuple[int, int], bytes],
    ) -> None:
        """Write what a batch leaves besides views: its ledger, its sinks, and manifests of state."""
        db.executemany(
            "INSERT INTO _ledger VALUES (?, ?, ?, ?, ?)",
            [
                (fence.app, fence.job, fence.batch_id, n, to_json(line))
                for n, line in enumerate(ledger)
            ],
        )
        db.executemany(
            "INSERT INTO _sinks VALUES (?, ?, ?, ?, ?) ON CONFLICT (app, job, identity) "
            "DO UPDATE SET name = excluded.name, batch_id = excluded.batch_id",
            [
                (fence.app, fence.job, identity, name, fence.batch_id)
                for identity, name in sinks.items()
            ],
        )
        db.executemany(
            "INSERT INTO _state VALUES (?, ?, ?, ?, ?) ON CONFLICT (app, job, stage, bucket) "
            "DO UPDATE SET manifest = excluded.manifest",
            [
                (fence.app, fence.job, stage, bucket, manifest)
                for (stage, bucket), manifest in state.items()
            ],
        )

    def amend(
        self, view: str, upserts: pl.DataFrame, *, if_greatest: tuple[str, int | None] | None = None
    ) -> bool:
        """Change rows of a view outside of its batches, for a command of the user's.

        One transaction, recorded in the change log under the batch that was committed last. The job
        may run meanwhile: neither undoes what the other did.

        Args:
            if_greatest: A column of integers, and the greatest of them that the caller has seen; None: it has none. If
                that is not the greatest any more, nothing is changed.

        Returns:
            Whether the rows were changed.

        Raises:
            UnknownViewError: There is no such view.
            ConfigError: The rows do not fit the view.
        """

        def amend(db: Database) -> bool:
            schema = schema_of(db, view, self.store_name)
            if if_greatest is not None:
                column, seen = if_greatest
                greatest = f'SELECT max("{column}") FROM {self._table_name(schema)}'  # noqa: S608
                if db.execute(greatest).fetchone()[0] != seen:
                    return False
            found = db.execute("SELECT app, job FROM _views WHERE name = ?", (view,)).fetchone()
            app, job = found[0] or "", found[1] or ""
            last = fence_value(db, "batch_id", app, job)
            self._apply(db, Fence(app, job, 0, last or 0), ViewChange(view, upserts))
            return True

        return self._write(amend)

    def put_description(self, app: str, name: str, value: Any) -> None:
        """Store a description of an app, such as its graph, as JSON; see :meth:`description`.

        Nothing is written if it is there already.
        """
        if self.description(app, name) == json.loads(to_json(value)):
            return
        self._write(lambda db: _put_description(db, app, name, value))

    def put_run_description(self, start: RunStart, name: str, value: Any) -> None:
        """Store a description of an app for the run that has begun, in one transaction with a look at the fence.

        Raises:
            FencedError: a newer run has begun.
        """

        def put(db: Database) -> None:
            self._check_not_replaced(db)
            _check_newest(db, start)
            _put_description(db, start.app, name, value)

        self._write(put)

    def put_first_description(self, app: str, name: str, value: Any) -> Any:
        """Store a description unless there is one, and return that which is there: of several callers the first's."""

        def put(db: Database) -> Any:
            db.execute(
                "INSERT INTO _descriptions VALUES (?, ?, ?) ON CONFLICT (app, name) DO NOTHING",
                (app, name, to_json(value)),
            )
            return stored_description(db, app, name)

        return self._write(put)

    def is_next(self, fence: Fence) -> bool:
        """Return whether this batch is the next to be committed; False if it is committed already.

        Raises:
            FencedError: Another run has taken over.
            CorruptionError: The batch does not follow the last committed one.
        """
        return self._read(lambda db: self._admit(db, fence)) is not None

    def _admit(self, db: Database, fence: Fence) -> int | None:
        """Return the number of this commit, or None if the batch is committed already."""
        self._check_not_replaced(db)
        row = db.execute(
            "SELECT run, batch_id, (SELECT max(commit_number) FROM _fences) FROM _fences "
            "WHERE app = ? AND job = ?",
            (fence.app, fence.job),
        ).fetchone()
        run, last, newest = row or (None, None, None)
        who = f"the job {fence.job!r} of the app {fence.app!r}"
        if run is None:
            raise FencedError(
                f"Run {fence.run} of {who} is not known to {self.store_name.shown}; newest run: none. The "
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
                f"{self.store_name.shown} from an older copy. Restore both from the same time, or start over "
                f"from the log: {reset_command(self.store_name.place)}."
            )
        return int(newest or 0) + 1

    def _together(self, db: Database) -> AbstractContextManager[None]:  # noqa: ARG002 - for those with a server
        """Run the statements of a block, none of which returns anything, in as few round trips as the store can."""
        return nullcontext()

    def _apply(self, db: Database, fence: Fence, change: ViewChange | StagedChange) -> None:
        """Write one view's rows and log what that changed, deletes first."""
        assert isinstance(change, ViewChange), "a store without a stager is given rows"
        schema = schema_of(db, change.view, self.store_name)
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
                gone = self._delete(db, schema, part)
                seq = changelog.append(db, schema, gone, "delete", seq=seq, batch_id=fence.batch_id)
        for part in upserts.iter_slices(_SLICE_ROWS):
            changed = self._upsert(db, schema, part)
            seq = changelog.append(db, schema, changed, "upsert", seq=seq, batch_id=fence.batch_id)
        self._end_changes(db, fence, schema, seq_before, seq)

    def _end_changes(
        self, db: Database, fence: Fence, schema: ViewSchema, seq_before: int, seq: int
    ) -> None:
        """Note where a view's change log ends after a batch."""
        if seq != seq_before:
            changelog.trim(db, schema.name, end=seq, rows_kept=self._changes_kept)
        db.execute(
            "UPDATE _views SET seq_next = ?, app = ?, job = ? WHERE name = ?",
            (seq, fence.app, fence.job, schema.name),
        )


def _put_description(db: Database, app: str, name: str, value: Any) -> None:
    """Store a description of an app, as JSON."""
    db.execute(
        "INSERT INTO _descriptions VALUES (?, ?, ?) ON CONFLICT (app, name) DO UPDATE SET value = excluded.value",
        (app, name, to_json(value)),
    )


def _check_newest(db: Database, start: RunStart) -> None:
    """Make sure that no newer run has begun.

    Raises:
        FencedError: one has.
    """
    newest = fence_value(db, "run", start.app, start.job)
    if newest != start.run:
        raise FencedError(
            f"Run {start.run} of {start.job_label} was replaced by run {newest}. Close this run."
        )
