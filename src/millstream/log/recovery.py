"""What a partition needs after its owner is gone: check the end of the log, and mend only that.

Three facts decide. The *durable end* is the high watermark found in ``state.mm``: everything below
it was synced before it was published, so it must be there, whatever happened. It is *exact* if the
machine has not restarted since (same boot id): then nothing above it was ever acknowledged. After a
power cut it may be older than the last acknowledgement, so what lies above it is cut only if it
looks like writes that never reached the disk. Without a whole state.mm the durable end is the start
of the last segment, because a segment is synced before the next one begins.

The last segment is read from its start. At the first batch that is not whole and right, at offset
``p``:

=====  =========================  ==========================================  =====================
case   where                      what follows                                 done
=====  =========================  ==========================================  =====================
A      nothing is wrong           the file ends after a batch                  keep everything
B      p < durable end            anything                                     CorruptionError
C      p >= durable end, exact    anything (none of it was acknowledged)       cut at p
D      p >= durable end           no whole batch after p                       cut at p
E      p >= durable end           whole batches, but a page before them is     cut at p
                                  zeros, as one that was never stored is
F      p >= durable end           whole batches, no page of zeros              CorruptionError
=====  =========================  ==========================================  =====================

The bytes that are cut are kept in ``quarantine/`` first. The sparse index is rebuilt when it is
missing or differs. Sealed segments are read only after a failed sync (``NEEDS_VERIFY``); at other
times every reader checks every batch that it reads.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from millstream.errors import CorruptBatchError, CorruptionError
from millstream.log.batch import HEADER_BYTES
from millstream.log.files import Files, read_whole, write_whole
from millstream.log.index import IndexBuilder, SparseIndex
from millstream.log.segment import (
    Segment,
    find_batch_after,
    read_blocks,
    segment_name,
    segment_offsets,
)

_PAGE_BYTES = 4096
_OFFSET_BYTES = 8
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DurableEnd:
    """What state.mm says of one partition, and how far it can be trusted (see above)."""

    log_start: int
    offset: int
    published: bool
    exact: bool


@dataclass(frozen=True, slots=True)
class Recovered:
    """A partition that may be appended to: its growing segment and its bounds."""

    active: Segment
    log_start: int
    log_end_offset: int


class Recovery:
    """Recovers the partitions of one folder.

    Args:
        quarantine: Where bytes that are cut are kept.
        clean: The last owner closed the folder; otherwise the last segments are read anew from the
            device.
        verify: Read the sealed segments too.
    """

    def __init__(self, files: Files, quarantine: Path, *, clean: bool, verify: bool) -> None:
        self._files = files
        self._quarantine = quarantine
        self._clean = clean
        self._verify = verify

    def partition(self, folder: Path, durable: DurableEnd) -> Recovered:
        """Return the partition in ``folder``, with its torn tail cut and everything left synced.

        Raises:
            CorruptionError: records that were acknowledged are damaged or missing. Nothing was
                changed; the message names file, position and offsets, and what to do.
        """
        bases = segment_offsets(self._files.names(folder))
        if not bases:
            if durable.offset > 0:
                raise CorruptionError(
                    f"{folder} holds no segment, but offsets [{durable.log_start}, "
                    f"{durable.offset}) were acknowledged; restore the folder from a backup"
                )
            return Recovered(Segment.create(self._files, folder, 0), 0, 0)
        for base, following in pairwise(bases):
            self._sealed(folder / segment_name(base), base, following)
        if not self._clean:
            # The last owner may have died between creating a segment and syncing its name. What is
            # appended to that segment now must not vanish with the name.
            self._files.sync_folder(folder)
        active, end = self._last(folder / segment_name(bases[-1]), bases[-1], durable)
        return Recovered(active, max(durable.log_start, bases[0]), end)

    def _sealed(self, path: Path, base: int, following: int) -> None:
        """Check a sealed segment if it must be, and give it an index if it has none."""
        index_path = path.with_suffix(".idx")
        has_index = (
            self._files.exists(index_path)
            and SparseIndex(read_whole(self._files, index_path), base).plausible
        )
        if has_index and not self._verify:
            return
        scan = _Scan(self._files, path, base, fresh=self._verify)
        if self._verify and (scan.fault or scan.end_offset != following):
            raise self._corrupt(path, scan, following)
        if not has_index:
            self._write_index(path, scan.index)

    def _last(self, path: Path, base: int, durable: DurableEnd) -> tuple[Segment, int]:
        # The last owner may have died of a failed sync before it could leave word: then the cache
        # shows records that the disk does not have. Without a clean close only the disk counts.
        scan = _Scan(self._files, path, base, fresh=not self._clean)
        if scan.end_offset < durable.offset:
            raise self._corrupt(path, scan, durable.offset)  # case B
        if scan.position < scan.size:
            self._cut(path, scan, durable)
        segment = Segment(
            self._files, path, base, size=scan.position, index=self._write_index(path, scan.index)
        )
        # What was written but never synced is whole, so it becomes durable before it is published.
        segment.sync()
        return segment, scan.end_offset

    def _cut(self, path: Path, scan: _Scan, durable: DurableEnd) -> None:
        rest = self._read(path, scan.position, scan.size - scan.position)
        if not durable.exact:
            follower = find_batch_after(rest, scan.end_offset)
            lost_page = durable.published and _has_lost_page(rest, scan.position, follower)
            if follower is not None and not lost_page:
                at, offset = follower
                raise self._corrupt(path, scan, offset, scan.position + at)  # case F
        self._quarantine_bytes(path, scan.position, rest)
        _log.warning(
            "cut %d bytes that were never acknowledged off %s at byte %d (offset %d); "
            "they are kept in %s",
            len(rest),
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
        """Keep what will be cut.

        1. Write and sync the copy. A crash leaves a part of it; the log still has the bytes, and
           the next recovery writes the copy again under the same name.
        2. Sync the folder. Only then is the log cut.
        """
        topic, partition = path.parent.parent.name, path.parent.name
        name = f"{topic}.{partition}.{path.stem}.{position}.bytes"
        self._files.make_folder(self._quarantine)
        handle = self._files.open(self._quarantine / name, write=True, create=True)
        try:
            self._files.truncate(handle, 0)
            write_whole(self._files, handle, rest, 0)
            self._files.sync(handle)
        finally:
            self._files.close(handle)
        self._files.sync_folder(self._quarantine)

    def _write_index(self, path: Path, index: IndexBuilder) -> IndexBuilder:
        target = path.with_suffix(".idx")
        content = bytes(index.content)
        known = read_whole(self._files, target) if self._files.exists(target) else b""
        if known == content:
            return index
        handle = self._files.open(target, write=True, create=True)
        try:
            self._files.truncate(handle, 0)
            write_whole(self._files, handle, content, 0)
        finally:
            self._files.close(handle)
        return index

    def _read(self, path: Path, position: int, size: int) -> bytes:
        handle = self._files.open(path)
        try:
            return self._files.pread(handle, size, position)
        finally:
            self._files.close(handle)

    def _corrupt(
        self, path: Path, scan: _Scan, good_from: int, position: int | None = None
    ) -> CorruptionError:
        what = scan.fault or "the file ends there"
        again = "" if position is None else f" (byte {position})"
        return CorruptionError(
            f"{path} is damaged at byte {scan.position}: offsets [{scan.end_offset}, {good_from}) "
            f"are missing or broken, and offset {good_from}{again} was written after them; {what}. "
            "Nothing was changed. Restore this file from a backup; until then the offsets before "
            f"{scan.end_offset} can still be read"
        )


class _Scan:
    """One pass over a segment: how far it is whole, why no further, and its index."""

    def __init__(self, files: Files, path: Path, base: int, *, fresh: bool) -> None:
        self.end_offset = base
        self.position = 0
        self.fault: str | None = None
        self.index = IndexBuilder(base)
        handle = files.open(path)
        try:
            if fresh:
                files.forget_cached(handle)
            self.size = files.size(handle)
            for block in read_blocks(files, handle, path, position=0, offset=base):
                for at, header in block.batches:
                    place = block.position + at
                    head = block.data[at : at + HEADER_BYTES]
                    self.index.add(header.base_offset, place, head, header.max_timestamp_ms)
                    self.position = place + header.size
                    self.end_offset = header.next_offset
        except CorruptBatchError as error:
            self.fault = str(error)
        finally:
            files.close(handle)


def _has_lost_page(rest: bytes, position: int, follower: tuple[int, int] | None) -> bool:
    """Return whether pages before the following batch look as if they never reached the disk.

    Such a page is zeros: all of it, or from the damage at ``position`` to its end. The first eight
    bytes of a batch, its offset, may be zeros of their own and are no evidence.
    """
    end = len(rest) if follower is None else follower[0]
    first = -position % _PAGE_BYTES
    if first > _OFFSET_BYTES and rest[:first] == bytes(first):
        return True
    whole = range(first, end - _PAGE_BYTES + 1, _PAGE_BYTES)
    return any(rest[at : at + _PAGE_BYTES] == bytes(_PAGE_BYTES) for at in whole)
