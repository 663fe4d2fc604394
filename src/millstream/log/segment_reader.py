"""Reads intervals of one segment, across damage: from an offset, or from where reading ended.

``reader`` goes from one segment to the next. ``segment`` reads the batches of a file.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from millstream.errors import CorruptBatchError, CorruptionError
from millstream.log.batch import HEADER_BYTES, BatchHeader, header_fault, read_header
from millstream.log.decoding import Block
from millstream.log.files import Files
from millstream.log.index import SparseIndex, index_of
from millstream.log.resync import Boundary, boundary_after
from millstream.log.segment import ReadBudget, read_blocks

_LOOKS_MAX = 20  # at a segment that grows meanwhile


class BatchPosition(NamedTuple):
    """Where a batch begins that was not read yet: right behind one that was."""

    path: str
    offset: int
    position: int


class SegmentReader:
    """Reads intervals of one segment, growing or sealed."""

    def __init__(self, files: Files, path: Path, base_offset: int) -> None:
        self._files = files
        self._path = path
        self._base_offset = base_offset

    @cached_property
    def _index(self) -> SparseIndex:
        return index_of(self._files, self._path, self._base_offset)

    def blocks(
        self,
        start: int,
        end: int,
        block_bytes: int,
        room: ReadBudget,
        known: BatchPosition | None = None,
    ) -> Iterator[Block]:
        """Yield the batches that hold [start, end); end is at most the end of the segment.

        Raises:
            FileNotFoundError: the segment has been removed.
            CorruptBatchError: some of [start, end) is damaged or missing.
            CorruptionError: the disk does not give the bytes.
        """
        offset, handle = start, -1
        try:
            handle = self._files.open(self._path)
            offset, position, position_end = self._seek(handle, start, end, known)
            while offset < end and not room.full:
                try:
                    for block in read_blocks(
                        self._files,
                        handle,
                        self._path,
                        position=position,
                        offset=offset,
                        end_offset=end,
                        block_bytes=block_bytes,
                        position_end=position_end,
                        room=room,
                    ):
                        at, last = block.batches[-1]
                        offset, position = last.next_offset, block.position + at + last.size
                        if offset > start:
                            yield block._replace(batches=_from_offset(block.batches, start))
                    fault = "the file ends there"
                except CorruptBatchError as error:
                    fault = str(error)
                if offset < end and not room.full:
                    offset, position = self._over_damage(
                        handle, (offset, position), (start, end), fault
                    )
        except FileNotFoundError:
            raise
        except OSError as error:
            raise CorruptionError(
                f"{self._path} cannot be read for offsets [{max(offset, start)}, {end}): {error}; "
                "check the file's rights and the disk"
            ) from error
        finally:
            if handle >= 0:
                self._files.close(handle)

    def _seek(
        self, handle: int, start: int, end: int, known: BatchPosition | None
    ) -> tuple[int, int, int | None]:
        """Return (offset, position) of a batch at or before ``start``; and where ``end`` is, if known.

        A caller that continues where it ended needs no index.
        """
        if (
            known is not None
            and known[:2] == (str(self._path), start)
            and self._begins_at(handle, start, known.position)
        ):
            return start, known.position, None
        offset, position = self._index.seek(start)
        if not self._begins_at(handle, offset, position):
            offset, position = self._base_offset, 0
        return offset, position, self._index.position_of(end)

    def _over_damage(
        self, handle: int, at: tuple[int, int], wanted: tuple[int, int], fault: str
    ) -> tuple[int, int]:
        """Return (offset, position) of the next batch, if no wanted offset lies before it.

        Raises:
            CorruptBatchError: some of the offsets ``wanted`` cannot be read.
        """
        (offset, position), (start, end) = at, wanted
        found = self._boundary_after(handle, offset, position, end)
        place, after = (position + found.place, found.offset) if found else (position, end)
        if after > start and offset < min(after, end):
            raise CorruptBatchError(
                f"offsets [{offset}, {min(after, end)}) cannot be read: {self._path} is damaged at "
                f"byte {position} ({fault}). Restore the file from a backup, or read on from "
                f"offset {min(after, end)}",
                path=str(self._path),
                position=position,
                start=offset,
                end=min(after, end),
            )
        return after, place

    def _boundary_after(self, handle: int, offset: int, position: int, end: int) -> Boundary | None:
        """Return where reading continues behind damage; see ``resync``."""
        known = self._index.boundaries()
        for _ in range(_LOOKS_MAX):
            rest = self._files.pread(handle, self._files.size(handle) - position, position)
            found = boundary_after(rest, offset, position, known, below=end)
            # A segment that grows may have been seen in the middle of a batch that is being written.
            if found is not None or self._files.size(handle) - position == len(rest):
                return found
        return None

    def offset_before(self, timestamp_ms: int) -> int:
        """Return an offset before which every timestamp of the segment is lower."""
        return self._index.seek_time(timestamp_ms)[0]

    def _begins_at(self, handle: int, offset: int, position: int) -> bool:
        """Return whether the index is right: a batch with this offset begins there."""
        head = self._files.pread(handle, HEADER_BYTES, position)
        return len(head) == HEADER_BYTES and header_fault(read_header(head, 0), offset) is None


def _from_offset(
    batches: Sequence[tuple[int, BatchHeader]], start: int
) -> Sequence[tuple[int, BatchHeader]]:
    first = bisect_right(batches, start, key=lambda item: item[1].next_offset)
    return batches[first:]
