"""One value at a time: the plain value that its column takes, or the error.

This is the definition of what a topic's values may be. It is slow compared with decoding in blocks
(`json_values.py`), so it reads only values that remain undecided there, and shapes that Arrow cannot read. It
validates Avro values, and values in a program, too. Single values are read in `scalars.py`; `decode_error.py`
has the errors.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from enum import Enum
from typing import Any

from millstream.kernels.decode.constraints import Constraint
from millstream.kernels.decode.decode_error import DecodeError
from millstream.kernels.decode.fields import Field, ListOf, MapOf, Scalar, Shape, StructOf
from millstream.kernels.decode.scalars import READERS, has_zone, text_of


class _Repeated(dict[str, Any]):
    """A JSON object in which names occur twice; ``names`` are they."""

    names: frozenset[str] = frozenset()


@dataclass(frozen=True)
class RowReader:
    """Reads one value after another.

    ``by_name``: objects name their fields as the columns are named, as in a program, and not as in the
    topic's values.
    """

    by_name: bool = False

    def read(self, fields: tuple[Field, ...], value: Any) -> dict[str, Any]:
        """Return the plain value of each field.

        Raises:
            DecodeError: one of them does not fit.
        """
        if not isinstance(value, Mapping):
            raise DecodeError(f"the value is {_kind_of(value)}, not an object")
        return {field.name: self._member(field, value) for field in fields}

    def _member(self, field: Field, value: Mapping[str, Any]) -> Any:
        key = field.name if self.by_name else field.key
        if isinstance(value, _Repeated) and key in value.names:
            raise DecodeError("is given twice", shown=False).within(key)
        if key not in value:
            if field.required:
                raise DecodeError("is missing", shown=False).within(key)
            return field.default
        found = value[key]
        if found is None:
            if not field.takes_null:
                raise DecodeError("is null", shown=False).within(key)
            return None
        try:
            return self.value(field.value_shape, found)
        except DecodeError as fault:
            raise fault.within(key) from None

    def value(self, shape: Shape, value: Any) -> Any:
        """Return the plain value of anything but null.

        Raises:
            DecodeError: it does not fit the shape.
        """
        if self.by_name and isinstance(value, Enum):
            value = value.value
        if isinstance(shape, Scalar):
            plain = READERS[shape.kind](value)
            if shape.zoned and not has_zone(value):
                raise DecodeError("names no offset from UTC", value)
            if shape.constraints:
                _check(shape.constraints, plain, value)
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
            raise DecodeError("not a list", value)
        _check(shape.constraints, value, value)
        return [
            self._element(f"[{n}]", shape.item, v, null=shape.null) for n, v in enumerate(value)
        ]

    def _map(self, shape: MapOf, value: Any) -> list[dict[str, Any]]:
        if not isinstance(value, Mapping):
            raise DecodeError("not an object", value)
        if isinstance(value, _Repeated):
            raise DecodeError(f"has {min(value.names)!r} twice", shown=False)
        _check(shape.constraints, value, value)
        return [
            {
                "key": text_of(key),
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
            raise DecodeError("not an object", value)
        return {field.name: self._member(field, value) for field in fields}

    def _element(self, step: str, shape: Shape, value: Any, *, null: bool) -> Any:
        if value is None:
            if not null:
                raise DecodeError("is null", shown=False).within(step)
            return None
        try:
            return self.value(shape, value)
        except DecodeError as fault:
            raise fault.within(step) from None


def parse_json(value: bytes | None) -> Any:
    """Parse a JSON value, with decimals exact and names that occur twice noted.

    Raises:
        DecodeError: it is none.
    """
    if value is None:
        raise DecodeError("the value is null")
    try:
        return _JSON.decode(value.decode())
    except UnicodeDecodeError as error:
        raise DecodeError(f"the value is not UTF-8 at byte {error.start}") from None
    except json.JSONDecodeError as error:
        raise DecodeError(f"the value is not JSON: {error.msg} at character {error.pos}") from None
    except (ValueError, RecursionError, ArithmeticError) as error:
        raise DecodeError(f"the value is not JSON that can be read: {error}") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) == len(pairs):
        return found
    seen: set[str] = set()
    repeated = _Repeated(found)
    repeated.names = frozenset(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
    return repeated


_JSON = json.JSONDecoder(parse_float=Decimal, object_pairs_hook=_object)


def _check(checks: tuple[Constraint, ...], plain: Any, given: Any) -> None:
    for check in checks:
        if not check.holds(plain):
            raise DecodeError(check.requirement, given)


def _kind_of(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true or false"
    for kind, name in ((str, "text"), (list, "a list"), (int | float | Decimal, "a number")):
        if isinstance(value, kind):
            return name
    return f"a {type(value).__name__}"
