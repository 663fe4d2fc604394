"""The encoding of values in messages of the Kafka protocol: one codec per type, composed by ``schema``.

Numbers are big-endian. Each type that has a length writes it in one of two ways: as a number of fixed
width, or, in versions that are *flexible*, as an unsigned varint of the length plus one, 0 for null.
A flexible struct ends with tagged fields; a reader skips those that it does not know.

=========  =====================  ============================================
type       plain                  flexible
=========  =====================  ============================================
string     int16, UTF-8           uvarint, UTF-8
bytes      int32, bytes           uvarint, bytes
records    as bytes               as bytes
[]         int32, elements        uvarint, elements
struct     its fields             its fields, uvarint, (uvarint tag, uvarint size, bytes) each
uuid       16 bytes               16 bytes
=========  =====================  ============================================

Guarantees of reading: no byte outside the message is read, no more bytes than the message has are
allocated, and no more than ``ELEMENTS_MAX`` array elements, whatever lengths say.

Source: the Kafka protocol guide; KIP-482.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

ELEMENTS_MAX = 250_000  # of all arrays of one message: an element of one byte is an object here
_UVARINT_BYTES_MAX = 5

Value = Any
Message = dict[str, Any]
ReadValue = Callable[["ByteReader"], Value]
BytesLike = bytes | memoryview
WriteValue = Callable[[Value, list[BytesLike]], None]


class MalformedError(Exception):
    """The bytes are no message of this kind."""


class Codec(NamedTuple):
    """Reads and writes one value, in one version of one message."""

    read: ReadValue
    write: WriteValue


class ByteReader:
    """The bytes of one message, and the read position."""

    __slots__ = ("at", "data", "elements_left", "end")

    def __init__(self, data: bytes, at: int = 0) -> None:
        self.data = data
        self.at = at
        self.end = len(data)
        self.elements_left = ELEMENTS_MAX

    def take(self, size: int) -> bytes:
        """Return the next ``size`` bytes."""
        start = self.at
        stop = start + size
        if size < 0 or stop > self.end:
            raise MalformedError(f"{size} bytes at {start} of a message of {self.end}")
        self.at = stop
        return self.data[start:stop]

    def uvarint(self) -> int:
        """Return the next unsigned varint of at most 32 bits."""
        number = 0
        for shift in range(0, 7 * _UVARINT_BYTES_MAX, 7):
            byte = self.take(1)[0]
            number |= (byte & 127) << shift
            if byte < 128:
                return number
        raise MalformedError(f"a varint of more than {_UVARINT_BYTES_MAX} bytes")

    def elements(self, count: int) -> int:
        """Return ``count``, if the message can have so many more elements."""
        if not 0 <= count <= min(self.end - self.at, self.elements_left):
            raise MalformedError(f"an array of {count} elements in {self.end - self.at} bytes")
        self.elements_left -= count
        return count


def distinct(elements: Sequence[Message], *fields: str) -> list[Message]:
    """Return messages without repeated values of ``fields``, the first of each.

    Where a few bytes of a request cause a large part of the response, repeating them would make the
    response larger than memory.
    """
    return list(
        {tuple(one[field] for field in fields): one for one in reversed(elements)}.values()
    )[::-1]


def uvarint(number: int) -> bytes:
    """Return the unsigned varint of a number."""
    if number < 128:
        return bytes((number,))
    out = bytearray()
    while number >= 128:
        out.append(number & 127 | 128)
        number >>= 7
    out.append(number)
    return bytes(out)


def _fixed(layout: str) -> Codec:
    shape = struct.Struct(layout)
    size, unpack, pack = shape.size, shape.unpack_from, shape.pack

    def read(source: ByteReader) -> Value:
        at = source.at
        if at + size > source.end:
            raise MalformedError(f"{size} bytes at {at} of a message of {source.end}")
        source.at = at + size
        return unpack(source.data, at)[0]

    def write(value: Value, out: list[BytesLike]) -> None:
        out.append(pack(value))

    return Codec(read, write)


def _uuid() -> Codec:
    def write(value: Value, out: list[BytesLike]) -> None:
        assert len(value) == 16, "a uuid has 16 bytes"
        out.append(value)

    return Codec(lambda source: source.take(16), write)


FIXED_CODECS: Mapping[str, Codec] = {
    "bool": _fixed(">?"),
    "int8": _fixed(">b"),
    "int16": _fixed(">h"),
    "int32": _fixed(">i"),
    "int64": _fixed(">q"),
    "uuid": _uuid(),
}
ZERO_VALUES: Mapping[str, Value] = {
    **dict.fromkeys(("int8", "int16", "int32", "int64"), 0),
    "bool": False,
    "uuid": bytes(16),
    "string": "",
    "bytes": b"",
    "records": b"",
}


def _length(width: str, *, flexible: bool) -> Codec:
    """Return the codec of a length; None stands for null."""
    if not flexible:
        number = FIXED_CODECS[width]

        def read_plain(source: ByteReader) -> int | None:
            length: int = number.read(source)
            return None if length == -1 else length

        def write_plain(length: Value, out: list[BytesLike]) -> None:
            number.write(-1 if length is None else length, out)

        return Codec(read_plain, write_plain)

    def read(source: ByteReader) -> int | None:
        length = source.uvarint()
        return length - 1 if length else None

    def write(length: Value, out: list[BytesLike]) -> None:
        out.append(b"\0" if length is None else uvarint(length + 1))

    return Codec(read, write)


def sized(kind: str, *, flexible: bool, nullable: bool) -> Codec:
    """Return the codec of a string, bytes or records."""
    size = _length("int16" if kind == "string" else "int32", flexible=flexible)
    text = kind == "string"

    def read(source: ByteReader) -> Value:
        length = size.read(source)
        if length is None:
            if not nullable:
                raise MalformedError(f"a null {kind} where there must be one")
            return None
        data = source.take(length)
        if not text:
            return data
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            raise MalformedError(f"a string that is not UTF-8: {error}") from None

    def write(value: Value, out: list[BytesLike]) -> None:
        if value is None:
            assert nullable, f"a null {kind} where there must be one"
            size.write(None, out)
            return
        if isinstance(value, list):  # bytes or records in several chunks
            size.write(sum(map(len, value)), out)
            out += value
            return
        data = value.encode() if text else value
        size.write(len(data), out)
        out.append(data)

    return Codec(read, write)


def array(element: Codec, *, flexible: bool, nullable: bool) -> Codec:
    """Return the codec of an array: a list."""
    size = _length("int32", flexible=flexible)
    read_one, write_one = element

    def read(source: ByteReader) -> Value:
        length = size.read(source)
        if length is None:
            if not nullable:
                raise MalformedError("a null array where there must be one")
            return None
        return [read_one(source) for _ in range(source.elements(length))]

    def write(value: Value, out: list[BytesLike]) -> None:
        if value is None:
            assert nullable, "a null array where there must be one"
            size.write(None, out)
            return
        size.write(len(value), out)
        for one in value:
            write_one(one, out)

    return Codec(read, write)


class StructField(NamedTuple):
    """A field of a struct in one version; ``codec`` is None where the version has no such field."""

    name: str
    codec: Codec | None
    default: Value
    tag: int | None = None


def structure(members: Sequence[StructField], *, flexible: bool) -> Codec:
    """Return the codec of a struct: a dict with every field; absent fields have their defaults."""
    defaults = {one.name: one.default for one in members}
    plain = [(one.name, one.codec) for one in members if one.codec and one.tag is None]
    readers = [(name, codec.read) for name, codec in plain]
    writers = [(name, codec.write) for name, codec in plain]
    tagged = {one.tag: one for one in members if one.codec and one.tag is not None}

    def read(source: ByteReader) -> Message:
        value = defaults.copy()
        for name, read_one in readers:
            value[name] = read_one(source)
        if flexible:
            _read_tags(source, tagged, value)
        return value

    def write(value: Message, out: list[BytesLike]) -> None:
        for name, write_one in writers:
            write_one(value[name] if name in value else defaults[name], out)
        if flexible:
            _write_tags(tagged, value, out)

    return Codec(read, write)


def optional(one: Codec) -> Codec:
    """Return the codec of a struct that may be null: a byte says whether it is there."""
    here = FIXED_CODECS["int8"]

    def read(source: ByteReader) -> Value:
        return None if here.read(source) < 0 else one.read(source)

    def write(value: Value, out: list[BytesLike]) -> None:
        here.write(-1 if value is None else 1, out)
        if value is not None:
            one.write(value, out)

    return Codec(read, write)


def _read_tags(source: ByteReader, tagged: Mapping[int, StructField], value: Message) -> None:
    for _ in range(source.uvarint()):
        tag, size = source.uvarint(), source.uvarint()
        known = tagged.get(tag)
        if known is None or known.codec is None:
            source.take(size)
            continue
        stop = source.at + size
        value[known.name] = known.codec.read(source)
        if source.at != stop:
            raise MalformedError(f"the tagged field {known.name} has a wrong size")


def _write_tags(tagged: Mapping[int, StructField], value: Message, out: list[BytesLike]) -> None:
    present = [
        (tag, one)
        for tag, one in sorted(tagged.items(), key=lambda item: item[0])
        if value.get(one.name, one.default) != one.default
    ]
    out.append(uvarint(len(present)))
    for tag, one in present:
        assert one.codec is not None, "only fields of this version are tagged"
        content: list[BytesLike] = []
        one.codec.write(value[one.name], content)
        data = b"".join(content)
        out += (uvarint(tag), uvarint(len(data)), data)
