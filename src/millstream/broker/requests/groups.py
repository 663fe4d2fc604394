"""The requests of members of consumer groups, and those that list, describe and delete groups.

This broker coordinates every group. Members are kept in memory: after a restart they must rejoin.
Committed offsets are on disk (``committed_offsets``).
"""

from __future__ import annotations

import struct
from collections.abc import Iterable

from millstream.broker.call import Call
from millstream.broker.groups.coordinator import check_group_id
from millstream.broker.groups.group import Group
from millstream.broker.groups.member import Identity, JoinRequest, Member, MemberIdRequiredError
from millstream.broker.node import BrokerNode
from millstream.broker.protocol.error_codes import ApiError, ErrorCode, coordinator_code_of
from millstream.broker.protocol.wire import ByteReader, MalformedError, Message
from millstream.broker.requests.share_groups import delete_share_group
from millstream.errors import MillstreamError
from millstream.log.groups import delete_offsets, group_names
from millstream.log.share_state import share_names

_COORDINATED = (0, 1)  # kinds of keys: groups and transactional ids
_MEMBER_ID_REQUIRED_FROM, _SKIP_ASSIGNMENT_FROM = 4, 9  # versions of JoinGroup
_MEMBERS_FROM = 3  # version of LeaveGroup
_CONSUMERS = "consumer"  # the protocol type whose metadata names the topics of a member
_SHARE = "share"
_DEAD = "Dead"


async def find_coordinator(node: BrokerNode, call: Call) -> Message:
    """Handle a FindCoordinator request: the coordinator is this broker."""
    request = call.request
    known = request["key_type"] in _COORDINATED
    here = {
        "error_code": ErrorCode.NONE if known else ErrorCode.INVALID_REQUEST,
        "error_message": None
        if known
        else f"there is no coordinator for keys of kind {request['key_type']}",
        "node_id": node.node_id if known else -1,
        "host": call.host if known else "",
        "port": call.port if known else -1,
    }
    return {**here, "coordinators": [{"key": key, **here} for key in request["coordinator_keys"]]}


# -- members ----------------------------------------------------------------------------------


async def join_group(node: BrokerNode, call: Call) -> Message:
    """Handle a JoinGroup request; the response is sent when the generation has begun."""
    request = call.request
    try:
        joined = await _group_to_join(node, request).join(_join_request(call))
    except ApiError as error:
        known = (
            error.member_id if isinstance(error, MemberIdRequiredError) else request["member_id"]
        )
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


def _group_to_join(node: BrokerNode, request: Message) -> Group:
    name, timeout_ms = request["group_id"], request["session_timeout_ms"]
    check_group_id(name)
    if node.share_groups.get(name) is not None:
        raise ApiError(ErrorCode.INCONSISTENT_GROUP_PROTOCOL, f"group {name!r} is a share group")
    settings = node.settings
    low, high = settings.session_timeout_ms_min, settings.session_timeout_ms_max
    if not low <= timeout_ms <= high:
        raise ApiError(
            ErrorCode.INVALID_SESSION_TIMEOUT,
            f"a session timeout of {timeout_ms} ms; give {low} to {high}",
        )
    return (
        node.groups.get_for_member(name)
        if request["member_id"]
        else node.groups.get_or_create(name)
    )


def _join_request(call: Call) -> JoinRequest:
    request = call.request
    rebalance_ms = request["rebalance_timeout_ms"]
    return JoinRequest(
        Identity(request["member_id"], request["group_instance_id"]),
        call.client_id,
        call.client_host,
        request["session_timeout_ms"],
        rebalance_ms if rebalance_ms > 0 else request["session_timeout_ms"],
        request["protocol_type"],
        {one["name"]: one["metadata"] for one in request["protocols"]},
        member_id_required=call.version >= _MEMBER_ID_REQUIRED_FROM,
        can_skip_assignment=call.version >= _SKIP_ASSIGNMENT_FROM,
    )


def _member_identity(request: Message) -> Identity:
    return Identity(request["member_id"], request["group_instance_id"])


async def sync_group(node: BrokerNode, call: Call) -> Message:
    """Handle a SyncGroup request; the response is sent when the leader has sent the assignment."""
    request = call.request
    try:
        group = node.groups.get_for_member(request["group_id"])
        assignment = await group.sync(
            _member_identity(request),
            request["generation_id"],
            {one["member_id"]: one["assignment"] for one in request["assignments"]},
            protocol=(request["protocol_type"], request["protocol_name"]),
        )
    except ApiError as error:
        return {"error_code": error.code}
    return {
        "protocol_type": group.protocol_type,
        "protocol_name": group.protocol_name,
        "assignment": assignment,
    }


async def heartbeat(node: BrokerNode, call: Call) -> Message:
    """Handle a Heartbeat request."""
    request = call.request
    try:
        group = node.groups.get_for_member(request["group_id"])
        group.heartbeat(_member_identity(request), request["generation_id"])
    except ApiError as error:
        return {"error_code": error.code}
    return {}


async def leave_group(node: BrokerNode, call: Call) -> Message:
    """Handle a LeaveGroup request: of one member, or of several in newer versions."""
    request = call.request
    if call.version < _MEMBERS_FROM:
        return {"error_code": _leave(node, request["group_id"], Identity(request["member_id"]))}
    try:
        check_group_id(request["group_id"])
    except ApiError as error:
        return {"error_code": error.code}
    return {
        "members": [
            {
                "member_id": one["member_id"],
                "group_instance_id": one["group_instance_id"],
                "error_code": _leave(node, request["group_id"], _member_identity(one)),
            }
            for one in request["members"]
        ]
    }


def _leave(node: BrokerNode, name: str, who: Identity) -> ErrorCode:
    try:
        node.groups.get_for_member(name).leave(who)
    except ApiError as error:
        return error.code
    return ErrorCode.NONE


# -- listing, describing, deleting ------------------------------------------------------------


async def list_groups(node: BrokerNode, call: Call) -> Message:
    """Handle a ListGroups request: groups with members, and groups with committed offsets."""
    request = call.request
    stored = await node.log.run_read(lambda: group_names(node.log.writer.control))
    shares = {
        *await node.log.run_read(lambda: share_names(node.log.writer.control)),
        *node.share_groups.names(),
    }
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


async def describe_groups(node: BrokerNode, call: Call) -> Message:
    """Handle a DescribeGroups request."""
    stored = set(await node.log.run_read(lambda: group_names(node.log.writer.control)))
    return {
        "groups": [
            _describe(node.groups.get(name), name, stored=name in stored)
            for name in dict.fromkeys(call.request["groups"])
        ]
    }


def _describe(group: Group | None, name: str, *, stored: bool) -> Message:
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


async def delete_groups(node: BrokerNode, call: Call) -> Message:
    """Handle a DeleteGroups request: delete the committed offsets of groups without members."""
    results = []
    for name in call.request["groups_names"]:
        code = ErrorCode.NONE
        if node.groups.get(name) is not None or node.share_groups.get(name) is not None:
            code = ErrorCode.NON_EMPTY_GROUP
        else:
            code = await _delete_offsets(node, name)
        results.append({"group_id": name, "error_code": code})
    return {"results": results}


async def _delete_offsets(node: BrokerNode, name: str) -> ErrorCode:
    """Delete the committed offsets of a group; return the error code for the client."""
    try:
        deleted = await delete_share_group(node, name) or bool(
            await node.log.run_write(lambda: delete_offsets(node.log.writer.control, name))
        )
    except MillstreamError as error:
        return coordinator_code_of(error)
    return ErrorCode.NONE if deleted else ErrorCode.GROUP_ID_NOT_FOUND


def subscribed_topics(group: Group) -> set[str] | None:
    """Return the topics that the members of a group read; None if that is unknown."""
    if group.protocol_type != _CONSUMERS:
        return None
    try:
        return {
            topic
            for member in group.members.values()
            for topic in _subscription_topics(member, group.protocol_name)
        }
    except (MalformedError, struct.error, UnicodeDecodeError):
        return None


def _subscription_topics(member: Member, protocol_name: str) -> Iterable[str]:
    """Return the topics in a member's subscription: a version, then the topics."""
    source = ByteReader(member.protocols.get(protocol_name, b"\0\0\0\0\0\0"))
    source.take(2)
    for _ in range(source.elements(int.from_bytes(source.take(4), "big", signed=True))):
        yield source.take(int.from_bytes(source.take(2), "big", signed=True)).decode()
