"""Validates record batches from clients: everything that readers rely on.

A batch is appended unchanged: it is not encoded again, and keeps the client's CRC. But it is validated
first, record by record, because an invalid batch would be an error for every reader from then on.
Rejected are

===========================================  ==============================
batches                                      with
===========================================  ==============================
of another format than 2, or more than one   ``INVALID_RECORD``
whose bytes do not match its CRC-32C         ``CORRUPT_MESSAGE``
with the marks of a broker (control batch,   ``INVALID_RECORD``
delete horizon)
with timestamps of the broker                ``INVALID_TIMESTAMP``
of an unknown compression                    ``UNSUPPORTED_COMPRESSION_TYPE``
larger than the topic allows; decompressed,  ``MESSAGE_TOO_LARGE``
or in records, larger than the broker does
whose counts or lengths are wrong            ``INVALID_RECORD``
===========================================  ==============================

Source: Kafka ``LogValidator``, ``ProduceRequest``.
"""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import NamedTuple

import google_crc32c

from millstream.broker.protocol.error_codes import ApiError, ErrorCode
from millstream.errors import CorruptBatchError, RecordTooLargeError
from millstream.log.batch import (
    BATCH_BYTES_MAX,
    COMPRESSION_MASK,
    CONTROL,
    DELETE_HORIZON,
    HEADER_BYTES,
    LOG_APPEND_TIME,
    MAGIC,
    TRANSACTIONAL,
    BatchHeader,
    EncodedBatch,
    as_encoded,
    crc_matches,
    header_fault,
    read_header,
)
from millstream.log.compression import COMPRESSIONS
from millstream.log.decoding import Block, check_records

_FRAMING_BYTES = 128  # overhead of a batch of one record, at most
_MAX_TIMESTAMP_AT = 35 - 17  # in the tail, which begins at byte 17


class BatchLimits(NamedTuple):
    """How large a batch may be: as sent, decompressed, and in records.

    Validating a record takes some 100 bytes of memory, however well it is compressed.
    """

    message_bytes: int
    plain_bytes: int
    records: int


def validate_batch(data: bytes | None, limits: BatchLimits) -> EncodedBatch:
    """Return the batch that a client sent, ready to be appended.

    Raises:
        ApiError: the batch is invalid; see the table.
    """
    if not data or len(data) < HEADER_BYTES:
        raise ApiError(
            ErrorCode.INVALID_RECORD, f"a batch of {len(data or b'')} bytes; 61 at least"
        )
    header = read_header(data, 0)
    _check_header(header, data, limits)
    try:
        facts = check_records(
            Block(data, [(0, header)], "the request", 0), plain_bytes_max=limits.plain_bytes
        )
    except RecordTooLargeError as error:
        raise ApiError(ErrorCode.MESSAGE_TOO_LARGE, str(error)) from error
    except CorruptBatchError as error:
        raise ApiError(ErrorCode.INVALID_RECORD, str(error)) from error
    batch = replace(as_encoded(data, 0, header), unkeyed=facts.unkeyed)
    if facts.max_timestamp_ms != header.max_timestamp_ms:
        return _with_max_timestamp(batch, facts.max_timestamp_ms)
    return batch


def _check_header(header: BatchHeader, data: bytes, limits: BatchLimits) -> None:
    if header.magic != MAGIC:
        raise ApiError(
            ErrorCode.INVALID_RECORD,
            f"record format {header.magic}; send format {MAGIC}, Kafka 0.11's",
        )
    if header.size != len(data):
        raise ApiError(
            ErrorCode.INVALID_RECORD,
            f"{len(data)} bytes with a batch of {header.size}; send one batch for a partition",
        )
    limit = limits.message_bytes + _FRAMING_BYTES
    if header.record_count > 1:
        limit = min(limit, BATCH_BYTES_MAX)
    if header.size > limit:
        raise ApiError(
            ErrorCode.MESSAGE_TOO_LARGE, f"a batch of {header.size:,} bytes; at most {limit:,}"
        )
    if header.record_count > limits.records:
        raise ApiError(
            ErrorCode.MESSAGE_TOO_LARGE,
            f"a batch of {header.record_count:,} records; at most {limits.records:,}",
        )
    fault = header_fault(header, header.base_offset)
    if fault is not None:
        raise ApiError(ErrorCode.INVALID_RECORD, fault)
    if not crc_matches(data, 0, header):
        raise ApiError(ErrorCode.CORRUPT_MESSAGE, "the bytes of the batch do not match its CRC-32C")
    _check_attributes(header)
    if not 0 < header.record_count == header.last_offset_delta + 1:
        raise ApiError(
            ErrorCode.INVALID_RECORD,
            f"{header.record_count} records in {header.last_offset_delta + 1} offsets",
        )


def _check_attributes(header: BatchHeader) -> None:
    attributes, stamp = header.attributes, header.producer
    if attributes & (CONTROL | DELETE_HORIZON):
        raise ApiError(
            ErrorCode.INVALID_RECORD, "only a broker writes control batches and delete horizons"
        )
    if attributes & LOG_APPEND_TIME:
        raise ApiError(ErrorCode.INVALID_TIMESTAMP, "only a broker sets timestamps of appending")
    if attributes & COMPRESSION_MASK >= len(COMPRESSIONS):
        code = attributes & COMPRESSION_MASK
        raise ApiError(ErrorCode.UNSUPPORTED_COMPRESSION_TYPE, f"there is no compression {code}")
    if stamp.producer_id >= 0:
        if stamp.producer_epoch < 0 or stamp.base_sequence < 0:
            raise ApiError(
                ErrorCode.INVALID_RECORD, f"{stamp} lacks its producer epoch or sequence"
            )
    elif attributes & TRANSACTIONAL:
        raise ApiError(ErrorCode.INVALID_RECORD, "a batch of a transaction without a producer id")


def _with_max_timestamp(batch: EncodedBatch, max_timestamp_ms: int) -> EncodedBatch:
    """Return the batch with the largest of its records' timestamps in its header.

    Look-ups by time and retention use the header; Kafka's broker corrects it too.
    """
    tail = bytearray(batch.tail)
    struct.pack_into(">q", tail, _MAX_TIMESTAMP_AT, max_timestamp_ms)
    tail[:4] = google_crc32c.value(bytes(tail[4:])).to_bytes(4, "big")
    return replace(batch, tail=bytes(tail), max_timestamp_ms=max_timestamp_ms)
