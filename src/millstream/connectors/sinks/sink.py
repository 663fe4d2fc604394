"""``ms.sink``: the records of a topic, written to something outside, from where the last run stopped."""

from __future__ import annotations

import math
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, get_args

from millstream.capture.retry_wait import RetryWait
from millstream.choices import choose
from millstream.client.default_log import default_log
from millstream.client.log import EventLog
from millstream.client.open import connect
from millstream.client.start_position import LogStart, StartPosition
from millstream.connectors.sinks.connector import (
    RecordsToWrite,
    SinkConnector,
    SinkOpening,
    SinkWriter,
)
from millstream.connectors.sinks.progress import SinkProgress
from millstream.connectors.sinks.record_batches import ReadRecords, RecordBatches
from millstream.errors import ConfigError, ConflictError, RetriableError, UnknownTopicError
from millstream.log.clocks import wall_clock_ms

SinkUntil = Literal["stopped", "caught-up"]
SinkState = Literal["writing", "idle", "retrying"]
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", re.ASCII)
_IDLE_S = 1.0


@dataclass(frozen=True)
class SinkStatus:
    """How far a sink is.

    Attributes:
        state: "writing", "idle" (there is nothing to write), "retrying" (``problem`` says why).
        records, dead: How many were written, and how many became dead letters, in all runs.
        behind: How many offsets of the topic are not written yet.
        lag_s: How old the newest record of the last batch was when it was written; None before the first.
        problem: Why something is tried again, or empty.
        alarm: What somebody should do something about, or empty.
    """

    state: SinkState
    records: int = 0
    dead: int = 0
    behind: int = 0
    lag_s: float | None = None
    problem: str = ""
    alarm: str = ""


@dataclass
class SinkRun:
    """A topic that is written to something outside; made by :func:`sink`."""

    connector: SinkConnector
    topic: str
    log: Path | str
    name: str
    start: LogStart = field(default_factory=LogStart)
    clock_ms: Callable[[], int] = wall_clock_ms
    token: str = field(default_factory=lambda: secrets.token_hex(8))
    _stop: threading.Event = field(default_factory=threading.Event)
    _has_begun: bool = False

    def stop(self) -> None:
        """Make :meth:`run` return when the batch that it writes is written. From any thread."""
        self._stop.set()

    def run(
        self,
        *,
        until: SinkUntil = "stopped",
        on_status: Callable[[SinkStatus], None] = lambda _: None,
    ) -> SinkStatus:
        """Write, from where the last run stopped.

        Args:
            until: ``"stopped"``: until :meth:`stop`. ``"caught-up"``: until there is nothing more to write.
            on_status: Called after each batch, while there is nothing to write, and before waiting to try again.

        Returns:
            The status at the end.

        Raises:
            ConfigError: what is outside cannot be written to as it was asked for.
            ConflictError: records were removed before they were written; or the positions are of another sink.
            FencedError: another sink of this name has begun.
        """
        choose("until", until, get_args(SinkUntil))
        retry, status = RetryWait(self._stop), SinkStatus("writing")

        def begin(found: SinkStatus) -> None:
            nonlocal status
            status = replace(found, lag_s=status.lag_s, alarm=status.alarm)

        while not self._stop.is_set():
            try:
                with connect(self.log) as log:
                    for status in self._statuses(log, begin, until):
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

    def _statuses(
        self, log: EventLog, begin: Callable[[SinkStatus], None], until: SinkUntil
    ) -> Iterator[SinkStatus]:
        """Write batch after batch, and yield the status after each; ``begin`` gets the one before the first."""
        info = log.topics().get(self.topic)
        if info is None:
            raise UnknownTopicError(
                f"there is no topic {self.topic!r} in {self.log}. Correct the name, or start what writes it first."
            )
        given = self.connector
        batches = RecordBatches(log, self.topic, info.topic_id, given.records_max, given.bytes_max)

        def first() -> dict[int, int]:
            if (
                self.start == LogStart()
            ):  # what retention removes before the first batch is not missed
                return {}
            reader = log.reader({self.topic: info.topic_id})
            return dict(enumerate(self.start.offsets_in(reader, self.topic, "start")))

        progress = SinkProgress(
            log, self.name, self.topic, info.topic_id, given, self.token, first, self._has_begun
        )
        with progress:
            self._has_begun = True
            # What is to come is known, also where what is outside is away and no batch is written.
            begin(_status("writing", batches, progress))
            opening = SinkOpening(self.name, self.topic, progress.state.life, self.token)
            with closing(given.open(opening)) as writer:
                alarm = progress.reconcile(writer.last) if given.guarantee == "transaction" else ""
                # One that is to be caught up waits for nothing.
                every_s = getattr(given, "every_s", 0.0) if until == "stopped" else 0.0
                yield from _Writing(self, batches, progress, writer, alarm, every_s).statuses()

    def wait(self, timeout_s: float) -> None:
        """Return after a time, or when :meth:`stop` is called."""
        self._stop.wait(timeout_s)

    @property
    def is_stopped(self) -> bool:
        """Whether :meth:`stop` was called."""
        return self._stop.is_set()


@dataclass
class _Writing:
    """One run, with all that it needs open."""

    run: SinkRun
    batches: RecordBatches
    progress: SinkProgress
    writer: SinkWriter
    alarm: str
    every_s: float
    lag_s: float | None = None
    _written_s: float = -math.inf

    def statuses(self) -> Iterator[SinkStatus]:
        bounds = self.progress.pending()
        pending = None if bounds is None else self.batches.between(*bounds)
        positions = dict(self.progress.state.positions)
        if bounds is not None:
            positions |= bounds[1]
        while not self.run.is_stopped:
            if pending is None:
                self._note_new_partitions(positions)
                early_s = self._written_s + self.every_s - time.monotonic()
                pending = None if early_s > 0 else self._next(positions)
                if pending is None:
                    yield self._status("idle", positions)
                    self._wait(positions, early_s)
                    continue
                self.progress.begin(pending)
            pending = self._write(pending, positions)
            yield self._status("writing", positions)

    def _wait(self, positions: dict[int, int], early_s: float) -> None:
        """Wait for more records, or until a batch is no longer early."""
        if early_s > 0:
            self.run.wait(min(early_s, _IDLE_S))
        else:
            self.batches.wait(positions, _IDLE_S)

    def _note_new_partitions(self, positions: dict[int, int]) -> None:
        """Note where partitions begin that were not known: what is removed from there on is missed, and not passed over."""
        bounds = enumerate(self.batches.bounds())
        new = {partition: start for partition, (start, _) in bounds if partition not in positions}
        if new:
            self.progress.add_partitions(new)
            positions |= new

    def _next(self, positions: dict[int, int]) -> ReadRecords | None:
        """Read on; None where there is no record now."""
        found = self.batches.next(positions)
        positions |= (
            found.ends
        )  # offsets without a record, as of aborted transactions, are read once
        return found if found.count else None

    def _write(self, read: ReadRecords, positions: dict[int, int]) -> ReadRecords | None:
        """Write a batch; return the one that follows, whose bounds are noted together with it."""
        state = self.progress.state
        batch = RecordsToWrite(
            f"{self.run.name}-{state.life}-{state.number}",
            state.number,
            read.records,
            self.progress.after(read),
        )
        refused = [*read.refused, *self.writer.write(batch)]
        self._written_s = time.monotonic()
        last_ms = read.last_ms
        if last_ms is not None:
            self.lag_s = max(0.0, (self.run.clock_ms() - last_ms) / 1000)
        following = None if self.run.is_stopped or self.every_s else self._next(positions)
        self.progress.finish(read, refused, following)
        return following

    def _status(self, state: SinkState, positions: dict[int, int]) -> SinkStatus:
        found = _status(state, self.batches, self.progress, positions)
        return replace(found, lag_s=self.lag_s, alarm=self.alarm)


def _status(
    state: SinkState,
    batches: RecordBatches,
    progress: SinkProgress,
    positions: Mapping[int, int] | None = None,
) -> SinkStatus:
    """Return the status of a sink that has read up to positions, by default those that the log has noted."""
    read = progress.state.positions if positions is None else positions
    behind = sum(
        end - read.get(partition, start) for partition, (start, end) in enumerate(batches.bounds())
    )
    return SinkStatus(state, progress.state.records, progress.state.dead, behind)


def sink(
    connector: SinkConnector | str,
    *,
    topic: str,
    log: Path | str | None = None,
    name: str | None = None,
    start: StartPosition | LogStart = "earliest",
) -> SinkRun:
    """Write the records of a topic to something outside. Call :meth:`SinkRun.run` on the result.

    ::

        orders = ms.sink(ms.to_http("https://example.com/orders"), topic="orders", log="./data")
        orders.run(until="caught-up")

    Args:
        connector: What ``ms.to_http`` and the others return, one of your own, or a URL: ``docs/connectors.md``
            has those of all.
        topic: Whose values are JSON objects: what ``.to(topic)`` writes, a source, or a producer.
        log: The folder of the log, or ``kafka://host:port``; by default that of MILLSTREAM_LOG, or ``./data``.
        name: Under which it is kept how far the topic was written, in the topic ``<name>.positions``; by default that of the
            topic and the connector's kind. Dead letters go to ``<name>.dead``.
        start: Where a new sink begins: "earliest" is the first record of the topic, "latest" the next one; or a datetime
            or its ISO text, or offsets by partition. See docs/guide/positions.md.

    Raises:
        ConfigError: the URL is of nothing that can be written to, or an option is not possible.
    """
    if isinstance(connector, str):
        from millstream.connectors.sinks.urls import sink_connector_of  # noqa: PLC0415 - drivers are extras

        connector = sink_connector_of(connector, {})
    name = f"{topic}.{connector.kind}" if name is None else name
    for what, given in (("topic", topic), ("name", name)):
        if not isinstance(given, str) or not _NAME.fullmatch(given):
            raise ConfigError(
                f"{what} is {given!r}. Give up to 100 letters, digits and . _ -, the first a letter or digit."
            )
    if topic in (f"{name}.positions", f"{name}.dead"):
        raise ConflictError(
            f"topic is {topic!r}, where the sink {name!r} keeps its own. Give another name."
        )
    begin = start if isinstance(start, LogStart) else LogStart.of_topic(topic, start, "start")
    return SinkRun(connector, topic, default_log() if log is None else log, name, begin)
