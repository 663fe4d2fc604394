"""The event log behind brokers: each call of ``EventLog``, delegated to a module."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Literal, NoReturn

import pyarrow as pa

from millstream.client.address import KafkaAddress
from millstream.client.consumer import Consumer
from millstream.client.groups import Lag, lag_of
from millstream.client.kafka.cluster import Cluster
from millstream.client.kafka.consumer import KafkaConsumer
from millstream.client.kafka.groups import KafkaGroups
from millstream.client.kafka.producer import KafkaProducer
from millstream.client.kafka.producer_pool import acquire_pool, release_pool
from millstream.client.kafka.reader import KafkaReader
from millstream.client.kafka.shared.producer import SharedProducer, why_not_shared
from millstream.client.log import EventLog, check_prefix
from millstream.client.producer import ProducerSettings
from millstream.client.start_position import StartPosition
from millstream.client.topic_settings import topic_settings
from millstream.durations import Duration, to_us
from millstream.errors import ConfigError, TopicExistsError
from millstream.log.archiver import ArchiveProgress, PartitionArchive, ValueColumns
from millstream.log.decoding import COLUMNS, select_schema
from millstream.log.groups import CommittedOffset, Offsets
from millstream.log.maintenance import MaintenanceReport
from millstream.log.reader import Isolation, check_range
from millstream.log.retention import RetentionRisk
from millstream.record import TopicInfo, TopicPartition


class KafkaLog(EventLog):
    """The log behind the brokers of an address.

    Raises:
        ConfigError: an option of the address is not possible.
        BrokerUnavailableError: no broker responds.
    """

    is_folder = False

    def __init__(self, address: KafkaAddress) -> None:
        self.address = address
        self._cluster = Cluster(address)
        self._groups = KafkaGroups(self._cluster)
        self._clients = acquire_pool(address)
        self._open = True
        self._lock = threading.Lock()
        self._readers: dict[Isolation, KafkaReader] = {}
        self._producers: list[KafkaProducer] = []
        self._consumers: list[KafkaConsumer] = []

    @property
    def identity(self) -> str:
        return self._cluster.identity

    # -- topics -------------------------------------------------------------------------------

    def create_topic(
        self,
        name: str,
        *,
        partitions: int = 1,
        retention: Duration | None = None,
        retention_bytes: int | None = None,
        cleanup: str = "delete",
        settings: Mapping[str, str] | None = None,
        exist_ok: bool = False,
    ) -> TopicInfo:
        given = topic_settings(retention, retention_bytes, cleanup, settings)
        try:
            return self._cluster.create_topic(name, partitions, given)
        except TopicExistsError:
            if not exist_ok:
                raise
        return self.topics()[name]

    def alter_topic(
        self,
        name: str,
        *,
        partitions: int | None = None,
        settings: Mapping[str, str | None] | None = None,
    ) -> TopicInfo:
        return self._cluster.alter_topic(name, partitions, settings or {})

    def topic_settings(self, name: str) -> dict[str, str]:
        return self._cluster.settings(name)

    def delete_records(self, topic: str, partition: int, before_offset: int) -> int:
        return self._cluster.delete_records(topic, partition, before_offset)

    def delete_topic(self, name: str) -> None:
        self._cluster.delete_topic(name)

    def topics(self) -> dict[str, TopicInfo]:
        return self._cluster.topics()

    def offsets(self, topic: str) -> list[tuple[int, int]]:
        return self._reader().offsets(topic)

    def offset_for_time(self, topic: str, partition: int, timestamp_ms: int) -> int:
        return self._reader().offset_for_time(topic, partition, timestamp_ms)

    # -- writing ------------------------------------------------------------------------------

    def _make_producer(self, settings: ProducerSettings) -> KafkaProducer:
        producer = KafkaProducer(self._cluster, self._groups, self._clients, settings)
        with self._lock:
            self._producers.append(producer)
        return producer

    def why_not_shared(self) -> str | None:
        """Return why several processes cannot send in one transaction; None if they can."""
        return why_not_shared(self.address)

    def shared_producer(
        self, transactional_id: str, transaction_timeout: Duration
    ) -> SharedProducer:
        """Return a producer in whose transactions other processes send; the caller closes it.

        An older producer of the same transactional id is fenced off, of either kind.
        """
        timeout_ms = to_us(transaction_timeout, what="transaction_timeout") // 1000
        return SharedProducer(self._cluster, self._groups, transactional_id, timeout_ms)

    def fence(self, writer: str) -> int | None:
        return self._groups.fence(writer)

    def fences(self, prefix: str = "") -> dict[str, int]:
        return self._groups.fences(prefix)

    def delete_fences(self, prefix: str) -> int:
        return self._groups.delete_fences(check_prefix(prefix))

    def acquire_ownership(self) -> None:
        """Do nothing: brokers have many writers."""

    def run_maintenance(self) -> MaintenanceReport:
        self._refuse_folder_only("run_maintenance()")

    def on_retention_risk(self, callback: Callable[[RetentionRisk], None]) -> None:
        del callback
        self._refuse_folder_only("on_retention_risk()")

    def archive(
        self,
        topic: str,
        columns: ValueColumns,
        *,
        close_active: bool = False,
        progress: ArchiveProgress | None = None,
    ) -> list[PartitionArchive]:
        del topic, columns, close_active, progress
        self._refuse_folder_only("archive()")

    def _refuse_folder_only(self, what: str) -> NoReturn:
        raise ConfigError(
            f"{what} is for logs in a folder, and {self.address.shown} leads to brokers, which do with their "
            "files what their settings say; where the broker is Millstream's, give the folder that it owns"
        )

    # -- groups -------------------------------------------------------------------------------

    def commit_offsets(
        self, group: str, offsets: Offsets, *, topic_ids: Mapping[str, str] | None = None
    ) -> None:
        self._groups.commit(group, offsets, reader=self._reader().pinned(topic_ids or {}))

    def committed_offsets(self, group: str) -> dict[TopicPartition, CommittedOffset]:
        return self._groups.committed(group)

    def groups(self) -> list[str]:
        return self._groups.names()

    def delete_group_offsets(self, group: str, topic: str | None = None) -> int:
        return self._groups.delete(group, topic)

    def lag(self, group: str | None = None) -> list[Lag]:
        names = self._groups.names() if group is None else [group]
        committed = {name: self._groups.committed(name) for name in names}
        # Brokers do not report what retention removes next: nothing is counted as at risk.
        return lag_of(committed, self._reader("read_committed"), lambda _name, _offset: 0)

    # -- reading ------------------------------------------------------------------------------

    def consumer(
        self,
        topic: str,
        *,
        group: str | None = None,
        start: StartPosition = "earliest",
        commit: Literal["auto", "manual"] = "auto",
        follow: bool = True,
        partitions: Sequence[int] | None = None,
        isolation: Isolation = "read_committed",
        topic_id: str | None = None,
    ) -> Consumer:
        reader = self._reader(isolation).pinned({} if topic_id is None else {topic: topic_id})
        consumer = KafkaConsumer(
            reader,
            topic,
            group=group,
            offsets=self._groups,
            start=start,
            commit=commit,
            follow=follow,
            partitions=partitions,
        )
        with self._lock:
            self._consumers.append(consumer)
        return consumer

    def read(
        self,
        topic: str,
        partition: int,
        start: int | None = None,
        end: int | None = None,
        *,
        columns: Sequence[str] = COLUMNS,
        isolation: Isolation = "read_committed",
    ) -> pa.Table:
        schema = select_schema(columns)
        reader = self._reader(isolation)
        low, high = reader.bounds(topic, partition)
        first, last = low if start is None else start, high if end is None else end
        if first != last:
            check_range(TopicPartition(topic, partition), (low, high), first, last)
        batches = reader.read(topic, partition, first, last, columns=columns)
        return pa.Table.from_batches(batches, schema=schema)

    def reader(
        self, topic_ids: Mapping[str, str], *, isolation: Isolation = "read_committed"
    ) -> KafkaReader:
        return self._reader(isolation).pinned(topic_ids)

    def _reader(self, isolation: Isolation = "read_committed") -> KafkaReader:
        with self._lock:
            if isolation not in self._readers:
                address = self.address.shown
                self._readers[isolation] = KafkaReader(
                    address, isolation=isolation, cluster=self._cluster
                )
            return self._readers[isolation]

    # -- closing ------------------------------------------------------------------------------

    def close(self) -> None:
        with self._lock:
            was_open, self._open = self._open, False
            producers, self._producers = self._producers, []
            consumers, self._consumers = self._consumers, []
            readers, self._readers = self._readers, {}
        with (
            ExitStack() as closing
        ):  # each is closed, even if another one fails; last in, first out
            closing.callback(self._cluster.close)
            closing.callback(self._groups.close)
            if was_open:
                closing.callback(release_pool, self.address, self._clients)
            for reader in readers.values():
                closing.callback(reader.close)
            for producer in producers:
                closing.callback(producer.close)
            for consumer in consumers:
                closing.callback(consumer.close)
