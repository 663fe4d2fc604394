"""The queued records of a producer: producer batches, each sent as one record batch to a partition.

A producer batch is either ``OpenBatch``, which takes records while it waits, or ``BulkBatch``, a batch of a
``send_many`` that is encoded already. It gets its result, and completes its futures. A ``PendingAppend`` is
one attempt to append it, once it is encoded.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import repeat

import numpy as np
import pyarrow as pa

from millstream.client.futures import BulkFuture, SendResult
from millstream.log.batch import EncodedBatch
from millstream.log.encoding import (
    RECORDS_BY_HAND_MAX,
    SimpleRecord,
    encode_columns,
    encode_records,
)
from millstream.record import Headers, TopicPartition


class OpenBatch:
    """Records for one partition, in their order, and their result."""

    __slots__ = (
        "_dropped",
        "_headers",
        "_keys",
        "_timestamps_ms",
        "_values",
        "name",
        "send_result",
        "size",
    )

    def __init__(self, name: TopicPartition) -> None:
        self.name = name
        self.size = 0
        self.send_result = SendResult()
        self._dropped = 0
        self._timestamps_ms: list[int] = []
        self._keys: list[bytes | None] = []
        self._values: list[bytes | None] = []
        self._headers: list[Headers] | None = None  # only if any record has some

    @property
    def count(self) -> int:
        """How many records it holds."""
        return len(self._values)

    @property
    def next_index(self) -> int:
        """The index of the next record in the batch's result, in which dropped records keep theirs."""
        return self._dropped + len(self._values)

    def add(
        self,
        timestamp_ms: int,
        key: bytes | None,
        value: bytes | None,
        headers: Headers,
        size: int,
    ) -> None:
        """Take a record, which counts as ``size`` bytes."""
        if self._headers is not None:
            self._headers.append(headers)
        elif headers:
            self._headers = [*repeat((), len(self._values)), headers]
        self._timestamps_ms.append(timestamp_ms)
        self._keys.append(key)
        self._values.append(value)
        self.size += size

    def drop_oldest(self, size: int, error: BaseException) -> int:
        """Drop records, oldest first, until ``size`` bytes are free; return how many.

        Call ``send_result.notify`` afterwards, without holding a lock.
        """
        count, freed = 0, 0
        for row in self._rows():
            if freed >= size:
                break
            freed += row.size
            count += 1
        for column in (self._timestamps_ms, self._keys, self._values, self._headers or []):
            del column[:count]
        self.size -= freed
        self._dropped += count
        self.send_result.drop(count, error)
        return count

    def encode(self) -> EncodedBatch:
        """Return the batch.

        Raises:
            RecordTooLargeError: a record is larger than 64 MiB.
        """
        if self._headers is None and len(self._values) > RECORDS_BY_HAND_MAX:
            return encode_columns(
                np.array(self._timestamps_ms, np.int64),
                pa.array(self._keys, pa.binary()),
                pa.array(self._values, pa.binary()),
            )
        return encode_records(list(self._rows()))

    def _rows(self) -> Iterator[SimpleRecord]:
        headers = repeat(()) if self._headers is None else self._headers
        columns = (self._timestamps_ms, self._keys, self._values, headers)
        return map(SimpleRecord, *columns)

    def release_records(self) -> None:
        """Free the records, which are kept elsewhere; the futures still wait."""
        for column in (self._timestamps_ms, self._keys, self._values, self._headers or []):
            column.clear()

    def appended(self, offset: int) -> None:
        """Complete the futures: the records were appended from ``offset`` on."""
        self.send_result.set_appended(self.name.partition, offset)

    def failed(self, error: BaseException) -> None:
        """Complete the futures with an error: none of the records was appended."""
        self.send_result.set_failed(error)


class BulkBatch:
    """One encoded batch of a ``send_many``."""

    __slots__ = ("_batch", "_whole", "count", "name", "size")

    def __init__(self, name: TopicPartition, batch: EncodedBatch, whole: BulkFuture) -> None:
        self.name = name
        self.size = batch.size
        self.count = batch.count
        self._batch: EncodedBatch | None = batch
        self._whole = whole

    def encode(self) -> EncodedBatch:
        """Return the batch."""
        assert self._batch is not None, "a batch that was released is not encoded again"
        return self._batch

    def release_records(self) -> None:
        """Free the batch, which is kept elsewhere; the future still waits."""
        self._batch = None

    def appended(self, _offset: int) -> None:
        """Report to the future that the records were appended."""
        self._whole.add_appended(self.count)

    def failed(self, error: BaseException) -> None:
        """Report to the future that the records were not appended."""
        self._whole.fail(error)


ProducerBatch = OpenBatch | BulkBatch
