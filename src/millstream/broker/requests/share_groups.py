"""Heartbeats of members of share groups, and the requests that describe, alter and delete share groups."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing

from millstream.broker.call import Call
from millstream.broker.groups.coordinator import check_group_id
from millstream.broker.log_access import storage_errors
from millstream.broker.node import BrokerNode
from millstream.broker.protocol.error_codes import ApiError, ErrorCode, coordinator_code_of
from millstream.broker.protocol.wire import Message, distinct
from millstream.broker.requests.list_offsets import partition_code
from millstream.broker.share.group import LEAVE_EPOCH, Heartbeat, ShareGroupMember
from millstream.broker.share.partition import DONE
from millstream.errors import MillstreamError
from millstream.log.groups import committed_offsets
from millstream.log.reader import LogReader
from millstream.log.share_state import (
    ShareState,
    delete_share_state,
    delete_share_topics,
    is_share_group,
    put_share,
    share_states,
)
from millstream.log.unread import count_unread
from millstream.record import TopicInfo, TopicPartition

ASSIGNOR = "even"
_NO_ID = bytes(16)
_DEAD = "Dead"


async def share_group_heartbeat(node: BrokerNode, call: Call) -> Message:
    """Handle a ShareGroupHeartbeat request."""
    request = call.request
    name, member_id = request["group_id"], request["member_id"]
    try:
        await _check_share_group(node, name)
        if request["member_epoch"] == LEAVE_EPOCH:
            node.share_groups.get_for_member(name).leave(member_id)
            return {"member_id": member_id, "member_epoch": LEAVE_EPOCH}
        settings = await node.shares.settings(name)
        heartbeat = Heartbeat(
            member_id,
            request["member_epoch"],
            request["subscribed_topic_names"],
            call.client_id,
            call.client_host,
        )
        topics = node.log.writer.topics()
        counts = {topic: info.partitions for topic, info in topics.items()}
        member = node.share_groups.heartbeat(name, heartbeat, counts, settings.session_timeout_ms)
    except (ApiError, MillstreamError) as error:
        return {"error_code": coordinator_code_of(error), "error_message": str(error)}
    is_new = member.assignment_epoch != member.member_epoch
    response = {
        "member_id": member_id,
        "member_epoch": member.member_epoch,
        "heartbeat_interval_ms": settings.heartbeat_ms,
    }
    if is_new:
        member.assignment_epoch = member.member_epoch
        response["assignment"] = {"topic_partitions": _assignment(member, topics)}
    return response


async def _check_share_group(node: BrokerNode, name: str) -> None:
    """Reject a name that a consumer group has."""
    check_group_id(name)
    if node.share_groups.get(name) is not None:
        return
    used = node.groups.get(name) is not None
    if not used:
        control = node.log.writer.control
        used = bool(await node.log.run_read(lambda: committed_offsets(control, name)))
    if used:
        raise ApiError(
            ErrorCode.GROUP_ID_NOT_FOUND, f"group {name!r} is no share group; choose another name"
        )


def _assignment(member: ShareGroupMember, topics: dict[str, TopicInfo]) -> list[Message]:
    by_topic: dict[str, list[int]] = {}
    for one in member.assignment:
        by_topic.setdefault(one.topic, []).append(one.partition)
    return [
        {
            "topic_id": bytes.fromhex(topics[topic].topic_id),
            "topic_name": topic,
            "partitions": numbers,
        }
        for topic, numbers in by_topic.items()
        if topic in topics
    ]


# -- describing -------------------------------------------------------------------------------


async def share_group_describe(node: BrokerNode, call: Call) -> Message:
    """Handle a ShareGroupDescribe request."""
    names = dict.fromkeys(call.request["group_ids"])
    return {"groups": [await _describe(node, name) for name in names]}


async def _describe(node: BrokerNode, name: str) -> Message:
    group = node.share_groups.get(name)
    if group is None:
        control = node.log.writer.control
        if not await node.log.run_read(lambda: is_share_group(control, name)):
            return {
                "group_id": name,
                "group_state": _DEAD,
                "error_code": ErrorCode.GROUP_ID_NOT_FOUND,
                "error_message": f"there is no share group {name!r}",
            }
        return {"group_id": name, "group_state": "Empty", "assignor_name": ASSIGNOR}
    topics = node.log.writer.topics()
    return {
        "group_id": name,
        "group_state": group.state,
        "group_epoch": group.generation,
        "assignment_epoch": group.generation,
        "assignor_name": ASSIGNOR,
        "members": [
            {
                "member_id": one.member_id,
                "member_epoch": one.member_epoch,
                "client_id": one.client_id,
                "client_host": f"/{one.client_host}",
                "subscribed_topic_names": list(one.topics),
                "assignment": {"topic_partitions": _assignment(one, topics)},
            }
            for one in group.members.values()
        ],
    }


async def describe_share_group_offsets(node: BrokerNode, call: Call) -> Message:
    """Handle a DescribeShareGroupOffsets request."""
    groups = distinct(call.request["groups"], "group_id")
    return {"groups": [await _offsets(node, one) for one in groups]}


async def _offsets(node: BrokerNode, request: Message) -> Message:
    name = request["group_id"]
    try:
        check_group_id(name)
        states = (await node.log.run_read(lambda: share_states(node.log.writer.control, name))).get(
            name, {}
        )
    except (ApiError, MillstreamError) as error:
        return {
            "group_id": name,
            "error_code": coordinator_code_of(error),
            "error_message": str(error),
        }
    if not states and node.share_groups.get(name) is None:
        return {
            "group_id": name,
            "error_code": ErrorCode.GROUP_ID_NOT_FOUND,
            "error_message": f"there is no share group {name!r}",
        }
    wanted: dict[str, list[int]] = {}
    if request["topics"] is None:
        for partition_name in states:
            wanted.setdefault(partition_name.topic, []).append(partition_name.partition)
    else:
        for topic in request["topics"]:
            wanted.setdefault(topic["topic_name"], []).extend(topic["partitions"])
    known = node.log.writer.topics()
    return {
        "group_id": name,
        "topics": [
            {
                "topic_name": topic,
                "topic_id": _id(known.get(topic)),
                "partitions": [
                    await _offset(node, TopicPartition(topic, number), states) for number in numbers
                ],
            }
            for topic, numbers in wanted.items()
        ],
    }


def _id(info: TopicInfo | None) -> bytes:
    return _NO_ID if info is None else bytes.fromhex(info.topic_id)


async def _offset(
    node: BrokerNode, partition_name: TopicPartition, states: dict[TopicPartition, ShareState]
) -> Message:
    response: Message = {"partition_index": partition_name.partition, "start_offset": -1}
    state = states.get(partition_name)
    try:
        end = (
            await node.log.run_read(lambda: node.log.reader().state(*partition_name))
        ).high_watermark
        if state is None:
            return response
        seen = max((one.end for one in state.spans), default=state.start)
        beyond = await node.log.run_read(
            lambda: _count_unread(node, partition_name, max(seen, state.start), end)
        )
    except MillstreamError as error:
        return {**response, "error_code": partition_code(error), "error_message": str(error)}
    done = sum(one.end - one.first for one in state.spans if one.state in DONE)
    waiting = max(seen - state.start - done, 0)
    return {**response, "start_offset": state.start, "lag": waiting + beyond}


def _count_unread(node: BrokerNode, partition_name: TopicPartition, start: int, end: int) -> int:
    with closing(LogReader(node.log.writer.folder, isolation="read_uncommitted")) as reader:
        return count_unread(reader, *partition_name, start, end)


# -- altering and deleting --------------------------------------------------------------------


async def alter_share_group_offsets(node: BrokerNode, call: Call) -> Message:
    """Handle an AlterShareGroupOffsets request: set the start offsets of a group without members."""
    request = call.request
    name = request["group_id"]
    try:
        await _check_unused(node, name, may_create=True)
    except (ApiError, MillstreamError) as error:
        return {"error_code": coordinator_code_of(error), "error_message": str(error)}
    known = node.log.writer.topics()
    node.shares.unload(name)

    def alter(topic: str, one: Message) -> Message:
        partition_name = TopicPartition(topic, one["partition_index"])
        state = node.log.reader().state(*partition_name)
        if not state.log_start <= one["start_offset"] <= state.high_watermark:
            raise ApiError(
                ErrorCode.OFFSET_OUT_OF_RANGE,
                f"offset {one['start_offset']}; give {state.log_start} to {state.high_watermark}",
            )
        before = share_states(node.log.writer.control, name).get(name, {}).get(partition_name)
        with node.log.writer.control.commit() as connection:
            key = node.shares.key(name, partition_name)
            put_share(connection, key, before, ShareState(one["start_offset"]))
        return {}

    def do() -> list[Message]:
        return [
            {
                "topic_name": topic["topic_name"],
                "topic_id": _id(known.get(topic["topic_name"])),
                "partitions": [
                    {
                        "partition_index": one["partition_index"],
                        **_partition_response(alter, topic["topic_name"], one),
                    }
                    for one in topic["partitions"]
                ],
            }
            for topic in request["topics"]
        ]

    return {"responses": await node.log.run_write(do)}


def _partition_response(do: Callable[[str, Message], Message], topic: str, one: Message) -> Message:
    try:
        with storage_errors():
            return do(topic, one)
    except MillstreamError as error:
        return {"error_code": partition_code(error), "error_message": str(error)}
    except ApiError as error:
        return {"error_code": error.code, "error_message": str(error)}


async def delete_share_group_offsets(node: BrokerNode, call: Call) -> Message:
    """Handle a DeleteShareGroupOffsets request: delete the state of topics in a group without members."""
    request = call.request
    name = request["group_id"]
    known = node.log.writer.topics()
    names = [topic["topic_name"] for topic in request["topics"]]
    ids = [known[one].topic_id for one in names if one in known]
    try:
        await _check_unused(node, name)
        node.shares.unload(name, ids)
        await node.log.run_write(lambda: delete_share_topics(node.log.writer.control, name, ids))
    except (ApiError, MillstreamError) as error:
        return {"error_code": coordinator_code_of(error), "error_message": str(error)}
    return {"responses": [_topic_response(one, known.get(one)) for one in names]}


def _topic_response(name: str, info: TopicInfo | None) -> Message:
    code = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION if info is None else ErrorCode.NONE
    return {"topic_name": name, "topic_id": _id(info), "error_code": code}


async def _check_unused(node: BrokerNode, name: str, *, may_create: bool = False) -> None:
    """Reject a group that has members, or does not exist; with ``may_create``, it need not exist."""
    await _check_share_group(node, name)
    if node.share_groups.get(name) is not None:
        raise ApiError(ErrorCode.NON_EMPTY_GROUP, f"group {name!r} has members; stop them first")
    control = node.log.writer.control
    if not may_create and not await node.log.run_read(lambda: is_share_group(control, name)):
        raise ApiError(ErrorCode.GROUP_ID_NOT_FOUND, f"there is no share group {name!r}")


async def delete_share_group(node: BrokerNode, name: str) -> bool:
    """Delete a share group without members; return whether there was one."""
    node.shares.unload(name)
    return bool(await node.log.run_write(lambda: delete_share_state(node.log.writer.control, name)))
