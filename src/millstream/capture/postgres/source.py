"""PostgreSQL as a source: units of snapshots and of the WAL, in one order.

Rows of a snapshot at a place P are given after all transactions before P and before those after it; see
``snapshot.py``. Which tables are read, and why again, is in ``tracker.py``; what may be wrong with the slot in
``slot.py``.

=====================================  ==================================================================
stopped after                          the next run
=====================================  ==================================================================
a unit was stored, with its progress   goes on after it
a unit was given, and not stored       reads the WAL from the place before it; a chunk again, newer
a transaction was given in part        reads it from its beginning
=====================================  ==================================================================

A transaction is identified by the place of its commit record (``final_lsn``): a message's place is not unique.
"""

from __future__ import annotations

import re
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby, islice
from operator import itemgetter
from typing import Any

from psycopg import ProgrammingError
from psycopg.conninfo import conninfo_to_dict

from millstream.capture.lag import SourceLag
from millstream.capture.outbox import MESSAGE_PREFIX
from millstream.capture.postgres.catalog import (
    OF_THE_SERVER,
    PgFault,
    PgTable,
    check_reread,
    find_tables,
    publication_faults,
    publish,
    published_tables,
    read_types,
    refuse_alterations,
    refuse_faults,
    server_faults,
    table_faults,
    unpublish,
)
from millstream.capture.postgres.cells import copy_cells
from millstream.capture.postgres.messages import (
    RUN_TAG,
    WAL_HEADER_BYTES,
    PgBegin,
    PgCommit,
    PgLogicalMessage,
    PgRelation,
    PgTruncate,
    decode_message,
    is_change,
    lsn_text,
    parse_lsn,
)
from millstream.capture.postgres.retention import drop_slots, measure_kept, source_lag
from millstream.capture.postgres.slot import check_slot, make_slot
from millstream.capture.postgres.snapshot import PgSnapshot, ReadTable, waiting
from millstream.capture.postgres.stream import (
    KEEPALIVE,
    Session,
    WalStream,
    keepalive_end,
    open_session,
    translated,
)
from millstream.capture.postgres.timelines import identify
from millstream.capture.postgres.tracker import PgTableTracker
from millstream.capture.postgres.unread_rows import KeyTexts, keys_behind
from millstream.capture.postgres.values import PgTypes, parse_copy_line
from millstream.capture.signals import RereadRequest
from millstream.capture.table_patterns import TablePatterns
from millstream.capture.units import (
    CaptureUnit,
    LoggedMessage,
    Progress,
    RowBlock,
    UnitContent,
)
from millstream.errors import ConfigError, RetriableError
from millstream.views.address import PostgresAddress

CHUNK_ROWS = 10_000
HEARTBEAT_S = 10.0
_RUN_ROWS_MAX = 2000
_RUN_BYTES_MAX = 16 << 20
_LOOK_S = 30.0  # how often it is looked whether tables were created or dropped
_IDLE_S = 0.05
_STORED_S = 120.0
# What progress has for good.
_IDENTITY = ("system", "timeline", "timeline_began", "slot", "made", "publication")
_RELEASE_S, _REMOVE_S = 30.0, 3.0  # how long something may still use a slot that is to be dropped
_OWN_SLOTS = (
    "SELECT slot_name::text FROM pg_replication_slots "
    "WHERE NOT temporary AND database = current_database() AND slot_name ~ %s"
)
_tag_of = itemgetter(RUN_TAG)  # of a keepalive, which is shorter, it is empty
_NAME_MAX = 36  # of the 63 bytes that a slot's name may have


def is_address(url: str) -> bool:
    """Say whether the driver can read a URL: what it says of one that it cannot may hold the password."""
    try:
        conninfo_to_dict(url)
    except ProgrammingError:
        return False
    return True


class PostgresSource:
    """Reads a PostgreSQL database's tables and their changes.

    Args:
        tables: Patterns: ``schema.table``, or ``table`` in the schema public, with ``*`` and ``?``.
        name: Of the capture: the publication is ``millstream_<name>``, and the slot begins with that.
        chunk_rows: How many rows of a snapshot are given, and held in memory, at a time.
        heartbeat_s: After how many seconds without a change progress is given alone.
        wal_bytes_max: How much WAL the server may keep for the capture, besides what it allows itself.
        messages: Whether messages of pg_logical_emit_message are given that begin with ``outbox:``.
        new_suffix: Returns letters and digits that make a slot's name unlike any other.

    Guarantees: :meth:`units` is for one thread, the rest for any. The server keeps its WAL until it is acknowledged.
    """

    def __init__(
        self,
        address: PostgresAddress,
        tables: Sequence[str],
        *,
        name: str,
        chunk_rows: int = CHUNK_ROWS,
        heartbeat_s: float = HEARTBEAT_S,
        wal_bytes_max: int | None = None,
        messages: bool = False,
        new_suffix: Callable[[], str] = lambda: secrets.token_hex(4),
    ) -> None:
        if chunk_rows < 1:
            raise ConfigError(f"chunk_rows is {chunk_rows}. Give 1 or more.")
        self.address = address
        self.wanted = TablePatterns(tables, "public", OF_THE_SERVER)
        self.name = "millstream_" + re.sub("[^a-z0-9]", "_", name.lower())[:_NAME_MAX]
        self.chunk_rows = chunk_rows
        self.heartbeat_s = heartbeat_s
        self.wal_bytes_max = wal_bytes_max
        self.messages = messages
        self.rereads: deque[RereadRequest] = deque()
        self.pauses = False  # rows are not to be read before the changes of meanwhile are
        self.new_suffix = new_suffix
        self.database = str(conninfo_to_dict(address.url).get("dbname") or "")
        self._run: _Run | None = None

    def check(self) -> list[tuple[str, str]]:
        """Return the tables that are captured, if the database can be.

        Raises:
            ConfigError: it cannot; the message has each reason, and the statement that mends it.
            RetriableError: it does not respond.
        """
        with open_session(self.address) as session, translated(self.address):
            # A capture that goes on has its slot.
            has_slot = session.execute(
                _OWN_SLOTS.encode(), (f"^{self.name}_[0-9a-z]{{8}}$",)
            ).fetchone()
            tables = self.checked_tables(session, slot_needed=has_slot is None)
        return [(one.schema, one.table) for one in tables]

    def checked_tables(self, session: Session, *, slot_needed: bool) -> list[PgTable]:
        """Return the tables that are captured.

        Raises:
            ConfigError: as :meth:`check`.
        """
        faults: list[PgFault] = list(server_faults(session, slot_needed=slot_needed))
        refuse_faults(faults, self.address.shown)
        tables = find_tables(session, self.wanted)
        if not tables:
            raise ConfigError(
                f"no table of {self.address.shown} is among those to be captured, {self.wanted}. Name tables "
                "that are there: table or schema.table, with * and ?."
            )
        faults = [
            *table_faults(session, tables),
            *publication_faults(session, self.name, tables),
        ]
        refuse_faults(faults, self.address.shown)
        return tables

    def units(self, progress: Progress | None) -> Iterator[CaptureUnit]:
        """Yield units from ``progress`` on, without end.

        Raises:
            ConfigError: the database cannot be captured.
            ConflictError: the server no longer has what follows the progress.
            RetriableError: the server does not respond.
        """
        self.close()  # an earlier run, whose thread may still hold the slot
        run = self._run = _Run(self)
        with open_session(self.address) as session, translated(self.address):
            run.session = session
            yield from run.units(progress)

    def acknowledge(self, progress: Progress) -> None:
        """Take note that everything up to ``progress`` is durable: the server may forget it."""
        if self._run is not None:
            self._run.stored(progress)

    def measure(self, progress: Progress) -> SourceLag:
        """Measure the WAL that is not in the log yet, and what the server keeps; see ``retention.py``."""
        if not progress["made"]:
            return SourceLag()
        with open_session(self.address) as session, translated(self.address):
            found = measure_kept(session, progress, self.wal_bytes_max)
            self.pauses = found is not None and found.pauses
            return source_lag(session, progress, found, self.wal_bytes_max)

    def check_reread(self, request: RereadRequest) -> None:
        """Return if a table can be read again, and its condition be asked.

        Raises:
            ConfigError: it cannot.
        """
        with open_session(self.address) as session, translated(self.address):
            check_reread(session, find_tables(session, self.wanted), request)

    def reread(self, request: RereadRequest) -> None:
        """Have a table read again, from a snapshot that stands among its changes."""
        self.rereads.append(request)

    def release(self, progress: Progress) -> None:
        """Drop the slot, so that the server keeps no WAL for it: the capture has ended with that."""
        self.close()
        with open_session(self.address) as session, translated(self.address):
            drop_slots(session, [progress["slot"]], _RELEASE_S)

    def remove(self) -> list[str]:
        """Drop the slots and the publication of this capture's name, of whichever log; return their names.

        Raises:
            RetriableError: a capture still runs.
            ConfigError: the role may not drop the publication.
        """
        with open_session(self.address) as session, translated(self.address):
            rows = session.execute(
                _OWN_SLOTS.encode(), (f"^{self.name}_[0-9a-z]{{8}}$",)
            ).fetchall()
            slots = drop_slots(session, [slot for (slot,) in rows], _REMOVE_S)
            removed = [f"the replication slot {slot}" for slot in slots]
            if unpublish(session, self.name):
                removed.append(f"the publication {self.name}")
        return removed

    def close(self) -> None:
        """Make :meth:`units` end soon."""
        if self._run is not None:
            self._run.closed.set()


@dataclass
class _Run:
    """One run of the source."""

    source: PostgresSource
    closed: threading.Event = field(default_factory=threading.Event)
    _buffer: deque[bytes] = field(default_factory=deque)
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _stored: Progress | None = None
    _stream: WalStream | None = None
    _told_s: float = float("-inf")
    _looked_s: float = field(default_factory=time.monotonic)
    _asked: bool = False
    session: Session = field(init=False)
    _tracker: PgTableTracker = field(init=False)
    _identity: Progress = field(init=False)
    _lsn: int = field(init=False)
    _signals: int = field(init=False)
    _target: int = field(init=False)

    def stored(self, progress: Progress) -> None:
        with self._changed:
            self._stored = progress
            self._changed.notify_all()
        if self._stream is not None:
            self._stream.acknowledge(progress["lsn"])

    def units(self, progress: Progress | None) -> Iterator[CaptureUnit]:
        source = self.source
        if progress is not None and progress["made"]:
            refuse_alterations(self.session, source.name, progress.get("publication"))
        tables = source.checked_tables(
            self.session, slot_needed=progress is None or not progress["made"]
        )
        if progress is None:
            progress = self._named()
            yield self._note(progress)
            self._wait_stored(progress)
        if not progress["made"]:
            publish(self.session, source.name, tables)
            publication = refuse_alterations(self.session, source.name, None)
            place = self._made(progress["slot"])
            progress = {**progress, "made": True, "lsn": place, "publication": publication}
        progress = check_slot(self.session, source.address, progress, source.name)
        self._lsn = progress["lsn"]
        self._identity = {key: progress[key] for key in _IDENTITY if key in progress}
        self._signals = progress.get("signals", 0)
        self._tracker = PgTableTracker(progress["tables"], self._look, self._behind)
        now = self.session.execute("SELECT pg_current_wal_flush_lsn()::text").fetchone()
        assert now is not None
        self._target = parse_lsn(now[0])
        where = (progress["slot"], source.name, self._lsn, progress["timeline"])
        with WalStream(source.address, *where, source.messages) as self._stream:
            yield from self._refreshed()
            while not self.closed.is_set():
                if source.rereads:
                    yield from self._asked_again(source.rereads.popleft())
                elif self._tracker.pending():
                    yield from self._snapshot()
                else:
                    yield from self._follow(None)

    # ── the slot ────────────────────────────────────────────────────────────────────────────

    def _named(self) -> Progress:
        found = identify(self.source.address)
        slot = f"{self.source.name}_{self.source.new_suffix()}"
        return {
            "system": found.identity.system,
            "timeline": found.identity.timeline,
            "timeline_began": found.began,
            "slot": slot,
            "made": False,
            "lsn": 0,
            "tables": {},
        }

    def _made(self, slot: str) -> int:
        try:
            return make_slot(self.session, self.source.address, slot)
        except RetriableError:
            raise
        except Exception as error:
            if getattr(error, "sqlstate", "") == "57014":  # cancelled
                raise RetriableError(waiting(self.session, self.source.address)) from None
            raise

    def _note(self, progress: Progress, *contents: UnitContent) -> CaptureUnit:
        position = f"{lsn_text(progress['lsn'])}+{self.source.new_suffix()}"
        return CaptureUnit("snapshot", position, 0, iter(contents), progress, self._details())

    def _wait_stored(self, progress: Progress) -> None:
        def done() -> bool:
            return self._stored == progress or self.closed.is_set()

        with self._changed:
            if not self._changed.wait_for(done, _STORED_S):
                raise RetriableError(
                    "the log did not take the name of the slot. It is tried again."
                )

    def _progress(self) -> Progress:
        signals = {"signals": self._signals} if self._signals else {}
        return {**self._identity, **signals, "lsn": self._lsn, "tables": self._tracker.entries}

    def _asked_again(self, request: RereadRequest) -> Iterator[CaptureUnit]:
        """Have a table read again: a crash before the unit is stored leaves the signal, after it a table to be read."""
        if request.next_offset < self._signals:
            return
        self._signals = max(self._signals, request.begun)
        contents = list(self._tracker.again(request.database, request.table, request.where))
        yield self._note(self._progress(), *contents)

    def _details(self, **more: Any) -> dict[str, Any]:
        return {"db": self.source.database, **more}

    # ── tables ──────────────────────────────────────────────────────────────────────────────

    def _look(self) -> tuple[list[PgTable], PgTypes, dict[int, int]]:
        self._looked_s = time.monotonic()
        refuse_alterations(self.session, self.source.name, self._identity.get("publication"))
        tables = find_tables(self.session, self.source.wanted)
        refuse_faults(list(table_faults(self.session, tables)), self.source.address.shown)
        publish(self.session, self.source.name, tables)
        published = published_tables(self.session, self.source.name)
        return tables, read_types(self.session), published

    def _behind(
        self, table: PgTable, after: Sequence[str], keys: Sequence[KeyTexts]
    ) -> dict[KeyTexts, bool] | None:
        return keys_behind(self.session, table, after, keys)

    def _refreshed(self) -> Iterator[CaptureUnit]:
        gone = list(self._tracker.refresh())
        if gone:
            yield self._note(self._progress(), *gone)

    def _snapshot(self) -> Iterator[CaptureUnit]:
        name = f"{self._identity['slot']}_{self.source.new_suffix()}"
        with PgSnapshot(self.source.address, name, self._identity["timeline"]) as snapshot:
            yield from self._follow(snapshot.lsn)
            if self.closed.is_set():
                return
            self._lsn = max(self._lsn, snapshot.lsn)
            yield from self._refreshed()
            for table in self._tracker.pending():
                read = snapshot.lock(table)
                if read is not None:
                    yield from self._read(snapshot, read)
                if self.source.pauses:
                    return

    def _read(self, snapshot: PgSnapshot, read: ReadTable) -> Iterator[CaptureUnit]:
        table, columns = read.table, read.columns
        after = self._tracker.after(table, columns)
        layout = self._tracker.layout(table, columns)
        key = [[one.name for one in columns].index(name) for name in table.key]
        # They are still owed if this stops before the next chunk is stored, and read again.
        for lines in self._owed_lines(snapshot, read):
            yield self._note(
                self._progress(), layout.block(copy_cells(lines, len(columns)), len(lines), "r")
            )
        first = list(self._tracker.begin(table, columns))
        where = self._tracker.where(table)
        chunks = snapshot.lines(read, after, where, rows_max=self.source.chunk_rows)
        if not key:
            blocks = (
                layout.block(copy_cells(lines, len(columns)), len(lines), "r") for lines in chunks
            )
            yield self._whole(table, columns, first, blocks)
            return
        # The last chunk is known by what is behind it: it has no key from which reading goes on.
        chunk = next(chunks, None)
        while not self.closed.is_set():
            behind = None if chunk is None else next(chunks, None)
            rows = (
                ()
                if chunk is None
                else (layout.block(copy_cells(chunk, len(columns)), len(chunk), "r"),)
            )
            last = None
            if chunk is not None and behind is not None:
                texts = parse_copy_line(chunk[-1])
                last = [texts[place] or "" for place in key]
            self._tracker.read(table, columns, last, where)
            yield self._note(self._progress(), *first, *rows)
            if behind is None or self.source.pauses:
                return
            first, chunk = [], behind

    def _owed_lines(self, snapshot: PgSnapshot, read: ReadTable) -> Iterator[list[bytes]]:
        owed = self._tracker.owed(read.table, read.columns)
        if owed:
            yield from snapshot.lines_of(read, owed, rows_max=self.source.chunk_rows)

    def _whole(
        self,
        table: PgTable,
        columns: tuple[Any, ...],
        first: list[UnitContent],
        rows: Iterator[RowBlock],
    ) -> CaptureUnit:
        """Return a table without a key as one unit: it cannot be read in parts."""
        unit = self._note(self._progress())

        def contents() -> Iterator[UnitContent]:
            yield from first
            yield from rows
            self._tracker.read(table, columns, None)
            unit.progress = self._progress()

        unit.contents = contents()
        return unit

    # ── the stream ──────────────────────────────────────────────────────────────────────────

    def _follow(self, until: int | None) -> Iterator[CaptureUnit]:
        """Yield transactions up to a place; without one, until there are tables to be read."""
        while not self.closed.is_set():
            if until is None and (self._tracker.pending() or self.source.rereads):
                return
            if until is None and time.monotonic() - self._looked_s > _LOOK_S:
                yield from self._refreshed()
            if not self._buffer and not self._received(until):
                continue
            message = self._buffer[0]
            wal_end = keepalive_end(message)
            if wal_end is not None:
                self._buffer.popleft()
                self._asked = False
                if until is not None and wal_end >= until:
                    return
                if until is None:
                    yield from self._heartbeat(wal_end)
                continue
            decoded = decode_message(message[WAL_HEADER_BYTES:])
            if isinstance(decoded, PgBegin) and until is not None and decoded.final_lsn >= until:
                return
            self._buffer.popleft()
            if isinstance(decoded, PgBegin):
                yield self._transaction(decoded)

    def _received(self, until: int | None) -> bool:
        """Receive messages; where there are none, ask the server how far it is, if that matters now."""
        assert self._stream is not None
        self._buffer.extend(self._stream.receive(_IDLE_S))
        if not self._buffer and not self._asked:
            due = time.monotonic() - self._told_s >= self.source.heartbeat_s
            if until is not None or due:
                self._stream.ask()
                self._asked = True
        return bool(self._buffer)

    def _heartbeat(self, wal_end: int) -> Iterator[CaptureUnit]:
        now = time.monotonic()
        if wal_end < self._target or now - self._told_s < self.source.heartbeat_s:
            return
        self._told_s = now
        self._lsn = max(self._lsn, wal_end)
        yield CaptureUnit("progress", "", 0, iter(()), self._progress())

    def _transaction(self, begin: PgBegin) -> CaptureUnit:
        unit = CaptureUnit(
            "transaction",
            lsn_text(begin.final_lsn),
            begin.timestamp_us // 1000,
            iter(()),
            {},
            self._details(txId=begin.xid, lsn=begin.final_lsn),
        )
        unit.contents = self._contents(begin, unit)
        return unit

    def _contents(self, begin: PgBegin, unit: CaptureUnit) -> Iterator[UnitContent]:
        known = begin.final_lsn < self._lsn  # it is in the log already
        for messages in self._messages():
            if is_change(messages[0]):
                if not known:
                    yield from self._tracker.changes(messages)
                continue
            message = decode_message(messages[0][WAL_HEADER_BYTES:])
            if isinstance(message, PgCommit):
                self._lsn = max(self._lsn, message.end_lsn)
                unit.progress = self._progress()
                return
            if isinstance(message, PgRelation):
                yield from self._tracker.relation(message)
            elif known:
                continue
            elif isinstance(message, PgTruncate):
                yield from self._tracker.truncations(message)
            elif isinstance(message, PgLogicalMessage) and message.prefix.startswith(
                MESSAGE_PREFIX
            ):
                yield LoggedMessage(message.prefix, message.data)

    def _messages(self) -> Iterator[list[bytes]]:
        """Yield the messages of a transaction, those that follow each other and are alike together.

        More of them are waited for: before its end has come nothing of the transaction can be stored.
        """
        run: list[bytes] = []
        size, buffer = 0, self._buffer
        while True:
            if not buffer:
                self._receive_more()
                continue
            if buffer[0][:1] == KEEPALIVE:
                buffer.popleft()
                continue
            if run and _tag_of(buffer[0]) != _tag_of(run[0]):
                yield run
                run, size = [], 0
            if not is_change(buffer[0]):
                yield [buffer.popleft()]
                continue
            _, alike = next(groupby(buffer, _tag_of))
            count = sum(1 for _ in islice(alike, _RUN_ROWS_MAX - len(run)))
            run += [buffer.popleft() for _ in range(count)]
            size += sum(map(len, run[-count:]))
            if len(run) == _RUN_ROWS_MAX or size >= _RUN_BYTES_MAX:
                yield run
                run, size = [], 0

    def _receive_more(self) -> None:
        """Receive messages, after waiting for them for a moment."""
        if self.closed.is_set():
            raise RetriableError("the capture was stopped in the middle of a transaction.")
        assert self._stream is not None
        self._buffer.extend(self._stream.receive(_IDLE_S))
