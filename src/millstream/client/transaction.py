"""Transactions of a producer: records of many partitions, group offsets and a fence, or nothing.

What is sent within ``with producer.transaction() as t`` becomes visible together when the block
ends, or never. The coordinator is the log's (see ``log.transactions``); here is what a producer
does for it: it stamps its batches, sees that all of them are in before it commits, and knows which
life of the producer comes next.

====================================  ===========================================================
at the end of the block               done
====================================  ===========================================================
all sends are in                      committed
a send failed                         aborted; its error is raised
the block raised                      what is queued is discarded, the rest aborted; raised
the fence stands at that batch        aborted; ``FencePassedError``
it was open for too long              it is aborted already; ``TransactionAbortedError``
a newer producer of the id has begun  ``ProducerFencedError``, now and from every later call
the log could not note the end        aborted, or before the next one; the error is raised
====================================  ===========================================================

Every end raises the producer epoch by one, whoever ends it, so the next life of a producer whose
transaction timed out is known without asking. To register again instead would fence a newer
producer that has begun meanwhile.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import suppress
from types import TracebackType
from typing import Literal, Protocol, Self

from millstream.client.buffer import Buffer
from millstream.client.writing import Writer
from millstream.errors import (
    ConfigError,
    FencePassedError,
    MillstreamError,
    ProducerFencedError,
    TransactionAbortedError,
)
from millstream.log.batch import SEQUENCE_MAX, EncodedBatch, ProducerStamp, stamp
from millstream.log.groups import NotedOffset, Offsets, check_offsets
from millstream.log.named_producers import PRODUCER_EPOCH_MAX, ProducerIdentity
from millstream.log.reader import LogReader
from millstream.log.topics import check_topic_id
from millstream.record import TopicPartition

_log = logging.getLogger(__name__)


class TransactionSession:
    """One producer's standing with the coordinator. Thread-safe; one transaction at a time.

    Raises:
        ConfigError: the name or the timeout is not possible.
    """

    def __init__(
        self, writer: Writer, buffer: Buffer, *, transactional_id: str, timeout_ms: int
    ) -> None:
        self._coordinator = writer.transactions
        self._buffer = buffer
        self._transactional_id = transactional_id
        self._timeout_ms = timeout_ms
        self._state: Literal["none", "open", "ending"] = "none"
        self._left_open = False  # the coordinator could not note the end of the last one
        self._sequences: dict[TopicPartition, int] = {}
        self._partition = writer.partition
        self._folder = writer.folder
        self._identity = self._register()
        buffer.refusal = self._outside = ConfigError(
            f"the producer {transactional_id!r} is transactional, and no transaction is open; "
            "send within `with producer.transaction():`"
        )

    def _register(self) -> ProducerIdentity:
        return self._coordinator.register(self._transactional_id, timeout_ms=self._timeout_ms)

    def stamp(self, name: TopicPartition, batch: EncodedBatch) -> EncodedBatch:
        """Return a batch as the next one of this transaction. Called by the sender only."""
        sequence = self._sequences.get(name, 0)
        self._sequences[name] = (sequence + batch.count) & SEQUENCE_MAX
        return stamp(batch, ProducerStamp(*self._identity, sequence), transactional=True)

    def begin(self) -> None:
        """Open a transaction.

        Raises:
            ConfigError: one is open.
            ProducerFencedError: a newer producer has begun.
            RetriableError: the log cannot note anything now.
        """
        buffer = self._buffer
        with buffer.changed:
            if buffer.refusal is not self._outside and buffer.refusal is not None:
                raise buffer.refusal.with_traceback(None)
            if self._state != "none":
                raise ConfigError(
                    f"a transaction of the producer {self._transactional_id!r} is open already; "
                    "end it before you begin another"
                )
            self._state = "ending"
        try:
            if self._left_open:
                with suppress(TransactionAbortedError):  # by its timeout, before us
                    self._end(commit=False)
            self._coordinator.begin(self._identity)
        except BaseException as error:
            if isinstance(error, ProducerFencedError):
                buffer.die(error)
            self._over(error)
            raise
        self._sequences = {}
        with buffer.changed:
            buffer.first_failure = None
            self._state = "open"
            if buffer.refusal is self._outside:
                buffer.refusal = None

    def commit(self, offsets: Mapping[str, Offsets], fence: tuple[str, int] | None) -> None:
        """End the transaction: wait for its sends, then make everything true together.

        Raises:
            MillstreamError: it was not committed; see the table in the module.
        """
        self._shut()
        failure: BaseException | None = None
        try:
            self._settle()
            failure = self._buffer.failure or self._buffer.first_failure
            if failure is None:
                self._end(commit=True, offsets=offsets, fence=fence)
        except BaseException as error:  # noqa: BLE001 - raised below, when all is in order
            failure = error
        if failure is not None and self._left_open:
            self._abort()
        self._over(failure)
        if failure is not None:
            raise failure.with_traceback(None)

    def abort(self, error: BaseException) -> None:
        """Take everything back, because of ``error``, which the caller raises."""
        self._shut()
        self._buffer.giving_up = True
        why = TransactionAbortedError(
            f"the transaction was aborted before the record was sent, by {error!r:.200}; begin "
            "another and send it again"
        )
        why.__cause__ = error
        self._buffer.discard(why)
        self._settle()
        self._abort()
        self._over(None)

    def check_places(self, offsets: Offsets) -> None:
        """Make sure that all these partitions are there.

        Raises:
            UnknownTopicError, ConfigError: one is not.
        """
        for name in offsets:
            self._partition(name)

    def topic_id(self, topic: str) -> str:
        """Return the id that a topic has now.

        Raises:
            UnknownTopicError: there is no such topic.
        """
        return LogReader(self._folder).topic_id(topic)

    def abort_open(self, error: BaseException) -> None:
        """Take back the transaction that is open, if one is; its block is told at its end."""
        with suppress(TransactionAbortedError):
            self.abort(error)

    # -- steps --------------------------------------------------------------------------------

    def _shut(self) -> None:
        """Let nothing more into the transaction.

        Raises:
            TransactionAbortedError: it has been ended meanwhile, by ``close``.
        """
        with self._buffer.changed:
            if self._state != "open":
                raise TransactionAbortedError(
                    "the transaction was aborted, as its producer was closed; begin it again with "
                    "a new producer"
                )
            self._state, self._left_open = "ending", True
            if self._buffer.refusal is None:
                self._buffer.refusal = self._outside

    def _settle(self) -> None:
        buffer = self._buffer
        with buffer.changed:
            buffer.wait(lambda: not buffer.busy or buffer.failure is not None)

    def _abort(self) -> None:
        if self._buffer.failure is None:
            try:
                with suppress(TransactionAbortedError):  # by its timeout, before us
                    self._end(commit=False)
            except MillstreamError as error:
                _log.warning(
                    "the transaction of %r could not be aborted yet: %s",
                    self._transactional_id,
                    error,
                )

    def _end(
        self,
        *,
        commit: bool,
        offsets: Mapping[str, Offsets] | None = None,
        fence: tuple[str, int] | None = None,
    ) -> None:
        """Tell the coordinator, and learn who we are from now on."""
        try:
            self._identity = self._coordinator.end(
                self._identity, commit=commit, offsets=offsets, fence=fence
            )
        except (TransactionAbortedError, FencePassedError):
            self._left_open = False  # it has ended, though not as we wished
            self._next_life()
            raise
        except ProducerFencedError as error:
            self._left_open = False
            self._buffer.die(error)
            raise
        self._left_open = False

    def _next_life(self) -> None:
        producer_epoch = self._identity.producer_epoch + 1
        if producer_epoch >= PRODUCER_EPOCH_MAX - 1:
            self._identity = self._register()
        else:
            self._identity = self._identity._replace(producer_epoch=producer_epoch)

    def _over(self, reported: BaseException | None) -> None:
        """Be ready for the next; what failed in this one is told by its end, not by a flush."""
        buffer = self._buffer
        with buffer.changed:
            self._state = "none"
            buffer.giving_up = False
            buffer.unreported = None
            if reported is not None and reported is buffer.failure:
                buffer.reported = True


def checked_fence(known: tuple[str, int] | None, writer: str, batch_id: int) -> tuple[str, int]:
    """Return a transaction's fence, where it may have it beside the one that is ``known``.

    Raises:
        ConfigError: another fence was given, or this one is not possible.
    """
    if not writer or batch_id < 0:
        raise ConfigError(
            f"a fence of {writer!r} at batch {batch_id} is not possible; give a writer's name "
            "and a batch id of 0 or more"
        )
    if known not in (None, (writer, batch_id)):
        raise ConfigError(
            f"the transaction has the fence {known} already, and can have no other; "
            "commit this one first"
        )
    return (writer, batch_id)


class Session(Protocol):
    """One producer's standing with whoever decides about its transactions."""

    def begin(self) -> None: ...

    def check_places(self, offsets: Offsets) -> None: ...

    def topic_id(self, topic: str) -> str: ...

    def commit(self, offsets: Mapping[str, Offsets], fence: tuple[str, int] | None) -> None: ...

    def abort(self, error: BaseException) -> None: ...


class Transaction:
    """What is sent in this block of a producer is committed with it, or not at all.

    Use it in ``with``: the end of the block commits, an exception aborts. Until the commit no
    reader sees a record of it, but those that ask for uncommitted ones. A future tells where its
    record lies; whether the record counts is told by the end of the block.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._offsets: dict[str, dict[TopicPartition, int | tuple[int, str] | NotedOffset]] = {}
        self._fence: tuple[str, int] | None = None
        self._topic_ids: dict[str, str] = {}

    def commit_offsets(
        self, group: str, offsets: Offsets, *, topic_ids: Mapping[str, str] | None = None
    ) -> None:
        """Note with this transaction how far ``group`` has read: the next offset to read of each.

        Args:
            topic_ids: The ids of the topics that these are offsets of, by name; a consumer has its own
                as ``topic_id``. They are looked at now, and before the transaction is committed.

        Raises:
            UnknownTopicError, ConfigError: there is no such topic or partition, or an offset is not
                possible.
            TopicRecreatedError: a topic has another id; also from the end of the block.
        """
        check_offsets(group, offsets)
        self._session.check_places(offsets)
        self._topic_ids |= topic_ids or {}
        self._check_topics()
        self._offsets.setdefault(group, {}).update(offsets)

    def _check_topics(self) -> None:
        for topic, topic_id in self._topic_ids.items():
            check_topic_id(topic, topic_id, self._session.topic_id(topic))

    def fence(self, writer: str, batch_id: int) -> None:
        """Commit only if ``writer`` has not committed batch ``batch_id`` or a later one.

        Raises:
            ConfigError: another fence was given, or this one is not possible.
        """
        self._fence = checked_fence(self._fence, writer, batch_id)

    def __enter__(self) -> Self:
        self._session.begin()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            try:
                self._check_topics()
            except MillstreamError as recreated:
                self._abort(recreated)
                raise
            self._session.commit(self._offsets, self._fence)
        else:
            self._abort(error)

    def _abort(self, error: BaseException) -> None:
        with suppress(TransactionAbortedError):  # by ``close``, before us
            self._session.abort(error)
