"""One value at a time: what is good, as the plain value that its column takes, and why not.

This is the definition of what a topic's values may be. It is slow beside decoding in blocks
(`json_values.py`), which is why it is asked only about what that could not vouch for, and for
shapes that Arrow cannot read. Avro values, and values that a program holds, are judged by it too:
where JSON has text for a time, a datetime is as good.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from decimal import Context, Decimal
from enum import Enum
from typing import Any
from uuid import UUID

from millstream.kernels.decode.checks import Check
from millstream.kernels.decode.fields import Field, Kind, ListOf, MapOf, Scalar, Shape, StructOf

REASON_CHARACTERS_MAX = 100
_SHOWN_CHARACTERS_MAX = 40
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

_WANTED: dict[Kind, str] = {
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


class Fault(Exception):
    """Why a value does not fit. ``path`` leads to the place, outermost first."""

    def __init__(self, what: str, value: Any = None, *, shown: bool = True) -> None:
        super().__init__(what)
        self.what = what
        self.value = value
        self.shown = shown
        self.path = ""

    def within(self, step: str) -> Fault:
        """Say that the place lies within ``step``."""
        self.path = step + (f".{self.path}" if self.path and self.path[0] != "[" else self.path)
        return self

    def reason(self) -> str:
        """Give the sentence: ``field 'age' is -3: must be >= 0``."""
        if not self.path:
            return cut(self.what, REASON_CHARACTERS_MAX)
        if not self.shown:
            return cut(f"field {self.path!r} {self.what}", REASON_CHARACTERS_MAX)
        seen = cut(_as_text(self.value), _SHOWN_CHARACTERS_MAX)
        return cut(f"field {self.path!r} is {seen}: {self.what}", REASON_CHARACTERS_MAX)


class _Repeated(dict[str, Any]):
    """A JSON object in which names occur twice; ``names`` are they."""

    names: frozenset[str] = frozenset()


@dataclass(frozen=True)
class RowReader:
    """Reads one value after another.

    ``by_name``: objects name their fields as columns are named, not as the topic's values do; so
    it is with what a program holds.
    """

    by_name: bool = False

    def read(self, fields: tuple[Field, ...], value: Any) -> dict[str, Any]:
        """Give the plain value of each field.

        Raises:
            Fault: one of them does not fit.
        """
        if not isinstance(value, Mapping):
            raise Fault(f"the value is {_kind_of(value)}, not an object")
        return {field.name: self._member(field, value) for field in fields}

    def _member(self, field: Field, value: Mapping[str, Any]) -> Any:
        key = field.name if self.by_name else field.key
        if isinstance(value, _Repeated) and key in value.names:
            raise Fault("is given twice", shown=False).within(key)
        if key not in value:
            if field.required:
                raise Fault("is missing", shown=False).within(key)
            return field.default
        found = value[key]
        if found is None:
            if not field.takes_null:
                raise Fault("is null", shown=False).within(key)
            return None
        try:
            return self.value(field.form, found)
        except Fault as fault:
            raise fault.within(key) from None

    def value(self, shape: Shape, value: Any) -> Any:
        """Give the plain value of anything but null.

        Raises:
            Fault: it does not fit the shape.
        """
        if self.by_name and isinstance(value, Enum):
            value = value.value
        if isinstance(shape, Scalar):
            plain = _READERS[shape.kind](value)
            if shape.zoned and not _has_zone(value):
                raise Fault("names no offset from UTC", value)
            if shape.checks:
                _check(shape.checks, plain, value)
            return plain
        match shape:
            case StructOf(fields):
                return self._struct(fields, value)
            case ListOf():
                return self._list(shape, value)
            case MapOf():
                return self._map(shape, value)

    def _list(self, shape: ListOf, value: Any) -> list[Any]:
        if not isinstance(value, list | tuple):
            raise Fault("not a list", value)
        _check(shape.checks, value, value)
        return [
            self._element(f"[{n}]", shape.item, v, null=shape.null) for n, v in enumerate(value)
        ]

    def _map(self, shape: MapOf, value: Any) -> list[dict[str, Any]]:
        if not isinstance(value, Mapping):
            raise Fault("not an object", value)
        if isinstance(value, _Repeated):
            raise Fault(f"has {min(value.names)!r} twice", shown=False)
        _check(shape.checks, value, value)
        return [
            {
                "key": _text(key),
                "value": self._element(f"[{key!r}]", shape.value, v, null=shape.null),
            }
            for key, v in value.items()
        ]

    def _struct(self, fields: tuple[Field, ...], value: Any) -> dict[str, Any]:
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            value = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        elif hasattr(value, "model_fields_set"):
            value = dict(value)
        if not isinstance(value, Mapping):
            raise Fault("not an object", value)
        return {field.name: self._member(field, value) for field in fields}

    def _element(self, step: str, shape: Shape, value: Any, *, null: bool) -> Any:
        if value is None:
            if not null:
                raise Fault("is null", shown=False).within(step)
            return None
        try:
            return self.value(shape, value)
        except Fault as fault:
            raise fault.within(step) from None


def parse_json(value: bytes | None) -> Any:
    """Parse a JSON value, with decimals exact and names that occur twice noted.

    Raises:
        Fault: it is none.
    """
    if value is None:
        raise Fault("the value is null")
    try:
        return _JSON.decode(value.decode())
    except UnicodeDecodeError as error:
        raise Fault(f"the value is not UTF-8 at byte {error.start}") from None
    except json.JSONDecodeError as error:
        raise Fault(f"the value is not JSON: {error.msg} at character {error.pos}") from None
    except (ValueError, RecursionError, ArithmeticError) as error:
        raise Fault(f"the value is not JSON that can be read: {error}") from None


def cut(text: str, characters_max: int) -> str:
    """Shorten a text to a number of characters, with an ellipsis where something was left out."""
    text = text.replace("\n", " ")
    return text if len(text) <= characters_max else text[: characters_max - 1] + "…"


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) == len(pairs):
        return found
    seen: set[str] = set()
    repeated = _Repeated(found)
    repeated.names = frozenset(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
    return repeated


_JSON = json.JSONDecoder(parse_float=Decimal, object_pairs_hook=_object)


def _check(checks: tuple[Check, ...], plain: Any, given: Any) -> None:
    for check in checks:
        if not check.holds(plain):
            raise Fault(check.demand, given)


def _as_text(value: Any) -> str:
    """Show a value as JSON has it, as far as it is JSON."""
    if isinstance(value, float | Decimal):
        return str(value)
    return json.dumps(value, ensure_ascii=False, default=str)


def _kind_of(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true or false"
    for kind, name in ((str, "text"), (list, "a list"), (int | float | Decimal, "a number")):
        if isinstance(value, kind):
            return name
    return f"a {type(value).__name__}"


# ── kinds of single values ──────────────────────────────────────────────────────────────────────


def _reader(kind: Kind, read: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Wrap a reader that gives None, or fails, for what it cannot read."""

    def reader(value: Any) -> Any:
        try:
            plain = read(value)
        except (ValueError, OverflowError, ArithmeticError, binascii.Error):
            plain = None
        if plain is None:
            raise Fault(_WANTED[kind], value)
        return plain

    return reader


def _whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise Fault(_WANTED["int"], value)
    if not _INT_MIN <= value <= _INT_MAX:
        raise Fault("does not fit into 64 bits", value)
    return value


def _float(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float | Decimal):
        return None
    number = float(value)
    if math.isinf(number) and not isinstance(value, float):
        raise Fault("too large for a number of 64 bits", value)
    return number


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise Fault(_WANTED["str"], value)
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise Fault("not valid Unicode", ascii(value)) from None
    return value


def _datetime(value: Any) -> datetime | None:
    if isinstance(value, str):
        if not _DATETIME.fullmatch(value):
            if _DATETIME.match(value) and re.search(r"\.\d{7,}", value):
                raise Fault("has more than six digits of a second", value)
            return None
        value = datetime.fromisoformat(value)
    if not isinstance(value, datetime):
        return None
    return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


def _has_zone(value: Any) -> bool:
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
            raise Fault("has more than six digits of a second", value)
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
        raise Fault("has more than 29 digits before the point", value)
    exponent = number.as_tuple().exponent
    assert isinstance(exponent, int), "a finite number has one"
    too_many = -_DECIMAL_PLACES - exponent
    if too_many > 0 and any(number.as_tuple().digits[-too_many:]):
        raise Fault(f"has more than {_DECIMAL_PLACES} decimal places", value)
    return number.quantize(_UNIT, context=_EXACT)


def _bytes(value: Any) -> bytes | None:
    if isinstance(value, bytes):
        return value
    return base64.b64decode(value, validate=True) if isinstance(value, str) else None


def _uuid(value: Any) -> str | None:
    if isinstance(value, UUID):
        return str(value)
    return value.lower() if isinstance(value, str) and _UUID.fullmatch(value) else None


_READERS: dict[Kind, Callable[[Any], Any]] = {
    "int": _whole,
    "float": _reader("float", _float),
    "bool": _reader("bool", lambda value: value if isinstance(value, bool) else None),
    "str": _text,
    "datetime": _reader("datetime", _datetime),
    "date": _reader("date", _date),
    "time": _reader("time", _time),
    "timedelta": _reader("timedelta", _timedelta),
    "decimal": _reader("decimal", _decimal),
    "bytes": _reader("bytes", _bytes),
    "uuid": _reader("uuid", _uuid),
}
