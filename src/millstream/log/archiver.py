"""Makes archives: the columnar copies beside closed segments (see ``archive``).

Only the owner makes them, so that none is put beside a segment that was removed or rewritten
meanwhile. Appends continue meanwhile, except while segments are looked up and a finished file is renamed. A
segment is archived once it is closed and below the last stable offset: by then it is decided which of its
records are committed. A damaged segment is left out.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import pyarrow as pa

from millstream.errors import (
    CorruptBatchError,
    CorruptionError,
    DiskFullError,
    OffsetOutOfRangeError,
)
from millstream.log.archive import (
    METADATA_KEY,
    RECORD_SCHEMA,
    ROWS_PER_GROUP,
    SUFFIX,
    UNREADABLE,
    ArchiveMetadata,
    open_fitting,
    with_checksum,
)
from millstream.log.control import ControlDb
from millstream.log.decoding import ALL_COLUMNS
from millstream.log.exclusive import ExclusiveLog
from millstream.log.files import NewFile, sync_names
from millstream.log.partition import Partition, SealedSegment
from millstream.log.reader import LogReader

if TYPE_CHECKING:
    from numpy.typing import NDArray

_ENCODED = {"offset": "DELTA_BINARY_PACKED"}  # each offset is another: no dictionary helps
_log = logging.getLogger(__name__)

ArchiveProgress = Callable[[int, int], None]
"""Called with the bytes of segments archived so far, and in all."""


class ArchivedLog(ExclusiveLog, Protocol):
    """The calls of :class:`millstream.log.writer.LogWriter` that archiving uses."""

    folder: Path
    control: ControlDb


class ValueColumns(Protocol):
    """Makes columns of values; ``kernels`` implement it, which know schemas."""

    @property
    def schema(self) -> pa.Schema:
        """The columns; none has the name of a record's own column."""

    @property
    def made_of(self) -> Mapping[str, str]:
        """For each column, what identifies how it is decoded: see ``ArchiveMetadata``."""

    def decode(self, values: pa.Array) -> tuple[pa.Table, NDArray[np.bool_]]:
        """Return a row for each value, and which values do not fit the schema: their rows are nulls."""


@dataclass(slots=True)
class PartitionArchive:
    """What is archived of a partition.

    ``made`` of the ``segments`` were archived by this call, the others before. ``rows`` counts the
    records in them, ``undecodable`` those among these that do not fit the schema. ``left_out`` names
    closed segments that could not be archived, with the reason.
    """

    topic: str
    partition: int
    segments: int = 0
    made: int = 0
    rows: int = 0
    undecodable: int = 0
    segment_bytes: int = 0
    archive_bytes: int = 0
    left_out: list[str] = field(default_factory=list)

    def add(self, note: ArchiveMetadata, archive_bytes: int) -> None:
        """Count an archive."""
        self.segments += 1
        self.rows += note.rows
        self.undecodable += note.undecodable
        self.segment_bytes += note.segment_bytes
        self.archive_bytes += archive_bytes


def archive_partitions(
    writer: ArchivedLog,
    partitions: Sequence[Partition],
    columns: ValueColumns,
    *,
    close_active: bool = False,
    progress: ArchiveProgress | None = None,
) -> list[PartitionArchive]:
    """Archive the segments of these partitions that can be archived and are not yet, with these columns.

    Args:
        close_active: Close the growing segments first.

    Raises:
        DiskFullError: there was no room, or the disk failed; what is archived remains so.
        SyncFailedError: the disk failed, now or earlier. Open the folder again.
    """
    writer.sync()  # after a failed sync nothing may be written, a segment closed least of all
    work = [
        (partition, segment)
        for partition in partitions
        for segment in _archivable_segments(writer, partition, close_active=close_active)
    ]
    found = {one.name: PartitionArchive(*one.name) for one in partitions}
    done, total = 0, sum(segment.seal.size for _, segment in work)
    for partition, segment in work:
        _SegmentArchiver(writer, partition, segment, columns, found[partition.name]).run()
        done += segment.seal.size
        if progress is not None:
            progress(done, total)
    return list(found.values())


def _archivable_segments(
    writer: ArchivedLog, partition: Partition, *, close_active: bool
) -> list[SealedSegment]:
    """Return the segments whose transactions have all ended, durably."""
    found: list[SealedSegment] = []

    def look() -> None:
        if partition.closed:
            return
        if close_active and partition.active_size:
            partition.roll()
        stable = partition.producers.last_stable(partition.log_end_offset)
        found.extend(one for one in partition.sealed if one.seal.next_offset <= stable)

    writer.exclusively(look)
    writer.sync()  # what was seen is durable and published now
    return found


class _SegmentArchiver:
    """Archives one segment, unless it is archived already."""

    def __init__(
        self,
        writer: ArchivedLog,
        partition: Partition,
        segment: SealedSegment,
        columns: ValueColumns,
        report: PartitionArchive,
    ) -> None:
        self._writer = writer
        self._partition = partition
        self._files = partition.files
        self._segment = segment
        self._columns = columns
        self._report = report
        self._path = partition.path_of(segment).with_suffix(SUFFIX)

    def run(self) -> None:
        """Archive the segment, and add the result to the report."""
        if self._segment.seal.damaged:
            self._leave_out("it has damage; see `millstream log repair`")
        elif not self._is_done():
            try:
                self._make()
            except CorruptBatchError as error:
                self._leave_out(str(error))
            except OffsetOutOfRangeError:
                return  # removed by retention, meanwhile
            except OSError as error:
                if not self._partition.closed:
                    raise self._refused(error) from error

    def _leave_out(self, reason: str) -> None:
        _log.warning("%s is not archived: %s", self._partition.path_of(self._segment), reason)
        self._report.left_out.append(f"{self._segment.name}: {reason}")

    def _refused(self, error: OSError) -> DiskFullError | CorruptionError:
        kind = DiskFullError if error.errno == errno.ENOSPC else CorruptionError
        return kind(
            f"{self._path} could not be written: {error}; the log is as it was, and so are the "
            "archives made before. Make room on the disk, or check it, then archive again"
        )

    def _is_done(self) -> bool:
        with suppress(*UNREADABLE):  # then it is rebuilt
            found = open_fitting(self._files, self._path.with_suffix(".log"), self._base)
            if found is not None:
                with found:
                    if found.note.made_of == dict(self._columns.made_of):
                        self._report.add(found.note, found.size)
                        return True
        return False

    @property
    def _base(self) -> int:
        return self._segment.base_offset

    def _make(self) -> None:
        """Write the archive and put it in its place.

        1. Write ``<name>.new`` and sync it. A crash leaves it; the next opening removes it.
        2. If the segment is still there as it was read, rename it. A crash may leave it under either
           name, whole.
        3. Sync the folder. From here on the archive is there for good.
        """
        fresh = self._path.with_name(self._path.name + ".new")
        made: list[NewFile] = []
        self._writer.exclusively(lambda: made.extend(self._created(fresh)))
        if not made:
            return
        try:
            with made[0] as file:
                note = self._write(file)
                file.sync()
            self._writer.exclusively(lambda: self._put(fresh, note, file.size))
        finally:
            with suppress(OSError):
                self._files.remove(fresh)

    def _created(self, fresh: Path) -> Iterator[NewFile]:
        """Make the file; none in a folder that is being removed with its topic."""
        if not self._partition.closed:
            yield NewFile(self._files, fresh)

    def _put(self, fresh: Path, note: ArchiveMetadata, size: int) -> None:
        partition = self._partition
        there = any(note.matches(one.base_offset, one.seal) for one in partition.sealed)
        if there and not partition.closed:
            self._files.rename(fresh, self._path)
            sync_names(self._files, partition.folder)
            self._report.add(note, size)
            self._report.made += 1

    # -- the file -----------------------------------------------------------------------------

    def _write(self, file: NewFile) -> ArchiveMetadata:
        """Write the whole Parquet file; return its note."""
        import pyarrow.parquet as pq  # noqa: PLC0415 - see archive

        spool = _Spool()
        schema = pa.schema([*RECORD_SCHEMA, *self._columns.schema])
        groups: list[int] = []
        rows = undecodable = 0
        tables = self._tables(schema)
        first = list(islice(tables, 1))
        options = _options(first[0] if first else schema.empty_table())
        with pq.ParquetWriter(spool, schema, **options) as parquet:
            for table in chain(first, tables):
                groups += table.column("offset").to_numpy()[::ROWS_PER_GROUP].tolist()
                rows += table.num_rows
                undecodable += table.column("undecodable").to_numpy().sum()
                parquet.write_table(table, row_group_size=ROWS_PER_GROUP)
                file.write(spool.taken())
            note = self._note(rows, int(undecodable), groups)
            parquet.add_key_value_metadata({METADATA_KEY: note.pack()})
        file.write(with_checksum(spool.taken()))
        return note

    def _note(self, rows: int, undecodable: int, groups: list[int]) -> ArchiveMetadata:
        name, found = self._partition.name, self._segment.seal
        return ArchiveMetadata(
            topic=name.topic,
            partition=name.partition,
            base_offset=self._base,
            next_offset=found.next_offset,
            segment_bytes=found.size,
            segment_chain=found.chain,
            rows=rows,
            undecodable=undecodable,
            made_of=dict(self._columns.made_of),
            groups=groups,
        )

    def _tables(self, schema: pa.Schema) -> Iterator[pa.Table]:
        """Yield the committed records of the segment, as the file is to have them."""
        writer, name = self._writer, self._partition.name
        reader = LogReader(writer.folder, files=self._files, control=writer.control)
        start = max(self._base, self._partition.log_start)
        end = self._segment.seal.next_offset
        try:
            for records in reader.read(*name, start, end, columns=ALL_COLUMNS):
                values = records.column("value")
                decoded, undecodable = self._columns.decode(values)
                columns = {
                    "partition": pa.repeat(pa.scalar(name.partition, pa.int32()), len(records)),
                    "tombstone": values.is_null(),
                    "undecodable": pa.array(undecodable),
                }
                columns |= {one: records.column(one) for one in ALL_COLUMNS if one != "value"}
                columns |= dict(zip(decoded.column_names, decoded.columns, strict=True))
                arrays = [columns[one] for one in schema.names]
                yield pa.Table.from_arrays(arrays, schema=schema)
        finally:
            reader.close()


def _options(first: pa.Table) -> dict[str, Any]:
    """Return how the columns of a file are written whose first rows these are: so that every Parquet reader can read them."""
    return {
        "compression": "lz4",  # a half larger than zstd's, and up to twice as quick to read
        "use_dictionary": [
            leaf
            for column in first.schema
            if column.name not in _ENCODED and _repeats(first.column(column.name))
            for leaf in _leaves(column.name, column.type)
        ],
        "column_encoding": _ENCODED,
        "write_page_checksum": True,
    }


def _repeats(column: pa.ChunkedArray) -> bool:
    """Tell whether at least every other value of the first rows has been there: else a dictionary costs and saves nothing.

    In lists and objects some members may repeat, and others not: they get dictionaries.
    """
    if pa.types.is_nested(column.type):
        return True
    sample = column.slice(0, ROWS_PER_GROUP)
    return len(sample.unique()) * 2 <= len(sample)


def _leaves(path: str, kind: pa.DataType) -> Iterator[str]:
    """Yield the names that the columns of a type have in a Parquet file."""
    if pa.types.is_list(kind):
        yield from _leaves(f"{path}.list.element", kind.value_type)
    elif pa.types.is_struct(kind):
        for member in kind:
            yield from _leaves(f"{path}.{member.name}", member.type)
    else:
        yield path


class _Spool:
    """Takes what Arrow writes, to be written to a file: so no disk error passes through Arrow."""

    closed = False

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._size = 0

    def write(self, data: Any) -> int:
        part = bytes(data)
        self._parts.append(part)
        self._size += len(part)
        return len(part)

    def tell(self) -> int:
        return self._size

    def flush(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        self.closed = True

    def taken(self) -> bytes:
        """Return what was written since the last call."""
        data, self._parts = b"".join(self._parts), []
        return data
