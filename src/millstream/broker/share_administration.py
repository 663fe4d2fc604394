"""The heartbeats of members of share groups, and the requests that look at share groups or move them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing

from millstream.broker.codes import Code, Refused, coordinator_code_of
from millstream.broker.coordinator import check_name
from millstream.broker.listing import partition_code
from millstream.broker.node import Call, Node
from millstream.broker.share_groups import LEAVES, Beat, ShareMember
from millstream.broker.wire import Message, distinct
from millstream.errors import MillstreamError
from millstream.log.groups import committed_offsets
from millstream.log.reader import LogReader
from millstream.log.shares import (
    ShareState,
    forget_share_group,
    forget_share_topics,
    is_share_group,
    put_share,
    share_states,
)
from millstream.log.unread import count_unread
from millstream.record import TopicInfo, TopicPartition

ASSIGNOR = "even"
_NO_ID = bytes(16)
_DEAD = "Dead"


async def share_group_heartbeat(node: Node, call: Call) -> Message:
    """Answer a ShareGroupHeartbeat request."""
    request = call.request
    name, member_id = request["group_id"], request["member_id"]
    try:
        await _check_share_group(node, name)
        if request["member_epoch"] == LEAVES:
            node.share_groups.of_member(name).leave(member_id)
            return {"member_id": member_id, "member_epoch": LEAVES}
        settings = await node.shares.settings(name)
        beat = Beat(
            member_id,
            request["member_epoch"],
            request["subscribed_topic_names"],
            call.client_id,
            call.client_host,
        )
        topics = node.writer.topics()
        counts = {topic: info.partitions for topic, info in topics.items()}
        member = node.share_groups.beat(name, beat, counts, settings.session_timeout_ms)
    except (Refused, MillstreamError) as error:
        return {"error_code": coordinator_code_of(error), "error_message": str(error)}
    tells = member.knows != member.generation
    answer = {
        "member_id": member_id,
        "member_epoch": member.generation,
        "heartbeat_interval_ms": settings.heartbeat_ms,
    }
    if tells:
        member.knows = member.generation
        answer["assignment"] = {"topic_partitions": _assignment(member, topics)}
    return answer


async def _check_share_group(node: Node, name: str) -> None:
    """Refuse a name that a group of consumers has."""
    check_name(name)
    if node.share_groups.get(name) is not None:
        return
    used = node.groups.get(name) is not None
    if not used:
        control = node.writer.control
        used = bool(await node.run(lambda: committed_offsets(control, name)))
    if used:
        raise Refused(
            Code.GROUP_ID_NOT_FOUND, f"group {name!r} is no share group; choose another name"
        )


def _assignment(member: ShareMember, topics: dict[str, TopicInfo]) -> list[Message]:
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


# -- looking ----------------------------------------------------------------------------------


async def share_group_describe(node: Node, call: Call) -> Message:
    """Answer a ShareGroupDescribe request."""
    names = dict.fromkeys(call.request["group_ids"])
    return {"groups": [await _described(node, name) for name in names]}


async def _described(node: Node, name: str) -> Message:
    group = node.share_groups.get(name)
    if group is None:
        control = node.writer.control
        if not await node.run(lambda: is_share_group(control, name)):
            return {
                "group_id": name,
                "group_state": _DEAD,
                "error_code": Code.GROUP_ID_NOT_FOUND,
                "error_message": f"there is no share group {name!r}",
            }
        return {"group_id": name, "group_state": "Empty", "assignor_name": ASSIGNOR}
    topics = node.writer.topics()
    return {
        "group_id": name,
        "group_state": group.state,
        "group_epoch": group.generation,
        "assignment_epoch": group.generation,
        "assignor_name": ASSIGNOR,
        "members": [
            {
                "member_id": one.member_id,
                "member_epoch": one.generation,
                "client_id": one.client_id,
                "client_host": f"/{one.client_host}",
                "subscribed_topic_names": list(one.topics),
                "assignment": {"topic_partitions": _assignment(one, topics)},
            }
            for one in group.members.values()
        ],
    }


async def describe_share_group_offsets(node: Node, call: Call) -> Message:
    """Answer a DescribeShareGroupOffsets request."""
    groups = distinct(call.request["groups"], "group_id")
    return {"groups": [await _offsets(node, one) for one in groups]}


async def _offsets(node: Node, asked: Message) -> Message:
    name = asked["group_id"]
    try:
        check_name(name)
        states = (await node.run(lambda: share_states(node.writer.control, name))).get(name, {})
    except (Refused, MillstreamError) as error:
        return {
            "group_id": name,
            "error_code": coordinator_code_of(error),
            "error_message": str(error),
        }
    if not states and node.share_groups.get(name) is None:
        return {
            "group_id": name,
            "error_code": Code.GROUP_ID_NOT_FOUND,
            "error_message": f"there is no share group {name!r}",
        }
    wanted: dict[str, list[int]] = {}
    if asked["topics"] is None:
        for place in states:
            wanted.setdefault(place.topic, []).append(place.partition)
    else:
        for topic in asked["topics"]:
            wanted.setdefault(topic["topic_name"], []).extend(topic["partitions"])
    known = node.writer.topics()
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
    node: Node, place: TopicPartition, states: dict[TopicPartition, ShareState]
) -> Message:
    answer: Message = {"partition_index": place.partition, "start_offset": -1}
    state = states.get(place)
    try:
        end = (await node.run(lambda: node.reader().state(*place))).high_watermark
        if state is None:
            return answer
        seen = max((one.end for one in state.spans), default=state.start)
        beyond = await node.run(lambda: _unread(node, place, max(seen, state.start), end))
    except MillstreamError as error:
        return {**answer, "error_code": partition_code(error), "error_message": str(error)}
    done = sum(
        one.end - one.first for one in state.spans if one.state in ("acknowledged", "archived")
    )
    waiting = max(seen - state.start - done, 0)
    return {**answer, "start_offset": state.start, "lag": waiting + beyond}


def _unread(node: Node, place: TopicPartition, start: int, end: int) -> int:
    with closing(LogReader(node.writer.folder, isolation="read_uncommitted")) as reader:
        return count_unread(reader, *place, start, end)


# -- moving -----------------------------------------------------------------------------------


async def alter_share_group_offsets(node: Node, call: Call) -> Message:
    """Answer an AlterShareGroupOffsets request: a group without members goes on elsewhere."""
    request = call.request
    name = request["group_id"]
    try:
        await _check_unused(node, name, made=True)
    except (Refused, MillstreamError) as error:
        return {"error_code": coordinator_code_of(error), "error_message": str(error)}
    known = node.writer.topics()
    node.shares.forget(name)

    def alter(topic: str, one: Message) -> Message:
        place = TopicPartition(topic, one["partition_index"])
        state = node.reader().state(*place)
        if not state.log_start <= one["start_offset"] <= state.high_watermark:
            raise Refused(
                Code.OFFSET_OUT_OF_RANGE,
                f"offset {one['start_offset']}; give {state.log_start} to {state.high_watermark}",
            )
        before = share_states(node.writer.control, name).get(name, {}).get(place)
        with node.writer.control.commit() as connection:
            key = node.shares.key(name, place)
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
                        **_tried(alter, topic["topic_name"], one),
                    }
                    for one in topic["partitions"]
                ],
            }
            for topic in request["topics"]
        ]

    return {"responses": await node.change(do)}


def _tried(do: Callable[[str, Message], Message], topic: str, one: Message) -> Message:
    try:
        return do(topic, one)
    except MillstreamError as error:
        return {"error_code": partition_code(error), "error_message": str(error)}
    except Refused as error:
        return {"error_code": error.code, "error_message": str(error)}


async def delete_share_group_offsets(node: Node, call: Call) -> Message:
    """Answer a DeleteShareGroupOffsets request: a group without members forgets topics."""
    request = call.request
    name = request["group_id"]
    known = node.writer.topics()
    names = [topic["topic_name"] for topic in request["topics"]]
    ids = [known[one].topic_id for one in names if one in known]
    try:
        await _check_unused(node, name)
        node.shares.forget(name, ids)
        await node.change(lambda: forget_share_topics(node.writer.control, name, ids))
    except (Refused, MillstreamError) as error:
        return {"error_code": coordinator_code_of(error), "error_message": str(error)}
    return {"responses": [_forgotten(one, known.get(one)) for one in names]}


def _forgotten(name: str, info: TopicInfo | None) -> Message:
    code = Code.UNKNOWN_TOPIC_OR_PARTITION if info is None else Code.NONE
    return {"topic_name": name, "topic_id": _id(info), "error_code": code}


async def _check_unused(node: Node, name: str, *, made: bool = False) -> None:
    """Refuse a group that has members or is none; with ``made``, one that is none may be."""
    await _check_share_group(node, name)
    if node.share_groups.get(name) is not None:
        raise Refused(Code.NON_EMPTY_GROUP, f"group {name!r} has members; stop them first")
    control = node.writer.control
    if not made and not await node.run(lambda: is_share_group(control, name)):
        raise Refused(Code.GROUP_ID_NOT_FOUND, f"there is no share group {name!r}")


async def delete_share_group(node: Node, name: str) -> bool:
    """Forget a share group without members; return whether there was one."""
    node.shares.forget(name)
    return bool(await node.change(lambda: forget_share_group(node.writer.control, name)))
