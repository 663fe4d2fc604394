"""Deletions in a topic that is a table: a record without a value (a tombstone) deletes the row of its key.

Such a record becomes a row whose columns are null, but for the key column, which is read from the record's key
as the client writes keys: text as it is, bytes as they are, everything else as the text that JSON would have.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from millstream.kernels.decode.archive_columns import ArchivedRecords
from millstream.kernels.decode.decode_error import DecodeError
from millstream.kernels.decode.fields import Decoded, Decoder, Field, Mask, Scalar, table_schema
from millstream.kernels.decode.row_decoder import merged
from millstream.kernels.decode.scalars import READERS
from millstream.kernels.frames import DELETED

_NUMBERS = ("int", "float", "bool")


@dataclass(frozen=True)
class DeletionDecoder:
    """Decodes values, of which a null one becomes a row of nulls."""

    values: Decoder
    fields: tuple[Field, ...]

    def decode(self, values: pa.Array) -> Decoded:
        """Decode the values that are there."""
        if not values.null_count:
            return self.values.decode(values)
        deleted = values.is_null().to_numpy(zero_copy_only=False)
        there = np.flatnonzero(~deleted)
        inner = self.values.decode(values.take(pa.array(there)))
        at = np.flatnonzero(deleted)
        nothing = pa.Table.from_arrays(
            [pa.nulls(len(at), field.type) for field in self.fields],
            schema=table_schema(self.fields),
        )
        errors = [(int(there[position]), reason) for position, reason in inner.errors]
        decoded = Decoded(inner.table, there[inner.good], errors)
        return merged([(nothing, at)], decoded)


@dataclass(frozen=True)
class DeletedKeys:
    """Marks deleted rows, and gives them their key. ``field`` is the field that the record's key has."""

    field: Field

    def mark(self, batch: pa.RecordBatch | ArchivedRecords, decoded: Decoded) -> Decoded:
        """Return the rows with ``__deleted``; a deletion whose key cannot be read is an error."""
        deleted = _deleted(batch)[decoded.good]
        if not deleted.any():
            return Decoded(_marked(decoded.table, deleted), decoded.good, decoded.errors)
        records = batch.records if isinstance(batch, ArchivedRecords) else batch
        raw_keys = records.column("key").take(pa.array(decoded.good[deleted])).to_pylist()
        keys: list[object] = []
        errors = list(decoded.errors)
        keep = np.ones(len(deleted), np.bool_)
        for at, raw in zip(np.flatnonzero(deleted).tolist(), raw_keys, strict=True):
            try:
                keys.append(self._read(raw))
            except DecodeError as error:
                keep[at] = False
                errors.append((int(decoded.good[at]), error.reason()))
        table = decoded.table.filter(pa.array(keep))
        deleted = deleted[keep]
        good = decoded.good[keep]
        if self.field.meta is not None:  # the record's own, which has it already
            return Decoded(_marked(table, deleted), good, sorted(errors))
        number = table.schema.get_field_index(self.field.name)
        given = pa.chunked_array([*table.column(number).chunks, pa.array(keys, self.field.type)])
        places = np.arange(table.num_rows)
        places[deleted] = table.num_rows + np.arange(len(keys))
        column = given.take(pa.array(places))
        table = table.set_column(number, table.schema.field(number), column)
        return Decoded(_marked(table, deleted), good, sorted(errors))

    def _read(self, raw: bytes | None) -> object:
        """Read a record's key as a value of the field."""
        if raw is None:
            raise DecodeError("a deletion has no key", raw)
        if self.field.meta is not None:
            return raw
        shape = self.field.value_shape
        assert isinstance(shape, Scalar), "a key is a single value"
        if shape.kind == "bytes":
            return raw
        try:
            text = raw.decode()
            value = json.loads(text) if shape.kind in _NUMBERS else text
        except (ValueError, RecursionError):
            raise DecodeError(f"the key of a deletion is no {shape.kind}", raw) from None
        plain = READERS[shape.kind](value)
        try:
            pa.scalar(plain, self.field.type)
        except (pa.ArrowInvalid, OverflowError):
            raise DecodeError(f"the key of a deletion is no {self.field.type}", raw) from None
        return plain


def _deleted(batch: pa.RecordBatch | ArchivedRecords) -> Mask:
    """Return for each record whether it has no value."""
    if not isinstance(batch, ArchivedRecords):
        mask: Mask = batch.column("value").is_null().to_numpy(zero_copy_only=False)
        return mask
    mask = np.zeros(batch.records.num_rows, np.bool_)
    mask[batch.undecoded] = batch.values.is_null().to_numpy(zero_copy_only=False)
    return mask


def _marked(table: pa.Table, deleted: Mask) -> pa.Table:
    return table.append_column(DELETED, pa.array(deleted))
