"""What reads a log, whichever address leads to it: the folder's reader, and that of brokers.

The engine's source, its sink and consumers ask nothing else of a log.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa

from millstream.client.kafka.address import is_kafka
from millstream.client.kafka.extra import kafka_module
from millstream.log.archive import ArchiveFile
from millstream.log.decoding import COLUMNS
from millstream.log.groups import CommittedOffset, Offsets
from millstream.log.reader import Isolation, LogReader
from millstream.record import TopicInfo, TopicPartition


class Reader(Protocol):
    """The calls of :class:`millstream.log.reader.LogReader`, where each is described."""

    def pinned(self, topic_ids: Mapping[str, str]) -> Reader: ...

    def topic_id(self, topic: str) -> str: ...

    def topics(self) -> dict[str, TopicInfo]: ...

    def offsets(self, topic: str) -> list[tuple[int, int]]: ...

    def bounds(self, topic: str, partition: int) -> tuple[int, int]: ...

    def settings(self, topic: str) -> dict[str, str]: ...

    def end_offset(self, topic: str, partition: int) -> int: ...

    def offset_for_time(self, topic: str, partition: int, timestamp_ms: int) -> int: ...

    def wait(self, topic: str, seen: Sequence[int], timeout_s: float) -> bool: ...

    def read(
        self,
        topic: str,
        partition: int,
        start: int,
        end: int,
        *,
        columns: Sequence[str] = COLUMNS,
        bytes_max: int = 16 << 20,
        tally: Callable[[int], None] | None = None,
    ) -> Iterator[pa.RecordBatch]: ...

    def archives(
        self, topic: str, partition: int, start: int, end: int
    ) -> Iterator[ArchiveFile]: ...

    def close(self) -> None: ...


class KeptOffsets(Protocol):
    """Where the offsets of groups are kept."""

    def committed(self, group: str) -> Mapping[TopicPartition, CommittedOffset]:
        """Return what a group has committed; empty for an unknown group."""

    def commit(self, group: str, offsets: Offsets, *, reader: Any, now_ms: int) -> None:
        """Note how far a group has read; durable when this returns."""


def absolute(address: Path | str) -> Path | str:
    """Return an address that means the same to another process of this machine."""
    return str(address) if is_kafka(address) else Path(address).absolute()


def open_reader(address: Path | str, isolation: Isolation = "read_committed") -> Reader:
    """Return a reader of the log at an address: a folder, or ``kafka://``.

    Raises:
        ConfigError: the address is not possible.
        EnvironmentProblem: it leads to brokers, and the extra for them is not installed.
    """
    if not is_kafka(address):
        return LogReader(address, isolation=isolation)
    reader: Reader = kafka_module("reader").kafka_reader(str(address), isolation)
    return reader
