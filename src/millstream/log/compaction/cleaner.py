"""Compaction: of each key the last record remains, at its offset.

A pass goes over the sealed segments of one partition, from the first on. It stops before the last stable
offset, so that every record is known to be committed or aborted; before a segment younger than
``min.compaction.lag.ms``; and leaves segments with damage as they are.

1. Find the latest offset of each key in the segments from the first on that was not cleaned yet
   (``offset_map``). Records of aborted transactions do not count.
2. Rewrite every segment, from the first to the last that step 1 looked at, without what a later
   record replaces (``plan`` decides, ``rewrite`` writes); read it back; put it
   in the place of the old one (``swap``). A segment that loses nothing is not written.
3. Merge neighbours that have become small.

Appends are held up only while segments are looked up and swapped. A crash at any point leaves whole
segments, cleaned or not, of which the next pass cleans the rest: nothing is removed before what
replaces it is on stable storage.

Source: Kafka ``LogCleaner``, ``Cleaner``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa

from millstream.errors import CorruptBatchError, DiskFullError
from millstream.log import aborted
from millstream.log.aborted import AbortedTransactions
from millstream.log.batch import OFFSET_MAX, damaged
from millstream.log.compaction.offset_map import OffsetMap, numbers, present
from millstream.log.compaction.plan import (
    CleaningTerms,
    RecordFlags,
    SegmentPlan,
    known_at_end,
    retain_whole,
)
from millstream.log.compaction.rewrite import CleanedSegmentFile
from millstream.log.compaction.swap import mark_damaged, replace_seal, replace_segments
from millstream.log.config import SEGMENT_BYTES_LIMIT, TopicConfig
from millstream.log.decoding import Block, decode_parts
from millstream.log.exclusive import ExclusiveLog
from millstream.log.files import Files
from millstream.log.partition import Partition, SealedSegment
from millstream.log.producers import AbortedTransaction, ProducerStates
from millstream.log.scan import SegmentScan, scan_segment
from millstream.log.seal import Seal
from millstream.log.segment import read_blocks, segment_name

KEYS_MAX = 2_000_000  # measured: with keys of 20 bytes, the map takes 400 MB at its peak
KEY_BYTES_MAX = 128 * 1024 * 1024
CLEANED_SUFFIX, MERGED_SUFFIX = ".cleaned", ".merged"
# segments are looked up together: each look-up costs a whole map
_INTERVAL_BYTES = 64 * 1024 * 1024
_OFFSETS_MAX = 1 << 32  # offsets in an index are so wide, counted from the segment's first
_log = logging.getLogger(__name__)


def compact_partition(
    writer: ExclusiveLog,
    partition: Partition,
    now_ms: int,
    *,
    keys_max: int = KEYS_MAX,
    key_bytes_max: int = KEY_BYTES_MAX,
    stopped: Callable[[], bool] = lambda: False,
) -> int:
    """Compact a partition if it is due; return how many segments were rewritten.

    It is due when the share of bytes that were never cleaned is ``min.cleanable.dirty.ratio``, or when a
    horizon has passed.

    Args:
        keys_max: When so many keys, or ``key_bytes_max``, are in memory, the rest of the segments
            waits for the next pass. One segment is always looked at, whatever it holds.
        stopped: Called before each segment; once it returns True, the rest is left for another pass.

    Raises:
        DiskFullError: there was no room, or the disk failed; the segments not yet cleaned are as
            they were. Make room; the next pass goes on.
        SyncFailedError: the disk failed while files were swapped. Open the folder again.
    """
    view = _snapshot(writer, partition, now_ms)
    if view is None or not view.due(now_ms):
        return 0
    writer.sync()  # what was seen is durable now, above all the ends of transactions
    work = _Pass(writer, partition, now_ms, view, stopped)
    try:
        work.run(OffsetMap(keys_max=keys_max, key_bytes_max=key_bytes_max))
    except OSError as error:
        if not partition.closed:
            raise DiskFullError(
                f"{partition.folder} could not be compacted: {error}; its segments are whole, and "
                "those that were not reached are as they were. Make room on the disk, or check it; "
                "compaction is tried again"
            ) from error
    return work.rewritten


class _GoneError(Exception):
    """A segment was removed meanwhile, by retention or with its topic: nothing is left to do."""


@dataclass(frozen=True, slots=True)
class _PartitionView:
    """A view of a partition.

    Args:
        segments: Those that may be cleaned, and damaged ones between them; from the first on.
        paths: Of every segment, with the least number of aborted transactions that it lists.
        resent: Base offsets of the batches that their producers may send again.
    """

    config: TopicConfig
    segments: Sequence[SealedSegment]
    paths: Sequence[tuple[Path, int]]
    resent: frozenset[int]

    def due(self, now_ms: int) -> bool:
        """Return whether it is time for a pass."""
        whole = [segment.seal for segment in self.segments if not segment.seal.damaged]
        if any(one.horizon_ms is not None and one.horizon_ms <= now_ms for one in whole):
            return True
        dirty_bytes = sum(one.size for one in whole if one.cleaned_ms is None)
        share = self.config.min_cleanable_dirty_ratio
        return dirty_bytes > 0 and dirty_bytes >= share * sum(one.size for one in whole)


def _snapshot(writer: ExclusiveLog, partition: Partition, now_ms: int) -> _PartitionView | None:
    """Return the partition as it is while nothing is being appended; None once it is closed."""
    found: list[_PartitionView] = []

    def look() -> None:
        if partition.closed:
            return
        stable = partition.producers.last_stable(partition.log_end_offset)
        config, sealed = partition.config, partition.sealed
        paths = [(partition.path_of(segment), segment.seal.aborted) for segment in sealed]
        paths.append((partition.folder / segment_name(partition.active_base), 0))
        entries = partition.producers.entries().values()
        resent = frozenset(sent.base_offset for entry in entries for sent in entry.batches)
        found.append(
            _PartitionView(config, _cleanable(sealed, config, stable, now_ms), paths, resent)
        )

    writer.exclusively(look)
    return found[0] if found else None


def _cleanable(
    sealed: Sequence[SealedSegment], config: TopicConfig, stable: int, now_ms: int
) -> list[SealedSegment]:
    lag_ms = config.min_compaction_lag_ms
    found = []
    for segment in sealed:
        too_young = lag_ms > 0 and now_ms - segment.seal.max_timestamp_ms < lag_ms
        if segment.seal.next_offset > stable or too_young:
            break
        found.append(segment)
    return found


class _Pass:
    """One pass over one partition. ``rewritten`` counts the segments that it wrote anew.

    Segments are identified by their index in the view; ``_segments`` has their current form.
    """

    def __init__(
        self,
        writer: ExclusiveLog,
        partition: Partition,
        now_ms: int,
        view: _PartitionView,
        stopped: Callable[[], bool],
    ) -> None:
        self._writer = writer
        self._partition = partition
        self._files: Files = partition.files
        self._now_ms = now_ms
        self._view = view
        self._stopped = stopped
        self._segments = list(view.segments)
        self._aborted = AbortedTransactions(())
        self._reading = 0  # the place of the segment that is being read
        self.rewritten = 0

    def run(self, latest: OffsetMap) -> None:
        """Do the three steps of the module, as far as the map reaches."""
        ranges = self._read_aborted()
        if ranges is None:
            return
        self._aborted = AbortedTransactions(ranges)
        try:
            for interval in self._intervals(self._map(latest)):
                for place, facts in zip(interval, self._facts(interval, latest), strict=True):
                    if self._stopped():
                        return
                    self._clean(place, facts)
            for group in self._groups():
                if self._stopped():
                    return
                self._merge(group)
        except _GoneError:
            return
        except (CorruptBatchError, pa.ArrowException) as error:
            # Arrow refuses a column of more than 2 GiB; a segment of such keys remains as it is.
            self._skip_segment(self._reading, str(error))

    # -- what there is ------------------------------------------------------------------------

    def _read_aborted(self) -> list[AbortedTransaction] | None:
        """Return the aborted transactions that the partition names; None if some are missing."""
        found = []
        for path, named in self._view.paths:
            ranges = aborted.read(self._files, path)
            if len(ranges) < named and self._files.exists(path):
                _log.error(
                    "%s names %d aborted transactions, and there were %d: the partition is not "
                    "compacted. Open the folder again, which rebuilds the file",
                    path.with_suffix(aborted.SUFFIX),
                    len(ranges),
                    named,
                )
                return None
            found += ranges
        return found

    def _blocks(self, place: int) -> Iterator[Block]:
        """Yield every batch of a segment.

        Raises:
            CorruptBatchError: some of them cannot be read.
        """
        self._reading = place
        segment = self._segments[place]
        path = self._partition.path_of(segment)
        try:
            handle = self._files.open(path)
        except FileNotFoundError:
            if self._is_there(segment):
                raise
            raise _GoneError from None
        offset, position = segment.base_offset, 0
        try:
            for block in read_blocks(self._files, handle, path, position=0, offset=offset):
                yield block
                at, last = block.batches[-1]
                offset, position = last.next_offset, block.position + at + last.size
        finally:
            self._files.close(handle)
        if offset != segment.seal.next_offset:
            raise damaged(str(path), position, offset, "the file ends there")

    def _is_there(self, segment: SealedSegment) -> bool:
        partition = self._partition
        return not partition.closed and any(one is segment for one in partition.sealed)

    def _records(self, place: int, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Yield the records of a segment that were not aborted."""
        for block in self._blocks(place):
            kept = [found for found in block.batches if not self._aborted.covers(found[1])]
            yield from decode_parts(block._replace(batches=kept), 0, OFFSET_MAX, columns)

    # -- which records are the latest ---------------------------------------------------------

    def _map(self, latest: OffsetMap) -> list[int]:
        """Find the latest offsets; return the places of the segments that can be cleaned by them."""
        places = [place for place, segment in enumerate(self._segments) if not segment.seal.damaged]
        dirty = [place for place in places if self._segments[place].seal.cleaned_ms is None]
        if not dirty:
            return [place for place in places if self._is_due(place)]
        end = dirty[0]
        for place in places[places.index(end) :]:
            if latest.full or self._stopped():
                break
            for part in self._records(place, ("offset", "key")):
                latest.add(part["key"], numbers(part["offset"], np.int64))
            end = place + 1
        return [place for place in places if place < end]

    def _is_due(self, place: int) -> bool:
        horizon_ms = self._segments[place].seal.horizon_ms
        return horizon_ms is not None and horizon_ms <= self._now_ms

    def _intervals(self, places: Iterable[int]) -> Iterator[list[int]]:
        interval: list[int] = []
        size = 0
        for place in places:
            interval.append(place)
            size += self._segments[place].seal.size
            if size >= _INTERVAL_BYTES:
                yield interval
                interval, size = [], 0
        if interval:
            yield interval

    def _facts(self, places: Sequence[int], latest: OffsetMap) -> list[RecordFlags]:
        """Return the facts about the records of some segments."""
        keys: list[pa.Array] = []
        offsets, tombstones = [np.empty(0, np.int64)], [np.empty(0, bool)]
        ends = []
        for place in places:
            for part in self._records(place, ("offset", "key", "value")):
                keys.append(part["key"])
                offsets.append(numbers(part["offset"], np.int64))
                tombstones.append(~present(part["value"]))
            ends.append(sum(len(part) for part in keys))
        offset, tombstone = np.concatenate(offsets), np.concatenate(tombstones)
        stale = latest.latest(pa.chunked_array(keys, pa.binary())) > offset
        return [
            RecordFlags(offset[start:end], stale[start:end], tombstone[start:end])
            for start, end in zip([0, *ends], ends, strict=False)
        ]

    # -- cleaning -----------------------------------------------------------------------------

    def _clean(self, place: int, facts: RecordFlags) -> None:
        """Remove from a segment what need not be retained."""
        plan = self._plan(place, facts)
        if not any(
            batch_plan.changes for block in self._blocks(place) for batch_plan in plan.decide(block)
        ):
            self._mark_clean(place, plan)
            return
        plan = self._plan(place, facts)
        old = self._segments[place]

        def write(draft: CleanedSegmentFile) -> None:
            for block in self._blocks(place):
                draft.add(block, plan.decide(block))

        def seal_of(scan: SegmentScan) -> Seal:
            return replace(
                scan.as_seal(old.seal.next_offset, ()),
                cleaned_ms=self._now_ms,
                horizon_ms=plan.horizon_ms,
                producers=known_at_end(old.seal.producers, scan.producers),
            )

        fresh = self._replace([place], CLEANED_SUFFIX, write, seal_of, plan)
        if fresh is not None:
            self._segments[place] = fresh
            self.rewritten += 1

    def _plan(self, place: int, facts: RecordFlags) -> SegmentPlan:
        horizon_ms: int | None = self._now_ms + self._view.config.delete_retention_ms
        if any(segment.seal.damaged for segment in self._segments[:place]):
            horizon_ms = (
                None  # the records that a tombstone here deletes may be there, and become readable
            )
        terms = CleaningTerms(self._now_ms, horizon_ms, self._view.resent, self._aborted)
        return SegmentPlan(terms, facts, self._producers_before(place))

    def _producers_before(self, place: int) -> ProducerStates:
        return self._segments[place - 1].seal.producers if place else ProducerStates()

    def _mark_clean(self, place: int, plan: SegmentPlan) -> None:
        """Note that a segment is clean without being written."""
        old = self._segments[place]
        if old.seal.cleaned_ms is not None and old.seal.horizon_ms == plan.horizon_ms:
            return
        made = replace(
            old.seal,
            cleaned_ms=self._now_ms,
            horizon_ms=plan.horizon_ms,
            producers=known_at_end(old.seal.producers, plan.states),
        )
        fresh = replace_seal(self._writer, self._partition, old, made)
        if fresh is None:
            raise _GoneError
        self._segments[place] = fresh

    def _skip_segment(self, place: int, why: str) -> None:
        """Skip a segment that compaction cannot handle, until the folder is opened again."""
        segment = self._segments[place]
        _log.error("%s is not compacted: %s", self._partition.path_of(segment), why)
        self._segments[place] = mark_damaged(self._writer, self._partition, segment)

    # -- merging ------------------------------------------------------------------------------

    def _groups(self) -> Iterator[list[int]]:
        """Yield the indexes of neighbours that fit into one segment."""
        group: list[int] = []
        for place, segment in enumerate(self._segments):
            if _may_be_merged(segment.seal) and (not group or self._fits(group, segment)):
                group.append(place)
                continue
            if len(group) > 1:
                yield group
            group = [place] if _may_be_merged(segment.seal) else []
        if len(group) > 1:
            yield group

    def _fits(self, group: Sequence[int], segment: SealedSegment) -> bool:
        size = sum(self._segments[place].seal.size for place in group) + segment.seal.size
        offsets = segment.seal.next_offset - self._segments[group[0]].base_offset
        return size <= self._view.config.segment_bytes and offsets <= _OFFSETS_MAX

    def _merge(self, group: Sequence[int]) -> None:
        """Merge neighbours into one file; adjacent fillers become one."""
        seals = [self._segments[place].seal for place in group]

        def write(draft: CleanedSegmentFile) -> None:
            for place in group:
                for block in self._blocks(place):
                    draft.add(block, (retain_whole(*found) for found in block.batches))

        def seal_of(scan: SegmentScan) -> Seal:
            return replace(
                scan.as_seal(seals[-1].next_offset, ()),
                cleaned_ms=min(one.cleaned_ms or 0 for one in seals),
                horizon_ms=max(
                    (one.horizon_ms for one in seals if one.horizon_ms is not None), default=None
                ),
                producers=seals[-1].producers,
            )

        self._replace(group, MERGED_SUFFIX, write, seal_of)

    # -- files --------------------------------------------------------------------------------

    def _replace(
        self,
        places: Sequence[int],
        suffix: str,
        write: Callable[[CleanedSegmentFile], None],
        seal_of: Callable[[SegmentScan], Seal],
        plan: SegmentPlan | None = None,
    ) -> SealedSegment | None:
        """Write a file that replaces these segments, by a plan or as they are; None if it must not.

        Everything in it is on stable storage, and was read back, before it replaces them.
        """
        olds = [self._segments[place] for place in places]
        draft = self._draft(self._partition.path_of(olds[0]).with_suffix(suffix))
        try:
            with draft:
                write(draft)
                draft.finish()
            if draft.size > SEGMENT_BYTES_LIMIT:
                self._skip_segment(places[0], f"it would grow to {draft.size:,} bytes")
                return None
            scan = self._read_back(draft.path, olds, self._producers_before(places[0]))
            fresh = replace_segments(
                self._writer,
                self._partition,
                olds,
                draft.path,
                scan=scan,
                made=seal_of(scan),
                removed_offset=None if plan is None else plan.removed_offset,
            )
            if fresh is None:
                raise _GoneError
            return fresh
        finally:
            with suppress(OSError):
                self._files.remove(draft.path)

    def _draft(self, path: Path) -> CleanedSegmentFile:
        """Return a new file. It is not made in a folder that is being removed with its topic."""
        made: list[CleanedSegmentFile] = []

        def make() -> None:
            if not self._partition.closed:
                made.append(CleanedSegmentFile(self._files, path))

        self._writer.exclusively(make)
        if not made:
            raise _GoneError
        return made[0]

    def _read_back(
        self, path: Path, olds: Sequence[SealedSegment], producers: ProducerStates
    ) -> SegmentScan:
        scan = scan_segment(self._files, path, olds[0].base_offset, producers)
        end_offset = olds[-1].seal.next_offset
        if scan.fault or scan.end_offset != end_offset or scan.position != scan.size:
            raise OSError(
                f"{path} does not read back as it was written: "
                f"{scan.fault or f'it ends at offset {scan.end_offset}, not {end_offset}'}"
            )
        return scan


def _may_be_merged(seal: Seal) -> bool:
    # A reader that has just read which transactions were aborted must still find those files.
    return seal.cleaned_ms is not None and not seal.damaged and not seal.aborted
