"""Transactions over brokers: records, group offsets and a fence, or nothing.

The coordinator is a broker. Where a response is lost, the client cannot find out how a
transaction ended. Then the transaction ends its producer as well: a new producer of the id ends the old
transaction, by a commit or an abort, before it begins its own.

====================================  ===========================================================
at the end of the block               done
====================================  ===========================================================
all sends are in                      committed
a send failed                         aborted; its error is raised
the block raised                      aborted; raised
the fence is at that batch or later   aborted; ``FencePassedError``
it was open for too long              aborted; ``TransactionAbortedError``
a newer producer of the id has begun  ``ProducerFencedError``, now and from every later call
no broker responds                    the error is raised, now and from every later call
====================================  ===========================================================

The timeout of a transaction is enforced here. Brokers get a longer one, after which they abort what a dead
producer left open: they could not tell it from one that was replaced. They check every few seconds.

The fence is looked up before the commit, by the one producer of its transactional id: another one with
another id could pass it meanwhile, so a fence belongs to one id. A commit returns when readers see it,
which brokers do not promise by themselves.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from typing import Any, Literal, Protocol

from confluent_kafka import KafkaError, KafkaException, Producer
from confluent_kafka import TopicPartition as KafkaTopicPartition
from confluent_kafka.admin import OffsetSpec

from millstream.client.kafka.cluster import FENCE_TOPIC, Cluster
from millstream.client.kafka.errors import kafka_error_of, to_millstream_error
from millstream.client.kafka.groups import (
    FENCE_GROUP,
    KafkaGroups,
    fence_offsets,
    to_kafka_offsets,
)
from millstream.errors import (
    ConfigError,
    FencePassedError,
    MillstreamError,
    ProducerFencedError,
    TopicExistsError,
    TransactionAbortedError,
)
from millstream.log.groups import Offsets
from millstream.log.producer_identity import TIMEOUT_MS_MAX
from millstream.record import TopicPartition

_MARGIN_MS = 10_000  # how much longer brokers wait than the producer itself
_TRIES = 3
_LOOK_AGAIN_S = 0.002
_KEEPS_BROKERS = {"metadata.recovery.strategy": "none"}
_FENCE_TOPIC_SETTINGS = {
    "cleanup.policy": "compact",
    "min.cleanable.dirty.ratio": "0.1",
    "segment.ms": "3600000",  # only closed segments are compacted
}


@cache
def keep_brokers_settings() -> dict[str, object]:
    """Return the setting by which a client keeps its brokers when none of them responds.

    Else it starts over with the addresses it was given, and would wait beyond any timeout for a coordinator
    that it no longer knows, when offsets are added to a transaction
    (https://github.com/confluentinc/librdkafka/issues/5511). Nothing, in versions that always keep them.
    """
    try:
        Producer({"log_level": 0, **_KEEPS_BROKERS})
    except KafkaException:
        return {}
    return dict(_KEEPS_BROKERS)


class TransactionalSends(Protocol):
    """The calls of ``KafkaProducer`` that its transactions use."""

    library: Any
    refusal: MillstreamError | None
    first_failure: MillstreamError | None
    first_offsets: dict[tuple[str, int], int]

    def wait_for_deliveries(self) -> None: ...

    def note_fence(self, writer: str, batch_id: int) -> None: ...

    def clear_failure(self) -> None: ...


def transaction_settings(
    transactional_id: str, timeout_ms: int, given: Mapping[str, object]
) -> dict[str, object]:
    """Return the client settings of a transactional producer, beside those that were ``given``.

    Raises:
        ConfigError: the name or the timeout is not possible.
    """
    if not transactional_id:
        raise ConfigError("transactional_id is empty; give a name, or None")
    if not 0 < timeout_ms <= TIMEOUT_MS_MAX:
        raise ConfigError(
            f"a transaction timeout of {timeout_ms} ms is not possible; give 1 to {TIMEOUT_MS_MAX}"
        )
    longer_ms = min(timeout_ms + _MARGIN_MS, TIMEOUT_MS_MAX)
    keeps = {} if _KEEPS_BROKERS.keys() & given.keys() else keep_brokers_settings()
    return {
        "transactional.id": transactional_id,
        "transaction.timeout.ms": longer_ms,
        **keeps,
    }


class KafkaTransactionManager:
    """The transactions of one producer; one transaction at a time.

    Raises:
        ConfigError: the name or the timeout is not possible.
        BrokerUnavailableError: the coordinator did not respond in time.
    """

    def __init__(
        self,
        producer: TransactionalSends,
        cluster: Cluster,
        groups: KafkaGroups,
        transactional_id: str,
        timeout_s: float,
    ) -> None:
        self._producer = producer
        self._cluster = cluster
        self._groups = groups
        self._id = transactional_id
        self._timeout_s = timeout_s
        self._state: Literal["none", "open", "ending"] = "none"
        self._began_s = 0.0
        self._call("init_transactions")
        producer.refusal = self._outside = ConfigError(
            f"the producer {transactional_id!r} is transactional, and no transaction is open; "
            "send within `with producer.transaction():`"
        )

    def begin(self) -> None:
        """Open a transaction.

        Raises:
            ConfigError: one is open.
            ProducerFencedError: a newer producer has begun.
        """
        refusal = self._producer.refusal
        if refusal is not None and refusal is not self._outside:
            raise refusal.with_traceback(None)
        if self._state != "none":
            raise ConfigError(
                f"a transaction of the producer {self._id!r} is open already; end it before you "
                "begin another"
            )
        self._call("begin_transaction", timed=False)
        self._producer.first_failure = None
        self._producer.first_offsets = {}
        self._began_s = time.monotonic()
        self._state = "open"
        self._producer.refusal = None

    def commit(self, offsets: Mapping[str, Offsets], fence: tuple[str, int] | None) -> None:
        """End the transaction: wait for its sends, then make everything true together.

        Raises:
            MillstreamError: it was not committed; see the table in the module.
        """
        self._stop_sends()
        try:
            self._producer.wait_for_deliveries()
            self._check_committable()
            if fence is not None:
                make_fences(self._cluster)
                self._producer.note_fence(*fence)
            moved = _all_offsets(offsets, fence)
            for group, given in moved.items():
                self._send_offsets(given, self._groups.group_metadata(group))
            if fence is not None:  # readers see what was committed before by now
                self._advance_fence(*fence)
            self._call("commit_transaction")
            first, self._producer.first_offsets = self._producer.first_offsets, {}
            wait_until_visible(self._cluster, self._groups, first, moved)
        except ProducerFencedError as error:
            self._fail(error)
            raise
        except MillstreamError as error:
            self._abort()
            refusal = self._producer.refusal
            if isinstance(refusal, ProducerFencedError):  # why a record was not accepted, too
                raise refusal.with_traceback(None) from error
            raise
        finally:
            self._over()

    def _check_committable(self) -> None:
        """Raise why the transaction is to be aborted, if it is."""
        if time.monotonic() - self._began_s > self._timeout_s:
            raise TransactionAbortedError(
                f"the transaction of {self._id!r} was open for longer than its timeout, {self._timeout_s:g} "
                "s, and was aborted; begin another, or make the producer with a longer one",
                timed_out=True,
            )
        if self._producer.first_failure is not None:
            raise self._producer.first_failure.with_traceback(None)

    def _advance_fence(self, writer: str, batch_id: int) -> None:
        at_batch = self._groups.fence(writer)
        if at_batch is not None and at_batch >= batch_id:
            raise FencePassedError(
                f"the fence of {writer!r} is at batch {at_batch}, so batch {batch_id} is committed "
                "already; skip it",
                batch_id=at_batch,
            )

    def check_partitions(self, offsets: Offsets) -> None:
        """Check that all these partitions exist.

        Raises:
            UnknownTopicError, ConfigError: one is not.
        """
        for name in offsets:
            self._cluster.check_partition(*name)

    def topic_id(self, topic: str) -> str:
        """Return the id that a topic has now.

        Raises:
            UnknownTopicError: there is no such topic.
        """
        return self._cluster.topic(topic).topic_id

    def abort(self, error: BaseException) -> None:
        """Abort the transaction, because of ``error``, which the caller raises.

        Raises:
            TransactionAbortedError: it has been ended meanwhile, by ``close``.
        """
        del error  # the futures of what was sent already report it
        self._stop_sends()
        self._abort()
        self._over()

    def abort_open(self, error: MillstreamError) -> None:
        """Abort the transaction that is open, if one is; refuse every later call."""
        with suppress(TransactionAbortedError):
            self.abort(error)
        self._producer.refusal = error

    # -- steps --------------------------------------------------------------------------------

    def _stop_sends(self) -> None:
        if self._state != "open":
            raise TransactionAbortedError(
                "the transaction was aborted, as its producer was closed; begin it again with a new "
                "producer"
            )
        self._state = "ending"
        if self._producer.refusal is None:
            self._producer.refusal = self._outside

    def _over(self) -> None:
        self._state = "none"
        self._producer.clear_failure()

    def _abort(self) -> None:
        """Abort the transaction; where that is not certain, this producer ends."""
        try:
            self._call("abort_transaction")
            self._producer.wait_for_deliveries()
        except MillstreamError as error:
            self._fail(error)

    def _fail(self, error: MillstreamError) -> None:
        self._producer.refusal = error

    def _send_offsets(self, given: Sequence[KafkaTopicPartition], member: Any) -> None:
        """Add a group's offsets to the transaction.

        If a broker has gone for good meanwhile, the client may wait beyond its timeout. So it waits in a
        thread, and this producer ends if the wait does not.

        Raises:
            MillstreamError: it failed.
        """
        failed: list[BaseException] = []

        def send() -> None:
            try:
                self._call("send_offsets_to_transaction", list(given), member)
            except BaseException as error:  # noqa: BLE001 - it is raised by the thread that waits
                failed.append(error)

        thread = threading.Thread(target=send, name="millstream-kafka-offsets", daemon=True)
        thread.start()
        thread.join(2 * self._cluster.timeout_s)
        if thread.is_alive():
            error = self._cluster.unavailable_error()
            self._fail(error)
            raise error
        if failed:
            raise failed[0].with_traceback(None)

    def _call(self, name: str, *args: Any, timed: bool = True) -> None:
        """Do a step; retry it where the client says that this may succeed.

        Raises:
            MillstreamError: it failed. If it may have happened nevertheless, this producer ends.
        """
        what = f"{name.replace('_', ' ')} of {self._id!r} failed"
        for left in reversed(range(_TRIES)):
            try:
                options = (self._cluster.timeout_s,) if timed else ()
                getattr(self._producer.library, name)(*args, *options)
            except KafkaException as raised:
                error = kafka_error_of(raised)
                if error.retriable() and left:
                    continue
                ours = _translate_error(error, what)
                if error.fatal() or (
                    not error.txn_requires_abort() and name != "begin_transaction"
                ):
                    self._fail(ours)
                raise ours from raised
            else:
                return


def make_fences(cluster: Cluster) -> None:
    """Create the topic of the fences if it is missing."""
    with suppress(TopicExistsError):
        if not cluster.has_fences():
            cluster.create_topic(FENCE_TOPIC, 1, _FENCE_TOPIC_SETTINGS)


def wait_until_visible(
    cluster: Cluster,
    groups: KafkaGroups,
    first_offsets: Mapping[tuple[str, int], int],
    moved: Mapping[str, Sequence[KafkaTopicPartition]],
) -> None:
    """Wait until readers see what a transaction has committed, a moment after the decision.

    Until its marker is there, a partition ends for them at the transaction's first record (``first_offsets``); if
    before that, at that of another transaction. ``moved`` is what groups have committed with it.
    """
    deadline_s = time.monotonic() + cluster.timeout_s
    unseen = [KafkaTopicPartition(*name) for name in first_offsets]
    while unseen and time.monotonic() < deadline_s:
        ends = cluster.list_offsets(unseen, OffsetSpec.latest(), "read_committed")
        unseen = [
            place
            for place, end in zip(unseen, ends, strict=True)
            if end == first_offsets[place.topic, place.partition]
        ]
        time.sleep(_LOOK_AGAIN_S if unseen else 0)
    for group, given in moved.items():
        while not _is_visible(groups, group, given) and time.monotonic() < deadline_s:
            time.sleep(_LOOK_AGAIN_S)


def _is_visible(groups: KafkaGroups, group: str, given: Sequence[KafkaTopicPartition]) -> bool:
    found = groups.committed_of(group, given)
    return all(
        (at := found.get(TopicPartition(place.topic, place.partition))) is not None
        and at.offset == place.offset
        for place in given
    )


def _all_offsets(
    offsets: Mapping[str, Offsets], fence: tuple[str, int] | None
) -> dict[str, list[KafkaTopicPartition]]:
    """Return what each group commits, the one of the fence among them."""
    found = {group: to_kafka_offsets(given) for group, given in offsets.items() if given}
    if fence is not None:
        writer, batch_id = fence
        found[FENCE_GROUP + writer] = fence_offsets(batch_id)
    return found


def _translate_error(error: KafkaError, what: str) -> MillstreamError:
    if error.code() == KafkaError.INVALID_TXN_STATE:
        return TransactionAbortedError(f"{what} ({error.str()}): begin another")
    return to_millstream_error(error, what)
