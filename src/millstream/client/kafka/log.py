"""The log behind brokers, as a program uses it: the calls of every log, one by one, on its parts."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Literal, NoReturn

import pyarrow as pa

from millstream.client.consumer import Consumer, Start
from millstream.client.event_log import EventLog, checked_prefix
from millstream.client.groups import Lag
from millstream.client.kafka.address import KafkaAddress
from millstream.client.kafka.cluster import Cluster
from millstream.client.kafka.consumer import KafkaConsumer
from millstream.client.kafka.group_offsets import KafkaGroups
from millstream.client.kafka.producer import KafkaProducer
from millstream.client.kafka.reader import KafkaReader
from millstream.client.kafka.sending_client import borrow, give_up
from millstream.client.producer import BUFFER_BYTES_MAX, LINGER_MS, Overload
from millstream.client.settings import topic_settings
from millstream.durations import Duration, to_us
from millstream.errors import ConfigError, TopicExistsError
from millstream.log.archiving import PartitionArchive, ValueColumns
from millstream.log.archiving import Progress as ArchiveProgress
from millstream.log.compression import CompressionName
from millstream.log.decoding import COLUMNS, select_schema
from millstream.log.group_commit import Durability
from millstream.log.groups import CommittedOffset, Offsets
from millstream.log.housekeeping import KeepingReport
from millstream.log.reader import Isolation, check_range
from millstream.log.retention import RetentionRisk
from millstream.record import TopicInfo, TopicPartition


class KafkaLog(EventLog):
    """The log behind the brokers of an address.

    Raises:
        ConfigError: an option of the address is not possible.
        BrokerAwayError: no broker answers.
    """

    def __init__(self, address: KafkaAddress) -> None:
        self.address = address
        self._cluster = Cluster(address)
        self._groups = KafkaGroups(self._cluster)
        self._clients = borrow(address)
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

    def producer(
        self,
        *,
        linger_ms: float = LINGER_MS,
        compression: CompressionName = "none",
        durability: Durability = "synced",
        overload: Overload = "block",
        buffer_bytes: int = BUFFER_BYTES_MAX,
        block_timeout: Duration = "1 minute",
        transactional_id: str | None = None,
        transaction_timeout: Duration = "1 minute",
        name: str | None = None,
    ) -> KafkaProducer:
        producer = KafkaProducer(
            self._cluster,
            self._groups,
            self._clients,
            linger_ms=linger_ms,
            compression=compression,
            durability=durability,
            overload=overload,
            buffer_bytes=buffer_bytes,
            block_timeout_s=to_us(block_timeout, what="block_timeout") / 1e6,
            transactional_id=transactional_id,
            transaction_timeout_ms=to_us(transaction_timeout, what="transaction_timeout") // 1000,
            name=name,
        )
        with self._lock:
            self._producers.append(producer)
        return producer

    def fence(self, writer: str) -> int | None:
        return self._groups.fence(writer)

    def fences(self, prefix: str = "") -> dict[str, int]:
        return self._groups.fences(prefix)

    def forget_fences(self, prefix: str) -> int:
        return self._groups.forget_fences(checked_prefix(prefix))

    def own(self) -> None:
        """Do nothing: brokers have many writers."""

    def keep_house(self) -> KeepingReport:
        self._of_folders("keeping house")

    def on_retention_risk(self, callback: Callable[[RetentionRisk], None]) -> None:
        del callback
        self._of_folders("watching over retention")

    def archive(
        self,
        topic: str,
        columns: ValueColumns,
        *,
        roll: bool = False,
        progress: ArchiveProgress | None = None,
    ) -> list[PartitionArchive]:
        del topic, columns, roll, progress
        self._of_folders("archiving")

    def _of_folders(self, what: str) -> NoReturn:
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

    def forget_group(self, group: str, topic: str | None = None) -> int:
        return self._groups.forget(group, topic)

    def lag(self, group: str | None = None) -> list[Lag]:
        names = self._groups.names() if group is None else [group]
        committed = {name: self._groups.committed(name) for name in names}
        return self._groups.lag(committed, self._reader("read_committed"))

    # -- reading ------------------------------------------------------------------------------

    def consumer(
        self,
        topic: str,
        *,
        group: str | None = None,
        start: Start = "earliest",
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
            check_range(f"{topic}/{partition}", (low, high), first, last)
        batches = reader.read(topic, partition, first, last, columns=columns)
        return pa.Table.from_batches(batches, schema=schema)

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
        with ExitStack() as closing:  # each is closed, whatever the others say; last in, first out
            closing.callback(self._cluster.close)
            closing.callback(self._groups.close)
            if was_open:
                closing.callback(give_up, self.address, self._clients)
            for reader in readers.values():
                closing.callback(reader.close)
            for producer in producers:
                closing.callback(producer.close)
            for consumer in consumers:
                closing.callback(consumer.close)
