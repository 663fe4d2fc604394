"""The event log in a folder, as a program uses it: topics, producers, consumers, tables.

Everything that reads goes through a ``LogReader`` and needs no right. The first call that writes makes
this process the owner, or has it join the owner (see ``joining``). What is durable when is told in
``docs/log-format.md``.
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

from millstream.client.consumer import Consumer, Start
from millstream.client.event_log import EventLog, checked_prefix
from millstream.client.groups import GroupOffsets, Lag, lag_of
from millstream.client.producer import BUFFER_BYTES_MAX, LINGER_MS, Overload, Producer
from millstream.client.settings import topic_settings
from millstream.durations import Duration, to_us
from millstream.errors import FencedError, FolderOwnedError
from millstream.joining.access import FolderAccess, Line
from millstream.joining.requests import Asked
from millstream.joining.writing import FolderWriter
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
from millstream.record import TopicInfo, TopicPartition

_accesses: dict[str, tuple[FolderAccess, int]] = {}
_accesses_lock = threading.Lock()


class FolderLog(EventLog):
    """The log in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = threading.Lock()
        self._line: Line | None = None
        self._producers: list[Producer] = []
        self._consumers: list[Consumer] = []
        self._groups = GroupOffsets(folder)
        self._closed = False

    @property
    def identity(self) -> str:
        self._to_owner().reach()
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
        return TopicInfo(**self._ask("create_topic", args))

    def alter_topic(
        self,
        name: str,
        *,
        partitions: int | None = None,
        settings: Mapping[str, str | None] | None = None,
    ) -> TopicInfo:
        given = None if settings is None else dict(settings)
        args = {"name": name, "partitions": partitions, "settings": given}
        return TopicInfo(**self._ask("alter_topic", args))

    def topic_settings(self, name: str) -> dict[str, str]:
        return self._reader().settings(name)

    def delete_records(self, topic: str, partition: int, before_offset: int) -> int:
        args = {"topic": topic, "partition": partition, "before_offset": before_offset}
        start: int = self._ask("delete_records", args)
        return start

    def delete_topic(self, name: str) -> None:
        self._ask("delete_topic", {"name": name})

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
        line = self._to_owner()
        line.reach()
        writer = FolderWriter(line.access)
        producer = Producer(
            writer,
            linger_ms=linger_ms,
            compression=compression,
            durability=durability,
            overload=overload,
            buffer_bytes=buffer_bytes,
            block_timeout_s=to_us(block_timeout, what="block_timeout") / 1e6,
            transactional_id=transactional_id,
            transaction_timeout_ms=to_us(transaction_timeout, what="transaction_timeout") // 1000,
            name=name,
            on_close=writer.close,
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
        line = self._to_owner()
        if line.reach() is None:
            raise FolderOwnedError(
                f"the log folder {self.folder} is owned by process {line.owner}; this one writes "
                "through it. To own the folder yourself, stop that one first"
            )

    def keep_house(self) -> KeepingReport:
        found = self._ask("keep_house", {})
        risks = [RetentionRisk(**one) for one in found.pop("risks")]
        return KeepingReport(**found, risks=risks)

    def on_retention_risk(self, callback: Callable[[RetentionRisk], None]) -> None:
        line = self._to_owner()
        if line.reach() is None:
            raise FolderOwnedError(
                f"the log folder {self.folder} is owned by process {line.owner}, which watches over "
                "it; ask there to be told, or look at lag()"
            )
        line.access.on_risk(callback)

    def archive(
        self,
        topic: str,
        columns: ValueColumns,
        *,
        roll: bool = False,
        progress: ArchiveProgress | None = None,
    ) -> list[PartitionArchive]:
        count = len(self._reader().offsets(topic))
        with self._to_owner().owning() as writer:
            names = [TopicPartition(topic, number) for number in range(count)]
            partitions = [writer.partition(name) for name in names]
            return archive_partitions(writer, partitions, columns, roll=roll, progress=progress)

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
        topic_id: str | None = None,
    ) -> Consumer:
        reader = self._reader(isolation).pinned({} if topic_id is None else {topic: topic_id})
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
            line, self._line = self._line, None
            producers, self._producers = self._producers, []
            consumers, self._consumers = self._consumers, []
        with ExitStack() as closing:  # each is closed, whatever the others say; last in, first out
            if line is not None:
                closing.callback(_give_back, line.access)
                closing.callback(line.hang_up)
            closing.callback(self._groups.close)
            for producer in producers:
                closing.callback(producer.close)
            for consumer in consumers:
                closing.callback(consumer.close)

    def _reader(self, isolation: Isolation = "read_committed") -> LogReader:
        if self._closed:
            raise FencedError(f"this connection to {self.folder} was closed; connect again")
        return LogReader(self.folder, isolation=isolation)

    def _to_owner(self) -> Line:
        with self._lock:
            if self._closed:
                raise FencedError(f"this connection to {self.folder} was closed; connect again")
            if self._line is None:
                self._line = Line(_borrow(self.folder))
            return self._line

    def _ask(self, name: str, args: Mapping[str, object]) -> Any:
        """Return what the owner answers, which may be this process."""
        return self._to_owner().ask(Asked(name, args))


def _borrow(folder: Path) -> FolderAccess:
    """Return this process's standing with a folder."""
    key = os.path.realpath(folder)
    with _accesses_lock:
        # A program that goes to another folder must not take over what is called so there.
        access, users = _accesses.get(key) or (FolderAccess(folder.absolute()), 0)
        _accesses[key] = access, users + 1
        return access


def _give_back(access: FolderAccess) -> None:
    """Give the folder up when its last user in this process does."""
    key = os.path.realpath(access.folder)
    with _accesses_lock:
        known, users = _accesses.get(key, (None, 0))
        if known is not access:
            return  # a forked child: the standing is the parent's
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
