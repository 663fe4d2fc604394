"""Reading a topic record by record: an iterator that sleeps at the end until more is committed.

Within a partition records come in offset order; between partitions no order is promised. The
consumer keeps its positions in memory only. For whole columns at once use ``EventLog.read``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Literal, Self

import pyarrow as pa

from millstream.errors import ConfigError, OffsetOutOfRangeError
from millstream.log.reader import LogReader
from millstream.record import Record, to_timestamp_ms

_FETCH_BYTES = 512 * 1024
_LOOK_UP_S = 0.2  # how often a waiting consumer looks whether it was closed


class Consumer:
    """An iterator of :class:`~millstream.record.Record`; see ``EventLog.consumer``.

    Guarantees: belongs to one thread; :meth:`close` may be called from any.
    """

    def __init__(
        self,
        reader: LogReader,
        topic: str,
        *,
        start: Literal["earliest", "latest"] | datetime | Mapping[int, int],
        follow: bool,
    ) -> None:
        self._reader = reader
        self._topic = topic
        bounds = reader.offsets(topic)
        self._next = _start_offsets(reader, topic, bounds, start)
        self._stop = None if follow else {number: bounds[number][1] for number in self._next}
        self._turn = deque(self._next)
        self._fetched: Iterator[Record] = iter(())
        self._positions = dict(self._next)
        self._closed = False

    @property
    def positions(self) -> dict[int, int]:
        """The next offset of each partition: one past the last record that was handed out."""
        return dict(self._positions)

    def close(self) -> None:
        """End the iteration, at the latest 0.2 s later if it waits."""
        self._closed = True

    def __iter__(self) -> Iterator[Record]:
        return self

    def __next__(self) -> Record:
        while not self._closed:
            record = next(self._fetched, None)
            if record is not None:
                self._positions[record.partition] = record.offset + 1
                return record
            if not self._fetch():
                if self._stop is not None:
                    break
                self._wait()
        raise StopIteration

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _wait(self) -> None:
        ends = [end for _, end in self._reader.offsets(self._topic)]
        seen = [self._next.get(number, end) for number, end in enumerate(ends)]
        self._reader.wait(self._topic, seen, _LOOK_UP_S)

    def _fetch(self) -> bool:
        """Read some records of the next partition that has any; False when none has."""
        bounds = self._reader.offsets(self._topic)
        for _ in range(len(self._turn)):
            self._turn.rotate(-1)
            number = self._turn[-1]
            start = self._next[number]
            end = bounds[number][1] if self._stop is None else self._stop[number]
            if start >= end:
                continue
            read = self._reader.read(self._topic, number, start, end, bytes_max=_FETCH_BYTES)
            batch = next(read, None)
            if batch is None:
                self._next[number] = end  # nothing but control records
                continue
            self._next[number] = batch["offset"][-1].as_py() + 1
            self._fetched = _records(self._topic, number, batch)
            return True
        return False


def _records(topic: str, partition: int, batch: pa.RecordBatch) -> Iterator[Record]:
    columns = (
        batch["offset"].to_pylist(),
        batch["timestamp"].cast(pa.int64()).to_pylist(),
        batch["key"].to_pylist(),
        batch["value"].to_pylist(),
    )
    for offset, timestamp_ms, key, value in zip(*columns, strict=True):
        yield Record(topic, partition, offset, timestamp_ms, key, value)


def _start_offsets(
    reader: LogReader,
    topic: str,
    bounds: list[tuple[int, int]],
    start: Literal["earliest", "latest"] | datetime | Mapping[int, int],
) -> dict[int, int]:
    if start == "earliest":
        return {number: low for number, (low, _) in enumerate(bounds)}
    if start == "latest":
        return {number: end for number, (_, end) in enumerate(bounds)}
    if isinstance(start, datetime):
        moment_ms = to_timestamp_ms(start)
        return {
            number: reader.offset_for_time(topic, number, moment_ms)
            for number in range(len(bounds))
        }
    if not isinstance(start, Mapping):
        raise ConfigError(
            f"start is {start!r}; give 'earliest', 'latest', a datetime, or offsets by partition "
            "such as {0: 17}"
        )
    for number, offset in start.items():
        if not 0 <= number < len(bounds):
            raise ConfigError(
                f"start names partition {number} of topic {topic!r}, which has 0 to "
                f"{len(bounds) - 1}; name one of these"
            )
        low, end = bounds[number]
        if not low <= offset <= end:
            raise OffsetOutOfRangeError(
                f"start is offset {offset} of {topic}/{number}, which holds [{low}, {end}); "
                "start within these",
                start=low,
                end=end,
            )
    return dict(start)
