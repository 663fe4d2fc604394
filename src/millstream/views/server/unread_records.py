"""Since when the first record of a partition that an app has not read is there, by its timestamp."""

from __future__ import annotations

import pyarrow as pa

from millstream.client.reader import RecordReader

_LOOKED_AT_BYTES = 64 << 10  # of the records, for the first one's timestamp


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
