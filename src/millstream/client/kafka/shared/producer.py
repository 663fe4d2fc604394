"""Begins and ends the transactions in which others send: the driver's part.

A transaction, step by step:

1. InitProducerId, with the producer id and producer epoch of the one before. The producer epoch rises, so whoever still sends
   for an earlier batch is refused; and a producer that was replaced is refused here, instead of replacing the
   newer one (KIP-360).
2. AddPartitionsToTxn: the partitions that others will send to.
3. They send. Each partition belongs to one of them.
4. The fence: its record and the offset of its group, sent from here, in the same transaction.
5. EndTxn. With the commit all of it is visible, or none.

==========================================  ==========================================================
a driver that dies after                    leaves
==========================================  ==========================================================
1                                           nothing
2, 3 or 4                                   an open transaction. The next run's InitProducerId aborts it before
                                            it returns; without one, the broker does after the timeout
5                                           the batch with its fence, which the next run finds
a driver that was replaced, at any of them  is refused, as its producer epoch is older
==========================================  ==========================================================

These are the versions of the requests before KIP-890's second part, with which an EndTxn leaves the producer epoch
as it is: step 1 raises it. Where a response is lost, the request is repeated: each of them has the effect of one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

from confluent_kafka import KafkaError

from millstream.broker.protocol.messages_share import SHARE_FETCH
from millstream.broker.protocol.messages_transactions import (
    ADD_OFFSETS_TO_TXN,
    ADD_PARTITIONS_TO_TXN,
    END_TXN,
    INIT_PRODUCER_ID,
    TXN_OFFSET_COMMIT,
)
from millstream.broker.protocol.schema import Api
from millstream.broker.protocol.wire import Message
from millstream.client.address import KafkaAddress
from millstream.client.kafka.cluster import FENCE_TOPIC, Cluster
from millstream.client.kafka.groups import FENCE_GROUP, KafkaGroups, fence_offsets
from millstream.client.kafka.shared.brokers import Brokers, CoordinatorKind, check
from millstream.client.kafka.shared.security import unsupported_mechanism
from millstream.client.kafka.shared.sender import PartitionSender, SentRecords, SharedTransaction
from millstream.client.kafka.transaction import make_fences, wait_until_visible
from millstream.errors import (
    FencePassedError,
    MillstreamError,
    TransactionAbortedError,
)
from millstream.log.clocks import wall_clock_ms
from millstream.log.encoding import SimpleRecord, encode_records
from millstream.log.producer_identity import NOBODY, TIMEOUT_MS_MAX, ProducerIdentity

_MARGIN_MS = 10_000  # how much longer brokers wait than the producer itself
_RAISES_EPOCH = (INIT_PRODUCER_ID, 3)  # of one that was not replaced: since Apache Kafka 2.5
_VERIFIES = (ADD_PARTITIONS_TO_TXN, 4)  # a version for brokers alone: since Apache Kafka 3.6


def why_not_shared(address: KafkaAddress) -> str | None:
    """Return why several processes cannot send in one transaction there; None if they can.

    Raises:
        ConfigError, BrokerUnavailableError: the brokers cannot be reached.
    """
    mechanism = unsupported_mechanism(address)
    if mechanism is not None:
        return f"they can't authenticate with {mechanism}"
    with Brokers(address) as brokers:
        broker = brokers.some_broker()
        if not broker.supports(*_RAISES_EPOCH):
            return "its brokers are older than Apache Kafka 2.5"
        # Millstream's broker has both parts in one process; Kafka has no share groups before it verifies, either.
        if not broker.supports(*_VERIFIES) and not broker.supports(
            SHARE_FETCH, SHARE_FETCH.versions[0]
        ):
            return "its brokers, older than Apache Kafka 3.6, would take records after a transaction's end"
    return None


class SharedProducer:
    """The transactions of one transactional id. Not thread-safe; one transaction at a time.

    Raises:
        ConfigError: the name or the timeout is not possible.
        BrokerUnavailableError: no broker responds.
    """

    def __init__(
        self,
        cluster: Cluster,
        groups: KafkaGroups,
        transactional_id: str,
        timeout_ms: int,
        *,
        clock_ms: Callable[[], int] = wall_clock_ms,
    ) -> None:
        self._cluster, self._groups = cluster, groups
        self._id = transactional_id
        self._timeout_ms = timeout_ms
        self._clock_ms = clock_ms
        self._brokers = Brokers(cluster.address)
        self._open: SharedTransaction | None = None
        self._began_s = 0.0
        try:
            self._identity = self._next_identity(NOBODY)
        except BaseException:
            self._brokers.close()
            raise

    def _next_identity(self, last: ProducerIdentity) -> ProducerIdentity:
        asked = {
            "transactional_id": self._id,
            "transaction_timeout_ms": min(self._timeout_ms + _MARGIN_MS, TIMEOUT_MS_MAX),
            "producer_id": last.producer_id,
            "producer_epoch": last.producer_epoch,
        }
        found = self._ask("transaction", self._id, INIT_PRODUCER_ID, asked, _own_code)
        return ProducerIdentity(found["producer_id"], found["producer_epoch"])

    def _ask(
        self,
        kind: CoordinatorKind,
        key: str,
        api: Api,
        message: Message,
        codes: Callable[[Message], Iterable[int]],
        *,
        about: str = "",
    ) -> Message:
        def attempt() -> Message:
            response = self._brokers.coordinator(kind, key).request(api, message)
            for code in codes(response):
                check(code, f"{api.name} of {self._id!r}{about} failed")
            return response

        return self._brokers.retry(attempt)

    def _identified(self, transaction: SharedTransaction, prefix: str = "") -> Message:
        return {
            f"{prefix}transactional_id": self._id,
            f"{prefix}producer_id": transaction.producer_id,
            f"{prefix}producer_epoch": transaction.producer_epoch,
        }

    # -- a transaction --------------------------------------------------------------------------

    @property
    def open(self) -> SharedTransaction | None:
        """The transaction that is open, if one is."""
        return self._open

    def begin(self) -> SharedTransaction:
        """Begin a transaction.

        Raises:
            ProducerFencedError: a newer producer of this transactional id has begun.
        """
        assert self._open is None, "one transaction at a time"
        self._identity = self._next_identity(self._identity)
        self._open = SharedTransaction(self._cluster.address, self._id, *self._identity)
        self._began_s = time.monotonic()
        return self._open

    def add_partitions(self, topic: str, partitions: Sequence[int]) -> None:
        """Have a topic's partitions take part in the open transaction.

        Raises:
            UnknownTopicError: there is no such topic or partition.
            ProducerFencedError: a newer producer has begun.
        """
        asked = {
            **self._identified(self._begun(), "v3_and_below_"),
            "v3_and_below_topics": [{"name": topic, "partitions": list(partitions)}],
        }
        about = f" for the topic {topic!r}"
        self._ask(
            "transaction", self._id, ADD_PARTITIONS_TO_TXN, asked, _partition_codes, about=about
        )

    def partition_count(self, topic: str) -> int:
        """Return how many partitions a topic has, or had a few seconds ago."""
        return self._cluster.partition_count(topic)

    def sender(self, topic: str, partition: int) -> PartitionSender:
        """Return what sends records of the open transaction from this process."""
        return PartitionSender(self._brokers, self._begun(), topic, partition)

    def _begun(self) -> SharedTransaction:
        assert self._open is not None, "a transaction is begun first"
        return self._open

    def abort(self) -> None:
        """Abort the open transaction, if one is."""
        if self._open is not None:
            transaction, self._open = self._open, None
            # Where no partition was added, or brokers have done it already, there is none to end.
            with suppress(TransactionAbortedError):
                self._end(transaction, commit=False)

    def _end(self, transaction: SharedTransaction, *, commit: bool) -> None:
        asked = {**self._identified(transaction), "committed": commit}
        self._ask("transaction", self._id, END_TXN, asked, _own_code)

    def commit(self, writer: str, batch_id: int, sent: Sequence[SentRecords]) -> None:
        """Commit the open transaction with a fence; return when readers see what was ``sent``.

        Raises:
            FencePassedError: the fence is at this batch or a later one; the transaction was aborted.
            TransactionAbortedError: it was open for longer than its timeout, and was aborted.
            ProducerFencedError: a newer producer has begun. Nothing was committed.
            MillstreamError: as the text says. If no broker responds, it may have been committed.
        """
        transaction = self._begun()
        try:
            self._check_time()
            make_fences(self._cluster)
            fence = self._send_fence(writer, batch_id)
            self._check_fence(writer, batch_id)
            self._open = None
            self._end(transaction, commit=True)
        except BaseException:
            with suppress(MillstreamError):
                self.abort()
            raise
        first = {(one.topic, one.partition): one.first_offset for one in (*sent, fence)}
        wait_until_visible(
            self._cluster,
            self._groups,
            {place: offset for place, offset in first.items() if offset >= 0},
            {FENCE_GROUP + writer: fence_offsets(batch_id)},
        )

    def _check_time(self) -> None:
        if time.monotonic() - self._began_s > self._timeout_ms / 1000:
            raise TransactionAbortedError(
                f"the transaction of {self._id!r} was open for longer than its timeout, "
                f"{self._timeout_ms / 1000:g} s, and was aborted; run again with smaller batches",
                timed_out=True,
            )

    def _check_fence(self, writer: str, batch_id: int) -> None:
        at_batch = self._groups.fence(writer)
        if at_batch is not None and at_batch >= batch_id:
            raise FencePassedError(
                f"the fence of {writer!r} is at batch {at_batch}, so batch {batch_id} is committed "
                "already; skip it",
                batch_id=at_batch,
            )

    def _send_fence(self, writer: str, batch_id: int) -> SentRecords:
        """Send the fence's record, and add the offset of its group to the transaction."""
        transaction, group = self._begun(), FENCE_GROUP + writer
        self.add_partitions(FENCE_TOPIC, [0])
        sender = self.sender(FENCE_TOPIC, 0)
        sender.send(
            encode_records([SimpleRecord(self._clock_ms(), writer.encode(), b"%d" % batch_id)])
        )
        named = {**self._identified(transaction), "group_id": group}
        about = f" for the group {group!r}"
        self._ask("transaction", self._id, ADD_OFFSETS_TO_TXN, named, _own_code, about=about)
        (offset,) = fence_offsets(batch_id)
        at = {"partition_index": offset.partition, "committed_offset": offset.offset}
        committed = {
            **named,
            "topics": [{"name": offset.topic, "partitions": [{**at, "committed_metadata": ""}]}],
        }
        self._ask("group", group, TXN_OFFSET_COMMIT, committed, _offset_codes, about=about)
        return sender.finish()

    def close(self) -> None:
        """Abort the open transaction, if that is possible, and close the connections."""
        with suppress(MillstreamError):
            self.abort()
        self._brokers.close()


def _own_code(response: Message) -> Iterable[int]:
    return [response["error_code"]]


def _partition_codes(response: Message) -> Iterable[int]:
    codes = [
        one["partition_error_code"]
        for topic in response["results_by_topic_v3_and_below"]
        for one in topic["results_by_partition"]
    ]
    # If one partition cannot be added, brokers say of all others that they have not tried: that one says why.
    return sorted(codes, key=lambda code: code == KafkaError.OPERATION_NOT_ATTEMPTED)


def _offset_codes(response: Message) -> Iterable[int]:
    return [one["error_code"] for topic in response["topics"] for one in topic["partitions"]]
