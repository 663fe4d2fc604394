"""What a producer asks of a log in a folder: of its ``LogWriter``, or of one that finds the owner."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from millstream.errors import MillstreamError
from millstream.log.batch import EncodedBatch
from millstream.log.group_commit import Durability
from millstream.log.groups import Offsets
from millstream.log.named_producers import ProducerIdentity
from millstream.record import TopicPartition


class Append(Protocol):
    """One batch on its way; ``offset`` or ``error`` is set when it is done."""

    offset: int
    error: MillstreamError | None


class Coordinator(Protocol):
    """The calls of :class:`millstream.log.transactions.Transactions`, where each is described."""

    def register(
        self, transactional_id: str | None = None, *, timeout_ms: int = ...
    ) -> ProducerIdentity: ...

    def begin(self, identity: ProducerIdentity) -> None: ...

    def end(
        self,
        identity: ProducerIdentity,
        *,
        commit: bool,
        offsets: Mapping[str, Offsets] | None = None,
        fence: tuple[str, int] | None = None,
    ) -> ProducerIdentity: ...


class Writer(Protocol):
    """The calls of :class:`millstream.log.writer.LogWriter`, where each is described."""

    folder: Path

    @property
    def transactions(self) -> Coordinator: ...

    def partition_count(self, topic: str) -> int: ...

    def partition(self, name: TopicPartition) -> object: ...

    def pending(self, topic: str, partition: int, batch: EncodedBatch) -> Append: ...

    def commit(self, appends: Sequence[Any], durability: Durability = "synced") -> None: ...
