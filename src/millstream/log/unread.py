"""How many records a reader still has to read: offsets without a record for readers do not count.

Markers of transactions, aborted records, and records that compaction removed have offsets, and readers do not
get them; a group that has read every record must not have a lag.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import pyarrow as pa

from millstream.errors import CorruptionError, OffsetOutOfRangeError, RetriableError

BLOCK_BYTES = 256 << 10
BLOCKS_MAX = 4


class RangeReader(Protocol):
    """The call of a reader: see :meth:`millstream.log.reader.LogReader.read`."""

    def read(
        self,
        topic: str,
        partition: int,
        start: int,
        end: int,
        *,
        columns: Sequence[str] = ...,
        bytes_max: int = ...,
    ) -> Iterator[pa.RecordBatch]: ...


def count_unread(reader: RangeReader, topic: str, partition: int, start: int, end: int) -> int:
    """Count the records with offsets in [start, end) that the reader would return.

    Exact as far as the first ``BLOCKS_MAX`` blocks go; beyond them offsets are counted, as
    Kafka does. So 0 is always exact: only then is there no record.
    """
    if start >= end:
        return 0
    counted, at = 0, start
    blocks = reader.read(topic, partition, start, end, columns=("offset",), bytes_max=BLOCK_BYTES)
    try:
        for _ in range(BLOCKS_MAX):
            block = next(blocks, None)
            if block is None:
                return counted
            counted += block.num_rows
            at = block.column(0)[-1].as_py() + 1
    except (CorruptionError, OffsetOutOfRangeError, RetriableError):
        pass  # what cannot be read now is not read
    return counted + end - at
