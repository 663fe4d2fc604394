"""JSON documents of MySQL's binary log, encoded here by the published layout, and their text."""

import base64
import json
import struct
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.capture.mysql.binary_json import document_text, double_text
from millstream.capture.mysql.buffer import BinlogBuffer
from millstream.capture.mysql.values import read_text
from millstream.errors import CorruptionError


def size_bytes(size):
    """A length in groups of seven bits, the lowest first."""
    found = bytearray()
    while size > 127:
        found.append(size & 127 | 128)
        size >>= 7
    return bytes([*found, size])


def encoded(value, *, large):
    """Return the type and the bytes of a value, by ``json_binary.h``."""
    if value is None or isinstance(value, bool):
        return 4, bytes([{None: 0, True: 1, False: 2}[value]])
    if isinstance(value, int):
        kinds = [(5, "<h"), (6, "<H"), (7, "<i"), (8, "<I"), (9, "<q"), (10, "<Q")]
        for kind, code in kinds:
            try:
                return kind, struct.pack(code, value)
            except struct.error:
                continue
    if isinstance(value, float):
        return 11, struct.pack("<d", value)
    if isinstance(value, str):
        data = value.encode()
        return 12, size_bytes(len(data)) + data
    return encoded_container(value, large=large)


def encoded_container(value, *, large):
    width, code = (4, "<I") if large else (2, "<H")
    keys = [key.encode() for key in value] if isinstance(value, dict) else []
    parts = [
        encoded(one, large=large) for one in (value.values() if isinstance(value, dict) else value)
    ]
    at = 2 * width + len(keys) * (width + 2) + len(parts) * (1 + width)
    key_entries, value_entries, tail = b"", b"", b""
    for key in keys:
        key_entries += struct.pack(code, at + len(tail)) + struct.pack("<H", len(key))
        tail += key
    for kind, data in parts:
        inlined = kind in (4, 5, 6) or (large and kind in (7, 8))
        if inlined:
            fill = b"\xff" if kind == 5 and data[1] & 128 else b"\0"
            value_entries += bytes([kind]) + data.ljust(width, fill)
        else:
            value_entries += bytes([kind]) + struct.pack(code, at + len(tail))
            tail += data
    body = key_entries + value_entries + tail
    kind = (0 if isinstance(value, dict) else 2) + large
    return kind, struct.pack(code, len(parts)) + struct.pack(code, len(body) + 2 * width) + body


def document(value, *, large=False):
    kind, data = encoded(value, large=large)
    return bytes([kind]) + data


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=200),
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"]), max_size=9), inner)
    ),
    max_leaves=20,
)


@given(VALUES, st.booleans())
def test_a_document_reads_as_the_value_that_it_is(value, large):
    text = document_text(document(value, large=large))
    assert json.loads(text) == value
    assert list(map(repr, leaves(json.loads(text)))) == list(map(repr, leaves(value)))


def leaves(value):
    if isinstance(value, dict):
        for key, one in value.items():
            yield key
            yield from leaves(one)
    elif isinstance(value, list):
        for one in value:
            yield from leaves(one)
    else:
        yield value


@given(VALUES, st.data())
def test_a_document_that_is_cut_short_is_refused_and_nothing_else_happens(value, data):
    whole = document([value, "a text at the end"])
    cut = data.draw(st.integers(1, len(whole) - 1))
    with pytest.raises(CorruptionError):
        document_text(whole[:cut])


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1e15, "1e15"),
        (-1e14, "-100000000000000.0"),
        (1234567890123456.8, "1234567890123456.8"),
        (1e-15, "0.000000000000001"),
        (9.5e-16, "9.5e-16"),
        (-0.0, "-0.0"),
        (1e22, "1e22"),
        (120.0, "120.0"),
        (0.0015, "0.0015"),
    ],
)
def test_numbers_have_the_digits_that_the_server_gives_them(value, text):
    assert double_text(value) == text


def test_texts_are_escaped_as_the_server_does():
    assert document_text(document('"\\/\b\f\n\r\t\0\x1f\x7fé🎉')) == (
        '"\\"\\\\/\\b\\f\\n\\r\\t\\u0000\\u001f\x7fé🎉"'
    )


def opaque(kind, data):
    return b"\x0f" + bytes([kind]) + size_bytes(len(data)) + data


def moment(year=0, month=0, day=0, hour=0, minute=0, second=0, micros=0):
    date = (year * 13 + month) << 5 | day
    packed = (date << 17 | hour << 12 | minute << 6 | second) << 24 | micros
    return struct.pack("<q", packed)


def test_values_of_columns_in_documents_are_what_they_are_as_text():
    assert document_text(opaque(246, b"\x05\x02\x7f\xfe\xcd")) == "-1.50"
    assert document_text(opaque(10, moment(2015, 1, 15))) == '"2015-01-15"'
    at = moment(2015, 1, 15, 23, 24, 25, 12)
    assert document_text(opaque(12, at)) == '"2015-01-15 23:24:25.000012"'
    assert document_text(opaque(7, at)) == '"2015-01-15 23:24:25.000012"'
    (packed,) = struct.unpack("<q", moment(hour=838, minute=59, second=59))
    assert document_text(opaque(11, struct.pack("<q", -packed))) == '"-838:59:59.000000"'
    long = bytes(100)
    shown = json.loads(document_text(opaque(252, long)))
    assert shown.startswith("base64:type252:AAAA")
    assert base64.b64decode(shown.partition("252:")[2]) == long
    assert max(map(len, shown.partition("252:")[2].splitlines())) == 76


def test_no_bytes_are_the_null_that_the_server_makes_of_them():
    assert read_text(4, document_text)(BinlogBuffer(bytes(4))) == "null"


@pytest.mark.parametrize("data", [b"\x07", b"\x0e\0", b"\x04\x03", b"\x02\xff\xff\x04\0"])
def test_bytes_that_are_no_document_are_refused(data):
    with pytest.raises(CorruptionError, match="is damaged"):
        document_text(data)


def test_a_document_that_is_nested_without_end_is_refused():
    inner = document(1)
    value = 1
    for _ in range(101):
        value = [value]
    with pytest.raises(CorruptionError, match="nested deeper"):
        document_text(document(value))
    assert document_text(inner) == "1"


def test_a_document_of_very_many_parts_is_read_in_its_own_time():
    """Each part was once cut out with all that came after it, which is quadratic in bytes."""
    count, long = 30_000, b"x" * 4_000_000
    head = 8 + 5 * (count + 1)
    at = head + 4 * count
    entries = b"".join(b"\x00" + struct.pack("<I", head + 4 * place) for place in range(count))
    entries += b"\x0c" + struct.pack("<I", at)
    parts = struct.pack("<HH", 0, 4) * count + size_bytes(len(long)) + long
    body = entries + parts
    begun = time.process_time()
    shown = document_text(b"\x03" + struct.pack("<II", count + 1, 8 + len(body)) + body)
    assert time.process_time() - begun < 3
    assert shown == "[" + "{}, " * count + '"' + long.decode() + '"]'
