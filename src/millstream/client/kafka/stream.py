"""A client that reads chosen partitions from chosen offsets: no group assigns them, none is moved.

What it reads is in offset order within each partition. It tells of the end of a partition when it
comes there, with the offset, which is how offsets without a record (markers of transactions, what
compaction removed) are known to be passed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from confluent_kafka import KafkaError
from confluent_kafka import TopicPartition as KafkaPlace

from millstream.client.kafka.cluster import Cluster
from millstream.client.kafka.failures import AWAY, OUT_OF_RANGE, as_ours, told
from millstream.errors import FencedError, OffsetOutOfRangeError
from millstream.log.batch import RECORD_BYTES_MAX
from millstream.log.reader import Isolation

if TYPE_CHECKING:
    from confluent_kafka import Message

_TAKEN_MAX = 5_000  # messages in one go
# What is fetched ahead of the reader is bounded, as much of it lies beyond what a range asks for.
FOLLOW_WAIT_MS = 100
RANGE_WAIT_MS = 5
_AHEAD_KIB = 16 << 10
_FETCH_BYTES = 4 << 20


class Stream:
    """Reads on from where it was told to. One thread at a time; :meth:`close` from any.

    ``wait_ms`` is for how long a fetch waits at the end for more, before the end is told.
    """

    def __init__(self, cluster: Cluster, isolation: Isolation, *, wait_ms: int) -> None:
        self.isolation: Isolation = isolation
        self._cluster = cluster
        self._lock = threading.Lock()
        self._closed = False
        self._client = cluster.consumer(
            {
                "group.id": "millstream-reads-without-a-group",
                "enable.auto.commit": False,
                "enable.auto.offset.store": False,
                "auto.offset.reset": "error",
                "enable.partition.eof": True,
                "isolation.level": isolation,
                "fetch.wait.max.ms": wait_ms,
                "fetch.message.max.bytes": _FETCH_BYTES,
                "fetch.max.bytes": RECORD_BYTES_MAX,
                "receive.message.max.bytes": 2 * RECORD_BYTES_MAX,
                "queued.max.messages.kbytes": _AHEAD_KIB,
                "fetch.queue.backoff.ms": 5,
                "fetch.error.backoff.ms": 50,
                "check.crcs": True,
            }
        )
        self._topic = ""

    def assign(self, topic: str, offsets: Mapping[int, int]) -> None:
        """Read these partitions, and no others, from these offsets on."""
        self._topic = topic
        places = [KafkaPlace(topic, number, offset) for number, offset in offsets.items()]
        with self._lock, told(f"{topic!r} cannot be read"):
            self._check_open()
            self._client.assign(places)

    def drop(self, partition: int) -> None:
        """Read a partition no more."""
        with self._lock, told(f"{self._topic!r} cannot be read"):
            self._check_open()
            self._client.incremental_unassign([KafkaPlace(self._topic, partition)])

    def take(self, timeout_s: float) -> list[Message]:
        """Return what is there, waiting for a first message up to ``timeout_s``.

        Messages are records, or ends of partitions (``is_end``).

        Nothing comes of a stream that was closed.

        Raises:
            OffsetOutOfRangeError: where it was to read from is gone or not yet there.
            MillstreamError: a partition cannot be read; see ``failures``.
        """
        with self._lock, told(f"{self._topic!r} cannot be read"):
            first = None if self._closed else self._client.poll(timeout_s)
            if first is None:
                return []
            found = [first, *self._client.consume(_TAKEN_MAX, 0)]
        return [message for message in found if self._passes(message)]

    def _passes(self, message: Message) -> bool:
        """Say whether a message is one for the reader; what the client mends by itself is not."""
        error = message.error()
        if error is None or error.code() == KafkaError._PARTITION_EOF:
            return True
        if error.code() in AWAY:
            return False
        partition = message.partition()
        if error.code() in OUT_OF_RANGE:
            low, end = self._cluster.offsets(self._topic, self.isolation)[partition]
            raise OffsetOutOfRangeError(
                f"{self._topic}/{partition} holds [{low}, {end}), and the records to be read next are "
                f"gone: they were removed by retention, or on request. Read on from {low}",
                start=low,
                end=end,
            )
        raise as_ours(error, f"{self._topic}/{partition} cannot be read")

    def close(self) -> None:
        """Give the client back; at the latest when what it waits for has come."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._client.close()

    def _check_open(self) -> None:
        if self._closed:
            raise FencedError("this reader was closed; make another one")


def is_end(message: Message) -> bool:
    """Say whether a message tells that its partition was read to its end."""
    return message.error() is not None


class Patience:
    """Measures for how long nothing came."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._since_s = time.monotonic()

    def came(self) -> None:
        """Begin anew."""
        self._since_s = time.monotonic()

    def check(self) -> None:
        """Make sure that it was not for too long.

        Raises:
            BrokerAwayError: nothing came within the address's time.
        """
        if time.monotonic() - self._since_s > self._cluster.timeout_s:
            raise self._cluster.away()
