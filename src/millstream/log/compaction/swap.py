"""Puts a finished file in the place of one segment, or of several that follow each other.

Each step is safe to be the last one. Readers in other processes may hold an old file open: it remains
as it was, and has the same records, and older ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from millstream.log import aborted, archive, seal
from millstream.log.exclusive import ExclusiveLog
from millstream.log.files import replace_file, sync_names
from millstream.log.partition import Partition, SealedSegment
from millstream.log.scan import SegmentScan
from millstream.log.seal import Seal
from millstream.log.segment import remove_segment


def replace_segments(
    writer: ExclusiveLog,
    partition: Partition,
    olds: Sequence[SealedSegment],
    draft: Path,
    *,
    scan: SegmentScan,
    made: Seal,
) -> SealedSegment | None:
    """Put ``draft``, which is synced, in the place of ``olds``; return the segment that it is now.

    None if one of them is gone meanwhile, by retention or with its topic.

    1. Remove the first one's seal and archive, and sync the folder. A crash leaves the old segment
       without a seal: the next opening reads it. From here on no seal can be believed of a file for
       which it was not made, even if the two are equally long, and no program that reads archives
       without asking the log finds one of other records.
    2. Rename the draft onto the first one, and sync the folder. A crash leaves the old file or the
       new one, both whole, without a seal: the next opening reads it. After a merge its records are
       also in the segments behind it. Readers go by the names, so they see each once; the next
       opening removes segments that begin before the end of the one in front of them.
    3. Replace index and aborted transactions. A crash leaves old ones: a reader notices an index
       that is wrong, and transactions of which nothing is left hide nothing; without a seal the next
       opening makes both again. The new ones are synced before there is a seal that vouches for them.
    4. Write the seal.
    5. Remove the others. A crash leaves some: see 2.

    Args:
        scan: Of the draft; ``made`` is the seal that follows from it.

    Raises:
        OSError: the disk failed before step 2: the old ones are in place, perhaps without a seal.
        SyncFailedError: the disk failed to keep names; which file survives a power cut is open, so
            nothing more is accepted.
    """
    fresh = SealedSegment(olds[0].base_offset, made)
    replaced: list[SealedSegment] = []

    def swap() -> None:
        place = _place_of(partition, olds)
        if place is None:
            return
        files, path = partition.files, partition.path_of(fresh)
        for suffix in (seal.SUFFIX, archive.SUFFIX):
            files.remove(path.with_suffix(suffix))
        sync_names(files, partition.folder)
        files.rename(draft, path)
        sync_names(files, partition.folder)
        partition.sealed[place : place + len(olds)] = [fresh]
        replaced.append(fresh)
        with suppress(OSError):  # without a seal, all of this is rebuilt by the next opening
            replace_file(files, path.with_suffix(".idx"), bytes(scan.index.content))
            aborted.rewrite(files, path, scan.aborted)
            seal.write(files, path, made)
        for old in olds[1:]:
            remove_segment(files, partition.folder, old.base_offset)

    writer.exclusively(swap)
    return replaced[0] if replaced else None


def replace_seal(
    writer: ExclusiveLog, partition: Partition, old: SealedSegment, made: Seal
) -> SealedSegment | None:
    """Give an unchanged segment another seal; a crash leaves the old one, which fits too.

    None if it is gone meanwhile.
    """
    fresh = SealedSegment(old.base_offset, made)
    replaced: list[SealedSegment] = []

    def swap() -> None:
        place = _place_of(partition, [old])
        if place is None:
            return
        partition.sealed[place] = fresh
        replaced.append(fresh)
        with suppress(OSError):  # it is a copy of what the segment says
            seal.write(partition.files, partition.path_of(fresh), made)

    writer.exclusively(swap)
    return replaced[0] if replaced else None


def mark_damaged(writer: ExclusiveLog, partition: Partition, old: SealedSegment) -> SealedSegment:
    """Return a segment as one that counts as damaged from here on, wherever records are at stake.

    In memory only: the next opening looks for itself.
    """
    end_offset = old.seal.next_offset
    fresh = old._replace(seal=replace(old.seal, damaged=((old.base_offset, end_offset),)))

    def swap() -> None:
        place = _place_of(partition, [old])
        if place is not None:
            partition.sealed[place] = fresh

    writer.exclusively(swap)
    return fresh


def _place_of(partition: Partition, olds: Sequence[SealedSegment]) -> int | None:
    """Return where in the row of segments these are; None unless all of them still are."""
    if partition.closed:
        return None
    for place, segment in enumerate(partition.sealed):
        if segment is olds[0]:
            found = partition.sealed[place : place + len(olds)]
            return place if list(map(id, found)) == list(map(id, olds)) else None
    return None
