"""``<base offset>.aborted``: which transactions of a segment were taken back.

One entry of 28 bytes for each abort marker in the segment, little-endian, in the order of markers::

    producer id      int64
    first offset     int64   of the transaction in this partition; may lie in an earlier segment
    last offset      int64   where its marker is
    CRC-32C          uint32  of the 24 bytes before

An entry is written before the last stable offset moves past its marker, so a reader that may see
the records finds the entry too. After a crash it is rebuilt from the markers in the log.

Source: Kafka ``AbortedTxn``, ``TransactionIndex``.
"""

from __future__ import annotations

import struct
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from pathlib import Path

import google_crc32c

from millstream.log.batch import TRANSACTIONAL, BatchHeader
from millstream.log.files import Files, read_whole, replace_file
from millstream.log.producers import AbortedRange

SUFFIX = ".aborted"
_FIELDS = struct.Struct("<qqq")
_CRC = struct.Struct("<I")
ENTRY_BYTES = _FIELDS.size + _CRC.size


def pack(ranges: Iterable[AbortedRange]) -> bytes:
    """Return the entries of these ranges."""
    parts = []
    for aborted in ranges:
        content = _FIELDS.pack(*aborted)
        parts.append(content + _CRC.pack(google_crc32c.value(content)))
    return b"".join(parts)


def unpack(data: bytes) -> list[AbortedRange]:
    """Return the ranges up to the first entry that is not whole."""
    found = []
    for at in range(0, len(data) - ENTRY_BYTES + 1, ENTRY_BYTES):
        content = data[at : at + _FIELDS.size]
        if _CRC.unpack_from(data, at + _FIELDS.size)[0] != google_crc32c.value(content):
            break
        found.append(AbortedRange._make(_FIELDS.unpack(content)))
    return found


def read(files: Files, path: Path) -> list[AbortedRange]:
    """Return the ranges of the segment at ``path`` (its .log file); none if it has no such file."""
    target = path.with_suffix(SUFFIX)
    try:
        return unpack(read_whole(files, target))
    except FileNotFoundError:
        return []


def rewrite(files: Files, path: Path, ranges: Sequence[AbortedRange]) -> None:
    """Make the file beside ``path`` say exactly ``ranges``; without any there is none. Durable.

    A reader finds the old file or the new one, and so does whoever opens the folder after a crash.
    """
    target = path.with_suffix(SUFFIX)
    known = read_whole(files, target) if files.exists(target) else None
    if not ranges:
        if known is not None:
            files.remove(target)
            files.sync_folder(target.parent)
    elif known != pack(ranges):
        replace_file(files, target, pack(ranges))


class AbortedRanges:
    """Which batches belong to transactions that were taken back."""

    def __init__(self, ranges: Iterable[AbortedRange]) -> None:
        self._by_producer: dict[int, list[AbortedRange]] = {}
        for one in sorted(ranges, key=lambda one: one.last_offset):
            self._by_producer.setdefault(one.producer_id, []).append(one)

    def __bool__(self) -> bool:
        return bool(self._by_producer)

    def cover(self, header: BatchHeader) -> bool:
        """Return whether a batch of records was taken back."""
        if not header.attributes & TRANSACTIONAL:
            return False
        # The transactions of one producer follow each other: only the next to end can cover it.
        ranges = self._by_producer.get(header.producer_id, [])
        place = bisect_left(ranges, header.base_offset, key=lambda one: one.last_offset)
        return place < len(ranges) and ranges[place].first_offset <= header.base_offset
