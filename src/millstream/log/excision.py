"""Excision: the values of some records are replaced in closed segments, and everything else stays as it is.

A log is never changed, except where what it holds must not be there any more, such as the data of a person who
asked for it. Offsets, keys, headers, timestamps, producers, sequences and the division into batches stay, so no
position, index or transaction is concerned. Archives of the segments are removed, and can be made again.

1. The growing segment is closed, if a value is in it.
2. Each segment with such a record is written anew beside the old one, synced, and read back.
3. It is put in the place of the old one (``compaction.swap``, which says what a crash after each step leaves).

A crash leaves whole segments, with the old values or with the new ones; excising again does the rest. Appends
are held up only while segments are looked up and swapped.

What stays: a segment with damage, which cannot be read, and is named in the report; blocks of the file system
that are free and not yet overwritten; and the old file for as long as a reader holds it open.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path

from millstream.errors import CorruptBatchError, DiskFullError, RetriableError
from millstream.log import archive
from millstream.log.batch import (
    COMPRESSION_MASK,
    CONTROL,
    HEADER_BYTES,
    BatchHeader,
    damaged,
    finish,
)
from millstream.log.compaction.swap import replace_segments
from millstream.log.compression import COMPRESSIONS, compress, decompress
from millstream.log.decoding import Block
from millstream.log.exclusive import ExclusiveLog
from millstream.log.files import NewFile
from millstream.log.partition import Partition, SealedSegment
from millstream.log.producers import ProducerStates
from millstream.log.scan import SegmentScan, scan_segment
from millstream.log.segment import read_blocks
from millstream.log.varint import encode_varint, read_varint

EXCISED_SUFFIX = ".excised"
_WRITE_BYTES = 4 * 1024 * 1024
_ATTEMPTS = 3  # compaction may have replaced a segment while it was written anew
_drafts = count()


@dataclass(slots=True)
class Excision:
    """What was done: ``values`` replaced, in so many ``segments``, of which so many had ``archives``.

    ``left`` names segments that could not be read, with the reason: what they hold is still there.
    """

    values: int = 0
    segments: int = 0
    archives: int = 0
    left: list[str] = field(default_factory=list)


class _ReplacedError(Exception):
    """The segment was replaced or removed meanwhile: look again."""


class _Values:
    """The values to put in the place of others, and at which offsets."""

    def __init__(self, by_offset: Mapping[int, bytes]) -> None:
        self.by_offset = by_offset
        self.offsets = sorted(by_offset)

    def within(self, start: int, end: int) -> bool:
        """Return whether there is one for an offset in [start, end)."""
        at = bisect_left(self.offsets, start)
        return at < len(self.offsets) and self.offsets[at] < end

    def concern(self, header: BatchHeader) -> bool:
        """Return whether there is one for a batch."""
        holds = header.record_count and not header.attributes & CONTROL
        return bool(holds) and self.within(header.base_offset, header.next_offset)


def excise_values(
    writer: ExclusiveLog, partition: Partition, values: Mapping[int, bytes]
) -> Excision:
    """Replace the values of the records at these offsets; return when the old ones are in no file of the log.

    Offsets without a record, and records that have the value already, are passed over.

    Raises:
        DiskFullError: there was no room, or the disk failed; segments that were not reached are as they
            were. Make room, and excise again.
        RetriableError: segments are being replaced by something else all the time.
        SyncFailedError: the disk failed while files were swapped. Open the folder again.
    """
    report = Excision()
    wanted = _Values(values)
    if not values:
        return report
    try:
        for _ in range(_ATTEMPTS):
            with suppress(_ReplacedError):
                for segment in _segments_with(writer, partition, wanted):
                    _excise_segment(writer, partition, segment, wanted, report)
                return report
    except OSError as error:
        raise DiskFullError(
            f"values in {partition.folder} could not be replaced: {error}; its segments are whole, and those that "
            "were not reached are as they were. Make room on the disk, or check it, and try again"
        ) from error
    raise RetriableError(f"the segments of {partition.name} are being replaced; try again")


def _segments_with(
    writer: ExclusiveLog, partition: Partition, values: _Values
) -> list[SealedSegment]:
    """Return the segments with any of these offsets, all of them closed, durable and published."""
    found: list[SealedSegment] = []

    def look() -> None:
        if partition.closed:
            return
        if values.offsets[-1] >= partition.active_base and partition.active_size:
            partition.roll()
        found.extend(
            one for one in partition.sealed if values.within(one.base_offset, one.seal.next_offset)
        )

    writer.sync()  # after a failed sync nothing may be written
    writer.exclusively(look)
    writer.sync()
    return found


def _excise_segment(
    writer: ExclusiveLog,
    partition: Partition,
    segment: SealedSegment,
    values: _Values,
    report: Excision,
) -> None:
    path = partition.path_of(segment)
    if segment.seal.damaged:
        report.left.append(f"{path.name}: it has damage; see `millstream log repair`")
        return
    try:
        found = _count(partition, segment, values)
        if not found:
            return
        draft = _write(writer, partition, segment, values)
    except CorruptBatchError as error:
        report.left.append(str(error))
        return
    try:
        scan = _read_back(partition, segment, draft)
        archived = partition.files.exists(path.with_suffix(archive.SUFFIX))
        made = replace(
            scan.as_seal(segment.seal.next_offset, ()),
            cleaned_ms=segment.seal.cleaned_ms,
            horizon_ms=segment.seal.horizon_ms,
            producers=segment.seal.producers,
        )
        if replace_segments(writer, partition, [segment], draft, scan=scan, made=made) is None:
            raise _ReplacedError
    finally:
        with suppress(OSError):
            partition.files.remove(draft)
    report.values += found
    report.segments += 1
    report.archives += archived


# -- one segment ----------------------------------------------------------------------------------


def _count(partition: Partition, segment: SealedSegment, values: _Values) -> int:
    """Return how many values of a segment have to be replaced."""
    found = 0
    for block in _blocks(partition, segment):
        for at, header in block.batches:
            if values.concern(header):
                found += _replaced(block, at, header, values)[1]
    return found


def _write(
    writer: ExclusiveLog, partition: Partition, segment: SealedSegment, values: _Values
) -> Path:
    """Write a segment with other values beside the old one, and sync it."""
    # Two may excise at once: whoever swaps second looks again.
    path = partition.path_of(segment).with_suffix(f".{next(_drafts)}{EXCISED_SUFFIX}")
    made: list[NewFile] = []

    def make() -> None:
        if not partition.closed:  # its folder is not being removed with its topic
            made.append(NewFile(partition.files, path))

    writer.exclusively(make)
    if not made:
        raise _ReplacedError
    try:
        with made[0] as file:
            for block in _blocks(partition, segment):
                file.write(b"".join(_pieces(block, values)))
            file.sync()
    except BaseException:
        with suppress(OSError):
            partition.files.remove(path)
        raise
    return path


def _read_back(partition: Partition, segment: SealedSegment, draft: Path) -> SegmentScan:
    place = next((at for at, one in enumerate(partition.sealed) if one is segment), None)
    if place is None:
        raise _ReplacedError
    before = partition.sealed[place - 1].seal.producers if place else ProducerStates()
    scan = scan_segment(partition.files, draft, segment.base_offset, before)
    whole = scan.fault is None and scan.position == scan.size
    if not whole or scan.end_offset != segment.seal.next_offset:
        raise OSError(f"{draft} does not read back as it was written: {scan.fault}")
    return scan


def _blocks(partition: Partition, segment: SealedSegment) -> Iterator[Block]:
    """Yield every batch of a segment.

    Raises:
        CorruptBatchError: some of them cannot be read.
    """
    files, path = partition.files, partition.path_of(segment)
    try:
        handle = files.open(path)
    except FileNotFoundError:
        raise _ReplacedError from None
    offset, position = segment.base_offset, 0
    try:
        for block in read_blocks(
            files, handle, path, position=0, offset=offset, block_bytes=_WRITE_BYTES
        ):
            yield block
            at, last = block.batches[-1]
            offset, position = last.next_offset, block.position + at + last.size
    finally:
        files.close(handle)
    if offset != segment.seal.next_offset:
        raise damaged(str(path), position, offset, "the file ends there")


# -- one batch ------------------------------------------------------------------------------------


def _pieces(block: Block, values: _Values) -> Iterator[bytes]:
    """Yield the bytes of a block, those of batches without any of the records as they are."""
    start = end = 0
    for at, header in block.batches:
        end = at + header.size
        if not values.concern(header):
            continue
        made, others = _replaced(block, at, header, values)
        if others:
            yield block.data[start:at]
            yield made
            start = end
    yield block.data[start:end]


def _replaced(block: Block, at: int, header: BatchHeader, values: _Values) -> tuple[bytes, int]:
    """Return a batch with other values, and how many of them are others than before."""
    records: list[bytes] = []
    others = 0
    for begin, end, record in _records(block, at, header):
        offset_delta, value_at, value_end = _value_place(record, begin, end)
        wanted = values.by_offset.get(header.base_offset + offset_delta)
        if wanted is None or record[value_at:value_end] == _sized(wanted):
            records += (encode_varint(end - begin), record[begin:end])
            continue
        body = record[begin:value_at] + _sized(wanted) + record[value_end:end]
        records += (encode_varint(len(body)), body)
        others += 1
    made = finish(
        b"".join(records),
        records=header.record_count,
        timestamps_ms=(header.base_timestamp_ms, header.max_timestamp_ms),
        count=header.last_offset_delta + 1,
        attributes=header.attributes & ~COMPRESSION_MASK,
        producer=header.producer,
    )
    made = compress(made, COMPRESSIONS[header.attributes & COMPRESSION_MASK])
    return made.prefix(header.base_offset, header.leader_epoch) + made.tail, others


def _sized(value: bytes) -> bytes:
    return encode_varint(len(value)) + value


def _records(block: Block, at: int, header: BatchHeader) -> Iterator[tuple[int, int, bytes]]:
    """Yield where each record of a batch begins, behind its length, and ends, in the bytes that come with it.

    Raises:
        CorruptBatchError: the lengths do not lead from the start of the batch to its end.
    """
    place = (block.path, block.position + at, header.base_offset)
    data = decompress(
        block.data[at + HEADER_BYTES : at + header.size],
        header.attributes & COMPRESSION_MASK,
        path=block.path,
        position=block.position + at,
        offset=header.base_offset,
    )
    begin = 0
    for _ in range(header.record_count):
        try:
            length, begin = read_varint(data, begin, len(data))
        except ValueError as error:
            raise damaged(*place, "a record does not fit into its batch") from error
        if length < 0 or begin + length > len(data):
            raise damaged(*place, "a record does not fit into its batch")
        yield begin, begin + length, data
        begin += length
    if begin != len(data):
        raise damaged(*place, "bytes are left behind its last record")


def _value_place(data: bytes, begin: int, end: int) -> tuple[int, int, int]:
    """Return the offset delta of a record, and where its value is, with the length before it."""
    _, at = read_varint(data, begin + 1, end)  # behind the attributes: the timestamp delta
    offset_delta, at = read_varint(data, at, end)
    key_bytes, at = read_varint(data, at, end)
    value_at = at + max(key_bytes, 0)
    value_bytes, value_end = read_varint(data, value_at, end)
    return offset_delta, value_at, value_end + max(value_bytes, 0)
