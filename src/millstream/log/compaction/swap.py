"""Replaces a segment, or several adjacent ones, by a finished file.

A crash after any step is safe. Readers in other processes may hold an old file open: it remains as it was,
with the same records, and older ones.
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
from millstream.log.removed_tombstones import note_removal
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
    removed_offset: int | None = None,
) -> SealedSegment | None:
    """Replace ``olds`` by ``draft``, which is synced; return the new segment.

    None if one of them is gone meanwhile, by retention or with its topic.

    0. Note the tombstones that the draft no longer has. A crash leaves a note of tombstones that are there;
       the next pass removes them.
    1. Remove the first one's seal and archive, and sync the folder. A crash leaves the old segment
       without a seal: the next opening reads it. From here on no seal can match a file that it was not made
       for, even one of the same length, and no program that reads archives directly finds one of other
       records.
    2. Rename the draft onto the first one, and sync the folder. A crash leaves the old file or the
       new one, both whole, without a seal: the next opening reads it. After a merge its records are
       also in the segments behind it. Readers use the names, so they see each record once; the next opening
       removes segments that begin before the end of the one in front of them.
    3. Replace index and aborted transactions. A crash leaves old ones: a reader notices a wrong index, and
       transactions without remaining records hide nothing; without a seal the next opening rebuilds both. The
       new ones are synced before there is a seal.
    4. Write the seal.
    5. Remove the others. A crash leaves some: see 2.

    Args:
        scan: Of the draft; ``made`` is the seal that follows from it.
        removed_offset: The highest offset of the tombstones that it lacks, beside those that a later
            record replaced.

    Raises:
        RetriableError, CorruptionError: step 0 failed: the old ones are in place.
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
        if removed_offset is not None:
            note_removal(writer.control, partition.name, removed_offset)
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
    """Replace the seal of an unchanged segment; a crash leaves the old one, which matches too.

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
        with suppress(OSError):  # it is derived from the segment
            seal.write(partition.files, partition.path_of(fresh), made)

    writer.exclusively(swap)
    return replaced[0] if replaced else None


def mark_damaged(writer: ExclusiveLog, partition: Partition, old: SealedSegment) -> SealedSegment:
    """Return the segment marked as damaged, in memory only: the next opening checks it itself."""
    end_offset = old.seal.next_offset
    fresh = old._replace(seal=replace(old.seal, damaged=((old.base_offset, end_offset),)))

    def swap() -> None:
        place = _place_of(partition, [old])
        if place is not None:
            partition.sealed[place] = fresh

    writer.exclusively(swap)
    return fresh


def _place_of(partition: Partition, olds: Sequence[SealedSegment]) -> int | None:
    """Return the interval of these in the list of segments; None unless all of them are still there."""
    if partition.closed:
        return None
    for place, segment in enumerate(partition.sealed):
        if segment is olds[0]:
            found = partition.sealed[place : place + len(olds)]
            return place if list(map(id, found)) == list(map(id, olds)) else None
    return None
