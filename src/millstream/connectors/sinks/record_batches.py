"""RecordBatches: the next records of a topic, and those between bounds that were noted, as batches for a sink."""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from millstream.client.log import EventLog
from millstream.client.reader import Reader
from millstream.connectors.sinks.connector import RefusedRecord, SinkRecord, WrittenNumber
from millstream.errors import ConflictError, OffsetOutOfRangeError

_COLUMNS = ("offset", "timestamp", "key", "value", "headers")
_READ_BYTES = 1 << 20
_DIFF = "_diff"  # of rows that take others back, as `views/sinks/topic_records.py` writes them


@dataclass(slots=True)
class ReadRecords:
    """What was read: records, those that are none, and the bounds, half-open, of each partition that was read."""

    records: list[SinkRecord] = field(default_factory=list)
    refused: list[RefusedRecord] = field(default_factory=list)
    raw: dict[tuple[int, int], tuple[bytes | None, bytes | None, int]] = field(default_factory=dict)
    starts: dict[int, int] = field(default_factory=dict)
    ends: dict[int, int] = field(default_factory=dict)
    value_bytes: int = 0

    @property
    def count(self) -> int:
        """How many records were read, also those that are refused."""
        return len(self.raw)

    @property
    def last_ms(self) -> int | None:
        """The time of the newest record."""
        return max((time_ms for _, _, time_ms in self.raw.values()), default=None)


class RecordBatches:
    """Reads a topic that has this id; for one thread."""

    def __init__(
        self, log: EventLog, topic: str, topic_id: str, records_max: int, bytes_max: int
    ) -> None:
        self.topic = topic
        self._reader: Reader = log.reader({topic: topic_id})
        self._records_max = records_max
        self._bytes_max = bytes_max
        self._turns: deque[int] = deque()

    def bounds(self) -> list[tuple[int, int]]:
        """Return for each partition where its records begin and end."""
        return self._reader.offsets(self.topic)

    def wait(self, positions: Mapping[int, int], timeout_s: float) -> None:
        """Wait until there is more than up to these positions."""
        seen = [positions.get(partition, 0) for partition in range(len(self.bounds()))]
        self._reader.wait(self.topic, seen, timeout_s)

    def next(self, positions: Mapping[int, int]) -> ReadRecords:
        """Read on from these positions until a batch is full, or there is no more.

        Raises:
            ConflictError: records from there on are gone, or were there once.
        """
        found = ReadRecords()
        bounds = self.bounds()
        self._turns.extend(range(len(self._turns), len(bounds)))
        for _ in range(len(bounds)):
            if self._is_full(found):
                break
            partition = self._turns[0]
            self._turns.rotate(-1)
            start, end = positions.get(partition, bounds[partition][0]), bounds[partition][1]
            if start < end:
                self._read(found, partition, start, end, whole=False)
            elif start > end:
                raise ConflictError(
                    f"{self.topic}/{partition} ends at {end}, and was written up to {start}: it lost records, or was restored from "
                    "an older copy. Others come under the same offsets now: give the sink another name; it begins anew."
                )
        return found

    def between(self, starts: Mapping[int, int], ends: Mapping[int, int]) -> ReadRecords:
        """Read what is between bounds, however much it is: they were a batch.

        Raises:
            ConflictError: records of it are gone.
        """
        found = ReadRecords()
        for partition, start in sorted(starts.items()):
            self._read(found, partition, start, ends[partition], whole=True)
        return found

    def _is_full(self, found: ReadRecords) -> bool:
        return found.count >= self._records_max or found.value_bytes >= self._bytes_max

    def _read(
        self, found: ReadRecords, partition: int, start: int, end: int, *, whole: bool
    ) -> None:
        found.starts[partition], found.ends[partition] = start, end
        try:
            for offset, timestamp_ms, key, value, headers in self._rows(partition, start, end):
                if not whole and self._is_full(found):
                    found.ends[partition] = offset
                    return
                record = SinkRecord(partition, offset, timestamp_ms, key, value, None)
                _add(found, record, headers)
        except OffsetOutOfRangeError as error:
            raise ConflictError(
                f"records of {self.topic}/{partition} were removed before they were written: the next one was {start}, and "
                f"the topic has [{error.start}, {error.end}). Let it keep more (retention), and give the sink another name: "
                "it begins with what is there."
            ) from error

    def _rows(self, partition: int, start: int, end: int) -> Iterator[tuple[Any, ...]]:
        for batch in self._reader.read(
            self.topic, partition, start, end, columns=_COLUMNS, bytes_max=_READ_BYTES
        ):
            columns = (
                batch.column(name).cast("int64") if name == "timestamp" else batch.column(name)
                for name in _COLUMNS
            )
            yield from zip(*(column.to_pylist() for column in columns), strict=True)


def _add(found: ReadRecords, record: SinkRecord, headers: list[dict[str, Any]] | None) -> None:
    """Add a record with its row, or refuse it."""
    partition, offset, value = record.partition, record.offset, record.value
    found.raw[partition, offset] = (record.key, value, record.timestamp_ms)
    found.value_bytes += len(value or b"")
    try:
        row = None if value is None else _row(value)
        _refuse_retraction(row, headers)
    except (ValueError, RecursionError) as error:
        found.refused.append(RefusedRecord(partition, offset, str(error)))
    else:
        found.records.append(replace(record, row=row))


def _row(value: bytes) -> dict[str, Any]:
    try:
        row = json.loads(value.decode(), parse_constant=_refuse_constant, parse_float=_number)
    except UnicodeDecodeError:
        raise ValueError("the value is no UTF-8, and a sink takes JSON objects") from None
    except ValueError as error:
        raise ValueError(f"the value is no JSON: {error}") from None
    if isinstance(row, dict):
        return row
    raise ValueError(f"the value is JSON, but a {type(row).__name__}, and a sink takes objects")


def _number(text: str) -> WrittenNumber:
    number = WrittenNumber(text)
    if math.isinf(number):
        raise ValueError(f"{text[:40]} is a number too large")
    return number


def _refuse_constant(text: str) -> float:
    raise ValueError(f"{text} is no number of JSON")


def _refuse_retraction(row: Mapping[str, Any] | None, headers: list[dict[str, Any]] | None) -> None:
    """Refuse a row that takes another one back: written as a row, it would be one more."""
    named = any(header["key"] == _DIFF and header["value"] == b"-1" for header in headers or ())
    if named or (row is not None and row.get(_DIFF) == -1):
        raise ValueError(
            'it takes another row back (_diff is -1), which a sink cannot do. Write the topic with .to(…, key=…, cleanup="compact"): '
            "such rows are tombstones there"
        )
