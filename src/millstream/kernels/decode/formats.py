"""How the values of a topic are written. A format makes the decoder for the fields wanted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import pyarrow as pa

from millstream.kernels.decode.fields import Decoded, Decoder, Field, table_schema
from millstream.kernels.decode.json_values import JsonDecoder
from millstream.kernels.decode.pydantic_decoder import PydanticDecoder, PydanticReader


class ValueFormat(Protocol):
    """A way to write values. It is sent to the workers within the plan."""

    def decoder(self, fields: tuple[Field, ...]) -> Decoder:
        """Return a decoder of values into these fields."""
        ...


@dataclass(frozen=True)
class JsonFormat:
    """JSON objects. ``model`` is a pydantic model with validators of its own."""

    model: type | None = None

    def decoder(self, fields: tuple[Field, ...]) -> Decoder:
        if self.model is not None:
            return PydanticDecoder(PydanticReader(self.model, fields))
        return JsonDecoder(fields)


JSON = JsonFormat()


@dataclass(frozen=True)
class BytesFormat:
    """Values as they are, in the one column ``value``. Each can be decoded."""

    def decoder(self, fields: tuple[Field, ...]) -> Decoder:
        return BytesDecoder(fields)


@dataclass(frozen=True)
class BytesDecoder:
    """Returns values as they are; a tombstone is null."""

    fields: tuple[Field, ...]

    def decode(self, values: pa.Array) -> Decoded:
        """Return the values, if they are wanted."""
        table = pa.table({"value": values.cast(pa.binary())})
        columns = [field.name for field in self.fields]
        assert set(columns) <= {"value"}, "values of bytes are the one column"
        table = table.select(columns).cast(table_schema(self.fields))
        return Decoded(table, np.arange(len(values)), [])
