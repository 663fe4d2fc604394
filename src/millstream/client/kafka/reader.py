"""The reader of a log behind brokers: topics, offsets, and ranges of records as columns.

It has the calls of the folder's ``LogReader``, so any reader of a log reads both. The client delivers records
one by one, which makes it slower than reading files.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from millstream.client.address import kafka_address
from millstream.client.kafka.cluster import Cluster
from millstream.client.kafka.fetcher import RANGE_WAIT_MS, Fetcher, IdleTimeout, is_end
from millstream.errors import ConfigError, OffsetOutOfRangeError
from millstream.log.decoding import COLUMNS, SCHEMA, select_schema
from millstream.log.reader import Isolation, check_isolation, check_range
from millstream.log.removed_tombstones import Removals
from millstream.log.topics import check_topic_id
from millstream.record import TopicInfo, TopicPartition

if TYPE_CHECKING:
    from confluent_kafka import Message

    from millstream.log.archive import ArchiveFile

_POLL_S = 0.2
_POLL_AGAIN_S = 0.05
_readers: dict[tuple[int, str, Isolation], KafkaReader] = {}
_readers_lock = threading.Lock()


class KafkaReader:
    """Reads the topics behind an address; see ``LogReader`` for what each call promises.

    Can be pickled: the copy connects when it is first used. Thread-safe.
    """

    def __init__(
        self,
        address: str,
        *,
        isolation: Isolation = "read_committed",
        topic_ids: Mapping[str, str] | None = None,
        cluster: Cluster | None = None,
    ) -> None:
        self.address = address
        self.isolation: Isolation = check_isolation(isolation)
        self._topic_ids = dict(topic_ids or {})
        self._given = cluster
        self._streams: list[Fetcher] = []  # not in use
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {
            "address": self.address,
            "isolation": self.isolation,
            "topic_ids": self._topic_ids,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    @property
    def cluster(self) -> Cluster:
        """The clients and metadata of the brokers; connects when it is first used."""
        with self._lock:
            if self._given is None:
                self._given = Cluster(kafka_address(self.address))
            return self._given

    def close(self) -> None:
        """Close the clients."""
        with self._lock:
            streams, self._streams[:] = list(self._streams), []
        for stream in streams:
            stream.close()

    def pinned(self, topic_ids: Mapping[str, str]) -> KafkaReader:
        """Return a reader for positions in the topics with these ids, by name; it shares our clients.

        Clients fetch records by the topic's name, so the id is checked after a fetch. An id is never used
        twice: if it is the right one then, the records are of this topic.
        """
        pinned = KafkaReader(
            self.address,
            isolation=self.isolation,
            topic_ids={**self._topic_ids, **topic_ids},
            cluster=self.cluster,
        )
        pinned._streams, pinned._lock = self._streams, self._lock
        return pinned

    # -- what there is ------------------------------------------------------------------------

    def check_topic(self, topic: str) -> None:
        """Check that a topic is the one that this reader has positions in.

        Raises:
            TopicRecreatedError: it was deleted and created again.
            UnknownTopicError: it was deleted.
        """
        if topic in self._topic_ids:
            check_topic_id(topic, self._topic_ids[topic], self.cluster.topic(topic).topic_id)

    def topic_id(self, topic: str) -> str:
        self.check_topic(topic)
        return self._topic_ids.get(topic) or self.cluster.topic(topic).topic_id

    def topics(self) -> dict[str, TopicInfo]:
        return self.cluster.topics()

    def offsets(self, topic: str) -> list[tuple[int, int]]:
        return self.cluster.offsets(topic, self.isolation, self._topic_ids.get(topic))

    def bounds(self, topic: str, partition: int) -> tuple[int, int]:
        self.cluster.check_partition(topic, partition)
        return self.offsets(topic)[partition]

    def end_offset(self, topic: str, partition: int) -> int:
        return self.bounds(topic, partition)[1]

    def removed_tombstones(self, topic: str) -> Removals:  # noqa: ARG002 - the reader's call
        return {}  # brokers do not tell: docs/joins.md

    def settings(self, topic: str) -> dict[str, str]:
        return self.cluster.settings(topic)

    def offset_for_time(self, topic: str, partition: int, timestamp_ms: int) -> int:
        return self.cluster.offset_for_time(topic, partition, timestamp_ms, self.isolation)

    def wait(self, topic: str, seen: Sequence[int], timeout_s: float) -> bool:
        """Return True once an end is past ``seen`` or a partition was added, False after ``timeout_s``.

        Polls; a consumer, which waits for records, is woken by them instead.
        """
        deadline_s = time.monotonic() + timeout_s
        while True:
            ends = [end for _, end in self.offsets(topic)]
            if len(ends) > len(seen) or any(
                end > known for end, known in zip(ends, seen, strict=True)
            ):
                return True
            if time.monotonic() >= deadline_s:
                return False
            time.sleep(_POLL_AGAIN_S)

    def archives(self, topic: str, partition: int, start: int, end: int) -> Iterator[ArchiveFile]:
        """Yield none: brokers keep no archives beside their segments."""
        del topic, partition, start, end
        return iter(())

    # -- reading ------------------------------------------------------------------------------

    def read(
        self,
        topic: str,
        partition: int,
        start: int,
        end: int,
        *,
        columns: Sequence[str] = COLUMNS,
        bytes_max: int = 16 << 20,
        tally: Callable[[int], None] | None = None,
    ) -> Iterator[pa.RecordBatch]:
        """Yield the records with offsets in [start, end), in offset order.

        Args:
            bytes_max: Soft limit in bytes of keys and values for one Arrow record batch.
            tally: Called with the number of records yielded: clients of brokers do not see the headers of
                batches, so there is no other number to compare with.

        Raises:
            OffsetOutOfRangeError: some of [start, end) is gone or not committed.
            BrokerUnavailableError: nothing arrived for too long.
            UnknownTopicError, ConfigError: there is no such topic, partition or column.
            TopicRecreatedError: see :meth:`pinned`.
        """
        batches = self._read(topic, partition, start, end, columns=columns, bytes_max=bytes_max)
        while True:
            try:
                batch = next(batches, None)
            except (OffsetOutOfRangeError, ConfigError):
                self.check_topic(topic)  # a recreated topic is reported as such
                raise
            self.check_topic(topic)
            if batch is None:
                return
            if tally is not None:
                tally(batch.num_rows)
            yield batch

    def _read(
        self,
        topic: str,
        partition: int,
        start: int,
        end: int,
        *,
        columns: Sequence[str],
        bytes_max: int,
    ) -> Iterator[pa.RecordBatch]:
        select_schema(columns)
        self.cluster.check_partition(topic, partition)
        if start == end:
            return
        if not 0 <= start < end:
            check_range(TopicPartition(topic, partition), self.bounds(topic, partition), start, end)
        with self._fetcher() as stream:
            stream.assign(topic, {partition: start})
            rows = _ColumnBuilder(columns)
            for message in self._until(stream, topic, partition, end):
                if message.offset() < start:
                    continue
                rows.add(message)
                if rows.size_bytes >= bytes_max:
                    yield rows.taken()
            if rows.count:
                yield rows.taken()

    def _until(self, stream: Fetcher, topic: str, partition: int, end: int) -> Iterator[Message]:
        """Yield the partition's records until all offsets below ``end`` have been passed."""
        idle = IdleTimeout(self.cluster)
        while True:
            for message in stream.poll(_POLL_S):
                idle.reset()
                if not is_end(message):
                    if message.offset() >= end:
                        return
                    yield message
                    if message.offset() == end - 1:
                        return
                elif message.offset() >= end:
                    return
                else:  # the end is before that of the range: it may have changed by now
                    low, high = self.bounds(topic, partition)
                    check_range(
                        TopicPartition(topic, partition), (low, high), max(low, end - 1), end
                    )
            idle.check()

    @contextmanager
    def _fetcher(self) -> Iterator[Fetcher]:
        """Yield a stream that no other thread uses meanwhile; the next call may reuse it."""
        with self._lock:
            stream = self._streams.pop() if self._streams else None
        if stream is None:
            stream = Fetcher(self.cluster, self.isolation, wait_ms=RANGE_WAIT_MS)
        whole = False
        try:
            yield stream
            whole = True
        finally:
            if whole or not self._streams:
                stream.assign("", {})
                with self._lock:
                    self._streams.append(stream)
            else:
                stream.close()


class _ColumnBuilder:
    """Collects records as columns."""

    def __init__(self, columns: Sequence[str]) -> None:
        self._columns = columns
        self._messages: list[Message] = []
        self.size_bytes = 0

    @property
    def count(self) -> int:
        return len(self._messages)

    def add(self, message: Message) -> None:
        self._messages.append(message)
        self.size_bytes += len(message)

    def taken(self) -> pa.RecordBatch:
        """Return the records as a table, and start over."""
        messages, self._messages, self.size_bytes = self._messages, [], 0
        arrays = [_COLUMN[name](messages) for name in self._columns]
        return pa.record_batch(arrays, schema=select_schema(self._columns))


def _timestamps(messages: Sequence[Message]) -> pa.Array:
    times = pa.array([message.timestamp()[1] for message in messages], pa.int64())
    return times.cast(SCHEMA.field("timestamp").type)


def _headers(messages: Sequence[Message]) -> pa.Array:
    rows = [
        [{"key": name, "value": value} for name, value in message.headers() or ()]
        for message in messages
    ]
    return pa.array(rows, SCHEMA.field("headers").type)


_COLUMN = {
    "offset": lambda found: pa.array([message.offset() for message in found], pa.int64()),
    "timestamp": _timestamps,
    "key": lambda found: pa.array([message.key() for message in found], pa.binary()),
    "value": lambda found: pa.array([message.value() for message in found], pa.binary()),
    "headers": _headers,
}


def kafka_reader(address: str, isolation: Isolation = "read_committed") -> KafkaReader:
    """Return this process's reader of an address: it is cached, as its clients take a moment to start.

    Raises:
        ConfigError: the address is not possible.
    """
    key = (os.getpid(), address, isolation)
    with _readers_lock:
        if key not in _readers:
            kafka_address(address)
            _readers[key] = KafkaReader(address, isolation=isolation)
        return _readers[key]
