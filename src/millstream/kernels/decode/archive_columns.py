"""Values that were decoded earlier: how they become columns of an archive, and how they are read back.

An archive holds the columns of all fields of a topic, decoded once. A plan may read the fields that it needs
from it, if each was decoded as the plan would decode it: the field's *made of* identifies that. Records
without values in the archive are decoded as usual.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa

from millstream.kernels.decode.avro_values import AvroFormat
from millstream.kernels.decode.fields import Decoder, Field, Mask, Positions, table_schema
from millstream.kernels.decode.formats import BytesFormat, JsonFormat, ValueFormat
from millstream.kernels.decode.registry_values import RegistryFormat

# Raise it when a value is decoded into something else than before, or can no longer be decoded: archives made
# until then are not read any more.
DECODING_VERSION = 1
_ARCHIVED = (JsonFormat, AvroFormat, BytesFormat, RegistryFormat)


@dataclass(frozen=True)
class ArchivedRecords:
    """Records of which most values were decoded earlier.

    ``records`` has the columns of the record itself that are wanted, offset and timestamp among
    them; ``columns`` a row for each record, with the columns of the fields wanted. The rows at ``undecoded``
    have no values: ``values`` has those, to be decoded.
    """

    records: pa.RecordBatch
    columns: pa.Table
    undecoded: Positions
    values: pa.Array

    @property
    def nbytes(self) -> int:
        return int(self.records.nbytes + self.columns.nbytes + self.values.nbytes)


@dataclass(frozen=True)
class ArchiveColumns:
    """Makes the columns of an archive of values; see :class:`millstream.log.archiver.ValueColumns`.

    Args:
        fields: Of the topic; those that are of the record itself are left out.
        taken: Names that columns of the value cannot have.
    """

    format: ValueFormat
    fields: tuple[Field, ...]
    taken: Collection[str]

    @cached_property
    def schema(self) -> pa.Schema:
        """The columns, in the order of the fields."""
        plain = table_schema(self._value_fields)
        return pa.schema([one.with_name(column_name(one.name, self.taken)) for one in plain])

    @cached_property
    def made_of(self) -> Mapping[str, str]:
        """For each column, a text that identifies how it is decoded."""
        return made_of(self._value_fields, self.format, self.taken)

    def decode(self, values: pa.Array) -> tuple[pa.Table, Mask]:
        """Return a row for each value, and which values do not fit: their rows are nulls.

        A tombstone is none of these, though a stream may dead-letter it.
        """
        decoded = self._decoder.decode(values)
        undecodable: Mask = np.zeros(len(values), np.bool_)
        if not decoded.errors:
            return decoded.table.rename_columns(self.schema.names), undecodable
        undecodable[[at for at, _ in decoded.errors]] = True
        rows = np.zeros(len(values), np.int64)
        rows[decoded.good] = np.arange(len(decoded.good))
        table = decoded.table.take(pa.array(rows, mask=undecodable))
        undecodable &= values.is_valid().to_numpy(zero_copy_only=False)
        return table.rename_columns(self.schema.names), undecodable

    @cached_property
    def _value_fields(self) -> tuple[Field, ...]:
        return tuple(field for field in self.fields if field.meta is None)

    @cached_property
    def _decoder(self) -> Decoder:
        return self.format.decoder(self._value_fields)


def column_name(field: str, taken: Collection[str]) -> str:
    """Name the column of a field in an archive: as the field, unless the record has that name."""
    return f"value.{field}" if field in taken else field


def made_of(
    fields: tuple[Field, ...], values: ValueFormat, taken: Collection[str]
) -> dict[str, str]:
    """Return for each column a text that identifies how it is decoded.

    Under the empty name is the format, for plans that read no column.
    """
    known = {"": _digest(())}
    for field in fields:
        says = (
            field.name,
            field.key,
            str(field.type),
            field.required,
            field.default,
            field.takes_null,
            field.value_shape,
        )
        known[column_name(field.name, taken)] = _digest(says)
    text = _format_text(values)
    return {name: _digest((DECODING_VERSION, text, digest)) for name, digest in known.items()}


def may_be_read(values: ValueFormat) -> bool:
    """Whether decoding now gives what it gave earlier.

    Not certain with a pydantic model's own validators: they are code, which may have changed. Archives have no
    envelopes around the columns.
    """
    if not isinstance(values, _ARCHIVED):
        return False
    return isinstance(values, BytesFormat) or values.model is None


def _digest(says: object) -> str:
    return hashlib.sha256(repr(says).encode()).hexdigest()[:32]


def _format_text(values: ValueFormat) -> str:
    assert isinstance(values, _ARCHIVED), f"no archive of {values}"
    said: list[object] = [type(values).__name__]
    if isinstance(values, AvroFormat):
        said += [values.writer, values.by_number]
    if isinstance(values, RegistryFormat):
        said.append(values.registry)  # its numbers name other schemas than those of another one
    if not isinstance(values, BytesFormat) and values.model is not None:
        said.append(_source_of(values.model))
    return json.dumps(said, sort_keys=True, default=str)


def _source_of(model: type) -> str:
    """Return the source of a model if there is one: it has the validators."""
    try:
        return inspect.getsource(model)
    except (OSError, TypeError):
        return model.__qualname__
