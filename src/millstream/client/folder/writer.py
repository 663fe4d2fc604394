"""The calls of a log in a folder that a producer uses: of its ``LogWriter``, or of a client of the owner."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from millstream.log.group_commit import Durability, PendingAppend
from millstream.log.groups import Offsets
from millstream.log.producer_identity import ProducerIdentity
from millstream.record import TopicPartition


class CoordinatorClient(Protocol):
    """The calls of :class:`millstream.log.transactions.TransactionCoordinator`, where each is described."""

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


class ProducerWriter(Protocol):
    """The calls of :class:`millstream.log.writer.LogWriter`, where each is described."""

    folder: Path

    @property
    def transactions(self) -> CoordinatorClient: ...

    def partition_count(self, topic: str) -> int: ...

    def partition(self, name: TopicPartition) -> object: ...

    def commit(
        self, appends: Sequence[PendingAppend], durability: Durability = "synced"
    ) -> None: ...
