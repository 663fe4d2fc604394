"""Produce: batches that clients append.

``acks`` says what the answer waits for: with -1 (all) the records are on stable storage, with 1 they
survive the process and are synced at once, with 0 there is no answer. Consumers see records when they
are synced, whatever was asked for.
"""

from __future__ import annotations

from collections.abc import Sequence

from millstream.broker.appending import Arrival
from millstream.broker.codes import Code
from millstream.broker.node import Call, Node
from millstream.broker.wire import Message
from millstream.record import TopicPartition

_VERSION_MIN = 3  # older ones bring older record formats


async def produce(node: Node, call: Call) -> Message | None:
    """Answer a Produce request; None if no answer is wanted."""
    request = call.request
    topics = [
        (
            topic["name"],
            [
                Arrival(TopicPartition(topic["name"], one["index"]), one["records"])
                for one in topic["partition_data"]
            ],
        )
        for topic in request["topic_data"]
    ]
    arrivals = [arrival for _, of_topic in topics for arrival in of_topic]
    acks = request["acks"]
    if call.version < _VERSION_MIN:
        _refuse(arrivals, Code.UNSUPPORTED_VERSION, "send Produce version 3 or later")
    elif acks not in (-1, 0, 1):
        _refuse(arrivals, Code.INVALID_REQUIRED_ACKS, f"acks is {acks}; send -1, 0 or 1")
    else:
        await node.appender.append(arrivals, "synced" if acks == -1 else "written")
    if acks == 0:
        return None
    return {
        "responses": [
            {"name": name, "partition_responses": [_outcome(one) for one in of_topic]}
            for name, of_topic in topics
        ]
    }


def _refuse(arrivals: Sequence[Arrival], code: Code, message: str) -> None:
    for arrival in arrivals:
        arrival.code, arrival.message = code, message


def _outcome(arrival: Arrival) -> Message:
    return {
        "index": arrival.name.partition,
        "error_code": arrival.code,
        "base_offset": arrival.offset,
        "log_start_offset": arrival.log_start,
        "error_message": arrival.message,
    }
