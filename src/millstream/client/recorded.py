"""Records of a log that were written to files, and are read from there: no log is needed.

There is one Arrow file for each partition, ``<topic>-<partition>.arrow``, with all columns of a log.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from millstream.client.reader import RecordReader
from millstream.log.archive import ArchiveFile
from millstream.log.decoding import ALL_COLUMNS, COLUMNS, SCHEMA
from millstream.log.removed_tombstones import Removals


@dataclass(frozen=True)
class RecordedInput:
    """Reads records that :meth:`record` has written, under the offsets that they had."""

    folder: Path

    def record(self, reader: RecordReader, topic: str, partition: int, start: int, end: int) -> int:
        """Write the records with offsets in [start, end); return how many that are.

        Raises:
            OffsetOutOfRangeError: the log no longer holds them.
        """
        count = 0
        with (
            pa.OSFile(str(self._path(topic, partition)), "wb") as file,
            pa.ipc.new_file(file, SCHEMA) as writer,
        ):
            for batch in reader.read(topic, partition, start, end, columns=ALL_COLUMNS):
                writer.write_batch(batch.cast(SCHEMA))
                count += batch.num_rows
        return count

    def read(
        self,
        topic: str,
        partition: int,
        start: int,
        end: int,
        *,
        columns: Sequence[str] = COLUMNS,
        bytes_max: int = 0,  # noqa: ARG002 - they were written in blocks
        tally: Callable[[int], None] | None = None,
    ) -> Iterator[pa.RecordBatch]:
        """Yield the records with offsets in [start, end), in offset order."""
        with pa.OSFile(str(self._path(topic, partition))) as file, pa.ipc.open_file(file) as reader:
            table = reader.read_all()
        offsets = table.column("offset")
        found = table.filter(pc.and_(pc.greater_equal(offsets, start), pc.less(offsets, end)))
        if tally is not None:
            tally(found.num_rows)
        yield from found.select(list(columns)).to_batches()

    def archives(
        self, _topic: str, _partition: int, _start: int, _end: int
    ) -> Iterator[ArchiveFile]:
        """Yield nothing: there are no archives of records that were written to files."""
        return iter(())

    def removed_tombstones(self, _topic: str) -> Removals:
        """Return that nothing was removed since."""
        return {}

    def _path(self, topic: str, partition: int) -> Path:
        return self.folder / f"{topic}-{partition}.arrow"
