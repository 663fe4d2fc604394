"""Parameters of prepared statements as literals of SQL.

A value whose type the client leaves open is a quoted literal, whose type the engine takes from where it stands, as PostgreSQL does.
Every other is cast to its type. A literal stands where its parameter stood, as one token: nothing of a value can be read as SQL.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Mapping, Sequence

from millstream.errors import SqlError
from millstream.sql_queries.server.messages import MessageBody
from millstream.sql_queries.server.pg_types import (
    ARRAY_OF,
    BOOL,
    BYTEA,
    DATE,
    FLOAT4,
    FLOAT8,
    INT2,
    INT4,
    INT8,
    INTERVAL,
    JSON,
    NAME,
    NUMERIC,
    OID,
    TEXT,
    TIME,
    TIMESTAMP,
    TIMESTAMPTZ,
    UNKNOWN,
    UUID,
    VARCHAR,
)
from millstream.sql_queries.sql_table import quote_text
from millstream.sql_queries.tokens import SqlToken

_TYPES = {
    BOOL: "BOOLEAN",
    INT2: "SMALLINT",
    INT4: "INTEGER",
    INT8: "BIGINT",
    OID: "BIGINT",
    FLOAT4: "FLOAT",
    FLOAT8: "DOUBLE",
    DATE: "DATE",
    TIME: "TIME",
    TIMESTAMP: "TIMESTAMP",
    TIMESTAMPTZ: "TIMESTAMPTZ",
    INTERVAL: "INTERVAL",
    UUID: "UUID",
    BYTEA: "BLOB",
}
_OPEN = frozenset({0, UNKNOWN, TEXT, VARCHAR, NAME, JSON, 3802, 1042})  # jsonb and bpchar, too
_ITEM_OF = {array: item for item, array in ARRAY_OF.items()}
_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)")
_BINARY: Mapping[int, tuple[str, Callable[[tuple[int | float, ...]], str]]] = {
    BOOL: ("!b", lambda found: str(bool(found[0])).lower()),
    INT2: ("!h", lambda found: str(found[0])),
    INT4: ("!i", lambda found: str(found[0])),
    INT8: ("!q", lambda found: str(found[0])),
    OID: ("!I", lambda found: str(found[0])),
    FLOAT4: ("!f", lambda found: repr(found[0])),
    FLOAT8: ("!d", lambda found: repr(found[0])),
}
_DECIMAL_DIGITS_MAX = 38
_INT32_MAX, _INT64_MAX = (1 << 31) - 1, (1 << 63) - 1
_YEAR_2000 = "2000-01-01"
_SPACE = SqlToken("space", " ")


def literal(value: bytes | None, oid: int, *, binary: bool) -> str:
    """Return the literal for a parameter.

    Raises:
        SqlError: the value is none of its type, or of a type that is not known in binary form.
    """
    if value is None:
        return f"CAST(NULL AS {_TYPES[oid]})" if oid in _TYPES else "NULL"
    try:
        return _binary_literal(value, oid) if binary else _text_literal(value.decode(), oid)
    except (UnicodeDecodeError, ValueError, struct.error, ArithmeticError) as error:
        raise SqlError(
            f"A parameter of the type {oid} has the value {value[:40]!r}, which is none ({error}).",
            sqlstate="22P03" if binary else "22P02",
        ) from error


def null_literal(oid: int) -> str:
    """Return what stands for a parameter before it has a value."""
    return literal(None, oid, binary=False)


def with_literals(tokens: Sequence[SqlToken], literals: Sequence[str]) -> list[SqlToken]:
    """Return a statement with its parameters replaced.

    Raises:
        SqlError: it has a parameter that no value was given for.
    """
    replaced = []
    for token in tokens:
        if token.kind == "parameter":
            number = int(token.text[1:])
            if not 1 <= number <= len(literals):
                raise SqlError(
                    f"The statement has the parameter {token.text}, and {len(literals)} values were given.",
                    sqlstate="08P01",
                )
            given = literals[number - 1]
            replaced += [
                _SPACE,
                SqlToken("string" if given.startswith("'") else "other", given),
                _SPACE,
            ]
        else:
            replaced.append(token)
    return replaced


def parameter_count(tokens: Sequence[SqlToken]) -> int:
    """Return the largest number of a parameter in a statement.

    Raises:
        SqlError: it is larger than the protocol allows.
    """
    count = max((int(token.text[1:]) for token in tokens if token.kind == "parameter"), default=0)
    if count > 0xFFFF:
        raise SqlError(f"There is no parameter ${count}: up to 65535 may be.", sqlstate="42P02")
    return count


def _text_literal(text: str, oid: int) -> str:
    if "\0" in text:
        raise ValueError("it has a zero character")
    if oid in _OPEN:
        return quote_text(text)
    if oid in _ITEM_OF:
        items = [
            "NULL" if one is None else _text_literal(one, _ITEM_OF[oid])
            for one in array_elements(text)
        ]
        return f"[{', '.join(items)}]"
    if oid == NUMERIC:
        return _numeric_literal(text)
    if oid == BYTEA:
        return _blob_literal(text)
    if oid not in _TYPES:
        return quote_text(text)
    return f"CAST({quote_text(text)} AS {_TYPES[oid]})"


def _numeric_literal(text: str) -> str:
    """Return a number in the smallest type that has all its digits."""
    found = _NUMBER.fullmatch(text)
    whole, _, places = text.lstrip("+-").partition(".")
    digits = len(whole.lstrip("0")) + len(places)
    if found is None or digits > _DECIMAL_DIGITS_MAX:
        return f"CAST({quote_text(text)} AS DOUBLE)"
    return f"CAST({quote_text(text)} AS DECIMAL({max(1, digits)},{len(places)}))"


def _blob_literal(text: str) -> str:
    if not text.startswith("\\x"):
        raise ValueError("bytes are \\x and hexadecimal digits")
    return f"from_hex({quote_text(bytes.fromhex(text[2:]).hex())})"


def array_elements(text: str) -> list[str | None]:
    """Return the elements of an array as PostgreSQL writes it, in one dimension.

    Raises:
        ValueError: it is no array, or one of arrays.
    """
    if not (text.startswith("{") and text.endswith("}")):
        raise ValueError("an array is written as {a,b}")
    found: list[str | None] = []
    at, end = 1, len(text) - 1
    while at < end:
        quoted = text[at] == '"'
        value, at = _quoted_element(text, at + 1) if quoted else _plain_element(text, at, end)
        found.append(None if not quoted and value.upper() == "NULL" else value)
        if at < end and text[at] != ",":
            raise ValueError("elements are separated by commas")
        at += 1
    return found


def _quoted_element(text: str, at: int) -> tuple[str, int]:
    value = []
    while text[at : at + 1] != '"':
        if text[at : at + 1] == "\\":
            at += 1
        if at >= len(text):
            raise ValueError("a quoted element does not end")
        value.append(text[at])
        at += 1
    return "".join(value), at + 1


def _plain_element(text: str, at: int, end: int) -> tuple[str, int]:
    stop = text.find(",", at, end)
    stop = end if stop < 0 else stop
    value = text[at:stop].strip()
    if not value or "{" in value or '"' in value:
        raise ValueError("elements are plain or quoted; arrays within arrays are not taken")
    return value, stop


def _binary_literal(value: bytes, oid: int) -> str:
    if oid in _OPEN:
        return _text_literal(value.decode(), oid)
    if oid in _ITEM_OF:
        return _binary_array(MessageBody(value), _ITEM_OF[oid])
    if oid in _BINARY:
        layout, write = _BINARY[oid]
        return f"CAST({quote_text(write(struct.unpack(layout, value)))} AS {_TYPES[oid]})"
    if oid in _BINARY_FORMS:
        return _BINARY_FORMS[oid](value)
    raise SqlError(
        f"A parameter of the type {oid} was sent in binary form, which is not taken. Send it as text.",
        sqlstate="0A000",
    )


def _binary_interval(value: bytes) -> str:
    us, days, months = struct.unpack("!qii", value)
    return f"(to_months({months}) + to_days({days}) + to_microseconds({us}))"


def _binary_timestamp(value: bytes, kind: str) -> str:
    (us,) = struct.unpack("!q", value)
    if us in (_INT64_MAX, -_INT64_MAX - 1):
        return f"{kind} '{'' if us > 0 else '-'}infinity'"
    return f"make_timestamp({us + 946_684_800_000_000})::{kind}"


def _binary_date(value: bytes) -> str:
    (days,) = struct.unpack("!i", value)
    if days in (_INT32_MAX, -_INT32_MAX - 1):
        return f"DATE '{'' if days > 0 else '-'}infinity'"
    return f"(DATE '{_YEAR_2000}' + CAST({days} AS INTEGER))"


def _binary_array(reader: MessageBody, item: int) -> str:
    dimensions, _, _ = reader.int32(), reader.int32(), reader.oid()
    if dimensions == 0:
        return "[]"
    if dimensions != 1:
        raise ValueError("arrays within arrays are not taken")
    count, _ = reader.int32(), reader.int32()
    if not 0 <= count <= len(reader.body):
        raise ValueError(f"it says {count} elements")
    items = []
    for _ in range(count):
        size = reader.int32()
        items.append("NULL" if size < 0 else _binary_literal(reader.take(size), item))
    return f"[{', '.join(items)}]"


def _binary_numeric(reader: MessageBody) -> str:
    count, weight = reader.count(2), reader.int16()
    sign, scale = reader.count(0), reader.int16()
    if sign not in (0, 0x4000):
        return {0xC000: "NaN", 0xD000: "Infinity", 0xF000: "-Infinity"}.get(sign, "?")
    number = 0
    for _ in range(count):
        number = number * 10_000 + reader.int16()
    shift = 4 * (weight + 1 - count)  # of the last digit, in places
    digits = str(number * 10**shift) if shift >= 0 else str(number).zfill(1 - shift)
    whole, places = (digits, "") if shift >= 0 else (digits[:shift], digits[shift:])
    text = f"{whole}.{places[:scale]:0<{scale}}" if scale > 0 else whole
    return ("-" if sign else "") + text


_BINARY_FORMS: Mapping[int, Callable[[bytes], str]] = {
    BYTEA: lambda value: f"from_hex({quote_text(value.hex())})",
    UUID: lambda value: f"CAST({quote_text(value.hex())} AS UUID)",
    NUMERIC: lambda value: _numeric_literal(_binary_numeric(MessageBody(value))),
    TIMESTAMP: lambda value: _binary_timestamp(value, "TIMESTAMP"),
    TIMESTAMPTZ: lambda value: _binary_timestamp(value, "TIMESTAMPTZ"),
    DATE: _binary_date,
    TIME: lambda value: f"(TIME '00:00:00' + to_microseconds({struct.unpack('!q', value)[0]}))",
    INTERVAL: _binary_interval,
}
