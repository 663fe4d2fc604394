"""The event log in a folder, as a program uses it: topics, producers, consumers, tables.

Everything that reads goes through a ``LogReader`` and needs no right; the first call that writes
makes this process the owner. What is durable when is told in ``docs/log-format.md``.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Literal

import pyarrow as pa

from millstream.client.consumer import Consumer, Start
from millstream.client.event_log import EventLog, checked_prefix
from millstream.client.groups import GroupOffsets, Lag, lag_of
from millstream.client.producer import BUFFER_BYTES_MAX, LINGER_MS, Overload, Producer
from millstream.client.settings import topic_settings
from millstream.durations import Duration, to_us
from millstream.errors import FencedError, TopicExistsError
from millstream.log.archiving import PartitionArchive, ValueColumns, archive_partitions
from millstream.log.archiving import Progress as ArchiveProgress
from millstream.log.compression import CompressionName
from millstream.log.decoding import COLUMNS, select_schema
from millstream.log.files import DISK
from millstream.log.group_commit import Durability
from millstream.log.groups import CommittedOffset, Offsets
from millstream.log.housekeeping import KeepingReport
from millstream.log.owner import read_format
from millstream.log.reader import Isolation, LogReader
from millstream.log.retention import RetentionRisk
from millstream.log.writer import LogWriter
from millstream.record import TopicInfo, TopicPartition

_writers: dict[str, tuple[LogWriter, int]] = {}
_writers_lock = threading.Lock()


class FolderLog(EventLog):
    """The log in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = threading.Lock()
        self._writer: LogWriter | None = None
        self._producers: list[Producer] = []
        self._consumers: list[Consumer] = []
        self._groups = GroupOffsets(folder)
        self._closed = False

    @property
    def identity(self) -> str:
        self._own()
        return f"log:{read_format(self.folder, DISK)}"

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
        writer = self._own()
        try:
            return writer.create_topic(name, partitions=partitions, settings=given)
        except TopicExistsError:
            if not exist_ok:
                raise
        return writer.topics()[name]

    def alter_topic(
        self,
        name: str,
        *,
        partitions: int | None = None,
        settings: Mapping[str, str | None] | None = None,
    ) -> TopicInfo:
        return self._own().alter_topic(name, partitions=partitions, settings=settings)

    def topic_settings(self, name: str) -> dict[str, str]:
        return self._reader().settings(name)

    def delete_records(self, topic: str, partition: int, before_offset: int) -> int:
        return self._own().delete_records(TopicPartition(topic, partition), before_offset)

    def delete_topic(self, name: str) -> None:
        self._own().delete_topic(name)

    def topics(self) -> dict[str, TopicInfo]:
        return self._reader().topics()

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
    ) -> Producer:
        producer = Producer(
            self._own(),
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
        self._reader()
        return self._groups.fence(writer)

    def fences(self, prefix: str = "") -> dict[str, int]:
        self._reader()
        return self._groups.fences(prefix)

    def forget_fences(self, prefix: str) -> int:
        self._reader()
        return self._groups.forget_fences(checked_prefix(prefix))

    def own(self) -> None:
        self._own()

    def keep_house(self) -> KeepingReport:
        return self._own().keep_house()

    def on_retention_risk(self, callback: Callable[[RetentionRisk], None]) -> None:
        self._own().housekeeper.on_risk(callback)

    def archive(
        self,
        topic: str,
        columns: ValueColumns,
        *,
        roll: bool = False,
        progress: ArchiveProgress | None = None,
    ) -> list[PartitionArchive]:
        count = len(self._reader().offsets(topic))
        writer = self._own()
        partitions = [writer.partition(TopicPartition(topic, number)) for number in range(count)]
        return archive_partitions(writer, partitions, columns, roll=roll, progress=progress)

    # -- groups -------------------------------------------------------------------------------

    def commit_offsets(self, group: str, offsets: Offsets) -> None:
        self._groups.commit(
            group, offsets, reader=self._reader(), now_ms=time.time_ns() // 1_000_000
        )

    def committed_offsets(self, group: str) -> dict[TopicPartition, CommittedOffset]:
        self._reader()
        return self._groups.committed(group)

    def groups(self) -> list[str]:
        self._reader()
        return self._groups.names()

    def forget_group(self, group: str, topic: str | None = None) -> int:
        self._reader()
        return self._groups.forget(group, topic)

    def lag(self, group: str | None = None) -> list[Lag]:
        reader = self._reader()
        names = self._groups.names() if group is None else [group]
        found = {name: self._groups.committed(name) for name in names}
        return lag_of(found, reader, time.time_ns() // 1_000_000)

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
    ) -> Consumer:
        reader = self._reader(isolation)
        consumer = Consumer(
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
        reader = self._reader(isolation)
        low, high = reader.bounds(topic, partition)
        batches = reader.read(
            topic,
            partition,
            low if start is None else start,
            high if end is None else end,
            columns=columns,
        )
        return pa.Table.from_batches(batches, schema=select_schema(columns))

    # -- closing ------------------------------------------------------------------------------

    def close(self) -> None:
        with self._lock:
            self._closed = True
            writer, self._writer = self._writer, None
            producers, self._producers = self._producers, []
            consumers, self._consumers = self._consumers, []
        with ExitStack() as closing:  # each is closed, whatever the others say; last in, first out
            if writer is not None:
                closing.callback(_give_back, writer)
            closing.callback(self._groups.close)
            for producer in producers:
                closing.callback(producer.close)
            for consumer in consumers:
                closing.callback(consumer.close)

    def _reader(self, isolation: Isolation = "read_committed") -> LogReader:
        if self._closed:
            raise FencedError(f"this connection to {self.folder} was closed; connect again")
        return LogReader(self.folder, isolation=isolation)

    def _own(self) -> LogWriter:
        with self._lock:
            if self._closed:
                raise FencedError(f"this connection to {self.folder} was closed; connect again")
            if self._writer is None:
                self._writer = _borrow(self.folder)
            return self._writer


def _borrow(folder: Path) -> LogWriter:
    """Return this process's writer of a folder, opening it if nobody here has."""
    key = os.path.realpath(folder)
    with _writers_lock:
        writer, users = _writers.get(key) or (LogWriter(folder), 0)
        _writers[key] = writer, users + 1
        return writer


def _give_back(writer: LogWriter) -> None:
    """Close the writer when its last user in this process gives it back."""
    key = os.path.realpath(writer.folder)
    with _writers_lock:
        known, users = _writers.get(key, (None, 0))
        if known is not writer:
            return  # a forked child: the writer is the parent's
        if users > 1:
            _writers[key] = writer, users - 1
        else:
            del _writers[key]
            writer.close()


def _forget_in_child() -> None:
    global _writers_lock  # noqa: PLW0603 - a thread of the parent may have held it at the fork
    _writers_lock = threading.Lock()
    _writers.clear()


os.register_at_fork(after_in_child=_forget_in_child)
