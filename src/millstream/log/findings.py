"""What an inspection finds in a log folder, as plain values; see ``inspection``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from millstream.log.batch import HEADER_BYTES, header_fault, read_header
from millstream.log.files import Files, size_of
from millstream.log.scan import SegmentScan

FindingKind = Literal[
    "aborted index",
    "control",
    "damage",
    "format",
    "index",
    "leftover",
    "missing segment",
    "quarantine",
    "seal",
    "state",
    "torn tail",
    "unknown folder",
    "unreadable",
    "unverified",
]
Severity = Literal["harmless", "records lost"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One problem: what it is, what it means, and what to do.

    ``harmless``: every committed record is there and can be read. ``records lost``: some cannot be
    read until a person acts, or ever. ``position`` is the first byte of ``path`` concerned, and ``[start,
    end)`` are the offsets concerned, if any.
    """

    kind: FindingKind
    severity: Severity
    text: str
    advice: str
    path: Path
    topic: str | None = None
    partition: int | None = None
    position: int | None = None
    start: int | None = None
    end: int | None = None

    @property
    def lost(self) -> bool:
        """Whether records cannot be read."""
        return self.severity == "records lost"

    @property
    def where(self) -> str:
        """The partition and the offsets concerned, and the position in the file."""
        place = str(self.path) if self.position is None else f"{self.path}, byte {self.position}"
        if self.topic is None:
            return place
        offsets = "" if self.start is None else f" offsets [{self.start}, {self.end})"
        return f"{self.topic}/{self.partition}{offsets} ({place})"


class UnreadableRange(NamedTuple):
    """Bytes ``[position, position_end)`` of a segment that are no whole batch.

    ``[start, end)`` are the offsets that belong there; none if the bytes were only inserted.
    """

    position: int
    position_end: int
    start: int
    end: int


def unreadable_ranges(
    files: Files, path: Path, scan: SegmentScan, end_offset: int
) -> list[UnreadableRange]:
    """Return where the segment at ``path`` is not whole, in order; it should end at ``end_offset``.

    The last one may have no bytes: the file ends too early. A batch that claims to begin at
    ``end_offset`` or above cannot be right, because base offsets lie outside the CRC: from there on,
    everything is one unreadable range.
    """
    found: list[UnreadableRange] = []
    starts = {stop: start for start, stop in scan.damaged}
    handle = files.open(path)
    try:
        for begin, stop in scan.gaps:
            after = read_header(files.pread(handle, HEADER_BYTES, stop), 0).base_offset
            start = starts.get(after, after)
            if after >= end_offset:
                return [*found, UnreadableRange(begin, scan.size, start, end_offset)]
            found.append(UnreadableRange(begin, stop, start, after))
    finally:
        files.close(handle)
    if scan.position < scan.size or scan.end_offset < end_offset:
        found.append(UnreadableRange(scan.position, scan.size, scan.end_offset, end_offset))
    return found


def fault_at(files: Files, path: Path, unreadable: UnreadableRange) -> str:
    """Return what is wrong with the bytes where an unreadable range begins."""
    handle = files.open(path)
    try:
        head = files.pread(handle, HEADER_BYTES, unreadable.position)
        if len(head) < HEADER_BYTES:
            return "the file ends there"
        header = read_header(head, 0)
        fault = header_fault(header, unreadable.start)
        if fault is None and header.size > files.size(handle) - unreadable.position:
            return f"it would take {header.size} bytes, more than the file has"
        return fault or "its bytes do not match its CRC-32C"
    finally:
        files.close(handle)


def size_if_readable(files: Files, path: Path) -> int:
    """Return how many bytes a file has; 0 if there is none, or it cannot be read."""
    try:
        return size_of(files, path)
    except OSError:
        return 0
