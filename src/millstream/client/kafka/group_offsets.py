"""What groups have committed, and fences, which are committed offsets of groups of their own.

The fence of a writer is what the group ``millstream-fence:<writer>`` has committed of partition 0 of
the topic of fences: the *next* batch id, as a committed offset is the next to be read. So it is
committed by the transaction that it guards, as the offsets of any group are. Apache Kafka forgets
offsets some days after the last commit; therefore the transaction also writes the batch id into that
topic, which is compacted, under the writer's name, and a fence without an offset is looked up there.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka import TopicPartition as KafkaPlace

from millstream.client.groups import Lag
from millstream.client.kafka.cluster import FENCES, Cluster
from millstream.client.kafka.failures import AWAY, PASSING, as_ours, error_of
from millstream.client.kafka.reader import KafkaReader
from millstream.errors import ConfigError, TopicRecreatedError, UnknownTopicError
from millstream.log.groups import CommittedOffset, Offsets, check_offsets, noted
from millstream.log.unread import Reads, count_unread
from millstream.record import TopicPartition

if TYPE_CHECKING:
    from confluent_kafka import Consumer

FENCE_GROUP = "millstream-fence:"
_NOT_TOLD_MS = -1  # brokers do not say when an offset was committed
_CLIENTS_MAX = 8  # each has threads and connections
_LOOK_AGAIN_S = 0.005
_T = TypeVar("_T")


class KafkaGroups:
    """Reads and commits the offsets of groups. Thread-safe."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._lock = threading.Lock()
        self._clients: dict[str, Consumer] = {}  # by group; the last one used last

    def close(self) -> None:
        """Give the clients back."""
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
                    # An offset is told as it stands, without waiting for open transactions.
                    "isolation.level": "read_uncommitted",
                }
            )
        self._clients[group] = client
        return client

    def _asked(self, group: str, what: str, ask: Callable[[Consumer], _T]) -> _T:
        """Return what the group's client gives, asked again while its coordinator is on the move."""
        deadline_s = time.monotonic() + self._cluster.timeout_s
        while True:
            try:
                with self._lock:
                    return ask(self._client(group))
            except KafkaException as raised:
                error = error_of(raised)
                away = error.code() in AWAY
                if not (away or error.code() in PASSING) or time.monotonic() >= deadline_s:
                    raise (self._cluster.away() if away else as_ours(error, what)) from raised
            time.sleep(_LOOK_AGAIN_S)

    def member(self, group: str) -> Any:
        """Return a group as a transaction wants it: only a consumer knows how to say it."""
        return self._asked(
            group, f"group {group!r}", lambda client: client.consumer_group_metadata()
        )

    def commit(
        self, group: str, offsets: Offsets, *, reader: KafkaReader | None = None, now_ms: int = 0
    ) -> None:
        """Note how far a group has read; durable when this returns.

        Raises:
            UnknownTopicError, ConfigError: there is no such topic or partition, or an offset is
                not possible; nothing was noted.
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
            # Just now. A commit names its topic, so it may be the new one's: then that is read from its
            # start, and none of its records is passed over. The offsets of other topics stand.
            moved = {topic for topic in topics if _is_made_anew(reader, topic)}
            self._put(group, {name: 0 for name in offsets if name.topic in moved})
            raise

    def _put(self, group: str, offsets: Offsets) -> None:
        what = f"the offsets of group {group!r} were not committed"
        done = self._asked(
            group,
            what,
            lambda client: client.commit(offsets=places(offsets), asynchronous=False),
        )
        for place in done:
            if place.error is not None:
                raise as_ours(place.error, what)

    def committed(self, group: str) -> dict[TopicPartition, CommittedOffset]:
        """Return what a group has committed, of topics that exist; empty for an unknown group."""
        known = self._cluster.topics().values()
        asked = [KafkaPlace(one.name, number) for one in known for number in range(one.partitions)]
        return self.committed_of(group, asked)

    def committed_of(
        self, group: str, asked: Sequence[KafkaPlace]
    ) -> dict[TopicPartition, CommittedOffset]:
        """Return what a group has committed of these partitions."""
        if not asked:
            return {}
        what = f"the offsets of group {group!r} could not be read"
        found = self._asked(
            group, what, lambda client: client.committed(asked, self._cluster.timeout_s)
        )
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
        found = self._cluster.ask(
            lambda: self._cluster.admin.list_consumer_groups(),  # noqa: PLW0108 - asked for each time
            "the groups could not be listed",
            reads=True,
        )
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
        if known:
            self._delete(group)
        return len(known)

    def _delete(self, group: str) -> None:
        self._cluster.ask(
            lambda: self._cluster.admin.delete_consumer_groups([group])[group],
            f"group {group!r} was not forgotten",
        )

    def fence(self, writer: str) -> int | None:
        """Return the batch id at which the fence of ``writer`` stands; None if it has none."""
        if not self._cluster.has_fences():
            return None
        found = self.committed_of(FENCE_GROUP + writer, [KafkaPlace(FENCES, 0)])
        at = found.get(TopicPartition(FENCES, 0))
        return self._remembered().get(writer) if at is None else at.offset - 1

    def _remembered(self) -> dict[str, int]:
        """Return what the topic of fences says of each writer."""
        reader = KafkaReader(self._cluster.shown, cluster=self._cluster)
        found: dict[str, int] = {}
        try:
            low, high = reader.bounds(FENCES, 0)
            for batch in reader.read(FENCES, 0, low, high, columns=("key", "value")):
                for key, value in zip(*(column.to_pylist() for column in batch), strict=True):
                    if value is None:
                        found.pop(key.decode(), None)
                    else:
                        found[key.decode()] = int(value)
        finally:
            reader.close()
        return found

    def fences(self, prefix: str) -> dict[str, int]:
        """Return where the fences stand of all writers whose names begin with ``prefix``."""
        if not self._cluster.has_fences():
            return {}
        writers = set(self._groups_of_fences()) | self._remembered().keys()
        stands = {
            writer: self.fence(writer) for writer in sorted(writers) if writer.startswith(prefix)
        }
        return {writer: batch_id for writer, batch_id in stands.items() if batch_id is not None}

    def _groups_of_fences(self) -> list[str]:
        """Return the writers of fences whose offsets are there."""
        return [
            name.removeprefix(FENCE_GROUP) for name in self._all() if name.startswith(FENCE_GROUP)
        ]

    def forget_fences(self, prefix: str) -> int:
        """Forget the fences of all writers whose names begin with ``prefix``; return how many."""
        fences = self.fences(prefix)
        if fences:
            # 1. Let the topic forget. A crash leaves offsets, which are forgotten the next time.
            # 2. Forget the offsets, one by one. A crash leaves some, as before.
            self._bury(fences)
            for writer in set(self._groups_of_fences()) & fences.keys():
                self._delete(FENCE_GROUP + writer)
        return len(fences)

    def _bury(self, writers: Iterable[str]) -> None:
        """Write tombstones for writers into the topic of fences."""
        errors: list[KafkaError] = []
        client = self._cluster.producer({"enable.idempotence": True})
        for writer in writers:
            client.produce(
                FENCES,
                None,
                writer,
                0,
                on_delivery=lambda error, _: errors.append(error) if error else None,
            )
        if client.flush(self._cluster.timeout_s):
            raise self._cluster.away()
        if errors:
            raise as_ours(errors[0], "fences were not forgotten")

    def lag(
        self, groups: Mapping[str, Mapping[TopicPartition, CommittedOffset]], reader: Reads
    ) -> list[Lag]:
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
                try:
                    behind = count_unread(reader, *name, max(found.offset, start), end)
                except UnknownTopicError:
                    continue
                rows.append(
                    Lag(
                        group,
                        *name,
                        committed_offset=found.offset,
                        log_start=start,
                        end_offset=end,
                        behind=behind,
                        at_risk=0,  # brokers do not say what retention takes next
                        lost=max(start - found.offset, 0),
                    )
                )
        return rows


def _check_topics(reader: KafkaReader | None, topics: Iterable[str]) -> None:
    if reader is not None:
        for topic in topics:
            reader.check_topic(topic)


def _is_made_anew(reader: KafkaReader | None, topic: str) -> bool:
    try:
        _check_topics(reader, [topic])
    except TopicRecreatedError:
        return True
    except UnknownTopicError:  # and gone again: its offsets are gone, too
        return False
    return False


def places(offsets: Offsets) -> list[KafkaPlace]:
    """Return offsets as the library has them."""
    found = []
    for name, given in offsets.items():
        offset, metadata, _ = noted(given)
        found.append(KafkaPlace(name.topic, name.partition, offset, metadata))
    return found


def fence_offsets(batch_id: int) -> list[KafkaPlace]:
    """Return what the group of a fence commits together with a batch."""
    return [KafkaPlace(FENCES, 0, batch_id + 1)]
