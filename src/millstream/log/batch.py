"""The record batch: Kafka's format version 2 (magic 2), the only thing that segments hold.

::

    byte  0  base offset          int64   offset of the first record            ┐ not covered
          8  batch length         int32   bytes after this field                │ by the CRC:
         12  leader epoch         int32   which takeover of the folder wrote it │ stamped at
         16  magic                int8    2                                     ┘ append
         17  CRC-32C              uint32  over everything from byte 21 on
         21  attributes           int16   bits 0-2 compression, 3 log-append time,
                                          4 transactional, 5 control, 6 delete horizon
         23  last offset delta    int32   offset of the last record - base offset
         27  base timestamp       int64   milliseconds
         35  max timestamp        int64   milliseconds
         43  producer id          int64   -1: none
         51  producer epoch       int16   -1: none
         53  base sequence        int32   -1: none
         57  record count         int32
         61  records              length, attributes, timestamp delta, offset delta,
                                  key length, key, value length, value, headers
                                  (varints; a length of -1 is null)

Base offset and leader epoch lie outside the CRC, so a batch is encoded once and stamped at append
without hashing again. Next: ``encoding`` and ``decoding`` (records), ``segment`` (files).

Source: Kafka ``DefaultRecordBatch``, ``DefaultRecord``.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import google_crc32c
import numpy as np

from millstream.errors import CorruptBatchError

HEADER_BYTES = 61
PREFIX_BYTES = 17  # base offset, batch length, leader epoch, magic: what the CRC leaves out
CRC_START = 21
LENGTH_END = 12  # "batch length" counts the bytes from here on
MAGIC = 2
RECORD_BYTES_MIN = 7  # a record whose every varint is one byte, without key or value
BATCH_BYTES_MAX = 16 * 1024 * 1024  # a batch of several records is closed before it grows past this
OFFSET_MAX = (1 << 63) - 1
SEQUENCE_MAX = (1 << 31) - 1
_COPIED_BYTES_MAX = 16 * 1024  # up to this size a copy is cheaper than an array
RECORD_BYTES_MAX = 64 * 1024 * 1024  # one record may be larger; it is a batch by itself

COMPRESSION_MASK = 0x07
LOG_APPEND_TIME = 0x08
TRANSACTIONAL = 0x10
CONTROL = 0x20
DELETE_HORIZON = 0x40  # the base timestamp says when tombstones in the batch may go

PREFIX = struct.Struct(">qiib")
TAIL = struct.Struct(">hiqqqhii")  # attributes .. record count: bytes 21 to 61
_HEADER = struct.Struct(">qiibIhiqqqhii")


class ProducerStamp(NamedTuple):
    """Which producer sent a batch, its producer epoch, and the sequence of its first record."""

    producer_id: int
    producer_epoch: int
    base_sequence: int


NO_PRODUCER = ProducerStamp(-1, -1, -1)


@dataclass(frozen=True, slots=True)
class EncodedBatch:
    """A batch that has no offset yet: everything from the CRC field on, and what appending needs.

    ``count`` is how many offsets it takes, which is more than it has records after compaction;
    ``unkeyed`` says that it holds a record without a key, which a compacted topic refuses.
    """

    tail: bytes
    count: int
    max_timestamp_ms: int
    attributes: int = 0
    producer: ProducerStamp = NO_PRODUCER
    unkeyed: bool = False

    @property
    def size(self) -> int:
        """Bytes on disk."""
        return PREFIX_BYTES + len(self.tail)

    def prefix(self, base_offset: int, leader_epoch: int) -> bytes:
        """Return the 17 bytes that go in front of ``tail`` once the offset is known."""
        length = len(self.tail) + PREFIX_BYTES - LENGTH_END
        return PREFIX.pack(base_offset, length, leader_epoch, MAGIC)


class BatchHeader(NamedTuple):
    """The fields of a batch header, in the order in which they lie on disk."""

    base_offset: int
    batch_length: int
    leader_epoch: int
    magic: int
    crc: int
    attributes: int
    last_offset_delta: int
    base_timestamp_ms: int
    max_timestamp_ms: int
    producer_id: int
    producer_epoch: int
    base_sequence: int
    record_count: int

    @property
    def size(self) -> int:
        """Bytes of the whole batch."""
        return LENGTH_END + self.batch_length

    @property
    def producer(self) -> ProducerStamp:
        """Who sent it; NO_PRODUCER for a producer without an identity."""
        return ProducerStamp(self.producer_id, self.producer_epoch, self.base_sequence)

    @property
    def last_sequence(self) -> int:
        """The sequence of its last offset; sequences begin again at 0 after 2^31 - 1."""
        return (self.base_sequence + self.last_offset_delta) & SEQUENCE_MAX

    @property
    def next_offset(self) -> int:
        """The first offset after this batch."""
        return self.base_offset + self.last_offset_delta + 1


def finish(
    body: bytes,
    *,
    records: int,
    timestamps_ms: tuple[int, int],
    count: int | None = None,
    attributes: int = 0,
    producer: ProducerStamp = NO_PRODUCER,
    unkeyed: bool = False,
) -> EncodedBatch:
    """Return ``body`` (encoded records, perhaps compressed) with its header and CRC.

    Args:
        records: How many records the body holds.
        timestamps_ms: Base and largest timestamp.
        count: How many offsets the batch takes; as many as records if not given.
    """
    base, latest = timestamps_ms
    taken = records if count is None else count
    head = TAIL.pack(attributes, taken - 1, base, latest, *producer, records)
    crc = google_crc32c.extend(google_crc32c.value(head), body).to_bytes(4, "big")
    # Joined once: each copy of a large body costs as much as its CRC.
    tail = b"".join((crc, head, body))
    return EncodedBatch(tail, taken, latest, attributes, producer, unkeyed)


def stamp(batch: EncodedBatch, producer: ProducerStamp, *, transactional: bool) -> EncodedBatch:
    """Return a batch as one of ``producer``'s; its records remain as they are."""
    attributes = batch.attributes & ~TRANSACTIONAL | (TRANSACTIONAL if transactional else 0)
    head = bytearray(batch.tail[4 : 4 + TAIL.size])
    struct.pack_into(">h", head, 0, attributes)
    struct.pack_into(">qhi", head, 22, *producer)
    body = batch.tail[4 + TAIL.size :]
    crc = google_crc32c.extend(google_crc32c.value(bytes(head)), body).to_bytes(4, "big")
    tail = b"".join((crc, head, body))
    return replace(batch, tail=tail, attributes=attributes, producer=producer)


def as_encoded(data: bytes, at: int, header: BatchHeader) -> EncodedBatch:
    """Return the batch at ``at`` as one that can be written again, at its offset or another."""
    return EncodedBatch(
        data[at + PREFIX_BYTES : at + header.size],
        header.last_offset_delta + 1,
        header.max_timestamp_ms,
        header.attributes,
        header.producer,
    )


def read_header(data: bytes, at: int) -> BatchHeader:
    """Return the header at ``at``; the caller has checked that 61 bytes are there."""
    return BatchHeader._make(_HEADER.unpack_from(data, at))


def header_fault(header: BatchHeader, expected_offset: int) -> str | None:  # noqa: PLR0911 - a list of rules
    """Return what is impossible about a header, or None. Looks at nothing beyond the header.

    Magic, length and base offset lie outside the CRC, so they are compared with their expected values: each
    batch begins where the one before it ended.
    """
    if header.magic != MAGIC:
        return f"magic byte is {header.magic}, only {MAGIC} is written here"
    if header.batch_length < HEADER_BYTES - LENGTH_END:
        return f"batch length is {header.batch_length}, a header alone takes 49"
    if header.base_offset != expected_offset:
        return f"base offset is {header.base_offset}, {expected_offset} must follow"
    if header.last_offset_delta < 0 or header.next_offset > OFFSET_MAX:
        return f"last offset delta is {header.last_offset_delta}"
    if not 0 <= header.record_count <= header.last_offset_delta + 1:
        return f"record count is {header.record_count} in {header.last_offset_delta + 1} offsets"
    plain = not header.attributes & COMPRESSION_MASK
    if plain and header.record_count * RECORD_BYTES_MIN > header.size - HEADER_BYTES:
        return f"record count is {header.record_count} in {header.size - HEADER_BYTES} bytes"
    return None


def crc_matches(data: bytes, at: int, header: BatchHeader) -> bool:
    """Return whether the CRC-32C of the batch at ``at`` is what its header says."""
    start, size = at + CRC_START, header.size - CRC_START
    if size < _COPIED_BYTES_MAX:
        return bool(google_crc32c.value(data[start : start + size]) == header.crc)
    # It takes bytes and arrays, but no memoryview; and a copy would cost more than the checksum.
    return bool(google_crc32c.value(np.frombuffer(data, np.uint8, size, start)) == header.crc)


def walk(
    data: bytes,
    expected_offset: int,
    *,
    end_offset: int = OFFSET_MAX,
    path: str = "",
    position: int = 0,
) -> Iterator[tuple[int, BatchHeader]]:
    """Yield (place in ``data``, header) of every whole batch; stop before an incomplete one.

    Args:
        expected_offset: The offset at which the first batch begins.
        end_offset: Stop before the first batch that begins here or later, without looking at it.
        path: The file that ``data`` came from, for the error.
        position: Where in that file ``data`` begins.

    Raises:
        CorruptBatchError: a header is impossible, or a CRC-32C differs. Not retriable.
    Guarantees: every step advances by at least 61 bytes; allocates no more than ``data`` holds.
    """
    at, end = 0, len(data)
    while end - at >= HEADER_BYTES and expected_offset < end_offset:
        header = read_header(data, at)
        fault = header_fault(header, expected_offset)
        if fault is None:
            if at + header.size > end:
                return
            if not crc_matches(data, at, header):
                fault = "its bytes do not match its CRC-32C"
        if fault is not None:
            raise damaged(path, position + at, expected_offset, fault)
        yield at, header
        at += header.size
        expected_offset = header.next_offset


def damaged(path: str, position: int, offset: int, fault: str) -> CorruptBatchError:
    """Return the error for a damaged batch, with position, offset and remedy."""
    return CorruptBatchError(
        f"the record batch at byte {position} of {path} (offset {offset} or after) is damaged: "
        f"{fault}; keep the file, and restore it from a backup or read the offsets around it",
        path=path,
        position=position,
    )
