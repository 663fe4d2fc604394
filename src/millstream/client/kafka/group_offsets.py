"""What groups have committed, and fences, which are committed offsets of groups of their own.

The fence of a writer is what the group ``millstream-fence:<writer>`` has committed of partition 0 of
a topic without records: the *next* batch id, as a committed offset is the next to be read. So it is
committed by the transaction that it guards, as the offsets of any group are.
"""

from __future__ import annotations

from collections.abc import Mapping

from confluent_kafka import ConsumerGroupTopicPartitions
from confluent_kafka import TopicPartition as KafkaPlace

from millstream.client.groups import Lag
from millstream.client.kafka.cluster import FENCES, Cluster
from millstream.client.kafka.failures import as_ours
from millstream.errors import ConfigError, UnknownTopicError
from millstream.log.groups import CommittedOffset, Offsets, check_offsets
from millstream.record import TopicPartition

FENCE_GROUP = "millstream-fence:"
_NOT_TOLD_MS = -1  # brokers do not say when an offset was committed


class KafkaGroups:
    """Reads and commits the offsets of groups. Thread-safe."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def commit(
        self, group: str, offsets: Offsets, *, reader: object = None, now_ms: int = 0
    ) -> None:
        """Note how far a group has read; durable when this returns.

        Raises:
            UnknownTopicError, ConfigError: there is no such topic or partition, or an offset is
                not possible; nothing was noted.
            ConflictError: the group has members, who alone may commit.
        """
        del reader, now_ms  # brokers know their topics, and have a clock of their own
        check_offsets(group, offsets)
        for name in offsets:
            self._cluster.check_partition(*name)
        if not offsets:
            return
        asked = ConsumerGroupTopicPartitions(group, places(offsets))
        futures = self._cluster.asked(self._cluster.admin.alter_consumer_group_offsets, [asked])
        what = f"the offsets of group {group!r} were not committed"
        for place in self._cluster.result(futures[group], what).topic_partitions:
            if place.error is not None:
                raise as_ours(place.error, what)

    def committed(self, group: str) -> dict[TopicPartition, CommittedOffset]:
        """Return what a group has committed, of topics that exist; empty for an unknown group."""
        asked = ConsumerGroupTopicPartitions(group)
        futures = self._cluster.asked(self._cluster.admin.list_consumer_group_offsets, [asked])
        what = f"the offsets of group {group!r} could not be read"
        found = self._cluster.result(futures[group], what).topic_partitions
        kept = {
            TopicPartition(place.topic, place.partition): CommittedOffset(
                place.offset, place.metadata or "", _NOT_TOLD_MS
            )
            for place in found
            if place.error is None and place.offset >= 0
        }
        return dict(sorted(kept.items()))

    def names(self) -> list[str]:
        """Return the names of all groups, sorted; not those of fences."""
        return [name for name in self._all() if not name.startswith(FENCE_GROUP)]

    def _all(self) -> list[str]:
        future = self._cluster.asked(self._cluster.admin.list_consumer_groups)
        found = self._cluster.result(future, "the groups could not be listed")
        return sorted(group.group_id for group in found.valid)

    def forget(self, group: str, topic: str | None) -> int:
        """Forget what a group has committed; return how many offsets.

        Raises:
            ConfigError: of one topic only, for which the client has no request.
            ConflictError: the group has members.
        """
        known = self.committed(group)
        if topic is not None and {name.topic for name in known} - {topic}:
            raise ConfigError(
                f"group {group!r} has committed offsets of other topics than {topic!r}, and over kafka:// "
                "all of them are forgotten together; commit offset 0 of that topic's partitions instead"
            )
        if not known:
            return 0
        futures = self._cluster.asked(self._cluster.admin.delete_consumer_groups, [group])
        self._cluster.result(futures[group], f"group {group!r} was not forgotten")
        return len(known)

    def fence(self, writer: str) -> int | None:
        """Return the batch id at which the fence of ``writer`` stands; None if it has none."""
        found = self.committed(FENCE_GROUP + writer).get(TopicPartition(FENCES, 0))
        return None if found is None else found.offset - 1

    def fences(self, prefix: str) -> dict[str, int]:
        """Return where the fences stand of all writers whose names begin with ``prefix``."""
        writers = [
            name.removeprefix(FENCE_GROUP)
            for name in self._all()
            if name.startswith(FENCE_GROUP + prefix)
        ]
        stands = {writer: self.fence(writer) for writer in writers}
        return {writer: batch_id for writer, batch_id in stands.items() if batch_id is not None}

    def lag(self, groups: Mapping[str, Mapping[TopicPartition, CommittedOffset]]) -> list[Lag]:
        """Return how far groups are behind, by group, topic and partition."""
        bounds: dict[str, list[tuple[int, int]]] = {}
        rows = []
        for group, committed in sorted(groups.items()):
            for name, found in committed.items():
                if name.topic not in bounds:
                    try:
                        bounds[name.topic] = self._cluster.offsets(name.topic, "read_committed")
                    except UnknownTopicError:
                        continue  # deleted between the two looks
                start, end = bounds[name.topic][name.partition]
                rows.append(
                    Lag(
                        group,
                        *name,
                        committed_offset=found.offset,
                        log_start=start,
                        end_offset=end,
                        behind=max(end - max(found.offset, start), 0),
                        at_risk=0,  # brokers do not say what retention takes next
                        lost=max(start - found.offset, 0),
                    )
                )
        return rows


def places(offsets: Offsets) -> list[KafkaPlace]:
    """Return offsets as the library has them."""
    found = []
    for name, given in offsets.items():
        offset, metadata = given if isinstance(given, tuple) else (given, "")
        found.append(KafkaPlace(name.topic, name.partition, offset, metadata))
    return found


def fence_offsets(batch_id: int) -> list[KafkaPlace]:
    """Return what the group of a fence commits together with a batch."""
    return [KafkaPlace(FENCES, 0, batch_id + 1)]
