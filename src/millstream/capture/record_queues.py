"""Records on their way to a producer: few of a topic one by one, many by column.

A column costs a twentieth of as many records, and a hundred times one. The order of a topic's records is that in
which they came; that of different topics is not kept, and does not matter: they are of one transaction of the log.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa

from millstream.capture.envelope import CapturedRecord, CapturedRecords
from millstream.client.producer import Producer

if TYPE_CHECKING:
    from numpy.typing import NDArray

COLUMNS_MIN = 64  # measured: fewer records of a topic are sent quicker one by one
_QUEUED_MAX = 4096  # records of a topic that wait for more
_QUEUED_BYTES_MAX = 1 << 20
_WAITING_MAX = 20_000  # futures kept before it is looked whether the first ones failed


class _Columns(NamedTuple):
    keys: pa.Array
    values: pa.Array
    timestamps_ms: NDArray[np.int64]


@dataclass
class RecordQueues:
    """What is to be sent, by topic. For one thread.

    Args:
        one_partition: Topics of tables have one partition, as far as is known here.
    """

    producer: Producer
    one_partition: bool
    _queued: dict[str, list[CapturedRecord | CapturedRecords]] = field(default_factory=dict)
    _bytes: int = 0
    _waiting: list[Future[Any]] = field(default_factory=list)

    def add(self, record: CapturedRecord) -> None:
        """Take a record."""
        queued = self._queued.setdefault(record.topic, [])
        queued.append(record)
        self._bytes += len(record.value or b"")
        if len(queued) >= _QUEUED_MAX or self._bytes >= _QUEUED_BYTES_MAX:
            self._send_all()

    def add_many(self, records: CapturedRecords) -> None:
        """Take many records of a topic."""
        self._queued.setdefault(records.topic, []).append(records)
        self._bytes += records.values.nbytes
        if self._bytes >= _QUEUED_BYTES_MAX:
            self._send_all()

    def wait(self) -> None:
        """Send what is queued, and wait until all that was sent is in the log.

        Raises:
            MillstreamError: some of it is not.
        """
        self._send_all()
        if self._waiting:
            self.producer.flush()
        for sent in self._waiting:
            sent.result()
        self._waiting.clear()

    def clear(self) -> None:
        """Forget what was taken, sent or not."""
        self._queued.clear()
        self._waiting.clear()
        self._bytes = 0

    def _send_all(self) -> None:
        for topic in list(self._queued):
            self._send(topic)
        self._bytes = 0

    def _send(self, topic: str) -> None:
        """Send what is queued of a topic: stretches of records with a key, and without headers, by column."""
        stretch: list[CapturedRecord] = []
        columns: list[_Columns] = []
        for record in self._queued.pop(topic, ()):
            if isinstance(record, CapturedRecord) and _is_by_key(record):
                stretch.append(record)
                continue
            columns += self._columns_of(stretch, few=not columns)
            stretch = []
            if isinstance(record, CapturedRecords) and record.keys is not None:
                times = np.full(len(record.values), record.timestamp_ms, np.int64)
                columns.append(_Columns(record.keys, record.values, times))
                continue
            self._send_columns(topic, columns)
            columns = []
            self._send_unkeyed(record)
        columns += self._columns_of(stretch, few=not columns)
        self._send_columns(topic, columns)

    def _columns_of(self, records: list[CapturedRecord], *, few: bool) -> list[_Columns]:
        """Return records as columns; send them one by one if they are few, and there are no columns before them."""
        if not records:
            return []
        if few and len(records) < COLUMNS_MIN:
            for record in records:
                self._one(record)
            return []
        keys = pa.array([record.key for record in records], pa.binary())
        values = pa.array([record.value for record in records], pa.binary())
        times = np.array([record.timestamp_ms for record in records], np.int64)
        return [_Columns(keys, values, times)]

    def _send_columns(self, topic: str, parts: list[_Columns]) -> None:
        if not parts:
            return
        keys, values, times = parts[0]
        if len(parts) > 1:  # a copy of all that is sent
            keys, values = (pa.concat_arrays([part[place] for part in parts]) for place in range(2))
            times = np.concatenate([part.timestamps_ms for part in parts])
        self._sent(self.producer.send_many(topic, values=values, keys=keys, timestamps_ms=times))

    def _send_unkeyed(self, records: CapturedRecord | CapturedRecords) -> None:
        """Send what columns cannot have: headers, or a partition that is not that of a key."""
        if isinstance(records, CapturedRecord):
            self._one(records)
            return
        for value in records.values.to_pylist():
            self._one(CapturedRecord(records.topic, None, value, records.timestamp_ms))

    def _one(self, record: CapturedRecord) -> None:
        partition = record.partition
        # An older run may have made the topic with more partitions: what names one goes there.
        if partition is None and record.key is None and self.one_partition:
            partition = 0
        self._sent(
            self.producer.send(
                record.topic,
                record.value,
                key=record.key,
                timestamp_ms=record.timestamp_ms,
                headers=dict(record.headers) or None,
                partition=partition,
            )
        )

    def _sent(self, future: Future[Any]) -> None:
        self._waiting.append(future)
        if len(self._waiting) >= _WAITING_MAX:
            self.producer.flush()
            for sent in self._waiting:
                sent.result()
            self._waiting.clear()


def _is_by_key(record: CapturedRecord) -> bool:
    """Say whether a record can be sent by column: its partition is that of its key, and it has no headers."""
    return record.key is not None and not record.headers and record.partition is None
