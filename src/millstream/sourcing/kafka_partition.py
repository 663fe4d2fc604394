"""A partition behind brokers: one writer at a time, fenced by its transactional id.

Kafka has no append that compares: whoever may write to a topic appends at its end. So a partition has one
writer. Each begins by registering a transactional id that belongs to the partition, which ends the open
transaction of the writer before it and fences it: from then on, its commits are refused. Then the new writer
reads the partition to its end, and nobody else can add to it. Every append is a transaction.

The fenced writer notices at its next append, not before; a command that it refuses until then, it
refuses on what it knew when it was fenced.

Clients send to the topic that has the name. So its id is looked up when the records of a transaction have arrived,
before the commit. An id is never used again: if it is right then, the records are in this topic.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress

from millstream.client.log import EventLog
from millstream.client.producer import Producer
from millstream.errors import FencedError, MillstreamError, ProducerFencedError
from millstream.log.encoding import SimpleRecord
from millstream.sourcing.partition_log import COLUMNS, Append, events_of
from millstream.sourcing.stored_event import RawEvent
from millstream.sourcing.stream_index import EventRun


class KafkaPartition:
    """One partition of a topic behind brokers; see ``PartitionLog``."""

    def __init__(self, log: EventLog, topic: str, partition: int, topic_id: str) -> None:
        self.topic, self.topic_id, self.partition = topic, topic_id, partition
        self._log = log
        self._reader = log.reader({topic: topic_id})
        self._producer: Producer | None = None  # who only reads fences nobody

    @property
    def exclusive(self) -> bool:
        return self._producer is not None

    def acquire(self) -> bool:
        if self._producer is not None:
            return False
        self._reader.topic_id(self.topic)  # who writes to the topic made anew is not fenced
        name = f"millstream-sourcing/{self.topic}/{self.partition}"
        self._producer = self._log.producer(transactional_id=name, linger_ms=0)
        return True

    def bounds(self) -> tuple[int, int]:
        return self._reader.bounds(self.topic, self.partition)

    def read(self, start: int, end: int, runs: Sequence[EventRun] = ()) -> Iterator[RawEvent]:
        batches = self._reader.read(self.topic, self.partition, start, end, columns=COLUMNS)
        return events_of(self.topic, self.partition, batches, runs)

    def append_all(self, appends: Sequence[Append]) -> list[int | MillstreamError]:
        """Make the append, of this partition; see ``partition_log``."""
        return [self._append(one.records) for one in appends]

    def _append(self, records: Sequence[SimpleRecord]) -> int:
        """Append in a transaction; nobody else can have moved the end."""
        producer = self._producer
        assert producer is not None, "acquired before it appends"
        try:
            with producer.transaction():
                sent = [
                    producer.send(
                        self.topic,
                        one.value,
                        key=one.key,
                        timestamp_ms=one.timestamp_ms,
                        partition=self.partition,
                    )
                    for one in records
                ]
                with suppress(MillstreamError):  # what came of them, the commit says
                    producer.flush()
                self._reader.topic_id(self.topic)
        except (KeyboardInterrupt, SystemExit):
            # Committed or not, readers may not see it yet. The next producer of this id waits for what became of it.
            self._producer = None
            with suppress(MillstreamError):  # whoever interrupts is to see that
                producer.close()
            raise
        except ProducerFencedError as error:
            raise FencedError(
                f"another store writes {self.topic}/{self.partition} now; behind brokers a partition has "
                "one writer. Close this store, and send its commands to that one"
            ) from error
        return sent[0].result().offset

    def close(self) -> None:
        if self._producer is not None:
            self._producer.close()
