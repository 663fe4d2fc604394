"""MongoDB as a source: units of a snapshot and of a change stream, in one order.

A chunk of the snapshot is read at a cluster time P, and given after all changes up to P and before those after it. So
each document of the chunk is newer than every change given before it, and older than every one after it: nothing has
to be compared, dropped or locked, and each chunk can be read again after a crash.

=====================================  ==================================================================
stopped after                          the next run
=====================================  ==================================================================
a unit was stored, with its progress   goes on after it: the progress has the stream's resume token
a unit was given, and not stored       reads the stream from the token before it; a chunk again, newer
a transaction was given in part        reads it from its beginning
=====================================  ==================================================================
"""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from bson.errors import BSONError
from bson.json_util import loads
from pymongo import MongoClient

from millstream.capture.lag import SourceLag
from millstream.capture.mongodb.address import MongoDbAddress
from millstream.capture.mongodb.events import ChangeEvent, ClusterTime, Document, token_time
from millstream.capture.mongodb.preflight import (
    collection_faults,
    deployment_faults,
    refuse_faults,
)
from millstream.capture.mongodb.session import (
    CollectionAlteredError,
    Connect,
    DocumentChunk,
    FoundCollection,
    MongoDbSession,
    mongodb_errors,
)
from millstream.capture.mongodb.stream import EventReader
from millstream.capture.mongodb.tracker import CollectionTracker
from millstream.capture.mongodb.values import row_of
from millstream.capture.signals import RereadRequest
from millstream.capture.table_patterns import TablePatterns
from millstream.capture.units import (
    CaptureUnit,
    Progress,
    TableChange,
    TableDefinition,
    UnitContent,
    UnitKind,
)
from millstream.errors import ConfigError, ConflictError, MillstreamError

CHUNK_ROWS = 10_000
KEY = ("_id",)
_COLUMNS = ({"name": "_id", "type": "any", "nullable": False},)
_ATTEMPTS = 20  # to read a chunk of a collection that is dropped meanwhile
_ALARM_SHARE = 0.5  # of the time that the oplog reaches back


class MongoDbSource:
    """Reads a MongoDB database's collections and their changes.

    Args:
        collections: Patterns of names, with ``*`` and ``?``.
        chunk_rows: How many documents of a snapshot are read, and held in memory, at a time.
        heartbeat_s: After how many seconds without a change progress is given alone.
        connect: What opens a client, as ``pymongo.MongoClient`` does.

    Guarantees: :meth:`units` is for one thread, the rest for any. Nothing is written to the deployment.
    """

    def __init__(
        self,
        address: MongoDbAddress,
        collections: Sequence[str],
        *,
        chunk_rows: int = CHUNK_ROWS,
        heartbeat_s: float = 1.0,
        connect: Connect = MongoClient,
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        if chunk_rows < 1:
            raise ConfigError(f"chunk_rows is {chunk_rows}. Give 1 or more.")
        self.address = address
        self.chunk_rows = chunk_rows
        self.heartbeat_s = heartbeat_s
        self.monotonic_s = monotonic_s
        self.rereads: deque[RereadRequest] = deque()
        self._patterns = TablePatterns(collections, address.database)
        self._connect = connect

    def wanted(self, collection: str) -> bool:
        """Say whether a collection of this name is captured."""
        return self._patterns(self.address.database, collection)

    def session(self) -> MongoDbSession:
        """Return a connection of its own."""
        return MongoDbSession(self.address, self._connect)

    def check(self) -> list[tuple[str, str]]:
        """Return the collections that are captured, if the database can be.

        Raises:
            ConfigError: it cannot; the message has each reason, and the command that mends it.
            RetriableError: it does not respond.
        """
        with self.session() as session:
            found = self.checked(session)
            if not found:
                raise ConfigError(
                    f"no collection of {self.address.shown} is among those to be captured, {self._patterns}. Name "
                    "collections that are there, with * and ?. Views and time series are none."
                )
            with mongodb_errors(self.address):
                session.watch(since=session.now()).close()
        return [(self.address.database, one.name) for one in found]

    def checked(self, session: MongoDbSession) -> list[FoundCollection]:
        """Return the collections that are captured.

        Raises:
            ConfigError: as :meth:`check`.
        """
        refuse_faults(list(deployment_faults(session)), self.address.shown)
        found = [one for one in session.collections() if self.wanted(one.name)]
        refuse_faults(list(collection_faults(found)), self.address.shown)
        return found

    def acknowledge(self, progress: Progress) -> None:
        """Do nothing: the deployment keeps its oplog for as long as it is configured to, whoever has read it."""

    def release(self, progress: Progress) -> None:
        """Do nothing: the deployment keeps nothing for a capture."""

    def remove(self) -> list[str]:
        """Return nothing: a capture installs nothing in the deployment."""
        return []

    def measure(self, progress: Progress) -> SourceLag:
        """Measure about how many documents are to be read, and how near the place is to the oplog's beginning."""
        unread = [name for name, state in progress["collections"].items() if "read" not in state]
        with self.session() as session:
            rows = sum(session.count(name) for name in unread)
            return SourceLag(rows_expected=rows or None, alarm=self._alarm(session, progress))

    def _alarm(self, session: MongoDbSession, progress: Progress) -> str:
        begins, at = session.oplog_start(), token_time(progress["token"])
        if begins is None or at is None:
            return ""
        now = session.now()
        if now.seconds - at.seconds <= _ALARM_SHARE * (now.seconds - begins.seconds):
            return ""
        return (
            f"the oplog of {self.address.shown} reaches back {now.seconds - begins.seconds:,} s, and capture is "
            f"{now.seconds - at.seconds:,} s behind: what it has not read may be removed soon. Make the oplog larger: "
            "db.adminCommand({replSetResizeOplog: 1, size: …})."
        )

    def check_reread(self, request: RereadRequest) -> None:
        """Return if a collection can be read again, and its filter be asked.

        Raises:
            ConfigError: it cannot.
        """
        name = f"{request.database}.{request.table}"
        with self.session() as session:
            known = {one.name for one in session.collections() if self.wanted(one.name)}
            if request.database != self.address.database or request.table not in known:
                raise ConfigError(
                    f"the collection {name} is not captured, so it cannot be read again. Name one that --tables has."
                )
            try:
                session.check_filter(request.table, filter_of(request.where))
            except (MillstreamError, ValueError, TypeError, BSONError) as error:
                raise ConfigError(
                    f"the filter {request.where!r} cannot be asked of {name}: {error} Give one of MongoDB's in JSON, such as "
                    '{"total": {"$gt": 5}}.'
                ) from None

    def reread(self, request: RereadRequest) -> None:
        """Have a collection read again, in chunks among its changes."""
        self.rereads.append(request)

    def units(self, progress: Progress | None) -> Iterator[CaptureUnit]:
        """Yield units from ``progress`` on, for ever; those without contents while nothing happens.

        Each unit's contents are to be read to their end before the next unit is asked for. None starts with a
        snapshot.

        Raises:
            RetriableError: the deployment does not respond: call again, with the last stored progress.
            ConflictError: it no longer has the changes after ``progress``.
            ConfigError: a change cannot be captured, or the preflight found a fault.
        """
        with self.session() as session:
            # The time first: a collection that is created after the list was made is in the stream after it.
            since = session.now() if progress is None else None
            token = None if progress is None else progress["token"]
            run = _Run(self, session, progress or {"collections": {}})
            run.tracker.add(self.checked(session))
            while True:
                with (
                    mongodb_errors(self.address),
                    session.watch(after=token, since=since) as stream,
                ):
                    yield from run.units(stream)
                token, since = run.reader.token, None


def filter_of(where: str) -> dict[str, Any]:
    """Return a filter that was given as JSON; nothing is the filter of all."""
    found = loads(where) if where else {}
    if not isinstance(found, dict):
        raise TypeError("it is no object.")
    return found


class _Run:
    """One run of the source; :meth:`units` ends where the stream ended, and another one is to be opened."""

    reader: EventReader

    def __init__(self, source: MongoDbSource, session: MongoDbSession, progress: Progress) -> None:
        self.tracker = CollectionTracker(progress["collections"])
        self._source = source
        self._session = session
        self._database = source.address.database
        self._signals = progress.get("signals", 0)
        self._told_s = source.monotonic_s()
        self._attempts = 0
        self._ended = False
        self._given = ClusterTime(0, 0)  # the time of the last event

    def units(self, stream: Any) -> Iterator[CaptureUnit]:
        def next_document() -> Document | None:
            with mongodb_errors(self._source.address):
                found: Document | None = stream.try_next()
            return found

        self.reader = EventReader(next_document, lambda: stream.resume_token)
        self._ended = False
        left_out = [name for name in self.tracker.names() if not self._source.wanted(name)]
        if left_out:
            gone = [content for name in left_out for content in self._dropped(name)]
            yield self._note("left out", gone)
        while not self._ended:
            rereads, pending = self._source.rereads, self.tracker.pending()
            if rereads:
                yield from self._again(rereads.popleft())
            elif pending is None:
                yield from self._changes(None)
            else:
                yield from self._chunk(pending)

    def _progress(self) -> Progress:
        signals = {"signals": self._signals} if self._signals else {}
        return {"token": self.reader.token, "collections": self.tracker.stored(), **signals}

    def _note(self, about: str, contents: list[UnitContent]) -> CaptureUnit:
        position = f"{self.reader.time}/{about}+{secrets.token_hex(4)}"
        return CaptureUnit("snapshot", position, 0, iter(contents), self._progress())

    def _again(self, request: RereadRequest) -> Iterator[CaptureUnit]:
        """Have a collection read again: all of it, after it was emptied, or the documents of a filter."""
        if request.next_offset < self._signals:
            return
        self._signals = max(self._signals, request.begun)
        name, contents = request.table, list[UnitContent]()
        state = self.tracker.state(name)
        if state is not None:
            whole = (
                not request.where or "read" not in state
            )  # of two filters all documents are read
            contents += [self._truncated(name)] if not request.where else []
            self.tracker.restart(name, state["uuid"], where="" if whole else request.where)
        yield self._note("again", contents)

    # ── snapshots ───────────────────────────────────────────────────────────────────────────

    def _chunk(self, name: str) -> Iterator[CaptureUnit]:
        """Yield the changes before the next chunk of a collection, and the chunk."""
        state = self.tracker.state(name)
        assert state is not None
        first = state["after"] is None
        try:
            chunk = self._session.read_chunk(
                name, state["after"], self._source.chunk_rows, filter_of(state.get("where", ""))
            )
        except CollectionAlteredError:
            self._attempts += 1
            if self._attempts > _ATTEMPTS:
                raise
            yield from self._changes(self._session.now())  # the stream has what was done to it
            return
        self._attempts = 0
        yield from self._changes(chunk.time)
        # A change before it may have altered the collection, and a transaction may have changes before and after it.
        is_between = not self._ended and self._given <= chunk.time
        if is_between and self.tracker.state(name) is state:
            yield self._chunk_unit(name, chunk, first=first)

    def _chunk_unit(self, name: str, chunk: DocumentChunk, *, first: bool) -> CaptureUnit:
        contents: list[UnitContent] = [self._definition(name)] if first else []
        contents += [
            TableChange(self._database, name, "r", KEY, None, self._row(name, document))
            for document in chunk.documents
        ]
        self.tracker.chunk_read(name, chunk.last)
        position = f"{chunk.time}/{name}+{secrets.token_hex(4)}"
        return CaptureUnit("snapshot", position, 0, iter(contents), self._progress())

    def _row(self, name: str, document: Mapping[str, Any]) -> dict[str, Any]:
        try:
            return row_of(document)
        except TypeError as error:
            raise ConfigError(
                f"a document of {self._database}.{name} cannot be captured: {error}. Leave the collection out of the capture."
            ) from None

    # ── the stream ──────────────────────────────────────────────────────────────────────────

    def _changes(self, until: ClusterTime | None) -> Iterator[CaptureUnit]:
        """Yield the stream's changes up to a time; without one, until a collection is to be read."""
        while not self._ended:
            event = self.reader.peek()
            if event is None:
                if until is not None and (at := self.reader.time) is not None and at >= until:
                    return
                yield from self._heartbeat("progress", until)
            elif until is not None and event.time > until:
                return
            elif (unit := self._unit(self.reader.take())) is not None:
                self._told_s = self._source.monotonic_s()
                yield unit
            else:
                yield from self._heartbeat("transaction", until)
            if until is None and (self.tracker.pending() is not None or self._source.rereads):
                return

    def _heartbeat(self, kind: UnitKind, until: ClusterTime | None) -> Iterator[CaptureUnit]:
        """Yield the place alone, if it is time to: as progress where there is nothing more at the moment."""
        now_s = self._source.monotonic_s()
        if until is None and now_s - self._told_s >= self._source.heartbeat_s:
            self._told_s = now_s
            position = "" if kind == "progress" else str(self.reader.time)
            yield CaptureUnit(kind, position, 0, iter(()), self._progress())

    def _unit(self, event: ChangeEvent) -> CaptureUnit | None:
        """Return the changes of one time; None if they concern no captured collection."""
        contents = self._contents(event)
        first = next(contents, None)
        if first is None:
            return None
        unit = CaptureUnit("transaction", str(event.time), event.timestamp_ms, iter(()))
        unit.contents = self._finished(unit, first, contents)
        return unit

    def _finished(
        self, unit: CaptureUnit, first: UnitContent, others: Iterator[UnitContent]
    ) -> Iterator[UnitContent]:
        yield first
        yield from others
        unit.progress = self._progress()

    def _contents(self, event: ChangeEvent) -> Iterator[UnitContent]:
        yield from self._of(event)
        for other in self.reader.with_event(event):
            yield from self._of(other)

    def _of(self, event: ChangeEvent) -> Iterator[UnitContent]:
        """Yield what an event says."""
        self._given = max(self._given, event.time)
        if event.kind in ("c", "u", "d"):
            if self.tracker.state(event.collection) is not None:
                self.tracker.check(event)
                yield self._change(event)
        elif event.kind == "create":
            if self._source.wanted(event.collection):
                yield from self._created(event)
        elif event.kind == "drop":
            yield from self._dropped(event.collection)
        elif event.kind == "rename":
            yield from self._renamed(event)
        elif event.kind == "drop_database":
            for name in self.tracker.names():
                yield from self._dropped(name)
        elif event.kind == "invalidate":
            self._ended = True

    def _change(self, event: ChangeEvent) -> TableChange:
        name = event.collection
        before = None if event.kind == "c" else event.before
        if event.kind == "d":
            old = self._row(name, before or {"_id": (event.key or {})["_id"]})
            return TableChange(self._database, name, "d", KEY, old, None)
        if event.after is None:
            raise ConflictError(
                f"an update of {self._database}.{name} has no document after it: changeStreamPreAndPostImages was not enabled, "
                "or what it records expired before it was read (expireAfterSeconds). Enable it, have it kept for longer, and "
                "capture under a new name (--name), which begins with a new snapshot."
            )
        old_row = None if before is None else self._row(name, before)
        row = self._row(name, event.after)
        return TableChange(
            self._database, name, "c" if event.kind == "c" else "u", KEY, old_row, row
        )

    def _created(self, event: ChangeEvent) -> Iterator[UnitContent]:
        name = event.collection
        if self._refused(name):
            return
        self.tracker.created(name, event.uuid)
        yield self._definition(name)

    def _refused(self, name: str) -> bool:
        """Return whether what has a name now is none that is captured: a view, a time series.

        Raises:
            ConfigError: it is a collection that cannot be captured.
        """
        kind, found = self._session.listed(name)
        if found is not None:
            refuse_faults(list(collection_faults([found])), "a collection that was created")
        return found is None and bool(
            kind
        )  # what is gone again was a collection, for all that is known

    def _renamed(self, event: ChangeEvent) -> Iterator[UnitContent]:
        """Read a collection again that has another name, under that."""
        yield from self._dropped(event.collection)
        database, name = event.renamed_to
        if database != self._database or not self._source.wanted(name):
            return
        yield from self._dropped(name)  # in whose place it is, if there was one
        self._refused(name)
        self.tracker.restart(name, event.uuid)

    def _dropped(self, name: str) -> Iterator[UnitContent]:
        if self.tracker.state(name) is None:
            return
        self.tracker.drop(name)
        yield self._truncated(name)
        yield TableDefinition(self._database, name, (), (), dropped=True)

    def _truncated(self, name: str) -> TableChange:
        return TableChange(self._database, name, "t", ())

    def _definition(self, name: str) -> TableDefinition:
        return TableDefinition(self._database, name, _COLUMNS, KEY)
