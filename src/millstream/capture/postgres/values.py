"""Column values: PostgreSQL's text of a value into JSON, without loss.

Numbers that JSON cannot hold are text: ``numeric``, NaN and infinities. Rows of snapshots and of the stream have the
same text, and so become the same JSON. The table is in docs/capture.md.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

ValueOf: TypeAlias = Callable[[str], Any]

_PLAIN_TIMESTAMP = re.compile(r"(\d{4,6}-\d\d-\d\d) (\d\d:\d\d:\d\d(?:\.\d+)?)(\+00)?")


def read_float(text: str) -> float | str:
    """Return a number; NaN and the infinities as texts."""
    return text if text[-1] in "yN" else float(text)  # Infinity, -Infinity, NaN


def read_bytes(text: str) -> str:
    """Return base64 of bytes in hexadecimal digits, which ``bytea_output`` asks for."""
    return base64.b64encode(bytes.fromhex(text[2:])).decode()


def read_timestamp(text: str) -> str:
    """``2026-01-02 03:04:05.6+00`` is ``2026-01-02T03:04:05.6Z``; infinity and years BC stay as they are."""
    plain = _PLAIN_TIMESTAMP.fullmatch(text)
    if plain is None:
        return text
    return f"{plain[1]}T{plain[2]}{'Z' if plain[3] else ''}"


def read_boolean(text: str) -> bool:
    """Return whether it is ``t``."""
    return text == "t"


_OF_OID: dict[int, ValueOf] = {
    16: read_boolean,
    17: read_bytes,
    20: int,
    21: int,
    23: int,
    26: int,
    700: read_float,
    701: read_float,
    1114: read_timestamp,
    1184: read_timestamp,
}


@dataclass(frozen=True)
class PgTypes:
    """How types are read that the server defines, not PostgreSQL: ``bases`` of domains, ``elements`` of arrays.

    Each is the oid of a type and that of what it is made of; ``names`` is for people.
    """

    bases: dict[int, int] = field(default_factory=dict)
    elements: dict[int, int] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)

    def reader(self, oid: int) -> ValueOf:
        """Return what makes JSON of a type's texts."""
        while oid in self.bases:
            oid = self.bases[oid]
        element = self.elements.get(oid)
        if element is None:
            return _OF_OID.get(oid, str)
        read = self.reader(element)
        delimiter = ";" if element == 603 else ","  # 603: box, the only type with another delimiter
        return lambda text: parse_array(text, read, delimiter)


def parse_array(text: str, read: ValueOf, delimiter: str = ",") -> list[Any]:
    """Return an array's elements, nested as it is; bounds that do not begin at 1 are left out."""
    if text.startswith("["):
        text = text[text.index("=") + 1 :]
    found: list[list[Any]] = [[]]
    at, end = 0, len(text)
    while at < end:
        letter = text[at]
        if letter == "{":
            found.append([])
            at += 1
        elif letter == "}":
            inner = found.pop()
            found[-1].append(inner)
            at += 1
        elif letter == delimiter:
            at += 1
        else:
            element, at, quoted = _element(text, at, delimiter)
            is_null = not quoted and element == "NULL"
            found[-1].append(None if is_null else read(element))
    array: list[Any] = found[0][0]
    return array


def _element(text: str, at: int, delimiter: str) -> tuple[str, int, bool]:
    if text[at] != '"':
        end = at
        while text[end] not in (delimiter, "}"):
            end += 1
        return text[at:end], end, False
    letters, at = [], at + 1
    while text[at] != '"':
        if text[at] == "\\":
            at += 1
        letters.append(text[at])
        at += 1
    return "".join(letters), at + 1, True


_ESCAPES = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v"}
_ESCAPED = re.compile(r"\\(.)", re.DOTALL)


def parse_copy_line(line: bytes) -> list[str | None]:
    """Return the texts of a line of COPY: None for null."""
    cells = line.rstrip(b"\n").decode().split("\t")
    if b"\\" not in line:
        return list(cells)
    return [None if cell == "\\N" else unescape(cell) for cell in cells]


def unescape(cell: str) -> str:
    """Return the text of a value of COPY that is not null."""
    return _ESCAPED.sub(lambda found: _ESCAPES.get(found[1], found[1]), cell)
