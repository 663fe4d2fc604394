"""Reading a state store: any number of threads and processes, beside the one that writes.

Each call is one short transaction, so that its result belongs to one commit, and it blocks nobody. What is
the same in all stores is here; :meth:`StateStoreReader._read` is each store's own. Writing: `store.py`.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from functools import partial
from typing import Any, TypeVar

import polars as pl

from millstream.choices import did_you_mean
from millstream.errors import ConfigError, UnknownViewError
from millstream.views.coverage import CoverageSpan, OutputCoverage, OutputSink, last_covered
from millstream.views.position import LOG_BROKERS, TOPIC_IDS
from millstream.views.query import Query, QueryResult, ViewReader, view_id_of
from millstream.views.schema import ViewSchema
from millstream.views.sink import RunStart
from millstream.views.state_store import changelog, sqlite_values
from millstream.views.state_store.database import Database, StoreName
from millstream.views.state_store.program import StoredProgram
from millstream.views.state_store.program_state import ProgramOutputs, ProgramState
from millstream.views.state_store.program_tables import (
    RunProgram,
    check_interrupted_batch,
    check_program,
    next_boundary,
    next_outputs,
    stored_coverage,
    stored_outputs,
    stored_program,
)

FORMAT = 3

T = TypeVar("T")

_MANY = (1 << 63) - 1


@dataclass(frozen=True)
class ViewsSnapshot:
    """Views of a store as of one commit.

    ``schemas`` are those of all views; ``rows`` has the views that were wanted and are not as the reader knew them, and
    ``marks`` what the wanted ones are known by, and ``positions`` what they reflect, which moves on without a change of their
    rows. ``topic_ids`` are those of the topics of the app's ``position``, by name;
    ``topics_read`` are the topics that the app reads, of which one that is not in the position was not read yet.
    """

    schemas: tuple[ViewSchema, ...]
    rows: Mapping[str, QueryResult]
    marks: Mapping[str, tuple[Any, ...]]
    batch_id: int | None
    position: dict[str, Any]
    topic_ids: Mapping[str, str]
    topics_read: frozenset[str] = frozenset()
    positions: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class CommittedState:
    """The state of a job as one batch left it: its manifests, by stage and bucket, and the position of the log.

    ``run`` is the number of the newest run, which may have committed nothing yet. ``program`` is that of the state, as
    :meth:`StoredProgram.from_json` takes it: a run may replace both, and divide the keys otherwise, without a batch.
    """

    run: int
    program: str
    batch_id: int
    position: dict[str, Any]
    manifests: Mapping[tuple[int, int], bytes]


class StateStoreReader(ViewReader):
    """Reads an app's state store; see :class:`ViewReader` for the methods on views."""

    store_name: StoreName
    """The store in errors."""

    @abstractmethod
    def _read(self, work: Callable[[Database], T]) -> T:
        """Run some work within one read transaction, so that all it reads belongs to one commit.

        A store may repeat the work if its connection breaks.
        """

    @abstractmethod
    def _has_table(self, db: Database, table: str) -> bool:
        """Return whether the store has one of our tables: one made by an earlier version may lack it."""

    @abstractmethod
    def _table_name(self, schema: ViewSchema) -> str:
        """Return the name of a view's table, quoted."""

    @abstractmethod
    def _select(self, db: Database, schema: ViewSchema, query: Query) -> pl.DataFrame:
        """Return the rows that a query selects, typed."""

    def views(self) -> list[ViewSchema]:
        rows = self._read(
            lambda db: db.execute("SELECT schema FROM _views ORDER BY name").fetchall()
        )
        return [ViewSchema.from_json(text) for (text,) in rows]

    def schema(self, view: str) -> ViewSchema:
        return self._read(lambda db: schema_of(db, view, self.store_name))

    def count(self, view: str) -> int:
        def count(db: Database) -> int:
            name = self._table_name(schema_of(db, view, self.store_name))
            return int(db.execute(f"SELECT count(*) FROM {name}").fetchone()[0])  # noqa: S608

        return self._read(count)

    def version(self) -> tuple[int, ...]:
        return self._read(_version)

    def newest_changes(self) -> dict[str, int]:
        return self._read(
            lambda db: dict(
                db.execute("SELECT name, seq_next - 1 FROM _views ORDER BY name").fetchall()
            )
        )

    def view_id(self, view: str) -> str:
        return self._read(lambda db: _view_id(db, view))

    def select(self, view: str, query: Query) -> QueryResult:
        return self._read(partial(self._query, view, query))

    def _query(self, view: str, query: Query, db: Database) -> QueryResult:
        schema = schema_of(db, view, self.store_name)
        found = self._select(db, schema, query)
        newest = seq_next(db, view) - 1
        last, position = _last_committed(db, view)
        coverage = stored_coverage(db, _job_of(db, view)[0], view)
        return QueryResult(schema, found, newest, last, position, coverage, _view_id(db, view))

    def snapshot(
        self, app: str, wanted: Container[str], known: Mapping[str, tuple[Any, ...]]
    ) -> ViewsSnapshot:
        """Return the rows of the wanted views of an app, all of one commit; not of those that are still as ``known``.

        ``known`` has marks of an earlier snapshot.
        """

        def snapshot(db: Database) -> ViewsSnapshot:
            found = db.execute("SELECT schema, seq_next FROM _views ORDER BY name").fetchall()
            schemas = [(ViewSchema.from_json(text), seq) for text, seq in found]
            runs = _version(db)[1]
            marks = {
                schema.name: (_view_id(db, schema.name), seq, runs, schema)
                for schema, seq in schemas
                if schema.name in wanted
            }
            rows = {
                view: self._query(view, Query(), db)
                for view, mark in marks.items()
                if known.get(view) != mark
            }
            ids = graph = None
            if self._has_table(db, "_descriptions"):
                ids = stored_description(db, app, TOPIC_IDS)
                graph = stored_description(db, app, "graph")
            read = _topics_read(graph or {})
            last = fence_value(db, "batch_id", app, None)
            position = fence_json(db, "position", app, None)
            every = tuple(schema for schema, _ in schemas)
            positions = {view: _last_committed(db, view)[1] for view in marks}
            return ViewsSnapshot(every, rows, marks, last, position, ids or {}, read, positions)

        return self._read(snapshot)

    def changes(self, view: str, *, since: int = 0, limit: int | None = None) -> pl.DataFrame:
        def changes(db: Database) -> pl.DataFrame:
            schema = schema_of(db, view, self.store_name)
            return changelog.read(db, schema, since, seq_next(db, view), limit)

        return self._read(changes)

    def _last_committed(self, view_or_app: str) -> tuple[int | None, dict[str, Any]]:
        return self._read(lambda db: _last_committed(db, view_or_app))

    def status(self, app: str, job: str | None = None) -> dict[str, Any]:
        """Return the status of a job, by default the one that committed last; {} before that."""
        return self._read(lambda db: fence_json(db, "status", app, job))

    def description(self, app: str, name: str) -> Any:
        """Return a description of an app, such as its graph or its dashboard; None if there is none."""

        def description(db: Database) -> Any:
            if not self._has_table(db, "_descriptions"):
                return None  # no job has opened the store since there are descriptions
            return stored_description(db, app, name)

        return self._read(description)

    def log_brokers(self, app: str) -> str | None:
        """Return the address of the brokers whose log an app reads; None where it reads a folder."""
        known: Mapping[str, str] = self.description(app, LOG_BROKERS) or {}
        return known.get("address")

    def topics_read(self, app: str) -> frozenset[str] | None:
        """Return the topics that an app reads; None before its first run."""
        graph = self.description(app, "graph")
        return None if graph is None else _topics_read(graph)

    def last_batch_id(self, app: str, job: str | None = None) -> int | None:
        """Return the last batch that was committed; None before the first."""
        found = self._read(lambda db: fence_value(db, "batch_id", app, job))
        return None if found is None else int(found)

    def ledger(self, app: str, *, since: int = 0, until: int = 2**62) -> list[dict[str, Any]]:
        """Return the ledger entries of the batches from ``since`` to ``until``, in the order of batches."""
        rows = self._read(
            lambda db: db.execute(
                "SELECT line FROM _ledger WHERE app = ? AND batch_id >= ? AND batch_id <= ? "
                "ORDER BY batch_id, job, number",
                (app, since, until),
            ).fetchall()
        )
        return [json.loads(line) for (line,) in rows]

    def batches(
        self, app: str, *, since: int = 0, limit: int | None = None
    ) -> list[dict[str, Any]]:
        """Return what the history has of batches: of those from ``since`` on the last ``limit``, in their order.

        See :func:`millstream.views.commit.batch_history.batch_record`. Only the last
        :data:`~millstream.views.state_store.batch_tables.BATCHES_KEPT` batches are kept.
        """

        def batches(db: Database) -> list[str]:
            if not self._has_table(db, "_batches"):
                return []  # no job has opened the store since there is a history
            found = db.execute(
                "SELECT record FROM _batches WHERE app = ? AND batch_id >= ? "
                "ORDER BY batch_id DESC, job LIMIT ?",
                (app, since, _MANY if limit is None else limit),
            )
            return [record for (record,) in found.fetchall()]

        return [json.loads(record) for record in reversed(self._read(batches))]

    def source_offsets(self, app: str, job: str) -> dict[int, dict[str, Any]]:
        """Return the source offset before each batch, and before the one that comes next, as far as they are kept.

        Those of the last :data:`~millstream.views.state_store.batch_tables.BATCHES_KEPT` batches are, and none from before
        the program was put in place.
        """

        def offsets(db: Database) -> list[tuple[int, str]]:
            if not self._has_table(db, "_source_offsets"):
                return []  # no job has opened the store since they are kept
            found = db.execute(
                "SELECT batch_id, source_offset FROM _source_offsets WHERE app = ? AND job = ? ORDER BY batch_id",
                (app, job),
            )
            return found.fetchall()

        return {int(batch_id): json.loads(text) for batch_id, text in self._read(offsets)}

    def program(self, app: str, job: str) -> StoredProgram | None:
        """Return the program that created a job's state; None before its first run."""
        return self._read(lambda db: stored_program(db, app, job))

    def left_by(self, app: str, job: str, at: str) -> ProgramState | None:
        """Return what a job's program has left, as of one commit; None before its first batch.

        ``at`` is the present time (RFC 3339).
        """

        def left(db: Database) -> ProgramState | None:
            boundary = next_boundary(db, app, job, at)
            program = stored_program(db, app, job)
            if program is None or boundary.batch_id == 0:
                return None
            found = db.execute("SELECT schema FROM _views").fetchall()
            schemas = [ViewSchema.from_json(text) for (text,) in found]
            outputs = ProgramOutputs(stored_outputs(db, app, job), {s.name: s for s in schemas})
            return ProgramState(program, outputs, boundary)

        return self._read(left)

    def check_program(self, app: str, job: str, beginning: RunProgram) -> None:
        """Make sure that a program may go on with the job's state.

        Raises:
            ConfigError: it may not; the message says why.
        """
        self._read(lambda db: check_program(db, app, job, beginning, self.store_name))

    def check_interrupted_batch(self, start: RunStart, beginning: RunProgram, ahead: str) -> None:
        """Make sure that a program produces again the batch that ``ahead`` has and the state store lacks.

        Raises:
            ConfigError: another program had begun that batch.
        """
        self._read(lambda db: check_interrupted_batch(db, start, beginning, ahead))

    def next_coverage(
        self, app: str, job: str, beginning: RunProgram
    ) -> dict[OutputSink, OutputCoverage]:
        """Return the coverage of all outputs of a job as of a run that is to begin."""
        return self._read(lambda db: next_outputs(db, app, job, beginning))

    def coverage(self, view: str) -> tuple[CoverageSpan, ...]:
        return self._read(lambda db: stored_coverage(db, _job_of(db, view)[0], view))

    def outputs(self, app: str, job: str = "main") -> dict[OutputSink, OutputCoverage]:
        """Return the coverage of all outputs that a job has had, by name and sink."""
        return self._read(lambda db: stored_outputs(db, app, job))

    def sinks(self, app: str, job: str) -> list[tuple[str, str, int]]:
        """Return the identity, name and last batch of each sink of a job, without the state store."""
        return self._read(
            lambda db: db.execute(
                "SELECT identity, name, batch_id FROM _sinks WHERE app = ? AND job = ?",
                (app, job),
            ).fetchall()
        )

    def checkpoint_id(self, app: str, job: str) -> str | None:
        """Return the checkpoint of the newest run of a job; None before its first."""
        found = self._read(lambda db: fence_value(db, "checkpoint_id", app, job))
        return None if found is None else str(found)

    def newest_run(self, app: str, job: str) -> int:
        """Return the number of the newest run of a job; 0 before its first."""
        return int(self._read(lambda db: fence_value(db, "run", app, job)) or 0)

    def state_manifests(self, app: str, job: str) -> dict[tuple[int, int], bytes]:
        """Return the manifests of a job's state, by stage and bucket, as of the last commit."""
        found = self._read(
            lambda db: db.execute(
                "SELECT stage, bucket, manifest FROM _state WHERE app = ? AND job = ?", (app, job)
            ).fetchall()
        )
        return {(stage, bucket): manifest for stage, bucket, manifest in found}

    def committed_state(
        self, app: str, job: str, buckets: Sequence[tuple[int, int]] | None = None
    ) -> CommittedState | None:
        """Return the state of a job as of its last commit; None before the first.

        ``buckets`` are those whose manifests are wanted, by stage and number; by default all.
        """

        def state(db: Database) -> CommittedState | None:
            row = db.execute(
                "SELECT run, batch_id, position, program FROM _fences JOIN _programs USING (app, job) "
                "WHERE app = ? AND job = ?",
                (app, job),
            ).fetchone()
            if row is None or row[1] is None:
                return None
            return CommittedState(
                int(row[0]),
                row[3],
                int(row[1]),
                json.loads(row[2] or "{}"),
                _manifests(db, app, job, buckets),
            )

        return self._read(state)

    def databases(self) -> list[str]:
        """Return the databases that jobs of this store keep views in, without credentials."""

        def databases(db: Database) -> list[str]:
            if not self._has_table(db, "_sinks"):
                return []  # no job has opened the store since there are other sinks
            rows = db.execute("SELECT DISTINCT name FROM _sinks WHERE name LIKE 'postgresql:%'")
            return sorted(name for (name,) in rows.fetchall())

        return self._read(databases)


def _manifests(
    db: Database, app: str, job: str, buckets: Sequence[tuple[int, int]] | None
) -> dict[tuple[int, int], bytes]:
    select = "SELECT stage, bucket, manifest FROM _state WHERE app = ? AND job = ?"
    if buckets is None:
        found = db.execute(select, (app, job)).fetchall()
    else:
        one = f"{select} AND stage = ? AND bucket = ?"
        found = [
            row for bucket in buckets for row in db.execute(one, (app, job, *bucket)).fetchall()
        ]
    return {(stage, bucket): bytes(manifest) for stage, bucket, manifest in found}


def _topics_read(graph: Mapping[str, Any]) -> frozenset[str]:
    topics = (node for node in graph.get("nodes", ()) if node["kind"] == "topic")
    return frozenset(node["does"] for node in topics if node["id"].startswith("source-"))


def _version(db: Database) -> tuple[int, ...]:
    commits = db.execute(
        "SELECT coalesce(max(commit_number), 0), CAST(coalesce(sum(run), 0) AS bigint) FROM _fences"
    ).fetchone()
    changes = db.execute("SELECT CAST(coalesce(sum(seq_next), 0) AS bigint) FROM _views").fetchone()
    return (*commits, *changes)


def schema_of(db: Database, view: str, store: StoreName) -> ViewSchema:
    """Return the schema of a view of the store.

    Raises:
        UnknownViewError: There is no such view.
    """
    row = db.execute("SELECT schema FROM _views WHERE name = ?", (view,)).fetchone()
    if row is None:
        found = db.execute("SELECT name FROM _views ORDER BY name").fetchall()
        names = [name for (name,) in found]
        raise UnknownViewError(
            f"There is no view {view!r} in {store.shown}; there are: {', '.join(names) or 'none yet'}. "
            f"Correct the name, or run the pipeline that fills the view.{did_you_mean(view, names)}"
        )
    return ViewSchema.from_json(row[0])


def encode_values(schema: ViewSchema, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return single values in the form in which the view's table keeps them."""
    out = {}
    for name, value in values.items():
        if name not in schema.names:
            raise ConfigError(
                f"The view {schema.name!r} has no column {name!r}; it has "
                f"{', '.join(schema.names)}. Choose one of them."
            )
        one = ViewSchema(schema.name, ((name, schema.kinds[name]),), ())
        frame = sqlite_values.normalize(_one_value(name, value, schema), one, (name,))
        keyed = ViewSchema(one.name, one.columns, (name,) if name in schema.key else ())
        out[name] = next(sqlite_values.encode_rows(frame, keyed))[0]
    return out


def _one_value(name: str, value: Any, schema: ViewSchema) -> pl.DataFrame:
    """Put a value into a column of its own, so that it is checked as rows are."""
    try:
        if isinstance(value, Decimal) and not value.is_finite():
            raise ValueError("it is not finite")  # noqa: TRY301 - polars would panic
        return pl.DataFrame({name: [value]})
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise ConfigError(
            f"Column {name!r} of the view {schema.name!r} keeps {schema.kinds[name]}, and the value "
            f"asked for cannot be one ({error}). Ask for a value that the column can hold."
        ) from error


def fence_value(db: Database, column: str, app: str | None, job: str | None) -> Any:
    """Return what the fence of a job holds; without ``job``, of the one that committed last."""
    row = db.execute(
        f"SELECT {column} FROM _fences WHERE app = ? AND job = coalesce(?, job) "  # noqa: S608
        "ORDER BY commit_number DESC NULLS LAST LIMIT 1",
        (app, job),
    ).fetchone()
    return None if row is None else row[0]


def fence_json(db: Database, column: str, app: str | None, job: str | None) -> dict[str, Any]:
    """Return what the fence of a job holds as JSON; {} before the first commit."""
    value: dict[str, Any] = json.loads(fence_value(db, column, app, job) or "{}")
    return value


def seq_next(db: Database, view: str) -> int:
    """Return the number that the next change of a view will have."""
    row = db.execute("SELECT seq_next FROM _views WHERE name = ?", (view,)).fetchone()
    return int(row[0])


def to_json(value: Any) -> str:
    """Return the text in which the store keeps plain values."""
    return json.dumps(value, ensure_ascii=False, default=str)


def stored_description(db: Database, app: str, name: str) -> Any:
    """Return a description of an app; None if there is none."""
    row = db.execute(
        "SELECT value FROM _descriptions WHERE app = ? AND name = ?", (app, name)
    ).fetchone()
    return None if row is None else json.loads(row[0])


def _job_of(db: Database, view_or_app: str) -> tuple[str | None, str | None]:
    """Return the app and job that fill a view; of an app, itself and any job."""
    found = db.execute("SELECT app, job FROM _views WHERE name = ?", (view_or_app,)).fetchone()
    return (found[0], found[1]) if found else (view_or_app, None)


def _view_id(db: Database, view: str) -> str:
    """Return the id of a view. Its app and job are recorded with its first change."""
    app, job = _job_of(db, view)
    if job is not None:
        return view_id_of(fence_value(db, "checkpoint_id", app, job))
    row = db.execute("SELECT checkpoint_id FROM _fences").fetchone()
    return view_id_of(None if row is None else row[0])


def _last_committed(db: Database, view_or_app: str) -> tuple[int | None, dict[str, Any]]:
    """Return the last batch that a view or an app reflects, and its position."""
    app, job = _job_of(db, view_or_app)
    ended = last_covered(stored_coverage(db, app, view_or_app))
    if ended is not None:
        return ended
    return fence_value(db, "batch_id", app, job), fence_json(db, "position", app, job)
