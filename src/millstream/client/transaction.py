"""Transactions of a producer: records of many partitions, group offsets and a fence, or nothing.

What is sent within ``with producer.transaction() as t`` becomes visible together when the block
ends, or never. The transaction manager of the producer (``folder.transaction``, ``kafka.transaction``)
talks to the coordinator.

====================================  ===========================================================
at the end of the block               done
====================================  ===========================================================
all sends are in                      committed
a send failed                         aborted; its error is raised
the block raised                      what is queued is discarded, the rest aborted; raised
the fence is at that batch or later   aborted; ``FencePassedError``
it was open for too long              it is aborted already; ``TransactionAbortedError``
a newer producer of the id has begun  ``ProducerFencedError``, now and from every later call
the log could not record the end      aborted, or before the next one; the error is raised
====================================  ===========================================================
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from types import TracebackType
from typing import Protocol, Self

from millstream.errors import (
    ConfigError,
    MillstreamError,
    TransactionAbortedError,
)
from millstream.log.groups import OffsetAndMetadata, Offsets, check_offsets
from millstream.log.topics import check_topic_id
from millstream.record import TopicPartition


def check_fence(known: tuple[str, int] | None, writer: str, batch_id: int) -> tuple[str, int]:
    """Return a transaction's fence; ``known`` is the one that it has already.

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


class TransactionManager(Protocol):
    """The calls of a producer's transaction manager that a block uses."""

    def begin(self) -> None: ...

    def check_partitions(self, offsets: Offsets) -> None: ...

    def topic_id(self, topic: str) -> str: ...

    def commit(self, offsets: Mapping[str, Offsets], fence: tuple[str, int] | None) -> None: ...

    def abort(self, error: BaseException) -> None: ...


class Transaction:
    """A block whose records are committed together at its end, or not at all.

    Use it in ``with``: the end of the block commits, an exception aborts. Until the commit only readers of
    uncommitted records see its records. A future gives the offset of its record; whether the record is
    committed is known at the end of the block.
    """

    def __init__(self, manager: TransactionManager) -> None:
        self._manager = manager
        self._offsets: dict[
            str, dict[TopicPartition, int | tuple[int, str] | OffsetAndMetadata]
        ] = {}
        self._fence: tuple[str, int] | None = None
        self._topic_ids: dict[str, str] = {}

    def commit_offsets(
        self, group: str, offsets: Offsets, *, topic_ids: Mapping[str, str] | None = None
    ) -> None:
        """Commit with this transaction how far ``group`` has read: the next offset to read of each.

        Args:
            topic_ids: The ids of the topics that these are offsets of, by name; a consumer has its own
                as ``topic_id``. They are checked now, and before the transaction is committed.

        Raises:
            UnknownTopicError, ConfigError: there is no such topic or partition, or an offset is not
                possible.
            TopicRecreatedError: a topic has another id; also from the end of the block.
        """
        check_offsets(group, offsets)
        self._manager.check_partitions(offsets)
        self._topic_ids |= topic_ids or {}
        self._check_topics()
        self._offsets.setdefault(group, {}).update(offsets)

    def _check_topics(self) -> None:
        for topic, topic_id in self._topic_ids.items():
            check_topic_id(topic, topic_id, self._manager.topic_id(topic))

    def fence(self, writer: str, batch_id: int) -> None:
        """Commit only if ``writer`` has not committed batch ``batch_id`` or a later one.

        Raises:
            ConfigError: another fence was given, or this one is not possible.
        """
        self._fence = check_fence(self._fence, writer, batch_id)

    def __enter__(self) -> Self:
        self._manager.begin()
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
            self._manager.commit(self._offsets, self._fence)
        else:
            self._abort(error)

    def _abort(self, error: BaseException) -> None:
        with suppress(TransactionAbortedError):  # by ``close``, before us
            self._manager.abort(error)
