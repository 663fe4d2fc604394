"""Events and states as JSON, and from JSON values back to Python values, by type hints.

Values are written as ``client.json_values`` writes them, and sets as sorted lists.

What was written is what is read: a dataclass, nested as you like, of text, numbers, times, dates, durations,
Decimals, UUIDs, bytes, enums, lists, tuples, sets, mappings and unions with None; or a pydantic model.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import re
import types
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from functools import cache
from typing import Any, Union, get_args, get_origin, get_type_hints
from uuid import UUID

from millstream.client.json_values import plain_value
from millstream.errors import ConfigError

Decode = Callable[[Any], Any]
_DURATION = re.compile(
    r"(?P<sign>-?)P(?:(?P<d>\d+)D)?(?:T(?:(?P<h>\d+)H)?(?:(?P<m>\d+)M)?(?:(?P<s>[\d.]+)S)?)?"
)
_COLLECTIONS: Mapping[Any, type] = {
    list: list,
    tuple: tuple,
    set: set,
    frozenset: frozenset,
    Sequence: tuple,
}


def _plain(value: object) -> object:
    if isinstance(value, set | frozenset):
        return sorted(value, key=ENCODER.encode)
    return plain_value(value)


ENCODER = json.JSONEncoder(
    separators=(",", ":"), ensure_ascii=False, allow_nan=False, default=_plain
)


def _same(value: Any) -> Any:
    return value


def _duration(value: str) -> timedelta:
    found = _DURATION.fullmatch(value)
    if found is None:
        raise ValueError(f"{value!r} is no duration of ISO 8601")
    days, hours, minutes, seconds = (Decimal(found[part] or 0) for part in "dhms")
    whole = timedelta(
        microseconds=int((days * 86400 + hours * 3600 + minutes * 60 + seconds) * 10**6)
    )
    return -whole if found["sign"] else whole


_SCALARS: Mapping[Any, Decode] = {
    Any: _same,
    object: _same,
    str: _same,
    bool: _same,
    int: _same,
    float: float,
    type(None): _same,
    bytes: base64.b64decode,
    datetime: datetime.fromisoformat,
    date: date.fromisoformat,
    time: time.fromisoformat,
    timedelta: _duration,
    Decimal: Decimal,
    UUID: UUID,
    dict: _same,
    list: _same,
}


@cache
def decoder_of(hint: Any) -> Decode:
    """Return the function from JSON values to values of this type.

    Raises:
        ConfigError: there is none for the type.
    """
    if hint in _SCALARS:
        return _SCALARS[hint]
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return _union(hint, args)
    if origin is dict or origin is Mapping:
        return _mapping(*args)
    if origin in _COLLECTIONS or hint in _COLLECTIONS:
        return _collection(_COLLECTIONS[origin or hint], args)
    if isinstance(hint, type):
        return _class(hint)
    raise ConfigError(
        f"the type {hint!r} of a field is not one that events and states may have; use plain types, "
        "dataclasses and pydantic models, and Optional rather than other unions"
    )


def _union(hint: Any, args: Sequence[Any]) -> Decode:
    inner = [one for one in args if one is not type(None)]
    if len(inner) > 1:
        if all(one in (str, int, float, bool) for one in inner):
            return _same
        raise ConfigError(
            f"the type {hint!r} of a field is a union, and JSON does not say which of them was written; "
            "use one type, or one type or None"
        )
    decode = decoder_of(inner[0])
    return lambda value: None if value is None else decode(value)


def _mapping(key: Any, of: Any) -> Decode:
    decode, of_key = decoder_of(of), _key_decoder(key)
    return lambda value: {of_key(name): decode(one) for name, one in value.items()}


def _key_decoder(key: Any) -> Decode:
    return int if key is int else decoder_of(key)


def _collection(kind: type, args: Sequence[Any]) -> Decode:
    if kind is tuple and args and args[-1] is not Ellipsis:
        parts = [decoder_of(one) for one in args]
        return lambda value: tuple(decode(one) for decode, one in zip(parts, value, strict=True))
    decode = decoder_of(args[0]) if args else _same
    return lambda value: kind(map(decode, value))


def _class(kind: type) -> Decode:
    if issubclass(kind, Enum):
        return kind
    validate: Decode | None = getattr(kind, "model_validate", None)
    if validate is not None:
        return validate
    if dataclasses.is_dataclass(kind):
        return _dataclass(kind)
    raise ConfigError(
        f"{kind.__qualname__} is neither a dataclass nor a pydantic model; make it one, so that its values "
        "can be written as JSON and read again"
    )


def _dataclass(kind: Any) -> Decode:
    hints = get_type_hints(kind)
    fields = {
        field.name: decoder_of(hints[field.name])
        for field in dataclasses.fields(kind)
        if field.init
    }
    special = {name: decode for name, decode in fields.items() if decode is not _same}
    derived = {field.name for field in dataclasses.fields(kind) if not field.init}

    def decode(value: Mapping[str, Any]) -> Any:
        if not special and not derived:
            return kind(**value)
        return kind(
            **{
                name: special.get(name, _same)(one)
                for name, one in value.items()
                if name not in derived  # the class makes them itself
            }
        )

    return decode


def difference_of(read: Any, written: Any, place: str = "") -> str | None:
    """Say where a value that was read is not the one that was written; None if it is.

    A list for a tuple, and a number of another type, are no difference. Values are not named, as they may be
    personal.
    """
    if type(read) is type(written) and (names := _field_names(read)):
        pairs = ((getattr(read, one), getattr(written, one), f"{place}.{one}") for one in names)
    elif isinstance(read, list | tuple) and isinstance(written, list | tuple):
        if len(read) != len(written):
            return f"{place or 'it'} has another length"
        pairs = ((*both, f"{place}[]") for both in zip(read, written, strict=True))
    elif isinstance(read, Mapping) and isinstance(written, Mapping):
        if {*map(_typed, read)} != {*map(_typed, written)}:
            return f"{place or 'it'} has other keys"
        pairs = ((one, written[key], f"{place}[]") for key, one in read.items())
    elif _is_equal(read, written):
        return None
    else:
        return (
            f"{place or 'it'} is a {type(written).__name__}, and is read as a {type(read).__name__}"
            + (" of another value" if type(read) is type(written) else "")
        )
    return next(filter(None, (difference_of(*one) for one in pairs)), None)


def _field_names(value: Any) -> Sequence[str]:
    """Return the names of the fields of a dataclass or a model; of others none."""
    model = getattr(type(value), "__pydantic_fields__", None)
    if model is not None:
        return (*model, *(getattr(value, "model_extra", None) or ()))
    if dataclasses.is_dataclass(value):
        return [field.name for field in dataclasses.fields(value) if field.init]
    return ()


def _typed(key: Any) -> tuple[bool, Any]:
    return isinstance(key, bool), key


def _is_equal(one: Any, other: Any) -> bool:
    if isinstance(one, bool) is not isinstance(other, bool):
        return False
    if isinstance(one, datetime) and isinstance(other, datetime) and one.tzinfo and other.tzinfo:
        # Between time zones Python calls what is in the hour that comes twice never equal.
        return one.astimezone(UTC) == other.astimezone(UTC)
    return bool(one == other)
