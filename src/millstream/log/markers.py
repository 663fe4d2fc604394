"""Control batches: where a transaction of one producer ends in one partition, and how.

A control batch takes one offset, holds one record, and is never handed to a reader. The key of its
record is (version, type) with type 0 for abort and 1 for commit; its value is a version and, in the place of
Kafka's coordinator number, the leader epoch of the folder.

Source: Kafka ``ControlRecordType``, ``EndTxnMarker.json``.
"""

from __future__ import annotations

import struct

import numpy as np

from millstream.log.batch import (
    CONTROL,
    HEADER_BYTES,
    NO_PRODUCER,
    TRANSACTIONAL,
    BatchHeader,
    EncodedBatch,
    ProducerStamp,
    finish,
)
from millstream.log.varint import encode_varint, read_varints

_KEY = struct.Struct(">hh")
_VALUE = struct.Struct(">hi")
_ABORT, _COMMIT = 0, 1
NO_TIMESTAMP_MS = -1  # Kafka's value for none: it does not affect retention by age
FILLER_OFFSETS_MAX = 1 << 31  # the last offset delta is a signed 32-bit number


def encode_marker(
    *, commit: bool, producer_id: int, producer_epoch: int, leader_epoch: int, timestamp_ms: int
) -> EncodedBatch:
    """Return the batch that ends a producer's transaction in one partition."""
    key = _KEY.pack(0, _COMMIT if commit else _ABORT)
    value = _VALUE.pack(0, leader_epoch)
    record = b"\0\0\0" + encode_varint(len(key)) + key + encode_varint(len(value)) + value + b"\0"
    return finish(
        encode_varint(len(record)) + record,
        records=1,
        timestamps_ms=(timestamp_ms, timestamp_ms),
        attributes=TRANSACTIONAL | CONTROL,
        producer=ProducerStamp(producer_id, producer_epoch, -1),
    )


def is_commit(data: bytes, at: int, header: BatchHeader) -> bool | None:
    """Return whether the control batch at ``at`` commits or aborts; None for any other kind."""
    body = np.frombuffer(data, np.uint8)[at + HEADER_BYTES : at + header.size]
    position = np.zeros(1, np.int64)
    if not len(body):
        return None
    _, position = read_varints(body, position)  # the record's length
    position = position + 1  # its attributes
    _, position = read_varints(body, position)  # timestamp delta
    _, position = read_varints(body, position)  # offset delta
    _, position = read_varints(body, position)  # key length
    start = int(position[0])
    key = bytes(body[start : start + _KEY.size])
    if len(key) < _KEY.size:
        return None
    kind = _KEY.unpack(key)[1]
    return {_ABORT: False, _COMMIT: True}.get(kind)


def encode_filler(
    count: int,
    *,
    max_timestamp_ms: int = NO_TIMESTAMP_MS,
    producer: ProducerStamp = NO_PRODUCER,
    attributes: int = 0,
) -> EncodedBatch:
    """Return a batch without records that takes ``count`` offsets.

    It fills the offsets where compaction or repair left no record, so that every offset of a segment is in
    exactly one batch and a missing one is always damage. Kafka's readers skip such batches: Kafka's own
    compaction writes them.
    """
    return finish(
        b"",
        records=0,
        count=count,
        timestamps_ms=(max_timestamp_ms, max_timestamp_ms),
        attributes=attributes,
        producer=producer,
    )
