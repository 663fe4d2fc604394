"""The transactions of a producer of a folder: the client side of the log's transaction coordinator.

It stamps the batches, waits until all are appended before it commits, and knows its next producer epoch. The
table of ``client.transaction`` says what the end of a block does; ``log.transactions`` is the coordinator.

Every end raises the producer epoch by one, whoever ends the transaction, so a producer whose transaction
timed out knows its next one without asking. Registering again instead would fence a newer producer
that has begun meanwhile.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import suppress
from typing import Literal

from millstream.client.folder.buffer import ProducerBuffer
from millstream.client.folder.writer import ProducerWriter
from millstream.errors import (
    ConfigError,
    FencePassedError,
    MillstreamError,
    ProducerFencedError,
    TransactionAbortedError,
)
from millstream.log.batch import SEQUENCE_MAX, EncodedBatch, ProducerStamp, stamp
from millstream.log.groups import Offsets
from millstream.log.producer_identity import PRODUCER_EPOCH_MAX, ProducerIdentity
from millstream.log.reader import LogReader
from millstream.record import TopicPartition

_log = logging.getLogger(__name__)


class FolderTransactionManager:
    """The transactions of one producer. Thread-safe; one transaction at a time.

    Raises:
        ConfigError: the name or the timeout is not possible.
    """

    def __init__(
        self,
        writer: ProducerWriter,
        buffer: ProducerBuffer,
        *,
        transactional_id: str,
        timeout_ms: int,
    ) -> None:
        self._coordinator = writer.transactions
        self._buffer = buffer
        self._transactional_id = transactional_id
        self._timeout_ms = timeout_ms
        self._state: Literal["none", "open", "ending"] = "none"
        self._left_open = False  # the coordinator could not record the end of the last one
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
            RetriableError: the log can record nothing now.
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
                buffer.fail(error)
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
        self._stop_sends()
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
        """Abort the transaction, because of ``error``, which the caller raises."""
        self._stop_sends()
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

    def check_partitions(self, offsets: Offsets) -> None:
        """Check that all these partitions exist.

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
        """Abort the transaction that is open, if one is; its block raises at its end."""
        with suppress(TransactionAbortedError):
            self.abort(error)

    # -- steps --------------------------------------------------------------------------------

    def _stop_sends(self) -> None:
        """Accept no more sends in the transaction.

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
        """End it at the coordinator, which returns the next identity."""
        try:
            self._identity = self._coordinator.end(
                self._identity, commit=commit, offsets=offsets, fence=fence
            )
        except (TransactionAbortedError, FencePassedError):
            self._left_open = False  # it has ended, though not as requested
            self._next_epoch()
            raise
        except ProducerFencedError as error:
            self._left_open = False
            self._buffer.fail(error)
            raise
        self._left_open = False

    def _next_epoch(self) -> None:
        producer_epoch = self._identity.producer_epoch + 1
        if producer_epoch >= PRODUCER_EPOCH_MAX - 1:
            self._identity = self._register()
        else:
            self._identity = self._identity._replace(producer_epoch=producer_epoch)

    def _over(self, reported: BaseException | None) -> None:
        """Prepare for the next one; the end of this one reports its failures, a flush does not."""
        buffer = self._buffer
        with buffer.changed:
            self._state = "none"
            buffer.giving_up = False
            buffer.unreported = None
            if reported is not None and reported is buffer.failure:
                buffer.reported = True
