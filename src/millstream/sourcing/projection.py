"""Projections: tables that are a fold of the events, in SQLite or PostgreSQL, exactly once in effect.

The position is in the database, and moves in the transaction that changes the tables. A crash leaves both
as before or both as after. Two processes with one projection do not double it: the second finds that the
position has moved.

A projection has generations. Each has tables and positions of its own; what users read are SQL views with
the names of the tables, which show the live one. A rebuild fills the next generation beside the live one:

1. Note the generation, and make its tables, in one transaction. A crash leaves an empty generation, which
   the next rebuild by the same code continues, and by other code drops.
2. Fill it, transaction by transaction. A crash leaves it at a position, from which a rebuild continues.
3. Read to the end, move the views to it, note that it is live, and drop the old one, in one transaction.
   A crash leaves the old one live, or the new one.

The code of a projection is noted with its generation. Tables that were filled by other code are refused, never
continued: rebuild them. The last event is noted with each position. A log that was restored from an older backup
ends before it, or has another event there: then the tables have what never happened, and are refused as well.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from millstream.durations import Duration, to_us
from millstream.errors import ConfigError, FencedError, MillstreamError, RetriableError
from millstream.kernels.code_digest import code_digest, digest
from millstream.sourcing.aggregate import Folding
from millstream.sourcing.event_types import EventTypes
from millstream.sourcing.partition_log import events_deleted
from millstream.sourcing.projection_target import ProjectionTables, open_target
from millstream.sourcing.stored_event import LogPosition, RawEvent, SourcedEvent

BATCH_EVENTS = 5000  # in one transaction
LOOK_AGAIN_S = 0.01
BEHIND_S = 2.0  # a broker that has just become the leader may know of fewer events for a moment
_NAME = re.compile(r"[a-z_][a-z0-9_]{0,39}")
_REAL_NAME_MAX = 50  # PostgreSQL cuts names at 63 bytes; the generation comes behind it
_TABLES = (
    """CREATE TABLE IF NOT EXISTS _millstream_projections (
        name TEXT, generation INTEGER, code TEXT, tables TEXT, live INTEGER,
        PRIMARY KEY (name, generation))""",
    """CREATE TABLE IF NOT EXISTS _millstream_positions (
        name TEXT, generation INTEGER, partition_number INTEGER, next_offset BIGINT, last_event TEXT,
        PRIMARY KEY (name, generation, partition_number))""",
)


@dataclass(frozen=True)
class Projection:
    """What to make of the events.

    Args:
        name: Of the projection, in its database.
        tables: The columns of each table, as between the brackets of CREATE TABLE. Readers find each
            under its name, as a SQL view.
        apply: Called with each event, in order within a stream, and the tables to write to:
            ``tables.execute("INSERT INTO {totals} ...", parameters)``. It must not write anywhere else:
            after a crash it is called again.
        forget: Called with a subject who is forgotten, and the tables: removes what they have of it. Without
            it, the projection is rebuilt from events in which the subject is forgotten.
        code: What decides whether the tables were filled by today's code; ``apply`` if not given.
    """

    name: str
    tables: Mapping[str, str]
    apply: Callable[[SourcedEvent, ProjectionTables], object] = field(repr=False)
    forget: Callable[[str, ProjectionTables], object] | None = field(default=None, repr=False)
    code: Any = field(default=None, repr=False)

    def __post_init__(self) -> None:
        for name in (self.name, *self.tables):
            if not _NAME.fullmatch(name):
                raise ConfigError(
                    f"the name {name!r} of a projection or table is not possible; use up to 40 small letters, "
                    "digits and _"
                )
        if not self.tables:
            raise ConfigError(f"projection {self.name!r} has no tables; give it one")


class EventSource(Protocol):
    """What a projection needs of the store."""

    topic_id: str
    partitions: int
    events: EventTypes

    def reading(self, partition: int) -> Folding:
        """Return what reads the events of a partition."""


class _Moved(Exception):
    """Another process has moved the position, or a subject was forgotten: read again."""


class ProjectionRun:
    """A projection of a store's events into a database; :meth:`EventStore.project` makes it.

    Raises:
        ConfigError: its tables were filled by other code, or from another topic: rebuild it.

    Guarantees: thread-safe. Any number of processes may run one projection.
    """

    def __init__(
        self, store: EventSource, projection: Projection, into: str | Path, *, rebuild: bool
    ) -> None:
        self._store, self._projection = store, projection
        self._target = open_target(into)
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._compared: set[tuple[int, int]] = set()  # generations and partitions
        parts = (
            code_digest(projection.code or projection.apply),
            store.events.digest(),
            repr(sorted(projection.tables.items())),
            store.topic_id,
        )
        self._code = digest("\n".join(parts))
        try:
            self._generation = self._find_generation(rebuild=rebuild)
            if rebuild:
                self._rebuild()
        except BaseException:
            self._target.close()
            raise

    # -- running ------------------------------------------------------------------------------

    def catch_up(self) -> int:
        """Apply all events that the topic holds now; return how many were applied.

        Raises:
            FencedError: the projection was rebuilt by other code meanwhile; open it with that.
            UserCodeError, ConfigError: an event cannot be read. Any exception of ``apply`` is raised as it
                is. The position stays before the transaction of that event.
        """
        with self._lock:
            return self._catch_up(self._generation)

    def follow(self) -> None:
        """Apply events as they come, from a thread of its own, until :meth:`close`."""
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._run, name=f"millstream-projection-{self._projection.name}", daemon=True
            )
            self._thread.start()

    def wait_for(self, position: LogPosition, timeout: Duration = "10 seconds") -> None:
        """Return when the tables have everything below a position, such as that of one's own command.

        If nothing follows the events, they are applied here.

        Raises:
            RetriableError: it took longer than the timeout.
            MillstreamError: the thread that follows has failed.
        """
        until_s = time.monotonic() + to_us(timeout, what="timeout") / 1e6
        while True:
            if self._failure is not None:
                raise MillstreamError(
                    f"projection {self._projection.name!r} has stopped: {self._failure!r}. Correct it, and "
                    "open it again"
                ) from self._failure
            if self._reached(position.partition) >= position.offset:
                return
            if time.monotonic() >= until_s:
                raise RetriableError(
                    f"projection {self._projection.name!r} has not reached offset {position.offset} of "
                    f"partition {position.partition} within {timeout}; wait longer, or call follow()"
                )
            if self._thread is None:
                self.catch_up()
            else:
                time.sleep(LOOK_AGAIN_S)

    def _reached(self, partition: int) -> int:
        """Return the next offset of a partition, if it fits the log: a restored one may be far below it."""
        generation = self._generation
        with self._target.transaction() as cursor:
            start, last = self._positions(cursor, generation).get(partition, (0, ""))
        self._compare(generation, partition, start, last)
        return start

    def positions(self) -> dict[int, int]:
        """Return the next offset of each partition."""
        with self._target.transaction() as cursor:
            found = self._positions(cursor, self._generation)
        return {partition: offset for partition, (offset, _) in found.items()}

    def query(self, statement: str, parameters: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
        """Return the rows of a SELECT on the tables, by their names."""
        with self._target.transaction() as cursor:
            cursor.execute(statement, parameters)
            return [tuple(row) for row in cursor.fetchall()]

    def execute(self, statement: str, parameters: tuple[Any, ...] = ()) -> None:
        """Execute a statement on the live tables, as ``apply`` does, in a transaction of its own.

        Raises:
            FencedError: the projection was rebuilt meanwhile; open it again.
        """
        with self.writing() as tables:
            tables.execute(statement, parameters)

    @contextmanager
    def writing(self) -> Iterator[ProjectionTables]:
        """Yield the live tables in a transaction: until its end nobody else writes, in any process.

        Raises:
            FencedError: the projection was rebuilt meanwhile; open it again.
            RetriableError: somebody else writes, and does not end.
        """
        with self._target.transaction() as cursor:
            yield self._own_tables(cursor)

    def forget(self, subject: str) -> str:
        """Remove what the tables have of a subject whose keys are destroyed; return what was done."""
        where = f"projection {self._projection.name!r} in {self._target.shown}"
        with self._lock:
            if self._projection.forget is not None:
                with self._target.transaction() as cursor:
                    self._projection.forget(subject, self._own_tables(cursor))
                    # A rebuild that was begun has the subject in clear, and nobody tells it.
                    known = self._generations(cursor)
                    self._drop(cursor, {n: one for n, one in known.items() if not one[2]})
                done = "told to forget"
            else:
                self._generation = self._find_generation(rebuild=True, anew=True)
                self._rebuild()
                done = "rebuilt"
            self._target.overwrite_deleted()
        return f"{where}: {done}"

    def close(self) -> None:
        """Stop following, and close the connection. Calling it again does nothing."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        self._target.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                if not self.catch_up():
                    self._stop.wait(LOOK_AGAIN_S)
        except BaseException as error:  # noqa: BLE001 - the next wait_for() raises it
            self._failure = error

    # -- applying -----------------------------------------------------------------------------

    def _catch_up(self, generation: int) -> int:
        applied = 0
        for partition in range(self._store.partitions):
            while True:
                try:
                    count = self._apply_some(generation, partition)
                except _Moved:
                    continue
                applied += count
                if not count:  # a batch may be small because the event after it cannot be read
                    break
        return applied

    def _apply_some(self, generation: int, partition: int) -> int:
        """Apply a batch of events in one transaction; return how many."""
        with self._target.transaction() as cursor:
            start, last = self._positions(cursor, generation).get(partition, (0, ""))
        self._compare(generation, partition, start, last)
        forgets = self._store.events.forgets()
        batch, identity = self._events_from(partition, start)
        if not batch:
            return 0
        with self._target.transaction() as cursor:
            self._check_current(cursor, generation, partition, start)
            if self._store.events.forgets() != forgets:
                raise _Moved  # what was read may have a subject in clear whom the tables have forgotten
            tables = ProjectionTables(cursor, self._table_names(generation))
            for event in batch:
                self._projection.apply(event, tables)
            end = batch[-1].position.offset
            self._execute(
                cursor,
                "INSERT INTO _millstream_positions VALUES (?, ?, ?, ?, ?) "
                "ON CONFLICT (name, generation, partition_number) DO UPDATE SET "
                "next_offset = excluded.next_offset, last_event = excluded.last_event",
                (self._projection.name, generation, partition, end, identity),
            )
        return len(batch)

    def _events_from(self, partition: int, start: int) -> tuple[list[SourcedEvent], str]:
        """Return the next events, at most a batch, and the identity of the last one.

        Those before one that cannot be read, if there are any.

        Raises:
            CorruptionError: the next ones were deleted.
        """
        folding = self._store.reading(partition)
        low, end = folding.log.bounds()
        batch: list[SourcedEvent] = []
        last: RawEvent | None = None
        if start < low:
            raise events_deleted(folding.log, start, low)
        if end <= start:
            return batch, ""
        try:
            for event in islice(folding.log.read(start, end), BATCH_EVENTS):
                batch.append(folding.sourced(event))
                last = event
        except MillstreamError:
            if not batch:
                raise
        return batch, "" if last is None else last.identity

    def _compare(self, generation: int, partition: int, start: int, last: str) -> None:
        """Compare a position with the log, once.

        Raises:
            ConfigError: the log was restored from an older backup.
        """
        if (generation, partition) in self._compared:
            return
        fault = self._fault_of(partition, start, last)
        if fault is not None:
            raise self._ahead(fault)
        self._compared.add((generation, partition))

    def _fault_of(self, partition: int, start: int, last: str) -> str | None:
        """Compare a position with the log; return what is wrong with it, or None."""
        log = self._store.reading(partition).log
        until_s = time.monotonic() + BEHIND_S
        while (bounds := log.bounds())[1] < start:
            if time.monotonic() > until_s:
                return f"the log ends at offset {bounds[1]}"
            time.sleep(LOOK_AGAIN_S)
        if not bounds[0] < start:
            return None
        found = next(log.read(start - 1, start), None)
        there = "nothing" if found is None else found.identity
        return None if there == last else f"the log has {there} before it, and it was {last}"

    def _ahead(self, fault: str) -> ConfigError:
        return ConfigError(
            f"projection {self._projection.name!r} in {self._target.shown} has a position that does not fit: "
            f"{fault}. The log was restored from an older backup, so the tables have events that never happened. "
            "Rebuild it, with project(..., rebuild=True)"
        )

    def _check_current(self, cursor: Any, generation: int, partition: int, start: int) -> None:
        known = self._generations(cursor).get(generation)
        if known is None or known[0] != self._code:
            raise self._fenced()
        if self._positions(cursor, generation).get(partition, (0, ""))[0] != start:
            raise _Moved

    def _fenced(self) -> FencedError:
        return FencedError(
            f"projection {self._projection.name!r} in {self._target.shown} was rebuilt by other code, "
            "or anew; close this one, and open it with the code of today"
        )

    def _own_tables(self, cursor: Any) -> ProjectionTables:
        """Return the tables of this generation.

        Raises:
            FencedError: the projection was rebuilt meanwhile.
        """
        if self._generation not in self._generations(cursor):
            raise self._fenced()
        return ProjectionTables(cursor, self._table_names(self._generation))

    # -- generations --------------------------------------------------------------------------

    def _find_generation(self, *, rebuild: bool, anew: bool = False) -> int:
        """Return the generation to continue, or the one to rebuild; make the first one.

        Args:
            anew: Do not continue a rebuild that was begun: it may have what was forgotten since.
        """
        with self._target.transaction() as cursor:
            for statement in _TABLES:
                cursor.execute(statement)
            known = self._generations(cursor)
            live = next((number for number, (_, _, is_live) in known.items() if is_live), None)
            if live is None:
                self._drop(cursor, known)
                self._make(cursor, 1, live=True)
                return 1
            if not rebuild:
                if known[live][0] != self._code:
                    raise ConfigError(
                        f"projection {self._projection.name!r} in {self._target.shown} was filled by other code "
                        "or from another topic than today's: mixed, it would be wrong. Rebuild it, with "
                        "project(..., rebuild=True); what is there stays readable meanwhile"
                    )
                return live
            building = {number: one for number, one in known.items() if number != live}
            same = [
                number
                for number, one in building.items()
                if one[0] == self._code and not anew and self._fits(cursor, number)
            ]
            self._drop(cursor, {n: one for n, one in building.items() if n not in same})
            if same:
                return same[0]
            self._make(cursor, max(known) + 1, live=False)
            return max(known) + 1

    def _fits(self, cursor: Any, generation: int) -> bool:
        positions = self._positions(cursor, generation)
        return all(self._fault_of(one, *place) is None for one, place in positions.items())

    def _rebuild(self) -> None:
        """Fill the new generation, and make it live: steps 2 and 3 of the module."""
        self._catch_up(self._generation)
        with self._target.transaction() as cursor:
            known = self._generations(cursor)
            if self._generation not in known:
                raise FencedError(
                    f"projection {self._projection.name!r} is being rebuilt by another process, with other "
                    "code; close this one"
                )
            if known[self._generation][2]:
                return
            for name in self._projection.tables:
                cursor.execute(f'DROP VIEW IF EXISTS "{name}"')
            self._drop(cursor, {n: one for n, one in known.items() if n != self._generation})
            self._execute(
                cursor,
                "UPDATE _millstream_projections SET live = 1 WHERE name = ? AND generation = ?",
                (self._projection.name, self._generation),
            )
            self._show(cursor, self._generation)

    def _make(self, cursor: Any, generation: int, *, live: bool) -> None:
        names = self._table_names(generation)
        for name, columns in self._projection.tables.items():
            cursor.execute(f'CREATE TABLE "{names[name]}" ({columns})')
        self._execute(
            cursor,
            "INSERT INTO _millstream_projections VALUES (?, ?, ?, ?, ?)",
            (self._projection.name, generation, self._code, " ".join(names), int(live)),
        )
        if live:
            self._show(cursor, generation)

    def _show(self, cursor: Any, generation: int) -> None:
        for name, real in self._table_names(generation).items():
            try:
                cursor.execute(f'CREATE VIEW "{name}" AS SELECT * FROM "{real}"')  # noqa: S608 - checked names
            except Exception as error:
                raise ConfigError(
                    f"table {name!r} of projection {self._projection.name!r} cannot have this name in "
                    f"{self._target.shown}: {error}. Another projection, or a table, has it; take another name, or "
                    "another database"
                ) from error

    def _drop(self, cursor: Any, generations: Mapping[int, tuple[str, str, bool]]) -> None:
        for generation, (_, tables, is_live) in generations.items():
            for name in tables.split():
                if is_live:
                    cursor.execute(f'DROP VIEW IF EXISTS "{name}"')
                cursor.execute(f'DROP TABLE IF EXISTS "{self._table_name(name, generation)}"')
            for table in ("_millstream_projections", "_millstream_positions"):
                statement = f"DELETE FROM {table} WHERE name = ? AND generation = ?"  # noqa: S608
                self._execute(cursor, statement, (self._projection.name, generation))

    def _generations(self, cursor: Any) -> dict[int, tuple[str, str, bool]]:
        """Return (code, tables, whether it is live) of each generation."""
        statement = (
            "SELECT generation, code, tables, live FROM _millstream_projections WHERE name = ?"
        )
        self._execute(cursor, statement, (self._projection.name,))
        return {row[0]: (row[1], row[2], bool(row[3])) for row in cursor.fetchall()}

    def _positions(self, cursor: Any, generation: int) -> dict[int, tuple[int, str]]:
        """Return of each partition the next offset, and the event before it."""
        statement = (
            "SELECT partition_number, next_offset, last_event FROM _millstream_positions "
            "WHERE name = ? AND generation = ?"
        )
        self._execute(cursor, statement, (self._projection.name, generation))
        return {row[0]: (row[1], row[2]) for row in cursor.fetchall()}

    def _table_name(self, name: str, generation: int) -> str:
        """Return the real name of a table: no two are equal, and none is longer than PostgreSQL allows."""
        both = f"{self._projection.name}__{name}"
        if both.count("__") > 1 or "___" in both or len(both) > _REAL_NAME_MAX:
            both = f"{both[:20]}_{digest(f'{self._projection.name}/{name}')[:12]}"
            return f"{both}_{generation}"
        return f"{both}__{generation}"

    def _table_names(self, generation: int) -> dict[str, str]:
        return {name: self._table_name(name, generation) for name in self._projection.tables}

    def _execute(self, cursor: Any, statement: str, parameters: tuple[Any, ...]) -> None:
        cursor.execute(self._target.sql(statement), parameters)
