r"""Topics as tables: a row for each record, with its fields if the app declares them.

A topic that the app declares has its fields as columns, and then ``_partition``, ``_offset``, ``_timestamp``, ``_key`` and
``_error``. A record that cannot be decoded is a row all the same: its fields are null, and ``_error`` says why. Another topic
has the record's value as text in ``_value`` instead, and so has one of a capture, whose records are changes of a table. Keys
and values that are not UTF-8 are ``\x`` and hexadecimal digits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa

from millstream.client.reader import Reader
from millstream.errors import SqlError
from millstream.kernels.decode.debezium_records import DebeziumFormat
from millstream.kernels.decode.fields import Decoder, Field, table_schema
from millstream.kernels.decode.formats import ValueFormat
from millstream.sql_queries.sql_table import TOPICS, SqlTable, type_of_arrow
from millstream.views.state_store.view_table import column_names

_RECORD = (
    pa.field("_partition", pa.int64()),
    pa.field("_offset", pa.int64()),
    pa.field("_timestamp", pa.timestamp("us", "UTC")),
    pa.field("_key", pa.string()),
)
_PLAIN = pa.schema([*_RECORD, pa.field("_value", pa.string())])
_ERROR = pa.field("_error", pa.string())


@dataclass(frozen=True)
class TopicColumns:
    """The columns of a topic: those of the fields that an app declares, or none.

    Args:
        fields: Of the values; those that are of the record itself are left out.
    """

    format: ValueFormat | None = None
    fields: tuple[Field, ...] = ()

    @cached_property
    def schema(self) -> pa.Schema:
        """The columns, as Arrow has them."""
        if self._decoder is None:
            return _PLAIN
        fields = list(table_schema(self._value_fields))
        names = column_names(tuple([one.name for one in (*fields, *_RECORD, _ERROR)]))
        every = [
            one.with_name(name)
            for one, name in zip((*fields, *_RECORD, _ERROR), names, strict=True)
        ]
        return pa.schema(every)

    def table(self, topic: str, name: str) -> SqlTable:
        """Return the table of a topic, by its own name and that in SQL."""
        columns = tuple((one.name, type_of_arrow(one.type)) for one in self.schema)
        return SqlTable(TOPICS, topic, name, columns)

    def decode(self, records: pa.RecordBatch, partition: int) -> pa.Table:
        """Return a row for each record of a partition."""
        own = [
            pa.repeat(pa.scalar(partition, pa.int64()), records.num_rows),
            records.column("offset"),
            records.column("timestamp").cast(pa.timestamp("us", "UTC")),
            _as_text(records.column("key")),
        ]
        values = records.column("value")
        if self._decoder is None:
            return pa.Table.from_arrays([*own, _as_text(values)], schema=self.schema)
        decoded = self._decoder.decode(values)
        rows = np.zeros(len(values), np.int64)
        rows[decoded.good] = np.arange(len(decoded.good))
        missing = np.ones(len(values), np.bool_)
        missing[decoded.good] = False
        fields = decoded.table.take(pa.array(rows, mask=missing)).columns
        reasons: list[str | None] = [None] * len(values)
        for at, reason in decoded.errors:
            reasons[at] = reason if values[at].is_valid else None  # of a tombstone there is none
        columns = [*fields, *own, pa.array(reasons, pa.string())]
        return pa.Table.from_arrays(columns, schema=self.schema)

    @cached_property
    def _value_fields(self) -> tuple[Field, ...]:
        return tuple(field for field in self.fields if field.meta is None)

    @cached_property
    def _decoder(self) -> Decoder | None:
        if self.format is None or isinstance(self.format, DebeziumFormat):
            return None
        return self.format.decoder(self._value_fields) if self._value_fields else None


def _as_text(values: pa.Array) -> pa.Array:
    try:
        return values.cast(pa.string())
    except pa.ArrowInvalid:
        return pa.array([_text(value) for value in values.to_pylist()], pa.string())


def _text(value: bytes | None) -> str | None:
    if value is None:
        return None
    try:
        return value.decode()
    except UnicodeDecodeError:
        return f"\\x{value.hex()}"


def read_topic(
    log: Reader,
    topic: str,
    columns: TopicColumns,
    ranges: Mapping[int, tuple[int, int]],
    check: Callable[[], None],
) -> pa.Table:
    """Return the rows of the records with offsets in [start, end), by partition; ``check`` is called between batches."""
    parts = [columns.schema.empty_table()]
    for partition, (start, end) in ranges.items():
        for records in log.read(topic, partition, start, end):
            check()
            parts.append(columns.decode(records, partition))
    return pa.concat_tables(parts)


def check_size(topic: str, ranges: Mapping[int, tuple[int, int]], records_max: int) -> None:
    """Make sure that a topic is small enough to be read for a statement.

    Raises:
        SqlError: it is not.
    """
    records = sum(end - start for start, end in ranges.values())
    if records > records_max:
        raise SqlError(
            f"The topic {topic!r} has {records:,} records up to this position, and a statement reads {records_max:,} of a "
            "topic at most. Ask the newest only (--since), allow more (--topic-records-max), or keep a view of what you need.",
            sqlstate="54000",
        )
