"""Zigzag varints as Protocol Buffers and Kafka write them: one at a time, and whole columns.

A number is folded so that small negative ones stay short (0, -1, 1, -2 become 0, 1, 2, 3) and
written seven bits per byte, lowest first. The column forms work on NumPy arrays without a Python
object per number; they are what makes the codec in ``encoding`` and ``decoding`` fast.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

Int64s: TypeAlias = "NDArray[np.int64]"
Bytes: TypeAlias = "NDArray[np.uint8]"

VARINT_BYTES_MAX = 10  # 64 bits, seven to a byte
_ONE_BYTE = [bytes([folded]) for folded in range(128)]


def encode_varint(number: int) -> bytes:
    """Return the varint of one signed 64-bit number."""
    folded = (number << 1) ^ (number >> 63)
    if folded < 128:
        return _ONE_BYTE[folded]
    out = bytearray()
    while folded >= 128:
        out.append(folded & 127 | 128)
        folded >>= 7
    out.append(folded)
    return bytes(out)


def varint_columns(numbers: Int64s) -> tuple[Bytes, Int64s]:
    """Return the varints of a column as an (n, width) matrix of bytes, and the length of each.

    Row i holds the varint of ``numbers[i]`` in its first ``lengths[i]`` bytes.
    """
    folded = ((numbers << 1) ^ (numbers >> 63)).view(np.uint64)
    lengths = np.ones(len(folded), np.int64)
    columns: list[Bytes] = []
    while True:
        more = folded > 127
        low = folded.astype(np.uint8)
        if not more.any():
            columns.append(low)
            return np.stack(columns, axis=1), lengths
        columns.append(np.where(more, low | 128, low))
        lengths += more
        folded = folded >> np.uint64(7)


def read_varints(data: Bytes, positions: Int64s) -> tuple[Int64s, Int64s]:
    """Return the numbers at ``positions`` of ``data``, and the position after each.

    Every varint is followed for at most ten bytes and never past the end of ``data``, whatever the
    bytes are; that a position lies where it should is for the caller to check.
    """
    last = len(data) - 1
    byte = data[np.minimum(positions, last)]
    after = positions + 1
    if not (byte > 127).any():
        folded = byte.astype(np.int64)
        return (folded >> 1) ^ -(folded & 1), after
    total = (byte & 127).astype(np.uint64)
    more = byte > 127
    for shift in range(7, 7 * VARINT_BYTES_MAX, 7):
        byte = np.where(more, data[np.minimum(after, last)], 0)
        total |= (byte & 127).astype(np.uint64) << np.uint64(shift)
        after = after + more
        more = byte > 127
        if not more.any():
            break
    sign = (total & np.uint64(1)).astype(np.int64)
    return (total >> np.uint64(1)).astype(np.int64) ^ -sign, after
