"""Sending records to brokers: what is sent waits in the client, and its futures are told by a thread.

The client makes batches, sends them again where it has to, and in order: it is always idempotent, and
a record counts as acknowledged when all copies that are in sync have it. What waits is bounded; what
happens beyond the bound has a name. A failure reaches the futures, and the next ``flush`` or ``close``.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeAlias

from confluent_kafka import KafkaError, KafkaException

from millstream.choices import choose
from millstream.client.columns import Columns, Table, as_columns
from millstream.client.futures import Outcome, SendFuture, WholeFuture
from millstream.client.kafka.cluster import FENCES, Cluster
from millstream.client.kafka.failures import as_ours, error_of
from millstream.client.kafka.group_offsets import KafkaGroups
from millstream.client.kafka.sending_client import SendingClients
from millstream.client.kafka.transaction import KafkaTransactions
from millstream.client.overload import OVERLOADS, Overload
from millstream.client.partitioning import Partitioner
from millstream.client.parts import ROW_OVERHEAD
from millstream.client.producer import (
    BLOCK_TIMEOUT_S,
    BUFFER_BYTES_MAX,
    BULK_ROWS,
    LINGER_MS,
    check_least,
)
from millstream.client.transaction import Transaction
from millstream.client.values import GivenHeaders, encode_headers, encode_key, encode_value
from millstream.errors import ConfigError, FencedError, MillstreamError, OverloadError
from millstream.log.batch import RECORD_BYTES_MAX
from millstream.log.clocks import wall_clock_ms
from millstream.log.compression import COMPRESSIONS, CompressionName
from millstream.log.encoding import Headers, Row, check_record_size
from millstream.log.group_commit import DURABILITIES, Durability
from millstream.log.named_producers import TIMEOUT_MS
from millstream.record import Place

if TYPE_CHECKING:
    from confluent_kafka import Message

_POLL_S = 0.1
_BATCH_BYTES = 1 << 20
_WAITING_MAX = 2_000_000  # records; bytes are the bound that is meant
_ANY = -1  # the client chooses, batch by batch
_Row: TypeAlias = tuple[bytes | None, bytes | None, int, Headers]  # value, key, when, headers
_producers: weakref.WeakSet[KafkaProducer] = weakref.WeakSet()


class KafkaProducer:
    """Sends records to any topic of one log; see ``EventLog.producer``. Thread-safe.

    Raises:
        ConfigError: a setting is not possible, or not over ``kafka://``.
        BrokerAwayError: the transactional id could not be registered in time.
    """

    def __init__(
        self,
        cluster: Cluster,
        groups: KafkaGroups,
        clients: SendingClients,
        *,
        linger_ms: float = LINGER_MS,
        compression: CompressionName = "none",
        durability: Durability = "synced",
        overload: Overload = "block",
        buffer_bytes: int = BUFFER_BYTES_MAX,
        block_timeout_s: float = BLOCK_TIMEOUT_S,
        transactional_id: str | None = None,
        transaction_timeout_ms: int = TIMEOUT_MS,
        name: str | None = None,
        clock_ms: Callable[[], int] = wall_clock_ms,
    ) -> None:
        choose("compression", compression, COMPRESSIONS)
        choose("durability", durability, DURABILITIES)
        _check_overload(overload, name)
        check_least("linger_ms", linger_ms, 0, "0 or more milliseconds")
        check_least("buffer_bytes", buffer_bytes, 1, "1 or more bytes")
        check_least("block_timeout_s", block_timeout_s, 0, "0 or more seconds")
        self._cluster = cluster
        self._clock_ms = clock_ms
        self._overload = overload
        self._patience_s = block_timeout_s
        self._partitioner = Partitioner(cluster)
        self._lock = threading.Lock()
        self._unreported: MillstreamError | None = None
        self.first_failure: MillstreamError | None = None  # of the transaction that is open
        self.refusal: MillstreamError | None = None  # why nothing is taken now
        self.first_offsets: dict[tuple[str, int], int] = {}  # of the transaction that is open
        self.dropped = 0
        self.spilled = 0
        self._closed = False
        self._failed = False
        self._pid = os.getpid()
        settings: dict[str, object] = {
            "enable.idempotence": True,
            "linger.ms": linger_ms,
            "compression.type": compression,
            "batch.size": _BATCH_BYTES,
            "batch.num.messages": 100_000,
            "partitioner": "murmur2_random",
            "queue.buffering.max.kbytes": max(buffer_bytes >> 10, 1),
            "queue.buffering.max.messages": _WAITING_MAX,
        }
        if transactional_id is None:
            settings["message.timeout.ms"] = int(linger_ms) + max(int(1000 * block_timeout_s), 1000)
        else:
            settings |= KafkaTransactions.settings(
                transactional_id, transaction_timeout_ms, dict(cluster.address.settings)
            )
        self._settings = settings
        self._clients = clients
        self._client = clients.take(cluster, settings)
        self.library = self._client.library
        self.transactional = transactional_id is not None
        self._transactions: KafkaTransactions | None = None
        if transactional_id is not None:
            self._transactions = KafkaTransactions(
                self, cluster, groups, transactional_id, transaction_timeout_ms / 1000
            )
        _producers.add(self)

    # -- sending ------------------------------------------------------------------------------

    def send(
        self,
        topic: str,
        value: object,
        *,
        key: bytes | str | int | None = None,
        timestamp_ms: int | None = None,
        partition: int | None = None,
        headers: GivenHeaders | None = None,
    ) -> Future[Place]:
        """Send one record; the future gives (partition, offset) once the brokers have it.

        Arguments and errors are those of :meth:`millstream.client.producer.Producer.send`.
        """
        self._check()
        raw_key = encode_key(key)
        raw = value if type(value) is bytes else encode_value(value)
        pairs = encode_headers(headers) if headers else ()
        if timestamp_ms is None:
            timestamp_ms = self._clock_ms()
        _check_time(timestamp_ms)
        size = ROW_OVERHEAD + len(raw_key or b"") + len(raw or b"")
        if pairs:
            size = Row(timestamp_ms, raw_key, raw, pairs).size
        if size > RECORD_BYTES_MAX:
            check_record_size(size)
        number = self._number(topic, raw_key, partition)
        sent = _Sent(self, topic, size)
        row = (raw, raw_key, timestamp_ms, pairs)
        refused = self._produce(topic, number, row, sent.told)
        if refused is not None:
            sent.failed(refused)
        return SendFuture(sent.outcome, 0)

    def _number(self, topic: str, key: bytes | None, partition: int | None) -> int:
        self._look_at(topic)
        if partition is not None:
            self._cluster.check_partition(topic, partition)
            return partition
        if key is None:
            return _ANY
        return self._partitioner.choose(topic, key, None)

    def _look_at(self, topic: str) -> None:
        self._client.look_at(topic, self._cluster.known(topic).topic_id)

    def send_many(
        self,
        topic: str,
        table: Table | None = None,
        *,
        rows: Table | None = None,
        key: str | None = None,
        values: Any = None,
        keys: Any = None,
        timestamps_ms: Any = None,
        headers: Any = None,
    ) -> Future[int]:
        """Send many records from columns; the future gives their number once the brokers have all.

        Arguments and errors are those of :meth:`millstream.client.producer.Producer.send_many`.
        """
        self._check()
        columns = as_columns(
            table,
            rows=rows,
            key=key,
            values=values,
            keys=keys,
            timestamps_ms=timestamps_ms,
            headers=headers,
            clock_ms=self._clock_ms,
        )
        _check_time(int(columns.timestamps_ms.min(initial=1)))
        whole = WholeFuture(len(columns.values))
        self._look_at(topic)
        if not len(columns.values):
            whole.count(0)
        bulk = _Bulk(self, topic, whole)
        for start in range(0, len(columns.values), BULK_ROWS):
            for number, part in self._partitioner.split(topic, columns.slice(start, BULK_ROWS)):
                self._send_part(topic, number, part, bulk)
        return whole.future

    def _send_part(self, topic: str, number: int, part: Columns, bulk: _Bulk) -> None:
        count = len(part.values)
        keys = [None] * count if part.keys is None else part.keys.to_pylist()
        headers = [()] * count if part.headers is None else map(_pairs, part.headers.to_pylist())
        rows = zip(part.values.to_pylist(), keys, part.timestamps_ms.tolist(), headers, strict=True)
        for row in rows:
            value, key, *_ = row
            size = len(value or b"") + len(key or b"")
            if size > RECORD_BYTES_MAX:
                check_record_size(size)
            refused = self._produce(topic, number, row, bulk.told)
            if refused is not None:
                bulk.failed(refused)

    def _produce(
        self,
        topic: str,
        number: int,
        row: _Row,
        told: Callable[[KafkaError | None, Message], None],
    ) -> MillstreamError | None:
        """Hand one record to the client; return why it was not taken, where it gives way.

        Raises:
            OverloadError: there was no room for too long.
            MillstreamError: the client takes no such record.
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
                    on_delivery=told,
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
                if not self._may_pass(error_of(raised), topic, since_s):
                    what = f"a record for {topic!r} was not sent"
                    raise as_ours(error_of(raised), what) from raised
            else:
                return None

    def _no_room(self, since_s: float) -> OverloadError | None:
        """Wait for room, or say that there is none.

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
                self.dropped += 1
            return error
        left_s = since_s + self._patience_s - time.monotonic()
        if left_s <= 0:
            raise OverloadError(
                f"the client's buffer was full for {self._patience_s:g} s; slow down, or make the producer "
                "with a larger buffer_bytes or a longer block timeout"
            )
        with suppress(KafkaException):
            self.library.poll(min(left_s, _POLL_S))
        return None

    def _may_pass(self, error: KafkaError, topic: str, since_s: float) -> bool:
        """Let the client look again where it does not know yet what the cluster has."""
        unknown = (KafkaError._UNKNOWN_PARTITION, KafkaError._UNKNOWN_TOPIC)
        if error.code() not in unknown or time.monotonic() - since_s > self._cluster.timeout_s:
            return False
        self.library.list_topics(topic, self._cluster.timeout_s)
        return True

    def lies_at(self, topic: str, partition: int, offset: int) -> None:
        """Note where a transaction's records begin."""
        if (topic, partition) not in self.first_offsets:
            self.first_offsets[topic, partition] = offset

    def note_failure(self, error: MillstreamError) -> None:
        """Keep an error for whoever does not look at futures."""
        with self._lock:
            self._failed = True
            self._unreported = self._unreported or error
            self.first_failure = self.first_failure or error

    def note_fence(self, writer: str, batch_id: int) -> None:
        """Send the fence of the transaction that is about to be committed to its topic."""
        row = (b"%d" % batch_id, writer.encode(), self._clock_ms(), ())
        self._produce(FENCES, 0, row, _Sent(self, FENCES, len(writer)).told)

    def forget_failure(self) -> None:
        """Begin anew: what failed was told by the end of its transaction."""
        with self._lock:
            self._unreported = self.first_failure = None

    def transaction(self) -> Transaction:
        """Return a block in which what is sent is committed at its end, or not at all.

        Raises:
            ConfigError: the producer has no transactional id.
        """
        if self._transactions is None:
            raise ConfigError(
                "this producer has no transactional_id; give it one to send in transactions"
            )
        return Transaction(self._transactions)

    # -- waiting, closing ---------------------------------------------------------------------

    def flush(self) -> None:
        """Return when everything sent so far is acknowledged.

        Raises:
            MillstreamError: some records sent since the last flush were not; their futures say which.
        """
        if self._closed:
            raise FencedError("this producer was closed; make another one")
        self.settle()
        with self._lock:
            error, self._unreported = self._unreported, None
        if error is not None:
            raise error.with_traceback(None)

    def settle(self) -> None:
        """Return when everything on its way has its outcome: a record counts until it was told."""
        while len(self.library):
            with suppress(KafkaException):  # what is fatal has failed every record by now
                self.library.flush(_POLL_S)

    def close(self) -> None:
        """Flush, and stop; an open transaction is aborted. Harmless when called again.

        Raises:
            MillstreamError: as from :meth:`flush`, unless it was raised before.
        """
        if self._closed or os.getpid() != self._pid:
            return
        try:
            if self._transactions is not None:
                self._transactions.abort_open(
                    FencedError("this producer was closed; make another one")
                )
            self.flush()
        finally:
            self._closed = True
            if self._transactions is None and not self._failed:
                self._clients.give_back(self._settings, self._client)
            else:
                self._client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except MillstreamError:
            if error is None:
                raise

    def disable_after_fork(self) -> None:
        """Refuse everything in a forked child: the client's threads are the parent's."""
        self.refusal = FencedError(
            "this producer was made before a fork; make one in the parent only"
        )

    def _check(self) -> None:
        if self._closed:
            raise FencedError("this producer was closed; make another one")
        if self.refusal is not None:
            raise self.refusal.with_traceback(None)


class _Sent:
    """One record on its way."""

    __slots__ = ("_producer", "_size", "_topic", "outcome")

    def __init__(self, producer: KafkaProducer, topic: str, size: int) -> None:
        self.outcome = Outcome()
        self._producer = producer
        self._topic = topic
        self._size = size

    def told(self, error: KafkaError | None, message: Message) -> None:
        if error is None:
            place = message.partition(), message.offset()
            if self._producer.transactional:
                self._producer.lies_at(self._topic, *place)
            self.outcome.appended(*place)
            return
        ours = as_ours(error, f"a record of {self._size} bytes for {self._topic!r} was not taken")
        self._producer.note_failure(ours)
        self.outcome.failed(ours)

    def failed(self, error: MillstreamError) -> None:
        self.outcome.failed(error)


class _Bulk:
    """The records of one ``send_many``."""

    def __init__(self, producer: KafkaProducer, topic: str, whole: WholeFuture) -> None:
        self._producer = producer
        self._topic = topic
        self._whole = whole

    def told(self, error: KafkaError | None, message: Message) -> None:
        if error is None:
            if self._producer.transactional:
                self._producer.lies_at(self._topic, message.partition(), message.offset())
            self._whole.count(1)
            return
        ours = as_ours(error, f"a record for {self._topic!r} was not taken")
        self._producer.note_failure(ours)
        self._whole.fail(ours)

    def failed(self, error: MillstreamError) -> None:
        self._whole.fail(error)


def _pairs(headers: list[dict[str, Any]]) -> Headers:
    return tuple((header["key"], header["value"]) for header in headers)


def _check_time(timestamp_ms: int) -> None:
    if timestamp_ms <= 0:
        raise ConfigError(
            f"timestamp_ms is {timestamp_ms}, and over kafka:// times begin after 1970: the client takes 0 "
            "for now; give 1 or more, or keep such a time in the value"
        )


def _check_overload(overload: Overload, name: str | None) -> None:
    choose("overload", overload, OVERLOADS)
    if overload in ("drop_oldest", "spill") or name is not None:
        asked = (
            f"overload is {overload!r}" if name is None else f"the producer has the name {name!r}"
        )
        raise ConfigError(
            f"{asked}, which is for logs in a folder; over kafka:// choose overload='block' or "
            "'drop_newest', or send to a folder first"
        )


def _disable_in_child() -> None:
    for producer in list(_producers):
        producer.disable_after_fork()
    _producers.clear()


os.register_at_fork(after_in_child=_disable_in_child)
