"""Fetch: batches as they lie on disk, for as many partitions as are asked for.

A fetch that finds less than ``min_bytes`` waits for more, up to ``max_wait_ms``. What was read is not
read again when more has come. All that is found for a partition is of one topic: of one that is deleted while a
fetch waits and made anew, the client is told, whether it named the topic or its id. Fetch sessions are refused, as the protocol allows: every request names
what it wants.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

from millstream.broker.codes import Code, code_of
from millstream.broker.node import Call, Node
from millstream.broker.wire import Message
from millstream.errors import (
    CorruptionError,
    MillstreamError,
    OffsetOutOfRangeError,
    TopicRecreatedError,
    UnknownTopicError,
)
from millstream.log.batches import BatchReader
from millstream.log.producers import AbortedRange
from millstream.log.reader import Isolation
from millstream.log.topics import check_topic_id
from millstream.record import TopicPartition

_IDS_FROM = 13  # the version of Fetch that names topics by their ids
_SESSION_LESS = (-1, 0)  # the numbers of a request that names everything itself
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Wanted:
    """One partition of a fetch, and what was found for it so far; all, where it has ``ended``.

    ``topic_id`` is that of the topic; None until it is looked up, where the client gave its name and
    not ``by_id``.
    """

    name: TopicPartition
    by_id: bool
    topic_id: str | None
    offset: int
    bytes_max: int
    next_offset: int
    parts: list[memoryview] = field(default_factory=list)
    size: int = 0
    ended: bool = False
    aborted: dict[AbortedRange, None] = field(default_factory=dict)
    code: Code = Code.NONE
    high_watermark: int = -1
    last_stable_offset: int = -1
    log_start: int = -1

    def fail(self, error: MillstreamError) -> None:
        """Note why it cannot be read; what was found is given up, so that the error is seen."""
        self.code = code_of(error)
        if isinstance(error, UnknownTopicError | TopicRecreatedError):
            self.code = Code.UNKNOWN_TOPIC_ID if self.by_id else Code.UNKNOWN_TOPIC_OR_PARTITION
        elif isinstance(error, OffsetOutOfRangeError):
            self.log_start = error.start
        elif self.code == Code.INVALID_REQUEST:  # there is no such partition
            self.code = Code.UNKNOWN_TOPIC_OR_PARTITION
        if isinstance(error, CorruptionError):
            _log.error("a fetch of %s/%s failed: %s", *self.name, error)
        self.parts, self.size = [], 0


async def fetch(node: Node, call: Call) -> Message:
    """Answer a Fetch request."""
    request = call.request
    if request["session_epoch"] not in _SESSION_LESS:
        return {"error_code": Code.FETCH_SESSION_ID_NOT_FOUND}
    by_id = call.version >= _IDS_FROM
    wanted = [
        Wanted(
            TopicPartition(name, one["partition"]),
            by_id,
            topic_id,
            one["fetch_offset"],
            one["partition_max_bytes"],
            one["fetch_offset"],
        )
        for topic in request["topics"]
        for name, topic_id in [_asked_for(node, topic, by_id=by_id)]
        for one in topic["partitions"]
    ]
    isolation: Isolation = "read_committed" if request["isolation_level"] else "read_uncommitted"
    limit = max(0, min(request["max_bytes"], node.settings.response_bytes_max))
    call.held_bytes = node.responses.take(limit)
    await _gather(node, request, wanted, isolation, call.held_bytes)
    return {"responses": _responses(request, wanted, isolation)}


def _asked_for(node: Node, topic: Message, *, by_id: bool) -> tuple[str, str | None]:
    """Return the name and the id of a topic as far as they are known; no topic has an empty name."""
    if not by_id:
        return topic["topic"], None
    topic_id = topic["topic_id"].hex()
    return node.topic_name(topic_id) or "", topic_id


async def _gather(
    node: Node, request: Message, wanted: Sequence[Wanted], isolation: Isolation, bytes_max: int
) -> None:
    """Read until there is enough, or the time is over."""
    deadline_s = node.loop.time() + max(request["max_wait_ms"], 0) / 1000
    enough = min(request["min_bytes"], bytes_max)
    with node.watch.watching([one.name for one in wanted]) as event:
        while True:
            event.clear()
            await node.run(lambda: _read(node.reader(), wanted, isolation, bytes_max))
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
    reader: BatchReader, wanted: Sequence[Wanted], isolation: Isolation, bytes_max: int
) -> None:
    """Read on where each partition was left, in turn; in a thread."""
    left = bytes_max - sum(one.size for one in wanted)
    for one in wanted:
        before = one.size
        try:
            _read_one(reader, one, isolation, left, first_whole=left == bytes_max)
        except MillstreamError as error:
            one.fail(error)
        left -= one.size - before


def _read_one(
    reader: BatchReader, one: Wanted, isolation: Isolation, left: int, *, first_whole: bool
) -> None:
    topic = one.name.topic
    one.topic_id = one.topic_id or reader.topic_id(topic)
    try:
        found = reader.take(
            *one.name,
            one.next_offset,
            isolation=isolation,
            bytes_max=min(left, one.bytes_max - one.size),
            first_whole=first_whole,
        )
        # After the records, so that their end is not behind them; it may have moved on meanwhile.
        state = reader.state(*one.name)
    finally:
        # An id never comes back: what was found, or was wrong, is of this topic if it still has the name.
        check_topic_id(topic, one.topic_id, reader.topic_id(topic))
    one.high_watermark = state.high_watermark
    one.last_stable_offset = state.last_stable_offset
    one.log_start = state.log_start
    one.parts += found.parts
    one.size += found.size
    one.next_offset, one.ended = found.next_offset, found.ended
    one.aborted.update(dict.fromkeys(found.aborted))


def _responses(request: Message, wanted: Sequence[Wanted], isolation: Isolation) -> list[Message]:
    answers = iter(wanted)
    return [
        {
            "topic": topic["topic"],
            "topic_id": topic["topic_id"],
            "partitions": [_answer(next(answers), isolation) for _ in topic["partitions"]],
        }
        for topic in request["topics"]
    ]


def _answer(one: Wanted, isolation: Isolation) -> Message:
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
        "records": one.parts,
    }
