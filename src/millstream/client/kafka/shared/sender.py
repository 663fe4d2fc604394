"""Sends the records of one partition in a transaction that another process has begun and will end.

In a transaction, a partition belongs to one task, whose sequences begin at 0. Spark may repeat a task, run it twice
at the same time, or have one go on too late. All attempts send the same batches with the same sequences, so:

=============================================  =======================================================
an attempt                                     what the leader does with its batches
=============================================  =======================================================
1. repeats batches of the last five            it knows them, and responds as the first time
2. repeats earlier ones                        it refuses the sequence; then the attempt asks how far the
                                               partition is (DescribeProducers), and goes on from there
3. is begun when others have sent all          it asks first, and sends the last batch alone: row 1
4. of which a connection is torn               what has no response is sent again, as in rows 1 and 2
5. goes on after the transaction's end         they are refused: the sequences are taken after a commit, and
                                               after an abort the coordinator has no such transaction
6. goes on in the next transaction             they are refused: its producer epoch is higher
7. leaves out what is lost with its leader     the next leader refuses the sequence, or knows nothing of the
                                               producer and takes it; then the transaction begins with it there,
                                               which the attempt sees, and fails
=============================================  =======================================================

Row 5 after an abort needs a broker that asks the coordinator (KIP-890, Apache Kafka 3.6; Millstream's does): see
``SharedProducer``. The first batch is sent alone: a leader that knows nothing of the producer would take any
sequence of a batch behind it.

Source: KIP-98, KIP-360, KIP-664, KIP-890; Kafka ``ProducerAppendInfo``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from confluent_kafka import KafkaError

from millstream.broker.protocol.messages import PRODUCE
from millstream.broker.protocol.messages_cluster import DESCRIBE_PRODUCERS
from millstream.broker.protocol.wire import BytesLike, Message
from millstream.client.address import KafkaAddress
from millstream.client.columns import RecordColumns
from millstream.client.kafka.producer import check_time
from millstream.client.kafka.shared.brokers import Brokers, PassingError, check
from millstream.client.kafka.shared.connection import BrokerConnection
from millstream.errors import BrokerUnavailableError, OutOfOrderSequenceError
from millstream.log.batch import SEQUENCE_MAX, EncodedBatch, ProducerStamp, stamp
from millstream.log.compression import CompressionName, compress
from millstream.log.encoding import split_columns

BATCH_BYTES_MAX = 1 << 20
_BATCH_OVERHEAD_BYTES = 128  # the header, rounded up
_IN_FLIGHT_MAX = 5  # a leader knows so many batches of a producer again
_ALL_REPLICAS = -1
_DUPLICATE = 46  # some brokers call a batch so that they have already
_NONE = -1


@dataclass(frozen=True)
class SharedTransaction:
    """A transaction that was begun, for those who send in it."""

    address: KafkaAddress
    transactional_id: str
    producer_id: int
    producer_epoch: int


class SentRecords(NamedTuple):
    """What a partition has of a transaction: how many records, and the offset of the first."""

    topic: str
    partition: int
    records: int
    first_offset: int


class _UnackedBatch(NamedTuple):
    first_sequence: int
    last_sequence: int
    data: list[BytesLike]


class PartitionSender:
    """Sends the batches of one partition, in order, from the first of the transaction on. Not thread-safe."""

    def __init__(
        self, brokers: Brokers, transaction: SharedTransaction, topic: str, partition: int
    ) -> None:
        self._brokers = brokers
        self._transaction = transaction
        self._topic, self._partition = topic, partition
        self._next_sequence = 0
        self._first_offset = _NONE
        self._unacked: deque[_UnackedBatch] = deque()
        self._sent = 0  # how many of these were sent on this connection
        self._connection: BrokerConnection | None = None
        self._patience = brokers.patience()
        self._is_known = False  # whether the leader knows this producer epoch
        # What another attempt has sent is left out. Its leader may lose it until a later batch, or else the last one
        # again, has its response: then all replicas have all.
        self._skipped: _UnackedBatch | None = None
        self._written = brokers.retry(self._last_sequence)

    def send(self, batch: EncodedBatch) -> None:
        """Send a batch, after those before; some of the last may be without a response when this returns.

        Raises:
            ProducerFencedError: a newer run has begun, or the transaction was ended.
            RecordTooLargeError: it is larger than the topic allows.
            OutOfOrderSequenceError: attempts of this task have sent other batches.
            MillstreamError: as the text says; BrokerUnavailableError after attempts for long enough.
        """
        first, last = self._next_sequence, self._next_sequence + batch.count - 1
        assert last <= SEQUENCE_MAX, "a partition has fewer records of a batch"
        self._next_sequence = last + 1
        identity = self._transaction.producer_id, self._transaction.producer_epoch
        stamped = stamp(batch, ProducerStamp(*identity, first), transactional=True)
        self._unacked.append(_UnackedBatch(first, last, [stamped.prefix(0, _NONE), stamped.tail]))
        self._skip_written()
        self._advance(_IN_FLIGHT_MAX - 1)

    def finish(self) -> SentRecords:
        """Return what was sent, once the partition has all of it.

        Raises:
            MillstreamError: as :meth:`send`.
        """
        self._advance(0)
        while self._skipped is not None:
            self._unacked.append(self._skipped)
            self._skipped = None
            self._advance(0)
        if self._next_sequence and self._first_offset == _NONE:
            self._brokers.retry(self._last_sequence)  # an earlier attempt sent the first batch
        return SentRecords(self._topic, self._partition, self._next_sequence, self._first_offset)

    # -- one step -----------------------------------------------------------------------------

    def _advance(self, unacked_max: int) -> None:
        while len(self._unacked) > unacked_max:
            try:
                self._step()
            except PassingError as passing:
                self._reconnect()
                self._patience.wait(passing.error)
            except BrokerUnavailableError as error:
                self._reconnect()
                self._patience.wait(error)

    def _reconnect(self) -> None:
        """Look the leader up again; send anew what has no response."""
        self._brokers.close()
        self._connection, self._sent = None, 0

    def _step(self) -> None:
        """Send what may be sent, and receive one response."""
        if self._connection is None:
            self._connection = self._brokers.leader(self._topic, self._partition)
        window = min(len(self._unacked), _IN_FLIGHT_MAX if self._is_known else 1)
        while self._sent < window:
            self._connection.send(PRODUCE, self._request(self._unacked[self._sent]))
            self._sent += 1
        response = self._connection.receive()
        (topic,) = response["responses"]
        (found,) = topic["partition_responses"]
        if found["error_code"] == KafkaError.OUT_OF_ORDER_SEQUENCE_NUMBER:
            self._catch_up()
            return
        if found["error_code"] != _DUPLICATE:
            check(found["error_code"], self._what(found["error_message"]))
        batch = self._unacked.popleft()
        self._sent -= 1
        if not self._is_known and batch.first_sequence:
            self._check_begun_before(found["base_offset"])
        self._is_known, self._skipped = True, None
        self._written = max(self._written, batch.last_sequence)
        if batch.first_sequence == 0 and found["base_offset"] >= 0:
            self._first_offset = found["base_offset"]
        self._patience.renew()

    def _what(self, message: str | None) -> str:
        said = f" ({message})" if message else ""
        return f"records for {self._topic}/{self._partition} were not accepted{said}"

    def _request(self, batch: _UnackedBatch) -> Message:
        return {
            "transactional_id": self._transaction.transactional_id,
            "acks": _ALL_REPLICAS,
            "timeout_ms": int(1000 * self._transaction.address.timeout_s),
            "topic_data": [
                {
                    "name": self._topic,
                    "partition_data": [{"index": self._partition, "records": [*batch.data]}],
                }
            ],
        }

    # -- where the partition is -----------------------------------------------------------------

    def _catch_up(self) -> None:
        """Leave out what another attempt has sent.

        Raises:
            OutOfOrderSequenceError: it has sent other batches than these, or some are lost.
        """
        self._reconnect()
        self._written = max(self._written, self._brokers.retry(self._last_sequence))
        before = len(self._unacked)
        self._skip_written()
        if len(self._unacked) == before:
            raise OutOfOrderSequenceError(
                f"{self._topic}/{self._partition} has records of this transaction up to sequence {self._written}, "
                f"and the next to send is {self._unacked[0].first_sequence}: start over with a new transaction"
            )

    def _check_begun_before(self, offset: int) -> None:
        """Make sure that the partition has what was left out: the transaction begins there before ``offset``.

        A leader that has lost it, with all that it knew of the producer, takes any sequence.

        Raises:
            OutOfOrderSequenceError: it has not.
        """
        is_known = self._brokers.retry(self._last_sequence) != _NONE
        if not is_known or not 0 <= self._first_offset < offset:
            raise OutOfOrderSequenceError(
                f"{self._topic}/{self._partition} has lost records of this transaction that another attempt had "
                "sent: start over with a new transaction"
            )

    def _skip_written(self) -> None:
        while self._unacked and self._unacked[0].last_sequence <= self._written:
            if self._sent:
                return  # its response is to come
            self._skipped = self._unacked.popleft()

    def _last_sequence(self) -> int:
        """Return the sequence of the last record that the partition has of this transaction; -1 if it has none.

        Where the client may not ask, too: then an attempt that is far behind another one fails.
        """
        leader = self._brokers.leader(self._topic, self._partition)
        if not leader.supports(DESCRIBE_PRODUCERS, 0):
            return _NONE
        asked = {"topics": [{"name": self._topic, "partition_indexes": [self._partition]}]}
        (topic,) = leader.request(DESCRIBE_PRODUCERS, asked)["topics"]
        (found,) = topic["partitions"]
        if found["error_code"] == KafkaError.TOPIC_AUTHORIZATION_FAILED:
            return _NONE
        check(
            found["error_code"], f"the producers of {self._topic}/{self._partition} are not known"
        )
        identity = (self._transaction.producer_id, self._transaction.producer_epoch)
        for one in found["active_producers"]:
            if (one["producer_id"], one["producer_epoch"]) == identity:
                if one["current_txn_start_offset"] >= 0:
                    self._first_offset = one["current_txn_start_offset"]
                return int(one["last_sequence"])
        return _NONE


def send_columns(
    sender: PartitionSender,
    columns: Iterable[RecordColumns],
    *,
    message_bytes_max: int,
    compression: CompressionName = "none",
) -> int:
    """Send records, in batches that depend on nothing but the records; return how many.

    ``message_bytes_max`` is the setting max.message.bytes of the topic.

    Raises:
        ConfigError: a record's time is not after 1970.
        MillstreamError: as :meth:`PartitionSender.send`.
    """
    bytes_max = max(min(BATCH_BYTES_MAX, message_bytes_max) - _BATCH_OVERHEAD_BYTES, 1)
    records = 0
    for some in columns:
        records += len(some.values)
        check_time(int(some.timestamps_ms.min(initial=1)))  # as when the driver sends them
        for batch in split_columns(*some, bytes_max=bytes_max):
            sender.send(compress(batch, compression))
    return records


def send_partition(
    transaction: SharedTransaction,
    topic: str,
    partition: int,
    columns: Iterable[RecordColumns],
    *,
    message_bytes_max: int,
    compression: CompressionName = "none",
) -> SentRecords:
    """Send the records of one partition, from a process that has nothing else of the transaction.

    Raises:
        MillstreamError: as :meth:`PartitionSender.send`.
    """
    with Brokers(transaction.address) as brokers:
        sender = PartitionSender(brokers, transaction, topic, partition)
        send_columns(sender, columns, message_bytes_max=message_bytes_max, compression=compression)
        return sender.finish()
