"""Gives up what cannot be read, so that everything else is read without an error.

An opening keeps damage as it is and reports it (see ``recovery``); a repair is the decision to accept the
loss. It never invents a record and never uses an offset again: it replaces offsets that cannot be read by
batches without records, and a missing segment by one of such batches. Whole batches remain byte for byte as
they were, at their offsets.

The whole damaged file is kept in ``quarantine/``, with a note that names the lost offsets. One thing is rewritten: the markers of transactions that are known to have ended, since
``.aborted`` and the last stable offset still say how. Without its marker a transaction would seem to continue
into the next one of its producer, and end as that does.

1. Under the folder's lock, inspect everything, and remove the seals of segments with findings: the next
   opening reads segments without a seal. A crash leaves the rest to the next repair.
2. Open the folder as its owner does. Now every damaged segment is closed, and its seal names the missing
   offsets. A crash leaves what any crash of an owner leaves.
3. Rewrite each of them, and missing segments. A crash leaves some as they were: the next repair continues
   with them.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import google_crc32c

from millstream.errors import ConfigError, CorruptionError, DiskFullError
from millstream.log import aborted, archive, seal
from millstream.log.batch import EncodedBatch, ProducerStamp
from millstream.log.clocks import wall_clock_ms
from millstream.log.compaction.swap import replace_segments
from millstream.log.control import ControlDb
from millstream.log.decoding import Block
from millstream.log.files import DISK, Files, NewFile, replace_file, size_of, sync_names
from millstream.log.findings import Finding, UnreadableRange, unreadable_ranges
from millstream.log.index import IndexBuilder
from millstream.log.markers import (
    FILLER_OFFSETS_MAX,
    NO_TIMESTAMP_MS,
    encode_filler,
    encode_marker,
)
from millstream.log.owner import lock_folder
from millstream.log.partition import Partition, SealedSegment
from millstream.log.producers import AbortedTransaction, ProducerStates
from millstream.log.repair.inspection import QUARANTINE, InspectionProgress, check_is_log, inspect
from millstream.log.scan import SegmentScan, scan_segment
from millstream.log.segment import (
    SIDE_SUFFIXES,
    Segment,
    read_blocks,
    segment_name,
    segment_offsets,
)
from millstream.log.writer import LogWriter

_COPY_BYTES = 4 * 1024 * 1024
_BLOCKING = ("control", "format")
_DISTRUSTED = ("aborted index", "damage", "index", "missing segment", "seal")


@dataclass(frozen=True, slots=True)
class RepairedRange:
    """Offsets ``[start, end)`` that were given up; none if only stray bytes were removed.

    ``quarantined`` is the damaged file as it was, None if it was missing; ``note`` describes it in JSON.
    """

    topic: str
    partition: int
    start: int
    end: int
    quarantined: Path | None
    note: Path


def repair(
    folder: Path | str,
    *,
    files: Files = DISK,
    control: ControlDb | None = None,
    clock_ms: Callable[[], int] = wall_clock_ms,
    progress: InspectionProgress | None = None,
) -> list[RepairedRange]:
    """Make everything in a log folder readable that can be; return the offsets given up.

    Args:
        control: The content of control.db; only tests give another one.
        progress: Called with the bytes of segments inspected so far, and in all.

    Raises:
        FolderOwnedError: another process writes to this folder; stop it first.
        ConfigError, CorruptionError: something is missing that only a backup has; the message says
            what to do.
        DiskFullError: there is no room for the copies; what was repaired until then is.
    Guarantees: killed at any point, it leaves a folder that opens and can be repaired again.
    """
    folder = Path(folder)
    found = _prepare(folder, files, control, progress)
    with LogWriter(
        folder,
        files=files,
        control=control,
        clock_ms=clock_ms,
        sync_threads=1,
        background=False,
    ) as writer:
        damaged = {finding.path for finding in found if finding.kind == "damage"}
        repaired: list[RepairedRange] = []
        for partition in writer.partitions():
            repaired += _PartitionRepair(writer, partition, files, clock_ms()).run(damaged)
        for finding in found:
            _remove_orphan(files, finding)
    return repaired


def _prepare(
    folder: Path, files: Files, control: ControlDb | None, progress: InspectionProgress | None
) -> list[Finding]:
    """Do step 1; return the findings.

    Raises:
        FolderOwnedError: another process writes to this folder.
        ConfigError: the folder is not a log, or lacks what only a backup has.
    """
    check_is_log(folder, files)
    lock = lock_folder(folder, files)
    try:
        found = list(
            inspect(folder, files, control=control, progress=progress, owner_lives=lambda _: False)
        )
        for finding in found:
            if finding.kind in _BLOCKING:
                raise ConfigError(f"{finding.where}: {finding.text}; {finding.advice}")
        for finding in found:
            if finding.kind in _DISTRUSTED:
                files.remove(finding.path.with_suffix(seal.SUFFIX))
            partition = finding.path.parent
            if finding.kind == "missing segment" and not segment_offsets(files.names(partition)):
                # The owner rejects a partition without any segment. An empty one is treated as damage, if
                # there were records.
                with _named_disk_errors(finding.path):
                    Segment.create(files, partition, int(finding.path.stem)).close()
    finally:
        lock.release()
    return found


def _remove_orphan(files: Files, finding: Finding) -> None:
    """Remove a file whose segment is gone."""
    beside = finding.kind == "leftover" and finding.path.suffix in SIDE_SUFFIXES
    if beside and not files.exists(finding.path.with_suffix(".log")):
        files.remove(finding.path)


class _PartitionRepair:
    """Step 3, for one partition of a log that is open in this process."""

    def __init__(self, writer: LogWriter, partition: Partition, files: Files, now_ms: int) -> None:
        self._writer = writer
        self._partition = partition
        self._files = files
        self._now_ms = now_ms
        self._quarantine = writer.folder / QUARANTINE

    def run(self, damaged: Collection[Path]) -> Iterator[RepairedRange]:
        """Repair the segments that their seals mark as damaged, and ``damaged``; yield what was given up."""
        partition = self._partition
        if partition.folder / segment_name(partition.active_base) in damaged:
            # No offset is missing, else it would be closed by now; but there are bytes to remove.
            self._writer.exclusively(partition.roll)
        first = partition.sealed[0].base_offset if partition.sealed else partition.active_base
        if partition.log_start < first:
            yield self._replace_missing(None, partition.log_start, first)
        for segment in list(partition.sealed):
            path = partition.path_of(segment)
            if segment.seal.damaged or path in damaged:
                with _named_disk_errors(path):
                    yield from self._repaired(segment, path)

    def _repaired(self, segment: SealedSegment, path: Path) -> Iterator[RepairedRange]:
        base, end = segment.base_offset, segment.seal.next_offset
        producers = self._producers_before(base)
        scan = scan_segment(self._files, path, base, producers, end_offset=end)
        found = unreadable_ranges(self._files, path, scan, end)
        if not found:
            return
        last = found[-1]
        if len(found) == 1 and last.position == last.position_end and last.start > base:
            yield self._replace_missing(segment, last.start, last.end)
        else:
            yield from self._rewrite(segment, path, found)

    def _producers_before(self, base: int) -> ProducerStates:
        """Return the producers at the start of the segment at ``base``."""
        producers = ProducerStates()
        for segment in self._partition.sealed:
            if segment.base_offset < base:
                producers = segment.seal.producers
        return producers.copy()

    def _known_ends(self) -> _KnownEnds:
        partition, files = self._partition, self._files
        # The file may remain after its segment was removed.
        paths = (partition.folder / name for name in files.names(partition.folder))
        ranges = [
            one
            for path in paths
            if path.suffix == aborted.SUFFIX
            for one in aborted.read(files, path)
        ]
        return _KnownEnds(ranges, partition.producers.last_stable(partition.log_end_offset))

    # -- a segment with unreadable ranges ------------------------------------------------------

    def _rewrite(
        self, segment: SealedSegment, path: Path, found: Sequence[UnreadableRange]
    ) -> Iterator[RepairedRange]:
        """Rewrite a damaged segment, with its unreadable ranges filled; yield what was given up.

        1. Keep the file and the note (see :meth:`_keep`). A crash leaves copies, which the next
           repair makes again under the same names.
        2. Write the new file and sync it. A crash leaves a .new file, which the next opening removes.
        3. Read it back, and put it in the place of the old one: see ``replace_segments``.
        """
        base, end = segment.base_offset, segment.seal.next_offset
        lost = [(unreadable.start, unreadable.end) for unreadable in found]
        known = self._known_ends()
        kept = self._keep(path)
        note = self._write_note(path, lost, kept)
        self._keep_archive(path, note)
        draft = self._draft_of(base)
        with NewFile(self._files, draft) as writing:
            filling = _SegmentFiller(self._files, path, writing, self._writer.leader_epoch, known)
            filling.fill(found, segment, self._producers_before(base))
            writing.sync()
        scan = self._read_back(draft, base, end)
        scan.apply_known_aborts(known.aborted, lost)
        made = replace(
            scan.as_seal(end, ()),
            cleaned_ms=segment.seal.cleaned_ms,
            horizon_ms=segment.seal.horizon_ms,
        )
        replace_segments(self._writer, self._partition, [segment], draft, scan=scan, made=made)
        for start, stop in lost:
            yield self._given_up(start, stop, kept, note)

    def _draft_of(self, base: int) -> Path:
        return self._partition.folder / f"{segment_name(base)}.new"

    def _read_back(self, draft: Path, base: int, end: int) -> SegmentScan:
        """Return the scan of a new file.

        Raises:
            CorruptionError: its content is not what was written.
        """
        scan = scan_segment(self._files, draft, base, self._producers_before(base))
        if unreadable_ranges(self._files, draft, scan, end) or scan.end_offset != end:
            raise CorruptionError(
                f"{draft} does not hold what was just written into it; check the disk, then repair "
                "again"
            )
        return scan

    # -- a segment that is missing ------------------------------------------------------------

    def _replace_missing(self, before: SealedSegment | None, start: int, end: int) -> RepairedRange:
        """Put a segment without records where one is missing, behind ``before``.

        1. Write the note; write the new file and sync it. A crash leaves a .new file, which the
           next opening removes.
        2. Remove the seal of the segment before it, and one that the missing segment may have left;
           sync the folder. By the first, its segment extends over the gap, and a file within it would be
           treated as a leftover. A crash leaves no seals: they are rebuilt from segments.
        3. Rename the new file, and sync the folder. A crash leaves it there or not.
        4. Write the files beside both, their seals last. A crash leaves some: the others are rebuilt from the
           segments.
        """
        partition, files = self._partition, self._files
        path, draft = partition.folder / segment_name(start), self._draft_of(start)
        note = self._write_note(path, [(start, end)], None)
        known = self._known_ends()
        with _named_disk_errors(path), NewFile(files, draft) as writing:
            filling = _SegmentFiller(files, path, writing, self._writer.leader_epoch, known)
            filling.fill_range(UnreadableRange(0, 0, start, end), self._producers_before(start))
            writing.sync()
        scan = self._read_back(draft, start, end)
        scan.apply_known_aborts(known.aborted, [(start, end)])
        made = [(SealedSegment(start, scan.as_seal(end, ())), scan.aborted)]
        if before is not None:
            ranges = aborted.read(files, partition.path_of(before))
            ranges = [one for one in ranges if one.last_offset < start]
            shorter = replace(before.seal, next_offset=start, damaged=(), aborted=len(ranges))
            made.insert(0, (SealedSegment(before.base_offset, shorter), ranges))

        def put() -> None:
            for segment, _ in made:
                files.remove(partition.path_of(segment).with_suffix(seal.SUFFIX))
            sync_names(files, partition.folder)
            for segment, _ in made:
                self._keep_archive(partition.path_of(segment), note)
            files.rename(draft, path)
            sync_names(files, partition.folder)
            replace_file(files, path.with_suffix(".idx"), bytes(scan.index.content))
            for segment, ranges in reversed(made):  # what one loses, the other has by then
                aborted.rewrite(files, partition.path_of(segment), ranges)
                seal.write(files, partition.path_of(segment), segment.seal)
            place = 0 if before is None else partition.sealed.index(before)
            partition.sealed[place : place + len(made) - 1] = [segment for segment, _ in made]

        with _named_disk_errors(path):
            self._writer.exclusively(put)
        return self._given_up(start, end, None, note)

    # -- what is kept -------------------------------------------------------------------------

    def _keep(self, path: Path) -> Path | None:
        """Copy a damaged file to quarantine/; return the copy, None if the file is empty.

        The name has a checksum of the bytes: the same content has one copy, however often it is repaired, and
        other content does not replace it.

        Its bytes are synced when this returns; its name is with the note, which comes next. A crash
        leaves a part of it, and the file where it was.
        """
        size = size_of(self._files, path)
        if not size:
            return None
        source = self._files.open(path)
        try:
            pieces = range(0, size, _COPY_BYTES)
            crc = 0
            for position in pieces:
                crc = google_crc32c.extend(crc, self._files.pread(source, _COPY_BYTES, position))
            kept = self._quarantine / f"{self._name(path)}.{crc:08x}.log"
            self._make_quarantine()
            with NewFile(self._files, kept) as copy:
                for position in pieces:
                    copy.write(self._files.pread(source, _COPY_BYTES, position))
                copy.sync()
        finally:
            self._files.close(source)
        return kept

    def _keep_archive(self, path: Path, note: Path) -> None:
        """Move the archive of a segment to quarantine: it may hold records that are given up.

        A crash leaves it in one of the two folders; an archive that does not match is not read.
        """
        beside = path.with_suffix(archive.SUFFIX)
        if self._files.exists(beside):
            self._files.rename(beside, note.with_name(f"{note.stem}.{beside.name}"))
            sync_names(self._files, self._quarantine)
            sync_names(self._files, beside.parent)

    def _write_note(self, path: Path, lost: Sequence[tuple[int, int]], kept: Path | None) -> Path:
        """Write a note of what is given up, durably; return the file."""
        content = {
            "topic": self._partition.name.topic,
            "partition": self._partition.name.partition,
            "segment": str(path.relative_to(self._writer.folder)),
            "lost": [self._still_wanted(*part) for part in lost],
            "quarantined": None if kept is None else kept.name,
            "repaired_ms": self._now_ms,
        }
        stem = f"{self._name(path)}.missing" if kept is None else kept.stem
        note = self._quarantine / f"{stem}.json"
        self._make_quarantine()
        replace_file(self._files, note, json.dumps(content, indent=2).encode("ascii") + b"\n")
        return note

    def _make_quarantine(self) -> None:
        self._files.make_folder(self._quarantine)
        sync_names(self._files, self._quarantine.parent)

    def _name(self, path: Path) -> str:
        return f"{path.parent.parent.name}.{path.parent.name}.{path.stem}"

    def _still_wanted(self, start: int, end: int) -> tuple[int, int]:
        """Return the part of some offsets at and above the log start."""
        wanted = max(start, min(end, self._partition.log_start))
        return wanted, end

    def _given_up(self, start: int, end: int, kept: Path | None, note: Path) -> RepairedRange:
        name = self._partition.name
        return RepairedRange(
            name.topic, name.partition, *self._still_wanted(start, end), quarantined=kept, note=note
        )


@dataclass(frozen=True, slots=True)
class _KnownEnds:
    """How transactions ended: ``aborted``, or committed if they began below ``last_stable``."""

    aborted: Sequence[AbortedTransaction]
    last_stable: int

    def markers(
        self, unreadable: UnreadableRange, producers: ProducerStates
    ) -> list[tuple[int, ProducerStamp, bool]]:
        """Return (offset, producer, committed) of the markers in an unreadable range, by offset.

        The position of a committed transaction's marker is not known, nor whether it comes later; it does not
        matter: a transaction committed in two parts is committed.

        Args:
            producers: What is known of them where the unreadable range begins.
        """
        aborts: dict[int, ProducerStamp] = {}
        commits: list[ProducerStamp] = []
        for producer_id, (life, since) in producers.open_transactions().items():
            stamp = ProducerStamp(producer_id, life, -1)
            ends = [
                one.last_offset
                for one in self.aborted
                if one.producer_id == producer_id and one.first_offset <= since <= one.last_offset
            ]
            if ends and unreadable.start <= ends[0] < unreadable.end:
                aborts[ends[0]] = stamp
            elif not ends and since < self.last_stable:
                commits.append(stamp)
        free = (
            offset for offset in range(unreadable.start, unreadable.end) if offset not in aborts
        )
        found = [(offset, stamp, False) for offset, stamp in aborts.items()]
        found += [(offset, stamp, True) for stamp, offset in zip(commits, free, strict=False)]
        return sorted(found)


class _SegmentFiller:
    """Copies a segment, with batches without records in its unreadable ranges."""

    def __init__(
        self, files: Files, path: Path, writing: NewFile, leader_epoch: int, known: _KnownEnds
    ) -> None:
        self._files = files
        self._path = path
        self._writing = writing
        self._leader_epoch = leader_epoch
        self._known = known

    def fill(
        self, found: Sequence[UnreadableRange], segment: SealedSegment, producers: ProducerStates
    ) -> None:
        """Write the whole segment.

        Args:
            producers: What is known of them where it begins; is not changed.
        """
        handle = self._files.open(self._path)
        # This is tracked only to know which transactions are open at an unreadable range.
        passed = SegmentScan(
            segment.base_offset, 0, IndexBuilder(segment.base_offset), producers.copy()
        )
        position, offset = 0, segment.base_offset
        try:
            for unreadable in found:
                self._copy(handle, position, offset, unreadable.start, passed)
                self.fill_range(unreadable, passed.producers)
                position, offset = unreadable.position_end, unreadable.end
            self._copy(handle, position, offset, segment.seal.next_offset, passed)
        finally:
            self._files.close(handle)

    def _copy(self, handle: int, position: int, offset: int, end: int, passed: SegmentScan) -> None:
        for block in read_blocks(
            self._files, handle, self._path, position=position, offset=offset, end_offset=end
        ):
            self._writing.write(_whole_batches(block))
            passed.add(block)

    def fill_range(self, unreadable: UnreadableRange, producers: ProducerStates) -> None:
        """Fill the offsets of an unreadable range with the known markers and batches without records.

        Args:
            producers: What is known of them at the unreadable range; is taken behind it.
        """
        offset = unreadable.start
        for place, stamp, commit in self._known.markers(unreadable, producers):
            self._put_filler(offset, place)
            marker = encode_marker(
                commit=commit,
                producer_id=stamp.producer_id,
                producer_epoch=stamp.producer_epoch,
                leader_epoch=self._leader_epoch,
                timestamp_ms=NO_TIMESTAMP_MS,
            )
            self._put(marker, place)
            producers.end_transaction(stamp, place, commit=commit)
            offset = place + 1
        self._put_filler(offset, unreadable.end)

    def _put_filler(self, start: int, end: int) -> None:
        """Write batches without records that take the offsets [start, end)."""
        for offset in range(start, end, FILLER_OFFSETS_MAX):
            count = min(end - offset, FILLER_OFFSETS_MAX)
            self._put(encode_filler(count), offset)

    def _put(self, batch: EncodedBatch, offset: int) -> None:
        self._writing.write(batch.prefix(offset, self._leader_epoch) + batch.tail)


def _whole_batches(block: Block) -> bytes:
    (first, _), (last, header) = block.batches[0], block.batches[-1]
    return block.data[first : last + header.size]


@contextmanager
def _named_disk_errors(path: Path) -> Iterator[None]:
    """Translate an OSError, with the path of the file."""
    try:
        yield
    except OSError as error:
        kind = DiskFullError if error.errno == errno.ENOSPC else CorruptionError
        raise kind(
            f"{path} could not be repaired: {error}; it is as it was. Make room on the disk, or "
            "check it, then repair again"
        ) from error
