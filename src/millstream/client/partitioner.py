"""The partition of a record: that of its key, as in Kafka's clients; without a key, round-robin.

Records without a key go to a sticky partition until a batch of their topic is sent, so that they
share batches. Records of ``send_many`` have batches of their own, and a round-robin of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

import numpy as np

from millstream.client.columns import RecordColumns
from millstream.errors import ConfigError
from millstream.log.murmur2 import murmur2, partitions_of

BULK_RECORDS = 100_000  # bounds what send_many holds beside its input
_KEYS_KEPT_MAX = 16_384  # a hash costs a microsecond or two, and keys repeat
_KEY_BYTES_MAX = 64


class PartitionCounts(Protocol):
    """The calls of a log that the partitioner uses."""

    def partition_count(self, topic: str) -> int:
        """Return how many partitions a topic has."""


class Partitioner:
    """Chooses among the current partitions of a topic. Thread-safe."""

    def __init__(self, writer: PartitionCounts) -> None:
        self._partition_count = writer.partition_count
        self._rounds: dict[str, int] = {}
        # Counted separately: else a bulk would advance it twice, once when it is split and once when it is
        # sent, and with an even number of partitions only every other one would get records.
        self._bulk_rounds: dict[str, int] = {}
        self._hashes: dict[bytes, int] = {}

    def choose(self, topic: str, key: bytes | None, partition: int | None) -> int:
        """Return the partition of one record; ``partition`` itself, if it is given.

        Raises:
            UnknownTopicError, ConfigError: there is no such topic or partition.
        """
        count = self._partition_count(topic)
        if partition is not None:
            if not 0 <= partition < count:
                raise ConfigError(
                    f"topic {topic!r} has no partition {partition}; choose one of 0 to {count - 1}"
                )
            return partition
        if key is None:
            return self._rounds.get(topic, 0) % count
        hashed = self._hashes.get(key)
        return (self._hash(key) if hashed is None else hashed) % count

    def split(self, topic: str, columns: RecordColumns) -> Iterator[tuple[int, RecordColumns]]:
        """Yield the rows for each partition, in their order, of ``BULK_RECORDS`` rows at a time.

        Raises:
            UnknownTopicError: there is no such topic.
        """
        for start in range(0, len(columns.values), BULK_RECORDS):
            yield from self._split(topic, columns.slice(start, BULK_RECORDS))

    def _split(self, topic: str, columns: RecordColumns) -> list[tuple[int, RecordColumns]]:
        count = self._partition_count(topic)
        if columns.keys is None or count == 1:
            return [(_next_round(self._bulk_rounds, topic) % count, columns)]
        chosen = partitions_of(columns.keys, count)
        if (chosen < 0).any():
            chosen[chosen < 0] = _next_round(self._bulk_rounds, topic) % count
        order = np.argsort(chosen, kind="stable")
        ends = np.searchsorted(chosen[order], np.arange(count), side="right")
        out, start = [], 0
        for number, end in enumerate(ends.tolist()):
            if end > start:
                out.append((number, columns.take(order[start:end])))
            start = end
        return out

    def switch_partition(self, topics: Iterable[str]) -> None:
        """Make the next partition of each topic the sticky one."""
        for topic in topics:
            _next_round(self._rounds, topic)

    def _hash(self, key: bytes) -> int:
        hashed = murmur2(key) & 0x7FFFFFFF
        if len(key) <= _KEY_BYTES_MAX:
            if len(self._hashes) >= _KEYS_KEPT_MAX:
                self._hashes.clear()
            self._hashes[key] = hashed
        return hashed


def _next_round(rounds: dict[str, int], topic: str) -> int:
    number = rounds.get(topic, 0)
    rounds[topic] = number + 1
    return number
