"""A source: a connector, a topic of a log, and the loop between them."""

from __future__ import annotations

import re
import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, get_args

from millstream.capture.retry_wait import RetryWait
from millstream.choices import choose
from millstream.client.log import EventLog
from millstream.client.open import connect
from millstream.connectors.connector import SourceBatch, SourceConnector, SourceReader
from millstream.connectors.source_writer import SourceWriter
from millstream.errors import ConfigError, RetriableError
from millstream.log.clocks import wall_clock_ms

SourceUntil = Literal["stopped", "caught-up"]
SourceState = Literal["streaming", "idle", "retrying"]
_READ_S = 0.2
_NAME = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9._-]{0,99}")


@dataclass(frozen=True)
class SourceStatus:
    """How far a source is. What it says is durable in the log.

    Attributes:
        state: "streaming" while there is something to read, "idle" when there was nothing more, "retrying" when what is
            outside, or the log, did not respond.
        records: Records in the topic, in all runs.
        dead: Dead letters, in all runs.
        lag_s: How long the last record had been there when it was durable; None where that is not known.
        problem: Why it is retrying.
        alarm: What somebody should do something about, such as a file that was passed over.
    """

    state: SourceState
    records: int = 0
    dead: int = 0
    lag_s: float | None = None
    problem: str = ""
    alarm: str = ""


@dataclass
class Source:
    """Reads something outside into a topic: made by :func:`source`.

    Guarantees: records are in the topic as the connector's ``guarantee`` says, in its order, whatever is killed. One
    source of a name writes at a time: a later one stops the earlier.
    """

    connector: SourceConnector
    topic: str
    log: Path | str
    name: str
    partitions: int = 1
    moved: bool = False
    clock_ms: Callable[[], int] = wall_clock_ms
    read_s: float = _READ_S
    token: str = field(default_factory=lambda: secrets.token_hex(8))
    _stop: threading.Event = field(default_factory=threading.Event)
    _has_begun: bool = False

    def stop(self) -> None:
        """Make :meth:`run` return when what it has begun is durable. From any thread."""
        self._stop.set()

    def run(
        self,
        *,
        until: SourceUntil = "stopped",
        on_status: Callable[[SourceStatus], None] = lambda _: None,
    ) -> SourceStatus:
        """Read, from where the last run stopped; the first time from the beginning.

        Args:
            until: ``"stopped"``: until :meth:`stop`. ``"caught-up"``: until there is nothing more to read.
            on_status: Called after each transaction of the log, while there is nothing to read, and before waiting to
                try again.

        Returns:
            The status at the end.

        Raises:
            ConfigError: the source cannot be read as it was asked for.
            ConflictError: what follows the positions in the log is gone, or they are of another source.
            ProducerFencedError: another source of this name has begun.
        """
        choose("until", until, get_args(SourceUntil))
        retry, status = RetryWait(self._stop), SourceStatus("streaming")
        while not self._stop.is_set():
            try:
                with connect(self.log) as log:
                    for status in self._statuses(log):
                        retry.succeeded()
                        on_status(status)
                        if status.state == "idle" and until == "caught-up":
                            return status
            except RetriableError as error:
                status = replace(status, state="retrying", problem=str(error))
                on_status(status)
                self._stop.wait(error.retry_after_s)
                retry.wait()
        return status

    def _statuses(self, log: EventLog) -> Iterator[SourceStatus]:
        """Write batch after batch, and yield the status after each."""
        writer = SourceWriter(
            log,
            self.name,
            self.topic,
            self.connector,
            self.partitions,
            self.moved,
            self.token,
            self._has_begun,
        )
        with writer:
            self._has_begun = True
            with closing(self.connector.open(dict(writer.positions))) as reader:
                while not self._stop.is_set():
                    batch = reader.read(self.read_s)
                    if batch is not None and not batch.is_empty:
                        writer.write(batch)
                        reader.stored(batch)
                    yield self._status(writer, reader, batch)

    def _status(
        self, writer: SourceWriter, reader: SourceReader, batch: SourceBatch | None
    ) -> SourceStatus:
        ready_ms = None if batch is None else batch.ready_ms
        lag_s = None if ready_ms is None else max(0.0, (self.clock_ms() - ready_ms) / 1000)
        state: SourceState = "idle" if batch is None else "streaming"
        counts = writer.counts
        return SourceStatus(state, counts.records, counts.dead, lag_s, "", reader.alarm)


def source(
    connector: SourceConnector | str,
    *,
    topic: str,
    to: Path | str = "./data",
    name: str | None = None,
    partitions: int = 1,
    moved: bool = False,
) -> Source:
    """Read something outside into a topic of a log. Call :meth:`Source.run` on the result.

    ::

        orders = ms.source("folder:///orders?pattern=*.csv", topic="orders", to="./data")
        orders.run(until="caught-up")

    Args:
        connector: What ``ms.folder``, ``ms.generate`` and the others return, one of your own, or a URL: ``docs/connectors.md``
            has those of all.
        topic: Where records go. It is made if it is not there.
        to: The folder of the log, or ``kafka://host:port``.
        name: Under which the positions are kept, in the topic ``<name>.positions``; by default the topic's name. Dead
            letters go to ``<name>.dead``.
        partitions: Of the topic, if it does not exist yet.
        moved: The same data has another address than in the last run.

    Raises:
        ConfigError: the URL is of nothing that can be read, or an option is not possible.
    """
    if isinstance(connector, str):
        from millstream.connectors.urls import connector_of  # noqa: PLC0415 - drivers are extras

        connector = connector_of(connector)
    name = topic if name is None else name
    for what, given in (("topic", topic), ("name", name)):
        if not isinstance(given, str) or not _NAME.fullmatch(given):
            raise ConfigError(
                f"{what} is {given!r}. Give up to 100 letters, digits and . _ -, the first a letter or digit."
            )
    if topic in (f"{name}.positions", f"{name}.dead"):
        raise ConfigError(
            f"topic is {topic!r}, where the source {name!r} keeps its own. Give another name."
        )
    if partitions < 1:
        raise ConfigError(f"partitions is {partitions}. Give 1 or more.")
    return Source(connector, topic, to, name, partitions, moved)
