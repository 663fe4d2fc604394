"""OffsetCommit, OffsetFetch and OffsetDelete: how far groups have read.

Offsets are durable when they are acknowledged (``offset_commits``).
"""

from __future__ import annotations

from collections.abc import Sequence

from millstream.broker.codes import Code, Refused, coordinator_code_of
from millstream.broker.coordinator import check_name
from millstream.broker.groups import topics_read
from millstream.broker.listing import partition_code
from millstream.broker.members import Identity
from millstream.broker.node import Call, Node
from millstream.broker.wire import Message, distinct
from millstream.errors import MillstreamError
from millstream.log.groups import (
    METADATA_CHARACTERS_MAX,
    NotedOffset,
    committed_offsets,
    forget_places,
)
from millstream.log.remote import pending_partitions
from millstream.record import TopicPartition

_GROUPS_FROM = 8  # version of OffsetFetch that asks for several groups
_NOTHING = {"committed_offset": -1, "metadata": ""}


async def offset_commit(node: Node, call: Call) -> Message:
    """Answer an OffsetCommit request."""
    request = call.request
    name = request["group_id"]
    who = Identity(request["member_id"], request["group_instance_id"])
    try:
        node.groups.check_commit(name, who, request["generation_id_or_member_epoch"])
    except Refused as error:
        return {"topics": outcomes(request["topics"], {}, error.code)}
    offsets, codes = acceptable(node, request["topics"])
    if offsets:
        failed = await node.commits.commit(name, offsets)
        if failed is not None:
            codes |= dict.fromkeys(offsets, _commit_code(failed))
    return {"topics": outcomes(request["topics"], codes)}


def _commit_code(error: MillstreamError) -> Code:
    code = coordinator_code_of(error)
    return partition_code(error) if code == Code.INVALID_REQUEST else code


def acceptable(
    node: Node, topics: Sequence[Message]
) -> tuple[dict[TopicPartition, NotedOffset], dict[TopicPartition, Code]]:
    """Return the offsets that can be committed, and why the others cannot."""
    offsets: dict[TopicPartition, NotedOffset] = {}
    codes: dict[TopicPartition, Code] = {}
    for topic in topics:
        for one in topic["partitions"]:
            name = TopicPartition(topic["name"], one["partition_index"])
            offset, metadata = one["committed_offset"], one["committed_metadata"] or ""
            try:
                node.writer.partition(name)
            except MillstreamError as error:
                codes[name] = partition_code(error)
                continue
            if offset < 0:
                codes[name] = Code.INVALID_COMMIT_OFFSET_SIZE
            elif len(metadata) > METADATA_CHARACTERS_MAX:
                codes[name] = Code.OFFSET_METADATA_TOO_LARGE
            else:
                offsets[name] = NotedOffset(offset, metadata, one["committed_leader_epoch"])
    return offsets, codes


def outcomes(
    topics: Sequence[Message], codes: dict[TopicPartition, Code], others: Code = Code.NONE
) -> list[Message]:
    """Return the answers for the partitions of topics, in the form in which they were asked for."""
    return [
        {
            "name": topic["name"],
            "partitions": [
                {
                    "partition_index": one["partition_index"],
                    "error_code": codes.get(
                        TopicPartition(topic["name"], one["partition_index"]), others
                    ),
                }
                for one in topic["partitions"]
            ],
        }
        for topic in topics
    ]


async def offset_fetch(node: Node, call: Call) -> Message:
    """Answer an OffsetFetch request: of one group, or of several in newer versions."""
    request = call.request
    stable = request["require_stable"]
    if call.version < _GROUPS_FROM:
        return await _of_group(node, request, stable=stable)
    groups = distinct(request["groups"], "group_id")
    return {"groups": [await _of_group(node, one, stable=stable) for one in groups]}


async def _of_group(node: Node, asked: Message, *, stable: bool) -> Message:
    name = asked["group_id"]
    try:
        check_name(name)
        found = await node.run(lambda: committed_offsets(node.writer.control, name))
    except (Refused, MillstreamError) as error:
        return {"group_id": name, "error_code": coordinator_code_of(error), "topics": []}
    pending = await _pending(node, name) if stable else set()
    wanted: dict[str, list[int]] = {}
    if asked["topics"] is None:
        for place in found:
            wanted.setdefault(place.topic, []).append(place.partition)
    else:
        for topic in asked["topics"]:
            wanted.setdefault(topic["name"], []).extend(topic["partition_indexes"])
    topics = []
    for topic_name, numbers in wanted.items():
        partitions = []
        for number in numbers:
            place = TopicPartition(topic_name, number)
            at = found.get(place)
            answer = {"partition_index": number, **_NOTHING}
            if place in pending:
                answer["error_code"] = Code.UNSTABLE_OFFSET_COMMIT
            elif at is not None:
                answer |= {
                    "committed_offset": at.offset,
                    "committed_leader_epoch": at.leader_epoch,
                    "metadata": at.metadata,
                }
            partitions.append(answer)
        topics.append({"name": topic_name, "partitions": partitions})
    return {"group_id": name, "topics": topics}


async def _pending(node: Node, group: str) -> set[TopicPartition]:
    """Return the partitions for which an open transaction will commit offsets."""
    return await node.run(lambda: pending_partitions(node.writer.control, group))


async def offset_delete(node: Node, call: Call) -> Message:
    """Answer an OffsetDelete request: a group forgets partitions that its members do not read."""
    request = call.request
    name = request["group_id"]
    group = node.groups.get(name)
    stored = await node.run(lambda: committed_offsets(node.writer.control, name))
    if group is None and not stored:
        return {"error_code": Code.GROUP_ID_NOT_FOUND}
    read = set() if group is None else topics_read(group)
    if read is None:
        return {"error_code": Code.NON_EMPTY_GROUP}
    codes: dict[TopicPartition, Code] = {}
    gone = []
    for topic in request["topics"]:
        for one in topic["partitions"]:
            place = TopicPartition(topic["name"], one["partition_index"])
            if place.topic in read:
                codes[place] = Code.GROUP_SUBSCRIBED_TO_TOPIC
            elif place not in stored and place.topic not in node.writer.topics():
                codes[place] = Code.UNKNOWN_TOPIC_OR_PARTITION
            else:
                gone.append(place)
    try:
        await node.change(lambda: forget_places(node.writer.control, name, gone))
    except MillstreamError as error:
        return {"error_code": coordinator_code_of(error)}
    return {"topics": outcomes(request["topics"], codes)}
