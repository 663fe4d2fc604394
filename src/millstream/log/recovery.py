"""Recovers a partition after its owner has ended: checks the end of the log, and repairs only that.

Three facts decide. The *durable end* is the high watermark found in ``state.mm``: everything below
it was synced before it was published, so it must be there, whatever happened. It is *exact* if the
machine has not restarted since (same boot id): then the writes that were acknowledged above it are
all in the file, before the first that is not whole. After a power cut it may be older than the last
acknowledgement, so what is above it is cut only if it looks like writes that never reached the
disk. Without a whole state.mm the durable end is the start of the last segment, because a segment
is synced before the next one begins.

The last segment is read from its start, unless the log was closed cleanly and its seal holds. At
the first batch that is not whole and right, at offset ``p``:

=====  =========================  ==========================================  =====================
case   where                      what follows                                 done
=====  =========================  ==========================================  =====================
A      nothing is wrong           the file ends after a batch                  keep everything
B      p < durable end            anything                                     damage: keep, report
C      p >= durable end, exact    anything (it was never whole)                cut at p
D      p >= durable end           no whole batch after p                       cut at p
E      p >= durable end           whole batches, but a page before them is     cut at p
                                  zeros, as one that was never stored is
F      p >= durable end           whole batches, no page of zeros              damage: keep, report
=====  =========================  ==========================================  =====================

What is a whole batch is seen by its bytes, so one may be in a value: what is *read* behind damage is
decided by ``resync``, and is less.

*Cut* is for a torn tail: the bytes are kept in ``quarantine/`` first. *Damage* is for records that
were acknowledged, or may have been: nothing is removed but what cannot be read behind the last whole
batch, which is kept in the same way.
The segment is closed with the damaged offsets written into its seal, and appends go to a new
segment that begins after everything that was ever acknowledged, so that no offset is used twice.
What is whole can be read; reading the damaged offsets raises an error that names them. ``millstream
log repair`` puts an empty batch in their place.

A sealed segment is trusted if its seal is whole and has its size; otherwise it is read, and what
is beside it (index, seal, aborted transactions) is rebuilt. After a failed sync
(``NEEDS_VERIFY``) all of them are read. What a crash may leave is removed: ``.new``, ``.cleaned``,
``.merged`` and ``.excised`` files, segments below the log start, segments that were merged into the one before
them, and archives whose segments are gone. The archive of a segment that turns out to be another one
goes, too; where records are lost, archives remain: theirs may be the only copy.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from millstream.errors import CorruptionError
from millstream.log import aborted, archive, seal
from millstream.log.files import Files, NewFile, numbered, read_whole, sync_names
from millstream.log.findings import unreadable_ranges
from millstream.log.index import IndexBuilder, SparseIndex
from millstream.log.partition import SealedSegment
from millstream.log.producers import ProducerStates
from millstream.log.scan import SegmentScan, scan_segment
from millstream.log.seal import Seal
from millstream.log.segment import Segment, remove_segment, segment_name, segment_offsets

LEFTOVER_SUFFIXES = (".new", ".cleaned", ".merged", ".excised")
_PAGE_BYTES = 4096
_OFFSET_BYTES = 8
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DurableEnd:
    """What state.mm says of one partition, and how far it can be trusted (see above).

    Every transaction that began below ``last_stable`` has ended.
    """

    log_start: int
    offset: int
    published: bool
    exact: bool
    last_stable: int = 0


@dataclass(frozen=True, slots=True)
class RecoveredPartition:
    """A partition that may be appended to: its segments, its bounds, its producers."""

    sealed: list[SealedSegment]
    active: Segment
    log_start: int
    log_end_offset: int
    producers: ProducerStates


class Recovery:
    """Recovers the partitions of one folder.

    Args:
        quarantine: Where bytes that are cut are kept.
        clean: The last owner closed the folder; otherwise the last segments are read again from the
            device.
        verify: Read the sealed segments too.
    """

    def __init__(self, files: Files, quarantine: Path, *, clean: bool, verify: bool) -> None:
        self._files = files
        self._quarantine = quarantine
        self._clean = clean
        self._verify = verify

    def partition(self, folder: Path, durable: DurableEnd) -> RecoveredPartition:
        """Return the partition in ``folder``, with its torn tail cut and everything left synced.

        Raises:
            CorruptionError: every segment is gone though records were acknowledged. Nothing was
                changed; the message says what to do.
        """
        if not self._clean:
            # The last owner may have died between creating a segment and syncing its name. Records appended
            # to that segment must not vanish with the name.
            sync_names(self._files, folder)
        self._remove_leftovers(folder)
        bases = segment_offsets(self._files.names(folder))
        if not bases:
            if durable.offset > 0:
                raise CorruptionError(
                    f"{folder} holds no segment, but offsets [{durable.log_start}, "
                    f"{durable.offset}) were acknowledged; restore the folder from a backup"
                )
            return RecoveredPartition(
                [], Segment.create(self._files, folder, 0), 0, 0, ProducerStates()
            )
        sealed, producers = self._recover_sealed(folder, bases, durable.log_start)
        self._remove_orphaned_archives(folder, sealed, durable.log_start)
        active, end, producers = self._recover_last(folder, bases[-1], durable, producers, sealed)
        producers.end_transactions_below(durable.last_stable)
        first = sealed[0].base_offset if sealed else active.base_offset
        log_start = durable.log_start
        if first > log_start and not durable.published:
            log_start = first
        elif first > log_start:
            # Retention publishes the log start before it removes a file: this one is missing.
            _log.error(
                "%s holds no segment with offsets [%d, %d), which were committed. Restore the "
                "missing file from a backup, or let `millstream log repair` mark them as lost",
                folder,
                log_start,
                first,
            )
        return RecoveredPartition(sealed, active, log_start, end, producers)

    # -- sealed segments ----------------------------------------------------------------------

    def _recover_sealed(
        self, folder: Path, bases: Sequence[int], log_start: int
    ) -> tuple[list[SealedSegment], ProducerStates]:
        """Return all segments but the last, each with its seal, and the producers at their end."""
        sealed: list[SealedSegment] = []
        producers = ProducerStates()
        for place, base in enumerate(bases[:-1]):
            if sealed and sealed[-1].seal.next_offset > base:
                # Compaction put its records into the segment before it, and died.
                remove_segment(self._files, folder, base)
                continue
            if bases[place + 1] <= log_start:
                # Retention moved the log start past it, and died.
                remove_segment(self._files, folder, base)
                continue
            path = folder / segment_name(base)
            found = None if self._verify else self._trusted(path, base)
            if found is None:
                found = self._resealed(path, base, producers, bases[place + 1 :])
            producers = found.producers.copy()
            sealed.append(SealedSegment(base, found))
        return sealed, producers

    def _trusted(self, path: Path, base: int) -> Seal | None:
        """Return the seal of a segment if all files beside the segment match it."""
        handle = self._files.open(path)
        try:
            size = self._files.size(handle)
        finally:
            self._files.close(handle)
        found = seal.read(self._files, path, size)
        if found is None:
            return None
        ends = [one.last_offset for one in aborted.read(self._files, path)]
        if len(ends) != found.aborted or not all(base <= end < found.next_offset for end in ends):
            return None
        index_path = path.with_suffix(".idx")
        if not self._files.exists(index_path):
            return None
        return found if SparseIndex(read_whole(self._files, index_path), base).plausible else None

    def _resealed(
        self, path: Path, base: int, producers: ProducerStates, later: Sequence[int]
    ) -> Seal:
        """Read a sealed segment, and rebuild the files beside it.

        ``later`` are the base offsets of the segments after it. It ends where the next one begins, or, if
        some were merged into it, where the one after those does. Any other end comes from a base offset
        behind damage, which no CRC covers: that must not cost other segments.
        """
        before = seal.read_any(self._files, path)
        scan = scan_segment(
            self._files, path, base, producers, fresh=self._verify, complete_to=later[0]
        )
        end = scan.end_offset if scan.end_offset in later else later[0]
        if scan.end_offset > end:
            scan = scan_segment(self._files, path, base, producers, end_offset=end)
        parts = unreadable_ranges(self._files, path, scan, end)
        damaged = [
            (unreadable.start, unreadable.end)
            for unreadable in parts
            if unreadable.start < unreadable.end
        ]
        for start, stop in damaged:
            _log.error(
                "%s is damaged: offsets [%d, %d) cannot be read; %s. What is around them can. "
                "Restore the file from a backup, or let `millstream log repair` mark them as lost",
                path,
                start,
                stop,
                scan.fault or "the file ends there",
            )
        scan.apply_known_aborts(aborted.read(self._files, path), damaged)
        made = scan.as_seal(end, damaged)
        if before is not None and before.chain == made.chain:
            made = replace(made, cleaned_ms=before.cleaned_ms, horizon_ms=before.horizon_ms)
        elif not damaged:
            self._files.remove(path.with_suffix(archive.SUFFIX))
        self._write_side_files(path, scan)
        with suppress(OSError):  # it is a copy: an opening must not need room on the disk
            seal.write(self._files, path, made)
        return made

    # -- the last segment ---------------------------------------------------------------------

    def _recover_last(
        self,
        folder: Path,
        base: int,
        durable: DurableEnd,
        producers: ProducerStates,
        sealed: list[SealedSegment],
    ) -> tuple[Segment, int, ProducerStates]:
        path = folder / segment_name(base)
        if self._clean and not self._verify and (trusted := self._reopened(path, base, durable)):
            return trusted
        # The last owner may have died of a failed sync before it could mark the folder: then the cache
        # shows records that the disk does not have. Without a clean close only the disk counts.
        scan = scan_segment(
            self._files,
            path,
            base,
            producers,
            fresh=self._verify or not self._clean,
            complete_to=durable.offset,
        )
        beyond = scan.apparent
        if not self.must_keep(path, scan, durable):
            scan, beyond = scan.first_run(), None  # cases A, C, D, E
        end = max(scan.end_offset, durable.offset, beyond.end_offset if beyond else 0)
        if scan.position < scan.size:
            self._cut(path, scan, damaged=scan.end_offset < end)
        damaged = [*scan.damaged]
        if scan.end_offset < end:
            damaged.append((scan.end_offset, end))
        scan.apply_known_aborts(aborted.read(self._files, path), damaged)
        self._write_side_files(path, scan)
        if self._files.exists(path.with_suffix(seal.SUFFIX)):
            self._files.remove(path.with_suffix(seal.SUFFIX))
        segment = Segment(
            self._files,
            path,
            base,
            size=scan.position,
            index=scan.index,
            aborted_count=len(scan.aborted),
        )
        # Batches that were written but never synced are whole, so they become durable before they are
        # published.
        segment.sync()
        if not damaged or end == base:
            return segment, end, scan.producers
        fresh, closed = self._closed_with_damage(segment, scan, end, damaged)
        sealed.append(closed)
        return fresh, end, scan.producers

    def _reopened(
        self, path: Path, base: int, durable: DurableEnd
    ) -> tuple[Segment, int, ProducerStates] | None:
        """Return the growing segment as a clean close left it; None if it must be read."""
        found = self._trusted(path, base)
        if found is None or found.next_offset < durable.offset or found.damaged:
            return None
        index = IndexBuilder.resume(
            base,
            read_whole(self._files, path.with_suffix(".idx")),
            chain=found.chain,
            first_ms=found.first_timestamp_ms,
            latest_ms=found.max_timestamp_ms,
        )
        segment = Segment(
            self._files, path, base, size=found.size, index=index, aborted_count=found.aborted
        )
        return segment, found.next_offset, found.producers.copy()

    def must_keep(self, path: Path, scan: SegmentScan, durable: DurableEnd) -> bool:
        """Return whether there is damage (cases B and F), not just a torn tail."""
        first = scan.first_run()
        if first.end_offset < durable.offset:
            return True  # case B
        gap = scan.first_gap()
        if durable.exact or gap is None:
            return False
        if not durable.published:
            return True
        start, end = gap
        return not _has_lost_page(self._read(path, start, end - start), start)  # case F, or else E

    def _closed_with_damage(
        self, segment: Segment, scan: SegmentScan, end: int, damaged: Sequence[tuple[int, int]]
    ) -> tuple[Segment, SealedSegment]:
        """Close a damaged last segment; return a new one, after everything acknowledged, and the closed one.

        1. Create the new segment. A crash leaves it empty behind the damaged one, which is then
           closed like any sealed segment without a seal.
        2. Write the seal.
        """
        for start, stop in damaged:
            _log.error(
                "%s is damaged: offsets [%d, %d) were acknowledged, or may have been, and cannot "
                "be read; %s. What is around them can, and appends go on at offset %d. Restore the "
                "file from a backup, or let `millstream log repair` mark them as lost",
                segment.path,
                start,
                stop,
                scan.fault or "the file ends there",
                end,
            )
        fresh = Segment.create(self._files, segment.path.parent, end)
        made = segment.seal(end, scan.producers, damaged=damaged)
        segment.close()
        return fresh, SealedSegment(segment.base_offset, made)

    def _cut(self, path: Path, scan: SegmentScan, *, damaged: bool) -> None:
        rest = self._read(path, scan.position, scan.size - scan.position)
        self._quarantine_bytes(path, scan.position, rest)
        _log.warning(
            "cut %d bytes that %s off %s at byte %d (offset %d); they are kept in %s",
            len(rest),
            "cannot be read" if damaged else "were never acknowledged",
            path,
            scan.position,
            scan.end_offset,
            self._quarantine,
        )
        handle = self._files.open(path, write=True)
        try:
            self._files.truncate(handle, scan.position)
            self._files.sync(handle)
        finally:
            self._files.close(handle)

    def _quarantine_bytes(self, path: Path, position: int, rest: bytes) -> None:
        """Copy the bytes that will be cut to quarantine.

        1. Write and sync the copy. A crash leaves a part of it; the log still has the bytes, and
           the next recovery writes the copy again under the same name.
        2. Sync the folder; the one that it is in was synced before. Only then is the log cut.
        """
        topic, partition = path.parent.parent.name, path.parent.name
        name = f"{topic}.{partition}.{path.stem}.{position}.bytes"
        self._files.make_folder(self._quarantine)
        sync_names(self._files, self._quarantine.parent)
        with NewFile(self._files, self._quarantine / name) as kept:
            kept.write(rest)
            kept.sync()
        sync_names(self._files, self._quarantine)

    # -- files beside segments ----------------------------------------------------------------

    def _remove_leftovers(self, folder: Path) -> None:
        for name in self._files.names(folder):
            if name.endswith(LEFTOVER_SUFFIXES):
                self._files.remove(folder / name)

    def _remove_orphaned_archives(
        self, folder: Path, sealed: Sequence[SealedSegment], log_start: int
    ) -> None:
        """Remove archives of segments that retention or compaction removed before it died.

        Where a segment is missing that neither would have removed, its archive remains.
        """
        known = {one.base_offset for one in sealed}
        for base in numbered(self._files.names(folder), archive.SUFFIX):
            merged = any(one.base_offset < base < one.seal.next_offset for one in sealed)
            if base not in known and (merged or base < log_start):
                self._files.remove((folder / segment_name(base)).with_suffix(archive.SUFFIX))

    def _write_side_files(self, path: Path, scan: SegmentScan) -> None:
        """Make index and aborted transactions match the segment."""
        aborted.rewrite(self._files, path, scan.aborted)
        target = path.with_suffix(".idx")
        content = bytes(scan.index.content)
        known = read_whole(self._files, target) if self._files.exists(target) else None
        if known == content:
            return
        with NewFile(self._files, target) as index:
            index.write(content)

    def _read(self, path: Path, position: int, size: int) -> bytes:
        handle = self._files.open(path)
        try:
            return self._files.pread(handle, size, position)
        finally:
            self._files.close(handle)


def _has_lost_page(gap: bytes, position: int) -> bool:
    """Return whether pages before the next whole batch look as if they never reached the disk.

    ``gap`` begins at ``position`` of the file, where the damage is. Such a page is zeros: all of
    it, or from the damage to its end. The first eight bytes of a batch, its offset, may be zeros of
    their own and are no evidence.
    """
    first = -position % _PAGE_BYTES
    if first > _OFFSET_BYTES and first <= len(gap) and gap[:first] == bytes(first):
        return True
    whole = range(first, len(gap) - _PAGE_BYTES + 1, _PAGE_BYTES)
    return any(gap[at : at + _PAGE_BYTES] == bytes(_PAGE_BYTES) for at in whole)
