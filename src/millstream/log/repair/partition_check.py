"""Checks one partition, segment by segment, for ``inspection``.

Beside a living owner, segments are closed, removed and replaced during the check. So the high watermark is
read before the folder is listed (all below it is in the files listed then) and the log start after it (it
moves before files are removed), and each finding is checked again with a fresh listing before it is reported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from millstream.log import aborted, seal
from millstream.log.batch import OFFSET_MAX
from millstream.log.files import Files, read_whole, size_of
from millstream.log.findings import (
    Finding,
    FindingKind,
    UnreadableRange,
    fault_at,
    size_if_readable,
    unreadable_ranges,
)
from millstream.log.producers import AbortedTransaction, ProducerStates
from millstream.log.recovery import LEFTOVER_SUFFIXES, DurableEnd, Recovery
from millstream.log.scan import SegmentScan, scan_segment
from millstream.log.seal import Seal
from millstream.log.segment import SIDE_SUFFIXES, segment_name, segment_offsets
from millstream.log.state_file import PartitionState

FIXED_AT_OPENING = "nothing to do: it is rebuilt when the folder is next opened for writing"
RESTORE = "restore the file from a backup, or give the offsets up with `millstream log repair`"
REBUILD = "`millstream log repair` makes it again"


@dataclass(frozen=True, slots=True)
class PartitionRef:
    """A partition to check. ``slot`` is its slot in state.mm; None if it is not known."""

    topic: str
    partition: int
    folder: Path
    topic_id: str = ""
    slot: int | None = None


@dataclass(frozen=True, slots=True)
class FolderCondition:
    """What is known of the folder.

    ``living``: an owner may be writing. ``clean``: the last one closed it. ``exact``: what state.mm
    says is exact (see ``recovery``).
    """

    living: bool
    clean: bool
    exact: bool


class _SegmentResult(NamedTuple):
    """The result of checking a segment once; ``scan`` is None if it could not be read."""

    found: list[Finding]
    scan: SegmentScan | None
    next_base: int | None


class PartitionCheck:
    """Checks one partition, once.

    Args:
        state: Returns the current state of the partition in state.mm.
        read: Called with the bytes of each checked segment.
    """

    def __init__(
        self,
        files: Files,
        place: PartitionRef,
        circumstances: FolderCondition,
        *,
        state: Callable[[], PartitionState | None],
        read: Callable[[int], None],
    ) -> None:
        self._files = files
        self._place = place
        self._circumstances = circumstances
        self._read_state = state
        self._read = read
        self._producers = ProducerStates()
        self._bases: list[int] = []
        self._high: int | None = None
        self._log_start = 0

    def findings(self) -> list[Finding]:
        """Return the findings."""
        before = self._read_state()
        self._high = None if before is None else before.high_watermark
        self._list()
        after = self._read_state()
        self._log_start = 0 if after is None else after.log_start
        found = [*self._check_leftovers(), *self._check_start()]
        base = self._bases[0] if self._bases else None
        while base is not None:
            seen = self._check_segment(base)
            if seen.found and self._circumstances.living:
                self._list()
                seen = self._check_segment(base)
            found += seen.found
            # Behind damage it is not known which transactions are open.
            if seen.scan is None or any(one.lost for one in seen.found):
                self._producers = ProducerStates()
            else:
                self._producers = seen.scan.producers
            self._read(size_if_readable(self._files, self._path(base)))
            base = seen.next_base
        return found

    # -- the folder ---------------------------------------------------------------------------

    def _list(self) -> None:
        self._bases = segment_offsets(self._files.names(self._place.folder))

    def _path(self, base: int) -> Path:
        return self._place.folder / segment_name(base)

    def _check_leftovers(self) -> Iterator[Finding]:
        if self._circumstances.living:
            return  # a segment may be rewritten or removed meanwhile
        segments = {segment_name(base)[:20] for base in self._bases}
        for name in self._files.names(self._place.folder):
            path = self._place.folder / name
            if name.endswith(LEFTOVER_SUFFIXES):
                text, advice = "something that was not finished", FIXED_AT_OPENING
            elif path.suffix in SIDE_SUFFIXES and path.stem not in segments:
                text, advice = "its segment is gone", "delete it"
            elif path.suffix not in (".log", *SIDE_SUFFIXES):
                text, advice = "it is no file of a log", "move it elsewhere"
            else:
                continue
            yield self._finding("leftover", text, advice, path)

    def _check_start(self) -> Iterator[Finding]:
        """Report it if the first segment, or every one, is missing."""
        if not self._high:
            return
        first = self._bases[0] if self._bases else self._high
        path = self._path(self._log_start)
        if first > self._log_start:
            text = "no segment holds these offsets, which were committed"
            lost = UnreadableRange(0, 0, self._log_start, first)
            yield self._finding("missing segment", text, RESTORE, path, unreadable=lost)
        elif not self._bases:
            text = "there is none, not even for new records"
            yield self._finding("missing segment", text, REBUILD, path)

    # -- one segment --------------------------------------------------------------------------

    def _check_segment(self, base: int) -> _SegmentResult:
        following = next((later for later in self._bases if later > base), None)
        path = self._path(base)
        if following is not None and following <= self._log_start:
            text = "retention was removing it: it is below the log start"
            gone = (
                []
                if self._circumstances.living
                else [self._finding("leftover", text, FIXED_AT_OPENING, path)]
            )
            return _SegmentResult(gone, None, following)
        try:
            if following is None:
                return self._check_last(base)
            return self._check_sealed(base, following)
        except FileNotFoundError as error:
            if self._circumstances.living and base not in self._fresh_bases():
                return _SegmentResult([], None, following)
            return _SegmentResult([self._unreadable(base, following, error)], None, following)
        except OSError as error:
            return _SegmentResult([self._unreadable(base, following, error)], None, following)

    def _fresh_bases(self) -> list[int]:
        self._list()
        return self._bases

    def _unreadable(self, base: int, following: int | None, error: OSError) -> Finding:
        end = max(base, self._high or base) if following is None else following
        text = f"it cannot be read: {error}"
        advice = "check its rights and the disk, then look again"
        unreadable = UnreadableRange(0, 0, base, end)
        return self._finding("unreadable", text, advice, self._path(base), unreadable=unreadable)

    def _check_sealed(self, base: int, following: int) -> _SegmentResult:
        path = self._path(base)
        scan = scan_segment(self._files, path, base, self._producers, complete_to=following)
        if scan.end_offset in self._bases and scan.end_offset > following:
            if self._circumstances.living:
                return _SegmentResult([], scan, scan.end_offset)
            text = f"its records were merged into {path.name}"
            merged = [
                self._finding("leftover", text, FIXED_AT_OPENING, self._path(later))
                for later in self._bases
                if following <= later < scan.end_offset
            ]
            return _SegmentResult(merged, scan, scan.end_offset)
        if scan.end_offset > following:
            scan = scan_segment(self._files, path, base, self._producers, end_offset=following)
        found = [
            self._damage(path, unreadable)
            for unreadable in unreadable_ranges(self._files, path, scan, following)
        ]
        found = found or self._readable(path, self._check_side_files, scan, following)
        return _SegmentResult(found, scan, following)

    def _check_last(self, base: int) -> _SegmentResult:
        path, high = self._path(base), self._high
        living = self._circumstances.living and high is not None
        limit = high if living and high is not None else OFFSET_MAX
        scan = scan_segment(
            self._files,
            path,
            base,
            self._producers,
            end_offset=limit,
            complete_to=base if high is None else high,
        )
        found = self._check_end(path, scan)
        if not found and scan.before_damage is None:
            found = self._readable(path, self._check_last_side_files, scan, scan.end_offset)
        return _SegmentResult(found, scan, None)

    def _check_end(self, path: Path, scan: SegmentScan) -> list[Finding]:
        """Report what is wrong with the last segment; what was never acknowledged is not lost."""
        durable = DurableEnd(
            self._log_start,
            scan.base_offset if self._high is None else self._high,
            published=self._high is not None,
            exact=self._circumstances.exact,
        )
        recovery = Recovery(self._files, path.parent, clean=True, verify=False)
        beyond = scan.apparent
        if not recovery.must_keep(path, scan, durable):
            scan, beyond = scan.first_run(), None
        end = max(scan.end_offset, durable.offset, beyond.end_offset if beyond else 0)
        found = unreadable_ranges(self._files, path, scan, end)
        torn = found.pop() if found and found[-1].start == found[-1].end == end else None
        found_here = [self._damage(path, unreadable) for unreadable in found]
        if torn is not None and not self._circumstances.living:
            size = torn.position_end - torn.position
            text = f"its last {size} bytes are no whole batch, and were never acknowledged"
            advice = "nothing to do: the next opening cuts them off, and keeps them in quarantine/"
            found_here.append(
                self._finding("torn tail", text, advice, path, position=torn.position)
            )
        return found_here

    def _damage(self, path: Path, unreadable: UnreadableRange) -> Finding:
        start = max(unreadable.start, self._log_start)
        if start >= unreadable.end:
            size = unreadable.position_end - unreadable.position
            text = f"{size} bytes are no whole batch, but no record that is kept is missing"
            advice = "nothing to do, or take them out with `millstream log repair`"
            return self._finding("damage", text, advice, path, position=unreadable.position)
        lost = unreadable._replace(start=start)
        if unreadable.position == unreadable.position_end and not self._is_cut_short(
            path, unreadable
        ):
            text = "no segment holds these offsets, which were committed"
            return self._finding("missing segment", text, RESTORE, path, unreadable=lost)
        text = fault_at(self._files, path, unreadable)
        return self._finding(
            "damage", text, RESTORE, path, unreadable=lost, position=unreadable.position
        )

    def _is_cut_short(self, path: Path, unreadable: UnreadableRange) -> bool:
        """Return whether the bytes that are missing were in this segment, and not in the one after it."""
        known = seal.read_any(self._files, path)
        last = path == self._path(self._bases[-1])
        return last or (known is not None and known.size > unreadable.position)

    # -- what is beside a segment -----------------------------------------------------------

    def _readable(
        self,
        path: Path,
        look: Callable[[Path, SegmentScan, int], list[Finding]],
        scan: SegmentScan,
        next_offset: int,
    ) -> list[Finding]:
        """Return what ``look`` finds beside a segment, or the error of the system."""
        try:
            return look(path, scan, next_offset)
        except OSError as error:
            target = path if error.filename is None else Path(str(error.filename))
            text = f"it cannot be read: {error.strerror}"
            advice = "check its rights and the disk, then look again"
            return [self._finding("unreadable", text, advice, target)]

    def _check_side_files(self, path: Path, scan: SegmentScan, next_offset: int) -> list[Finding]:
        """Check the files beside a closed, whole segment against it.

        An owner removes the seal before it changes anything else, and writes it last.
        """
        before = seal.read_any(self._files, path)
        found = [
            *self._check_seal(path, scan, next_offset),
            *self._check_aborted(path, scan, next_offset),
            *self._check_index(path, scan),
        ]
        at_work = before is None or seal.read_any(self._files, path) != before
        return [] if at_work and self._circumstances.living else found

    def _check_index(self, path: Path, scan: SegmentScan) -> list[Finding]:
        target = path.with_suffix(".idx")
        wanted = bytes(scan.index.content)
        if not self._files.exists(target):
            return [self._finding("index", "it is missing", FIXED_AT_OPENING, target)]
        content = read_whole(self._files, target)
        if content == wanted:
            return []
        text = "it is not complete" if wanted.startswith(content) else "it says what is not so"
        text += ": reading from the middle of the segment is slower"
        return [self._finding("index", text, REBUILD, target)]

    def _check_last_side_files(
        self, path: Path, scan: SegmentScan, next_offset: int
    ) -> list[Finding]:
        """Check the files beside the growing segment against it; they may lag behind."""
        found = self._check_aborted(
            path, scan, next_offset if self._circumstances.clean else OFFSET_MAX
        )
        target = path.with_suffix(".idx")
        if self._files.exists(target):
            content, wanted = read_whole(self._files, target), bytes(scan.index.content)
            if not content.startswith(wanted) and not wanted.startswith(content):
                text = "it says what is not so: reading from the middle of the segment is slower"
                found.append(self._finding("index", text, REBUILD, target))
        if self._circumstances.clean and seal.read(self._files, path, scan.size) is not None:
            found += self._check_seal(path, scan, next_offset)
        return found

    def _check_seal(self, path: Path, scan: SegmentScan, next_offset: int) -> list[Finding]:
        target = path.with_suffix(seal.SUFFIX)
        known = seal.read_any(self._files, path)
        if known is None:
            text = "it is not whole" if self._files.exists(target) else "it is missing"
            return [self._finding("seal", text, FIXED_AT_OPENING, target)]
        if known.size != scan.size:
            text = f"it says {known.size} bytes, the segment has {scan.size}"
            return [self._finding("seal", text, FIXED_AT_OPENING, target)]
        wanted = scan.as_seal(next_offset, ())
        # The number of aborted transactions is compared with the file that lists them.
        listed = len(aborted.read(self._files, path))
        wrong = _differences(known, replace(wanted, aborted=listed))
        if not wrong:
            return []
        text = f"it does not fit its segment, which is whole: {wrong}"
        return [self._finding("seal", text, REBUILD, target)]

    def _check_aborted(self, path: Path, scan: SegmentScan, next_offset: int) -> list[Finding]:
        target = path.with_suffix(aborted.SUFFIX)
        known = aborted.read(self._files, path)
        whole = size_of(self._files, target) == len(known) * aborted.ENTRY_BYTES
        missing = [one for one in scan.aborted if not _seal_lists(one, known)]
        foreign = [one for one in known if not scan.base_offset <= one.last_offset < next_offset]
        if whole and not missing and not foreign:
            return []
        text = f"it lacks {len(missing)} aborted transactions, whose records are read"
        if not missing:
            text = "it is not whole" if not whole else "it lists another segment's transactions"
        return [self._finding("aborted index", text, REBUILD, target)]

    def _finding(
        self,
        kind: FindingKind,
        text: str,
        advice: str,
        path: Path,
        *,
        position: int | None = None,
        unreadable: UnreadableRange | None = None,
    ) -> Finding:
        """Return a finding in this partition; with an ``unreadable`` range, its offsets are lost."""
        return Finding(
            kind,
            "harmless" if unreadable is None else "records lost",
            text,
            advice,
            path,
            self._place.topic,
            self._place.partition,
            position,
            None if unreadable is None else unreadable.start,
            None if unreadable is None else unreadable.end,
        )


def _seal_lists(wanted: AbortedTransaction, known: list[AbortedTransaction]) -> bool:
    # A transaction may have begun in a segment that was removed since.
    return any(
        one.producer_id == wanted.producer_id
        and one.last_offset == wanted.last_offset
        and one.first_offset <= wanted.first_offset
        for one in known
    )


def _differences(known: Seal, wanted: Seal) -> str:
    """Return in words how a seal differs from its segment; empty if it does not."""
    names = ("next_offset", "first_timestamp_ms", "max_timestamp_ms", "aborted", "damaged")
    said = [
        f"{name} is {getattr(known, name)}, not {getattr(wanted, name)}"
        for name in names
        if getattr(known, name) != getattr(wanted, name)
    ]
    if known.chain != wanted.chain:
        said.append("a header byte that no CRC covers (of a leader epoch) was another one")
    return ", ".join(said)
