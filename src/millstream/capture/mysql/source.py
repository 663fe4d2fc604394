"""MariaDB or MySQL as a source: units of a snapshot and of the binary log, in one order.

A chunk of the snapshot is read at a place P in the binary log, and given after all transactions up to P and before
those after P. So each row of the chunk is newer than every change given before it, and older than every one after
it: nothing has to be compared or dropped, and each chunk can be read again after a crash. A table that is
added later, or whose rows a statement changed without logging them, is read in the same way, among the changes.

=====================================  ==================================================================
stopped after                          the next run
=====================================  ==================================================================
a unit was stored, with its progress   goes on after it
a unit was given, and not stored       reads the log from the place before it; a chunk again, newer
a transaction was given in part        reads it from its beginning
=====================================  ==================================================================
"""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

from millstream.capture.lag import SourceLag
from millstream.capture.mysql.address import MariaDbAddress
from millstream.capture.mysql.cells import row_blocks, row_runs
from millstream.capture.mysql.column_defaults import ColumnDefaults
from millstream.capture.mysql.decoder import BinlogDecoder, RowsEvent, Statement
from millstream.capture.mysql.expiry import binlog_lag
from millstream.capture.mysql.preflight import (
    PreflightFault,
    refuse_faults,
    server_faults,
    table_faults,
    table_names,
)
from millstream.capture.mysql.row_images import RowImage
from millstream.capture.mysql.session import (
    HEARTBEAT_S,
    BinlogStream,
    MariaDbSession,
    TableAlteredError,
    TableInUseError,
)
from millstream.capture.mysql.snapshot import (
    BinlogPosition,
    SnapshotChunk,
    current_position,
    prepared_transactions,
    read_chunk,
    refuse_prepared,
)
from millstream.capture.mysql.statements import TableEffect, table_effects
from millstream.capture.mysql.table_map import TableMap
from millstream.capture.mysql.table_schema import read_schema
from millstream.capture.mysql.table_tracker import TableTracker, definition_columns
from millstream.capture.mysql.transactions import BinlogTransaction, TransactionReader
from millstream.capture.signals import RereadRequest
from millstream.capture.table_patterns import TablePatterns
from millstream.capture.units import (
    CaptureUnit,
    Progress,
    TableChange,
    TableDefinition,
    UnitContent,
)
from millstream.errors import ConfigError, ConflictError, MillstreamError

CHUNK_ROWS = 10_000
_OF_THE_SERVER = frozenset(("mysql", "information_schema", "performance_schema", "sys"))
_QUIET_TRANSACTIONS = (
    1000  # without a captured table, after which the place in the log is given alone
)
LOCK_PAUSE_S = 10.0  # of MySQL: writers of a table wait for a second, and not again before this
_NO_LETTER = "\ufffd"  # in a name of a statement whose character set cannot be read
_ATTEMPTS = 20  # to read a chunk of a table that is altered meanwhile, or a table to its end


class MariaDbSource:
    """Reads the tables of a server of MariaDB or MySQL, and their changes.

    Args:
        tables: Patterns: ``database.table`` or ``table``, with ``*`` and ``?``.
        replica_id: The number that this reader has among the server's replicas, unlike any other's.
        heartbeat_s: After how many seconds without a change progress is given alone.
        chunk_rows: How many rows of a snapshot are read, and held in memory, at a time.

    Guarantees: for one thread. Nothing is written to the server, and no lock is held on it, but that an ALTER waits
    while a chunk of its table is read; MySQL's writers of the table wait for the moment in which that begins.
    """

    def __init__(
        self,
        address: MariaDbAddress,
        tables: Sequence[str],
        *,
        replica_id: int,
        chunk_rows: int = CHUNK_ROWS,
        heartbeat_s: float = HEARTBEAT_S,
    ) -> None:
        if chunk_rows < 1:
            raise ConfigError(f"chunk_rows is {chunk_rows}. Give 1 or more.")
        self._address = address
        self._wanted = TablePatterns(tables, address.database, _OF_THE_SERVER)
        self._replica_id = replica_id
        self._chunk_rows = chunk_rows
        self._heartbeat_s = heartbeat_s
        self._rereads: deque[RereadRequest] = deque()

    def check(self) -> list[tuple[str, str]]:
        """Return the tables that are captured, if the server can be.

        Raises:
            ConfigError: it cannot; the message has each reason, and the statement that mends it.
            RetriableError: it does not respond.
        """
        with MariaDbSession(self._address) as session:
            names = self._check(session)
            if not names:
                raise ConfigError(
                    f"no table of {self._address.shown} is among those to be captured, {self._wanted}. Name tables "
                    "that are there and may be read: table or database.table, with * and ?."
                )
        return names

    def _check(self, session: MariaDbSession) -> list[tuple[str, str]]:
        refuse_faults(server_faults(session), self._address.shown)
        names = table_names(session, self._wanted)
        faults = [fault for name in names for fault in table_faults(session, *name)]
        refuse_faults(faults, self._address.shown)
        return names

    def acknowledge(self, progress: Progress) -> None:
        """Do nothing: the server keeps its binary log for as long as it is configured to, whoever has read it."""

    def measure(self, progress: Progress) -> SourceLag:
        """Measure how much of the binary log is not in ours yet, and whether the server may purge it."""
        with MariaDbSession(self._address) as session:
            return binlog_lag(session, progress)

    def check_reread(self, request: RereadRequest) -> None:
        """Return if a table can be read again, and its condition be asked.

        Raises:
            ConfigError: it cannot.
        """
        name = f"{request.database}.{request.table}"
        with MariaDbSession(self._address) as session:
            if (request.database, request.table) not in table_names(session, self._wanted):
                raise ConfigError(
                    f"the table {name} is not captured, so it cannot be read again. Name one that --tables has."
                )
            if not request.where:
                return
            quoted = read_schema(session, request.database, request.table).quoted
            try:
                session.rows(f"SELECT 1 FROM {quoted} WHERE ({request.where}) LIMIT 0")  # noqa: S608 - the operator's own
            except MillstreamError as error:
                raise ConfigError(
                    f"the condition {request.where!r} cannot be asked of {name}: {error} Give an expression of MariaDB's over "
                    "its columns."
                ) from None

    def reread(self, request: RereadRequest) -> None:
        """Have a table read again, in chunks among its changes."""
        self._rereads.append(request)

    def release(self, progress: Progress) -> None:
        """Do nothing: the server keeps nothing for a capture."""

    def remove(self) -> list[str]:
        """Return nothing: a capture installs nothing in the server."""
        return []

    def units(self, progress: Progress | None) -> Iterator[CaptureUnit]:
        """Yield units from ``progress`` on, for ever; those without contents while nothing happens.

        Each unit's contents are to be read to their end before the next unit is asked for. None starts with a
        snapshot.

        Raises:
            RetriableError: the server is gone, or does not respond: call again, with the last stored progress.
            ConflictError: the server no longer has the changes after ``progress``.
            ConfigError: a change cannot be captured, or the preflight found a fault.
        """
        with MariaDbSession(self._address) as session:
            # The place first: a table that is created after the list was made is in the log after it.
            position, created, tracker = self._resume(session, progress)
            server = _identity(session)
            _refuse_other(progress, server, self._address.shown)
            tracker.add(self._check(session))
            charsets = _charsets(session)
            with BinlogStream(
                self._address,
                position.file,
                position.position,
                replica_id=self._replica_id,
                heartbeat_s=self._heartbeat_s,
            ) as stream:
                decoder = BinlogDecoder(charsets, self._wanted, checksum=stream.checksum)
                reader = TransactionReader(decoder, stream.event, position, created)
                reader.open()
                run = _Run(
                    session, reader, tracker, self._wanted, self._chunk_rows, rereads=self._rereads
                )
                run.server = server
                run.signals = 0 if progress is None else progress.get("signals", 0)
                yield from run.units()

    def _resume(
        self, session: MariaDbSession, progress: Progress | None
    ) -> tuple[BinlogPosition, int, TableTracker]:
        if progress is None:
            return current_position(session), 0, TableTracker(session, {})
        position = BinlogPosition.of(progress["file"], progress["position"])
        return position, progress["created"], TableTracker(session, progress["tables"])


def _identity(session: MariaDbSession) -> str:
    """Return what MySQL tells a server by; MariaDB has no such."""
    return str(session.value("SELECT @@global.server_uuid")) if session.is_mysql else ""


def _refuse_other(progress: Progress | None, server: str, shown: str) -> None:
    """Return if places are those of this server.

    Raises:
        ConflictError: they are of another one.
    """
    before = (progress or {}).get("server", server)
    if before != server:
        raise ConflictError(
            f"{shown} is the server {server}, and capture read {before}: a replica that took over, a restored backup, or "
            "another server. Places in the binary log of one mean nothing on another, and changes may be missing: capture into "
            "a new prefix, from a new snapshot."
        )


def _charsets(session: MariaDbSession) -> dict[int, str]:
    """Return the character set of each collation, by its number."""
    table = "COLLATION_CHARACTER_SET_APPLICABILITY"
    has_numbers = session.value(
        "SELECT COUNT(*) FROM information_schema.COLUMNS WHERE TABLE_SCHEMA = 'information_schema' "
        "AND TABLE_NAME = %s AND COLUMN_NAME = 'ID'",
        (table,),
    )
    source = table if has_numbers != "0" else "COLLATIONS"  # before 10.10
    rows = session.rows(
        f"SELECT ID, CHARACTER_SET_NAME FROM information_schema.{source} WHERE ID IS NOT NULL"  # noqa: S608 - names of above
    )
    return {int(number): charset for number, charset in rows}


class _Run:
    """One connection's units."""

    def __init__(
        self,
        session: MariaDbSession,
        reader: TransactionReader,
        tracker: TableTracker,
        wanted: TablePatterns,
        chunk_rows: int,
        *,
        rereads: deque[RereadRequest],
    ) -> None:
        self.signals = 0
        self.server = ""
        self._rereads = rereads
        self._locked_until_s = 0.0  # of the clock, before which no table is tried to be locked
        self._session = session
        self._reader = reader
        self._tracker = tracker
        self._wanted = wanted
        self._chunk_rows = chunk_rows
        self._attempts = 0
        self._quiet = 0
        self._defaults = ColumnDefaults(session)
        self._begun_again = False  # a table, by a change that says too little
        self._times_begun = 0
        self._prepared: set[tuple[Any, ...]] = set()

    def units(self) -> Iterator[CaptureUnit]:
        left_out = [name for name in self._tracker.names() if not self._wanted(*name)]
        if left_out:
            yield self._left_out(left_out)
        self._defaults.learn(*self._tracker.names())
        self._prepared = prepared_transactions(
            self._session
        )  # of others the log is read from here on
        while True:
            while self._rereads:
                yield from self._again(self._rereads.popleft())
            pending = self._tracker.pending()
            if pending is None or not self._has_to_read():
                yield from self._transactions(None)
            else:
                yield from self._chunk(*pending)

    def _has_to_read(self) -> bool:
        """Say whether a table is to be read now."""
        waits = self._tracker.pending() is None or time.monotonic() < self._locked_until_s
        return bool(self._rereads) or not waits

    def _left_out(self, names: list[tuple[str, str]]) -> CaptureUnit:
        """Return the end of tables that the patterns do not name any more: their changes are missed from here on."""
        contents: list[UnitContent] = []
        for name in names:
            self._tracker.drop(*name)
            contents += [
                TableChange(*name, "t", ()),
                TableDefinition(*name, (), (), dropped=True),
            ]
        position = f"{self._reader.position}/left out+{secrets.token_hex(4)}"
        return CaptureUnit("snapshot", position, 0, iter(contents), self._progress())

    def _again(self, request: RereadRequest) -> Iterator[CaptureUnit]:
        """Have a table read again: all of it, after it was emptied, or the rows for which a condition is true."""
        name = (request.database, request.table)
        if request.next_offset < self.signals:
            return
        self.signals = max(self.signals, request.begun)
        contents: list[UnitContent] = []
        if name in self._tracker.names():
            contents += [] if request.where else [TableChange(*name, "t", ())]
            self._tracker.restart(*name, where=request.where)
        position = f"{self._reader.position}/again+{secrets.token_hex(4)}"
        yield CaptureUnit("snapshot", position, 0, iter(contents), self._progress())

    def _chunk(self, database: str, table: str) -> Iterator[CaptureUnit]:
        """Yield the transactions before the next chunk of a table, and the chunk."""
        state = self._tracker.state(database, table)
        try:
            refuse_prepared(self._session, self._prepared)
            chunk = read_chunk(
                self._session,
                database,
                table,
                state.get("after"),
                self._chunk_rows,
                where=state.get("where", ""),
            )
        except TableAlteredError as error:
            self._attempts += 1
            if self._attempts > _ATTEMPTS:
                raise
            if isinstance(error, TableInUseError):
                self._locked_until_s = time.monotonic() + LOCK_PAUSE_S
                return
            # The log has what was done to the table.
            yield from self._transactions(current_position(self._session))
            return
        self._attempts = 0
        self._begun_again = False
        yield from self._transactions(chunk.position)
        if self._tracker.state(database, table) is not state:
            self._refuse_endless(f"{database}.{table}")
            return  # a transaction before it has altered the table: it is read again
        self._times_begun = 0 if chunk.last_key is None else self._times_begun
        yield self._chunk_unit(chunk, first=state.get("after") is None)

    def _refuse_endless(self, table: str) -> None:
        """Return if a table may be read to its end yet.

        Raises:
            ConfigError: changes that say too little have it begun again and again.
        """
        self._times_begun += self._begun_again
        if self._times_begun > _ATTEMPTS:
            raise ConfigError(
                f"the table {table} cannot be read to its end: sessions with another binlog_row_image than FULL change it "
                f"meanwhile, and it was begun again {_ATTEMPTS} times. Have them leave binlog_row_image as FULL, and start "
                "the capture again: it goes on."
            )

    def _chunk_unit(self, chunk: SnapshotChunk, *, first: bool) -> CaptureUnit:
        """Return a chunk. Before the first rows of a table is what the table is."""
        schema = chunk.schema
        name = (schema.database, schema.table)
        columns = definition_columns(schema)
        defined = [TableDefinition(*name, columns, schema.key)] if first else []
        self._tracker.chunk_read(*name, chunk.last_key)
        contents: Iterator[UnitContent] = chain(defined, chunk.contents())
        # A table may be read twice at one place: it was left out for a while.
        last = "-".join(chunk.last_key or ["end"])
        position = f"{chunk.position}/{schema.name}/{last}+{secrets.token_hex(4)}"
        return CaptureUnit("snapshot", position, 0, contents, self._progress())

    def _progress(self) -> Progress:
        position = self._reader.position
        return {
            "file": position.file,
            "position": position.position,
            "created": self._reader.created,
            "tables": self._tracker.stored(),
            **({"server": self.server} if self.server else {}),
            **({"signals": self.signals} if self.signals else {}),
        }

    def _transactions(self, until: BinlogPosition | None) -> Iterator[CaptureUnit]:
        """Yield the log's transactions up to a place; without one, until a table is to be read."""
        for transaction in self._reader.read(until):
            if transaction is None:
                if until is None:
                    self._refuse_made_anew()
                    yield CaptureUnit("progress", "", 0, iter(()), self._progress())
                    if self._has_to_read():
                        return
                continue
            contents = self._contents(transaction)
            first = next(contents, None)
            self._quiet = self._quiet + 1 if first is None else 0
            unit = CaptureUnit(
                "transaction", str(transaction.gtid), transaction.timestamp_s * 1000, iter(())
            )
            if first is not None:
                unit.contents = self._finished(unit, first, contents)
                yield unit
            elif self._quiet >= _QUIET_TRANSACTIONS:
                self._quiet = 0
                unit.progress = self._progress()
                yield unit
            if until is None and self._has_to_read():
                return

    def _refuse_made_anew(self) -> None:
        """Return if the place, at which the server has nothing more, is in its log.

        Raises:
            ConflictError: it is not: the server goes on sending the files that it had, and nothing of its new ones.
        """
        end = current_position(self._session)
        if end < self._reader.position:
            raise ConflictError(
                f"the server's binary log ends at {end}, and capture is at {self._reader.position}: it was made anew (RESET "
                "MASTER). Changes may be missing: capture into a new prefix, from a new snapshot."
            )

    def _finished(
        self, unit: CaptureUnit, first: UnitContent, others: Iterator[UnitContent]
    ) -> Iterator[UnitContent]:
        """Yield a unit's contents, and set its progress after the last."""
        yield first
        yield from others
        unit.progress = self._progress()

    def _contents(self, transaction: BinlogTransaction) -> Iterator[UnitContent]:
        for event in row_runs(transaction.events):
            if isinstance(event, TableMap):
                yield from self._tracker.described(event)
            elif isinstance(event, list):
                yield from self._rows(event)
            else:
                yield from self._statement(event)

    def _rows(self, run: list[RowsEvent]) -> Iterator[UnitContent]:
        blocks = row_blocks(run, self._tracker.renderers(run[0].table))
        if blocks is not None:
            yield from blocks
            return
        for event in run:
            yield from self._row_changes(event)

    def _row_changes(self, event: RowsEvent) -> Iterator[TableChange]:
        table = event.table
        complete = self._tracker.completer(table)
        for op, before, after in event.changes():
            old = None if before is None else complete(before)
            new = None if after is None else complete(after)
            if new is not None and len(new) < len(table.columns):
                row = self._completed(table, old, new)
                if row is None:
                    yield from self._untold(table, old, new)
                    continue
                new = row
            yield TableChange(table.database, table.table, op, table.key, old, new)

    def _completed(self, table: TableMap, old: RowImage | None, new: RowImage) -> RowImage | None:
        """Return a row with what its partial image leaves out; None if it is not known by that what the row is."""
        if old is None:
            row = self._defaults.completed(table, new, self._reader.position)
            return row if len(row) == len(table.columns) else None
        if self._defaults.may_replace(table, old, new):
            return None
        row = old | new  # what was left out has not changed
        return row if self._tracker.is_told(table, row) else None

    def _untold(
        self, table: TableMap, old: RowImage | None, new: RowImage
    ) -> Iterator[TableChange]:
        """Have a table read from its beginning, of which a change is left out; a row that moved is deleted.

        A column of the key that a REPLACE does not name may have got its default: the row is read again where it is.
        """
        self._tracker.begin_again(table.database, table.table)
        self._begun_again = True
        if old is None:
            return
        row = new if self._defaults.may_replace(table, old, new) else old | new
        if any(name not in row or old[name] != row[name] for name in table.key):
            yield TableChange(table.database, table.table, "d", table.key, old, None)

    def _statement(self, statement: Statement) -> Iterator[UnitContent]:
        for effect in table_effects(statement.text, statement.database):
            for one in self._tables_of(effect):
                yield from self._effect(one, statement.text)

    def _tables_of(self, effect: TableEffect) -> list[TableEffect]:
        if _NO_LETTER in effect.database + effect.table:
            return [TableEffect("unknown", effect.database, effect.table)]
        if self._session.names_are_lower:
            names = (effect.database.lower(), effect.table.lower())
            effect = TableEffect(effect.kind, *names)
        if effect.kind == "drop_database":
            return [
                TableEffect("drop", *name)
                for name in self._tracker.names()
                if name[0] == effect.database
            ]
        return [effect] if self._wanted(effect.database, effect.table) else []

    def _effect(self, effect: TableEffect, text: str) -> Iterator[UnitContent]:
        database, table = effect.database, effect.table
        self._defaults.forget((database, table))
        if effect.kind == "unknown":
            raise ConfigError(
                f"a statement concerns {database}.{table}, and cannot be read. Capture into a new prefix, from a "
                "new snapshot."
            )
        if effect.kind in ("truncate", "drop", "reload"):
            yield TableChange(database, table, "t", ())
        if effect.kind == "truncate":
            self._tracker.restart(database, table, only_if_reading=True)
        elif effect.kind == "drop":
            self._tracker.drop(database, table)
            yield TableDefinition(database, table, (), (), text, dropped=True)
        else:
            yield from self._altered(effect, text)

    def _altered(self, effect: TableEffect, text: str) -> Iterator[UnitContent]:
        database, table = effect.database, effect.table
        self._refuse(table_faults(self._session, database, table))
        if effect.kind in ("reload", "rewrite"):
            self._tracker.restart(database, table)
        elif effect.kind == "create":
            self._tracker.created(database, table)
        definition = self._tracker.definition(database, table, text)
        if definition is not None:
            self._defaults.learn((database, table))
            yield definition

    def _refuse(self, faults: list[PreflightFault]) -> None:
        refuse_faults(faults, "a table that was created or altered")
