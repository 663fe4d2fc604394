"""The event log in a folder, as a program uses it: topics, producers, consumers, tables.

Everything that reads goes through a ``LogReader`` and needs no right; the first call that writes
makes this process the owner. What is durable when is told in ``docs/log-format.md``.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

import pyarrow as pa

from millstream.client.consumer import Consumer
from millstream.client.producer import LINGER_MS, Producer
from millstream.errors import FencedError
from millstream.log.decoding import COLUMNS, select_schema
from millstream.log.reader import LogReader
from millstream.log.writer import LogWriter
from millstream.record import TopicInfo

_writers: dict[str, tuple[LogWriter, int]] = {}
_writers_lock = threading.Lock()


class EventLog:
    """A connection to the log in ``folder``; see :func:`millstream.client.connect`.

    Guarantees: thread-safe, but a consumer belongs to one thread. Close it, or use it in ``with``.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = threading.Lock()
        self._writer: LogWriter | None = None
        self._producers: list[Producer] = []
        self._consumers: list[Consumer] = []
        self._closed = False

    # -- topics -------------------------------------------------------------------------------

    def create_topic(self, name: str, *, partitions: int = 1) -> TopicInfo:
        """Make a topic; it is durable and visible when this returns.

        Raises:
            TopicExistsError: the name is taken.
            ConfigError: the name or the number of partitions is not possible.
            FolderOwnedError: another process writes to this folder.
        """
        return self._own().create_topic(name, partitions=partitions)

    def delete_topic(self, name: str) -> None:
        """Remove a topic and all its records, for good.

        Raises:
            UnknownTopicError: there is no such topic.
            FolderOwnedError: another process writes to this folder.
        """
        self._own().delete_topic(name)

    def topics(self) -> dict[str, TopicInfo]:
        """Return the topics by name; empty for a folder that does not exist yet."""
        return self._reader().topics()

    def offsets(self, topic: str) -> list[tuple[int, int]]:
        """Return for each partition ``[log start, high watermark)``: what can be read now.

        Raises:
            UnknownTopicError: there is no such topic.
        """
        return self._reader().offsets(topic)

    def end_offsets(self, topic: str) -> list[int]:
        """Return for each partition the offset after the last record that can be read.

        Raises:
            UnknownTopicError: there is no such topic.
        """
        return [end for _, end in self.offsets(topic)]

    def offset_for_time(self, topic: str, partition: int, timestamp_ms: int) -> int:
        """Return the first offset with this timestamp or a later one; the end if there is none.

        Raises:
            UnknownTopicError, ConfigError: there is no such topic or partition.
        """
        return self._reader().offset_for_time(topic, partition, timestamp_ms)

    # -- writing ------------------------------------------------------------------------------

    def producer(self, *, linger_ms: float = LINGER_MS) -> Producer:
        """Return a producer: ``send`` one record, ``send_many`` columns; both give futures.

        Args:
            linger_ms: How long a record may wait for others to share its batch.

        Raises:
            FolderOwnedError: another process writes to this folder.
        """
        producer = Producer(self._own(), linger_ms=linger_ms)
        with self._lock:
            self._producers.append(producer)
        return producer

    # -- reading ------------------------------------------------------------------------------

    def consumer(
        self,
        topic: str,
        *,
        start: Literal["earliest", "latest"] | datetime | Mapping[int, int] = "earliest",
        follow: bool = True,
    ) -> Consumer:
        """Return an iterator over the records of a topic, in offset order within each partition.

        Args:
            start: The first or next record; a time (the first record at it or later); or offsets by
                partition (only these partitions are read).
            follow: Wait for more at the end; otherwise stop at the end seen by this call.

        Raises:
            UnknownTopicError, ConfigError: there is no such topic, partition or start.
            OffsetOutOfRangeError: the offset asked for is gone or not yet there.
        """
        consumer = Consumer(self._reader(), topic, start=start, follow=follow)
        with self._lock:
            self._consumers.append(consumer)
        return consumer

    def read(
        self,
        topic: str,
        partition: int,
        start: int = 0,
        end: int | None = None,
        *,
        columns: Sequence[str] = COLUMNS,
    ) -> pa.Table:
        """Return the records with offsets in [start, end) of one partition as an Arrow table.

        Args:
            end: The high watermark if not given.
            columns: Of offset, timestamp, key, value; what is not asked for is not decoded.

        Raises:
            OffsetOutOfRangeError: some of [start, end) is gone or not committed.
            CorruptBatchError: a batch is damaged.
            UnknownTopicError, ConfigError: there is no such topic, partition or column.
        """
        reader = self._reader()
        stop = reader.high_watermark(topic, partition) if end is None else end
        batches = reader.read(topic, partition, start, stop, columns=columns)
        return pa.Table.from_batches(batches, schema=select_schema(columns))

    # -- closing ------------------------------------------------------------------------------

    def close(self) -> None:
        """Send what producers still hold, stop consumers, give up the folder.

        Raises:
            MillstreamError: records that a producer held could not be sent.
        """
        with self._lock:
            self._closed = True
            writer, self._writer = self._writer, None
            producers, self._producers = self._producers, []
            consumers, self._consumers = self._consumers, []
        try:
            for consumer in consumers:
                consumer.close()
            for producer in producers:
                producer.close()
        finally:
            if writer is not None:
                _give_back(writer)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _reader(self) -> LogReader:
        if self._closed:
            raise FencedError(f"this connection to {self.folder} was closed; connect again")
        return LogReader(self.folder)

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
