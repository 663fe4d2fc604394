"""Segments: the files of a partition. Batches back to back, named by the first offset they hold.

``<base offset, 20 digits>.log`` holds the batches, ``.idx`` the sparse index. Only the last segment
of a partition grows. This module appends to one segment and reads whole batches out of one; what
the files of a partition mean together is in ``partition``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from millstream.errors import CorruptBatchError, DiskFullError, SyncFailedError
from millstream.log.batch import (
    HEADER_BYTES,
    MAGIC,
    OFFSET_MAX,
    PREFIX_BYTES,
    BatchHeader,
    EncodedBatch,
    crc_matches,
    header_fault,
    read_header,
    walk,
)
from millstream.log.decoding import Block
from millstream.log.files import Files, write_whole
from millstream.log.index import IndexBuilder

SEGMENT_BYTES_MAX = 128 * 1024 * 1024
READ_BYTES = 4 * 1024 * 1024
_INDEX_FLUSH_BYTES = 400  # 20 entries: a reader scans at most about 160 KiB behind the index
_AFTER_PREFIX = HEADER_BYTES - PREFIX_BYTES


def segment_name(base_offset: int) -> str:
    """Return the file name of the segment that begins at ``base_offset``."""
    return f"{base_offset:020d}.log"


def segment_offsets(names: Sequence[str]) -> list[int]:
    """Return the base offsets of the segments among some file names, ascending."""
    return sorted(
        int(name[:20])
        for name in names
        if len(name) == 24 and name.endswith(".log") and name[:20].isdigit()
    )


class Segment:
    """The growing segment of a partition, as its owner sees it. Not thread-safe."""

    def __init__(
        self, files: Files, path: Path, base_offset: int, *, size: int, index: IndexBuilder
    ) -> None:
        self._files = files
        self.path = path
        self.base_offset = base_offset
        self.size = size
        self._index = index
        self._index_written = 0
        self._handle = files.open(path, write=True)

    @classmethod
    def create(cls, files: Files, folder: Path, base_offset: int) -> Segment:
        """Make an empty segment.

        1. Create the file. A crash leaves an empty segment or none: recovery takes both.
        2. Sync the folder. Only then is a record put into it, so that an acknowledged record is
           never in a file whose name a power cut could take away.
        """
        path = folder / segment_name(base_offset)
        files.close(files.open(path, write=True, create=True))
        files.sync_folder(folder)
        return cls(files, path, base_offset, size=0, index=IndexBuilder(base_offset))

    def append(self, batches: Sequence[EncodedBatch], offset: int, leader_epoch: int) -> int:
        """Write batches at ``offset`` and after, in one go; return the offset after them.

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
        self._flush_index(_INDEX_FLUSH_BYTES)
        return offset

    def _cut_back(self, error: OSError) -> None:
        """Take back a write that failed half way, and say so."""
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

    def sync(self) -> None:
        """Return when everything appended is on stable storage. Never call it again after OSError."""
        self._files.sync(self._handle)

    def close(self) -> None:
        """Write the rest of the index and let go of the file."""
        self._flush_index(1)
        self._files.close(self._handle)

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
            finally:
                self._files.close(handle)


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
) -> Iterator[Block]:
    """Yield the whole batches of a segment from ``position`` (where ``offset`` begins) on.

    ``position_end`` is a hint that nothing before ``end_offset`` lies behind it. Stops before ``end_offset`` and before an incomplete batch at the end of the file. The batches
    before a damaged one are yielded before the error is raised.

    Raises:
        CorruptBatchError: a batch is damaged. Not retriable.
    """
    size = files.size(handle)
    want = block_bytes
    if position_end is not None and position_end > position:
        want = min(want, position_end - position)
    while size - position >= HEADER_BYTES and offset < end_offset:
        data = files.pread(handle, min(want, size - position), position)
        batches: list[tuple[int, BatchHeader]] = []
        fault: CorruptBatchError | None = None
        try:
            for found in walk(
                data, offset, end_offset=end_offset, path=str(path), position=position
            ):
                batches.append(found)  # noqa: PERF402 - what came before the damage must stay
        except CorruptBatchError as error:
            fault = error
        if batches:
            at, last = batches[-1]
            yield Block(data, batches, str(path), position)
            position += at + last.size
            offset = last.next_offset
        if fault is not None:
            raise fault
        want = block_bytes
        if not batches:
            if len(data) < HEADER_BYTES:
                return
            whole = read_header(data, 0).size
            if whole <= len(data) or whole > size - position:
                return
            want = whole


def find_batch_after(data: bytes, offset: int) -> tuple[int, int] | None:
    """Return (place, base offset) of a whole batch in ``data`` that begins at ``offset`` or later.

    Looks at every byte, because damage may have changed the lengths by which batches are found.
    """
    at = data.find(bytes([MAGIC]), PREFIX_BYTES - 1)
    while at != -1:
        place = at - PREFIX_BYTES + 1
        if len(data) - place < HEADER_BYTES:
            return None
        header = read_header(data, place)
        if (
            header.base_offset >= offset
            and header_fault(header, header.base_offset) is None
            and header.size <= len(data) - place
            and crc_matches(data, place, header)
        ):
            return place, header.base_offset
        at = data.find(bytes([MAGIC]), at + 1)
    return None
