"""Units of a source into the log: each whole, once, together with how far the source has been read.

A group of whole units, their records and the progress after the last are one transaction of the log. The log, and
not the database, knows how far the source has been read.

1. The producer opens with the transactional id of the capture. From here on an older capture of that name can
   commit nothing: its transaction is aborted. A crash leaves nothing.
2. Records are sent. A crash leaves a transaction that is open; the next producer aborts it, and no reader of
   committed records ever sees it.
3. The progress is sent, and the transaction committed. A crash before the commit leaves what 2 leaves; after
   it all is there, and the next run goes on behind it.

====================================  ===================================================================
stopped                               the next run
====================================  ===================================================================
before the commit                     reads the units again, from the progress before
after the commit                      goes on after them
an older capture wakes up             is fenced off, and stops: ProducerFencedError
====================================  ===================================================================

Source: Apache Kafka, KIP-98 (transactions), as KIP-618 uses them for source connectors.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from millstream.capture.envelope import (
    CapturedRecord,
    CapturedRecords,
    CaptureTopics,
    UnitRecords,
    to_json,
)
from millstream.capture.outbox import OutboxRouter
from millstream.capture.record_queues import RecordQueues
from millstream.capture.units import CaptureUnit, Progress
from millstream.client.log import EventLog
from millstream.client.producer import Producer
from millstream.errors import ConfigError, ConflictError, CorruptionError

PROGRESS_VERSION = 1
TRANSACTION_TIMEOUT = "15 minutes"  # as long as Kafka's brokers allow
_READ_BACK = 256  # offsets of the topic of progress that are read first, to find its last record
_TRUNCATE_KEY = b"{}"  # of which the last is kept: what is before it is before all others, too


@dataclass(frozen=True)
class StoredProgress:
    """The last progress in the log. ``columns`` are those of the tables, by name, as last defined.

    ``topics`` are those of tables, as they were read: each with the id that tells it from another one of its name,
    and with its table.
    """

    source: Progress
    position: str
    columns: dict[str, list[str]]
    snapshot_rows: int = 0
    changes: int = 0
    topics: dict[str, list[str]] = field(default_factory=dict)


@dataclass
class CaptureWriter:
    """Writes units into a log, and knows the progress there. For one thread; use it in ``with``.

    Args:
        log: The log. It stays open.
        topics: The names of the topics; they are created when they are needed.
        connector: The name of the kind of source, as ``source.connector`` has it.
        partitions: Of topics of tables that do not exist yet.
        cleanup: The same: "delete", "compact" or "compact,delete".
        outbox: Routes the events of an outbox, if there is one.
        cleanup_of: What "cleanup" a topic has now, which others may have made or altered.

    Raises:
        ConfigError: a topic is compacted, and the rows of its table have no key.
        ConflictError: the topic of progress was made by another kind of source, or by a later version; it, or a topic
            of a table, is no longer the one that was written.
    """

    log: EventLog
    topics: CaptureTopics
    connector: str
    clock_ms: Callable[[], int]
    partitions: int = 1
    cleanup: str = "delete"
    outbox: OutboxRouter | None = None
    cleanup_of: Callable[[str], str] | None = None
    progress: StoredProgress | None = None
    _known: dict[str, str] = field(default_factory=dict)
    _unkeyed: set[str] = field(default_factory=set)  # topics that take records without keys

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self._create(self.topics.progress, cleanup="compact")
            for topic in (
                self.topics.transaction,
                self.topics.schema,
                self.topics.heartbeat,
                self.topics.signal,
            ):
                self._create(topic)
            self._producer: Producer = stack.enter_context(
                self.log.producer(
                    transactional_id=f"capture.{self.topics.prefix}",
                    transaction_timeout=TRANSACTION_TIMEOUT,
                    linger_ms=0,
                    compression="lz4",
                )
            )
            self._queues = RecordQueues(self._producer, one_partition=self.partitions == 1)
            self._fence_older()
            self.progress = self._stored_progress()
            if self.progress is None:
                self._refuse_records_without_progress()
            else:
                self._check_topics(self.progress.topics)
            columns = {} if self.progress is None else dict(self.progress.columns)
            self._units = UnitRecords(
                self.topics, self.connector, self.clock_ms, columns, self.outbox
            )
            self._opened = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._opened.__exit__(kind, error, trace)

    def write(self, units: Iterable[CaptureUnit]) -> StoredProgress | None:
        """Write units in one transaction of the log; when this returns, they are durable.

        Each unit is read to its end before the next one is asked for. Memory does not grow with a unit.

        Returns:
            The progress after them: None where there was none to write.

        Raises:
            ProducerFencedError: a later capture of this name has begun.
            RetriableError: the log has no room, or its broker does not respond.
        """
        before, columns = self.progress, dict(self._units.columns)
        try:
            with self._producer.transaction():
                for unit in units:
                    self._write(unit)
                if self.progress is not before:
                    self._queues.add(self._progress_record())
                self._queues.wait()
        except BaseException:
            self.progress, self._units.columns = before, columns
            self._queues.clear()
            raise
        return self.progress

    def _write(self, unit: CaptureUnit) -> None:
        made = 0
        for record in self._units.records(unit):
            self._send(record)
            made += record.events
        known = self.progress
        rows, changes = (0, 0) if known is None else (known.snapshot_rows, known.changes)
        if unit.kind == "snapshot":
            rows += made
        else:
            changes += made
        position = unit.position or ("" if known is None else known.position)
        self.progress = StoredProgress(unit.progress, position, self._units.columns, rows, changes)

    def _send(self, record: CapturedRecord | CapturedRecords) -> None:
        if record.table and record.topic not in self._known:
            self._create(record.topic, partitions=self.partitions, cleanup=self.cleanup)
        if not isinstance(record, CapturedRecords) and record.truncate:
            self._truncate(record)
            return
        if isinstance(record, CapturedRecords):
            if record.keys is None:
                self._check_takes_unkeyed(record.topic)
            self._queues.add_many(record)
            return
        if record.routed:
            self._create(record.topic, partitions=self.partitions)
        elif record.table and record.key is None:
            self._check_takes_unkeyed(record.topic)
        self._queues.add(record)

    def _is_compacted(self, topic: str) -> bool:
        return "compact" in (self.cleanup if self.cleanup_of is None else self.cleanup_of(topic))

    def _check_takes_unkeyed(self, topic: str) -> None:
        if topic in self._unkeyed:
            return
        if self._is_compacted(topic):
            table = ".".join(self.topics.tables[topic])
            raise ConfigError(
                f"the topic {topic!r} is compacted (cleanup.policy), and the rows of {table} have no key, of which the "
                f"last record could be kept. Have the topic keep all: millstream topic alter {topic} --cleanup delete; "
                "or give the table a primary key, and capture it under another name."
            )
        self._unkeyed.add(topic)

    def _truncate(self, record: CapturedRecord) -> None:
        """Write it to each partition, which others may be read without: it is one change, with one number."""
        if self._is_compacted(record.topic):
            record = record._replace(key=_TRUNCATE_KEY)
        for partition in range(len(self.log.offsets(record.topic))):
            self._queues.add(record._replace(partition=partition))

    def _create(self, topic: str, *, partitions: int = 1, cleanup: str = "delete") -> None:
        if topic not in self._known:
            made = self.log.create_topic(
                topic, partitions=partitions, cleanup=cleanup, exist_ok=True
            )
            self._known[topic] = made.topic_id

    # ── progress ────────────────────────────────────────────────────────────────────────────

    def _fence_older(self) -> None:
        """Commit a transaction: what an older capture has open is aborted, and nothing of it follows."""
        now = self.clock_ms()
        with self._producer.transaction():
            self._producer.send(self.topics.heartbeat, to_json({"ts_ms": now}), timestamp_ms=now)
            self._producer.flush()

    def _progress_record(self) -> CapturedRecord:
        assert self.progress is not None
        value: dict[str, Any] = {
            "version": PROGRESS_VERSION,
            "connector": self.connector,
            "position": self.progress.position,
            "source": self.progress.source,
            "columns": self.progress.columns,
            "snapshot_rows": self.progress.snapshot_rows,
            "changes": self.progress.changes,
            "topics": {
                topic: [self._known[topic], *table]
                for topic, table in self.topics.tables.items()
                if topic in self._known
            },
        }
        key = to_json({"serverName": self.topics.prefix})
        return CapturedRecord(self.topics.progress, key, to_json(value), self.clock_ms())

    def _stored_progress(self) -> StoredProgress | None:
        """Read the last record of the topic of progress."""
        topic = self.topics.progress
        start, end = self.log.offsets(topic)[0]
        size = _READ_BACK
        while True:
            first = max(start, end - size)
            values = self.log.read(topic, 0, first, end, columns=("value",)).column("value")
            if len(values):
                return self._parsed(values[len(values) - 1].as_py())
            if first == start:
                return None
            size *= 8

    def _check_topics(self, topics: dict[str, list[str]]) -> None:
        """Take over which topics there are.

        Raises:
            ConflictError: one was deleted, or made anew: it lacks what was written to it.
        """
        there = self.log.topics()
        for topic, (topic_id, *table) in topics.items():
            if topic not in there or there[topic].topic_id != topic_id:
                raise ConflictError(
                    f"{topic!r} is not the topic that this capture wrote to: it was deleted, and lacks the rows of "
                    f"{'.'.join(table)} from before. Capture into another name, from a new snapshot."
                )
            self._known[topic] = topic_id
            self.topics.tables[topic] = (table[0], table[1])

    def _refuse_records_without_progress(self) -> None:
        """Return if this capture has not written anything yet.

        Raises:
            ConflictError: it has, and its progress is gone: a new snapshot would leave rows that were deleted since.
        """
        topic = self.topics.transaction
        start, end = self.log.offsets(topic)[0]
        for first in range(start, end, _READ_BACK):
            last = min(end, first + _READ_BACK)
            if len(self.log.read(topic, 0, first, last, columns=("value",)).column("value")):
                raise ConflictError(
                    f"{topic!r} has transactions, and their progress is gone: {self.topics.progress!r} was deleted, or "
                    f"another program writes the topics. Capture into another name, or delete all topics of "
                    f"{self.topics.prefix!r} first."
                )

    def _parsed(self, value: bytes | None) -> StoredProgress:
        try:
            found = json.loads(value or b"")
            version, connector = found["version"], found["connector"]
            progress = StoredProgress(
                found["source"],
                found["position"],
                found["columns"],
                found["snapshot_rows"],
                found["changes"],
                found["topics"],
            )
        except (ValueError, KeyError, TypeError) as error:
            raise CorruptionError(
                f"the last record of {self.topics.progress!r} is no progress of a capture: {error}. Capture "
                "into another name, from a new snapshot."
            ) from error
        if version != PROGRESS_VERSION:
            raise ConflictError(
                f"{self.topics.progress!r} was written by another version of Millstream (format {version}, "
                f"here {PROGRESS_VERSION}). Use that version, or capture into another name."
            )
        if connector != self.connector:
            raise ConflictError(
                f"{self.topics.progress!r} is of a source of kind {connector!r}, and this one is {self.connector!r}. "
                "Capture into another name."
            )
        return progress
