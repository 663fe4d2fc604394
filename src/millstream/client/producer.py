"""Sending records: gathered for a moment, encoded as batches, acknowledged when durable.

``send`` puts a record into the queue of its partition and returns a future; a thread of the
producer takes all queues together and hands them to the group commit. What waits is bounded:
``send`` blocks while more than 64 MiB are on their way. A failure reaches the futures, and the next
``flush`` or ``close``, so that nobody who ignores futures loses records without being told.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Self

import numpy as np
import pyarrow as pa

from millstream.client.columns import Columns, as_columns
from millstream.errors import ConfigError, FencedError, MillstreamError, RetriableError
from millstream.log.batch import EncodedBatch
from millstream.log.encoding import Row, check_record_size, encode_rows, split_columns
from millstream.log.group_commit import PendingAppend
from millstream.log.murmur2 import partition_of, partitions_of
from millstream.log.writer import LogWriter
from millstream.record import TopicPartition

LINGER_MS = 2.0
BATCH_BYTES_MAX = 1 << 20
BUFFER_BYTES_MAX = 64 << 20
_BULK_ROWS = 100_000  # rows encoded at a time: bounds what send_many holds beside its input


class _Rows:
    """Records for one partition that will travel in one batch, and who waits for them."""

    __slots__ = ("futures", "rows", "size")

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.futures: list[Future[tuple[int, int]]] = []
        self.size = 0

    def encode(self) -> EncodedBatch:
        return encode_rows(self.rows)

    def done(self, partition: int, offset: int) -> None:
        for delta, future in enumerate(self.futures):
            future.set_result((partition, offset + delta))

    def failed(self, error: BaseException) -> None:
        for future in self.futures:
            future.set_exception(error)


class _Bulk:
    """One encoded batch of a ``send_many``."""

    __slots__ = ("batch", "size", "whole")

    def __init__(self, batch: EncodedBatch, whole: _BulkFuture) -> None:
        self.batch = batch
        self.size = batch.size
        self.whole = whole

    def encode(self) -> EncodedBatch:
        return self.batch

    def done(self, _partition: int, _offset: int) -> None:
        self.whole.count(self.batch.count)

    def failed(self, error: BaseException) -> None:
        self.whole.fail(error)


class _BulkFuture:
    """Counts the batches of one ``send_many`` home; touched by the sender thread and the caller."""

    def __init__(self, rows: int) -> None:
        self.future: Future[int] = Future()
        self._rows = rows
        self._left = rows
        self._lock = threading.Lock()

    def count(self, rows: int) -> None:
        with self._lock:
            self._left -= rows
            finished = self._left == 0 and not self.future.done()
        if finished:
            self.future.set_result(self._rows)

    def fail(self, error: BaseException) -> None:
        with self._lock:
            first = not self.future.done()
        if first:
            self.future.set_exception(error)


class Producer:
    """Sends records to any topic of one log; see ``EventLog.producer``. Thread-safe.

    Records of one thread for one partition keep their order. Use it in ``with``, or ``close`` it.
    """

    def __init__(
        self,
        writer: LogWriter,
        *,
        linger_ms: float = LINGER_MS,
        clock_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
    ) -> None:
        if linger_ms < 0:
            raise ConfigError(f"linger_ms is {linger_ms}; give 0 or more milliseconds")
        self._writer = writer
        self._linger_s = linger_ms / 1000
        self._clock_ms = clock_ms
        self._changed = threading.Condition()
        self._queues: dict[TopicPartition, list[_Rows | _Bulk]] = {}
        self._queued_bytes = 0
        self._sending_bytes = 0
        self._first_queued_s = 0.0
        self._urgent = 0
        self._sticky: dict[str, int] = {}
        self._closing = False
        self._dead: BaseException | None = None
        self._unreported: MillstreamError | None = None
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name="millstream-producer", daemon=True)
        self._thread.start()

    # -- sending ------------------------------------------------------------------------------

    def send(
        self,
        topic: str,
        value: object,
        *,
        key: bytes | str | int | None = None,
        timestamp_ms: int | None = None,
        partition: int | None = None,
    ) -> Future[tuple[int, int]]:
        """Send one record; the future gives (partition, offset) once it is durable and visible.

        Args:
            value: bytes, str, None for a tombstone, or anything that JSON can express.
            key: bytes, str, or an int (as decimal text). Records with equal keys go to the same
                partition, the one that Kafka's clients choose; without a key, batches take turns.
            timestamp_ms: When it happened; now, if not given.

        Raises:
            UnknownTopicError, ConfigError: there is no such topic or partition; the value is not
                JSON.
            RecordTooLargeError: the record is larger than 64 MiB.
            MillstreamError: the producer has failed before; it names why.
        """
        moment = self._clock_ms() if timestamp_ms is None else timestamp_ms
        row = Row(moment, encode_key(key), encode_value(value))
        check_record_size(row.size)
        future: Future[tuple[int, int]] = Future()
        with self._changed:
            self._check()
            number = self._choose(topic, row.key, partition)
            self._wait_for_room(row.size)
            queue = self._queues.setdefault(TopicPartition(topic, number), [])
            last = queue[-1] if queue else None
            if not isinstance(last, _Rows) or last.size + row.size > BATCH_BYTES_MAX:
                last = _Rows()
                queue.append(last)
            last.rows.append(row)
            last.futures.append(future)
            last.size += row.size
            self._queued(row.size)
        return future

    def send_many(
        self,
        topic: str,
        table: pa.Table | pa.RecordBatch | None = None,
        *,
        values: Any = None,
        keys: Any = None,
        timestamps_ms: Any = None,
    ) -> Future[int]:
        """Send many records from columns; the future gives their number once all are durable.

        Much cheaper per record than ``send``: partitions are chosen and batches encoded by column.
        Blocks while more than 64 MiB are on their way. If it fails, some of the records may have
        been appended.

        Args:
            table: With the columns value and, if wanted, key and timestamp; or give the columns:
            values: An Arrow array (or a sequence) of bytes or text; null is a tombstone.
            keys: The same for keys; null has none.
            timestamps_ms: Milliseconds as integers, or Arrow timestamps; now, if not given.

        Raises:
            UnknownTopicError, ConfigError: there is no such topic; a column has another type or
                length.
            RecordTooLargeError: a record is larger than 64 MiB.
            MillstreamError: the producer has failed before; it names why.
        """
        self._check()
        columns = as_columns(table, values, keys, timestamps_ms, self._clock_ms)
        whole = _BulkFuture(len(columns.values))
        partitions = self._partition_count(topic)
        if not len(columns.values):
            whole.future.set_result(0)
        for start in range(0, len(columns.values), _BULK_ROWS):
            for number, part in self._split(topic, columns.slice(start, _BULK_ROWS), partitions):
                for batch in split_columns(*part, bytes_max=BATCH_BYTES_MAX):
                    with self._changed:
                        self._wait_for_room(batch.size)
                        queue = self._queues.setdefault(TopicPartition(topic, number), [])
                        queue.append(_Bulk(batch, whole))
                        self._queued(batch.size)
        return whole.future

    def flush(self) -> None:
        """Return when everything sent so far is durable.

        Raises:
            MillstreamError: some records sent since the last flush were not appended; their futures
                say which.
        """
        with self._changed:
            self._check()
            self._urgent += 1
            self._changed.notify_all()
            try:
                while (self._queued_bytes or self._sending_bytes) and self._dead is None:
                    self._changed.wait()
            finally:
                self._urgent -= 1
            if self._dead is not None:
                self._unreported = None
                raise self._dead
            error, self._unreported = self._unreported, None
        if error is not None:
            raise error

    def close(self) -> None:
        """Flush, and stop. Harmless when called again.

        Raises:
            MillstreamError: as from :meth:`flush`.
        """
        if self._closing or os.getpid() != self._pid:
            return
        try:
            if self._dead is None or self._unreported is not None:
                self.flush()
        finally:
            with self._changed:
                self._closing = True
                self._changed.notify_all()
            self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except MillstreamError:
            if error is None:
                raise

    # -- choosing partitions ------------------------------------------------------------------

    def _partition_count(self, topic: str) -> int:
        return self._writer.partition_count(topic)

    def _choose(self, topic: str, key: bytes | None, partition: int | None) -> int:
        count = self._partition_count(topic)
        if partition is not None:
            if not 0 <= partition < count:
                raise ConfigError(
                    f"topic {topic!r} has no partition {partition}; choose one of 0 to {count - 1}"
                )
            return partition
        if key is not None:
            return partition_of(key, count)
        return self._sticky.get(topic, 0) % count

    def _split(self, topic: str, columns: Columns, partitions: int) -> list[tuple[int, Columns]]:
        """Return the rows for each partition, in their order."""
        if columns.keys is None or partitions == 1:
            return [(self._turn(topic, partitions), columns)]
        chosen = partitions_of(columns.keys, partitions)
        if (chosen < 0).any():
            chosen[chosen < 0] = self._turn(topic, partitions)
        order = np.argsort(chosen, kind="stable")
        ends = np.searchsorted(chosen[order], np.arange(partitions), side="right")
        out, start = [], 0
        for number, end in enumerate(ends.tolist()):
            if end > start:
                out.append((number, columns.take(order[start:end])))
            start = end
        return out

    def _turn(self, topic: str, partitions: int) -> int:
        number = self._sticky.get(topic, 0)
        self._sticky[topic] = number + 1
        return number % partitions

    # -- the queue; all of it under the condition ---------------------------------------------

    def _check(self) -> None:
        if os.getpid() != self._pid:
            raise FencedError("this producer was made before a fork; make one in the parent only")
        if self._dead is not None:
            raise self._dead
        if self._closing:
            raise FencedError("this producer was closed; make another one")

    def _wait_for_room(self, size: int) -> None:
        self._check()
        while self._on_the_way() and self._on_the_way() + size > BUFFER_BYTES_MAX:
            self._urgent += 1
            self._changed.notify_all()
            self._changed.wait()
            self._urgent -= 1
            self._check()

    def _on_the_way(self) -> int:
        return self._queued_bytes + self._sending_bytes

    def _queued(self, size: int) -> None:
        before = self._queued_bytes
        self._queued_bytes += size
        if not before:
            self._first_queued_s = time.monotonic()
        if not before or before < BATCH_BYTES_MAX <= self._queued_bytes:
            self._changed.notify_all()

    # -- the sender thread --------------------------------------------------------------------

    def _run(self) -> None:
        taken: list[tuple[TopicPartition, _Rows | _Bulk]] = []
        try:
            while taken := self._take():
                self._send(taken)
        except BaseException as error:  # noqa: BLE001 - raised again by the next call
            with self._changed:
                self._dead = error
                left = taken + [(name, part) for name, q in self._queues.items() for part in q]
                self._queues = {}
                self._queued_bytes = self._sending_bytes = 0
                self._changed.notify_all()
            for _, part in left:
                part.failed(error)

    def _take(self) -> list[tuple[TopicPartition, _Rows | _Bulk]]:
        """Wait for records and for their linger to pass; return them all. Empty: closed."""
        with self._changed:
            while True:
                if self._queued_bytes:
                    due_s = self._first_queued_s + self._linger_s - time.monotonic()
                    full = self._queued_bytes >= BATCH_BYTES_MAX
                    if due_s <= 0 or full or self._urgent or self._closing:
                        break
                    self._changed.wait(due_s)
                elif self._closing:
                    return []
                else:
                    self._changed.wait()
            queues, self._queues = self._queues, {}
            self._sending_bytes, self._queued_bytes = self._queued_bytes, 0
            for topic in {name.topic for name in queues}:
                self._sticky[topic] = self._sticky.get(topic, 0) + 1
        return [(name, part) for name, queue in queues.items() for part in queue]

    def _send(self, taken: Sequence[tuple[TopicPartition, _Rows | _Bulk]]) -> None:
        """Append what was taken, tell the futures, and make room."""
        appends: list[tuple[_Rows | _Bulk, TopicPartition, PendingAppend]] = []
        for name, part in taken:
            try:
                append = self._writer.pending(name.topic, name.partition, part.encode())
            except MillstreamError as error:
                self._report(part, error)
            else:
                appends.append((part, name, append))
        self._writer.commit([append for _, _, append in appends])
        for part, name, append in appends:
            if append.error is None:
                part.done(name.partition, append.offset)
            else:
                self._report(part, append.error)
        with self._changed:
            self._sending_bytes = 0
            self._changed.notify_all()

    def _report(self, part: _Rows | _Bulk, error: MillstreamError) -> None:
        part.failed(error)
        with self._changed:
            self._unreported = self._unreported or error
            if not isinstance(error, RetriableError | ConfigError):
                self._dead = error


def encode_key(key: bytes | str | int | None) -> bytes | None:
    """Return the bytes of a key: text as UTF-8, a whole number as decimal text.

    Raises:
        ConfigError: it is of another type.
    """
    if key is None or isinstance(key, bytes):
        return key
    if isinstance(key, str):
        return key.encode()
    if isinstance(key, int) and not isinstance(key, bool):
        return b"%d" % key
    raise ConfigError(f"key {key!r} is a {type(key).__name__}; give bytes, str or int")


def encode_value(value: object) -> bytes | None:
    """Return the bytes of a value: text as UTF-8, other things as compact JSON.

    Raises:
        ConfigError: JSON cannot express it.
    """
    if value is None or isinstance(value, bytes):
        return value
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, bytearray | memoryview):
        return bytes(value)
    try:
        return json.dumps(
            value, separators=(",", ":"), ensure_ascii=False, allow_nan=False
        ).encode()
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"the value {value!r:.200} cannot be sent: {error}; give bytes, str, or something "
            "that JSON can express"
        ) from error
