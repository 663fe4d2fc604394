"""The log as transactions see it: what their coordinator asks of the writer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from millstream.log.batch import EncodedBatch
from millstream.record import TopicPartition

if TYPE_CHECKING:
    from millstream.log.partition import Partition
    from millstream.log.topics import Topic


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


def open_places(
    partitions: Mapping[TopicPartition, Partition], topics: Mapping[str, Topic]
) -> dict[int, list[OpenPartition]]:
    """Return where transactions are open, by producer id; nothing is being appended meanwhile."""
    found: dict[int, list[OpenPartition]] = {}
    for name, partition in partitions.items():
        topic_id = topics[name.topic].topic_id
        for producer_id, (life, first) in partition.producers.open_transactions().items():
            place = OpenPartition(name, topic_id, life, first)
            found.setdefault(producer_id, []).append(place)
    return found
