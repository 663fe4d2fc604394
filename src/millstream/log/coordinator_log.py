"""What the transaction coordinator needs of the log, and which transactions are open."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from millstream.log.batch import EncodedBatch
from millstream.log.exclusive import ExclusiveLog
from millstream.log.partition import Partition
from millstream.log.topics import TopicMetadata
from millstream.record import TopicPartition


class OpenPartition(NamedTuple):
    """A partition with an open transaction: its first offset, and the producer epoch that opened it."""

    name: TopicPartition
    topic_id: str
    producer_epoch: int
    first_offset: int


class CoordinatorLog(ExclusiveLog, Protocol):
    """What the transaction coordinator needs of the log."""

    leader_epoch: int

    def open_partitions(self) -> dict[int, list[OpenPartition]]:
        """Return where transactions are open, by producer id."""

    def append_markers(self, markers: Sequence[tuple[TopicPartition, EncodedBatch]]) -> None:
        """Append control batches; they are durable and published when this returns."""

    def topic_ids(self, names: Sequence[str]) -> dict[str, str]:
        """Return the ids of topics that exist."""


def open_partitions_of(
    partitions: Mapping[TopicPartition, Partition], topics: Mapping[str, TopicMetadata]
) -> dict[int, list[OpenPartition]]:
    """Return where transactions are open, by producer id; nothing is being appended meanwhile."""
    found: dict[int, list[OpenPartition]] = {}
    for name, partition in partitions.items():
        topic_id = topics[name.topic].topic_id
        for producer_id, opened in partition.producers.open_transactions().items():
            found.setdefault(producer_id, []).append(OpenPartition(name, topic_id, *opened))
    return found
