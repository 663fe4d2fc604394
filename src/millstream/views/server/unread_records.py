"""Since when the first record of a partition that an app has not read is there, by its timestamp."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import pyarrow as pa

_LOOKED_AT_BYTES = 64 << 10  # of the records, for the first one's timestamp


class RecordReader(Protocol):
    """What reads records of a log."""

    def read(
        self,
        topic: str,
        partition: int,
        start: int,
        end: int,
        *,
        columns: Sequence[str],
        bytes_max: int,
    ) -> Iterator[pa.RecordBatch]: ...


def first_timestamp_ms(
    reader: RecordReader, topic: str, partition: int, start: int, end: int
) -> int | None:
    """Return the timestamp of the first record with an offset in [start, end); None if there is none.

    Raises:
        MillstreamError, OSError: it cannot be read.
    """
    columns = ("timestamp",)
    for block in reader.read(
        topic, partition, start, end, columns=columns, bytes_max=_LOOKED_AT_BYTES
    ):
        if block.num_rows:
            first_ms: int = block.column(0).cast(pa.int64())[0].as_py()
            return first_ms
    return None
