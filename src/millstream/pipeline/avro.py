"""Avro schemas as a pipeline declares them: where they are read from, and what fields they have."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from millstream.errors import ConfigError
from millstream.kernels.decode.avro_values import import_fastavro
from millstream.kernels.decode.constraints import Constraint
from millstream.kernels.decode.decode_error import DecodeError
from millstream.kernels.decode.fields import (
    Field,
    ListOf,
    MapOf,
    Scalar,
    ScalarKind,
    Shape,
    StructOf,
)
from millstream.kernels.decode.row_reader import RowReader

AvroSchema = Mapping[str, Any] | str | Path
"""A schema: as a mapping, as JSON text, or the path of a file."""

_KINDS: dict[str, ScalarKind] = {
    "boolean": "bool",
    "int": "int",
    "long": "int",
    "float": "float",
    "double": "float",
    "bytes": "bytes",
    "fixed": "bytes",
    "string": "str",
}
_LOGICAL: dict[str, ScalarKind] = {
    "timestamp-millis": "datetime",
    "timestamp-micros": "datetime",
    "local-timestamp-millis": "datetime",
    "local-timestamp-micros": "datetime",
    "date": "date",
    "time-millis": "time",
    "time-micros": "time",
    "decimal": "decimal",
    "uuid": "uuid",
}


def read_schema(given: AvroSchema, *, what: str) -> dict[str, Any]:
    """Read a schema of records. ``what`` names the topic in errors.

    Raises:
        ConfigError: there is none, or it is not a schema of records.
    """
    if isinstance(given, Path) or (isinstance(given, str) and not given.lstrip().startswith("{")):
        try:
            given = Path(given).read_text()
        except OSError as error:
            raise ConfigError(
                f"The Avro schema of {what} cannot be read from {str(given)!r}: {error.strerror}. "
                "Give a mapping, JSON text, or the path of a file."
            ) from error
    try:
        schema = json.loads(given) if isinstance(given, str) else dict(given)
        import_fastavro().parse_schema(schema)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"The Avro schema of {what} is not valid: {error}. Correct it."
        ) from error
    if schema.get("type") != "record":
        raise ConfigError(
            f"The Avro schema of {what} is of the type {schema.get('type')!r}. Give one of records."
        )
    found: dict[str, Any] = schema
    return found


def read_schemas(
    given: Mapping[int, AvroSchema] | str | Path, *, what: str
) -> dict[int, dict[str, Any]]:
    """Read schemas by number: a mapping, or a folder with a file ``<number>.avsc`` for each.

    Raises:
        ConfigError: there is none, or one is not a schema of records.
    """
    if isinstance(given, str | Path):
        files = Path(given).glob("*.avsc")
        given = {int(path.stem): path for path in files if path.stem.isdecimal()}
    if not given or not all(isinstance(number, int) for number in given):
        raise ConfigError(
            f"{what} has no Avro schemas by number. Give a mapping of numbers to schemas, or a "
            "folder with files such as 17.avsc."
        )
    return {number: read_schema(schema, what=what) for number, schema in given.items()}


def fields_of_avro(schema: Mapping[str, Any], *, what: str) -> tuple[Field, ...]:
    """Give all the fields of a schema of records.

    Raises:
        ConfigError: one has a type that cannot be a column.
    """
    return _Types(what, {}).fields(schema)


class _Types:
    """From Avro's types to shapes. ``named`` are the types defined so far, by name."""

    def __init__(self, what: str, named: dict[str, Shape]) -> None:
        self._what = what
        self._named = named

    def fields(self, record: Mapping[str, Any]) -> tuple[Field, ...]:
        return tuple(self._field(field) for field in record["fields"])

    def _field(self, field: Mapping[str, Any]) -> Field:
        shape, null = self._nullable(field["type"], field["name"])
        default = None
        required = "default" not in field and not null
        if field.get("default") is not None:
            try:
                default = RowReader().value(shape, field["default"])
            except DecodeError:
                required = True  # bytes and logical types have defaults in a notation of their own
        return Field.of(field["name"], shape, required=required, default=default, null=null)

    def _nullable(self, kind: Any, name: str) -> tuple[Shape, bool]:
        if not isinstance(kind, list):
            return self._shape(kind, name), False
        members = [each for each in kind if each != "null"]
        if len(members) != 1:
            raise self._unknown(kind, name)
        return self._shape(members[0], name), "null" in kind

    def _shape(self, kind: Any, name: str) -> Shape:
        if isinstance(kind, str):
            if kind in _KINDS:
                return Scalar(_KINDS[kind])
            if kind in self._named:
                return self._named[kind]
            raise self._unknown(kind, name)
        if kind.get("logicalType") in _LOGICAL:
            return Scalar(_LOGICAL[kind["logicalType"]])
        shape = self._compound(kind, name)
        if "name" in kind:
            space = f"{kind['namespace']}." if "namespace" in kind else ""
            self._named |= {kind["name"]: shape, f"{space}{kind['name']}": shape}
        return shape

    def _compound(self, kind: Mapping[str, Any], name: str) -> Shape:
        match kind["type"]:
            case "record":
                return StructOf(self.fields(kind))
            case "enum":
                return Scalar("str", (Constraint("one_of", tuple(kind["symbols"])),))
            case "array":
                return ListOf(*self._nullable(kind["items"], name))
            case "map":
                return MapOf(*self._nullable(kind["values"], name))
            case inner:
                return self._shape(inner, name)

    def _unknown(self, kind: Any, name: str) -> ConfigError:
        return ConfigError(
            f"The Avro schema of {self._what} has the field {name!r} of the type {kind!r}, which "
            "cannot be a column. Give a class that leaves the field out."
        )
