"""The requests of members of groups, and those that look at groups.

This broker coordinates every group. Members are kept in memory: after a restart they are asked to join
anew. What groups have committed is on disk (``committed``).
"""

from __future__ import annotations

import struct
from collections.abc import Iterable

from millstream.broker.codes import Code, Refused, coordinator_code_of
from millstream.broker.coordinator import check_name
from millstream.broker.members import Identity, Joining, Member, MemberIdRequired
from millstream.broker.membership import Group
from millstream.broker.node import Call, Node
from millstream.broker.share_administration import delete_share_group
from millstream.broker.wire import MalformedError, Message, Source
from millstream.errors import MillstreamError
from millstream.log.groups import forget_offsets, group_names
from millstream.log.shares import share_names

_COORDINATED = (0, 1)  # kinds of keys: groups and transactional ids
_ID_FIRST_FROM, _SKIPS_FROM = 4, 9  # versions of JoinGroup
_MEMBERS_FROM = 3  # version of LeaveGroup
_CONSUMERS = "consumer"  # the protocol type whose members say which topics they read
_SHARE = "share"
_DEAD = "Dead"


async def find_coordinator(node: Node, call: Call) -> Message:
    """Answer a FindCoordinator request: it is this broker."""
    request = call.request
    known = request["key_type"] in _COORDINATED
    here = {
        "error_code": Code.NONE if known else Code.INVALID_REQUEST,
        "error_message": None if known else f"nothing of kind {request['key_type']} is coordinated",
        "node_id": node.node_id if known else -1,
        "host": call.host if known else "",
        "port": call.port if known else -1,
    }
    return {**here, "coordinators": [{"key": key, **here} for key in request["coordinator_keys"]]}


# -- members ----------------------------------------------------------------------------------


async def join_group(node: Node, call: Call) -> Message:
    """Answer a JoinGroup request, when the generation has begun."""
    request = call.request
    try:
        joined = await _group_to_join(node, request).join(_joining(call))
    except Refused as error:
        known = error.member_id if isinstance(error, MemberIdRequired) else request["member_id"]
        return {"error_code": error.code, "member_id": known}
    return {
        "generation_id": joined.generation,
        "protocol_type": joined.protocol_type,
        "protocol_name": joined.protocol_name,
        "leader": joined.leader,
        "skip_assignment": joined.skip_assignment,
        "member_id": joined.member_id,
        "members": [
            {
                "member_id": who.member_id,
                "group_instance_id": who.instance_id,
                "metadata": metadata,
            }
            for who, metadata in joined.members
        ],
    }


def _group_to_join(node: Node, request: Message) -> Group:
    name, timeout_ms = request["group_id"], request["session_timeout_ms"]
    check_name(name)
    if node.share_groups.get(name) is not None:
        raise Refused(Code.INCONSISTENT_GROUP_PROTOCOL, f"group {name!r} is a share group")
    settings = node.settings
    low, high = settings.session_timeout_ms_min, settings.session_timeout_ms_max
    if not low <= timeout_ms <= high:
        raise Refused(
            Code.INVALID_SESSION_TIMEOUT,
            f"a session timeout of {timeout_ms} ms; give {low} to {high}",
        )
    return node.groups.of_member(name) if request["member_id"] else node.groups.make(name)


def _joining(call: Call) -> Joining:
    request = call.request
    rebalance_ms = request["rebalance_timeout_ms"]
    return Joining(
        Identity(request["member_id"], request["group_instance_id"]),
        call.client_id,
        call.client_host,
        request["session_timeout_ms"],
        rebalance_ms if rebalance_ms > 0 else request["session_timeout_ms"],
        request["protocol_type"],
        {one["name"]: one["metadata"] for one in request["protocols"]},
        id_first=call.version >= _ID_FIRST_FROM,
        skips_assignment=call.version >= _SKIPS_FROM,
    )


def _speaker(request: Message) -> Identity:
    return Identity(request["member_id"], request["group_instance_id"])


async def sync_group(node: Node, call: Call) -> Message:
    """Answer a SyncGroup request, when the leader has assigned."""
    request = call.request
    try:
        group = node.groups.of_member(request["group_id"])
        assignment = await group.sync(
            _speaker(request),
            request["generation_id"],
            {one["member_id"]: one["assignment"] for one in request["assignments"]},
            protocol=(request["protocol_type"], request["protocol_name"]),
        )
    except Refused as error:
        return {"error_code": error.code}
    return {
        "protocol_type": group.protocol_type,
        "protocol_name": group.protocol_name,
        "assignment": assignment,
    }


async def heartbeat(node: Node, call: Call) -> Message:
    """Answer a Heartbeat request."""
    request = call.request
    try:
        group = node.groups.of_member(request["group_id"])
        group.heartbeat(_speaker(request), request["generation_id"])
    except Refused as error:
        return {"error_code": error.code}
    return {}


async def leave_group(node: Node, call: Call) -> Message:
    """Answer a LeaveGroup request: of one member, or of several in newer versions."""
    request = call.request
    if call.version < _MEMBERS_FROM:
        return {"error_code": _leave(node, request["group_id"], Identity(request["member_id"]))}
    try:
        check_name(request["group_id"])
    except Refused as error:
        return {"error_code": error.code}
    return {
        "members": [
            {
                "member_id": one["member_id"],
                "group_instance_id": one["group_instance_id"],
                "error_code": _leave(node, request["group_id"], _speaker(one)),
            }
            for one in request["members"]
        ]
    }


def _leave(node: Node, name: str, who: Identity) -> Code:
    try:
        node.groups.of_member(name).leave(who)
    except Refused as error:
        return error.code
    return Code.NONE


# -- looking at groups ------------------------------------------------------------------------


async def list_groups(node: Node, call: Call) -> Message:
    """Answer a ListGroups request: groups with members, and those that have committed something."""
    request = call.request
    stored = await node.run(lambda: group_names(node.writer.control))
    shares = {*await node.run(lambda: share_names(node.writer.control)), *node.share_groups.names()}
    groups = [
        {
            "group_id": name,
            "protocol_type": _SHARE,
            "group_state": "Stable" if node.share_groups.get(name) else "Empty",
            "group_type": _SHARE,
        }
        for name in sorted(shares)
    ]
    for name in sorted({*stored, *node.groups.names()} - shares):
        group = node.groups.get(name)
        groups.append(
            {
                "group_id": name,
                "protocol_type": group.protocol_type if group else _CONSUMERS,
                "group_state": group.state if group else "Empty",
                "group_type": "classic",
            }
        )
    states = {state.lower() for state in request["states_filter"]}
    types = {kind.lower() for kind in request["types_filter"]}
    return {
        "groups": [
            one
            for one in groups
            if (not states or one["group_state"].lower() in states)
            and (not types or one["group_type"] in types)
        ]
    }


async def describe_groups(node: Node, call: Call) -> Message:
    """Answer a DescribeGroups request."""
    stored = set(await node.run(lambda: group_names(node.writer.control)))
    return {
        "groups": [
            _described(node.groups.get(name), name, stored=name in stored)
            for name in dict.fromkeys(call.request["groups"])
        ]
    }


def _described(group: Group | None, name: str, *, stored: bool) -> Message:
    if group is None:
        state, protocol_type = ("Empty", _CONSUMERS) if stored else (_DEAD, "")
        return {"group_id": name, "group_state": state, "protocol_type": protocol_type}
    chosen = group.state in ("Stable", "CompletingRebalance")
    return {
        "group_id": name,
        "group_state": group.state,
        "protocol_type": group.protocol_type,
        "protocol_data": group.protocol_name if chosen else "",
        "members": [
            {
                "member_id": one.who.member_id,
                "group_instance_id": one.who.instance_id,
                "client_id": one.client_id,
                "client_host": f"/{one.client_host}",
                "member_metadata": one.protocols.get(group.protocol_name, b"") if chosen else b"",
                "member_assignment": one.assignment,
            }
            for one in group.members.values()
        ],
    }


async def delete_groups(node: Node, call: Call) -> Message:
    """Answer a DeleteGroups request: what a group has committed is forgotten."""
    results = []
    for name in call.request["groups_names"]:
        code = Code.NONE
        if node.groups.get(name) is not None or node.share_groups.get(name) is not None:
            code = Code.NON_EMPTY_GROUP
        else:
            code = await _forgotten(node, name)
        results.append({"group_id": name, "error_code": code})
    return {"results": results}


async def _forgotten(node: Node, name: str) -> Code:
    """Forget what a group has committed; return what the client is told."""
    try:
        gone = await delete_share_group(node, name) or bool(
            await node.change(lambda: forget_offsets(node.writer.control, name))
        )
    except MillstreamError as error:
        return coordinator_code_of(error)
    return Code.NONE if gone else Code.GROUP_ID_NOT_FOUND


def topics_read(group: Group) -> set[str] | None:
    """Return the topics that the members of a group read; None if they do not say."""
    if group.protocol_type != _CONSUMERS:
        return None
    try:
        return {
            topic
            for member in group.members.values()
            for topic in _subscribed(member, group.protocol_name)
        }
    except (MalformedError, struct.error, UnicodeDecodeError):
        return None


def _subscribed(member: Member, protocol_name: str) -> Iterable[str]:
    """Return the topics in a member's subscription: a version, then the topics."""
    source = Source(member.protocols.get(protocol_name, b"\0\0\0\0\0\0"))
    source.take(2)
    for _ in range(source.elements(int.from_bytes(source.take(4), "big", signed=True))):
        yield source.take(int.from_bytes(source.take(2), "big", signed=True)).decode()
