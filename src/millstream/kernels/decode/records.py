"""Whole records: the columns of the value beside those of the record itself.

A record has, beside its value, a key, partition, offset, timestamp and headers. They are columns like the
value's, with the names and types in ``META_TYPES``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from millstream.kernels.decode.archive_columns import ArchivedRecords
from millstream.kernels.decode.debezium_records import DebeziumDecoder, DebeziumFormat
from millstream.kernels.decode.deletions import DeletedKeys, DeletionDecoder
from millstream.kernels.decode.fields import (
    Decoded,
    Decoder,
    Field,
    Meta,
    Positions,
    table_schema,
)
from millstream.kernels.decode.formats import ValueFormat
from millstream.kernels.decode.row_decoder import merged

META_TYPES: dict[Meta, pa.DataType] = {
    "key": pa.binary(),
    "partition": pa.int64(),
    "offset": pa.int64(),
    "timestamp": pa.timestamp("us", "UTC"),
    "headers": pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())])),
}


def meta_field(meta: Meta) -> Field:
    """Return the field of one of a record's own columns."""
    return Field(meta, META_TYPES[meta], required=meta != "key", meta=meta)


def columns_read(fields: tuple[Field, ...], *, deletions: bool = False) -> tuple[str, ...]:
    """Return the columns of the log that decoding into the fields needs.

    ``deletions``: a record without a value deletes the row of its key.
    """
    wanted = {field.meta for field in fields} | ({"key"} if deletions else set())
    also = [name for name in ("key", "headers") if name in wanted]
    return ("offset", "timestamp", "value", *also)


@dataclass
class RecordDecoder:
    """Decodes the records of a topic into fields. Keep it: it caches what is costly to make.

    ``table_key``: the topic is a table with that key, and the rows also have ``__deleted``. Records in
    Debezium's envelope become rows as `captured.py` says.
    """

    format: ValueFormat
    fields: tuple[Field, ...]
    table_key: str | None = None
    several_partitions: bool = False

    def __post_init__(self) -> None:
        self._captured: DebeziumDecoder | None = None
        if isinstance(self.format, DebeziumFormat):
            self._captured = DebeziumDecoder(self.format, self.fields)
            return
        in_value = tuple(field for field in self.fields if field.meta is None)
        self._values: Decoder = self.format.decoder(in_value)
        self._deleted: DeletedKeys | None = None
        if self.table_key is not None:
            self._values = DeletionDecoder(self._values, in_value)
            (key,) = (field for field in self.fields if field.name == self.table_key)
            self._deleted = DeletedKeys(key)

    def decode(self, batch: pa.RecordBatch | ArchivedRecords, partition: int) -> Decoded:
        """Decode the records of a partition. Rows come in their order."""
        if self._captured is not None:
            assert not isinstance(batch, ArchivedRecords), "no archive has the columns of envelopes"
            return self._captured.decode(batch, several_partitions=self.several_partitions)
        decoded = self._with_meta(batch, partition)
        return decoded if self._deleted is None else self._deleted.mark(batch, decoded)

    def _with_meta(self, batch: pa.RecordBatch | ArchivedRecords, partition: int) -> Decoded:
        if isinstance(batch, ArchivedRecords):
            records, decoded = batch.records, self._completed(batch)
        else:
            records, decoded = batch, self._values.decode(batch.column("value"))
        if not any(field.meta for field in self.fields):
            return decoded
        columns = [
            decoded.table.column(field.name)
            if field.meta is None
            else _meta_column(field.meta, records, partition, decoded.good)
            for field in self.fields
        ]
        table = pa.Table.from_arrays(columns, schema=table_schema(self.fields))
        return Decoded(table, decoded.good, decoded.errors)

    def _completed(self, batch: ArchivedRecords) -> Decoded:
        """Decode the values that were not decoded earlier, and put them between the others."""
        known = np.arange(batch.records.num_rows)
        if not len(batch.undecoded):
            return Decoded(batch.columns, known, [])
        by_now = self._values.decode(batch.values)
        known = np.delete(known, batch.undecoded)
        rest = Decoded(
            by_now.table,
            batch.undecoded[by_now.good],
            [(int(batch.undecoded[at]), reason) for at, reason in by_now.errors],
        )
        return merged([(batch.columns.take(pa.array(known)), known)], rest)


def _meta_column(meta: Meta, records: pa.RecordBatch, partition: int, good: Positions) -> pa.Array:
    if meta == "partition":
        return pa.repeat(pa.scalar(partition, pa.int64()), len(good))
    column = records.column(meta)
    if len(good) < len(column):
        column = pc.take(column, pa.array(good))
    return column.cast(META_TYPES[meta])
