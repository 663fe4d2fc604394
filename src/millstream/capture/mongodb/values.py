"""Documents as JSON. What a value becomes is the table in docs/capture-mongodb.md.

Two documents of a collection never have one key: what could be taken for another ``_id`` is MongoDB's Extended JSON,
which says its type. Source: MongoDB, "Extended JSON (v2)", its relaxed form.
"""

from __future__ import annotations

import base64
import json
import math
import re
import uuid
from collections.abc import Callable, Mapping
from datetime import date, timedelta
from typing import Any

from bson import DatetimeMS, Decimal128, Int64, MaxKey, MinKey, ObjectId, Regex, Timestamp
from bson.binary import UUID_SUBTYPE, Binary
from bson.code import Code
from bson.dbref import DBRef
from bson.json_util import CANONICAL_JSON_OPTIONS, RELAXED_JSON_OPTIONS, dumps, loads

_LIKE_AN_OBJECT_ID = re.compile("[0-9a-f]{24}")
_DAY_MS = 86_400_000
_CYCLE_DAYS = 146_097  # of 400 years, after which the calendar repeats itself


def row_of(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return a document as a row: its fields in their order, of which ``_id`` is the key."""
    return {
        name: key_value(value) if name == "_id" else json_value(value)
        for name, value in document.items()
    }


def key_value(value: Any) -> Any:
    """Return the JSON of an ``_id``, which no other ``_id`` of its collection has."""
    if isinstance(value, str):
        return {"$text": value} if _LIKE_AN_OBJECT_ID.fullmatch(value) else value
    if isinstance(value, float) and not math.isfinite(value):
        return {"$numberDouble": _float(value)}
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, ObjectId):
        return str(value)
    return json.loads(dumps(value, json_options=RELAXED_JSON_OPTIONS))


def stored_id(value: Any) -> str:
    """Return an ``_id`` as text from which :func:`parsed_id` makes it again, with its type."""
    return dumps({"_id": value}, json_options=CANONICAL_JSON_OPTIONS)


def parsed_id(text: str) -> Any:
    """Return the ``_id`` of :func:`stored_id`."""
    return loads(text, json_options=CANONICAL_JSON_OPTIONS)["_id"]


def json_value(value: Any) -> Any:
    """Return the JSON of a value; one of a type that is not known is an error.

    Raises:
        TypeError: it has such a type.
    """
    render = _RENDERERS.get(type(value))
    if render is not None:
        return render(value)
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, Mapping):
        return {name: json_value(one) for name, one in value.items()}
    if isinstance(value, list):
        return [json_value(one) for one in value]
    raise TypeError(f"a value has the type {type(value).__name__}, which capture does not know")


def _float(value: float) -> float | str:
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def moment(ms: int) -> str:
    """Return a date as ISO 8601 in UTC; years beyond 0 to 9999 have a sign and six digits or more."""
    day, rest = divmod(ms, _DAY_MS)
    cycles, day = divmod(day, _CYCLE_DAYS)
    found = date(1970, 1, 1) + timedelta(days=day)
    year = found.year + 400 * cycles
    shown = f"{year:04}" if 0 <= year <= 9999 else f"{year:+07}"
    second, milli = divmod(rest, 1000)
    clock = f"{second // 3600:02}:{second // 60 % 60:02}:{second % 60:02}.{milli:03}"
    return f"{shown}-{found.month:02}-{found.day:02}T{clock}Z"


def _binary(value: bytes) -> str:
    if isinstance(value, Binary) and value.subtype == UUID_SUBTYPE and len(value) == 16:
        return str(uuid.UUID(bytes=bytes(value)))
    return base64.b64encode(value).decode()


def _code(value: Code) -> Any:
    return {"code": str(value), "scope": json_value(value.scope)} if value.scope else str(value)


def _reference(value: DBRef) -> Any:
    return json_value(dict(value.as_doc()))


def _pattern(value: Regex[Any]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(dumps(value, json_options=RELAXED_JSON_OPTIONS))
    return dict(found["$regularExpression"])


_RENDERERS: dict[type, Callable[[Any], Any]] = {
    int: int,
    Int64: int,
    float: _float,
    ObjectId: str,
    Decimal128: str,
    DatetimeMS: lambda value: moment(int(value)),
    bytes: _binary,
    Binary: _binary,
    Timestamp: lambda value: {"t": value.time, "i": value.inc},
    Regex: _pattern,
    Code: _code,
    DBRef: _reference,
    MinKey: lambda _: {"minKey": 1},
    MaxKey: lambda _: {"maxKey": 1},
}
