"""Where reading continues behind damage: only where a batch was written, never where one merely seems to be.

A value may hold what looks like a batch, down to its checksum: a copy of a segment does, and anybody may send
one. So looking right is not enough. Bytes behind damage are read where one of these says that a batch begins
there, and one does, whole and with that offset:

=============================  ===============================================================
what says so                   why a value cannot
=============================  ===============================================================
the damaged batch's length     from there, headers lead without a gap to an entry of the index, or
and last offset delta          to the end of the file. Were the length wrong, and it were within the
                               damaged batch, they would come to the one that follows with an
                               offset above its own. (One must follow: its offset was published.)
the damaged batch's CRC-32C    it holds over all bytes up to there: only its first 17 are damaged
the next entry of the index    the index is another file, into which values do not go
=============================  ===============================================================

Otherwise the rest of the segment cannot be read. The bytes remain.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import google_crc32c

from millstream.log.batch import (
    CRC_START,
    HEADER_BYTES,
    MAGIC,
    PREFIX_BYTES,
    BatchHeader,
    crc_matches,
    header_fault,
    read_header,
)

OFFSETS_LOST_MAX = 1 << 31  # more cannot be missing in one segment: its index has 32-bit offsets


class Boundary(NamedTuple):
    """Where a batch begins: its base offset, and its position in the file or in some bytes of it."""

    offset: int
    place: int


def boundary_after(
    rest: bytes, offset: int, position: int, known: Iterable[Boundary], *, below: int
) -> Boundary | None:
    """Return where reading continues behind the damage at the start of ``rest``; None: nowhere.

    Args:
        rest: The file from the damage at ``position`` to its end; a place is counted from there.
        offset: The offset that should begin there.
        known: The boundaries in the whole file that its index has, ascending.
        below: The file has all offsets up to here, if nothing of it is gone.
    """
    later = [
        Boundary(one.offset, one.place - position)
        for one in known
        if one.place > position and 0 < one.offset - offset < OFFSETS_LOST_MAX
    ]
    return (
        _by_length(rest, offset, later, below)
        or _by_checksum(rest, offset)
        or next((one for one in later if _begins(rest, one)), None)
    )


def apparent_batches(rest: bytes, offset: int) -> Iterator[tuple[int, BatchHeader]]:
    """Yield (place, header) of all that look like batches behind the damage at the start of ``rest``.

    Looks at every byte, because damage may have changed the lengths by which batches are found. Only for uses
    that are safe if some of it was sent as a value: see the module. The base offset lies outside the CRC, so
    it counts only where it can be right: not at the very place of the damage, not far ahead of ``offset``,
    not if another batch continues differently. If it says that no offset is missing although bytes are, as
    zeros do at the start of a log, another batch has to continue it.
    """
    at = rest.find(bytes([MAGIC]), PREFIX_BYTES)
    while at != -1 and len(rest) - (place := at - PREFIX_BYTES + 1) >= HEADER_BYTES:
        header = read_header(rest, place)
        if (
            0 <= header.base_offset - offset < OFFSETS_LOST_MAX
            and _whole(rest, place, header)
            and _goes_on(
                rest, place + header.size, header.next_offset, header.base_offset == offset
            )
        ):
            yield place, header
        at = rest.find(bytes([MAGIC]), at + 1)


def _by_length(rest: bytes, offset: int, later: list[Boundary], below: int) -> Boundary | None:
    if len(rest) < HEADER_BYTES:
        return None
    header = read_header(rest, 0)
    following = offset + header.last_offset_delta + 1
    if header.size < HEADER_BYTES or header.last_offset_delta < 0 or following >= below:
        return None
    found = Boundary(following, header.size)
    return found if _leads_on(rest, found, later) else None


def _leads_on(rest: bytes, start: Boundary, later: list[Boundary]) -> bool:
    """Return whether headers lead from ``start`` to the next known boundary, or to the end.

    Some of their batches may be damaged, too.
    """
    goal = next((one for one in later if one.place >= start.place), None)
    offset, place = start
    while goal is None or place < goal.place:
        if not 0 < place <= len(rest) - HEADER_BYTES:
            return False
        header = read_header(rest, place)
        if header_fault(header, offset) is not None:
            return False
        offset, place = header.next_offset, place + header.size
        if goal is None and place == len(rest):
            return True
    return (offset, place) == goal


def _by_checksum(rest: bytes, offset: int) -> Boundary | None:
    if len(rest) < HEADER_BYTES:
        return None
    header = read_header(rest, 0)
    following = offset + header.last_offset_delta + 1
    crc, end = google_crc32c.value(b""), CRC_START
    for place, found in apparent_batches(rest, offset):
        if place <= end or found.base_offset != following:
            continue
        crc, end = google_crc32c.extend(crc, rest[end:place]), place
        if crc == header.crc:
            return Boundary(following, place)
    return None


def _begins(rest: bytes, one: Boundary) -> bool:
    """Return whether a whole batch with the offset begins there."""
    if not 0 < one.place <= len(rest) - HEADER_BYTES:
        return False
    header = read_header(rest, one.place)
    return header.base_offset == one.offset and _whole(rest, one.place, header)


def _whole(rest: bytes, place: int, header: BatchHeader) -> bool:
    return (
        header_fault(header, header.base_offset) is None
        and header.size <= len(rest) - place
        and crc_matches(rest, place, header)
    )


def _goes_on(rest: bytes, place: int, offset: int, prove: bool) -> bool:  # noqa: FBT001
    """Return whether ``offset`` can be the next at ``place``.

    To ``prove`` it, a whole batch must begin there with that offset.
    """
    if len(rest) - place < HEADER_BYTES:
        return not prove
    header = read_header(rest, place)
    if prove:
        return header.base_offset == offset and _whole(rest, place, header)
    return header.base_offset == offset or not _whole(rest, place, header)
