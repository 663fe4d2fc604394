"""From values of JSON to values of a table's columns: as the same value, or an error that says why not.

Databases make many values fit: they round 1.5 in a column of whole numbers, cut off digits of a second, spaces, and texts that
are too long. Here each is refused before it comes to that.

==============  ===========================================  ===============================================
column          takes                                        refuses
==============  ===========================================  ===============================================
whole numbers   numbers and texts that are whole, in range   1.5, text that is no number
decimals        numbers and texts with so many digits        more digits than the column has
floats          numbers, rounded as floats are               what is beyond the largest float
text            text; other values as JSON                   more than it holds, halves of surrogate pairs
JSON            any value
times           ISO 8601; times of a zone in UTC             digits of a second that it does not keep
bytes           base64, as ``.to(topic)`` writes them        more than it holds
==============  ===========================================  ===============================================

Source: RFC 8259 (JSON); ISO 8601; ``docs/types.md``, for what a topic has of each type.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Callable, Collection
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any, TypeAlias
from uuid import UUID

from millstream.connectors.sinks.connector import WrittenNumber
from millstream.connectors.sinks.json_text import json_text

ColumnValue: TypeAlias = "bool | int | str | bytes"
ToColumn: TypeAlias = Callable[[Any], ColumnValue]

_FLOAT32_MAX = (
    3.4028235677973366e38  # what is below it is rounded to a float of 32 bits that is finite
)
_EXPONENT_MAX = 400  # of numbers that are written out: beyond it no column has room
_PLAIN_NUMBER = re.compile(r"[+-]?[0-9]{1,400}(?:\.[0-9]{1,400})?", re.ASCII)
_DATE = re.compile(r"([0-9]{4})-([0-9]{2})-([0-9]{2})", re.ASCII)
_TIME = re.compile(r"([0-9]{2}):([0-9]{2})(?::([0-9]{2})(?:[.,]([0-9]+))?)?", re.ASCII)
_ZONE = re.compile(r"(?:([Zz])|([+-])([0-9]{2}):?([0-9]{2}))", re.ASCII)
_MOMENT = re.compile(rf"{_DATE.pattern}[Tt ]{_TIME.pattern}{_ZONE.pattern}?", re.ASCII)


def shown_value(value: object) -> str:
    """Return a value as a reason shows it: not much of it."""
    text = value.text if isinstance(value, WrittenNumber) else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def plain_number(value: Any) -> str:
    """Return a number, or a text that is one, with its digits alone: no exponent, no zeros at the end.

    Raises:
        ValueError: it is none.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if isinstance(value, WrittenNumber):
        number = Decimal(value.text)
        if number and abs(number.adjusted()) > _EXPONENT_MAX:
            raise ValueError(f"{shown_value(value)} has more digits than a column")
    elif isinstance(value, str) and _PLAIN_NUMBER.fullmatch(value):
        number = Decimal(value)
    else:
        raise ValueError(f"{shown_value(value)} is no number")
    text = format(number, "f")
    if "." in text:
        text = text.rstrip("0").rstrip(".")
    return "0" if text in ("-0", "") else text


def whole_numbers(low: int, high: int, *, bools: bool = False) -> ToColumn:
    """Return what takes whole numbers from low to high, both included; also truth values, as 1 and 0, if so asked."""

    def to_column(value: Any) -> ColumnValue:
        if bools and isinstance(value, bool):
            return int(value)
        if type(value) is int and low <= value <= high:
            return value
        text = plain_number(value)
        if "." in text:
            raise ValueError(f"{shown_value(value)} is no whole number")
        number = int(text)
        if not low <= number <= high:
            raise ValueError(f"{shown_value(value)} is not from {low} to {high}")
        return number

    return to_column


def decimals(precision: int, scale: int) -> ToColumn:
    """Return what takes numbers of ``precision`` digits, ``scale`` of them behind the point."""

    def to_column(value: Any) -> ColumnValue:
        text = plain_number(value)
        whole, _, fraction = text.lstrip("-").partition(".")
        if len(fraction) > scale or len(whole.lstrip("0")) > precision - scale:
            raise ValueError(
                f"{shown_value(value)} has more than {precision - scale} digits before the point or {scale} behind it"
            )
        return text

    return to_column


def floats(*, bits: int) -> ToColumn:
    """Return what takes numbers, of which a float of 32 or 64 bits is written."""

    def to_column(value: Any) -> ColumnValue:
        text = value.text if isinstance(value, WrittenNumber) else plain_number(value)
        try:
            size = abs(float(text))
        except OverflowError:
            size = float("inf")
        if size == float("inf") or (bits == 32 and size >= _FLOAT32_MAX):
            raise ValueError(f"{shown_value(value)} is beyond the largest float of {bits} bits")
        return text

    return to_column


def truth_value(value: Any) -> ColumnValue:
    """Take true and false."""
    if isinstance(value, bool):
        return value
    raise ValueError(f"{shown_value(value)} is neither true nor false")


def texts(
    *,
    characters_max: int | None = None,
    bytes_max: int | None = None,
    keeps_spaces: bool = True,
    nuls: bool = True,
) -> ToColumn:
    """Return what takes text as it is, and other values as JSON.

    Args:
        keeps_spaces: Whether the column keeps spaces at the end of a text.
        nuls: Whether it takes the character NUL.
    """

    def to_column(value: Any) -> ColumnValue:
        text = value if isinstance(value, str) else json_text(value)
        _check_length(text, characters_max, bytes_max)
        if not keeps_spaces and text.endswith(" "):
            raise ValueError("its spaces at the end would be lost: the column keeps none")
        if not nuls and "\0" in text:
            raise ValueError("it has the character NUL, which the column does not take")
        return text

    return to_column


def _check_length(text: str, characters_max: int | None, bytes_max: int | None) -> None:
    if characters_max is not None and len(text) > characters_max:
        raise ValueError(
            f"it has {len(text):,} characters, and the column has room for {characters_max:,}"
        )
    size = _utf8_size(text)
    if bytes_max is not None and size > bytes_max:
        raise ValueError(f"it has {size:,} bytes, and the column has room for {bytes_max:,}")


def _utf8_size(text: str) -> int:
    if text.isascii():
        return len(text)
    try:
        return len(text.encode())
    except UnicodeEncodeError:
        raise ValueError("it has half of a surrogate pair, which is no character") from None


def json_documents(value: Any) -> ColumnValue:
    """Take any value."""
    text = json_text(value)
    _utf8_size(text)
    return text


def labels(known: Collection[str], *, many: bool) -> ToColumn:
    """Return what takes one of some texts, or ``many`` of them with commas between."""

    def to_column(value: Any) -> ColumnValue:
        parts = value.split(",") if many and isinstance(value, str) and value else [value]
        if (many and value == "") or all(part in known for part in parts):
            return str(value)
        raise ValueError(f"{shown_value(value)} is none of {', '.join(sorted(known))}"[:300])

    return to_column


def byte_strings(*, bytes_max: int | None = None, bytes_exactly: int | None = None) -> ToColumn:
    """Return what takes base64."""

    def to_column(value: Any) -> ColumnValue:
        try:
            found = base64.b64decode(value, validate=True) if isinstance(value, str) else None
        except (binascii.Error, ValueError):
            found = None
        if found is None:
            raise ValueError(f"{shown_value(value)} is no base64, as which bytes are written")
        return checked_bytes(found, bytes_max, bytes_exactly)

    return to_column


def checked_bytes(found: bytes, bytes_max: int | None, bytes_exactly: int | None) -> bytes:
    """Return bytes that a column has room for.

    Raises:
        ValueError: it has none.
    """
    if bytes_exactly is not None and len(found) != bytes_exactly:
        raise ValueError(f"it has {len(found):,} bytes, and the column has {bytes_exactly:,}")
    if bytes_max is not None and len(found) > bytes_max:
        raise ValueError(f"it has {len(found):,} bytes, and the column has room for {bytes_max:,}")
    return found


def uuids(value: Any) -> ColumnValue:
    """Take UUIDs."""
    try:
        return str(UUID(value))
    except (ValueError, AttributeError, TypeError):
        raise ValueError(f"{shown_value(value)} is no UUID") from None


def dates(value: Any) -> ColumnValue:
    """Take ``2026-01-31``."""
    found = _DATE.fullmatch(value) if isinstance(value, str) else None
    if found is not None:
        try:
            return date(*map(int, found.groups())).isoformat()
        except ValueError:
            pass
    raise ValueError(f"{shown_value(value)} is no date such as 2026-01-31")


def times_of_day(digits: int) -> ToColumn:
    """Return what takes ``13:05:01.5``, with up to so many digits of a second."""

    def to_column(value: Any) -> ColumnValue:
        found = _TIME.fullmatch(value) if isinstance(value, str) else None
        if found is None or int(found[1]) > 23 or int(found[2]) > 59 or int(found[3] or 0) > 59:
            raise ValueError(f"{shown_value(value)} is no time such as 13:05:01.5")
        return f"{found[1]}:{found[2]}:{found[3] or '00'}{_fraction(value, found[4], digits)}"

    return to_column


def moments(digits: int, *, zone: bool) -> ToColumn:
    """Return what takes ``2026-01-31T13:05:01.5Z``; one of a zone becomes that of UTC.

    Args:
        digits: How many of a second the column keeps.
        zone: Whether a zone must be given; else what has none is written as it is.
    """

    def to_column(value: Any) -> ColumnValue:
        found = _MOMENT.fullmatch(value) if isinstance(value, str) else None
        if found is None:
            raise ValueError(f"{shown_value(value)} is no time such as 2026-01-31T13:05:01.5Z")
        moment = _moment(value, found)
        if moment.tzinfo is not None:
            try:
                moment = moment.astimezone(UTC)
            except OverflowError:
                raise ValueError(f"{value} is before the year 1 or after 9999") from None
        elif zone:
            raise ValueError(
                f"{value} has no zone, and the column is of times that have one: write …Z or …+02:00"
            )
        return f"{moment.replace(tzinfo=None).isoformat(' ')}{_fraction(value, found[7], digits)}"

    return to_column


def _moment(value: str, found: re.Match[str]) -> datetime:
    """Return a time without the digits of its second."""
    year, month, day, hour, minute = (int(found[place]) for place in range(1, 6))
    zone = None
    if found[8] is not None:
        zone = UTC
    elif found[9] is not None:
        offset = timedelta(hours=int(found[10]), minutes=int(found[11]))
        if offset >= timedelta(days=1):
            raise ValueError(f"{value} has a zone that is a day or more from UTC")
        zone = timezone(-offset if found[9] == "-" else offset)
    try:
        return datetime(year, month, day, hour, minute, int(found[6] or 0), tzinfo=zone)
    except ValueError as error:
        raise ValueError(f"{value} is no time: {error}") from None


def _fraction(value: str, given: str | None, digits: int) -> str:
    kept = (given or "").rstrip("0")
    if len(kept) > digits:
        raise ValueError(
            f"{shown_value(value)} has {len(kept)} digits of a second, and the column keeps {digits}"
        )
    return f".{kept}" if kept else ""
