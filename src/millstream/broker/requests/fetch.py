"""Fetch: batches as stored, for one or several partitions.

A fetch that finds less than ``min_bytes`` waits for more, up to ``max_wait_ms``. It does not read again
what it has read before the wait. All batches of a partition are of one topic: if the topic is deleted and
recreated while a fetch waits, the client gets an error, whether it named the topic or its id. Fetch
sessions are rejected, as the protocol allows: every request names all its partitions.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

from millstream.broker.call import Call
from millstream.broker.log_access import storage_errors
from millstream.broker.node import BrokerNode
from millstream.broker.protocol.error_codes import ErrorCode, code_of
from millstream.broker.protocol.wire import Message
from millstream.errors import (
    CorruptionError,
    MillstreamError,
    OffsetOutOfRangeError,
    TopicRecreatedError,
    UnknownTopicError,
)
from millstream.log.batch_reader import BatchReader
from millstream.log.producers import AbortedTransaction
from millstream.log.reader import Isolation
from millstream.log.topics import check_topic_id
from millstream.record import TopicPartition

_IDS_FROM = 13  # the version of Fetch that names topics by their ids
_NO_SESSION = (-1, 0)  # session epochs of a request that is of no session
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class PartitionFetch:
    """One partition of a fetch, and what was read of it so far; everything, if it has ``ended``.

    ``topic_id`` is that of the topic; None until it is looked up, where the client gave its name and
    not ``by_id``.
    """

    name: TopicPartition
    by_id: bool
    topic_id: str | None
    offset: int
    bytes_max: int
    next_offset: int
    chunks: list[memoryview] = field(default_factory=list)
    size: int = 0
    ended: bool = False
    aborted: dict[AbortedTransaction, None] = field(default_factory=dict)
    code: ErrorCode = ErrorCode.NONE
    high_watermark: int = -1
    last_stable_offset: int = -1
    log_start: int = -1

    def fail(self, error: MillstreamError) -> None:
        """Set the error; what was read is dropped, so that the client sees the error."""
        self.code = code_of(error)
        if isinstance(error, UnknownTopicError | TopicRecreatedError):
            self.code = (
                ErrorCode.UNKNOWN_TOPIC_ID if self.by_id else ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
            )
        elif isinstance(error, OffsetOutOfRangeError):
            self.log_start = error.start
        elif self.code == ErrorCode.INVALID_REQUEST:  # there is no such partition
            self.code = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        if isinstance(error, CorruptionError):
            _log.error("a fetch of %s failed: %s", self.name, error)
        self.chunks, self.size = [], 0


async def fetch(node: BrokerNode, call: Call) -> Message:
    """Handle a Fetch request."""
    request = call.request
    if request["session_epoch"] not in _NO_SESSION:
        return {"error_code": ErrorCode.FETCH_SESSION_ID_NOT_FOUND}
    by_id = call.version >= _IDS_FROM
    wanted = [
        PartitionFetch(
            TopicPartition(name, one["partition"]),
            by_id,
            topic_id,
            one["fetch_offset"],
            one["partition_max_bytes"],
            one["fetch_offset"],
        )
        for topic in request["topics"]
        for name, topic_id in [_resolve_topic(node, topic, by_id=by_id)]
        for one in topic["partitions"]
    ]
    isolation: Isolation = "read_committed" if request["isolation_level"] else "read_uncommitted"
    limit = max(0, min(request["max_bytes"], node.settings.response_bytes_max))
    call.held_bytes = node.responses.take(limit)
    await _read_until_enough(node, request, wanted, isolation, call.held_bytes)
    return {"responses": _responses(request, wanted, isolation)}


def _resolve_topic(node: BrokerNode, topic: Message, *, by_id: bool) -> tuple[str, str | None]:
    """Return the name and the id of a topic as far as they are known; no topic has an empty name."""
    if not by_id:
        return topic["topic"], None
    topic_id = topic["topic_id"].hex()
    return node.topic_name(topic_id) or "", topic_id


async def _read_until_enough(
    node: BrokerNode,
    request: Message,
    wanted: Sequence[PartitionFetch],
    isolation: Isolation,
    bytes_max: int,
) -> None:
    """Read until there is enough, or the wait is over."""
    deadline_s = node.loop.time() + max(request["max_wait_ms"], 0) / 1000
    enough = min(request["min_bytes"], bytes_max)
    with node.watch.watching([one.name for one in wanted]) as event:
        while True:
            event.clear()
            await node.log.run_read(lambda: _read(node.log.reader(), wanted, isolation, bytes_max))
            left_s = deadline_s - node.loop.time()
            done = sum(one.size for one in wanted) >= enough or any(
                one.code or one.ended for one in wanted
            )
            if done or left_s <= 0 or not wanted:
                return
            try:
                async with asyncio.timeout(left_s):
                    await event.wait()
            except TimeoutError:
                return


def _read(
    reader: BatchReader, wanted: Sequence[PartitionFetch], isolation: Isolation, bytes_max: int
) -> None:
    """Continue reading each partition, one after the other; in a thread."""
    left = bytes_max - sum(one.size for one in wanted)
    for one in wanted:
        before = one.size
        try:
            with storage_errors():
                _read_one(reader, one, isolation, left, first_whole=left == bytes_max)
        except MillstreamError as error:
            one.fail(error)
        left -= one.size - before


def _read_one(
    reader: BatchReader, one: PartitionFetch, isolation: Isolation, left: int, *, first_whole: bool
) -> None:
    topic = one.name.topic
    one.topic_id = one.topic_id or reader.topic_id(topic)
    try:
        found = reader.fetch(
            *one.name,
            one.next_offset,
            isolation=isolation,
            bytes_max=min(left, one.bytes_max - one.size),
            first_whole=first_whole,
        )
        # After the records, so that the high watermark is not below them; it may have advanced meanwhile.
        state = reader.state(*one.name)
    finally:
        # An id is never used again: if the name still has it, records and errors are of this topic.
        check_topic_id(topic, one.topic_id, reader.topic_id(topic))
    one.high_watermark = state.high_watermark
    one.last_stable_offset = state.last_stable_offset
    one.log_start = state.log_start
    one.chunks += found.parts
    one.size += found.size
    one.next_offset, one.ended = found.next_offset, found.ended
    one.aborted.update(dict.fromkeys(found.aborted))


def _responses(
    request: Message, wanted: Sequence[PartitionFetch], isolation: Isolation
) -> list[Message]:
    partitions = iter(wanted)
    return [
        {
            "topic": topic["topic"],
            "topic_id": topic["topic_id"],
            "partitions": [
                _partition_response(next(partitions), isolation) for _ in topic["partitions"]
            ],
        }
        for topic in request["topics"]
    ]


def _partition_response(one: PartitionFetch, isolation: Isolation) -> Message:
    aborted = [
        {"producer_id": found.producer_id, "first_offset": found.first_offset}
        for found in sorted(one.aborted, key=lambda found: found.first_offset)
    ]
    return {
        "partition_index": one.name.partition,
        "error_code": one.code,
        "high_watermark": one.high_watermark,
        "last_stable_offset": one.last_stable_offset,
        "log_start_offset": one.log_start,
        "aborted_transactions": aborted if isolation == "read_committed" else None,
        "records": one.chunks,
    }
