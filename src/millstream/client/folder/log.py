"""The event log in a folder: topics, producers, consumers, tables.

Everything that reads goes through a ``LogReader`` and needs no ownership. The first call that writes makes
this process the owner, or a client of the owner (see ``ownership``). ``docs/log-format.md`` says what is
durable when.
"""

from __future__ import annotations

import os
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa

from millstream.client.consumer import Consumer
from millstream.client.folder.consumer import FolderConsumer
from millstream.client.folder.groups import FolderGroups
from millstream.client.folder.producer import FolderProducer
from millstream.client.groups import Lag, lag_of
from millstream.client.log import EventLog, check_prefix
from millstream.client.producer import ProducerSettings
from millstream.client.start_position import StartPosition
from millstream.client.topic_settings import topic_settings
from millstream.durations import Duration
from millstream.errors import FencedError, FolderOwnedError
from millstream.log.archiver import (
    ArchiveProgress,
    PartitionArchive,
    ValueColumns,
    archive_partitions,
)
from millstream.log.decoding import COLUMNS, select_schema
from millstream.log.excision import Excision
from millstream.log.files import DISK
from millstream.log.groups import CommittedOffset, Offsets
from millstream.log.maintenance import MaintenanceReport
from millstream.log.owner import read_format
from millstream.log.reader import Isolation, LogReader
from millstream.log.retention import RetentionRisk, risks
from millstream.ownership.access import FolderAccess
from millstream.ownership.client import OwnerClient
from millstream.ownership.requests import OwnerRequest, excise_request
from millstream.ownership.writer import FolderWriter
from millstream.record import TopicInfo, TopicPartition

_accesses: dict[str, tuple[FolderAccess, int]] = {}
_accesses_lock = threading.Lock()


class FolderLog(EventLog):
    """The log in ``folder``."""

    is_folder = True

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = threading.Lock()
        self._client: OwnerClient | None = None
        self._producers: list[FolderProducer] = []
        self._consumers: list[Consumer] = []
        self._groups = FolderGroups(folder)
        self._closed = False

    @property
    def identity(self) -> str:
        self._owner_client().find_owner()
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
        args = {
            "name": name,
            "partitions": partitions,
            "settings": topic_settings(retention, retention_bytes, cleanup, settings),
            "topic_id": uuid.uuid4().hex,
            "exist_ok": exist_ok,
        }
        return TopicInfo(**self._request("create_topic", args))

    def alter_topic(
        self,
        name: str,
        *,
        partitions: int | None = None,
        settings: Mapping[str, str | None] | None = None,
    ) -> TopicInfo:
        given = None if settings is None else dict(settings)
        args = {"name": name, "partitions": partitions, "settings": given}
        return TopicInfo(**self._request("alter_topic", args))

    def topic_settings(self, name: str) -> dict[str, str]:
        return self._reader().settings(name)

    def delete_records(self, topic: str, partition: int, before_offset: int) -> int:
        args = {"topic": topic, "partition": partition, "before_offset": before_offset}
        start: int = self._request("delete_records", args)
        return start

    def delete_topic(self, name: str) -> None:
        self._request("delete_topic", {"name": name})

    def excise(
        self,
        topic: str,
        partition: int,
        values: Mapping[int, bytes],
        *,
        topic_id: str | None = None,
    ) -> Excision:
        """Put other values in the place of those at some offsets; everything else of the records stays.

        For what must not be there any more. Who has read the old values keeps them. See ``log.excision``.

        Raises:
            TopicRecreatedError: the topic does not have this ``topic_id``.
            UnknownTopicError, ConfigError: there is no such topic or partition.
            DiskFullError: there was no room; some may be replaced. Make room, and call it again.
        """
        request = excise_request(TopicPartition(topic, partition), values, topic_id)
        return Excision(**self._owner_client().call(request))

    def topics(self) -> dict[str, TopicInfo]:
        return self._reader().topics()

    def offsets(self, topic: str) -> list[tuple[int, int]]:
        return self._reader().offsets(topic)

    def offset_for_time(self, topic: str, partition: int, timestamp_ms: int) -> int:
        return self._reader().offset_for_time(topic, partition, timestamp_ms)

    # -- writing ------------------------------------------------------------------------------

    def batch_writer(self) -> FolderWriter:
        """Return a writer of encoded batches, which may ask for the offset they must have; close it.

        Raises:
            FolderOwnedError: the folder's owner accepts no connections, or does not respond.
        """
        client = self._owner_client()
        client.find_owner()
        return FolderWriter(client.access)

    def _make_producer(self, settings: ProducerSettings) -> FolderProducer:
        writer = self.batch_writer()
        producer = FolderProducer(writer, settings, on_close=writer.close)
        with self._lock:
            self._producers.append(producer)
        return producer

    def fence(self, writer: str) -> int | None:
        self._reader()
        return self._groups.fence(writer)

    def fences(self, prefix: str = "") -> dict[str, int]:
        self._reader()
        return self._groups.fences(prefix)

    def delete_fences(self, prefix: str) -> int:
        self._reader()
        return self._groups.delete_fences(check_prefix(prefix))

    def acquire_ownership(self) -> None:
        client = self._owner_client()
        if client.find_owner() is None:
            raise FolderOwnedError(
                f"the log folder {self.folder} is owned by process {client.owner}; this one writes "
                "through it. To own the folder yourself, stop that one first"
            )

    def run_maintenance(self) -> MaintenanceReport:
        found = self._request("run_maintenance", {})
        risks = [RetentionRisk(**one) for one in found.pop("risks")]
        return MaintenanceReport(**found, risks=risks)

    def on_retention_risk(self, callback: Callable[[RetentionRisk], None]) -> None:
        client = self._owner_client()
        if client.find_owner() is None:
            raise FolderOwnedError(
                f"the log folder {self.folder} is owned by process {client.owner}, which watches "
                "retention; register the callback there, or use lag()"
            )
        client.access.on_risk(callback)

    def archive(
        self,
        topic: str,
        columns: ValueColumns,
        *,
        close_active: bool = False,
        progress: ArchiveProgress | None = None,
    ) -> list[PartitionArchive]:
        count = len(self._reader().offsets(topic))
        with self._owner_client().as_owner() as writer:
            names = [TopicPartition(topic, number) for number in range(count)]
            partitions = [writer.partition(name) for name in names]
            return archive_partitions(
                writer, partitions, columns, close_active=close_active, progress=progress
            )

    # -- groups -------------------------------------------------------------------------------

    def commit_offsets(
        self, group: str, offsets: Offsets, *, topic_ids: Mapping[str, str] | None = None
    ) -> None:
        reader = self._reader().pinned(topic_ids or {})
        self._groups.commit(group, offsets, reader=reader, now_ms=time.time_ns() // 1_000_000)

    def committed_offsets(self, group: str) -> dict[TopicPartition, CommittedOffset]:
        self._reader()
        return self._groups.committed(group)

    def groups(self) -> list[str]:
        self._reader()
        return self._groups.names()

    def delete_group_offsets(self, group: str, topic: str | None = None) -> int:
        self._reader()
        return self._groups.delete(group, topic)

    def lag(self, group: str | None = None) -> list[Lag]:
        reader = self._reader()
        names = self._groups.names() if group is None else [group]
        found = {name: self._groups.committed(name) for name in names}
        now_ms = time.time_ns() // 1_000_000

        def at_risk(name: TopicPartition, offset: int) -> int:
            return sum(
                one.records_at_risk
                for one in risks({name: {"": offset}}, [reader.contents(*name)], now_ms)
            )

        return lag_of(found, reader, at_risk)

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
        consumer = FolderConsumer(
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

    def reader(
        self, topic_ids: Mapping[str, str], *, isolation: Isolation = "read_committed"
    ) -> LogReader:
        return self._reader(isolation).pinned(topic_ids)

    # -- closing ------------------------------------------------------------------------------

    def close(self) -> None:
        with self._lock:
            self._closed = True
            client, self._client = self._client, None
            producers, self._producers = self._producers, []
            consumers, self._consumers = self._consumers, []
        with (
            ExitStack() as closing
        ):  # each is closed, even if another one fails; last in, first out
            if client is not None:
                closing.callback(_release_access, client.access)
                closing.callback(client.close)
            closing.callback(self._groups.close)
            for producer in producers:
                closing.callback(producer.close)
            for consumer in consumers:
                closing.callback(consumer.close)

    def _reader(self, isolation: Isolation = "read_committed") -> LogReader:
        if self._closed:
            raise FencedError(f"this connection to {self.folder} was closed; connect again")
        return LogReader(self.folder, isolation=isolation)

    def _owner_client(self) -> OwnerClient:
        with self._lock:
            if self._closed:
                raise FencedError(f"this connection to {self.folder} was closed; connect again")
            if self._client is None:
                self._client = OwnerClient(_acquire_access(self.folder))
            return self._client

    def _request(self, name: str, args: Mapping[str, object]) -> Any:
        """Return the response of the owner, which may be this process."""
        return self._owner_client().call(OwnerRequest(name, args))


def _acquire_access(folder: Path) -> FolderAccess:
    """Return this process's access to a folder."""
    key = os.path.realpath(folder)
    with _accesses_lock:
        # After a chdir the same relative path is another folder.
        access, users = _accesses.get(key) or (FolderAccess(folder.absolute()), 0)
        _accesses[key] = access, users + 1
        return access


def _release_access(access: FolderAccess) -> None:
    """Release the folder when its last user in this process does."""
    key = os.path.realpath(access.folder)
    with _accesses_lock:
        known, users = _accesses.get(key, (None, 0))
        if known is not access:
            return  # a forked child: the access is the parent's
        if users > 1:
            _accesses[key] = access, users - 1
        else:
            del _accesses[key]
            access.close()


def _forget_in_child() -> None:
    global _accesses_lock  # noqa: PLW0603 - a thread of the parent may have held it at the fork
    _accesses_lock = threading.Lock()
    _accesses.clear()


os.register_at_fork(after_in_child=_forget_in_child)
