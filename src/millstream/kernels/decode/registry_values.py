"""Values whose schemas are in a registry: Avro, Protobuf and JSON, in Confluent's form.

A value is the byte 0, the number of a schema in four bytes (big-endian), and what that schema says: an Avro datum; message
indexes and a Protobuf message; or JSON. So each value says how it is read, and a topic may have values of several schemas
and kinds. They are read by the schema that they were written with, and the class of the topic chooses among the fields by
name: those that an older schema does not have are missing, and get their default.

Source: Confluent, "Formats, Serializers, and Deserializers" (wire format).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from millstream.kernels.decode.avro_values import import_fastavro, read_avro
from millstream.kernels.decode.decode_error import DecodeError
from millstream.kernels.decode.fields import Decoded, Decoder, Field, Positions
from millstream.kernels.decode.formats import JsonFormat
from millstream.kernels.decode.protobuf_values import ProtobufReader
from millstream.kernels.decode.pydantic_decoder import PydanticReader
from millstream.kernels.decode.row_decoder import decode_rows, merged
from millstream.kernels.decode.row_reader import RowReader
from millstream.schema_registry import RegisteredSchema, registry_at

_PREFIX_BYTES = 5
_NO_NUMBER = -1
_ReadDatum = Callable[[bytes], Mapping[str, Any]]


@dataclass(frozen=True)
class RegistryFormat:
    """Values of a registry's schemas. ``model`` is a pydantic model with validators of its own."""

    registry: str = field(repr=False)  # the address may have a password
    model: type | None = None

    def decoder(self, fields: tuple[Field, ...]) -> Decoder:
        return RegistryDecoder(self, fields)


class RegistryDecoder:
    """Decodes values by what a registry says of their schemas: JSON in blocks, Avro and Protobuf by row."""

    def __init__(self, form: RegistryFormat, fields: tuple[Field, ...]) -> None:
        self._registry = form.registry
        self._fields = fields
        self._json = JsonFormat(form.model).decoder(fields)
        self._model = None if form.model is None else PydanticReader(form.model, fields)
        # A model's validators may look at any field.
        self._names = None if form.model is not None else frozenset(one.key for one in fields)
        self._readers: dict[int, _ReadDatum | str | None] = {}  # None: JSON

    def decode(self, values: pa.Array) -> Decoded:
        """Decode a batch of values (binary). Rows come in the order of the values.

        Raises:
            RetriableError: the registry has not responded for a minute.
            ConfigError: it refuses who asks, or a library is missing.
        """
        numbers = _numbers(values)
        named = np.unique(numbers)
        self._learn([int(number) for number in named if number != _NO_NUMBER])
        of_json = [number for number in named.tolist() if self._readers.get(number, "") is None]
        is_json = np.isin(numbers, of_json)
        by_row = decode_rows(values, np.flatnonzero(~is_json), self._fields, self._read)
        if not of_json:
            return by_row
        return self._with_json(values, np.flatnonzero(is_json), by_row)

    def _learn(self, numbers: list[int]) -> None:
        answers = registry_at(self._registry).schemas(
            number for number in numbers if not callable(self._readers.get(number, ""))
        )
        for number, answer in answers.items():
            self._readers[number] = answer if isinstance(answer, str) else self._reader(answer)

    def _reader(self, schema: RegisteredSchema) -> _ReadDatum | str | None:
        try:
            match schema.kind:
                case "AVRO":
                    return _avro_reader(schema)
                case "PROTOBUF":
                    return ProtobufReader(schema, self._names).read
                case "JSON":
                    return None
        except DecodeError as error:
            return error.what
        return f"the schema {schema.number} is of the type {schema.kind!r:.40}, which is not known here"

    def _with_json(self, values: pa.Array, positions: Positions, by_row: Decoded) -> Decoded:
        chosen = values.take(pa.array(positions))
        # Without an end, Arrow adds up lengths that overflow.
        end = pc.max(pc.binary_length(chosen)).as_py()
        found = self._json.decode(pc.binary_slice(chosen, _PREFIX_BYTES, end))
        errors = [(int(positions[at]), reason) for at, reason in found.errors]
        rest = Decoded(by_row.table, by_row.good, sorted(by_row.errors + errors))
        return merged([(found.table, positions[found.good])], rest)

    def _read(self, value: bytes | None) -> dict[str, Any]:
        if value is None:
            raise DecodeError("the value is null")
        if len(value) < _PREFIX_BYTES or value[0] != 0:
            raise DecodeError("the value does not begin with the byte 0 and the number of a schema")
        reader = self._readers[int.from_bytes(value[1:_PREFIX_BYTES], "big")]
        if isinstance(reader, str):
            raise DecodeError(reader)
        assert reader is not None, "JSON is decoded in blocks"
        found = reader(value[_PREFIX_BYTES:])
        if self._model is not None:
            return self._model.from_object(found)
        return RowReader().read(self._fields, found)


def _numbers(values: pa.Array) -> Positions:
    """Return the number of each value's schema, or -1 where the value has none."""
    found = np.full(len(values), _NO_NUMBER, np.int64)
    prefix = pc.binary_slice(values, 0, _PREFIX_BYTES)
    whole = pc.equal(pc.binary_length(prefix), _PREFIX_BYTES).fill_null(False)
    at = np.flatnonzero(whole.to_numpy(zero_copy_only=False))
    if not len(at):
        return found
    joined = b"".join(prefix.filter(whole).to_pylist())
    table = np.frombuffer(joined, np.uint8).reshape(-1, _PREFIX_BYTES)
    numbers = np.ascontiguousarray(table[:, 1:]).view(">u4")[:, 0].astype(np.int64)
    found[at] = np.where(table[:, 0] == 0, numbers, _NO_NUMBER)
    return found


@lru_cache(maxsize=1024)
def _avro_reader(schema: RegisteredSchema) -> _ReadDatum:
    """Return what reads a datum of a schema.

    Raises:
        DecodeError: it is not a schema of records.
    """
    fastavro = import_fastavro()
    named: dict[str, Any] = {}
    try:
        for one in schema.references:
            fastavro.parse_schema(json.loads(one.text), named)
        parsed = fastavro.parse_schema(json.loads(schema.text), named)
    except Exception as error:  # what a registry has is not always whole
        raise DecodeError(f"the Avro schema {schema.number} cannot be read: {error}") from error
    kind = parsed.get("type") if isinstance(parsed, dict) else parsed
    if kind != "record":
        raise DecodeError(f"the Avro schema {schema.number} is of the type {kind!r}, not a record")
    return partial(read_avro, fastavro.schemaless_reader, parsed)
