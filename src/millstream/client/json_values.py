"""From Python values to JSON values that schemas of topics read back: as the same value, or an error.

Times and dates are ISO 8601, a Decimal and a UUID are text, a duration is ISO 8601's ``PT90.5S``, bytes
are base64, an enum its value; a dataclass or a pydantic model is an object of its fields, under the
names that the model reads.
"""

from __future__ import annotations

import base64
import dataclasses
import json
from collections.abc import Callable, Mapping
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from types import UnionType
from typing import Any
from uuid import UUID

import numpy as np


def plain_value(value: object) -> object:
    """Return the JSON form of a value; ``json`` calls this for each value that it does not know.

    Raises:
        TypeError: there is no JSON form that is read back as this value.
    """
    fields = getattr(type(value), "__pydantic_fields__", None)
    if isinstance(fields, dict):
        return _model(value, fields)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    for kind, written in _WRITTEN:
        if isinstance(value, kind):
            return written(value)
    raise TypeError(f"a value of type {type(value).__name__} has no form in JSON")


ENCODER = json.JSONEncoder(
    separators=(",", ":"), ensure_ascii=False, allow_nan=False, default=plain_value
)


def _time(value: date | time | timedelta) -> str | None:
    if value != value:  # noqa: PLR0124 - as pandas' NaT is not
        return None
    if getattr(value, "nanosecond", 0) or getattr(value, "nanoseconds", 0):
        raise TypeError(f"{value} has nanoseconds, and times have microseconds")
    if isinstance(value, timedelta):
        return _duration(value)
    if isinstance(value, time) and value.tzinfo is not None:
        raise TypeError(f"the time of day {value} has a time zone, and a schema's has none")
    if isinstance(value, datetime):
        offset = value.utcoffset()
        if offset is not None and offset % timedelta(minutes=1):
            value = value.astimezone(UTC)  # in text an offset has minutes
    return value.isoformat()


def _decimal(value: Decimal) -> str:
    if not value.is_finite():
        raise TypeError(f"the Decimal {value} is no number")
    return str(value)


def _duration(value: timedelta) -> str:
    microseconds = value // timedelta(microseconds=1)
    seconds, rest = divmod(abs(microseconds), 1_000_000)
    sign = "-" if microseconds < 0 else ""
    return f"{sign}PT{seconds}{f'.{rest:06}' if rest else ''}S"


def _model(value: Any, fields: Mapping[str, Any]) -> dict[str, object]:
    found: dict[str, object] = {}
    for name, info in fields.items():
        alias = info.validation_alias or info.alias
        for first in getattr(alias, "choices", ())[:1]:
            alias = first
        if alias is not None and not isinstance(alias, str):
            raise TypeError(f"the field {name!r} of {type(value).__name__} is read along a path")
        found[alias or name] = getattr(value, name)
    return found | (getattr(value, "model_extra", None) or {})


_WRITTEN: tuple[tuple[type | UnionType, Callable[[Any], object]], ...] = (
    (date | time | timedelta, _time),
    (Decimal, _decimal),
    (UUID, str),
    (bytes | bytearray | memoryview, lambda value: base64.b64encode(value).decode()),
    (Enum, lambda value: value.value),
    (np.generic, lambda value: value.item()),
    (Mapping, dict),
)
