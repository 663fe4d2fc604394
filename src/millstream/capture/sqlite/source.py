"""SQLite as a source: units of a snapshot and of the changes that triggers write down, in one order.

All that is given at a time is read in one read transaction: the changes since the last time, which are whole
transactions of the writers, then a chunk of the snapshot. So each row of the chunk is newer than every change given
before it, and older than every one after it. SQLite does not say where one transaction ends and the next begins:
those that were committed between two looks are one unit.

=====================================  ==================================================================
stopped after                          the next run
=====================================  ==================================================================
triggers and their mark were written   reads on from the place before, and comes to the mark
a unit was given, and not stored       reads the changes from the place before it; a chunk again, newer
a unit was stored                      goes on after it; its changes are deleted then
=====================================  ==================================================================
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from copy import deepcopy
from pathlib import Path
from typing import Any

from millstream.capture.lag import SourceLag
from millstream.capture.signals import RereadRequest, condition
from millstream.capture.sqlite.cells import row_block
from millstream.capture.sqlite.change_table import (
    MARK,
    ChangeMark,
    add_mark,
    changes_between,
    check_mark,
    create_change_table,
    delete_before,
    has_triggers,
    install_triggers,
    installed_triggers,
    last_change,
    remove_capture,
    remove_triggers,
    take_over,
)
from millstream.capture.sqlite.encoding import decoded, encoded, json_value, quote_identifier
from millstream.capture.sqlite.table_info import SqliteTable, read_tables, refuse_faults
from millstream.capture.table_patterns import TablePatterns
from millstream.capture.units import (
    CaptureUnit,
    Progress,
    TableChange,
    TableDefinition,
    UnitContent,
)
from millstream.errors import (
    ConfigError,
    ConflictError,
    CorruptionError,
    MillstreamError,
    RetriableError,
)

DATABASE = "main"
_BUSY_S = 5.0
_KEPT_CHANGES = 10_000  # that are stored, and deleted even while writers are at work
_OLDEST = (3, 37)
_RUN_ROWS_MAX = 2000


class SqliteSource:
    """Reads the tables of a SQLite database and their changes, whichever program makes them.

    Args:
        path: The database file.
        tables: Patterns of names, with ``*`` and ``?``.
        chunk_rows: How many rows of a snapshot are read, and held in memory, at a time.
        poll_s: How often it is looked for changes; while there are none, a look is one PRAGMA.
        heartbeat_s: After how many seconds without a change progress is given alone.

    Guarantees: for one thread. What is written to the database: docs/capture-sqlite.md.
    """

    def __init__(
        self,
        path: Path | str,
        tables: Sequence[str],
        *,
        chunk_rows: int = 10_000,
        poll_s: float = 0.02,
        heartbeat_s: float = 1.0,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if chunk_rows < 1:
            raise ConfigError(f"chunk_rows is {chunk_rows}. Give 1 or more.")
        if sqlite3.sqlite_version_info < _OLDEST:
            raise ConfigError(
                f"Python has SQLite {sqlite3.sqlite_version}; capture needs 3.37 or later. Use a newer Python."
            )
        self._path = Path(path)
        self._patterns = TablePatterns(tables, DATABASE)
        self._chunk_rows = chunk_rows
        self._poll_s = poll_s
        self._heartbeat_s = heartbeat_s
        self._sleep = sleep
        self._clock = clock
        self._stored = self._deleted = 0
        self._rereads: deque[RereadRequest] = deque()

    def _wanted(self, table: str) -> bool:
        return self._patterns(DATABASE, table)

    def check(self) -> list[tuple[str, str]]:
        """Return the tables that are captured, if the database can be; nothing is written.

        Raises:
            ConfigError: it cannot; the message has each reason, and what mends it.
            RetriableError: it is locked.
        """
        with self._opened() as connection:
            tables = read_tables(connection, self._wanted)
            refuse_faults(connection, tables)
        if not tables:
            raise ConfigError(
                f"no table of {str(self._path)!r} is among those to be captured, {self._patterns}. Name tables that "
                "are there, with * and ?."
            )
        return [(DATABASE, name) for name in tables]

    def remove(self) -> list[str]:
        """Take the triggers and tables of capture out of the database; return their names.

        A capture that still runs, of whichever name, ends with that.

        Raises:
            RetriableError: it is locked by a writer.
        """
        with self._opened() as connection, _write(connection):
            return remove_capture(connection)

    def check_reread(self, request: RereadRequest) -> None:
        """Return if a table can be read again, and its condition be asked.

        Raises:
            ConfigError: it cannot.
        """
        name = f"{request.database}.{request.table}"
        with self._opened() as connection:
            known = read_tables(connection, self._wanted)
            if request.database != DATABASE or request.table not in known:
                raise ConfigError(
                    f"the table {name} is not captured, so it cannot be read again. Name one that --tables has."
                )
            if not request.where:
                return
            table = quote_identifier(request.table)
            try:
                connection.execute(f"SELECT 1 FROM {table} WHERE ({request.where}) LIMIT 0")  # noqa: S608 - the operator's own
            except (sqlite3.Error, sqlite3.Warning) as error:
                raise ConfigError(
                    f"the condition {request.where!r} cannot be asked of {name}: {error}. Give an expression of SQLite's "
                    "over its columns."
                ) from None

    def reread(self, request: RereadRequest) -> None:
        """Have a table read again, in chunks among its changes."""
        self._rereads.append(request)

    def measure(self, progress: Progress) -> SourceLag:
        """Measure about how many rows the tables have that are not read to their end: by their largest rowids."""
        unread = [name for name, table in progress["tables"].items() if "read" not in table]
        if not unread:
            return SourceLag()
        with self._opened() as connection:
            there = read_tables(connection, lambda name: name in unread)
            largest = [
                connection.execute(
                    f"SELECT max({table.rowid}) FROM {quote_identifier(table.name)}"  # noqa: S608 - quoted
                ).fetchone()[0]
                for table in there.values()
                if table.rowid is not None
            ]
        return SourceLag(rows_expected=sum(filter(None, largest)))

    def release(self, progress: Progress) -> None:
        """Do nothing: the changes that are kept are in the database's own file."""

    def acknowledge(self, progress: Progress) -> None:
        """Note that all up to ``progress`` is stored for good: its changes may be deleted."""
        self._stored = max(self._stored, int(progress["seq"]))

    def units(self, progress: Progress | None) -> Iterator[CaptureUnit]:
        """Yield units from ``progress`` on, for ever; those without contents while nothing happens.

        Each unit's contents are to be read to their end before the next unit is asked for. None starts with a
        snapshot, and ends an older capture of this database.

        Raises:
            RetriableError: the database is locked: call again, with the last stored progress.
            ConflictError: the database is not the one that was captured, or has gone back to a backup.
            ConfigError: a table cannot be captured.
        """
        with self._opened() as connection:
            if progress is not None:
                mark = ChangeMark(progress["seq"], progress["nonce"])
                check_mark(connection, progress["id"], mark)
            tables = read_tables(connection, self._wanted)
            refuse_faults(connection, tables)
            state = _begin(connection, tables) if progress is None else deepcopy(progress)
            self._deleted = 0
            self._stored = int(state["seq"])
            yield from self._run(connection, state)

    def _run(self, connection: sqlite3.Connection, state: dict[str, Any]) -> Iterator[CaptureUnit]:
        seen, spoke = -1, self._clock()
        reader = _Reader(connection, state, self._chunk_rows)
        while True:
            self._check_file()
            if self._stored - self._deleted >= _KEPT_CHANGES:
                self._trim(connection)
            if self._rereads:
                yield from reader.again(self._rereads.popleft())
            (version,) = connection.execute("PRAGMA data_version").fetchone()
            if version != seen or reader.pending() is not None:
                seen = version
                self._follow_schema(connection, reader)
                for unit in reader.read():
                    spoke = self._clock()
                    yield unit
                continue
            self._trim(connection)
            if self._clock() - spoke >= self._heartbeat_s:
                spoke = self._clock()
                yield CaptureUnit("progress", "", 0, iter(()), reader.progress())
            self._sleep(self._poll_s)

    @contextmanager
    def _opened(self) -> Iterator[sqlite3.Connection]:
        shown = str(self._path)
        try:
            uri = self._path.resolve().as_uri() + "?mode=rw"
            with closing(
                sqlite3.connect(uri, uri=True, timeout=_BUSY_S, isolation_level=None)
            ) as connection:
                self._file = self._path.stat().st_ino
                yield connection
        except MillstreamError:
            raise
        except FileNotFoundError:
            raise ConfigError(f"there is no database {shown!r}. Correct the path.") from None
        except sqlite3.Error as error:
            raise _translated(error, shown) from error

    def _check_file(self) -> None:
        """Return if the path still leads to the file that is open."""
        found = self._path.stat().st_ino
        if found != self._file:
            raise ConflictError(
                f"another file has taken the place of {str(self._path)!r}. Capture it into a new prefix, from a "
                "new snapshot; or start again, if it is a copy that was made after the capture's last change."
            )

    def _follow_schema(self, connection: sqlite3.Connection, reader: _Reader) -> None:
        """Have triggers write what the tables are now, if they were altered, made or dropped."""
        tables = read_tables(connection, self._wanted)
        altered = reader.altered(tables)
        if not altered and _all_have_triggers(connection, tables):
            return
        refuse_faults(connection, tables)
        with _write(connection):
            _install(connection, tables, altered=altered)

    def _trim(self, connection: sqlite3.Connection) -> None:
        """Delete the changes that are stored; another time, if a writer is at work."""
        if self._stored > self._deleted:
            with suppress(sqlite3.OperationalError), _write(connection):
                delete_before(connection, self._stored)
                self._deleted = self._stored


def _translated(error: sqlite3.Error, shown: str) -> MillstreamError:
    name = getattr(error, "sqlite_errorname", "")
    if name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
        return RetriableError(
            f"the database {shown!r} is locked by a writer for more than {_BUSY_S:.0f} s. It is tried again."
        )
    if name.startswith("SQLITE_CORRUPT"):
        return CorruptionError(f"the database {shown!r} is damaged: {error}. Restore it.")
    if name.startswith("SQLITE_FULL"):
        return RetriableError(f"the disk of {shown!r} is full. Make room; it is tried again.")
    return ConfigError(
        f"the database {shown!r} cannot be captured: {error}. Give the path of a SQLite database that this user may "
        "read and write."
    )


@contextmanager
def _write(connection: sqlite3.Connection) -> Iterator[None]:
    """Run a block in a transaction that may write from its beginning on."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
    except BaseException:
        connection.execute("ROLLBACK")
        raise
    connection.execute("COMMIT")


def _begin(connection: sqlite3.Connection, tables: dict[str, SqliteTable]) -> dict[str, Any]:
    """Begin a capture: from here on, triggers write. A crash after it leaves triggers whose changes nobody reads."""
    with _write(connection):
        create_change_table(connection)
        identity = take_over(connection)
        start = add_mark(connection, json.dumps({"defined": {}, "dropped": []}))
        _install(connection, tables, altered=set(tables))
    return {"id": identity, "seq": start.seq, "nonce": start.nonce, "tables": {}}


def _install(
    connection: sqlite3.Connection, tables: dict[str, SqliteTable], altered: set[str]
) -> None:
    """Make the triggers of tables that were altered, or do not have them, and a mark that says so.

    All is done in the caller's transaction, and no writer is between the triggers and the mark.
    """
    installed = installed_triggers(connection)
    defined = {
        table.name: {"columns": [list(column) for column in table.columns], "key": list(table.key)}
        for table in tables.values()
        if table.name in altered or not has_triggers(connection, installed, table)
    }
    for name in defined:
        install_triggers(connection, tables[name])
    for owner in {owner for owner, _ in installed.values()} - set(tables):
        remove_triggers(connection, owner)
    dropped = sorted(altered - set(tables))
    add_mark(connection, json.dumps({"defined": defined, "dropped": dropped}))


def _all_have_triggers(connection: sqlite3.Connection, tables: dict[str, SqliteTable]) -> bool:
    installed = installed_triggers(connection)
    owners = {owner for owner, _ in installed.values()}
    return owners <= set(tables) and all(
        has_triggers(connection, installed, table) for table in tables.values()
    )


class _Reader:
    """What has been read, and what is read next."""

    def __init__(
        self, connection: sqlite3.Connection, state: dict[str, Any], chunk_rows: int
    ) -> None:
        self._connection = connection
        self._state = state
        self._chunk_rows = chunk_rows

    def progress(self) -> Progress:
        return deepcopy(self._state)

    def again(self, request: RereadRequest) -> Iterator[CaptureUnit]:
        """Have a table read again: all of it, after it was emptied, or the rows for which a condition is true."""
        if request.next_offset < self._state.get("signals", 0):
            return
        self._state["signals"] = max(self._state.get("signals", 0), request.begun)
        known = self._state["tables"].get(request.table)
        contents: list[UnitContent] = []
        if known is not None and not request.where:
            contents.append(TableChange(DATABASE, request.table, "t", ()))
        if known is not None:
            where = request.where
            if where:
                where = condition("read" not in known, known.get("where", ""), where)
            asked = {"where": where} if where else {}
            kept = {"columns": known["columns"], "key": known["key"]}
            self._state["tables"][request.table] = {**kept, **asked, "after": None}
        position = f"{self._state['seq']}/{request.table}/again {request.next_offset}"
        yield CaptureUnit("snapshot", position, 0, iter(contents), self.progress())

    def pending(self) -> str | None:
        """Return a table that is to be read; None if all are."""
        tables = self._state["tables"]
        return next((name for name, table in tables.items() if "read" not in table), None)

    def altered(self, tables: dict[str, SqliteTable]) -> set[str]:
        """Return the tables that are other than they were defined, or gone."""
        known = {name: self._table(name) for name in self._state["tables"]}
        return {
            name
            for name, table in known.items()
            if name not in tables
            or (tables[name].columns, tables[name].key) != (table.columns, table.key)
        }

    def read(self) -> Iterator[CaptureUnit]:
        """Yield the changes since the last time, and a chunk of a table."""
        self._connection.execute("BEGIN")
        try:
            before = ChangeMark(self._state["seq"], self._state["nonce"])
            check_mark(self._connection, self._state["id"], before)
            last = last_change(self._connection)
            if last.seq > before.seq:
                yield from self._changes(before.seq, last)
            pending = self.pending()
            if pending is not None:
                yield from self._chunk(pending)
        finally:
            self._connection.execute("ROLLBACK")

    def _changes(self, after: int, last: ChangeMark) -> Iterator[CaptureUnit]:
        rows = self._contents(changes_between(self._connection, after, last.seq))
        first = next(rows, None)
        self._state |= {"seq": last.seq, "nonce": last.nonce}
        if first is None:
            return
        when, content = first
        unit = CaptureUnit("transaction", str(last.seq), when, iter(()))
        unit.contents = self._finished(unit, content, rows)
        yield unit

    def _finished(
        self, unit: CaptureUnit, first: UnitContent, others: Iterator[tuple[int, UnitContent]]
    ) -> Iterator[UnitContent]:
        yield first
        for when, content in others:
            unit.timestamp_ms = when
            yield content
        unit.progress = self.progress()

    def _contents(self, rows: sqlite3.Cursor) -> Iterator[tuple[int, UnitContent]]:
        for (name, op, when), run in _runs(rows):
            if op == MARK:
                for _, after in run:
                    for content in self._marked(json.loads(after)):
                        yield when, content
                continue
            old, new = zip(*run, strict=True)
            block = row_block(
                DATABASE,
                self._table(name),
                op,
                old if op == "d" else new,
                old if op == "u" else None,
            )
            if block is not None:
                yield when, block
                continue
            for before, after in run:
                yield when, self._change(name, op, before, after)

    def _marked(self, mark: dict[str, Any]) -> Iterator[UnitContent]:
        """Yield what a mark says of tables: those that it defines are read again."""
        tables = self._state["tables"]
        for name in mark["dropped"]:
            if tables.pop(name, None) is not None:
                yield TableChange(DATABASE, name, "t", ())
                yield TableDefinition(DATABASE, name, (), (), dropped=True)
        for name, defined in mark["defined"].items():
            if name in tables:
                yield TableChange(DATABASE, name, "t", ())
            tables[name] = {**defined, "after": None}
            columns = tuple({"name": column, "type": kind} for column, kind in defined["columns"])
            yield TableDefinition(DATABASE, name, columns, tuple(defined["key"]))

    def _change(self, name: str, op: Any, before: str | None, after: str | None) -> TableChange:
        table = self._table(name)
        return TableChange(
            DATABASE,
            name,
            op,
            table.key,
            None if before is None else _row(table, before),
            None if after is None else _row(table, after),
        )

    def _table(self, name: str) -> SqliteTable:
        found = self._state["tables"].get(name)
        if found is None:
            raise CorruptionError(
                f"the database has a captured change of {name!r}, which no trigger of capture is for. Take a new "
                "snapshot, into a new prefix."
            )
        columns = tuple((column, kind) for column, kind in found["columns"])
        return SqliteTable(name, columns, tuple(found["key"]), ())

    def _chunk(self, name: str) -> Iterator[CaptureUnit]:
        table, state = self._table(name), self._state["tables"][name]
        now = read_tables(self._connection, lambda other: other == name).get(name)
        if now is None or (now.columns, now.key) != (table.columns, table.key):
            return  # it was altered: the triggers are made anew first
        rows = self._rows(table, state["after"], state.get("where", ""))
        last = rows[-1][0] if len(rows) == self._chunk_rows else None
        block = row_block(DATABASE, table, "r", [row for _, row in rows])
        contents: list[UnitContent] = [block] if block is not None else []
        if block is None:
            contents += [self._change(name, "r", None, row) for _, row in rows]
        del state["after"]
        if last is None:
            state.pop("where", None)
        state |= {"read": True} if last is None else {"after": last}
        position = f"{self._state['seq']}/{name}/{last or 'end'}"
        yield CaptureUnit("snapshot", position, 0, iter(contents), self.progress())

    def _rows(self, table: SqliteTable, after: str | None, where: str) -> list[tuple[str, str]]:
        """Return the next rows, as (key, row), in the order of the key."""
        name, key = quote_identifier(table.name), [quote_identifier(column) for column in table.key]
        selected = f"{encoded(table.key, name)}, {encoded(table.column_names, name)}"
        conditions, values = [f"({where})"] if where else [], list[Any]()
        if after is not None:
            conditions.append(f"({', '.join(key)}) > ({', '.join('?' * len(key))})")
            values = list(decoded(after, table.name))
        where = f"WHERE {' AND '.join(conditions)}" if conditions else ""
        return self._connection.execute(
            f"SELECT {selected} FROM {name} {where} ORDER BY {', '.join(key)} LIMIT ?",  # noqa: S608 - quoted
            (*values, self._chunk_rows),
        ).fetchall()


_Run = list[tuple[Any, Any]]


def _runs(rows: Iterable[tuple[Any, ...]]) -> Iterator[tuple[tuple[str, Any, int], _Run]]:
    """Yield (before, after) of changes that follow each other and are alike: in table, operation and time."""
    run: _Run = []
    alike: tuple[str, Any, int] | None = None
    for _, name, op, when, before, after in rows:
        if alike is not None and (alike != (name, op, when) or len(run) == _RUN_ROWS_MAX):
            yield alike, run
            run = []
        alike = (name, op, when)
        run.append((before, after))
    if alike is not None:
        yield alike, run


def _row(table: SqliteTable, text: str) -> dict[str, Any]:
    values = decoded(text, table.name)
    if len(values) != len(table.columns):
        raise CorruptionError(
            f"a captured row of {table.name} has {len(values)} values, and the table {len(table.columns)} columns. Take "
            "a new snapshot, into a new prefix."
        )
    row = {
        name: json_value(value, is_blob=table.is_blob(name))
        for name, value in zip(table.column_names, values, strict=True)
    }
    if any(row[name] is None for name in table.key):
        raise ConfigError(
            f"a row of {table.name} has NULL in the primary key: it cannot be told apart. Give it a key, declare the "
            "columns NOT NULL, and capture into a new prefix."
        )
    return row
