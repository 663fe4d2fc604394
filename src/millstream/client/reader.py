"""The interface of readers, for a folder and for brokers.

The engine's source, its sink and consumers use only these calls of a log. ``client.open`` makes a reader.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

import pyarrow as pa

from millstream.log.archive import ArchiveFile
from millstream.log.decoding import COLUMNS
from millstream.log.removed_tombstones import Removals
from millstream.record import TopicInfo


class RecordReader(Protocol):
    """What reads records whose range is known: all that a task needs of a log."""

    def removed_tombstones(self, topic: str) -> Removals: ...

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


class Reader(RecordReader, Protocol):
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

    def close(self) -> None: ...
