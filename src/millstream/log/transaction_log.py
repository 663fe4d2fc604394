"""The log as transactions see it: what their coordinator asks of the writer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from millstream.log.batch import EncodedBatch
from millstream.record import TopicPartition


class OpenPartition(NamedTuple):
    """Where a transaction is open: since which offset, by which life of its producer."""

    name: TopicPartition
    topic_id: str
    producer_epoch: int
    first_offset: int


class TransactionLog(Protocol):
    """What transactions need of the log."""

    leader_epoch: int

    def exclusively(self, action: Callable[[], None]) -> None:
        """Run ``action`` while nothing is being appended."""

    def sync(self) -> None:
        """Return when everything appended is durable and published."""

    def open_partitions(self) -> dict[int, list[OpenPartition]]:
        """Return where transactions are open, by producer id."""

    def append_markers(self, markers: Sequence[tuple[TopicPartition, EncodedBatch]]) -> None:
        """Append control batches; they are durable and published when this returns."""

    def topic_ids(self, names: Sequence[str]) -> dict[str, str]:
        """Return the ids of topics that exist."""
