"""Single values, one at a time: from what JSON, Avro or a program has to what a column takes.

Each reader takes only what the value is meant to be, and raises a DecodeError for everything else. Where
JSON has text for a time, a datetime is as good.
"""

from __future__ import annotations

import base64
import binascii
import math
import re
from collections.abc import Callable
from datetime import UTC, date, datetime, time, timedelta
from decimal import Context, Decimal
from typing import Any
from uuid import UUID

from millstream.kernels.decode.decode_error import DecodeError
from millstream.kernels.decode.fields import ScalarKind

_DECIMAL_PLACES = 9
_DECIMAL_DIGITS = 38
_UNIT = Decimal(1).scaleb(-_DECIMAL_PLACES)
_EXACT = Context(prec=_DECIMAL_DIGITS)
_INT_MIN, _INT_MAX = -(1 << 63), (1 << 63) - 1

# What Arrow's reader takes for a time too: a date, then hours, minutes, seconds, fraction, offset.
_DATETIME = re.compile(
    r"\d{4}-\d\d-\d\d([T ]\d\d(:\d\d(:\d\d(\.\d{1,6})?)?)?(Z|[+-]\d\d(:?\d\d)?)?)?", re.ASCII
)
_DATE = re.compile(r"\d{4}-\d\d-\d\d", re.ASCII)
_TIME = re.compile(r"\d\d:\d\d(:\d\d(\.\d{1,6})?)?", re.ASCII)
_DECIMAL = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
_UUID = re.compile(r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}", re.ASCII)
_DURATION = re.compile(
    r"([+-])?P(?:(\d+)W|(?:(\d+)D)?(?:T(?:(\d+)H)?(?:(\d+)M)?(?:(\d+(?:\.\d{1,6})?)S)?)?)", re.ASCII
)

_WANTED: dict[ScalarKind, str] = {
    "int": "not a whole number",
    "float": "not a number",
    "bool": "not true or false",
    "str": "not text",
    "datetime": "not a time such as 2026-01-31T12:00:00Z",
    "date": "not a date such as 2026-01-31",
    "time": "not a time of day such as 12:00:00",
    "timedelta": "not a duration such as PT90S, or seconds",
    "decimal": "not a decimal number",
    "bytes": "not base64 text",
    "uuid": "not a UUID",
}


def _reader(kind: ScalarKind, read: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Wrap a reader that returns None, or raises, for what it cannot read."""

    def reader(value: Any) -> Any:
        try:
            plain = read(value)
        except (ValueError, OverflowError, ArithmeticError, binascii.Error):
            plain = None
        if plain is None:
            raise DecodeError(_WANTED[kind], value)
        return plain

    return reader


def _whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise DecodeError(_WANTED["int"], value)
    if not _INT_MIN <= value <= _INT_MAX:
        raise DecodeError("does not fit into 64 bits", value)
    return value


def _float(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float | Decimal):
        return None
    number = float(value) + 0.0  # what JSON writes as -0 is 0 in Python, and -0.0 in Arrow
    if math.isinf(number) and not isinstance(value, float):
        raise DecodeError("too large for a number of 64 bits", value)
    return number


def text_of(value: Any) -> str:
    """Read text; DecodeError if it is none, or cannot be UTF-8."""
    if not isinstance(value, str):
        raise DecodeError(_WANTED["str"], value)
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise DecodeError("not valid Unicode", ascii(value)) from None
    return value


def _datetime(value: Any) -> datetime | None:
    if isinstance(value, str):
        if not _DATETIME.fullmatch(value):
            if _DATETIME.match(value) and re.search(r"\.\d{7,}", value):
                raise DecodeError("has more than six digits of a second", value)
            return None
        value = datetime.fromisoformat(value)
    if not isinstance(value, datetime):
        return None
    return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


def has_zone(value: Any) -> bool:
    """Whether a time that was read says its offset from UTC."""
    if isinstance(value, str):
        return datetime.fromisoformat(value).tzinfo is not None
    return isinstance(value, datetime) and value.tzinfo is not None


def _date(value: Any) -> date | None:
    if isinstance(value, str):
        return date.fromisoformat(value) if _DATE.fullmatch(value) else None
    return value if isinstance(value, date) and not isinstance(value, datetime) else None


def _time(value: Any) -> time | None:
    if isinstance(value, str):
        return time.fromisoformat(value) if _TIME.fullmatch(value) else None
    return value if isinstance(value, time) and value.tzinfo is None else None


def _timedelta(value: Any) -> timedelta | None:
    if isinstance(value, timedelta):
        return value
    if isinstance(value, int | float | Decimal) and not isinstance(value, bool):
        microseconds = Decimal(str(value)) * 1_000_000
        if microseconds != microseconds.to_integral_value():
            raise DecodeError("has more than six digits of a second", value)
        return timedelta(microseconds=int(microseconds))
    found = _DURATION.fullmatch(value) if isinstance(value, str) else None
    if found is None or value[-1] in "PT":
        return None
    sign, weeks, days, hours, minutes, seconds = found.groups(default="")
    whole, _, fraction = seconds.partition(".")
    length = timedelta(
        weeks=int(weeks or 0),
        days=int(days or 0),
        hours=int(hours or 0),
        minutes=int(minutes or 0),
        seconds=int(whole or 0),
        microseconds=int(fraction.ljust(6, "0") or 0),
    )
    return -length if sign == "-" else length


def _decimal(value: Any) -> Decimal | None:
    if isinstance(value, bool) or not isinstance(value, int | str | Decimal):
        return None
    if isinstance(value, str) and not _DECIMAL.fullmatch(value):
        return None
    number = Decimal(value)
    if not number.is_finite():
        return None
    if number and number.adjusted() >= _DECIMAL_DIGITS - _DECIMAL_PLACES:
        raise DecodeError("has more than 29 digits before the point", value)
    exponent = number.as_tuple().exponent
    assert isinstance(exponent, int), "a finite number has one"
    too_many = -_DECIMAL_PLACES - exponent
    if too_many > 0 and any(number.as_tuple().digits[-too_many:]):
        raise DecodeError(f"has more than {_DECIMAL_PLACES} decimal places", value)
    return number.quantize(_UNIT, context=_EXACT)


def _bytes(value: Any) -> bytes | None:
    if isinstance(value, bytes):
        return value
    return base64.b64decode(value, validate=True) if isinstance(value, str) else None


def _uuid(value: Any) -> str | None:
    if isinstance(value, UUID):
        return str(value)
    return value.lower() if isinstance(value, str) and _UUID.fullmatch(value) else None


READERS: dict[ScalarKind, Callable[[Any], Any]] = {
    "int": _whole,
    "float": _reader("float", _float),
    "bool": _reader("bool", lambda value: value if isinstance(value, bool) else None),
    "str": text_of,
    "datetime": _reader("datetime", _datetime),
    "date": _reader("date", _date),
    "time": _reader("time", _time),
    "timedelta": _reader("timedelta", _timedelta),
    "decimal": _reader("decimal", _decimal),
    "bytes": _reader("bytes", _bytes),
    "uuid": _reader("uuid", _uuid),
}
