"""Reads a split: from archives that have the plan's columns, else from segments.

Either way the result is the same records, with the same columns. Values that an archive lacks, as they did
not fit the schema, are read from the segment; so is everything else if the archive is damaged.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa

from millstream.client.reader import RecordReader
from millstream.kernels.decode.archive_columns import (
    ArchivedRecords,
    column_name,
    made_of,
    may_be_read,
)
from millstream.kernels.decode.fields import Field, table_schema
from millstream.kernels.decode.records import columns_read
from millstream.kernels.errors.dead_letters import group_near_offsets
from millstream.kernels.plan import SourcePlan
from millstream.log.archive import RECORD_SCHEMA, UNREADABLE, ArchiveFile

CHUNK_BYTES = 16 << 20
_FLAG_COLUMNS = ("tombstone", "undecodable")
_log = logging.getLogger(__name__)
CountRecords = Callable[[int], None]


@dataclass(frozen=True)
class SplitReader:
    """Reads the columns that one source needs of its topic's records."""

    reader: RecordReader
    source: SourcePlan

    def read(
        self, partition: int, start: int, end: int, tally: CountRecords | None = None
    ) -> Iterator[pa.RecordBatch | ArchivedRecords]:
        """Yield the committed records with offsets in [start, end), in offset order.

        ``tally`` is called with their number: by the log's batch headers, or the rows of an archive.

        Raises:
            OffsetOutOfRangeError, CorruptBatchError, UnknownTopicError: see ``LogReader.read``.
        """
        offset = start
        for archive in self._archives(partition, start, end):
            stop = min(end, archive.note.next_offset)
            yield from self._read_segments(partition, offset, archive.note.base_offset, tally)
            offset = max(offset, archive.note.base_offset)
            try:
                for records in self._read_archive(archive, partition, offset, stop):
                    if tally is not None:
                        tally(records.records.num_rows)
                    yield records
                    offset = records.records.column("offset")[-1].as_py() + 1
                offset = max(offset, stop)
            except UNREADABLE as error:
                _log.warning(
                    "%s cannot be read from offset %d on: %s; the records come from their segment. "
                    "Remove it, and archive again",
                    archive.path,
                    offset,
                    error,
                )
        yield from self._read_segments(partition, offset, end, tally)

    def _read_segments(
        self, partition: int, start: int, end: int, tally: CountRecords | None
    ) -> Iterator[pa.RecordBatch]:
        if start < end:
            yield from self.reader.read(
                self.source.topic,
                partition,
                start,
                end,
                columns=self._columns_read,
                bytes_max=CHUNK_BYTES,
                tally=tally,
            )

    # -- archives -----------------------------------------------------------------------------

    def _archives(self, partition: int, start: int, end: int) -> Iterator[ArchiveFile]:
        """Yield the archives whose columns are what the plan would decode."""
        if may_be_read(self.source.values):
            for archive in self.reader.archives(self.source.topic, partition, start, end):
                known = archive.note.made_of
                if all(known.get(name) == text for name, text in self._wanted.items()):
                    yield archive

    @cached_property
    def _wanted(self) -> Mapping[str, str]:
        """A text for each needed column of the value that says how it is decoded."""
        return made_of(self._fields, self.source.values, RECORD_SCHEMA.names)

    @cached_property
    def _fields(self) -> tuple[Field, ...]:
        return tuple(field for field in self.source.fields if field.meta is None)

    @cached_property
    def _columns(self) -> tuple[str, ...]:
        return tuple(column_name(field.name, RECORD_SCHEMA.names) for field in self._fields)

    @cached_property
    def _record_columns(self) -> tuple[str, ...]:
        return tuple(name for name in self._columns_read if name != "value")

    @cached_property
    def _columns_read(self) -> tuple[str, ...]:
        deletions = self.source.table_key is not None
        return columns_read(self.source.fields, deletions=deletions)

    @cached_property
    def _schema(self) -> pa.Schema:
        return table_schema(self._fields)

    def _read_archive(
        self, archive: ArchiveFile, partition: int, start: int, end: int
    ) -> Iterator[ArchivedRecords]:
        columns = (*self._record_columns, *_FLAG_COLUMNS, *self._columns)
        for batch in archive.read(start, end, columns):
            records = self._fill_from_segments(partition, batch)
            if records.records.num_rows:
                yield records

    def _fill_from_segments(self, partition: int, batch: pa.RecordBatch) -> ArchivedRecords:
        """Read the values that an archive lacks from the segment."""
        tombstone, undecodable = (_mask(batch.column(name)) for name in _FLAG_COLUMNS)
        left = np.flatnonzero(tombstone | undecodable)
        found: dict[int, bytes | None] = {}
        offsets = batch.column("offset").to_numpy()
        if undecodable.any():
            found = self._values(partition, offsets[undecodable])
            if len(found) < undecodable.sum():
                # Compaction has removed some of them since: the segment is another one.
                gone = undecodable & ~np.isin(offsets, list(found))
                return self._fill_from_segments(partition, batch.filter(pa.array(~gone)))
        values = pa.array([found.get(at) for at in offsets[left].tolist()], pa.binary())
        table = pa.Table.from_batches([batch]).select(list(self._columns))
        if self._columns:
            table = table.rename_columns(self._schema.names).cast(self._schema)
        return ArchivedRecords(batch.select(list(self._record_columns)), table, left, values)

    def _values(self, partition: int, offsets: np.ndarray) -> dict[int, bytes | None]:
        """Read the values of some records, by offset."""
        found: dict[int, bytes | None] = {}
        for group in group_near_offsets(offsets):
            low, high = int(group[0]), int(group[-1]) + 1
            for batch in self.reader.read(
                self.source.topic, partition, low, high, columns=("offset", "value")
            ):
                there = np.isin(batch.column("offset").to_numpy(), group)
                some = batch.filter(pa.array(there))
                found.update(zip(*(one.to_pylist() for one in some.columns), strict=True))
        return found


def _mask(column: pa.Array) -> np.ndarray:
    found: np.ndarray = column.to_numpy(zero_copy_only=False)
    return found
