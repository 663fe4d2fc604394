"""Produce: batches that clients append.

``acks`` says what the response waits for: with -1 (all) the records are on stable storage, with 1 they
survive the process and are synced at once, with 0 there is no response. Consumers see records when they
are synced, whatever ``acks`` is.
"""

from __future__ import annotations

from collections.abc import Sequence

from millstream.broker.call import Call
from millstream.broker.node import BrokerNode
from millstream.broker.protocol.error_codes import ErrorCode
from millstream.broker.protocol.wire import Message
from millstream.broker.records.appender import ProducedBatch
from millstream.record import TopicPartition

_VERSION_MIN = 3  # older ones have older record formats


async def produce(node: BrokerNode, call: Call) -> Message | None:
    """Handle a Produce request; None if no response is wanted."""
    request = call.request
    topics = [
        (
            topic["name"],
            [
                ProducedBatch(TopicPartition(topic["name"], one["index"]), one["records"])
                for one in topic["partition_data"]
            ],
        )
        for topic in request["topic_data"]
    ]
    batches = [batch for _, of_topic in topics for batch in of_topic]
    acks = request["acks"]
    if call.version < _VERSION_MIN:
        _fail_all(batches, ErrorCode.UNSUPPORTED_VERSION, "send Produce version 3 or later")
    elif acks not in (-1, 0, 1):
        _fail_all(batches, ErrorCode.INVALID_REQUIRED_ACKS, f"acks is {acks}; send -1, 0 or 1")
    else:
        await node.appender.append(batches, "synced" if acks == -1 else "written")
    if acks == 0:
        return None
    return {
        "responses": [
            {"name": name, "partition_responses": [_partition_response(one) for one in of_topic]}
            for name, of_topic in topics
        ]
    }


def _fail_all(batches: Sequence[ProducedBatch], code: ErrorCode, message: str) -> None:
    for batch in batches:
        batch.code, batch.message = code, message


def _partition_response(batch: ProducedBatch) -> Message:
    return {
        "index": batch.name.partition,
        "error_code": batch.code,
        "base_offset": batch.offset,
        "log_start_offset": batch.log_start,
        "error_message": batch.message,
    }
