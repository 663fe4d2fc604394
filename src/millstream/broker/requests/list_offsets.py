"""ListOffsets and DeleteRecords: offsets by position and by timestamp, and moving the log start."""

from __future__ import annotations

from collections.abc import Callable

from millstream.broker.call import Call
from millstream.broker.log_access import storage_errors
from millstream.broker.node import BrokerNode
from millstream.broker.protocol.error_codes import ErrorCode, code_of
from millstream.broker.protocol.wire import Message
from millstream.errors import MillstreamError
from millstream.log.batch_reader import BatchReader
from millstream.record import TopicPartition

# The meanings of timestamps below 0. All records are local; there is no other tier.
_LATEST, _EARLIEST, _LARGEST_TIME, _EARLIEST_LOCAL, _LATEST_TIERED = -1, -2, -3, -4, -5
_HIGH_WATERMARK = -1


async def list_offsets(node: BrokerNode, call: Call) -> Message:
    """Handle a ListOffsets request."""
    committed = bool(call.request["isolation_level"])

    def look(topic: str, one: Message) -> Message:
        return _offset(node.log.reader(), topic, one, committed=committed)

    return {
        "topics": await node.log.run_read(lambda: for_each_partition(call.request["topics"], look))
    }


def for_each_partition(
    topics: list[Message], respond: Callable[[str, Message], Message]
) -> list[Message]:
    """Return the responses for the partitions of topics, in the structure of the request."""
    return [
        {
            "name": topic["name"],
            "partitions": [
                {
                    "partition_index": one["partition_index"],
                    **_partition_response(respond, topic["name"], one),
                }
                for one in topic["partitions"]
            ],
        }
        for topic in topics
    ]


def _partition_response(
    respond: Callable[[str, Message], Message], topic: str, one: Message
) -> Message:
    try:
        with storage_errors():
            return respond(topic, one)
    except MillstreamError as error:
        return {"error_code": partition_code(error)}


def partition_code(error: MillstreamError) -> ErrorCode:
    """Return the code of an error about one partition."""
    code = code_of(error)
    return ErrorCode.UNKNOWN_TOPIC_OR_PARTITION if code == ErrorCode.INVALID_REQUEST else code


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
        return {"error_code": ErrorCode.UNSUPPORTED_VERSION}
    else:
        found = reader.first_since(topic, number, timestamp_ms)
    if found is None or (committed and found.offset >= state.last_stable_offset):
        return {"offset": -1}
    return {"offset": found.offset, "timestamp": found.timestamp_ms}


async def delete_records(node: BrokerNode, call: Call) -> Message:
    """Handle a DeleteRecords request."""

    def delete(topic: str, one: Message) -> Message:
        name = TopicPartition(topic, one["partition_index"])
        offset = one["offset"]
        if offset == _HIGH_WATERMARK:
            offset = node.log.reader().state(*name).high_watermark
        elif offset < 0:
            return {"error_code": ErrorCode.OFFSET_OUT_OF_RANGE, "low_watermark": -1}
        try:
            with storage_errors():
                return {"low_watermark": node.log.writer.delete_records(name, offset)}
        except MillstreamError as error:
            return {"error_code": partition_code(error), "low_watermark": -1}

    return {
        "topics": await node.log.run_write(
            lambda: for_each_partition(call.request["topics"], delete)
        )
    }
