"""Segments: the files of a partition. Batches back to back, named by the first offset they hold.

``<base offset, 20 digits>.log`` holds the batches, ``.idx`` the sparse index. Only the last segment
of a partition grows. This module appends to one segment and reads whole batches out of one; ``partition``
combines the segments of a partition.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from millstream.errors import CorruptBatchError, DiskFullError, SyncFailedError
from millstream.log import aborted, archive, seal
from millstream.log.batch import (
    HEADER_BYTES,
    OFFSET_MAX,
    PREFIX_BYTES,
    BatchHeader,
    EncodedBatch,
    read_header,
    walk,
)
from millstream.log.decoding import Block
from millstream.log.files import Files, numbered, sync_names, write_whole
from millstream.log.index import INDEX_BYTES, IndexBuilder
from millstream.log.producers import AbortedTransaction, ProducerStates
from millstream.log.seal import Seal

SIDE_SUFFIXES = (".idx", seal.SUFFIX, aborted.SUFFIX, archive.SUFFIX)
READ_BYTES = 4 * 1024 * 1024
_INDEX_LAG_BYTES = 20 * INDEX_BYTES  # of the log: a reader scans at most this much behind the index
_ROOM_BYTES_MIN = 64 * 1024  # are read at least: the wanted batch may lie behind skipped ones
_AFTER_PREFIX = HEADER_BYTES - PREFIX_BYTES


def segment_name(base_offset: int) -> str:
    """Return the file name of the segment that begins at ``base_offset``."""
    return f"{base_offset:020d}.log"


def segment_offsets(names: Sequence[str]) -> list[int]:
    """Return the base offsets of the segments among some file names, ascending."""
    return numbered(names, ".log")


class Segment:
    """The growing segment of a partition, as its owner sees it. Not thread-safe."""

    def __init__(
        self,
        files: Files,
        path: Path,
        base_offset: int,
        *,
        size: int,
        index: IndexBuilder,
        aborted_count: int = 0,
    ) -> None:
        self._files = files
        self.path = path
        self.base_offset = base_offset
        self.size = size
        self._index = index
        self._index_written = 0
        self._indexed_size = 0  # of the log, when the index was last written
        self._aborted_count = aborted_count
        self._aborted_handle: int | None = None
        self._aborted_dirty = self._aborted_unnamed = False
        self._handle = files.open(path, write=True)

    @property
    def first_ms(self) -> int | None:
        """Largest timestamp of the first batch; None while the segment is empty."""
        return self._index.first_ms

    @property
    def latest_ms(self) -> int:
        """Largest timestamp of all batches."""
        return self._index.latest_ms

    @classmethod
    def create(cls, files: Files, folder: Path, base_offset: int) -> Segment:
        """Make an empty segment.

        1. Create the file. A crash leaves an empty segment or none: recovery accepts both.
        2. Sync the folder. Only then is a record written to it, so that an acknowledged record is
           never in a file whose name a power cut could take away.
        """
        path = folder / segment_name(base_offset)
        files.close(files.open(path, write=True, create=True))
        sync_names(files, folder)
        return cls(files, path, base_offset, size=0, index=IndexBuilder(base_offset))

    def append(self, batches: Sequence[EncodedBatch], offset: int, leader_epoch: int) -> int:
        """Write batches at ``offset`` and after, together; return the offset after them.

        Raises:
            DiskFullError: none of the batches is in the segment; it ends where it ended before.
            SyncFailedError: the disk failed, and the segment may hold a part; do not append again.
        """
        parts: list[bytes] = []
        entries: list[tuple[int, int, bytes, int]] = []
        position = self.size
        for batch in batches:
            prefix = batch.prefix(offset, leader_epoch)
            parts += (prefix, batch.tail)
            header = prefix + batch.tail[:_AFTER_PREFIX]
            entries.append((offset, position, header, batch.max_timestamp_ms))
            offset += batch.count
            position += batch.size
        try:
            write_whole(self._files, self._handle, b"".join(parts), self.size)
        except OSError as error:
            self._cut_back(error)
        for entry in entries:
            self._index.add(*entry)
        self.size = position
        if self.size - self._indexed_size >= _INDEX_LAG_BYTES:
            self._flush_index(1)
        return offset

    def _cut_back(self, error: OSError) -> None:
        """Undo a write that failed halfway, and raise the error."""
        try:
            self._files.truncate(self._handle, self.size)
        except OSError as second:
            raise SyncFailedError(
                f"{self.path} could neither be written ({error}) nor cut back to {self.size} bytes "
                f"({second}); check the disk, then open the folder again"
            ) from second
        raise DiskFullError(
            f"{self.path} could not take the records: {error}; none of them was appended. "
            "Make room on the disk, then send them again"
        ) from error

    def append_aborted(self, ranges: Sequence[AbortedTransaction]) -> None:
        """Record transactions whose abort markers were just appended.

        Raises:
            SyncFailedError: it could not be written; readers would see what was aborted.
        """
        try:
            if self._aborted_handle is None:
                path = self.path.with_suffix(aborted.SUFFIX)
                self._aborted_handle = self._files.open(path, write=True, create=True)
                self._aborted_unnamed = True
            place = self._aborted_count * aborted.ENTRY_BYTES
            write_whole(self._files, self._aborted_handle, aborted.pack(ranges), place)
        except OSError as error:
            raise SyncFailedError(
                f"{self.path.with_suffix(aborted.SUFFIX)} could not be written ({error}); check "
                "the disk, then open the folder again"
            ) from error
        self._aborted_count += len(ranges)
        self._aborted_dirty = True

    def sync(self) -> None:
        """Return when everything appended is on stable storage. Never call it again after OSError."""
        self._files.sync(self._handle)
        if self._aborted_dirty:
            # Else readers could see aborted records after a power cut.
            assert self._aborted_handle is not None, "what is dirty is open"
            self._files.sync(self._aborted_handle)
            if self._aborted_unnamed:
                sync_names(self._files, self.path.parent)
            self._aborted_dirty = self._aborted_unnamed = False

    def seal(
        self,
        next_offset: int,
        producers: ProducerStates,
        *,
        damaged: Sequence[tuple[int, int]] = (),
    ) -> Seal:
        """Write the seal, durably; the batches are synced already.

        1. Write the index; aborted transactions were synced with the batches. A crash leaves no
           seal: it is made from the segment.
        2. Write the seal (see :func:`replace_file`).
        """
        self._flush_index(0)
        made = replace(self.facts(next_offset, producers), damaged=tuple(damaged))
        seal.write(self._files, self.path, made)
        return made

    def facts(self, next_offset: int, producers: ProducerStates) -> Seal:
        """Return the seal as it would be now, without writing it."""
        return Seal.of(
            self._index,
            next_offset=next_offset,
            size=self.size,
            aborted=self._aborted_count,
            producers=producers,
        )

    def close(self) -> None:
        """Write the rest of the index and close the files."""
        self._flush_index(1)
        self._files.close(self._handle)
        if self._aborted_handle is not None:
            self._files.close(self._aborted_handle)
            self._aborted_handle = None

    def _flush_index(self, bytes_min: int) -> None:
        content = self._index.content
        if len(content) - self._index_written < bytes_min:
            return
        # The index is a hint: a disk without room for it must not fail an append that succeeded.
        with suppress(OSError):
            handle = self._files.open(self.path.with_suffix(".idx"), write=True, create=True)
            try:
                rest = bytes(content[self._index_written :])
                write_whole(self._files, handle, rest, self._index_written)
                self._index_written = len(content)
                self._indexed_size = self.size
            finally:
                self._files.close(handle)


def remove_segment(files: Files, folder: Path, base_offset: int) -> None:
    """Remove a segment and the files beside it; the segment first, as the others are derived from it."""
    path = folder / segment_name(base_offset)
    for target in (path, *(path.with_suffix(suffix) for suffix in SIDE_SUFFIXES)):
        if files.exists(target):
            files.remove(target)


@dataclass(slots=True)
class ReadBudget:
    """How many bytes of batches are still wanted, from the batch on that holds ``start``.

    The caller checks each batch with it, and reports the bytes taken. Where it is full, no more is read. With
    ``first_whole`` the first batch has room, however large it is.
    """

    start: int
    left: int
    first_whole: bool = False
    full: bool = False

    def has(self, header: BatchHeader) -> bool:
        """Return whether a batch has room; if not, none after it has."""
        too_large = header.size > self.left and not self.first_whole
        self.full = too_large and header.next_offset > self.start
        return not self.full

    def limit(self, block_bytes: int) -> int:
        """Return how many bytes to read at once: ``block_bytes`` if there is room."""
        return min(block_bytes, max(self.left, _ROOM_BYTES_MIN))

    def take(self, size: int) -> None:
        """Note that so many bytes were taken."""
        self.left -= size
        self.first_whole = False
        self.full = self.left < HEADER_BYTES


def read_blocks(
    files: Files,
    handle: int,
    path: Path,
    *,
    position: int,
    offset: int,
    end_offset: int = OFFSET_MAX,
    block_bytes: int = READ_BYTES,
    position_end: int | None = None,
    room: ReadBudget | None = None,
) -> Iterator[Block]:
    """Yield the whole batches of a segment from ``position`` (where ``offset`` begins) on.

    Stops before ``end_offset`` and before an incomplete batch at the end of the file. The batches
    before a damaged one are yielded before the error is raised.

    Args:
        position_end: A hint that nothing before ``end_offset`` is behind it.
        room: Stop before a batch that has no room here.

    Raises:
        CorruptBatchError: a batch is damaged. Not retriable.
    """
    size = files.size(handle)
    block_bytes = max(block_bytes, HEADER_BYTES)  # with less, not even a size could be read
    room = room or ReadBudget(0, OFFSET_MAX)
    want = room.limit(block_bytes)
    if position_end is not None and position_end > position:
        want = max(min(want, position_end - position), HEADER_BYTES)
    while size - position >= HEADER_BYTES and offset < end_offset and not room.full:
        data = files.pread(handle, min(want, size - position), position)
        batches, fault = _before_damage(
            walk(data, offset, end_offset=end_offset, path=str(path), position=position)
        )
        if batches:
            at, last = batches[-1]
            yield Block(data, batches, str(path), position)
            position += at + last.size
            offset = last.next_offset
        if fault is not None:
            raise fault
        want = room.limit(block_bytes)
        if not batches:
            if len(data) < HEADER_BYTES:
                return
            header = read_header(data, 0)
            if header.size <= len(data) or header.size > size - position or not room.has(header):
                return
            want = header.size


def _before_damage(
    walked: Iterator[tuple[int, BatchHeader]],
) -> tuple[list[tuple[int, BatchHeader]], CorruptBatchError | None]:
    """Return the batches up to the first that is damaged, and what is wrong with that one."""
    batches: list[tuple[int, BatchHeader]] = []
    try:
        for found in walked:
            batches.append(found)  # noqa: PERF402 - what came before the damage must remain
    except CorruptBatchError as error:
        return batches, error
    return batches, None
