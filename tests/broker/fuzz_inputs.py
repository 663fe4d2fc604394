"""Requests that no client would send, and batches that no producer would make: from a seed, in millions.

A frame is made from a valid request of an API and version that the broker supports. It is kept in pieces
that know what they are (a count, a length, a text, a number, records), and some of the pieces are
changed as befits them: a count that is huge or one off, a null where there must be none, a varint that
does not end, a text that is not UTF-8; or pieces are left out, doubled, exchanged, or the whole is cut.
Batches are changed in their header, their records, what they are compressed to; mostly with a CRC that
fits, so that what lies behind it is looked at.

Frame ``number`` of a seed is always the same.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import google_crc32c
from broker.raw_client import raw

from millstream.broker.dispatch import HANDLERS
from millstream.broker.protocol.schema import Api, FieldSpec
from millstream.broker.protocol.wire import uvarint
from millstream.log.batch import HEADER_BYTES, ProducerStamp, stamp
from millstream.log.compression import COMPRESSIONS, compress
from millstream.log.encoding import SimpleRecord, encode_records

APIS = sorted(HANDLERS, key=lambda api: api.key)
_VARIANTS = 6  # valid requests of each version
_INTS = {"int8": ">b", "int16": ">h", "int32": ">i", "int64": ">q", "bool": ">?"}
_NAMES = ("t", "u", "compact", "missing", "", "a/b", "x" * 249, "__of_fences")
_TEXTS = ("", "g", "h", "x", "consumer", "range", "1000", "delete", "segment.bytes", "é" * 5, "\0")
_BAD_TEXTS = (b"\xff", b"\xc3", b"\xed\xa0\x80", b"a\0b", b"x" * 40_000)
_BAD_VARINTS = (b"\x80\x00", b"\xff" * 5, b"\xff\xff\xff\xff\x0f", b"\x80" * 9 + b"\x01")
_COUNTS = (0, 1, 2, 127, 128, 250_001, 1 << 20, (1 << 31) - 1)


class Piece(NamedTuple):
    """A part of a frame, and what it is."""

    kind: str  # "head", "plain count", "flexible count", "tags", "text", an integer type, "uuid", "bytes"
    data: bytes


# -- valid requests, in pieces ----------------------------------------------------------------


class _Maker:
    """Makes valid requests."""

    def __init__(self, chance: random.Random, batches: Sequence[bytes]) -> None:
        self._chance, self._batches = chance, batches

    def pieces(self, api: Api, version: int) -> list[Piece]:
        flexible = api.flexible(version)
        head = struct.pack(">hhih", api.key, version, self._chance.randrange(1 << 31), 4) + b"fuzz"
        out = [Piece("head", head)]
        if flexible:
            out.append(Piece("tags", b"\0"))
        self._struct(api.request, version, out, flexible=flexible)
        return out

    def _struct(
        self, fields: Sequence[FieldSpec], version: int, out: list[Piece], *, flexible: bool
    ) -> None:
        for one in fields:
            if one.first <= version <= one.last and one.tag is None:
                self._field(one, version, out, flexible=flexible)
        if flexible:
            out.append(Piece("tags", b"\0"))

    def _field(self, one: FieldSpec, version: int, out: list[Piece], *, flexible: bool) -> None:
        if one.kind == "{}":
            there = version < one.null or self._chance.random() < 0.5
            if version >= one.null:
                out.append(Piece("int8", b"\1" if there else b"\xff"))
            if there:
                self._struct(one.fields, version, out, flexible=flexible)
            return
        if not one.kind.startswith("[]"):
            self._scalar(one, one.kind, version, out, flexible=flexible)
            return
        if version >= one.null and self._chance.random() < 0.1:
            out.append(_count(None, flexible=flexible))
            return
        count = self._chance.choice((0, 1, 1, 1, 2, 3))
        out.append(_count(count, flexible=flexible))
        for _ in range(count):
            if one.kind == "[]":
                self._struct(one.fields, version, out, flexible=flexible)
            else:
                self._scalar(one, one.kind[2:], version, out, flexible=flexible)

    def _scalar(
        self, one: FieldSpec, kind: str, version: int, out: list[Piece], *, flexible: bool
    ) -> None:
        chance = self._chance
        if kind in _INTS:
            out.append(Piece(kind, struct.pack(_INTS[kind], self._number(one.name, kind))))
        elif kind == "uuid":
            out.append(Piece(kind, chance.choice((bytes(16), chance.randbytes(16)))))
        elif version >= one.null and chance.random() < 0.1:
            out.append(_length(None, kind, flexible=flexible))
        else:
            data = self._data(one.name, kind)
            out += [_length(len(data), kind, flexible=flexible), Piece("text", data)]

    def _data(self, name: str, kind: str) -> bytes:
        chance = self._chance
        if kind == "records":
            return chance.choice(self._batches)
        if kind == "bytes":
            return chance.randbytes(chance.choice((0, 1, 30)))
        return chance.choice(_NAMES if name in ("name", "topic") else _TEXTS).encode()

    def _number(self, name: str, kind: str) -> int:
        if kind == "bool":
            return self._chance.randrange(2)
        likely = {"max_wait_ms": 5, "acks": self._chance.choice((-1, -1, 1, 0)), "timeout_ms": 1000}
        if name in likely:
            return likely[name]
        end = 1 << int(kind[3:]) - 1
        return self._chance.choice((0, 0, 0, 1, 1, -1, 2, min(6000, end - 1), end - 1, -end))


def _count(count: int | None, *, flexible: bool) -> Piece:
    if flexible:
        return Piece("flexible count", uvarint(0 if count is None else count + 1))
    return Piece("plain count", struct.pack(">i", -1 if count is None else count))


def _length(length: int | None, kind: str, *, flexible: bool) -> Piece:
    if flexible:
        return Piece("flexible count", uvarint(0 if length is None else length + 1))
    layout = ">h" if kind == "string" else ">i"
    return Piece("plain count", struct.pack(layout, -1 if length is None else length))


# -- batches ----------------------------------------------------------------------------------


def good_batches(seed: int = 0) -> list[bytes]:
    """Return valid batches of every kind: compressions, headers, nulls, producers."""
    chance = random.Random(seed)
    made = []
    for name in COMPRESSIONS:
        for count in (1, 2, 7, 40):
            rows = [_row(chance) for _ in range(count)]
            batch = compress(encode_records(rows), name)
            made.append(raw(batch))
            producer = ProducerStamp(chance.randrange(1, 50), 0, chance.choice((0, 1, 2**31 - 1)))
            made.append(raw(stamp(batch, producer, transactional=chance.random() < 0.3)))
    return made


def _row(chance: random.Random) -> SimpleRecord:
    key = chance.choice((None, b"", b"k", chance.randbytes(20)))
    value = chance.choice((None, b"", bytes(300), chance.randbytes(70)))
    headers = [("h", chance.choice((None, b"", b"1")))] * chance.choice((0, 0, 0, 1, 3))
    return SimpleRecord(chance.choice((0, 1000, 1 << 40)), key, value, tuple(headers))


def changed_batch(chance: random.Random, good: Sequence[bytes]) -> bytes:
    """Return a batch with something wrong in it; now and then with nothing wrong."""
    data = bytearray(chance.choice(good))
    for _ in range(chance.choice((1, 1, 1, 2, 4))):
        _change_batch(chance, data, good)
    if len(data) >= HEADER_BYTES and chance.random() < 0.9:
        if chance.random() < 0.9:
            data[8:12] = struct.pack(">i", len(data) - 12)
        crc = google_crc32c.value(bytes(data[21:]))
        data[17:21] = crc.to_bytes(4, "big")
    return bytes(data)


_HEADER = {  # where a field of the header is, and how it is laid out
    0: ">q",
    8: ">i",
    12: ">i",
    16: ">b",
    21: ">h",
    23: ">i",
    27: ">q",
    35: ">q",
    43: ">q",
    51: ">h",
    53: ">i",
    57: ">i",
}


def _change_batch(chance: random.Random, data: bytearray, good: Sequence[bytes]) -> None:
    kind = chance.randrange(8)
    if len(data) <= HEADER_BYTES:
        data += chance.choice(good)
    elif kind == 0:
        at = chance.choice(list(_HEADER))
        layout = _HEADER[at]
        end = 1 << 8 * struct.calcsize(layout) - 1
        value = chance.choice((0, 1, -1, 2, 3, 7, 8, 16, 32, 64, end - 1, -end))
        struct.pack_into(layout, data, at, max(min(value, end - 1), -end))
    elif kind in (1, 2, 3):  # the records, or what they are compressed to
        for _ in range(chance.choice((1, 1, 2, 8))):
            data[chance.randrange(HEADER_BYTES, len(data))] = chance.choice(
                (0, 1, 2, 127, 128, 255, chance.randrange(256))
            )
    elif kind == 4:
        del data[chance.randrange(len(data)) :]
    elif kind == 5:
        at = chance.randrange(HEADER_BYTES, len(data))
        data[at:at] = chance.randbytes(chance.choice((1, 5, 60)))
    elif kind == 6:
        data[22] = data[22] & ~7 | chance.randrange(8)  # another compression than it is
    else:
        data += chance.choice((b"\0", chance.choice(good), bytes(50)))


# -- frames -----------------------------------------------------------------------------------


class Frames:
    """Frames from a seed, each without the size in front of it."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._chance = random.Random(seed)
        self.batches = good_batches(seed)
        maker = _Maker(self._chance, self.batches)
        self.requests = [
            (api, version, maker.pieces(api, version))
            for api in APIS
            for version in range(api.versions[0], api.versions[1] + 1)
            for _ in range(_VARIANTS)
        ]

    def frame(self, number: int) -> bytes:
        """Return frame ``number``."""
        chance = self._begin(number)
        _, _, pieces = chance.choice(self.requests)
        pieces = list(pieces)
        for _ in range(chance.choice((0, 1, 1, 1, 2, 3))):
            self._change(chance, pieces)
        data = b"".join(piece.data for piece in pieces)
        if chance.random() < 0.1:
            data = _changed_whole(chance, data)
        return data

    def batch(self, number: int) -> bytes:
        """Return batch ``number``."""
        return changed_batch(self._begin(number), self.batches)

    def _begin(self, number: int) -> random.Random:
        self._chance.seed(self._seed << 40 | number)
        return self._chance

    def _change(self, chance: random.Random, pieces: list[Piece]) -> None:
        at = chance.randrange(len(pieces))
        kind, data = pieces[at]
        choice = chance.random()
        if choice < 0.06:
            del pieces[at]
            if not pieces:
                pieces.append(Piece("head", data))
        elif choice < 0.12:
            pieces.insert(at, chance.choice(pieces))
        elif choice < 0.16:
            pieces[at] = chance.choice(pieces)
        else:
            pieces[at] = Piece(kind, self._changed(chance, kind, data))

    def _changed(self, chance: random.Random, kind: str, data: bytes) -> bytes:
        if kind == "head":
            return _changed_head(chance, data)
        if kind == "plain count":
            number = int.from_bytes(data, "big", signed=True)
            end = 1 << 8 * len(data) - 1
            chosen = chance.choice((number + 1, number - 1, -1, -2, -end, end - 1, *_COUNTS))
            return max(min(chosen, end - 1), -end).to_bytes(len(data), "big", signed=True)
        if kind == "flexible count":
            return chance.choice((*_BAD_VARINTS, *(uvarint(one) for one in _COUNTS)))
        if kind == "tags":
            return _tags(chance)
        if kind in _INTS:
            end = 1 << 8 * len(data) - 1
            chosen = chance.choice((0, 1, -1, 2, 100, end - 1, -end, chance.randrange(-end, end)))
            return max(min(chosen, end - 1), -end).to_bytes(len(data), "big", signed=True)
        if len(data) >= HEADER_BYTES and kind == "text":
            return changed_batch(chance, self.batches)
        return chance.choice((*_BAD_TEXTS, chance.randbytes(len(data)), data[:-1], data + b"x"))


def _changed_head(chance: random.Random, data: bytes) -> bytes:
    if len(data) < 10:  # it was cut before
        return data
    key, version, number, length = struct.unpack_from(">hhih", data)
    kind = chance.randrange(4)
    if kind == 0:
        key = chance.choice((-1, 4, 23, 68, 999, 32767, *(api.key for api in APIS)))
    elif kind == 1:
        version = chance.choice((-1, 0, version ^ 1, 5, 13, 32767, -32768))
    elif kind == 2:
        length = chance.choice((-1, -2, 0, 3, 5, 32767, -32768))
    else:
        return data[: chance.randrange(len(data))]
    return struct.pack(">hhih", key, version, number, length) + data[10:]


def _tags(chance: random.Random) -> bytes:
    """Return tagged fields: some that can be passed over, some that lie."""
    tag, size = chance.choice((0, 1, 77, 1 << 30)), chance.choice((0, 1, 5, 1000))
    whole = b"\1" + uvarint(tag) + uvarint(size) + bytes(size)
    lying = b"\1" + uvarint(tag) + uvarint(size + chance.choice((1, 100, 1 << 28))) + bytes(size)
    return chance.choice((whole, lying, uvarint(1 << 27), uvarint((1 << 32) - 1), *_BAD_VARINTS))


def _changed_whole(chance: random.Random, data: bytes) -> bytes:
    kind = chance.randrange(4)
    if kind == 0:
        return data[: chance.randrange(len(data) + 1)]
    if kind == 1:
        return data + chance.choice((data, bytes(7), chance.randbytes(100)))
    out = bytearray(data)
    for _ in range(chance.choice((1, 2, 10))):
        if out:
            out[chance.randrange(len(out))] = chance.randrange(256)
    return bytes(out)


def stream(frames: Frames, first: int, count: int) -> Iterator[bytes]:
    """Yield pieces of what a connection is sent: framed, split and merged, sometimes sized wrongly."""
    chance = random.Random(first)
    held = b""
    for number in range(first, first + count):
        frame = frames.frame(number)
        size = len(frame)
        if chance.random() < 0.01:
            size = chance.choice((-1, 0, 7, size - 1, size + 1, 1 << 27, (1 << 31) - 1))
        held += struct.pack(">i", size) + frame
        if chance.random() < 0.5:
            cut = chance.randrange(len(held) + 1)
            yield held[:cut]
            held = held[cut:]
    yield held
