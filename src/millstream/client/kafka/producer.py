"""Sending records to brokers: records wait in the client, and a thread completes their futures.

The client makes batches, and retries them in order: it is always idempotent, and a record is acknowledged
when all in-sync replicas have it. The queue is bounded; ``overload`` says what happens beyond the bound. A
failure reaches the futures, and the next ``flush`` or ``close``.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeAlias

from confluent_kafka import KafkaError, KafkaException

from millstream.client.columns import RecordColumns
from millstream.client.futures import BulkFuture, SendFuture, SendResult
from millstream.client.kafka.cluster import FENCE_TOPIC, Cluster
from millstream.client.kafka.errors import kafka_error_of, to_millstream_error
from millstream.client.kafka.groups import KafkaGroups
from millstream.client.kafka.producer_pool import ProducerPool
from millstream.client.kafka.transaction import KafkaTransactionManager, transaction_settings
from millstream.client.partitioner import Partitioner
from millstream.client.producer import Producer, ProducerSettings
from millstream.client.serializers import HeadersInput, encode_record
from millstream.errors import ConfigError, FencedError, MillstreamError, OverloadError
from millstream.log.batch import RECORD_BYTES_MAX
from millstream.log.clocks import wall_clock_ms
from millstream.log.encoding import check_record_size
from millstream.log.fork_guard import guard
from millstream.record import Headers, RecordMetadata

if TYPE_CHECKING:
    from confluent_kafka import Message

_POLL_S = 0.1
_BATCH_BYTES = 1 << 20
_WAITING_MAX = 2_000_000  # records; the effective bound is that of bytes
_ANY_PARTITION = -1  # the client chooses, batch by batch
_Row: TypeAlias = tuple[bytes | None, bytes | None, int, Headers]  # value, key, when, headers


class KafkaProducer(Producer):
    """Sends records to brokers.

    Raises:
        ConfigError: a setting is not possible over ``kafka://``.
        BrokerUnavailableError: the transactional id could not be registered in time.
    """

    def __init__(
        self,
        cluster: Cluster,
        groups: KafkaGroups,
        clients: ProducerPool,
        settings: ProducerSettings,
        *,
        clock_ms: Callable[[], int] = wall_clock_ms,
    ) -> None:
        _check_overload(settings)
        self._cluster = cluster
        self._clock_ms = clock_ms
        self._overload = settings.overload
        self._block_timeout_s = settings.block_timeout_s
        self._partitioner = Partitioner(cluster)
        self._lock = threading.Lock()
        self._unreported: MillstreamError | None = None
        self.first_failure: MillstreamError | None = None  # of the transaction that is open
        self.refusal: MillstreamError | None = None  # why nothing is accepted now
        self.first_offsets: dict[tuple[str, int], int] = {}  # of the transaction that is open
        self._dropped = 0
        self._closed = False
        self._failed = False
        self._pid = os.getpid()
        self._settings = _client_settings(settings, cluster)
        self._clients = clients
        self._client = clients.acquire(cluster, self._settings)
        self.library = self._client.library
        self.transactional = settings.transactional_id is not None
        self._manager: KafkaTransactionManager | None = None
        if settings.transactional_id is not None:
            self._transactions = self._manager = KafkaTransactionManager(
                self,
                cluster,
                groups,
                settings.transactional_id,
                settings.transaction_timeout_ms / 1000,
            )
        guard(self)

    # -- sending ------------------------------------------------------------------------------

    def send(
        self,
        topic: str,
        value: object,
        *,
        key: bytes | str | int | None = None,
        timestamp_ms: int | None = None,
        partition: int | None = None,
        headers: HeadersInput | None = None,
    ) -> Future[RecordMetadata]:
        self._check()
        if timestamp_ms is None:
            timestamp_ms = self._clock_ms()
        check_time(timestamp_ms)
        raw_key, raw, pairs, size = encode_record(key, value, headers)
        number = self._number(topic, raw_key, partition)
        sent = _PendingRecord(self, topic, size)
        row = (raw, raw_key, timestamp_ms, pairs)
        refused = self._produce(topic, number, row, sent.on_delivery)
        if refused is not None:
            sent.failed(refused)
        return SendFuture(sent.send_result, 0)

    def _number(self, topic: str, key: bytes | None, partition: int | None) -> int:
        self._refresh_topic(topic)
        if partition is not None:
            self._cluster.check_partition(topic, partition)
            return partition
        if key is None:
            return _ANY_PARTITION
        return self._partitioner.choose(topic, key, None)

    def _refresh_topic(self, topic: str) -> None:
        self._client.refresh_topic(topic, self._cluster.cached_topic(topic).topic_id)

    def _send_columns(self, topic: str, columns: RecordColumns, bulk: BulkFuture) -> None:
        check_time(int(columns.timestamps_ms.min(initial=1)))
        self._refresh_topic(topic)
        pending = _PendingBulk(self, topic, bulk)
        for number, part in self._partitioner.split(topic, columns):
            self._send_part(topic, number, part, pending)

    def _send_part(self, topic: str, number: int, part: RecordColumns, bulk: _PendingBulk) -> None:
        count = len(part.values)
        keys = [None] * count if part.keys is None else part.keys.to_pylist()
        headers = [()] * count if part.headers is None else map(_pairs, part.headers.to_pylist())
        rows = zip(part.values.to_pylist(), keys, part.timestamps_ms.tolist(), headers, strict=True)
        for row in rows:
            value, key, *_ = row
            size = len(value or b"") + len(key or b"")
            if size > RECORD_BYTES_MAX:
                check_record_size(size)
            refused = self._produce(topic, number, row, bulk.on_delivery)
            if refused is not None:
                bulk.failed(refused)

    def _produce(
        self,
        topic: str,
        number: int,
        row: _Row,
        on_delivery: Callable[[KafkaError | None, Message], None],
    ) -> MillstreamError | None:
        """Pass one record to the client; return the error if it was dropped.

        Raises:
            OverloadError: there was no room for too long.
            MillstreamError: the client rejects the record.
        """
        value, key, timestamp_ms, pairs = row
        headers = list(pairs) if pairs else None
        since_s = 0.0
        while True:
            try:
                self.library.produce(
                    topic,
                    value,
                    key,
                    number,
                    on_delivery=on_delivery,
                    timestamp=timestamp_ms,
                    headers=headers,
                )
            except BufferError:
                since_s = since_s or time.monotonic()
                refused = self._no_room(since_s)
                if refused is not None:
                    return refused
            except KafkaException as raised:
                since_s = since_s or time.monotonic()
                if not self._is_passing(kafka_error_of(raised), topic, since_s):
                    what = f"a record for {topic!r} was not sent"
                    raise to_millstream_error(kafka_error_of(raised), what) from raised
            else:
                return None

    def _no_room(self, since_s: float) -> OverloadError | None:
        """Wait for room, or raise the error.

        Raises:
            OverloadError: there was none for too long.
        """
        if self._overload == "drop_newest":
            error = OverloadError(
                "the client's buffer is full, and the record was dropped as its producer drops the "
                "newest; slow down, or make the producer with a larger buffer_bytes"
            )
            self.note_failure(error)
            with self._lock:
                self._dropped += 1
            return error
        left_s = since_s + self._block_timeout_s - time.monotonic()
        if left_s <= 0:
            raise OverloadError(
                f"the client's buffer was full for {self._block_timeout_s:g} s; slow down, or make the producer "
                "with a larger buffer_bytes or a longer block timeout"
            )
        with suppress(KafkaException):
            self.library.poll(min(left_s, _POLL_S))
        return None

    def _is_passing(self, error: KafkaError, topic: str, since_s: float) -> bool:
        """Refresh the client's metadata where it does not know the topic or partition yet."""
        unknown = (KafkaError._UNKNOWN_PARTITION, KafkaError._UNKNOWN_TOPIC)
        if error.code() not in unknown or time.monotonic() - since_s > self._cluster.timeout_s:
            return False
        self.library.list_topics(topic, self._cluster.timeout_s)
        return True

    def note_first_offset(self, topic: str, partition: int, offset: int) -> None:
        """Note where a transaction's records begin."""
        if (topic, partition) not in self.first_offsets:
            self.first_offsets[topic, partition] = offset

    def note_failure(self, error: MillstreamError) -> None:
        """Keep an error for callers that ignore futures."""
        with self._lock:
            self._failed = True
            self._unreported = self._unreported or error
            self.first_failure = self.first_failure or error

    def note_fence(self, writer: str, batch_id: int) -> None:
        """Send the fence of the transaction that is about to be committed to its topic."""
        row = (b"%d" % batch_id, writer.encode(), self._clock_ms(), ())
        self._produce(
            FENCE_TOPIC, 0, row, _PendingRecord(self, FENCE_TOPIC, len(writer)).on_delivery
        )

    def clear_failure(self) -> None:
        """Forget failures: the end of their transaction reported them."""
        with self._lock:
            self._unreported = self.first_failure = None

    # -- waiting, counting, closing -----------------------------------------------------------

    @property
    def dropped(self) -> int:
        return self._dropped

    @property
    def spilled(self) -> int:
        return 0

    def flush(self) -> None:
        if self._closed:
            raise FencedError("this producer was closed; make another one")
        self.wait_for_deliveries()
        with self._lock:
            error, self._unreported = self._unreported, None
        if error is not None:
            raise error.with_traceback(None)

    def wait_for_deliveries(self) -> None:
        """Return when everything in flight has its result."""
        while len(self.library):
            with suppress(KafkaException):  # a fatal error has failed every record by now
                self.library.flush(_POLL_S)

    def close(self) -> None:
        if self._closed or os.getpid() != self._pid:
            return
        try:
            if self._manager is not None:
                self._manager.abort_open(FencedError("this producer was closed; make another one"))
            self.flush()
        finally:
            self._closed = True
            if self._transactions is None and not self._failed:
                self._clients.release(self._settings, self._client)
            else:
                self._client.close()

    def disable_after_fork(self) -> None:
        """Refuse every call in a forked child: the client's threads are the parent's."""
        self.refusal = FencedError(
            "this producer was made before a fork; make one in the parent only"
        )

    def _check(self) -> None:
        if self._closed:
            raise FencedError("this producer was closed; make another one")
        if self.refusal is not None:
            raise self.refusal.with_traceback(None)


class _PendingRecord:
    """One record in flight."""

    __slots__ = ("_producer", "_size", "_topic", "send_result")

    def __init__(self, producer: KafkaProducer, topic: str, size: int) -> None:
        self.send_result = SendResult()
        self._producer = producer
        self._topic = topic
        self._size = size

    def on_delivery(self, error: KafkaError | None, message: Message) -> None:
        if error is None:
            place = message.partition(), message.offset()
            if self._producer.transactional:
                self._producer.note_first_offset(self._topic, *place)
            self.send_result.set_appended(*place)
            return
        ours = to_millstream_error(
            error, f"a record of {self._size} bytes for {self._topic!r} was not accepted"
        )
        self._producer.note_failure(ours)
        self.send_result.set_failed(ours)

    def failed(self, error: MillstreamError) -> None:
        self.send_result.set_failed(error)


class _PendingBulk:
    """The records of one ``send_many``."""

    def __init__(self, producer: KafkaProducer, topic: str, whole: BulkFuture) -> None:
        self._producer = producer
        self._topic = topic
        self._whole = whole

    def on_delivery(self, error: KafkaError | None, message: Message) -> None:
        if error is None:
            if self._producer.transactional:
                self._producer.note_first_offset(self._topic, message.partition(), message.offset())
            self._whole.add_appended(1)
            return
        ours = to_millstream_error(error, f"a record for {self._topic!r} was not accepted")
        self._producer.note_failure(ours)
        self._whole.fail(ours)

    def failed(self, error: MillstreamError) -> None:
        self._whole.fail(error)


def _pairs(headers: list[dict[str, Any]]) -> Headers:
    return tuple((header["key"], header["value"]) for header in headers)


def check_time(timestamp_ms: int) -> None:
    """Refuse a record's time that the client library cannot send.

    Raises:
        ConfigError: it is not after 1970.
    """
    if timestamp_ms <= 0:
        raise ConfigError(
            f"timestamp_ms is {timestamp_ms}, and over kafka:// times begin after 1970: the client takes 0 "
            "for now; give 1 or more, or keep such a time in the value"
        )


def _check_overload(settings: ProducerSettings) -> None:
    overload, name = settings.overload, settings.name
    if overload in ("drop_oldest", "spill") or name is not None:
        given = (
            f"overload is {overload!r}" if name is None else f"the producer has the name {name!r}"
        )
        raise ConfigError(
            f"{given}, which is for logs in a folder; over kafka:// choose overload='block' or "
            "'drop_newest', or send to a folder first"
        )


def _client_settings(settings: ProducerSettings, cluster: Cluster) -> dict[str, object]:
    """Return the settings of the client library, under librdkafka's names."""
    found: dict[str, object] = {
        "enable.idempotence": True,
        "linger.ms": settings.linger_ms,
        "compression.type": settings.compression,
        "batch.size": _BATCH_BYTES,
        "batch.num.messages": 100_000,
        "partitioner": "murmur2_random",
        "queue.buffering.max.kbytes": max(settings.buffer_bytes >> 10, 1),
        "queue.buffering.max.messages": _WAITING_MAX,
    }
    if settings.transactional_id is not None:
        return found | transaction_settings(
            settings.transactional_id,
            settings.transaction_timeout_ms,
            dict(cluster.address.settings),
        )
    block_ms = max(int(1000 * settings.block_timeout_s), 1000)
    return found | {"message.timeout.ms": int(settings.linger_ms) + block_ms}
