"""Avro values: plain datums of one schema, or Confluent's form, which names the schema by a number.

In Confluent's form a value is the byte 0, the number of the schema in four bytes (big-endian), and
the datum. The datum is read by the schema that it was written with; fields are matched by name, so those that
a schema does not have are missing, and get their default.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from millstream.errors import ConfigError
from millstream.kernels.decode.decode_error import DecodeError
from millstream.kernels.decode.fields import Decoded, Decoder, Field
from millstream.kernels.decode.pydantic_decoder import PydanticReader
from millstream.kernels.decode.row_decoder import decode_rows
from millstream.kernels.decode.row_reader import RowReader

_PREFIX_BYTES = 5


@dataclass(frozen=True)
class AvroFormat:
    """Avro of the schema ``writer``, or of the schemas ``by_number`` in Confluent's form.

    ``model`` is a pydantic model with validators of its own.
    """

    writer: Any = None
    by_number: Mapping[int, Any] | None = None
    model: type | None = None

    def decoder(self, fields: tuple[Field, ...]) -> Decoder:
        return AvroDecoder(self, fields)

    def encode(self, row: Mapping[str, Any]) -> bytes:
        """Write a row, with the newest schema.

        Raises:
            ConfigError: it does not fit the schema.
        """
        fastavro = import_fastavro()
        number = max(self.by_number) if self.by_number else None
        schema = self.writer if number is None else (self.by_number or {})[number]
        out = io.BytesIO()
        if number is not None:
            out.write(b"\0" + number.to_bytes(_PREFIX_BYTES - 1, "big"))
        try:
            fastavro.schemaless_writer(out, fastavro.parse_schema(schema), row)
        except Exception as error:  # what does not fit a schema raises all sorts of things
            raise ConfigError(f"{row!r:.200} does not fit its Avro schema: {error}") from error
        return out.getvalue()


class AvroDecoder:
    """Decodes Avro values, by row."""

    def __init__(self, form: AvroFormat, fields: tuple[Field, ...]) -> None:
        fastavro = import_fastavro()
        self._fields = fields
        self._read_datum = fastavro.schemaless_reader
        self._writer = None if form.writer is None else fastavro.parse_schema(form.writer)
        self._by_number = {
            number: fastavro.parse_schema(schema)
            for number, schema in (form.by_number or {}).items()
        }
        self._model = None if form.model is None else PydanticReader(form.model, fields)

    def decode(self, values: pa.Array) -> Decoded:
        """Decode a batch of values (binary). Rows come in the order of the values."""
        return decode_rows(values, np.arange(len(values)), self._fields, self._read)

    def _read(self, value: bytes | None) -> dict[str, Any]:
        if value is None:
            raise DecodeError("the value is null")
        found = read_avro(self._read_datum, *self._schema_of(value))
        if self._model is not None:
            return self._model.from_object(found)
        return RowReader().read(self._fields, found)

    def _schema_of(self, value: bytes) -> tuple[Any, bytes]:
        if not self._by_number:
            return self._writer, value
        if len(value) < _PREFIX_BYTES or value[0] != 0:
            raise DecodeError("the value does not begin with the byte 0 and the number of a schema")
        number = int.from_bytes(value[1:_PREFIX_BYTES], "big")
        if number not in self._by_number:
            known = ", ".join(map(str, sorted(self._by_number)))
            raise DecodeError(f"the value is of the Avro schema {number}; known are {known}")
        return self._by_number[number], value[_PREFIX_BYTES:]


def read_avro(read_datum: Callable[..., Any], schema: Any, datum: bytes) -> Any:
    """Read a datum that is nothing but a value of a schema.

    Raises:
        DecodeError: it is not.
    """
    stream = io.BytesIO(datum)
    try:
        found = read_datum(stream, schema, None)
    except Exception as error:  # bytes of another schema raise all sorts of things
        what = str(error) or type(error).__name__
        raise DecodeError(f"the value is not Avro of its schema: {what}") from error
    left = len(datum) - stream.tell()
    if left:
        raise DecodeError(f"the value is not Avro of its schema: {left} bytes are left over")
    return found


def import_fastavro() -> Any:
    """Import fastavro.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import fastavro  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise ConfigError(
            "A topic has values in Avro, and fastavro cannot be imported here. Install "
            '"millstream[avro]" wherever the job runs.'
        ) from error
    return fastavro
