"""Zigzag varints as Protocol Buffers and Kafka write them: one at a time, and whole columns.

A number is folded so that small negative ones remain short (0, -1, 1, -2 become 0, 1, 2, 3) and
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
Uint64s: TypeAlias = "NDArray[np.uint64]"

VARINT_BYTES_MAX = 10  # 64 bits, seven to a byte
WORD_BYTES = 8
WORD_NUMBER_MAX = (1 << 55) - 1  # the largest whose varint fits into a word


def encode_varint(number: int) -> bytes:
    """Return the varint of one signed 64-bit number."""
    return _SHORT[number] if 0 <= number < len(_SHORT) else _encoded(number)


def _encoded(number: int) -> bytes:
    folded = (number << 1) ^ (number >> 63)
    out = bytearray()
    while folded >= 128:
        out.append(folded & 127 | 128)
        folded >>= 7
    out.append(folded)
    return bytes(out)


_SHORT = [_encoded(number) for number in range(1024)]  # most lengths and deltas are among these


def read_varint(data: bytes, at: int, end: int) -> tuple[int, int]:
    """Return the number at ``at``, and the position after it.

    Raises:
        ValueError: it does not end before ``end``, or within ten bytes.
    """
    if at < end and data[at] < 128:
        folded = data[at]
        return (folded >> 1) ^ -(folded & 1), at + 1
    folded = 0
    for place, byte in enumerate(data[at : min(at + VARINT_BYTES_MAX, end)]):
        folded |= (byte & 127) << 7 * place
        if byte < 128:
            return (folded >> 1) ^ -(folded & 1), at + place + 1
    raise ValueError(f"no varint ends in bytes [{at}, {end})")


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


def varint_words(numbers: Int64s) -> tuple[Uint64s, Int64s]:
    """Return the varints of a column as words, and the length of each in bytes.

    The lowest byte of a word is the varint's first; bytes behind its end are 0. No number may be
    further from 0 than WORD_NUMBER_MAX.
    """
    folded = ((numbers << 1) ^ (numbers >> 63)).view(np.uint64)
    largest = int(folded.max())
    assert largest <= 2 * WORD_NUMBER_MAX + 1
    words, lengths = folded & np.uint64(127), np.ones(len(folded), np.int64)
    for place in range(1, WORD_BYTES):
        if largest < 1 << 7 * place:
            break
        rest = folded >> np.uint64(7 * place)
        more = rest != 0
        lengths += more
        words |= more.astype(np.uint64) << np.uint64(8 * place - 1)  # the byte before goes on
        words |= (rest & np.uint64(127)) << np.uint64(8 * place)
    return words, lengths


def read_varints(data: Bytes, positions: Int64s) -> tuple[Int64s, Int64s]:
    """Return the numbers at ``positions`` of ``data``, and the position after each.

    Every varint is followed for at most ten bytes and never past the end of ``data``, whatever the
    bytes are; that a position lies where it should is for the caller to check.
    """
    byte = data.take(positions, mode="clip")
    after = positions + 1
    more = byte > 127
    if not more.any():
        folded = byte.astype(np.int64)
        return (folded >> 1) ^ -(folded & 1), after
    total = (byte & 127).astype(np.uint64)
    for shift in range(7, 7 * VARINT_BYTES_MAX, 7):
        byte = data.take(after, mode="clip")
        byte *= more
        total |= (byte & 127).astype(np.uint64) << np.uint64(shift)
        after += more
        more = byte > 127
        if not more.any():
            break
    sign = (total & np.uint64(1)).view(np.int64)
    return (total >> np.uint64(1)).view(np.int64) ^ -sign, after
