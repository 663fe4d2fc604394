"""A session: statements that ask, run by DuckDB over the tables that each one names.

The database of a session is in memory, and has the tables of the app as views of DuckDB's over Arrow tables. Before a statement,
those that it may name get their rows, all as of one position; the others raise an error when they are read, so that none is ever
read as it was for another statement. Files, networks, extensions and settings of the engine are closed for good before the
first statement runs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from millstream.errors import DeadlineError, EnvironmentProblem, SqlError
from millstream.sql_queries.app_tables import AppTables
from millstream.sql_queries.engine_errors import translate_errors
from millstream.sql_queries.sql_table import TOPICS, VIEWS, Snapshot, SqlTable, quote_text
from millstream.sql_queries.tokens import (
    NamesInText,
    SqlToken,
    first_words,
    to_text,
    tokenize,
)
from millstream.views.questions.deadline import Deadline
from millstream.views.state_store.view_table import quote_identifier

if TYPE_CHECKING:
    import duckdb

_BATCH_ROWS = 50_000
_INTERRUPT_S = 0.05  # between attempts to end a statement whose time is over
_SETTINGS = {
    "python_enable_replacements": False,
    "autoinstall_known_extensions": False,
    "autoload_known_extensions": False,
    "allow_community_extensions": False,
    "temp_directory": "",
}
_MULTI = "Ask one thing at a time: a statement that begins with SELECT, WITH, FROM, VALUES, DESCRIBE, SUMMARIZE or EXPLAIN."


@dataclass(frozen=True)
class SqlLimits:
    """What a statement may take: time, the engine's memory in MB, and the size of the result in bytes."""

    seconds: float = 60.0
    memory_mb: int = 1024
    result_bytes: int = 1 << 30
    threads: int = 2


@dataclass(frozen=True)
class SqlRows:
    """The rows of a statement, DuckDB's types of the columns, and the tables that they were made of.

    Columns are as the statement has named them, and may have one name.
    """

    names: tuple[str, ...]
    types: tuple[str, ...]
    rows: pa.Table
    snapshot: Snapshot = field(repr=False)


def load_engine() -> Any:
    """Return the module of the engine.

    Raises:
        EnvironmentProblem: it is not installed; the extra ``sql`` brings it.
    """
    try:
        import duckdb  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise EnvironmentProblem(
            'SQL needs duckdb, which is not installed. Install it with pip install "millstream[sql]".'
        ) from error
    return duckdb


class SqlSession:
    """Runs statements over the tables of an app. It belongs to one thread at a time; only :meth:`interrupt` may be called by others."""

    def __init__(
        self,
        tables: AppTables,
        limits: SqlLimits,
        preparation: Sequence[str] = (),
        on_tables: Callable[[Any, tuple[SqlTable, ...]], None] | None = None,
    ) -> None:
        """Open it.

        Args:
            preparation: Statements that are run before anything is closed.
            on_tables: Called with the engine and the tables there are, whenever these are others than before.
        """
        self._tables = tables
        self._limits = limits
        self._on_tables = on_tables
        self._told: tuple[SqlTable, ...] = ()
        self._known: dict[SqlTable, str] = {}  # with the name of the Arrow table, "" if it has none
        self._number = 0
        self._interrupted = threading.Event()
        self._closing = threading.Lock()
        self._closed = False
        settings = {
            **_SETTINGS,
            "memory_limit": f"{limits.memory_mb}MB",
            "threads": limits.threads,
        }
        self._engine: duckdb.DuckDBPyConnection = load_engine().connect(":memory:", config=settings)
        for statement in (
            "SET TimeZone = 'UTC'",
            f"CREATE SCHEMA {VIEWS}",
            f"CREATE SCHEMA {TOPICS}",
            f"SET search_path = '{VIEWS},{TOPICS}'",
            *preparation,
            "SET enable_external_access = false",
            "SET lock_configuration = true",
        ):
            self._engine.execute(statement)

    def close(self) -> None:
        """Let the engine go. Closing twice is allowed."""
        with self._closing:
            self._closed = True
            self._engine.close()

    def interrupt(self) -> None:
        """End the statement that is running, if there is one, with an error. Nothing happens once the session is closed."""
        self._interrupted.set()
        with self._closing:  # the engine of a session that is closed cannot be interrupted
            if not self._closed:
                self._engine.interrupt()

    def run(
        self,
        text: str,
        at_least: Mapping[str, Any] | None = None,
        wanted: Container[str] | None = None,
        seconds: float | None = None,
    ) -> SqlRows:
        """Run a statement.

        Args:
            at_least: A position that it must reflect. It is waited for.
            wanted: The tables that it may name, if not all whose names are in the text.
            seconds: How long it may take, where that is less than the limit.

        Raises:
            SqlError: it is wrong, or not one that asks; or it takes more memory than it may.
            DeadlineError: it took longer than it may.
        """
        self._interrupted.clear()
        longest = self._limits.seconds
        deadline = Deadline.of(longest if seconds is None else min(longest, seconds))
        tokens = tokenize(text)
        with self._stopped_at(deadline):
            asks = self._checked(tokens, text)
            named = NamesInText(tokens) if wanted is None else wanted
            snapshot = self._tables.read(named, deadline, at_least)
            self._show(snapshot)
            if asks == "EXPLAIN":
                return self._explained(text, snapshot)
            if self._interrupted.is_set():
                raise SqlError("The statement was cancelled.", sqlstate="57014")
            relation = self._engine.sql(text)
            names, types = tuple(relation.columns), tuple(map(str, relation.types))
            rows = self._fetched(relation.to_arrow_reader(_BATCH_ROWS))
        return SqlRows(names, types, rows, snapshot)

    def describe(self, text: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the names and DuckDB's types of the columns that a statement has, without running it.

        Raises:
            SqlError: it is wrong, or not one that asks.
        """
        tokens = tokenize(text)
        with translate_errors(self._listed):
            if self._checked(tokens, text) == "EXPLAIN":
                return ("plan",), ("VARCHAR",)
            self._show(self._tables.read((), Deadline.of(self._limits.seconds)))
            relation = self._engine.sql(text)
            return tuple(relation.columns), tuple(map(str, relation.types))

    @contextmanager
    def _stopped_at(self, deadline: Deadline) -> Iterator[None]:
        """Interrupt the engine at the deadline, and say so."""
        done, over = threading.Event(), threading.Event()

        def stop() -> None:
            if done.wait(max(0.0, deadline.left_s)):
                return
            over.set()
            while not done.wait(_INTERRUPT_S):  # the engine forgets one that comes before it begins
                self.interrupt()

        stopper = threading.Thread(target=stop, name="sql-deadline", daemon=True)
        stopper.start()
        try:
            with translate_errors(self._listed):
                yield
        except SqlError as error:
            if over.is_set() and error.sqlstate == "57014":
                raise DeadlineError(
                    f"The statement was not done within {deadline.seconds:g} s. Ask for less, or give it longer (timeout)."
                ) from error
            raise
        finally:
            done.set()
            stopper.join()  # so that it does not end the statement that comes next

    def _checked(self, tokens: Sequence[SqlToken], text: str) -> str:
        """Make sure that a text is one statement that asks; return SELECT or EXPLAIN."""
        statements = self._engine.extract_statements(text)
        if len(statements) != 1:
            raise SqlError(
                f"{len(statements)} statements were given. {_MULTI}",
                sqlstate="42601",
            )
        kind = statements[0].type.name
        if kind == "EXPLAIN":
            inner = to_text(_explained_part(tokens))
            found = self._engine.extract_statements(inner)
            inner_kinds = [one.type.name for one in found]
            kind = "EXPLAIN" if inner_kinds == ["SELECT"] else "OTHER"
        if kind not in ("SELECT", "EXPLAIN"):
            word = " ".join(first_words(tokens, 1))
            raise SqlError(
                f"{word} is no question, and nothing can be changed here. {_MULTI}",
                sqlstate="25006",
            )
        return kind

    def _fetched(self, batches: pa.RecordBatchReader) -> pa.Table:
        parts, held = [], 0
        for batch in batches:
            held += batch.nbytes
            if held > self._limits.result_bytes:
                raise SqlError(
                    f"The result is larger than {self._limits.result_bytes >> 20:,} MB. Ask for fewer rows or columns.",
                    sqlstate="54000",
                )
            if self._interrupted.is_set():
                raise SqlError("The statement was cancelled.", sqlstate="57014")
            parts.append(batch)
        return pa.Table.from_batches(parts, schema=batches.schema)

    def _explained(self, text: str, snapshot: Snapshot) -> SqlRows:
        lines = [
            line for _, plan in self._engine.execute(text).fetchall() for line in plan.splitlines()
        ]
        return SqlRows(("plan",), ("VARCHAR",), pa.table({"plan": lines}), snapshot)

    # The tables of the engine.

    def _show(self, snapshot: Snapshot) -> None:
        """Give the tables of a snapshot their rows, and take away what others have."""
        if self._told != snapshot.tables:
            self._change_tables(snapshot.tables)
        for table in [one for one, name in self._known.items() if name]:
            if table not in snapshot.rows:
                self._empty(table)
        for table, rows in snapshot.rows.items():
            self._fill(table, rows)

    def _change_tables(self, tables: tuple[SqlTable, ...]) -> None:
        """Have the tables of a snapshot, and no others. Where it ended early, the next call does the rest."""
        if self._on_tables is not None:
            self._on_tables(self._engine, tables)
        there = set(tables)
        for table in [one for one in self._known if one not in there]:
            self._empty(table)
            self._engine.execute(f"DROP VIEW {table.quoted}")
            del self._known[table]
        for table in tables:
            if table not in self._known:
                self._create_empty(table)
        self._told = tables

    def _fill(self, table: SqlTable, rows: pa.Table) -> None:
        self._unregister(table)
        self._number += 1
        name = f"_rows_{self._number}"
        self._engine.register(name, rows)
        self._known[table] = name
        columns = ", ".join(
            f"{quote_identifier(one)}::JSON AS {quote_identifier(one)}"
            if kind == "JSON"
            else quote_identifier(one)
            for one, kind in table.columns
        )
        select = f"SELECT {columns} FROM {name}"  # noqa: S608 - of quoted names
        self._engine.execute(f"CREATE OR REPLACE VIEW {table.quoted} AS {select}")

    def _create_empty(self, table: SqlTable) -> None:
        columns = ", ".join(
            f"NULL::{kind} AS {quote_identifier(one)}" for one, kind in table.columns
        )
        said = quote_text(f"The table {table.name} has to be named in the statement itself.")
        select = f"SELECT {columns} WHERE error({said}) IS NULL"
        self._engine.execute(f"CREATE OR REPLACE VIEW {table.quoted} AS {select}")
        self._known[table] = ""

    def _empty(self, table: SqlTable) -> None:
        self._unregister(table)
        self._create_empty(table)

    def _unregister(self, table: SqlTable) -> None:
        if name := self._known.get(table):
            self._engine.unregister(name)

    def _listed(self) -> str:
        return ", ".join(table.quoted for table in self._known) or "none yet"


def _explained_part(tokens: Sequence[SqlToken]) -> list[SqlToken]:
    """Return what comes after EXPLAIN and its options."""
    rest = _without_first(tokens)
    if first_words(rest, 1) == ["ANALYZE"]:
        rest = _without_first(rest)
    words = first_words(rest, 2)
    if words in (["(", "ANALYZE"], ["(", "FORMAT"]):
        while rest and rest[0].text != ")":
            rest = rest[1:]
        rest = rest[1:]
    return rest


def _without_first(tokens: Sequence[SqlToken]) -> list[SqlToken]:
    """Return what comes after the first token; with its spaces, so that operators of several characters stay whole."""
    first = next((at for at, token in enumerate(tokens) if token.kind != "space"), len(tokens))
    return list(tokens[first + 1 :])
