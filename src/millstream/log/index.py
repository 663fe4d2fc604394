"""The sparse index beside each segment: where to begin reading for an offset or a time.

One entry about every 8 KiB of batches, 20 bytes each, little-endian::

    offset      uint32   base offset of a batch, less the base offset of the segment
    position    uint32   where that batch begins in the .log file
    latest      int64    largest timestamp (ms) of all batches before it in the segment
    chain       uint32   CRC-32C over the 61-byte headers of all batches before it

The index is a hint. It is never synced, may be missing or short, and can be rebuilt from the log;
a reader that does not find the batch of an entry at its position reads from the segment's start.
``chain`` protects the 17 header bytes that the CRC of a batch leaves out.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import TYPE_CHECKING

import google_crc32c
import numpy as np

from millstream.log.files import Files, read_whole
from millstream.log.resync import Boundary

if TYPE_CHECKING:
    from numpy.typing import NDArray

INDEX_BYTES = 8192  # log bytes from one entry to the next, at least
_ENTRY = struct.Struct("<IIqI")
_FIELDS = np.dtype([("offset", "<u4"), ("position", "<u4"), ("latest", "<i8"), ("chain", "<u4")])
NO_TIME = -(1 << 63)


class IndexBuilder:
    """Collects the entries of one segment as batches are added in order."""

    def __init__(self, base_offset: int) -> None:
        self._base_offset = base_offset
        self._next_entry = INDEX_BYTES
        self.chain = 0
        self.first_ms: int | None = None
        self.latest_ms = NO_TIME
        self.content = bytearray()

    @classmethod
    def resume(
        cls, base_offset: int, content: bytes, *, chain: int, first_ms: int, latest_ms: int
    ) -> IndexBuilder:
        """Continue after a clean close, from the index written then."""
        builder = cls(base_offset)
        builder.content = bytearray(content)
        if content:
            last = _ENTRY.unpack_from(content, len(content) - _ENTRY.size)
            builder._next_entry = last[1] + INDEX_BYTES
        builder.chain, builder.latest_ms = chain, latest_ms
        builder.first_ms = None if first_ms == NO_TIME else first_ms
        return builder

    def copy(self) -> IndexBuilder:
        """Return an independent copy."""
        same = IndexBuilder(self._base_offset)
        same._next_entry, same.chain = self._next_entry, self.chain
        same.first_ms, same.latest_ms = self.first_ms, self.latest_ms
        same.content = bytearray(self.content)
        return same

    def restart_at(self, position: int) -> None:
        """Force an entry for the batch at ``position``, which follows damage."""
        self._next_entry = min(self._next_entry, position)

    def add(self, offset: int, position: int, header: bytes, max_timestamp_ms: int) -> None:
        """Add a batch: its base offset, position, 61 header bytes and largest timestamp."""
        if position >= self._next_entry:
            entry = _ENTRY.pack(offset - self._base_offset, position, self.latest_ms, self.chain)
            self.content += entry
            self._next_entry = position + INDEX_BYTES
        self.chain = google_crc32c.extend(self.chain, header)
        if self.first_ms is None:
            self.first_ms = max_timestamp_ms
        self.latest_ms = max(self.latest_ms, max_timestamp_ms)


class SparseIndex:
    """The entries of one segment, for lookups. Damaged or foreign content counts as empty."""

    def __init__(self, content: bytes, base_offset: int) -> None:
        usable = len(content) // _ENTRY.size * _ENTRY.size
        entries = np.frombuffer(content[:usable], _FIELDS)
        rising = bool(
            (np.diff(entries["offset"].astype(np.int64)) > 0).all()
            and (np.diff(entries["position"].astype(np.int64)) > 0).all()
        )
        self.plausible = rising and usable == len(content)
        self._entries: NDArray[np.void] = entries if rising else entries[:0]
        self._base_offset = base_offset

    def __len__(self) -> int:
        return len(self._entries)

    def boundaries(self) -> list[Boundary]:
        """Return base offset and position of each batch that has an entry, in order."""
        return [Boundary(*self._entry(row)) for row in range(len(self._entries))]

    def seek(self, offset: int) -> tuple[int, int]:
        """Return (base offset, position) of a batch at or before ``offset``."""
        row = int(np.searchsorted(self._entries["offset"], offset - self._base_offset, "right"))
        return self._entry(row - 1)

    def position_of(self, end_offset: int) -> int | None:
        """Return a position before which all offsets below ``end_offset`` lie, if it is known."""
        row = int(np.searchsorted(self._entries["offset"], end_offset - self._base_offset, "left"))
        return int(self._entries["position"][row]) if row < len(self._entries) else None

    def seek_time(self, timestamp_ms: int) -> tuple[int, int]:
        """Return (base offset, position) before which every timestamp is lower."""
        row = int(np.searchsorted(self._entries["latest"], timestamp_ms, "left"))
        return self._entry(row - 1)

    def _entry(self, row: int) -> tuple[int, int]:
        if row < 0:
            return self._base_offset, 0
        entry = self._entries[row]
        return self._base_offset + int(entry["offset"]), int(entry["position"])


def index_of(files: Files, path: Path, base_offset: int) -> SparseIndex:
    """Return the index beside the segment at ``path``; empty if there is none, or it cannot be read."""
    try:
        content = read_whole(files, path.with_suffix(".idx"))
    except OSError:  # it is only a hint
        content = b""
    return SparseIndex(content, base_offset)
