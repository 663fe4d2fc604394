"""Reading a topic of a folder record by record: its partitions in turn, block by block."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from millstream.client.consumer import CLOSED_CHECK_S, Consumer
from millstream.log.decoding import ALL_COLUMNS
from millstream.log.reader import LogReader
from millstream.record import Headers, Record

_FETCH_BYTES = 512 * 1024


class FolderConsumer(Consumer):
    """An iterator of records; see ``EventLog.consumer``."""

    def __init__(self, reader: LogReader, topic: str, **options: Any) -> None:
        super().__init__(reader, topic, **options)
        self._rotation = deque(self._next)

    def _fetch(self) -> bool:
        """Read some records of the next partition that has any; False when none has."""
        bounds = self._reader.offsets(self._topic)
        if self._grows:
            self._rotation.extend(self._add_partitions(bounds))
        for _ in range(len(self._rotation)):
            self._rotation.rotate(-1)
            number = self._rotation[-1]
            start = self._next[number]
            end = bounds[number][1] if self._stop is None else self._stop[number]
            if start >= end:
                continue
            read = self._reader.read(
                self._topic, number, start, end, columns=ALL_COLUMNS, bytes_max=_FETCH_BYTES
            )
            batch = next(read, None)
            if batch is None:
                # Offsets without a record: markers of transactions, or what compaction removed.
                self._next[number] = self._positions[number] = self._done[number] = end
                continue
            self._next[number] = batch["offset"][-1].as_py() + 1
            self._fetched = _records(self._topic, number, batch)
            return True
        return False

    def _wait(self) -> None:
        ends = [end for _, end in self._reader.offsets(self._topic)]
        seen = [self._next.get(number, end) for number, end in enumerate(ends)]
        self._reader.wait(self._topic, seen, CLOSED_CHECK_S)


def _records(topic: str, partition: int, batch: pa.RecordBatch) -> Iterator[Record]:
    columns = (
        batch["offset"].to_pylist(),
        batch["timestamp"].cast(pa.int64()).to_pylist(),
        batch["key"].to_pylist(),
        batch["value"].to_pylist(),
        _headers(batch["headers"]),
    )
    for offset, timestamp_ms, key, value, headers in zip(*columns, strict=True):
        yield Record(topic, partition, offset, timestamp_ms, key, value, headers)


def _headers(column: pa.ListArray) -> list[Headers]:
    if not len(column.flatten()):
        return [()] * len(column)
    return [
        tuple((header["key"], header["value"]) for header in of_record)
        for of_record in column.to_pylist()
    ]
