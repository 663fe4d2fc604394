"""Which partition a key belongs to: murmur2, bit for bit as Kafka's Java client computes it.

Producers in any language that follow Kafka's default partitioner put a key into the same partition
as Millstream does. One key at a time, and a whole Arrow column at once.

Source: Kafka ``org.apache.kafka.common.utils.Utils.murmur2`` and ``BuiltInPartitioner``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

if TYPE_CHECKING:
    from numpy.typing import NDArray

_SEED = 0x9747B28C
_MIX = 0x5BD1E995
_WORD = 0xFFFFFFFF
_LONG_KEY_BYTES = 256  # longer keys are hashed one by one: columns would pad every key to them


def murmur2(key: bytes) -> int:
    """Return the 32-bit hash of one key, unsigned."""
    length = len(key)
    hashed = _SEED ^ length
    whole = length & ~3
    for at in range(0, whole, 4):
        word = int.from_bytes(key[at : at + 4], "little") * _MIX & _WORD
        word = (word ^ (word >> 24)) * _MIX & _WORD
        hashed = (hashed * _MIX & _WORD) ^ word
    if whole < length:
        hashed = (hashed ^ int.from_bytes(key[whole:], "little")) * _MIX & _WORD
    hashed = (hashed ^ (hashed >> 13)) * _MIX & _WORD
    return hashed ^ (hashed >> 15)


def partition_of(key: bytes, partitions: int) -> int:
    """Return the partition of a key among ``partitions``."""
    return (murmur2(key) & 0x7FFFFFFF) % partitions


def partitions_of(keys: pa.Array, partitions: int) -> NDArray[np.int64]:
    """Return the partition of every key of a binary column; -1 where the key is null."""
    keys = keys.cast(pa.binary())
    count = len(keys)
    out = np.full(count, -1, np.int64)
    if keys.null_count == count:  # an empty column too
        return out
    offsets = np.frombuffer(keys.buffers()[1], np.int32)[keys.offset : keys.offset + count + 1]
    starts, lengths = offsets[:-1].astype(np.int64), np.diff(offsets).astype(np.int64)
    present = np.asarray(keys.is_valid())
    rows = np.flatnonzero(present & (lengths <= _LONG_KEY_BYTES))
    data = keys.buffers()[2]
    source = (
        np.frombuffer(data, np.uint8) if data is not None and data.size else np.zeros(1, np.uint8)
    )
    hashed = _hash_columns(source, starts[rows], lengths[rows])
    out[rows] = (hashed & np.uint32(0x7FFFFFFF)).astype(np.int64) % partitions
    for row in np.flatnonzero(present & (lengths > _LONG_KEY_BYTES)):
        out[row] = partition_of(keys[int(row)].as_py(), partitions)
    return out


def _hash_columns(
    data: NDArray[np.uint8], starts: NDArray[np.int64], lengths: NDArray[np.int64]
) -> NDArray[np.uint32]:
    mix = np.uint32(_MIX)
    hashed = np.uint32(_SEED) ^ lengths.astype(np.uint32)
    last = len(data) - 1
    words = lengths // 4
    for step in range(int(words.max(initial=0))):
        rows = np.flatnonzero(words > step)
        word = _little_endian(data, starts[rows] + 4 * step, 4, last) * mix
        word = (word ^ (word >> np.uint32(24))) * mix
        hashed[rows] = (hashed[rows] * mix) ^ word
    for rest in (1, 2, 3):
        rows = np.flatnonzero(lengths % 4 == rest)
        if len(rows):
            tail = _little_endian(data, starts[rows] + 4 * words[rows], rest, last)
            hashed[rows] = (hashed[rows] ^ tail) * mix
    hashed = (hashed ^ (hashed >> np.uint32(13))) * mix
    return hashed ^ (hashed >> np.uint32(15))


def _little_endian(
    data: NDArray[np.uint8], at: NDArray[np.int64], width: int, last: int
) -> NDArray[np.uint32]:
    out = np.zeros(len(at), np.uint32)
    for byte in range(width):
        out |= data[np.minimum(at + byte, last)].astype(np.uint32) << np.uint32(8 * byte)
    return out
