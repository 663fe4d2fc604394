"""What waits in a producer: parts, each of which will travel as one batch to one partition.

A part is either ``Rows``, which takes records while it waits, or ``Bulk``, a batch of a
``send_many`` that is encoded already. A part is told what became of it, and tells its futures.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import repeat

import numpy as np
import pyarrow as pa

from millstream.client.futures import Outcome, WholeFuture
from millstream.log.batch import EncodedBatch
from millstream.log.encoding import (
    ROWS_BY_HAND_MAX,
    Headers,
    Row,
    encode_columns,
    encode_rows,
)
from millstream.record import TopicPartition

ROW_OVERHEAD = Row(0, None, None).size  # what a record takes besides key, value and headers


class Rows:
    """Records for one partition, in their order, and who waits for them."""

    __slots__ = ("_headers", "_keys", "_timestamps_ms", "_values", "name", "outcome", "size")

    def __init__(self, name: TopicPartition) -> None:
        self.name = name
        self.size = 0
        self.outcome = Outcome()
        self._timestamps_ms: list[int] = []
        self._keys: list[bytes | None] = []
        self._values: list[bytes | None] = []
        self._headers: list[Headers] | None = None  # only if any record has some

    @property
    def count(self) -> int:
        """How many records it holds."""
        return len(self._values)

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
        """Let records go, oldest first, until ``size`` bytes are free; return how many.

        Call ``outcome.tell`` afterwards, without holding a lock.
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
        self.outcome.drop(count, error)
        return count

    def encode(self) -> EncodedBatch:
        """Return the batch.

        Raises:
            RecordTooLargeError: a record is larger than 64 MiB.
        """
        if self._headers is None and len(self._values) > ROWS_BY_HAND_MAX:
            return encode_columns(
                np.array(self._timestamps_ms, np.int64),
                pa.array(self._keys, pa.binary()),
                pa.array(self._values, pa.binary()),
            )
        return encode_rows(list(self._rows()))

    def _rows(self) -> Iterator[Row]:
        headers = repeat(()) if self._headers is None else self._headers
        columns = (self._timestamps_ms, self._keys, self._values, headers)
        return map(Row, *columns)

    def forget_records(self) -> None:
        """Let go of the records, which are kept elsewhere; the futures still wait."""
        for column in (self._timestamps_ms, self._keys, self._values, self._headers or []):
            column.clear()

    def appended(self, offset: int) -> None:
        """Tell the futures: the records lie from ``offset`` on."""
        self.outcome.appended(self.name.partition, offset)

    def failed(self, error: BaseException) -> None:
        """Tell the futures: none of the records was appended."""
        self.outcome.failed(error)


class Bulk:
    """One encoded batch of a ``send_many``."""

    __slots__ = ("_batch", "_whole", "count", "name", "size")

    def __init__(self, name: TopicPartition, batch: EncodedBatch, whole: WholeFuture) -> None:
        self.name = name
        self.size = batch.size
        self.count = batch.count
        self._batch: EncodedBatch | None = batch
        self._whole = whole

    def encode(self) -> EncodedBatch:
        """Return the batch."""
        assert self._batch is not None, "what was forgotten is not encoded again"
        return self._batch

    def forget_records(self) -> None:
        """Let go of the batch, which is kept elsewhere; the future still waits."""
        self._batch = None

    def appended(self, _offset: int) -> None:
        """Tell the future that so many more records are home."""
        self._whole.count(self.count)

    def failed(self, error: BaseException) -> None:
        """Tell the future that some records are not."""
        self._whole.fail(error)


Part = Rows | Bulk
