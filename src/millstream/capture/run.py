"""A capture: a source, a log, and the loop between them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, get_args

from millstream.capture.envelope import CaptureTopics
from millstream.capture.group_reader import CaptureSource, GroupReader
from millstream.capture.units import CaptureUnit
from millstream.capture.writer import CaptureWriter
from millstream.choices import choose
from millstream.client.log import EventLog
from millstream.client.open import connect
from millstream.errors import ConfigError, RetriableError

CaptureUntil = Literal["stopped", "caught-up"]
CaptureState = Literal["snapshot", "streaming", "idle", "retrying"]
_TAKE_S = 0.2
_RETRY_FIRST_S, _RETRY_MAX_S = 0.5, 30.0


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
    """

    state: CaptureState
    snapshot_rows: int = 0
    changes: int = 0
    position: str = ""
    lag_s: float | None = None
    problem: str = ""


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
    clock_ms: Callable[[], int] = field(default=lambda: time.time_ns() // 1_000_000)
    _stop: threading.Event = field(default_factory=threading.Event)

    def check(self) -> None:
        """Return if the source can be captured.

        Raises:
            ConfigError: it cannot; the message has each reason, and the statement that mends it.
            RetriableError: it does not respond.
        """
        self.source.check()

    def stop(self) -> None:
        """Make :meth:`run` return when what it has begun is durable. From any thread."""
        self._stop.set()

    def run(
        self,
        *,
        until: CaptureUntil = "stopped",
        on_status: Callable[[CaptureStatus], None] = lambda _: None,
    ) -> CaptureStatus:
        """Capture, from where the last run stopped; the first time the tables' rows, then their changes.

        Args:
            until: ``"stopped"``: until :meth:`stop`. ``"caught-up"``: until the source has nothing more to read.
            on_status: Called after each transaction of the log, and before waiting to try again.

        Returns:
            The status at the end.

        Raises:
            ConfigError: the source cannot be captured.
            ConflictError: the source no longer has what follows the progress in the log.
            ProducerFencedError: another capture of this name has begun.
        """
        choose("until", until, get_args(CaptureUntil))
        wait_s = _RETRY_FIRST_S
        status = CaptureStatus("streaming")
        while not self._stop.is_set():
            try:
                with connect(self.log) as log:
                    for status in self._statuses(log):
                        wait_s = _RETRY_FIRST_S
                        on_status(status)
                        if status.state == "idle" and until == "caught-up":
                            return status
            except RetriableError as error:
                status = replace(status, state="retrying", problem=str(error))
                on_status(status)
                self._stop.wait(wait_s)
                wait_s = min(2 * wait_s, _RETRY_MAX_S)
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
        )
        with writer:
            known = writer.progress
            with GroupReader(self.source, None if known is None else known.source) as reader:
                while not self._stop.is_set():
                    if reader.wait(_TAKE_S):
                        last = _Last()
                        stored = writer.write(last.noted(reader.group()))
                        if stored is not None:
                            self.source.acknowledge(stored.source)
                        yield self._status(writer, last)

    def _status(self, writer: CaptureWriter, last: _Last) -> CaptureStatus:
        now = writer.progress
        assert now is not None
        state: CaptureState = "streaming"
        if last.kind == "snapshot":
            state = "snapshot"
        elif last.kind == "progress":
            state = "idle"
        lag = None if not last.timestamp_ms else (self.clock_ms() - last.timestamp_ms) / 1000
        return CaptureStatus(state, now.snapshot_rows, now.changes, now.position, lag)


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
) -> Capture:
    """Capture tables of a database, and all their changes, into a log. Call :meth:`Capture.run` on the result.

    ::

        orders = ms.capture("postgresql://reader@db.example/shop", tables="orders", to="./data")
        orders.run(until="caught-up")

    Args:
        url: The database: ``postgresql://user@host:5432/database``, ``mariadb://user@host:3306/database`` or
            ``sqlite:///path/to/file``. A password in a URL is seen by others on the machine: leave it to the
            variable MILLSTREAM_CAPTURE_PASSWORD.
        tables: Which tables, with ``*`` and ``?``: ``table``, or ``schema.table`` (of PostgreSQL) or
            ``database.table`` (of MariaDB). ``table`` alone is one of the schema ``public``, or of the database.
        to: The folder of the log, or ``kafka://host:port``.
        name: What topics begin with; by default the database's name. The changes of a table are in
            ``<name>.<schema or database>.<table>``, in Debezium's envelope: read it with
            ``app.table(…, envelope=ms.debezium(transactions="<name>.transaction"))``.
        partitions: Of topics of tables that do not exist yet.
        cleanup: How they forget: "delete" (they keep all), "compact" (the last record of each key).

    Raises:
        ConfigError: the URL is of no database that can be captured, or an option is not possible.
    """
    from millstream.capture.sources import source_of  # noqa: PLC0415 - drivers are extras

    found = source_of(url, (tables,) if isinstance(tables, str) else tuple(tables), name)
    if partitions < 1:
        raise ConfigError(f"partitions is {partitions}. Give 1 or more.")
    return Capture(found.source, to, found.name, found.connector, partitions, cleanup)
