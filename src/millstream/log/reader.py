"""The reader's face of the log: columnar, without locks, in any process.

A reader maps ``state.mm`` to see how far each partition is committed, and reads segment files up to
there. It never disturbs the owner and needs none: a folder whose owner is gone reads the same. It
checks every batch that it reads, and that no offset is missing between them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from millstream.errors import ConfigError, CorruptionError, OffsetOutOfRangeError
from millstream.log.batch import HEADER_BYTES, BatchHeader, header_fault, read_header
from millstream.log.decoding import COLUMNS, Block, decode, select_schema
from millstream.log.files import DISK, Files, read_whole
from millstream.log.index import SparseIndex
from millstream.log.owner import read_format
from millstream.log.segment import read_blocks, segment_name, segment_offsets
from millstream.log.signal import signal_of
from millstream.log.state_file import STATE_NAME, PartitionState, StateFile, check_same_folder
from millstream.log.topics import Catalog, Topic, partition_folder, unknown_topic
from millstream.record import TopicInfo


class LogReader:
    """Reads a log folder, while its owner appends or without one. One thread at a time.

    Cheap to open; can be pickled (the copy opens the folder anew when it is first used).

    Args:
        folder: The log folder. A folder that is not a log yet has no topics; it becomes visible
            when an owner has made it one.
        files: The file system; only tests give another one.
        catalog: The list of topics; only tests give another one.
    """

    def __init__(
        self, folder: Path | str, *, files: Files = DISK, catalog: Catalog | None = None
    ) -> None:
        self.folder = Path(folder)
        self._files = files
        self._given_catalog = catalog
        self._state: StateFile | None = None
        self._topics: dict[str, Topic] = {}
        self._catalog_version = -1

    def __getstate__(self) -> dict[str, Any]:
        return {"folder": self.folder}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["folder"])  # type: ignore[misc]

    def close(self) -> None:
        """Give the mapping back; the reader opens it again when it is used."""
        if self._state is not None:
            self._state.close()
        self._state, self._catalog_version = None, -1

    # -- what there is ------------------------------------------------------------------------

    def topics(self) -> dict[str, TopicInfo]:
        """Return the topics that exist now, by name; empty for a folder that is no log yet.

        Raises:
            ConfigError: the folder is of another format version, or parts of two were mixed.
        """
        self._refresh()
        return {name: topic.info for name, topic in self._topics.items()}

    def offsets(self, topic: str) -> list[tuple[int, int]]:
        """Return for each partition ``[log start, high watermark)``: what can be read now.

        Raises:
            UnknownTopicError: there is no such topic.
        """
        found = self._topic(topic)
        states = [self._partition_state(found, number) for number in range(len(found.slots))]
        return [(state.log_start, state.high_watermark) for state in states]

    def high_watermark(self, topic: str, partition: int) -> int:
        """Return the offset after the last record that can be read.

        Raises:
            UnknownTopicError, ConfigError: there is no such topic or partition.
        """
        return self._partition_state(self._topic(topic), partition).high_watermark

    def wait(self, topic: str, seen: Sequence[int], timeout_s: float) -> bool:
        """Return True as soon as a high watermark is past ``seen``, False after ``timeout_s``.

        At once if the owner is in this process, within about 2 ms otherwise (see ``signal``).

        Raises:
            UnknownTopicError: there is no such topic, or no longer.
        """

        def passed() -> bool:
            return any(
                end > known for (_, end), known in zip(self.offsets(topic), seen, strict=True)
            )

        return signal_of(self.folder).wait_until(passed, timeout_s)

    # -- reading ------------------------------------------------------------------------------

    def read(
        self,
        topic: str,
        partition: int,
        start: int,
        end: int,
        *,
        columns: Sequence[str] = COLUMNS,
        bytes_max: int = 16 << 20,
    ) -> Iterator[pa.RecordBatch]:
        """Yield the records with offsets in [start, end), in offset order.

        Schema: ``offset`` int64, ``timestamp`` timestamp[ms, UTC], ``key`` and ``value`` binary; of
        these the ``columns`` asked for, in that order. What is not asked for is not decoded.

        Args:
            bytes_max: Soft limit in log bytes for one Arrow record batch; small record batches of
                the log are put together up to it.

        Raises:
            OffsetOutOfRangeError: some of [start, end) is gone or not committed; seek to the range
                [error.start, error.end).
            CorruptBatchError: a batch is damaged. The records before it have been yielded.
            UnknownTopicError, ConfigError: there is no such topic, partition or column.
        """
        select_schema(columns)
        found = self._topic(topic)
        state = self._partition_state(found, partition)
        if start == end:
            return
        if not state.log_start <= start < end <= state.high_watermark:
            raise OffsetOutOfRangeError(
                f"offsets [{start}, {end}) were asked for of {topic}/{partition}, which holds "
                f"[{state.log_start}, {state.high_watermark}); read within these",
                start=state.log_start,
                end=state.high_watermark,
            )
        for block in self._blocks(found, partition, start, end, bytes_max):
            batch = decode(block, start, end, columns)
            if batch.num_rows:
                yield batch

    def offset_for_time(self, topic: str, partition: int, timestamp_ms: int) -> int:
        """Return the first offset whose timestamp is ``timestamp_ms`` or later.

        The high watermark if there is none. Uses the index; reads one stretch of a segment.

        Raises:
            UnknownTopicError, ConfigError: there is no such topic or partition.
        """
        found = self._topic(topic)
        state = self._partition_state(found, partition)
        folder = partition_folder(self.folder, found, partition)
        bases = segment_offsets(self._files.names(folder))
        for base, following in zip(bases, [*bases[1:], state.high_watermark], strict=True):
            segment = _SegmentReader(self._files, folder / segment_name(base), base)
            start = max(segment.offset_before(timestamp_ms), state.log_start)
            for block in segment.blocks(start, min(following, state.high_watermark), 4 << 20):
                if max(header.max_timestamp_ms for _, header in block.batches) < timestamp_ms:
                    continue
                batch = decode(block, start, following, ("offset", "timestamp"))
                times = np.asarray(batch["timestamp"].cast(pa.int64()))
                if (times >= timestamp_ms).any():
                    return int(batch["offset"][int(np.argmax(times >= timestamp_ms))].as_py())
        return state.high_watermark

    def _blocks(
        self, topic: Topic, partition: int, start: int, end: int, block_bytes: int
    ) -> Iterator[Block]:
        """Yield the batches that hold [start, end), from one segment after the other."""
        folder = partition_folder(self.folder, topic, partition)
        bases = segment_offsets(self._files.names(folder))
        later = bisect_right(bases, start)
        if later == 0:
            self._topic(topic.name)  # says so if the topic was deleted meanwhile
            raise CorruptionError(
                f"{folder} holds no segment with offset {start}, which was committed; "
                "restore the missing file from a backup"
            )
        for base, following in zip(bases[later - 1 :], [*bases[later:], end], strict=True):
            if base >= end:
                return
            segment = _SegmentReader(self._files, folder / segment_name(base), base)
            yield from segment.blocks(max(start, base), min(end, following), block_bytes)

    # -- the mapped state and the catalog -----------------------------------------------------

    def _partition_state(self, topic: Topic, partition: int) -> PartitionState:
        if not 0 <= partition < len(topic.slots):
            raise ConfigError(
                f"topic {topic.name!r} has no partition {partition}; "
                f"choose one of 0 to {len(topic.slots) - 1}"
            )
        assert self._state is not None
        slot = topic.slots[partition]
        state = self._state.partition(slot, topic.topic_id, partition)
        if state is None:
            raise CorruptionError(
                f"{self.folder / STATE_NAME} has no whole entry for {topic.name}/{partition}; "
                "open the folder for writing once, to have it recovered"
            )
        return state

    def _topic(self, name: str) -> Topic:
        self._refresh()
        topic = self._topics.get(name)
        if topic is None:
            raise unknown_topic(name, self._topics)
        return topic

    def _refresh(self) -> None:
        if self._state is None and not self._open():
            return
        assert self._state is not None
        header = self._state.header()
        if header is None or header.catalog_version == self._catalog_version:
            return
        self._topics = self._read_catalog()
        self._catalog_version = header.catalog_version

    def _open(self) -> bool:
        """Map state.mm; False while the folder is not a log yet."""
        try:
            directory_id = read_format(self.folder, self._files)
            if directory_id is None or not self._files.exists(self.folder / STATE_NAME):
                return False
            state = StateFile(self.folder, self._files, write=False)
        except (OSError, ValueError) as error:  # ValueError: the owner is just making the file
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(
                f"the log {self.folder} cannot be read: {error}; check the folder's rights, or try "
                "again if it is just being made"
            ) from error
        header = state.header()
        if header is None:
            state.close()
            return False
        check_same_folder(header, directory_id, self.folder)
        self._state = state
        return True

    def _read_catalog(self) -> dict[str, Topic]:
        if self._given_catalog is not None:
            return self._given_catalog.topics()
        catalog = Catalog.open(self.folder, write=False)
        try:
            return catalog.topics()
        finally:
            catalog.close()


class _SegmentReader:
    """Reads stretches of one segment, growing or sealed."""

    def __init__(self, files: Files, path: Path, base_offset: int) -> None:
        self._files = files
        self._path = path
        self._base_offset = base_offset
        index_path = path.with_suffix(".idx")
        content = read_whole(files, index_path) if files.exists(index_path) else b""
        self._index = SparseIndex(content, base_offset)

    def blocks(self, start: int, end: int, block_bytes: int) -> Iterator[Block]:
        """Yield the batches that hold [start, end); end is at most the end of the segment.

        Raises:
            CorruptBatchError: a batch is damaged.
            CorruptionError: the segment ends before ``end``.
        """
        offset, position = self._index.seek(start)
        handle = -1
        try:
            handle = self._files.open(self._path)
            if not self._begins_at(handle, offset, position):
                offset, position = self._base_offset, 0
            for block in read_blocks(
                self._files,
                handle,
                self._path,
                position=position,
                offset=offset,
                end_offset=end,
                block_bytes=block_bytes,
                position_end=self._index.position_of(end),
            ):
                offset = block.batches[-1][1].next_offset
                if offset > start:
                    yield block._replace(batches=_from_offset(block.batches, start))
        except OSError as error:
            raise CorruptionError(
                f"{self._path} cannot be read for offsets [{max(offset, start)}, {end}): {error}; "
                "check the file's rights and the disk"
            ) from error
        finally:
            if handle >= 0:
                self._files.close(handle)
        if offset < end:
            raise CorruptionError(
                f"{self._path} ends at offset {offset}, but offsets [{offset}, {end}) were "
                "committed; restore the file from a backup"
            )

    def offset_before(self, timestamp_ms: int) -> int:
        """Return an offset before which every timestamp of the segment is lower."""
        return self._index.seek_time(timestamp_ms)[0]

    def _begins_at(self, handle: int, offset: int, position: int) -> bool:
        """Return whether the index told the truth: a batch with this offset begins there."""
        head = self._files.pread(handle, HEADER_BYTES, position)
        return len(head) == HEADER_BYTES and header_fault(read_header(head, 0), offset) is None


def _from_offset(
    batches: Sequence[tuple[int, BatchHeader]], start: int
) -> Sequence[tuple[int, BatchHeader]]:
    first = bisect_right(batches, start, key=lambda item: item[1].next_offset)
    return batches[first:]
