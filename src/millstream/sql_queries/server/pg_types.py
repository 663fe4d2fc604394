"""Types and values: which type PostgreSQL has for one of the engine's, and values as text and in binary form.

=====================================  ===============  ===================================================================
the engine's type                      PostgreSQL's     remarks
=====================================  ===============  ===================================================================
BOOLEAN, SMALLINT, INTEGER, BIGINT     bool, int2/4/8   unsigned ones are the next larger type
HUGEINT, UBIGINT, DECIMAL              numeric          sums of integers are HUGEINT
FLOAT, DOUBLE                          float4, float8   NaN and infinities as PostgreSQL writes them
VARCHAR, ENUM                          text
BLOB                                   bytea
DATE, TIME, TIMESTAMP                  the same         infinities of dates and timestamps too
TIMESTAMP WITH TIME ZONE               timestamptz      always written in UTC
INTERVAL                               interval
UUID, JSON                             the same
lists of these                         arrays           nested lists are json
STRUCT, MAP, UNION                     json
=====================================  ===============  ===================================================================
"""

from __future__ import annotations

import datetime as dt
import json
import math
import re
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from itertools import islice
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from millstream.errors import SqlError

BOOL, BYTEA, INT8, INT2, INT4, TEXT, OID, JSON = 16, 17, 20, 21, 23, 25, 26, 114
FLOAT4, FLOAT8, UNKNOWN, VARCHAR, DATE, TIME = 700, 701, 705, 1043, 1082, 1083
TIMESTAMP, TIMESTAMPTZ, INTERVAL, NUMERIC, UUID, NAME = 1114, 1184, 1186, 1700, 2950, 19

ARRAY_OF = {
    BOOL: 1000,
    BYTEA: 1001,
    INT2: 1005,
    INT4: 1007,
    TEXT: 1009,
    INT8: 1016,
    FLOAT4: 1021,
    FLOAT8: 1022,
    OID: 1028,
    NAME: 1003,
    TIMESTAMP: 1115,
    DATE: 1182,
    TIME: 1183,
    TIMESTAMPTZ: 1185,
    INTERVAL: 1187,
    NUMERIC: 1231,
    UUID: 2951,
    JSON: 199,
    VARCHAR: 1015,
}
_OIDS = {
    "BOOLEAN": BOOL,
    "TINYINT": INT2,
    "SMALLINT": INT2,
    "UTINYINT": INT2,
    "INTEGER": INT4,
    "USMALLINT": INT4,
    "BIGINT": INT8,
    "UINTEGER": INT8,
    "UBIGINT": NUMERIC,
    "HUGEINT": NUMERIC,
    "UHUGEINT": NUMERIC,
    "FLOAT": FLOAT4,
    "DOUBLE": FLOAT8,
    "VARCHAR": TEXT,
    "BLOB": BYTEA,
    "DATE": DATE,
    "TIME": TIME,
    "TIMESTAMP": TIMESTAMP,
    "TIMESTAMP_S": TIMESTAMP,
    "TIMESTAMP_MS": TIMESTAMP,
    "TIMESTAMP_NS": TIMESTAMP,
    "TIMESTAMP WITH TIME ZONE": TIMESTAMPTZ,
    "INTERVAL": INTERVAL,
    "UUID": UUID,
    "JSON": JSON,
    "NAME": NAME,
    "OID": OID,
}
_SIZES = {
    BOOL: 1,
    INT2: 2,
    INT4: 4,
    INT8: 8,
    OID: 4,
    FLOAT4: 4,
    FLOAT8: 8,
    DATE: 4,
    TIME: 8,
    TIMESTAMP: 8,
}
_SIZES |= {TIMESTAMPTZ: 8, INTERVAL: 16, UUID: 16, NAME: 64}
_DECIMAL = re.compile(r"DECIMAL\((\d+),\s*(\d+)\)")
_UNIX_TO_2000_S = 946_684_800
_US_OF = {"s": 1_000_000, "ms": 1000, "us": 1}
# The engine's infinities are these numbers and their negatives, whatever the unit of a time.
_INFINITE_US = (1 << 63) - 1
_INFINITE_DAYS = (1 << 31) - 1

Encoded = list[bytes | None]


@dataclass(frozen=True)
class PgType:
    """A type as clients know it. ``item`` is that of the elements of an array."""

    oid: int
    size: int = -1
    modifier: int = -1
    item: PgType | None = None


def pg_type(kind: str) -> PgType:
    """Return PostgreSQL's type for a type of the engine's."""
    if kind.endswith("[]"):
        item = pg_type(kind[:-2])
        if item.item is None and item.oid in ARRAY_OF and not _is_nested(kind[:-2]):
            return PgType(ARRAY_OF[item.oid], item=item)
        return PgType(JSON)
    if found := _DECIMAL.fullmatch(kind):
        return PgType(NUMERIC, modifier=(int(found[1]) << 16 | int(found[2])) + 4)
    if _is_nested(kind):
        return PgType(JSON)
    oid = _OIDS.get(kind.upper(), TEXT)
    return PgType(oid, _SIZES.get(oid, -1))


def _is_nested(kind: str) -> bool:
    return kind.startswith(("STRUCT(", "MAP(", "UNION(")) or kind.endswith("]")


def encode(column: pa.ChunkedArray, kind: PgType, *, binary: bool) -> Encoded:
    """Return the values of a column, as text or in binary form."""
    if kind.item is not None:
        return _arrays(column, kind.item, binary=binary)
    values = _plain(column, kind)
    table = _BINARY if binary else _TEXT
    encoder = table.get(kind.oid, _as_text)
    return [None if value is None else encoder(value) for value in values]


def _arrays(column: pa.ChunkedArray, item: PgType, *, binary: bool) -> Encoded:
    write = _array_binary if binary else _array_text
    found: Encoded = []
    for chunk in column.chunks:
        elements = iter(encode(pa.chunked_array([chunk.flatten()]), item, binary=binary))
        lengths = pc.list_value_length(chunk).to_pylist()
        found += [
            None if length is None else write(list(islice(elements, length)), item)
            for length in lengths
        ]
    return found


def _plain(column: pa.ChunkedArray, kind: PgType) -> Sequence[Any]:
    """Return values as the encoders take them: times as numbers, since there are more of them than Python has."""
    of = column.type
    if pa.types.is_timestamp(of):
        numbers = column.cast(pa.int64()).to_pylist()
        return [None if one is None else _to_us(one, of.unit) for one in numbers]
    if pa.types.is_date32(of):
        days: list[Any] = column.cast(pa.int32()).to_pylist()
        return days
    if pa.types.is_time64(of) and of.unit == "us":
        times: list[Any] = column.cast(pa.int64()).to_pylist()
        return times
    values: list[Any] = column.to_pylist()
    if kind.oid == FLOAT4:
        return [None if one is None else np.float32(one) for one in values]
    return values


def _to_us(number: int, unit: str) -> int:
    if abs(number) >= _INFINITE_US:
        return number
    return number // 1000 if unit == "ns" else number * _US_OF[unit]


# As text.


def _float_text(value: Any) -> bytes:
    if not math.isfinite(value):
        return b"NaN" if math.isnan(value) else b"Infinity" if value > 0 else b"-Infinity"
    return (
        (str(value) if isinstance(value, np.float32) else repr(value)).removesuffix(".0").encode()
    )


def _timestamp_text(us: int) -> bytes:
    if abs(us) >= _INFINITE_US:
        return b"infinity" if us > 0 else b"-infinity"
    seconds, micros = divmod(us, 1_000_000)
    text = str(np.datetime64(seconds, "s")).replace("T", " ")
    return _year_text(text + (f".{micros:06d}".rstrip("0") if micros else ""))


def _timestamptz_text(us: int) -> bytes:
    text = _timestamp_text(us)
    if text.endswith(b"infinity"):
        return text
    return text[:-3] + b"+00 BC" if text.endswith(b" BC") else text + b"+00"


def _date_text(days: int) -> bytes:
    if abs(days) >= _INFINITE_DAYS:
        return b"infinity" if days > 0 else b"-infinity"
    return _year_text(str(np.datetime64(days, "D")))


def _year_text(text: str) -> bytes:
    """Return a time with a year of numpy's, which has a year 0, as PostgreSQL writes it."""
    year, rest = text[:1] + text[1:].split("-", 1)[0], text[1:].split("-", 1)[1]
    number = int(year)
    if number > 0:
        return f"{number:04d}-{rest}".encode()
    return f"{1 - number:04d}-{rest} BC".encode()


def _time_text(us: int) -> bytes:
    seconds, micros = divmod(us, 1_000_000)
    text = f"{seconds // 3600:02d}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"
    return (text + (f".{micros:06d}".rstrip("0") if micros else "")).encode()


def _interval_text(value: Any) -> bytes:
    years, months = int(value.months / 12), math.fmod(value.months, 12)
    parts = [
        f"{int(count)} {word}{'' if abs(count) == 1 else 's'}"
        for count, word in ((years, "year"), (months, "mon"), (value.days, "day"))
        if count
    ]
    us = int(value.nanoseconds / 1000)
    if us or not parts:
        parts.append(("-" if us < 0 else "") + _time_text(abs(us)).decode())
    return " ".join(parts).encode()


def _as_text(value: Any) -> bytes:
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, bytes):
        return b"\\x" + value.hex().encode()
    if isinstance(value, Decimal):
        return format(value, "f").encode()
    if isinstance(value, list | dict | tuple):
        return json.dumps(_json_value(value), ensure_ascii=False, default=_json_default).encode()
    return str(value).encode()


def _json_value(value: Any) -> Any:
    """Return a nested value as JSON has it; maps come as lists of pairs."""
    if isinstance(value, dict):
        return {str(name): _json_value(one) for name, one in value.items()}
    if isinstance(value, list):
        if value and all(isinstance(one, tuple) for one in value):
            return {str(name): _json_value(one) for name, one in value}
        return [_json_value(one) for one in value]
    if isinstance(value, float) and not math.isfinite(value):
        return _float_text(value).decode()
    return value


def _json_default(value: Any) -> Any:
    if isinstance(value, dt.datetime | dt.date | dt.time):
        return value.isoformat()
    return value.hex() if isinstance(value, bytes) else str(value)


def _bool_text(value: bool) -> bytes:  # noqa: FBT001 - a value
    return b"t" if value else b"f"


_TEXT: dict[int, Callable[[Any], bytes]] = {
    BOOL: _bool_text,
    FLOAT4: _float_text,
    FLOAT8: _float_text,
    TIMESTAMP: _timestamp_text,
    TIMESTAMPTZ: _timestamptz_text,
    DATE: _date_text,
    TIME: _time_text,
    INTERVAL: _interval_text,
}


def _array_text(elements: Encoded, item: PgType) -> bytes:
    parts = [b"NULL" if one is None else _quoted(one, item) for one in elements]
    return b"{" + b",".join(parts) + b"}"


def _quoted(text: bytes, item: PgType) -> bytes:
    if item.oid in (BOOL, INT2, INT4, INT8, OID, NUMERIC, FLOAT4, FLOAT8):
        return text
    return b'"' + text.replace(b"\\", b"\\\\").replace(b'"', b'\\"') + b'"'


# In binary form.


def _numeric_binary(value: Any) -> bytes:
    sign, digits, exponent = Decimal(value).as_tuple()
    assert isinstance(exponent, int), "the engine has no NaN among decimals"
    number, scale = int("".join(map(str, digits))), max(0, -exponent)
    number *= 10 ** max(0, exponent)
    number *= 10 ** (-scale % 4)  # groups of four digits after the point
    groups: list[int] = []
    while number:
        number, group = divmod(number, 10_000)
        groups.insert(0, group)
    weight = len(groups) - 1 - (scale + 3) // 4
    while groups and not groups[-1]:
        groups.pop()
    head = struct.pack("!hhHh", len(groups), weight if groups else 0, 0x4000 if sign else 0, scale)
    return head + struct.pack(f"!{len(groups)}h", *groups)


def _timestamp_binary(us: int) -> bytes:
    return _time_binary("!q", us, _UNIX_TO_2000_S * 1_000_000, _INFINITE_US)


def _date_binary(days: int) -> bytes:
    return _time_binary("!i", days, _UNIX_TO_2000_S // 86_400, _INFINITE_DAYS)


def _time_binary(layout: str, number: int, year_2000: int, infinite: int) -> bytes:
    """Return a time as PostgreSQL has it: since 2000, with the largest and the smallest number for the infinities."""
    if abs(number) >= infinite:
        return struct.pack(layout, infinite if number > 0 else -infinite - 1)
    if number - year_2000 <= -infinite - 1:
        raise SqlError(
            "A date or time is before those that the binary form has. Ask for its text: column::VARCHAR.",
            sqlstate="22008",
        )
    return struct.pack(layout, number - year_2000)


def _interval_binary(value: Any) -> bytes:
    return struct.pack("!qii", int(value.nanoseconds / 1000), value.days, value.months)


_BINARY: dict[int, Callable[[Any], bytes]] = {
    BOOL: lambda value: b"\1" if value else b"\0",
    INT2: struct.Struct("!h").pack,
    INT4: struct.Struct("!i").pack,
    INT8: struct.Struct("!q").pack,
    OID: struct.Struct("!I").pack,
    FLOAT4: struct.Struct("!f").pack,
    FLOAT8: struct.Struct("!d").pack,
    BYTEA: bytes,
    NUMERIC: _numeric_binary,
    TIMESTAMP: _timestamp_binary,
    TIMESTAMPTZ: _timestamp_binary,
    DATE: _date_binary,
    TIME: struct.Struct("!q").pack,
    INTERVAL: _interval_binary,
    UUID: lambda value: bytes.fromhex(str(value).replace("-", "")),
}


def _array_binary(elements: Encoded, item: PgType) -> bytes:
    dimensions = (len(elements), 1) if elements else ()
    head = struct.pack("!iiI", 1 if elements else 0, int(None in elements), item.oid)
    parts = [head, struct.pack(f"!{len(dimensions)}i", *dimensions)]
    for one in elements:
        if one is None:
            parts.append(b"\xff\xff\xff\xff")
        else:
            parts += (struct.pack("!i", len(one)), one)
    return b"".join(parts)
