"""A client that reads given partitions from given offsets: no group assigns them.

What it reads is in offset order within each partition. It reports the end of a partition when it
reaches it, with the offset, which is how offsets without a record (markers of transactions, what
compaction removed) are known to be passed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from confluent_kafka import KafkaError
from confluent_kafka import TopicPartition as KafkaTopicPartition

from millstream.client.kafka.cluster import Cluster
from millstream.client.kafka.errors import (
    OUT_OF_RANGE,
    UNAVAILABLE,
    to_millstream_error,
    translate_errors,
)
from millstream.errors import FencedError, OffsetOutOfRangeError
from millstream.log.batch import RECORD_BYTES_MAX
from millstream.log.reader import Isolation

if TYPE_CHECKING:
    from confluent_kafka import Message

_TAKEN_MAX = 5_000  # messages at once
# The fetch ahead is bounded, as much of it is beyond the end of a range.
FOLLOW_WAIT_MS = 100
RANGE_WAIT_MS = 5
_AHEAD_KIB = 16 << 10
_FETCH_BYTES = 4 << 20


class Fetcher:
    """Reads on from the assigned offsets. One thread at a time; :meth:`close` from any.

    ``wait_ms`` is for how long a fetch waits at the end for more, before the end is reported.
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
        places = [KafkaTopicPartition(topic, number, offset) for number, offset in offsets.items()]
        with self._lock, translate_errors(f"{topic!r} cannot be read"):
            self._check_open()
            self._client.assign(places)

    def drop(self, partition: int) -> None:
        """Read a partition no more."""
        with self._lock, translate_errors(f"{self._topic!r} cannot be read"):
            self._check_open()
            self._client.incremental_unassign([KafkaTopicPartition(self._topic, partition)])

    def poll(self, timeout_s: float) -> list[Message]:
        """Return the messages that have arrived; wait up to ``timeout_s`` for the first one.

        Messages are records, or ends of partitions (``is_end``).

        A closed stream yields nothing.

        Raises:
            OffsetOutOfRangeError: the next offset is gone or not yet there.
            MillstreamError: a partition cannot be read; see ``errors``.
        """
        with self._lock, translate_errors(f"{self._topic!r} cannot be read"):
            first = None if self._closed else self._client.poll(timeout_s)
            if first is None:
                return []
            found = [first, *self._client.consume(_TAKEN_MAX, 0)]
        return [message for message in found if self._is_for_reader(message)]

    def _is_for_reader(self, message: Message) -> bool:
        """Return whether a message is for the reader; errors that the client recovers from are not."""
        error = message.error()
        if error is None or error.code() == KafkaError._PARTITION_EOF:
            return True
        if error.code() in UNAVAILABLE:
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
        raise to_millstream_error(error, f"{self._topic}/{partition} cannot be read")

    def close(self) -> None:
        """Close the client; at the latest when a running poll returns."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._client.close()

    def _check_open(self) -> None:
        if self._closed:
            raise FencedError("this reader was closed; make another one")


def is_end(message: Message) -> bool:
    """Return whether a message reports the end of its partition."""
    return message.error() is not None


class IdleTimeout:
    """Measures for how long nothing has arrived."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._since_s = time.monotonic()

    def reset(self) -> None:
        """Start over."""
        self._since_s = time.monotonic()

    def check(self) -> None:
        """Check that it was not for too long.

        Raises:
            BrokerUnavailableError: nothing arrived within the address's timeout.
        """
        if time.monotonic() - self._since_s > self._cluster.timeout_s:
            raise self._cluster.unavailable_error()
