"""MySQL's binary form of JSON documents, as row events have it: the text that the server writes for a document.

The layout is that of ``sql-common/json_binary.h`` in MySQL's source: a type and a value; objects and arrays begin with their
number of elements and their size, then come entries, which hold the type of each value and the value itself or where it is.
The text is that of ``CAST(document AS CHAR)``, in which a snapshot reads it: so keys are in the order in which they are
stored, and numbers have the digits that the server gives them.
"""

from __future__ import annotations

import base64
import struct
from collections.abc import Callable, Mapping
from json.encoder import encode_basestring
from typing import NamedTuple

from millstream.capture.mysql.buffer import BinlogBuffer
from millstream.capture.mysql.values import read_decimal
from millstream.errors import CorruptionError

_SMALL_OBJECT, _LARGE_OBJECT, _SMALL_ARRAY, _LARGE_ARRAY, _LITERAL = range(5)
_INT16, _UINT16, _INT32, _UINT32, _INT64, _UINT64, _DOUBLE, _STRING = range(5, 13)
_OPAQUE = 15
_OBJECTS = (_SMALL_OBJECT, _LARGE_OBJECT)
_CONTAINERS = range(_SMALL_OBJECT, _LITERAL)
_LITERALS = {0: "null", 1: "true", 2: "false"}
_INTEGERS = {
    _INT16: (2, True),
    _UINT16: (2, False),
    _INT32: (4, True),
    _UINT32: (4, False),
    _INT64: (8, True),
    _UINT64: (8, False),
}
_IN_ENTRIES = {2: (_LITERAL, _INT16, _UINT16), 4: (_LITERAL, _INT16, _UINT16, _INT32, _UINT32)}
_DEPTH_MAX = 100  # the server's own limit
# The types of columns whose values are in documents as they are.
_TIMESTAMP, _DATE, _TIME, _DATETIME, _DECIMAL = 7, 10, 11, 12, 246
_BASE64_LINE = 76  # characters, after which the server begins another line
# Numbers from 1e-15 on, and below 1e15, are written without an exponent; those below 1e16 too, if they need their digits.
_PLAIN_EXPONENTS = range(-15, 15)
_PLAIN_DIGITS = 16


class _Part(NamedTuple):
    """A value: its type, and where it lies; ``inlined`` are its bytes if they are in the entry itself."""

    type: int
    at: int
    inlined: bytes | None = None


def document_text(data: bytes) -> str:
    """Return a document as the server writes it.

    Raises:
        CorruptionError: the bytes are no document.
    """
    if not data:  # what the server has where an IGNORE made something of a NULL
        return "null"
    try:
        return _text(data, _Part(data[0], 1), 0)
    except (IndexError, UnicodeDecodeError, struct.error) as error:
        raise _damaged(f"{error}") from error


def _damaged(why: str) -> CorruptionError:
    return CorruptionError(
        f"a JSON document in the binary log is damaged: {why}. Start the capture again; if it stops here again, check the log "
        "with mysqlbinlog --verify-binlog-checksum."
    )


def _text(data: bytes, part: _Part, depth: int) -> str:
    if depth > _DEPTH_MAX:
        raise _damaged(f"it is nested deeper than {_DEPTH_MAX} levels")
    if part.type in _CONTAINERS:
        return _container(data, part, depth)
    if part.type in _INTEGERS:
        size, signed = _INTEGERS[part.type]
        return str(int.from_bytes(_bytes(data, part, size), "little", signed=signed))
    if part.type not in _READERS:
        raise _damaged(f"it has a value of type {part.type}")
    return _READERS[part.type](data, part)


def _bytes(data: bytes, part: _Part, size: int) -> bytes:
    found = data[part.at : part.at + size] if part.inlined is None else part.inlined[:size]
    if len(found) < size:
        raise _damaged(f"it ends before byte {part.at + size}")
    return found


def _literal(data: bytes, part: _Part) -> str:
    number = _bytes(data, part, 1)[0]
    if number not in _LITERALS:
        raise _damaged(f"it has the literal {number}")
    return _LITERALS[number]


def _container(data: bytes, part: _Part, depth: int) -> str:
    """Return an object or an array, whose offsets count from its own beginning."""
    width = 4 if part.type in (_LARGE_OBJECT, _LARGE_ARRAY) else 2
    size = int.from_bytes(data[part.at + width : part.at + 2 * width], "little")
    if size > len(data) - part.at:
        raise _damaged(f"a part of it has {size} bytes, and {len(data) - part.at} are left")
    own = data[part.at : part.at + size]  # no more: a document may have very many parts
    reader = BinlogBuffer(own)
    count, _ = reader.little(width), reader.take(width)
    keys = []
    if part.type in _OBJECTS:
        places = [(reader.little(width), reader.little(2)) for _ in range(count)]
        keys = [
            encode_basestring(BinlogBuffer(own, at).take(length).decode()) for at, length in places
        ]
    texts = [_text(own, _entry(reader, width), depth + 1) for _ in range(count)]
    if part.type in _OBJECTS:
        pairs = zip(keys, texts, strict=True)
        return "{" + ", ".join(f"{key}: {text}" for key, text in pairs) + "}"
    return "[" + ", ".join(texts) + "]"


def _entry(reader: BinlogBuffer, width: int) -> _Part:
    kind, found = reader.little(1), reader.take(width)
    if kind in _IN_ENTRIES[width]:
        return _Part(kind, 0, found)
    return _Part(kind, int.from_bytes(found, "little"))


def _sized(data: bytes, at: int) -> bytes:
    """Return bytes after their length, which is written in groups of seven bits, the lowest first."""
    size = shift = 0
    while data[at] & 0x80:
        size |= (data[at] & 0x7F) << shift
        shift += 7
        at += 1
    size |= data[at] << shift
    found = data[at + 1 : at + 1 + size]
    if len(found) < size:
        raise _damaged(f"a text of it has {size} bytes, and {len(found)} are left")
    return found


def _string(data: bytes, part: _Part) -> str:
    return encode_basestring(_sized(data, part.at).decode())


def _double(data: bytes, part: _Part) -> str:
    return double_text(struct.unpack("<d", _bytes(data, part, 8))[0])


def double_text(value: float) -> str:
    """Return a number as the server writes it in a document: with the fewest digits that are the same eight bytes."""
    sign, digits, exponent = _shortest(value)
    point = len(digits) + exponent  # digits before the point
    if point - 1 in _PLAIN_EXPONENTS or (point == _PLAIN_DIGITS and len(digits) > _PLAIN_DIGITS):
        if point <= 0:
            return f"{sign}0.{'0' * -point}{digits}"
        whole, places = digits[:point].ljust(point, "0"), digits[point:]
        return f"{sign}{whole}.{places or '0'}"
    places = f".{digits[1:]}" if len(digits) > 1 else ""
    return f"{sign}{digits[0]}{places}e{point - 1}"


def _shortest(value: float) -> tuple[str, str, int]:
    """Return a number's sign, its digits without zeros at either end, and the power of ten that they are times."""
    mantissa, _, power = f"{value!r}".partition("e")
    sign = "-" if mantissa.startswith("-") else ""
    whole, _, places = mantissa.lstrip("-").partition(".")
    digits, exponent = whole + places, int(power or 0) - len(places)
    kept = digits.rstrip("0") or "0"
    exponent += len(digits) - len(kept) if kept != "0" else -exponent
    return sign, kept.lstrip("0") or "0", exponent


def _opaque(data: bytes, part: _Part) -> str:
    """Return a value of a column's type, which JSON has none for."""
    kind, found = data[part.at], _sized(data, part.at + 1)
    if kind == _DECIMAL:
        number: str = read_decimal(found[0], found[1])(BinlogBuffer(found, 2))
        return number
    if kind in (_DATE, _DATETIME, _TIMESTAMP, _TIME):
        packed = int.from_bytes(found, "little", signed=True)
        return encode_basestring(_moment_text(kind, packed))
    encoded = base64.b64encode(found).decode()
    lines = [encoded[at : at + _BASE64_LINE] for at in range(0, len(encoded), _BASE64_LINE)]
    return encode_basestring(f"base64:type{kind}:" + "\n".join(lines))


def _moment_text(kind: int, packed: int) -> str:
    sign = "-" if packed < 0 else ""
    whole, micros = divmod(abs(packed), 1 << 24)
    clock = whole & 0x1FFFF if kind != _TIME else whole
    time = f"{clock >> 12:02}:{clock >> 6 & 63:02}:{clock & 63:02}.{micros:06}"
    if kind == _TIME:
        return sign + time
    year, month = divmod(whole >> 22, 13)
    date = f"{year:04}-{month:02}-{whole >> 17 & 31:02}"
    return date if kind == _DATE else f"{date} {time}"


_READERS: Mapping[int, Callable[[bytes, _Part], str]] = {
    _LITERAL: _literal,
    _DOUBLE: _double,
    _STRING: _string,
    _OPAQUE: _opaque,
}
