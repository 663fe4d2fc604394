"""OffsetCommit, OffsetFetch and OffsetDelete: the committed offsets of groups.

Offsets are durable when they are acknowledged (``broker/groups/offset_writer.py``).
"""

from __future__ import annotations

from collections.abc import Sequence

from millstream.broker.call import Call
from millstream.broker.groups.coordinator import check_group_id
from millstream.broker.groups.member import Identity
from millstream.broker.node import BrokerNode
from millstream.broker.protocol.error_codes import ApiError, ErrorCode, coordinator_code_of
from millstream.broker.protocol.wire import Message, distinct
from millstream.broker.requests.groups import subscribed_topics
from millstream.broker.requests.list_offsets import partition_code
from millstream.errors import MillstreamError
from millstream.log.groups import (
    METADATA_CHARACTERS_MAX,
    OffsetAndMetadata,
    committed_offsets,
    delete_partition_offsets,
)
from millstream.log.remote_transactions import pending_partitions
from millstream.record import TopicPartition

_GROUPS_FROM = 8  # version of OffsetFetch that names several groups
_NOTHING = {"committed_offset": -1, "metadata": ""}


async def offset_commit(node: BrokerNode, call: Call) -> Message:
    """Handle an OffsetCommit request."""
    request = call.request
    name = request["group_id"]
    who = Identity(request["member_id"], request["group_instance_id"])
    try:
        node.groups.check_commit(name, who, request["generation_id_or_member_epoch"])
    except ApiError as error:
        return {"topics": partition_responses(request["topics"], {}, error.code)}
    offsets, codes = split_committable(node, request["topics"])
    if offsets:
        failed = await node.offset_writer.commit(name, offsets)
        if failed is not None:
            codes |= dict.fromkeys(offsets, _commit_code(failed))
    return {"topics": partition_responses(request["topics"], codes)}


def _commit_code(error: MillstreamError) -> ErrorCode:
    code = coordinator_code_of(error)
    return partition_code(error) if code == ErrorCode.INVALID_REQUEST else code


def split_committable(
    node: BrokerNode, topics: Sequence[Message]
) -> tuple[dict[TopicPartition, OffsetAndMetadata], dict[TopicPartition, ErrorCode]]:
    """Return the offsets that can be committed, and the errors of the others."""
    offsets: dict[TopicPartition, OffsetAndMetadata] = {}
    codes: dict[TopicPartition, ErrorCode] = {}
    for topic in topics:
        for one in topic["partitions"]:
            name = TopicPartition(topic["name"], one["partition_index"])
            offset, metadata = one["committed_offset"], one["committed_metadata"] or ""
            try:
                node.log.writer.partition(name)
            except MillstreamError as error:
                codes[name] = partition_code(error)
                continue
            if offset < 0:
                codes[name] = ErrorCode.INVALID_COMMIT_OFFSET_SIZE
            elif len(metadata) > METADATA_CHARACTERS_MAX:
                codes[name] = ErrorCode.OFFSET_METADATA_TOO_LARGE
            else:
                offsets[name] = OffsetAndMetadata(offset, metadata, one["committed_leader_epoch"])
    return offsets, codes


def partition_responses(
    topics: Sequence[Message],
    codes: dict[TopicPartition, ErrorCode],
    others: ErrorCode = ErrorCode.NONE,
) -> list[Message]:
    """Return the responses for the partitions of topics, in the structure of the request."""
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


async def offset_fetch(node: BrokerNode, call: Call) -> Message:
    """Handle an OffsetFetch request: of one group, or of several in newer versions."""
    request = call.request
    stable = request["require_stable"]
    if call.version < _GROUPS_FROM:
        return await _group_response(node, request, stable=stable)
    groups = distinct(request["groups"], "group_id")
    return {"groups": [await _group_response(node, one, stable=stable) for one in groups]}


async def _group_response(node: BrokerNode, group: Message, *, stable: bool) -> Message:
    name = group["group_id"]
    try:
        check_group_id(name)
        found = await node.log.run_read(lambda: committed_offsets(node.log.writer.control, name))
    except (ApiError, MillstreamError) as error:
        return {"group_id": name, "error_code": coordinator_code_of(error), "topics": []}
    pending = await _pending(node, name) if stable else set()
    wanted: dict[str, list[int]] = {}
    if group["topics"] is None:
        for partition in found:
            wanted.setdefault(partition.topic, []).append(partition.partition)
    else:
        for topic in group["topics"]:
            wanted.setdefault(topic["name"], []).extend(topic["partition_indexes"])
    topics = []
    for topic_name, numbers in wanted.items():
        partitions = []
        for number in numbers:
            partition = TopicPartition(topic_name, number)
            at = found.get(partition)
            response = {"partition_index": number, **_NOTHING}
            if partition in pending:
                response["error_code"] = ErrorCode.UNSTABLE_OFFSET_COMMIT
            elif at is not None:
                response |= {
                    "committed_offset": at.offset,
                    "committed_leader_epoch": at.leader_epoch,
                    "metadata": at.metadata,
                }
            partitions.append(response)
        topics.append({"name": topic_name, "partitions": partitions})
    return {"group_id": name, "topics": topics}


async def _pending(node: BrokerNode, group: str) -> set[TopicPartition]:
    """Return the partitions for which an open transaction will commit offsets."""
    return await node.log.run_read(lambda: pending_partitions(node.log.writer.control, group))


async def offset_delete(node: BrokerNode, call: Call) -> Message:
    """Handle an OffsetDelete request: delete offsets of partitions that no member reads."""
    request = call.request
    name = request["group_id"]
    group = node.groups.get(name)
    stored = await node.log.run_read(lambda: committed_offsets(node.log.writer.control, name))
    if group is None and not stored:
        return {"error_code": ErrorCode.GROUP_ID_NOT_FOUND}
    read = set() if group is None else subscribed_topics(group)
    if read is None:
        return {"error_code": ErrorCode.NON_EMPTY_GROUP}
    codes: dict[TopicPartition, ErrorCode] = {}
    deleted = []
    for topic in request["topics"]:
        for one in topic["partitions"]:
            partition = TopicPartition(topic["name"], one["partition_index"])
            if partition.topic in read:
                codes[partition] = ErrorCode.GROUP_SUBSCRIBED_TO_TOPIC
            elif partition not in stored and partition.topic not in node.log.writer.topics():
                codes[partition] = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
            else:
                deleted.append(partition)
    try:
        await node.log.run_write(
            lambda: delete_partition_offsets(node.log.writer.control, name, deleted)
        )
    except MillstreamError as error:
        return {"error_code": coordinator_code_of(error)}
    return {"topics": partition_responses(request["topics"], codes)}
