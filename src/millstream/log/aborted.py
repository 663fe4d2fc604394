"""``<base offset>.aborted``: the aborted transactions of a segment.

One entry of 28 bytes for each abort marker in the segment, little-endian, in the order of markers::

    producer id      int64
    first offset     int64   of the transaction in this partition; may be in an earlier segment
    last offset      int64   where its marker is
    CRC-32C          uint32  of the 24 bytes before

An entry is durable before the last stable offset moves past its marker, so a reader that may see
the records finds the entry too, with a living owner or after the loss of power. Readers look here before they
read the records: compaction and retention remove the records before the entries, so a reader never misses
one. After a crash the file is rebuilt from the markers in the log.

Source: Kafka ``AbortedTxn``, ``TransactionIndex``.
"""

from __future__ import annotations

import struct
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from pathlib import Path

import google_crc32c

from millstream.errors import CorruptionError
from millstream.log.batch import TRANSACTIONAL, BatchHeader
from millstream.log.files import Files, read_whole, replace_file, sync_names
from millstream.log.producers import AbortedTransaction

SUFFIX = ".aborted"
_FIELDS = struct.Struct("<qqq")
_CRC = struct.Struct("<I")
ENTRY_BYTES = _FIELDS.size + _CRC.size


def pack(ranges: Iterable[AbortedTransaction]) -> bytes:
    """Return the entries of these ranges."""
    parts = []
    for aborted in ranges:
        content = _FIELDS.pack(*aborted)
        parts.append(content + _CRC.pack(google_crc32c.value(content)))
    return b"".join(parts)


def unpack(data: bytes) -> list[AbortedTransaction]:
    """Return the ranges up to the first entry that is not whole."""
    found = []
    for at in range(0, len(data) - ENTRY_BYTES + 1, ENTRY_BYTES):
        content = data[at : at + _FIELDS.size]
        if _CRC.unpack_from(data, at + _FIELDS.size)[0] != google_crc32c.value(content):
            break
        found.append(AbortedTransaction._make(_FIELDS.unpack(content)))
    return found


def read(files: Files, path: Path) -> list[AbortedTransaction]:
    """Return the ranges of the segment at ``path`` (its .log file); none if it has no such file.

    For callers that know how many there must be, or rebuild the file: they end at an entry that is not whole.
    """
    return unpack(_content(files, path))


def read_all(files: Files, path: Path) -> list[AbortedTransaction]:
    """Return the ranges of the segment at ``path``, for readers that hide records by them.

    Raises:
        CorruptionError: an entry is damaged, or the disk does not give it.
    """
    try:
        content = _content(files, path)
    except OSError as error:
        raise _unreadable(path, str(error)) from error
    found = unpack(content)
    if len(found) < len(content) // ENTRY_BYTES:  # one that is being written is shorter
        raise _unreadable(path, f"entry {len(found)} does not match its CRC-32C")
    return found


def _content(files: Files, path: Path) -> bytes:
    try:
        return read_whole(files, path.with_suffix(SUFFIX))
    except FileNotFoundError:
        return b""


def _unreadable(path: Path, why: str) -> CorruptionError:
    return CorruptionError(
        f"{path.with_suffix(SUFFIX)} cannot be read: {why}. It lists the aborted transactions of the segment. "
        "Nothing committed is read there until then; open the folder for writing again, which "
        "makes the file again from the segment"
    )


def rewrite(files: Files, path: Path, ranges: Sequence[AbortedTransaction]) -> None:
    """Replace the file beside ``path`` by one of exactly ``ranges``; without any there is none. Durable.

    A reader, and the next opening after a crash, finds the old file or the new one.
    """
    target = path.with_suffix(SUFFIX)
    known = read_whole(files, target) if files.exists(target) else None
    if not ranges:
        if known is not None:
            files.remove(target)
            sync_names(files, target.parent)
    elif known != pack(ranges):
        replace_file(files, target, pack(ranges))


class AbortedTransactions:
    """Which batches belong to aborted transactions."""

    def __init__(self, ranges: Iterable[AbortedTransaction]) -> None:
        self._by_producer: dict[int, list[AbortedTransaction]] = {}
        for one in sorted(ranges, key=lambda one: one.last_offset):
            self._by_producer.setdefault(one.producer_id, []).append(one)

    def __bool__(self) -> bool:
        return bool(self._by_producer)

    def covers(self, header: BatchHeader) -> bool:
        """Return whether a batch of records was aborted."""
        return self.find(header) is not None

    def find(self, header: BatchHeader) -> AbortedTransaction | None:
        """Return the aborted transaction that a batch, or a marker, belongs to."""
        if not header.attributes & TRANSACTIONAL:
            return None
        # The transactions of one producer follow each other: only the next to end can cover it.
        ranges = self._by_producer.get(header.producer_id, [])
        place = bisect_left(ranges, header.base_offset, key=lambda one: one.last_offset)
        if place < len(ranges) and ranges[place].first_offset <= header.base_offset:
            return ranges[place]
        return None


class FetchedAborts:
    """Which of ``ranges`` must be reported to Kafka's clients together with some batches.

    Such a client skips the records of a producer from the first offset of a range on, up to the producer's
    next abort marker in the same response. Compaction may have removed the marker after the ranges were read
    and before the segment was: then the client would skip what follows, too, so that must go into another
    response.
    """

    def __init__(self, ranges: Iterable[AbortedTransaction]) -> None:
        self._ranges = AbortedTransactions(ranges)
        # by producer: reported, and its marker not met yet
        self._open: dict[int, AbortedTransaction] = {}
        self._told: dict[AbortedTransaction, None] = {}

    @property
    def transactions(self) -> list[AbortedTransaction]:
        """The ranges to report, by their first offsets."""
        return sorted(self._told, key=lambda one: one.first_offset)

    @property
    def awaits_marker(self) -> bool:
        """Whether a marker has not been met yet: then what follows goes into another response."""
        return bool(self._open)

    def admit(self, header: BatchHeader) -> bool:
        """Add the next batch of the response; False: it and what follows must go into another."""
        if not self._ranges or not header.attributes & TRANSACTIONAL:
            return True
        before = self._open.pop(header.producer_id, None)
        if before is not None and before.last_offset < header.base_offset:
            return False
        found = self._ranges.find(header)
        if found is not None:
            self._told[found] = None
            if found.last_offset > header.base_offset:
                self._open[header.producer_id] = found
        return True
