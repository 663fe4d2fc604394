"""Reading a state store: any number of threads and processes, beside the one that writes.

Each call is one short transaction on a connection of its own, so that its result belongs to one commit,
and it blocks nobody. Writing: `store.py`.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any

import polars as pl

from millstream.choices import did_you_mean
from millstream.errors import ConfigError, CorruptionError, UnknownViewError
from millstream.views.coverage import CoverageSpan, OutputCoverage, OutputSink, last_covered
from millstream.views.query import Query, QueryResult, ViewReader, view_id_of
from millstream.views.runs.control_files import reset_command
from millstream.views.schema import ViewSchema
from millstream.views.sink import RunStart
from millstream.views.state_store import changelog, sqlite_values
from millstream.views.state_store.connections import ReadConnections
from millstream.views.state_store.program import StoredProgram
from millstream.views.state_store.program_tables import (
    RunProgram,
    check_interrupted_batch,
    check_program,
    next_outputs,
    stored_coverage,
    stored_outputs,
    stored_program,
)
from millstream.views.state_store.view_table import ViewTable

FORMAT = 3
APPLICATION_ID = 0x4D494C4C  # "MILL"


class StateStoreReader(ViewReader):
    """Reads an app's state store in a SQLite file; see :class:`ViewReader` for the methods on views.

    With ``follows``, a store that is created again under its path is read from then on.
    """

    _poll_s = 0.01

    def __init__(self, path: Path, *, follows: bool) -> None:
        self._path = path
        self._readers = ReadConnections(path, follows=follows)

    def close(self) -> None:
        self._readers.close()

    def check_format(self, *, needs_tables: bool = True) -> None:
        """Make sure that the file is a view store that this version reads.

        Args:
            needs_tables: Whether its tables must be there. For a moment, the file exists before they do;
                after a crash in that moment, until the next run.

        Raises:
            ConfigError: it is not there, or of a newer version.
            CorruptionError: it is something else.
        """
        there_is_none = ConfigError(
            f"There is no view store at {self._path}. Run the pipeline that fills it, or "
            "correct the folder or the app's name."
        )
        if not self._path.exists():
            raise there_is_none
        with self._readers.snapshot() as db:
            found = db.execute("PRAGMA user_version").fetchone()[0]
            mark = db.execute("PRAGMA application_id").fetchone()[0]
            tables = db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
        if needs_tables and not tables:
            raise there_is_none
        if tables and mark != APPLICATION_ID:
            raise CorruptionError(
                f"{self._path} is a database, but no view store. Move it away, or use another "
                "folder."
            )
        if found > FORMAT:
            raise ConfigError(
                f"{self._path} has format {found}; this version reads {FORMAT}. Upgrade millstream."
            )
        if tables and found < FORMAT:
            raise ConfigError(
                f"{self._path} has format {found}, of an earlier version; this one reads {FORMAT}. Go "
                f"on with that version, or start over from the log: {reset_command(self._path.parent)}."
            )

    def views(self) -> list[ViewSchema]:
        with self._readers.snapshot() as db:
            rows = db.execute("SELECT schema FROM _views ORDER BY name").fetchall()
        return [ViewSchema.from_json(text) for (text,) in rows]

    def schema(self, view: str) -> ViewSchema:
        with self._readers.snapshot() as db:
            return schema_of(db, view, self._path)

    def count(self, view: str) -> int:
        with self._readers.snapshot() as db:
            table = ViewTable(schema_of(db, view, self._path))
            return int(db.execute(f"SELECT count(*) FROM {table.name}").fetchone()[0])  # noqa: S608

    def version(self) -> tuple[int, ...]:
        with self._readers.snapshot() as db:
            commits = db.execute(
                "SELECT coalesce(max(commit_number), 0), coalesce(sum(run), 0) FROM _fences"
            ).fetchone()
            changes = db.execute("SELECT coalesce(sum(seq_next), 0) FROM _views").fetchone()
        return (*commits, *changes)

    def newest_changes(self) -> dict[str, int]:
        with self._readers.snapshot() as db:
            return dict(
                db.execute("SELECT name, seq_next - 1 FROM _views ORDER BY name").fetchall()
            )

    def view_id(self, view: str) -> str:
        with self._readers.snapshot() as db:
            return _view_id(db, view)

    def select(self, view: str, query: Query) -> QueryResult:
        with self._readers.snapshot() as db:
            schema = schema_of(db, view, self._path)
            values = encode_values(schema, query.where)
            bounds = query.checked_bounds(schema)
            text = ViewTable(schema).select(
                tuple(values),
                [(name, comparison) for name, comparison, _ in bounds],
                query.checked_order(schema),
                limited=query.limit is not None,
            )
            given = [*values.values(), *(_encoded(schema, n, value) for n, _, value in bounds)]
            given += [] if query.limit is None else [query.limit]
            rows = db.execute(text, given).fetchall()
            newest = seq_next(db, view) - 1
            last, position = _last_committed(db, view)
            coverage = stored_coverage(db, _job_of(db, view)[0], view)
            view_id = _view_id(db, view)
        found = sqlite_values.decode_rows(rows, schema)
        return QueryResult(schema, found, newest, last, position, coverage, view_id)

    def changes(self, view: str, *, since: int = 0, limit: int | None = None) -> pl.DataFrame:
        with self._readers.snapshot() as db:
            schema = schema_of(db, view, self._path)
            return changelog.read(db, schema, since, seq_next(db, view), limit)

    def _last_committed(self, view_or_app: str) -> tuple[int | None, dict[str, Any]]:
        with self._readers.snapshot() as db:
            return _last_committed(db, view_or_app)

    def status(self, app: str, job: str | None = None) -> dict[str, Any]:
        """Return the status of a job, by default the one that committed last; {} before that."""
        with self._readers.snapshot() as db:
            return fence_json(db, "status", app, job)

    def description(self, app: str, name: str) -> Any:
        """Return a description of an app, such as its graph or its dashboard; None if there is none."""
        with self._readers.snapshot() as db:
            if not _has(db, "_descriptions"):
                return None  # no job has opened the store since there are descriptions
            row = db.execute(
                "SELECT value FROM _descriptions WHERE app = ? AND name = ?", (app, name)
            ).fetchone()
        return None if row is None else json.loads(row[0])

    def last_batch_id(self, app: str, job: str | None = None) -> int | None:
        """Return the last batch that was committed; None before the first."""
        with self._readers.snapshot() as db:
            found = fence_value(db, "batch_id", app, job)
        return None if found is None else int(found)

    def ledger(self, app: str, *, since: int = 0) -> list[dict[str, Any]]:
        """Return the ledger entries of the batches from ``since`` on, in the order of batches."""
        with self._readers.snapshot() as db:
            rows = db.execute(
                "SELECT line FROM _ledger WHERE app = ? AND batch_id >= ? "
                "ORDER BY batch_id, job, number",
                (app, since),
            ).fetchall()
        return [json.loads(line) for (line,) in rows]

    def program(self, app: str, job: str) -> StoredProgram | None:
        """Return the program that created a job's state; None before its first run."""
        with self._readers.snapshot() as db:
            return stored_program(db, app, job)

    def check_program(self, app: str, job: str, beginning: RunProgram) -> None:
        """Make sure that a program may go on with the job's state.

        Raises:
            ConfigError: it may not; the message says why.
        """
        with self._readers.snapshot() as db:
            check_program(db, app, job, beginning, self._path)

    def check_interrupted_batch(self, start: RunStart, beginning: RunProgram, ahead: str) -> None:
        """Make sure that a program produces again the batch that ``ahead`` has and the state store lacks.

        Raises:
            ConfigError: another program had begun that batch.
        """
        with self._readers.snapshot() as db:
            check_interrupted_batch(db, start, beginning, ahead)

    def next_coverage(
        self, app: str, job: str, beginning: RunProgram
    ) -> dict[OutputSink, OutputCoverage]:
        """Return the coverage of all outputs of a job as of a run that is to begin."""
        with self._readers.snapshot() as db:
            return next_outputs(db, app, job, beginning)

    def coverage(self, view: str) -> tuple[CoverageSpan, ...]:
        with self._readers.snapshot() as db:
            app, _ = _job_of(db, view)
            return stored_coverage(db, app, view)

    def outputs(self, app: str, job: str = "main") -> dict[OutputSink, OutputCoverage]:
        """Return the coverage of all outputs that a job has had, by name and sink."""
        with self._readers.snapshot() as db:
            return stored_outputs(db, app, job)

    def sinks(self, app: str, job: str) -> list[tuple[str, str, int]]:
        """Return the identity, name and last batch of each sink of a job, without the state store."""
        with self._readers.snapshot() as db:
            return db.execute(
                "SELECT identity, name, batch_id FROM _sinks WHERE app = ? AND job = ?",
                (app, job),
            ).fetchall()

    def checkpoint_id(self, app: str, job: str) -> str | None:
        """Return the checkpoint of the newest run of a job; None before its first."""
        with self._readers.snapshot() as db:
            found = fence_value(db, "checkpoint_id", app, job)
            return None if found is None else str(found)

    def databases(self) -> list[str]:
        """Return the databases that jobs of this store keep views in, without credentials."""
        with self._readers.snapshot() as db:
            if not _has(db, "_sinks"):
                return []  # no job has opened the store since there are other sinks
            rows = db.execute("SELECT DISTINCT name FROM _sinks WHERE name LIKE 'postgresql:%'")
            return sorted(name for (name,) in rows)


def schema_of(db: sqlite3.Connection, view: str, path: Path) -> ViewSchema:
    """Return the schema of a view of the store at ``path``.

    Raises:
        UnknownViewError: There is no such view.
    """
    row = db.execute("SELECT schema FROM _views WHERE name = ?", (view,)).fetchone()
    if row is None:
        names = [name for (name,) in db.execute("SELECT name FROM _views ORDER BY name")]
        raise UnknownViewError(
            f"There is no view {view!r} in {path}; there are: {', '.join(names) or 'none yet'}. "
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


def fence_value(db: sqlite3.Connection, column: str, app: str | None, job: str | None) -> Any:
    """Return what the fence of a job holds; without ``job``, of the one that committed last."""
    row = db.execute(
        f"SELECT {column} FROM _fences WHERE app = ? AND (job = ? OR ? IS NULL) "  # noqa: S608
        "ORDER BY commit_number DESC LIMIT 1",
        (app, job, job),
    ).fetchone()
    return None if row is None else row[0]


def fence_json(
    db: sqlite3.Connection, column: str, app: str | None, job: str | None
) -> dict[str, Any]:
    """Return what the fence of a job holds as JSON; {} before the first commit."""
    value: dict[str, Any] = json.loads(fence_value(db, column, app, job) or "{}")
    return value


def seq_next(db: sqlite3.Connection, view: str) -> int:
    """Return the number that the next change of a view will have."""
    row = db.execute("SELECT seq_next FROM _views WHERE name = ?", (view,)).fetchone()
    return int(row[0])


def to_json(value: Any) -> str:
    """Return the text in which the store keeps plain values."""
    return json.dumps(value, ensure_ascii=False, default=str)


def _job_of(db: sqlite3.Connection, view_or_app: str) -> tuple[str | None, str | None]:
    """Return the app and job that fill a view; of an app, itself and any job."""
    found = db.execute("SELECT app, job FROM _views WHERE name = ?", (view_or_app,)).fetchone()
    return (found[0], found[1]) if found else (view_or_app, None)


def _view_id(db: sqlite3.Connection, view: str) -> str:
    """Return the id of a view. Its app and job are recorded with its first change."""
    app, job = _job_of(db, view)
    if job is not None:
        return view_id_of(fence_value(db, "checkpoint_id", app, job))
    row = db.execute("SELECT checkpoint_id FROM _fences").fetchone()
    return view_id_of(None if row is None else row[0])


def _last_committed(db: sqlite3.Connection, view_or_app: str) -> tuple[int | None, dict[str, Any]]:
    """Return the last batch that a view or an app reflects, and its position."""
    app, job = _job_of(db, view_or_app)
    ended = last_covered(stored_coverage(db, app, view_or_app))
    if ended is not None:
        return ended
    return fence_value(db, "batch_id", app, job), fence_json(db, "position", app, job)


def _encoded(schema: ViewSchema, name: str, value: Any) -> Any:
    return encode_values(schema, {name: value})[name]


def _has(db: sqlite3.Connection, table: str) -> bool:
    row = db.execute("SELECT 1 FROM sqlite_master WHERE name = ?", (table,)).fetchone()
    return row is not None
