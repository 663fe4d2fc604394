"""Compression of record batches, as Kafka stores them: the records, never the 61-byte header.

The low three bits of a batch's attributes name the codec. The Java client, librdkafka, kafka-python and
aiokafka read what is written here, and the reverse::

    1  gzip     one member or several
    2  snappy   in the xerial framing (16 bytes, then blocks: int32 length, raw snappy), or raw
    3  lz4      frames of independent blocks: the Java client refuses blocks that need earlier ones
    4  zstd     one frame or several

Reading is bounded: no batch may grow past ``DECOMPRESSED_BYTES_MAX``, whatever its bytes say.

Source: Kafka ``CompressionType``, ``Lz4BlockOutputStream``; xerial ``SnappyOutputStream``; the LZ4
frame format.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Literal, get_args

import google_crc32c
import pyarrow as pa

from millstream.choices import choose
from millstream.errors import RecordTooLargeError
from millstream.log.batch import (
    COMPRESSION_MASK,
    CONTROL,
    HEADER_BYTES,
    PREFIX_BYTES,
    EncodedBatch,
    damaged,
)

CompressionName = Literal["none", "gzip", "snappy", "lz4", "zstd"]
COMPRESSIONS: tuple[CompressionName, ...] = get_args(CompressionName)  # by Kafka's code

DECOMPRESSED_BYTES_MAX = 256 * 1024 * 1024  # four times the largest record that may be written

_BODY = HEADER_BYTES - PREFIX_BYTES  # where the records begin in the tail of a batch
_LEVELS = {"gzip": 6, "zstd": 3}  # what the Java client takes
_BLOCK_BYTES = 64 * 1024  # the largest block that the header of the LZ4 frame allows
_READ_BYTES = 64 * 1024
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_XERIAL_MAGIC = b"\x82SNAPPY\0"
_XERIAL_HEAD = _XERIAL_MAGIC + struct.pack(">ii", 1, 1)  # version, and the oldest that can read it
# Magic; version 1 with independent blocks and no checksums; blocks of 64 KiB; the second byte of the
# xxHash-32 of the two bytes before it.
_LZ4_HEAD = b"\x04\x22\x4d\x18\x60\x40\x82"
_LZ4_END = bytes(4)
_LZ4_STORED = 1 << 31  # the block is not compressed


class _DecompressedTooLargeError(Exception):
    """The records would take more bytes than they may."""


def compress(batch: EncodedBatch, name: CompressionName) -> EncodedBatch:
    """Return the batch with its records compressed.

    The batch itself for "none", if compressing does not make it smaller, and if it is compressed
    already or a control batch.

    Raises:
        ConfigError: there is no such codec.
    """
    choose("compression", name, COMPRESSIONS)
    if name == "none" or batch.attributes & (COMPRESSION_MASK | CONTROL):
        return batch
    body = batch.tail[_BODY:]
    packed = _pack(body, name)
    if len(packed) >= len(body):
        return batch
    attributes = batch.attributes | COMPRESSIONS.index(name)
    covered = struct.pack(">h", attributes) + batch.tail[6:_BODY] + packed
    crc = google_crc32c.value(covered).to_bytes(4, "big")
    return replace(batch, tail=crc + covered, attributes=attributes)


def decompress(
    body: bytes,
    code: int,
    *,
    path: str = "",
    position: int = 0,
    offset: int = 0,
    bytes_max: int | None = None,
) -> bytes:
    """Return the records of a batch whose attributes name the codec ``code``.

    Args:
        path: The file that the batch came from, for the error; ``position`` is where in it, and
            ``offset`` its base offset.
        bytes_max: How many bytes the records may be, where that is less than for all.

    Raises:
        RecordTooLargeError: they are more than ``bytes_max``; send fewer in one batch.
        CorruptBatchError: there is no such codec, the bytes are not what it writes, or they stand
            for more than DECOMPRESSED_BYTES_MAX. Not retriable.
    Guarantees: allocates a small multiple of ``bytes_max`` at most.
    """
    if code == 0:
        return body
    if code >= len(COMPRESSIONS):
        fault = f"its attributes name codec {code}, and only 0 to {len(COMPRESSIONS) - 1} exist"
        raise damaged(path, position, offset, fault)
    name = COMPRESSIONS[code]
    try:
        return _unpack(body, name, DECOMPRESSED_BYTES_MAX if bytes_max is None else bytes_max)
    except _DecompressedTooLargeError:
        if bytes_max is not None and bytes_max < DECOMPRESSED_BYTES_MAX:
            raise RecordTooLargeError(
                f"a batch whose {name} records take more than {bytes_max:,} bytes; send fewer in one"
            ) from None
        fault = f"its {name} records take more than {DECOMPRESSED_BYTES_MAX:,} bytes"
        raise damaged(path, position, offset, fault) from None
    except (OSError, pa.ArrowException) as error:
        raise damaged(path, position, offset, f"its records are not {name}: {error}") from error


def _pack(body: bytes, name: CompressionName) -> bytes:
    if name == "snappy":
        return b"".join((_XERIAL_HEAD, *_snappy_blocks(body)))
    if name == "lz4":
        return b"".join((_LZ4_HEAD, *_lz4_blocks(body), _LZ4_END))
    packed: bytes = pa.Codec(name, compression_level=_LEVELS[name]).compress(body, asbytes=True)
    return packed


def _snappy_blocks(body: bytes) -> Iterator[bytes]:
    codec = pa.Codec("snappy")
    for start in range(0, len(body), _BLOCK_BYTES):
        block = codec.compress(body[start : start + _BLOCK_BYTES], asbytes=True)
        yield struct.pack(">i", len(block))
        yield block


def _lz4_blocks(body: bytes) -> Iterator[bytes]:
    codec = pa.Codec("lz4_raw")
    for start in range(0, len(body), _BLOCK_BYTES):
        plain = body[start : start + _BLOCK_BYTES]
        block = codec.compress(plain, asbytes=True)
        if len(block) < len(plain):
            yield struct.pack("<I", len(block))
            yield block
        else:
            yield struct.pack("<I", len(plain) | _LZ4_STORED)
            yield plain


def _unpack(body: bytes, name: CompressionName, bytes_max: int) -> bytes:
    if name == "snappy":
        return _read_snappy_blocks(body, bytes_max)
    size = _zstd_size(body) if name == "zstd" else None
    if size is not None:
        # Three times as quick as a stream. Frames behind the first one do not fit in.
        with suppress(OSError):
            return _read_exactly(body, name, size, bytes_max)
    return _read_stream(body, name, bytes_max)


def _zstd_size(body: bytes) -> int | None:
    """Return how many bytes the first frame gives as its decompressed size; None if it gives none."""
    if len(body) < 6 or not body.startswith(_ZSTD_MAGIC):
        return None
    flags = body[4]
    no_window = flags >> 5 & 1
    width = (no_window, 2, 4, 8)[flags >> 6]
    if not width:
        return None
    at = 6 - no_window + (0, 1, 2, 4)[flags & 3]  # behind the window and a dictionary's number
    return int.from_bytes(body[at : at + width], "little") + (256 if width == 2 else 0)


def _read_exactly(body: bytes, name: CompressionName, size: int, bytes_max: int) -> bytes:
    """Return ``body`` decompressed, which its own header says to be ``size`` bytes.

    The codec checks the size against the header; Arrow would not report that it filled only a part.
    """
    if size > bytes_max:
        raise _DecompressedTooLargeError
    plain: bytes = pa.Codec(name).decompress(body, decompressed_size=size, asbytes=True)
    return plain


def _read_snappy_blocks(body: bytes, bytes_max: int) -> bytes:
    if not body.startswith(_XERIAL_MAGIC):
        return _read_snappy(body, bytes_max)
    # The two versions after the magic are not looked at: some producers write them little-endian.
    pieces, left, at = [], bytes_max, len(_XERIAL_HEAD)
    while at < len(body):
        start = at + 4
        at = start + int.from_bytes(body[at:start], "big")
        if at > len(body):
            break
        pieces.append(_read_snappy(body[start:at], left))
        left -= len(pieces[-1])
    if at != len(body):
        raise OSError("a block is cut short")
    return b"".join(pieces)


def _read_snappy(block: bytes, bytes_max: int) -> bytes:
    """Return a raw snappy block decompressed; it begins with its length when decompressed."""
    size = 0
    for place, byte in enumerate(block[:5]):
        size |= (byte & 127) << 7 * place
        if byte < 128:
            break
    return _read_exactly(block, "snappy", size, bytes_max)


def _read_stream(body: bytes, name: CompressionName, bytes_max: int) -> bytes:
    pieces: list[pa.Buffer] = []
    size, want = 0, max(_READ_BYTES, 4 * len(body))
    with pa.CompressedInputStream(pa.BufferReader(body), name) as stream:
        # Not read(): where the bytes make no sense it keeps what it has allocated, for ever.
        while (piece := stream.read_buffer(min(want, bytes_max + 1 - size))).size:
            pieces.append(piece)
            size += piece.size
            if size > bytes_max:
                raise _DecompressedTooLargeError
            want = max(want, size)
    return b"".join(pieces)
