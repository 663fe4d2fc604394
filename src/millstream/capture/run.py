"""A capture: a source, a log, and the loop between them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, get_args

from millstream.capture.envelope import CaptureTopics
from millstream.capture.group_reader import CaptureSource, GroupReader
from millstream.capture.lag import LagWatch, SourceLag
from millstream.capture.outbox import OutboxRouter
from millstream.capture.retry_wait import RetryWait
from millstream.capture.signals import RereadRequest, SignalReader, signal_of
from millstream.capture.units import CaptureUnit, Progress
from millstream.capture.writer import CaptureWriter
from millstream.choices import choose
from millstream.client.log import EventLog
from millstream.client.open import connect, open_reader
from millstream.errors import ConfigError, ConflictError, MillstreamError, RetriableError

CaptureUntil = Literal["stopped", "caught-up"]
WalPolicy = Literal["keep", "release"]
CaptureState = Literal["snapshot", "streaming", "idle", "retrying"]
_TAKE_S = 0.2


@dataclass(frozen=True)
class CaptureStatus:
    """How far a capture is. What it says is durable in the log.

    Attributes:
        state: "snapshot" while rows of tables are read, "streaming" while changes are, "idle" when the source had
            nothing more, "retrying" when it, or the log, did not respond.
        snapshot_rows: Rows of snapshots, in all runs.
        changes: Changes of rows, in all runs.
        position: The last unit's position in the source.
        lag_s: How old the last change was when it was durable; None before the first.
        problem: Why it is retrying.
        bytes_behind: Of the database's own log, how much is not in ours yet; None where that is not known.
        bytes_kept: How much of it the server keeps for this capture (PostgreSQL).
        rows_expected: How many rows the tables have, about, that are not read to their end.
        alarm: What somebody should do something about, such as that the server keeps too much.
    """

    state: CaptureState
    snapshot_rows: int = 0
    changes: int = 0
    position: str = ""
    lag_s: float | None = None
    problem: str = ""
    bytes_behind: int | None = None
    bytes_kept: int | None = None
    rows_expected: int | None = None
    alarm: str = ""


@dataclass
class Capture:
    """Captures the tables of a database into a log: made by :func:`capture`.

    Guarantees: every committed transaction is in the log once and whole, in the order of the source, whatever is
    killed. One capture of a name writes at a time: a later one stops the earlier.
    """

    source: CaptureSource
    log: Path | str
    name: str
    connector: str
    partitions: int = 1
    cleanup: str = "delete"
    database: str = ""
    wal_policy: WalPolicy = "keep"
    outbox: OutboxRouter | None = None
    clock_ms: Callable[[], int] = field(default=lambda: time.time_ns() // 1_000_000)
    lag_every_s: float = 5.0
    _stop: threading.Event = field(default_factory=threading.Event)
    _known: Progress | None = None  # the last that is durable
    _lag: SourceLag = field(default_factory=SourceLag)
    _asked: int = 0  # behind the last signal that the source was given
    _released: ConflictError | None = None
    _release_ended: threading.Event = field(default_factory=threading.Event)
    _on_alarm: Callable[[str], None] = lambda _: None

    @property
    def topics(self) -> CaptureTopics:
        """The names of the topics that it writes."""
        return CaptureTopics(self.name)

    @property
    def source_lag(self) -> SourceLag:
        """What was measured last of the database, while it runs. From any thread."""
        return self._lag

    def topic(self, table: str) -> str:
        """Return the topic of a table: of ``schema.table``, or of ``table`` as the capture's ``tables`` names it."""
        return self.topics.of_table(*self.split(table))

    def split(self, table: str) -> tuple[str, str]:
        """Return the schema (of MariaDB: the database) and the name of a table."""
        schema, dot, name = table.partition(".")
        return (schema, name) if dot else (self.database, table)

    def check(self) -> None:
        """Return if the source can be captured, and each table can have a topic of its own.

        Raises:
            ConfigError: it cannot; the message has each reason, and the statement that mends it.
            RetriableError: it does not respond.
        """
        topics = CaptureTopics(self.name)
        clashes = [fault for table in self.source.check() if (fault := topics.clash(*table))]
        if clashes:
            listed = "\n".join(f"  {number}. {fault}" for number, fault in enumerate(clashes, 1))
            raise ConfigError(f"the tables cannot all have topics of their own:\n{listed}")

    def reread(self, *tables: str, where: str | None = None) -> None:
        """Ask for tables to be read again: a repair of what their topics have.

        Whole tables are emptied in the log (``op`` ``t``), and read; with ``where`` the rows for which it is true are
        read, and none is deleted. It is done in chunks among the changes, without a lock. The capture that runs, in
        whichever process, follows; else the next one that does.

        Args:
            where: An expression of the database's SQL over the columns of the tables.

        Raises:
            ConfigError: a table is not captured, or the expression cannot be asked of it.
        """
        for table in tables:
            self.source.check_reread(RereadRequest(*self.split(table), where or "", 0))
        named = [".".join(self.split(table)) for table in tables]
        with connect(self.log) as log:
            log.create_topic(self.topics.signal, partitions=1, exist_ok=True)
            with log.producer() as producer:
                producer.send(self.topics.signal, signal_of(named, where), key=self.name)

    def remove(self) -> list[str]:
        """Take out of the database what captures of this name have installed; return what it was. The log stays.

        Of PostgreSQL the replication slots and the publication, of SQLite the triggers and tables; in MariaDB nothing is
        installed. A capture that was removed does not go on: capture again under another name.

        Raises:
            RetriableError: a capture of this name runs, or the database does not respond.
        """
        return self.source.remove()

    def stop(self) -> None:
        """Make :meth:`run` return when what it has begun is durable. From any thread."""
        self._stop.set()

    def run(
        self,
        *,
        until: CaptureUntil = "stopped",
        on_status: Callable[[CaptureStatus], None] = lambda _: None,
        on_alarm: Callable[[str], None] = lambda _: None,
    ) -> CaptureStatus:
        """Capture, from where the last run stopped; the first time the tables' rows, then their changes.

        Args:
            until: ``"stopped"``: until :meth:`stop`. ``"caught-up"``: until the source has nothing more to read.
            on_status: Called after each transaction of the log, and before waiting to try again.
            on_alarm: Called when the database keeps too much for the capture, or may soon remove what is not captured;
                from another thread, also while the log accepts nothing.

        Returns:
            The status at the end.

        Raises:
            ConfigError: the source cannot be captured.
            ConflictError: the source no longer has what follows the progress in the log, or it was released.
            ProducerFencedError: another capture of this name has begun.
        """
        choose("until", until, get_args(CaptureUntil))
        self._on_alarm = on_alarm
        with LagWatch(self._measure, self._measured, self.lag_every_s):
            return self._run(until, on_status)

    def _run(
        self, until: CaptureUntil, on_status: Callable[[CaptureStatus], None]
    ) -> CaptureStatus:
        retry = RetryWait(self._stop)
        status = CaptureStatus("streaming")
        while not self._stop.is_set():
            try:
                with connect(self.log) as log:
                    for status in self._statuses(log):
                        retry.succeeded()
                        on_status(status)
                        if status.state == "idle" and until == "caught-up":
                            return status
            except EOFError:  # the source was closed, to be released
                self._release_ended.wait()
                self._refuse_released()
            except RetriableError as error:
                self._refuse_released()
                status = replace(status, state="retrying", problem=str(error))
                on_status(status)
                retry.wait()
        return status

    def _statuses(self, log: EventLog) -> Iterator[CaptureStatus]:
        """Write group after group, and yield the status after each."""
        writer = CaptureWriter(
            log,
            CaptureTopics(self.name),
            self.connector,
            self.clock_ms,
            self.partitions,
            self.cleanup,
            self.outbox,
            self._cleanup_of,
        )
        with writer:
            known = writer.progress
            self._known = None if known is None else known.source
            if known is None:
                self.check()
            self._asked = 0
            signals = SignalReader(
                log,
                self.topics.signal,
                self.name,
                0 if known is None else known.source.get("signals", 0),
                self.split,
                time.monotonic,
            )
            with GroupReader(self.source, None if known is None else known.source) as reader:
                while not self._stop.is_set():
                    self._refuse_released()
                    for asked in signals.requests():
                        self._follow(asked)
                    if reader.wait(_TAKE_S):
                        last = _Last()
                        stored = writer.write(last.noted(reader.group()))
                        if stored is not None:
                            self._known = stored.source
                            self.source.acknowledge(stored.source)
                        yield self._status(writer, last)

    def _cleanup_of(self, topic: str) -> str:
        with closing(open_reader(self.log)) as reader:
            return reader.settings(topic)["cleanup.policy"]

    def _follow(self, asked: list[RereadRequest] | ConfigError) -> None:
        """Have the source follow a signal; what of it cannot be followed is told, and passed over."""
        if isinstance(asked, ConfigError):
            self._on_alarm(str(asked))
            return
        possible = [request for request in asked if self._is_possible(request)]
        for place, request in enumerate(possible, 1):
            self._asked = request.next_offset
            self.source.reread(replace(request, last=place == len(possible)))

    def _is_possible(self, request: RereadRequest) -> bool:
        try:
            self.source.check_reread(request)
        except ConfigError as error:
            self._on_alarm(str(error))
            return False
        return True

    def _status(self, writer: CaptureWriter, last: _Last) -> CaptureStatus:
        now = writer.progress
        assert now is not None
        state: CaptureState = "streaming"
        if last.kind == "snapshot":
            state = "snapshot"
        elif last.kind == "progress" and now.source.get("signals", 0) >= self._asked:
            state = "idle"
        lag = None if not last.timestamp_ms else (self.clock_ms() - last.timestamp_ms) / 1000
        measured = self._lag
        return CaptureStatus(
            state,
            now.snapshot_rows,
            now.changes,
            now.position,
            lag,
            "",
            measured.bytes_behind,
            measured.bytes_kept,
            measured.rows_expected,
            measured.alarm,
        )

    # ── in the thread that measures ─────────────────────────────────────────────────────────

    def _measure(self) -> SourceLag:
        known = self._known
        return SourceLag() if known is None else self.source.measure(known)

    def _measured(self, lag: SourceLag) -> None:
        before, self._lag = self._lag, lag
        if lag.alarm and not before.alarm:
            self._on_alarm(lag.alarm)
        if not lag.exceeded or self.wal_policy == "keep" or self._released is not None:
            return
        assert self._known is not None
        # 1. The slot is dropped: the server may remove its WAL. A crash leaves a capture whose next run is refused,
        #    because its slot is gone. 2. This run ends.
        self._release_ended.clear()
        try:
            self.source.release(self._known)
        except MillstreamError:
            self._release_ended.set()
            raise
        self._released = ConflictError(
            f"the server kept {lag.bytes_kept:,} bytes for the capture {self.name!r}, more than was allowed, and "
            "wal_policy is release: what it kept was given up, and changes are missing. Capture under a new name (--name), "
            "which begins with a new snapshot."
        )
        self._release_ended.set()

    def _refuse_released(self) -> None:
        if self._released is not None:
            raise self._released


@dataclass
class _Last:
    """The last unit of a group, and the time of its last transaction."""

    kind: str = ""
    timestamp_ms: int = 0

    def noted(self, units: Iterator[CaptureUnit]) -> Iterator[CaptureUnit]:
        for unit in units:
            self.kind = unit.kind
            self.timestamp_ms = unit.timestamp_ms or self.timestamp_ms
            yield unit


def capture(
    url: str,
    *,
    tables: str | Sequence[str] = "*",
    to: Path | str = "./data",
    name: str | None = None,
    partitions: int = 1,
    cleanup: str = "delete",
    wal_bytes_max: int | None = None,
    wal_policy: WalPolicy = "keep",
    outbox: str | None = None,
    outbox_messages: bool = False,
) -> Capture:
    """Capture tables of a database, and all their changes, into a log. Call :meth:`Capture.run` on the result.

    ::

        orders = ms.capture("postgresql://reader@db.example/shop", tables="orders", to="./data")
        orders.run(until="caught-up")

    Args:
        url: The database: ``postgresql://user@host:5432/database``, ``mariadb://user@host:3306/database`` or ``mysql://…``,
            ``mongodb://user@host:27017/database`` or ``sqlite:///path/to/file``. A password in a URL is seen by others on the machine: leave it to the
            variable MILLSTREAM_CAPTURE_PASSWORD.
        tables: Which tables, with ``*`` and ``?``: ``table``, or ``schema.table`` (of PostgreSQL) or
            ``database.table`` (of MariaDB). ``table`` alone is one of the schema ``public``, or of the database. Of MongoDB
            they are collections of the database.
        to: The folder of the log, or ``kafka://host:port``.
        name: What topics begin with; by default the database's name. The changes of a table are in
            ``<name>.<schema or database>.<table>``, in Debezium's envelope. A pipeline reads it as a table:
            ``app.table("orders", …, key="id", capture=orders)``.
        partitions: Of topics of tables that do not exist yet.
        cleanup: How they forget: "delete" (they keep all), "compact" (the last record of each key).
        wal_bytes_max: How much WAL a PostgreSQL server may keep for this capture, in bytes. There is an alarm above a
            quarter of it, and above a half a snapshot pauses for the changes of meanwhile.
        wal_policy: What happens beyond it. "keep": the alarm stays, and no change is lost. "release": the server's disk
            comes first; the slot is dropped, the run ends with an error, and a capture has to begin anew.
        outbox: A table of events: its rows are no changes of a table, but records of ``outbox.event.<aggregatetype>``, as
            Debezium's outbox event router makes them. It is captured besides ``tables``.
        outbox_messages: Whether what an application emits with ``pg_logical_emit_message(true,
            'outbox:<aggregatetype>:<aggregateid>', …)`` is such an event, too (PostgreSQL 14 or later).

    Raises:
        ConfigError: the URL is of no database that can be captured, or an option is not possible.
    """
    from millstream.capture.sources import source_of  # noqa: PLC0415 - drivers are extras

    choose("wal_policy", wal_policy, get_args(WalPolicy))
    if wal_policy == "release" and wal_bytes_max is None:
        raise ConfigError(
            "wal_policy is 'release', and wal_bytes_max is not given. Say how much WAL may be kept, in bytes."
        )
    patterns = (tables,) if isinstance(tables, str) else tuple(tables)
    if outbox is not None and (not outbox or "*" in outbox or "?" in outbox):
        raise ConfigError(
            f"outbox is {outbox!r}. Give the name of one table, such as public.outbox."
        )
    if outbox is not None:
        patterns = (*patterns, outbox)
    options = {"wal_bytes_max": wal_bytes_max, "messages": outbox_messages or None}
    found = source_of(
        url, patterns, name, options={k: v for k, v in options.items() if v is not None}
    )
    if partitions < 1:
        raise ConfigError(f"partitions is {partitions}. Give 1 or more.")
    router = None
    if outbox is not None or outbox_messages:
        router = OutboxRouter(None)
    made = Capture(
        found.source,
        to,
        found.name,
        found.connector,
        partitions,
        cleanup,
        found.database,
        wal_policy,
        router,
    )
    if router is not None and outbox is not None:
        router.table = made.split(outbox)
    return made
