"""One pass over the batches of a segment: what it holds, what is damaged, what follows from it.

Recovery, verification and repair all use a scan. It reads headers and checksums, never records; it skips
damage to where ``resync`` finds the next batch, and keeps the result up to the first damage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from millstream.errors import CorruptBatchError
from millstream.log.batch import CONTROL, HEADER_BYTES, OFFSET_MAX
from millstream.log.decoding import Block
from millstream.log.files import Files
from millstream.log.index import IndexBuilder, index_of
from millstream.log.markers import is_commit
from millstream.log.producers import AbortedTransaction, ProducerStates
from millstream.log.resync import Boundary, apparent_batches, boundary_after
from millstream.log.seal import Seal
from millstream.log.segment import read_blocks


class ApparentBatches(NamedTuple):
    """Bytes that look like batches: where the first begins, and the highest offset after one."""

    place: int
    end_offset: int


@dataclass(slots=True)
class SegmentScan:
    """How a segment looks up to ``position``, where ``end_offset`` would come next.

    ``damaged`` holds the offsets ``[start, end)`` between whole batches that cannot be read, and
    ``gaps`` the bytes ``[start, end)`` where they would be. ``fault`` says what was wrong first;
    None for a segment that merely ends in the middle of a batch. ``apparent`` is set where bytes behind
    ``position`` look like batches and nothing says that they are: they may be in a value.
    """

    base_offset: int
    size: int
    index: IndexBuilder
    producers: ProducerStates
    position: int = 0
    end_offset: int = 0
    fault: str | None = None
    batches: int = 0
    records: int = 0
    aborted: list[AbortedTransaction] = field(default_factory=list)
    damaged: list[tuple[int, int]] = field(default_factory=list)
    gaps: list[tuple[int, int]] = field(default_factory=list)
    apparent: ApparentBatches | None = None
    before_damage: SegmentScan | None = None

    def first_run(self) -> SegmentScan:
        """Return the scan as it was before the first damage."""
        return self.before_damage or self

    def first_gap(self) -> tuple[int, int] | None:
        """Return the bytes from the first damage to the next apparent batch; None if there is none."""
        if self.gaps:
            return self.gaps[0]
        return None if self.apparent is None else (self.position, self.apparent.place)

    def as_seal(self, next_offset: int, damaged: Sequence[tuple[int, int]]) -> Seal:
        """Return the seal of the whole file."""
        return Seal.of(
            self.index,
            next_offset=next_offset,
            size=self.size,
            aborted=len(self.aborted),
            producers=self.producers,
            damaged=damaged,
        )

    def add(self, block: Block) -> None:
        """Note the batches of a block."""
        for at, header in block.batches:
            place = block.position + at
            head = block.data[at : at + HEADER_BYTES]
            self.index.add(header.base_offset, place, head, header.max_timestamp_ms)
            commit = is_commit(block.data, at, header) if header.attributes & CONTROL else None
            taken_back = self.producers.replay(header, commit=commit)
            if taken_back is not None:
                self.aborted.append(taken_back)
            self.batches += 1
            self.records += 0 if header.attributes & CONTROL else header.record_count
            self.position = place + header.size
            self.end_offset = header.next_offset

    def apply_known_aborts(
        self, known: Sequence[AbortedTransaction], damaged: Sequence[tuple[int, int]]
    ) -> None:
        """Use the ``known`` aborted transactions where their markers are ``damaged``.

        Without its marker, a transaction would seem to continue into the next one of its producer, and an
        aborted one to be committed.
        """
        by_marker = {one.last_offset: one for one in known}
        found = {one.last_offset: by_marker.get(one.last_offset, one) for one in self.aborted}
        found |= {
            offset: one
            for offset, one in by_marker.items()
            if any(start <= offset < stop for start, stop in damaged)
        }
        self.aborted = [found[offset] for offset in sorted(found)]

    def _copy(self) -> SegmentScan:
        return SegmentScan(
            self.base_offset,
            self.size,
            self.index.copy(),
            self.producers.copy(),
            self.position,
            self.end_offset,
            self.fault,
            self.batches,
            self.records,
            list(self.aborted),
        )

    def skip_damage(self, rest: bytes, known: Sequence[Boundary], below: int) -> bool:
        """Move on to the next batch in ``rest``, which begins here; False if there is no certain one."""
        found = boundary_after(rest, self.end_offset, self.position, known, below=below)
        if found is None:
            self.apparent = self._beyond(rest)
            return False
        if self.before_damage is None:
            self.before_damage = self._copy()
        self.damaged.append((self.end_offset, found.offset))
        self.gaps.append((self.position, self.position + found.place))
        self.position += found.place
        self.end_offset = found.offset
        self.index.restart_at(self.position)
        return True

    def _beyond(self, rest: bytes) -> ApparentBatches | None:
        first, end_offset = None, 0
        for place, header in apparent_batches(rest, self.end_offset):
            first = self.position + place if first is None else first
            end_offset = max(end_offset, header.next_offset)
        return None if first is None else ApparentBatches(first, end_offset)


def scan_segment(
    files: Files,
    path: Path,
    base_offset: int,
    producers: ProducerStates,
    *,
    fresh: bool = False,
    end_offset: int = OFFSET_MAX,
    complete_to: int = OFFSET_MAX,
) -> SegmentScan:
    """Read a segment from its start to its end, over any damage.

    Args:
        producers: What is known of producers where the segment begins; is not changed.
        fresh: Read from the device, not from the page cache.
        end_offset: Stop before this offset.
        complete_to: The segment was given all offsets up to here; beyond, it is not known.
    """
    handle = files.open(path)
    try:
        if fresh:
            files.forget_cached(handle)
        scan = SegmentScan(
            base_offset,
            files.size(handle),
            IndexBuilder(base_offset),
            producers.copy(),
            end_offset=base_offset,
        )
        while True:
            try:
                for block in read_blocks(
                    files,
                    handle,
                    path,
                    position=scan.position,
                    offset=scan.end_offset,
                    end_offset=end_offset,
                ):
                    scan.add(block)
            except CorruptBatchError as error:
                scan.fault = scan.fault or str(error)
            if scan.position >= scan.size or scan.end_offset >= end_offset:
                break
            rest = files.pread(handle, scan.size - scan.position, scan.position)
            known = index_of(files, path, base_offset).boundaries()
            if not scan.skip_damage(rest, known, min(complete_to, end_offset)):
                break
    finally:
        files.close(handle)
    scan.producers.commit()
    return scan
