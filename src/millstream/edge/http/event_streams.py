"""Records as server-sent events, from any position on.

The id of an event is the next offset of every partition that is read, and the topic's id. So a client that
resumes with it misses nothing and gets nothing twice. A stream is nothing but these offsets: nothing is
queued for it, and it reads more when the client has taken what was sent. So a slow client delays nobody, and
costs the memory of one read, whatever its lag.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any, TypeVar

import pyarrow as pa
from anyio import CapacityLimiter, to_thread

from millstream.client.json_record import record_as_json
from millstream.client.reader import Reader
from millstream.edge.http.request_params import event_id
from millstream.edge.http.topic_watcher import TopicWatcher, WatchedTopic
from millstream.errors import (
    CorruptBatchError,
    MillstreamError,
    OffsetOutOfRangeError,
    TopicRecreatedError,
    UnknownTopicError,
)
from millstream.http import EVENT_STREAM_START, HEARTBEAT, json_event, server_sent_event
from millstream.log.decoding import ALL_COLUMNS
from millstream.record import Record, TopicInfo

READ_BYTES = 256 << 10
RECORDS_AT_ONCE = 500
_THREADS = 8

T = TypeVar("T")


class RecordStreams:
    """Creates the streams; belongs to the event loop.

    Args:
        heartbeat_s: After how many seconds without a record a comment is sent.
    """

    def __init__(self, watcher: TopicWatcher, heartbeat_s: float) -> None:
        self._watcher = watcher
        self._heartbeat_s = heartbeat_s
        self._limiter = CapacityLimiter(_THREADS)

    async def run(self, read: Callable[[], T]) -> T:
        """Call a read in a thread."""
        return await to_thread.run_sync(read, limiter=self._limiter)

    async def events(
        self, reader: Reader, topic: TopicInfo, positions: dict[int, int], *, grows: bool
    ) -> AsyncIterator[bytes]:
        """Yield the records of a topic from these positions on, until the client disconnects.

        Ends with the event ``gone`` when requested records are no longer kept, or the topic was deleted,
        and with ``failed`` when they cannot be read.

        Args:
            reader: Belongs to this stream, and is pinned to the topic.
            grows: Whether partitions that are added are read as well.
        """
        at = dict(positions)
        yield EVENT_STREAM_START
        with self._watcher.watch(topic, [0] * len(at)) as watched:
            while not self._watcher.closing:
                try:
                    if watched.failure is not None:
                        raise watched.failure
                    number = _next_partition(watched, at, grows=grows)
                    if number is None:
                        if not await watched.wait_for_change(self._heartbeat_s):
                            yield HEARTBEAT
                        continue
                    end = watched.ends[number]
                    batch = await self.run(
                        partial(_read, reader, topic.name, number, at[number], end)
                    )
                    if batch is None:  # markers of transactions, or what compaction removed
                        at[number] = end
                        continue
                    for start in range(0, len(batch), RECORDS_AT_ONCE):
                        part = batch.slice(start, RECORDS_AT_ONCE)
                        yield await self.run(partial(_events, topic, number, part, at))
                except MillstreamError as error:
                    yield _error_event(error)
                    return


def _next_partition(watched: WatchedTopic, at: dict[int, int], *, grows: bool) -> int | None:
    """Return the next partition that has more records, round-robin; None if there is none."""
    if grows:
        for number in range(len(watched.ends)):
            at.setdefault(number, 0)
    ready = [n for n in at if n < len(watched.ends) and at[n] < watched.ends[n]]
    if not ready:
        return None
    number = ready[0]
    at[number] = at.pop(number)  # after the others next time
    return number


def _read(reader: Reader, topic: str, number: int, start: int, end: int) -> pa.RecordBatch | None:
    batches = reader.read(topic, number, start, end, columns=ALL_COLUMNS, bytes_max=READ_BYTES)
    return next(batches, None)


def _events(topic: TopicInfo, number: int, batch: pa.RecordBatch, at: dict[int, int]) -> bytes:
    """Return records as events, and advance ``at`` after them."""
    events = []
    columns = (
        batch["offset"].to_pylist(),
        batch["timestamp"].cast(pa.int64()).to_pylist(),
        batch["key"].to_pylist(),
        batch["value"].to_pylist(),
        batch["headers"].to_pylist(),
    )
    for offset, timestamp_ms, key, value, headers in zip(*columns, strict=True):
        at[number] = offset + 1
        pairs = tuple((header["key"], header["value"]) for header in headers or ())
        record = Record(topic.name, number, offset, timestamp_ms, key, value, pairs)
        name = event_id(at, topic.topic_id)
        events.append(server_sent_event(record_as_json(record), event_id=name))
    return b"".join(events)


def _error_event(error: MillstreamError) -> bytes:
    """Return the event that ends a stream, and says why."""
    content: dict[str, Any] = {"kind": type(error).__name__, "message": str(error)}
    if isinstance(error, OffsetOutOfRangeError | CorruptBatchError):
        content |= {"start": error.start, "end": error.end}
    gone = isinstance(error, OffsetOutOfRangeError | TopicRecreatedError | UnknownTopicError)
    return json_event(content, kind="gone" if gone else "failed")
