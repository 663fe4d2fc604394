"""Protobuf values: messages of a schema that is known only while the job runs, as plain values by field name.

A value in Confluent's form says which message of the schema's file it is, by *message indexes*: their count, then the
index of the message in the file, of one nested in that, and so on, each a zigzag varint; the one byte 0 is the first.

=======================================  ==============================================================
in the message                           what becomes of it
=======================================  ==============================================================
a field that knows whether it was set    missing, if it was not: members of a ``oneof``, ``optional``,
                                         messages
any other field                          its value; 0, "" or false where it was not written
an enum                                  the name of its value
a map                                    an object, its keys as text
Timestamp, Duration, wrappers, Struct    a time, a duration, the value in it, JSON
=======================================  ==============================================================

Source: Confluent, "Formats, Serializers, and Deserializers" (wire format); protobuf.dev, "Field Presence".
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Collection
from datetime import UTC
from functools import lru_cache
from importlib import import_module
from typing import Any

from millstream.errors import ConfigError
from millstream.kernels.decode.decode_error import DecodeError
from millstream.schema_registry import RegisteredSchema

_NESTED_MAX = 100  # as deep as Protobuf reads messages
_VARINT_BITS_MAX = 35
_WELL_KNOWN = (
    "any",
    "api",
    "descriptor",
    "duration",
    "empty",
    "field_mask",
    "source_context",
    "struct",
    "timestamp",
    "type",
    "wrappers",
)
_Convert = Callable[[Any], Any]


class ProtobufReader:
    """Reads values of one schema. ``names`` are the fields that are wanted; None: all."""

    def __init__(self, schema: RegisteredSchema, names: Collection[str] | None) -> None:
        self._file = _file_of(schema)
        self._names = names
        self._messages: dict[tuple[int, ...], tuple[Any, _MessageReader]] = {}

    def read(self, datum: bytes) -> dict[str, Any]:
        """Return the fields of a value that begins with its message indexes.

        Raises:
            DecodeError: it is no message of the schema.
        """
        path, start = _message_path(datum)
        known = self._messages.get(path)
        if known is None:
            known = self._messages[path] = self._message(path)
        make, reader = known
        message = make()
        try:
            message.ParseFromString(datum[start:])
            lacks = message.FindInitializationErrors()  # of what an old file requires
            found = reader.read(message)
        except Exception as error:  # bytes of another schema raise all sorts of things
            raise DecodeError(f"the value is not Protobuf of its schema: {error}") from error
        if lacks:
            raise DecodeError(f"the value is not Protobuf of its schema: it lacks {lacks[0]}")
        return found

    def _message(self, path: tuple[int, ...]) -> tuple[Any, _MessageReader]:
        found, inner = self._file, list(self._file.message_types_by_name.values())
        for index in path:
            if index >= len(inner):
                raise DecodeError(
                    f"the value is of the message {list(path)}, which its schema does not have"
                )
            found = inner[index]
            inner = list(found.nested_types)
        factory = import_protobuf("message_factory")
        return factory.GetMessageClass(found), _MessageReader(found, self._names)


class _MessageReader:
    """Reads the fields of messages of one type."""

    def __init__(self, message: Any, names: Collection[str] | None = None) -> None:
        self._fields = [
            (field.name, field.has_presence, _converter(field))
            for field in message.fields
            if names is None or field.name in names
        ]

    def read(self, message: Any) -> dict[str, Any]:
        return {
            name: getattr(message, name) if convert is None else convert(getattr(message, name))
            for name, may_be_missing, convert in self._fields
            if not may_be_missing or message.HasField(name)
        }


def _converter(field: Any) -> _Convert | None:
    """Return what makes a plain value of a field; None: it is one."""
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        one = _single(field.message_type.fields_by_name["value"])
        return lambda entries: {
            _key(key): entries[key] if one is None else one(entries[key]) for key in entries
        }
    one = _single(field)
    if _is_repeated(field):
        return list if one is None else lambda values: [one(value) for value in values]
    return one


def _single(field: Any) -> _Convert | None:
    if field.enum_type is not None:
        names = {number: value.name for number, value in field.enum_type.values_by_number.items()}
        return lambda number: names.get(number, number)
    if field.message_type is None:
        return None
    special = _SPECIAL.get(field.message_type.full_name)
    return special or _Nested(field.message_type)


class _Nested:
    """Reads messages within messages; its reader is made when it is first needed, as a type may have itself as a field."""

    def __init__(self, message: Any) -> None:
        self._type = message
        self._reader: _MessageReader | None = None

    def __call__(self, message: Any) -> dict[str, Any]:
        if self._reader is None:
            self._reader = _MessageReader(self._type)
        return self._reader.read(message)


def _json(message: Any) -> Any:
    return import_protobuf("json_format").MessageToDict(message)


def _value_within(message: Any) -> Any:
    return message.value


_SPECIAL: dict[str, _Convert] = {
    "google.protobuf.Timestamp": lambda message: message.ToDatetime(UTC),
    "google.protobuf.Duration": lambda message: message.ToTimedelta(),
    **dict.fromkeys(
        ("google.protobuf.Struct", "google.protobuf.Value", "google.protobuf.ListValue"), _json
    ),
    **dict.fromkeys(
        (
            f"google.protobuf.{kind}Value"
            for kind in (
                "Double",
                "Float",
                "Int64",
                "UInt64",
                "Int32",
                "UInt32",
                "Bool",
                "String",
                "Bytes",
            )
        ),
        _value_within,
    ),
}


def _key(key: Any) -> str:
    if isinstance(key, bool):
        return "true" if key else "false"
    return str(key)


def _is_repeated(field: Any) -> bool:
    repeated = getattr(
        field, "is_repeated", None
    )  # not before protobuf 6.31; the other warns since
    return bool(field.label == field.LABEL_REPEATED if repeated is None else repeated)


@lru_cache(maxsize=1024)
def _file_of(schema: RegisteredSchema) -> Any:
    """Return the file of a schema, with all that it needs.

    Raises:
        DecodeError: it cannot be made: a value of it cannot be read.
    """
    pool = import_protobuf("descriptor_pool").DescriptorPool()
    proto = import_protobuf("descriptor_pb2").FileDescriptorProto
    well_known = _well_known_files()
    files = [(one.name, one.text) for one in schema.references]
    name = f"schema-{schema.number}.proto"
    added: set[str] = set()
    try:
        for file_name, text in (*files, (name, schema.text)):
            file = proto.FromString(base64.b64decode(text))
            file.name = file_name
            for needed in file.dependency:
                if needed in well_known and needed not in added:
                    _add_well_known(pool, needed, well_known, added)
            # What is left has the options of fields only, such as confluent/meta.proto; or a type cannot be found.
            _leave_out_missing(file, added)
            pool.Add(file)
            added.add(file_name)
        return pool.FindFileByName(name)
    except Exception as error:  # what a registry has is not always whole
        raise DecodeError(f"the Protobuf schema {schema.number} cannot be read: {error}") from error


def _add_well_known(pool: Any, name: str, files: dict[str, Any], added: set[str]) -> None:
    """Add a file of Protobuf's own, after those that it needs."""
    for needed in files[name].dependency:
        if needed not in added:
            _add_well_known(pool, needed, files, added)
    pool.Add(files[name])
    added.add(name)


def _leave_out_missing(file: Any, added: set[str]) -> None:
    kept = [name for name in file.dependency if name in added]
    if len(kept) < len(file.dependency):
        file.ClearField("dependency")
        file.dependency.extend(kept)
        file.ClearField("public_dependency")  # these count the dependencies
        file.ClearField("weak_dependency")


@lru_cache(maxsize=1)
def _well_known_files() -> dict[str, Any]:
    files = {}
    for name in _WELL_KNOWN:
        file = import_protobuf("descriptor_pb2").FileDescriptorProto()
        import_protobuf(f"{name}_pb2").DESCRIPTOR.CopyToProto(file)
        files[file.name] = file
    return files


def _message_path(datum: bytes) -> tuple[tuple[int, ...], int]:
    """Return which message a value is, by indexes, and where it begins."""
    count, at = _zigzag(datum, 0)
    if count == 0:
        return (0,), at
    if not 0 < count <= _NESTED_MAX:
        raise DecodeError(f"the value has {count} message indexes; there are 1 to {_NESTED_MAX}")
    path = []
    for _ in range(count):
        index, at = _zigzag(datum, at)
        if index < 0:
            raise DecodeError(f"the value has the message index {index}")
        path.append(index)
    return tuple(path), at


def _zigzag(datum: bytes, at: int) -> tuple[int, int]:
    number = 0
    for shift in range(0, _VARINT_BITS_MAX, 7):
        if at >= len(datum):
            raise DecodeError("the value ends within its message indexes")
        byte = datum[at]
        at += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return (number >> 1) ^ -(number & 1), at
    raise DecodeError("the value has a message index that is too long")


def import_protobuf(module: str) -> Any:
    """Import a module of ``google.protobuf``.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        return import_module(f"google.protobuf.{module}")
    except ImportError as error:
        raise ConfigError(
            "A value is Protobuf by the schema registry, and protobuf cannot be imported here. Install "
            '"millstream[registry]" wherever the job runs.'
        ) from error
