"""Transactions over brokers: records, group offsets and a fence, or nothing.

The coordinator is a broker. The client's protocol has holes where an answer is lost, so here a
transaction whose end is not known for sure ends its producer as well: whoever makes another one has
the old transaction ended, one way or the other, before it begins.

====================================  ===========================================================
at the end of the block               done
====================================  ===========================================================
all sends are in                      committed
a send failed                         aborted; its error is raised
the block raised                      aborted; raised
the fence stands at that batch        aborted; ``FencePassedError``
it was open for too long              aborted; ``TransactionAbortedError``
a newer producer of the id has begun  ``ProducerFencedError``, now and from every later call
nobody answers                        the error is raised, now and from every later call
====================================  ===========================================================

How long a transaction may be open is held here. Brokers get a longer time, after which they take back
what a producer left open that is no more: they could not tell it from one that was replaced. They look
every few seconds.

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
from typing import TYPE_CHECKING, Any, Literal

from confluent_kafka import KafkaError, KafkaException, Producer
from confluent_kafka import TopicPartition as KafkaPlace
from confluent_kafka.admin import OffsetSpec

from millstream.client.kafka.cluster import FENCES, Cluster
from millstream.client.kafka.failures import as_ours, error_of
from millstream.client.kafka.group_offsets import (
    FENCE_GROUP,
    KafkaGroups,
    fence_offsets,
    places,
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
from millstream.log.named_producers import TIMEOUT_MS_MAX
from millstream.record import TopicPartition

if TYPE_CHECKING:
    from millstream.client.kafka.producer import KafkaProducer

_MARGIN_MS = 10_000  # what brokers wait for longer than the producer itself
_TRIES = 3
_LOOK_AGAIN_S = 0.002
_KEEPS_BROKERS = {"metadata.recovery.strategy": "none"}
_OF_FENCES = {
    "cleanup.policy": "compact",
    "min.cleanable.dirty.ratio": "0.1",
    "segment.ms": "3600000",  # what is not closed is not compacted
}


@cache
def keeps_brokers() -> dict[str, object]:
    """Return what makes a client remember its brokers when none of them answers.

    Else it begins anew with the addresses it was given, and would wait for a coordinator that it has
    forgotten, beyond any timeout, when offsets are to go with a transaction
    (https://github.com/confluentinc/librdkafka/issues/5511). Nothing, in versions that never forget.
    """
    try:
        Producer({"log_level": 0, **_KEEPS_BROKERS})
    except KafkaException:
        return {}
    return dict(_KEEPS_BROKERS)


class KafkaTransactions:
    """One producer's standing with the coordinator; one transaction at a time.

    Raises:
        ConfigError: the name or the timeout is not possible.
        BrokerAwayError: the coordinator did not answer in time.
    """

    def __init__(
        self,
        producer: KafkaProducer,
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

    @staticmethod
    def settings(
        transactional_id: str, timeout_ms: int, given: Mapping[str, object]
    ) -> dict[str, object]:
        """Return what the client is told besides what it is given.

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
        keeps = {} if _KEEPS_BROKERS.keys() & given.keys() else keeps_brokers()
        return {
            "transactional.id": transactional_id,
            "transaction.timeout.ms": longer_ms,
            **keeps,
        }

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
        self._shut()
        try:
            self._producer.settle()
            self._judge()
            if fence is not None:
                self._make_fences()
                self._producer.note_fence(*fence)
            moved = _all_offsets(offsets, fence)
            for group, given in moved.items():
                self._send_offsets(given, self._groups.member(group))
            if fence is not None:  # by now what was committed before is there to be seen
                self._pass(*fence)
            self._call("commit_transaction")
            self._show(moved)
        except ProducerFencedError as error:
            self._die(error)
            raise
        except MillstreamError as error:
            self._abort()
            refusal = self._producer.refusal
            if isinstance(refusal, ProducerFencedError):  # why a record was not taken either
                raise refusal.with_traceback(None) from error
            raise
        finally:
            self._over()

    def _judge(self) -> None:
        """Raise why the transaction is to be taken back, if it is."""
        if time.monotonic() - self._began_s > self._timeout_s:
            raise TransactionAbortedError(
                f"the transaction of {self._id!r} was open for longer than its timeout, {self._timeout_s:g} "
                "s, and was aborted; begin another, or make the producer with a longer one",
                timed_out=True,
            )
        if self._producer.first_failure is not None:
            raise self._producer.first_failure.with_traceback(None)

    def _pass(self, writer: str, batch_id: int) -> None:
        stands = self._groups.fence(writer)
        if stands is not None and stands >= batch_id:
            raise FencePassedError(
                f"the fence of {writer!r} stands at batch {stands}, so batch {batch_id} is committed "
                "already; skip it",
                batch_id=stands,
            )

    def _show(self, moved: Mapping[str, Sequence[KafkaPlace]]) -> None:
        """Wait until readers see what was committed, which is a moment after it was decided.

        Until its marker is there, a partition ends for them where the transaction's first record is;
        if before that, it is another transaction that holds them back.
        """
        first, self._producer.first_offsets = self._producer.first_offsets, {}
        deadline_s = time.monotonic() + self._cluster.timeout_s
        unseen = [KafkaPlace(*name) for name in first]
        while unseen and time.monotonic() < deadline_s:
            ends = self._cluster.look_up(unseen, OffsetSpec.latest(), "read_committed")
            unseen = [
                place
                for place, end in zip(unseen, ends, strict=True)
                if end == first[place.topic, place.partition]
            ]
            time.sleep(_LOOK_AGAIN_S if unseen else 0)
        for group, given in moved.items():
            while not self._stands(group, given) and time.monotonic() < deadline_s:
                time.sleep(_LOOK_AGAIN_S)

    def _stands(self, group: str, given: Sequence[KafkaPlace]) -> bool:
        found = self._groups.committed_of(group, given)
        return all(
            (at := found.get(TopicPartition(place.topic, place.partition))) is not None
            and at.offset == place.offset
            for place in given
        )

    def _make_fences(self) -> None:
        """Make sure that the topic is there to which the offsets that are fences belong."""
        with suppress(TopicExistsError):
            if not self._cluster.has_fences():
                self._cluster.create_topic(FENCES, 1, _OF_FENCES)

    def check_places(self, offsets: Offsets) -> None:
        """Make sure that all these partitions are there.

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
        """Take everything back, because of ``error``, which the caller raises.

        Raises:
            TransactionAbortedError: it has been ended meanwhile, by ``close``.
        """
        del error  # what was sent already is told by its own outcome
        self._shut()
        self._abort()
        self._over()

    def abort_open(self, error: MillstreamError) -> None:
        """Take back the transaction that is open, if one is; refuse what comes after."""
        with suppress(TransactionAbortedError):
            self.abort(error)
        self._producer.refusal = error

    # -- steps --------------------------------------------------------------------------------

    def _shut(self) -> None:
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
        self._producer.forget_failure()

    def _abort(self) -> None:
        """Take back what was sent; where that is not known for sure, this producer ends."""
        try:
            self._call("abort_transaction")
            self._producer.settle()
        except MillstreamError as error:
            self._die(error)

    def _die(self, error: MillstreamError) -> None:
        self._producer.refusal = error

    def _send_offsets(self, given: Sequence[KafkaPlace], member: Any) -> None:
        """Let a group's offsets go with the transaction.

        Where a broker went for good meanwhile, the client may wait in vain, and beyond the time that
        it was given. So it waits in a thread, and this producer ends where the wait does not.

        Raises:
            MillstreamError: it failed.
        """
        failed: list[BaseException] = []

        def send() -> None:
            try:
                self._call("send_offsets_to_transaction", list(given), member)
            except BaseException as error:  # noqa: BLE001 - it is raised where it is waited for
                failed.append(error)

        thread = threading.Thread(target=send, name="millstream-kafka-offsets", daemon=True)
        thread.start()
        thread.join(2 * self._cluster.timeout_s)
        if thread.is_alive():
            error = self._cluster.away()
            self._die(error)
            raise error
        if failed:
            raise failed[0].with_traceback(None)

    def _call(self, name: str, *args: Any, timed: bool = True) -> None:
        """Do a step, again where the client says that it may succeed.

        Raises:
            MillstreamError: it failed. If it may have happened nevertheless, this producer ends.
        """
        what = f"{name.replace('_', ' ')} of {self._id!r} failed"
        for left in reversed(range(_TRIES)):
            try:
                options = (self._cluster.timeout_s,) if timed else ()
                getattr(self._producer.library, name)(*args, *options)
            except KafkaException as raised:
                error = error_of(raised)
                if error.retriable() and left:
                    continue
                ours = _as_ours(error, what)
                if error.fatal() or (
                    not error.txn_requires_abort() and name != "begin_transaction"
                ):
                    self._die(ours)
                raise ours from raised
            else:
                return


def _all_offsets(
    offsets: Mapping[str, Offsets], fence: tuple[str, int] | None
) -> dict[str, list[KafkaPlace]]:
    """Return what each group commits, the one of the fence among them."""
    found = {group: places(given) for group, given in offsets.items() if given}
    if fence is not None:
        writer, batch_id = fence
        found[FENCE_GROUP + writer] = fence_offsets(batch_id)
    return found


def _as_ours(error: KafkaError, what: str) -> MillstreamError:
    if error.code() == KafkaError.INVALID_TXN_STATE:
        return TransactionAbortedError(f"{what} ({error.str()}): begin another")
    return as_ours(error, what)
