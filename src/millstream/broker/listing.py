"""ListOffsets and DeleteRecords: where partitions begin and end, by time too, and moving the start."""

from __future__ import annotations

from collections.abc import Callable

from millstream.broker.codes import Code, code_of
from millstream.broker.node import Call, Node
from millstream.broker.wire import Message
from millstream.errors import MillstreamError
from millstream.log.batches import BatchReader
from millstream.record import TopicPartition

# What a timestamp below 0 asks for. All that there is is local; nothing is in another tier.
_LATEST, _EARLIEST, _LARGEST_TIME, _EARLIEST_LOCAL, _LATEST_TIERED = -1, -2, -3, -4, -5
_HIGH_WATERMARK = -1


async def list_offsets(node: Node, call: Call) -> Message:
    """Answer a ListOffsets request."""
    committed = bool(call.request["isolation_level"])

    def look(topic: str, one: Message) -> Message:
        return _offset(node.reader(), topic, one, committed=committed)

    return {"topics": await node.run(lambda: for_each_partition(call.request["topics"], look))}


def for_each_partition(
    topics: list[Message], answer: Callable[[str, Message], Message]
) -> list[Message]:
    """Return the answers for the partitions of topics, in the form in which they were asked for."""
    return [
        {
            "name": topic["name"],
            "partitions": [
                {
                    "partition_index": one["partition_index"],
                    **_answered(answer, topic["name"], one),
                }
                for one in topic["partitions"]
            ],
        }
        for topic in topics
    ]


def _answered(answer: Callable[[str, Message], Message], topic: str, one: Message) -> Message:
    try:
        return answer(topic, one)
    except MillstreamError as error:
        return {"error_code": partition_code(error)}


def partition_code(error: MillstreamError) -> Code:
    """Return the code of an error about one partition."""
    code = code_of(error)
    return Code.UNKNOWN_TOPIC_OR_PARTITION if code == Code.INVALID_REQUEST else code


def _offset(reader: BatchReader, topic: str, one: Message, *, committed: bool) -> Message:
    number, timestamp_ms = one["partition_index"], one["timestamp"]
    state = reader.state(topic, number)
    if timestamp_ms == _LATEST:
        end = state.last_stable_offset if committed else state.high_watermark
        return {"offset": end}
    if timestamp_ms in (_EARLIEST, _EARLIEST_LOCAL):
        return {"offset": state.log_start}
    if timestamp_ms == _LATEST_TIERED:
        return {"offset": -1}
    if timestamp_ms == _LARGEST_TIME:
        found = reader.latest(topic, number)
    elif timestamp_ms < 0:
        return {"error_code": Code.UNSUPPORTED_VERSION}
    else:
        found = reader.first_at(topic, number, timestamp_ms)
    if found is None or (committed and found.offset >= state.last_stable_offset):
        return {"offset": -1}
    return {"offset": found.offset, "timestamp": found.timestamp_ms}


async def delete_records(node: Node, call: Call) -> Message:
    """Answer a DeleteRecords request."""

    def delete(topic: str, one: Message) -> Message:
        name = TopicPartition(topic, one["partition_index"])
        offset = one["offset"]
        if offset == _HIGH_WATERMARK:
            offset = node.reader().state(*name).high_watermark
        elif offset < 0:
            return {"error_code": Code.OFFSET_OUT_OF_RANGE, "low_watermark": -1}
        try:
            return {"low_watermark": node.writer.delete_records(name, offset)}
        except MillstreamError as error:
            return {"error_code": partition_code(error), "low_watermark": -1}

    return {"topics": await node.change(lambda: for_each_partition(call.request["topics"], delete))}
