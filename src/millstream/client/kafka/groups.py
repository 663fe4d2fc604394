"""The committed offsets of groups, and fences, which are committed offsets of their own groups.

The fence of a writer is the committed offset of the group ``millstream-fence:<writer>`` in partition 0 of the
topic of fences: the *next* batch id, as a committed offset is the next to be read. So it is committed by the
transaction that it guards, as the offsets of any group are. Apache Kafka deletes offsets some days after the
last commit; therefore the transaction also writes the batch id into that topic, which is compacted, under the
writer's name, and a fence without an offset is looked up there.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka import TopicPartition as KafkaTopicPartition

from millstream.client.kafka.cluster import FENCE_TOPIC, Cluster
from millstream.client.kafka.errors import (
    RETRIABLE,
    UNAVAILABLE,
    kafka_error_of,
    to_millstream_error,
)
from millstream.client.kafka.reader import KafkaReader
from millstream.errors import ConfigError, TopicRecreatedError, UnknownTopicError
from millstream.log.groups import CommittedOffset, Offsets, check_offsets, offset_and_metadata
from millstream.record import TopicPartition

if TYPE_CHECKING:
    from confluent_kafka import Consumer

FENCE_GROUP = "millstream-fence:"
_UNKNOWN_MS = -1  # brokers do not say when an offset was committed
_CLIENTS_MAX = 8  # each has threads and connections
_POLL_AGAIN_S = 0.005
_T = TypeVar("_T")


class KafkaGroups:
    """Reads and commits the offsets of groups. Thread-safe."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._lock = threading.Lock()
        self._clients: dict[str, Consumer] = {}  # by group; the last used one is last

    def close(self) -> None:
        """Close the clients."""
        with self._lock:
            clients, self._clients = self._clients, {}
            for client in clients.values():
                client.close()

    def _client(self, group: str) -> Consumer:
        """Return the group's client; the lock is held."""
        client = self._clients.pop(group, None)
        if client is None:
            if len(self._clients) >= _CLIENTS_MAX:
                self._clients.pop(next(iter(self._clients))).close()
            client = self._cluster.consumer(
                {
                    "group.id": group,
                    "enable.auto.commit": False,
                    # An offset is returned as it is, without waiting for open transactions.
                    "isolation.level": "read_uncommitted",
                }
            )
        self._clients[group] = client
        return client

    def _call_coordinator(self, group: str, what: str, ask: Callable[[Consumer], _T]) -> _T:
        """Return the result of a request of the group's client; retry while its coordinator moves."""
        deadline_s = time.monotonic() + self._cluster.timeout_s
        while True:
            try:
                with self._lock:
                    return ask(self._client(group))
            except KafkaException as raised:
                error = kafka_error_of(raised)
                away = error.code() in UNAVAILABLE
                if not (away or error.code() in RETRIABLE) or time.monotonic() >= deadline_s:
                    raise (
                        self._cluster.unavailable_error()
                        if away
                        else to_millstream_error(error, what)
                    ) from raised
            time.sleep(_POLL_AGAIN_S)

    def group_metadata(self, group: str) -> Any:
        """Return the metadata of a group for a transaction: only a consumer has it."""
        return self._call_coordinator(
            group, f"group {group!r}", lambda client: client.consumer_group_metadata()
        )

    def commit(
        self, group: str, offsets: Offsets, *, reader: KafkaReader | None = None, now_ms: int = 0
    ) -> None:
        """Store how far a group has read; durable when this returns.

        Raises:
            UnknownTopicError, ConfigError: there is no such topic or partition, or an offset is
                not possible; nothing was stored.
            ConflictError: the group has members, who alone may commit.
            TopicRecreatedError: a topic is not the one that the reader is pinned to.
        """
        del now_ms  # brokers have a clock of their own
        check_offsets(group, offsets)
        for name in offsets:
            self._cluster.check_partition(*name)
        if not offsets:
            return
        topics = {name.topic for name in offsets}
        _check_topics(reader, topics)
        self._put(group, offsets)
        try:
            _check_topics(reader, topics)
        except TopicRecreatedError:
            # Deleted during the commit. A commit names its topic, so it may be the new one's: then that is
            # read from its start, and none of its records is skipped. The offsets of other topics remain.
            moved = {topic for topic in topics if _was_recreated(reader, topic)}
            self._put(group, {name: 0 for name in offsets if name.topic in moved})
            raise

    def _put(self, group: str, offsets: Offsets) -> None:
        what = f"the offsets of group {group!r} were not committed"
        done = self._call_coordinator(
            group,
            what,
            lambda client: client.commit(offsets=to_kafka_offsets(offsets), asynchronous=False),
        )
        for place in done:
            if place.error is not None:
                raise to_millstream_error(place.error, what)

    def committed(self, group: str) -> dict[TopicPartition, CommittedOffset]:
        """Return what a group has committed, of topics that exist; empty for an unknown group."""
        known = self._cluster.topics().values()
        wanted = [
            KafkaTopicPartition(one.name, number)
            for one in known
            for number in range(one.partitions)
        ]
        return self.committed_of(group, wanted)

    def committed_of(
        self, group: str, wanted: Sequence[KafkaTopicPartition]
    ) -> dict[TopicPartition, CommittedOffset]:
        """Return what a group has committed of these partitions."""
        if not wanted:
            return {}
        what = f"the offsets of group {group!r} could not be read"
        found = self._call_coordinator(
            group, what, lambda client: client.committed(wanted, self._cluster.timeout_s)
        )
        kept = {
            TopicPartition(place.topic, place.partition): CommittedOffset(
                place.offset, place.metadata or "", _UNKNOWN_MS
            )
            for place in found
            if place.error is None and place.offset >= 0
        }
        return dict(sorted(kept.items()))

    def names(self) -> list[str]:
        """Return the names of all groups, sorted; not those of fences."""
        return [name for name in self._all() if not name.startswith(FENCE_GROUP)]

    def _all(self) -> list[str]:
        found = self._cluster.call(
            lambda: self._cluster.admin.list_consumer_groups(),  # noqa: PLW0108 - needed for each attempt
            "the groups could not be listed",
            reads=True,
        )
        return sorted(group.group_id for group in found.valid)

    def delete(self, group: str, topic: str | None) -> int:
        """Delete the committed offsets of a group; return how many.

        Raises:
            ConfigError: of one topic only, for which the client has no request.
            ConflictError: the group has members.
        """
        known = self.committed(group)
        if topic is not None and {name.topic for name in known} - {topic}:
            raise ConfigError(
                f"group {group!r} has committed offsets of other topics than {topic!r}, and over kafka:// "
                "all of them are deleted together; commit offset 0 of that topic's partitions instead"
            )
        if known:
            self._delete(group)
        return len(known)

    def _delete(self, group: str) -> None:
        self._cluster.call(
            lambda: self._cluster.admin.delete_consumer_groups([group])[group],
            f"group {group!r} was not deleted",
        )

    def fence(self, writer: str) -> int | None:
        """Return the batch id of the fence of ``writer``; None if it has none."""
        if not self._cluster.has_fences():
            return None
        found = self.committed_of(FENCE_GROUP + writer, [KafkaTopicPartition(FENCE_TOPIC, 0)])
        at = found.get(TopicPartition(FENCE_TOPIC, 0))
        return self._fences_in_topic().get(writer) if at is None else at.offset - 1

    def _fences_in_topic(self) -> dict[str, int]:
        """Return the fence of each writer in the topic of fences."""
        reader = KafkaReader(self._cluster.shown, cluster=self._cluster)
        found: dict[str, int] = {}
        try:
            low, high = reader.bounds(FENCE_TOPIC, 0)
            for batch in reader.read(FENCE_TOPIC, 0, low, high, columns=("key", "value")):
                for key, value in zip(*(column.to_pylist() for column in batch), strict=True):
                    if value is None:
                        found.pop(key.decode(), None)
                    else:
                        found[key.decode()] = int(value)
        finally:
            reader.close()
        return found

    def fences(self, prefix: str) -> dict[str, int]:
        """Return the batch ids of the fences of all writers whose names begin with ``prefix``."""
        if not self._cluster.has_fences():
            return {}
        writers = set(self._groups_of_fences()) | self._fences_in_topic().keys()
        stands = {
            writer: self.fence(writer) for writer in sorted(writers) if writer.startswith(prefix)
        }
        return {writer: batch_id for writer, batch_id in stands.items() if batch_id is not None}

    def _groups_of_fences(self) -> list[str]:
        """Return the writers whose fences have committed offsets."""
        return [
            name.removeprefix(FENCE_GROUP) for name in self._all() if name.startswith(FENCE_GROUP)
        ]

    def delete_fences(self, prefix: str) -> int:
        """Delete the fences of all writers whose names begin with ``prefix``; return how many."""
        fences = self.fences(prefix)
        if fences:
            # 1. Delete them from the topic. A crash leaves offsets, which the next call deletes.
            # 2. Delete the offsets, one by one. A crash leaves some, as before.
            self._write_tombstones(fences)
            for writer in set(self._groups_of_fences()) & fences.keys():
                self._delete(FENCE_GROUP + writer)
        return len(fences)

    def _write_tombstones(self, writers: Iterable[str]) -> None:
        """Write tombstones for writers into the topic of fences."""
        errors: list[KafkaError] = []
        client = self._cluster.producer({"enable.idempotence": True})
        for writer in writers:
            client.produce(
                FENCE_TOPIC,
                None,
                writer,
                0,
                on_delivery=lambda error, _: errors.append(error) if error else None,
            )
        if client.flush(self._cluster.timeout_s):
            raise self._cluster.unavailable_error()
        if errors:
            raise to_millstream_error(errors[0], "fences were not deleted")


def _check_topics(reader: KafkaReader | None, topics: Iterable[str]) -> None:
    if reader is not None:
        for topic in topics:
            reader.check_topic(topic)


def _was_recreated(reader: KafkaReader | None, topic: str) -> bool:
    try:
        _check_topics(reader, [topic])
    except TopicRecreatedError:
        return True
    except UnknownTopicError:  # and gone again: its offsets are gone, too
        return False
    return False


def to_kafka_offsets(offsets: Offsets) -> list[KafkaTopicPartition]:
    """Return offsets in the library's form."""
    found = []
    for name, given in offsets.items():
        offset, metadata, _ = offset_and_metadata(given)
        found.append(KafkaTopicPartition(name.topic, name.partition, offset, metadata))
    return found


def fence_offsets(batch_id: int) -> list[KafkaTopicPartition]:
    """Return the offsets that the group of a fence commits together with a batch."""
    return [KafkaTopicPartition(FENCE_TOPIC, 0, batch_id + 1)]
