"""From the bytes of a request to the bytes of its answer: which code answers what.

What the broker answers is what is in ``HANDLERS``, and that is what ApiVersions tells. A request of
another kind or version, and bytes that are no request, cannot be answered, as nobody could say in which
form: the connection ends, as it does with Kafka. One exception is the protocol's own: a version of
ApiVersions that is too new is answered in its oldest form.
"""

from __future__ import annotations

import struct
from collections.abc import Awaitable, Callable, Mapping
from typing import NamedTuple, TypeAlias

from millstream.broker import (
    alone,
    authentication,
    committed,
    configs,
    fetching,
    groups,
    listing,
    messages,
    messages_admin,
    messages_cluster,
    messages_groups,
    messages_security,
    messages_share,
    messages_transactions,
    producing,
    share_administration,
    share_fetching,
    topics,
    transactions,
)
from millstream.broker.authentication import Login
from millstream.broker.codes import Code
from millstream.broker.node import Call, Node
from millstream.broker.schema import Api
from millstream.broker.wire import Buffer, MalformedError, Message, Source

Handler: TypeAlias = Callable[[Node, Call], Awaitable[Message | None]]
OTHER_BYTES_MAX = 16 * 1024 * 1024  # of a request that brings no records
_PIECE_BYTES_MIN = 64 * 1024  # of an answer: what is smaller is copied together
_OPENING = struct.Struct(">hhi")  # key, version and correlation id, in every header


class Peer(NamedTuple):
    """The two ends of a connection: where the client reached the broker, and the client.

    ``connection`` counts connections as they come. ``login`` is there where the broker has users.
    """

    host: str
    port: int
    client_host: str
    connection: int = 0
    login: Login | None = None


class UnknownRequestError(Exception):
    """A kind or version of request that is not answered here."""


class UnauthenticatedError(Exception):
    """A request of somebody who has not said yet who it is, or could not."""


async def api_versions(node: Node, call: Call) -> Message:  # noqa: ARG001 - a handler
    """Answer an ApiVersions request."""
    known = call.api.supports(call.version)
    return {
        "error_code": Code.NONE if known else Code.UNSUPPORTED_VERSION,
        "api_keys": [
            {"api_key": api.key, "min_version": api.versions[0], "max_version": api.versions[1]}
            for api in sorted(HANDLERS, key=lambda api: api.key)
        ],
    }


HANDLERS: Mapping[Api, Handler] = {
    messages.PRODUCE: producing.produce,
    messages.FETCH: fetching.fetch,
    messages.LIST_OFFSETS: listing.list_offsets,
    messages.METADATA: topics.metadata,
    messages.API_VERSIONS: api_versions,
    messages_groups.OFFSET_COMMIT: committed.offset_commit,
    messages_groups.OFFSET_FETCH: committed.offset_fetch,
    messages_groups.OFFSET_DELETE: committed.offset_delete,
    messages_groups.FIND_COORDINATOR: groups.find_coordinator,
    messages_groups.JOIN_GROUP: groups.join_group,
    messages_groups.SYNC_GROUP: groups.sync_group,
    messages_groups.HEARTBEAT: groups.heartbeat,
    messages_groups.LEAVE_GROUP: groups.leave_group,
    messages_groups.DESCRIBE_GROUPS: groups.describe_groups,
    messages_groups.LIST_GROUPS: groups.list_groups,
    messages_groups.DELETE_GROUPS: groups.delete_groups,
    messages_transactions.INIT_PRODUCER_ID: transactions.init_producer_id,
    messages_transactions.ADD_PARTITIONS_TO_TXN: transactions.add_partitions_to_txn,
    messages_transactions.ADD_OFFSETS_TO_TXN: transactions.add_offsets_to_txn,
    messages_transactions.TXN_OFFSET_COMMIT: transactions.txn_offset_commit,
    messages_transactions.END_TXN: transactions.end_txn,
    messages_transactions.DESCRIBE_TRANSACTIONS: transactions.describe_transactions,
    messages_transactions.LIST_TRANSACTIONS: transactions.list_transactions,
    messages_admin.CREATE_TOPICS: topics.create_topics,
    messages_admin.DELETE_TOPICS: topics.delete_topics,
    messages_admin.DELETE_RECORDS: listing.delete_records,
    messages_admin.DESCRIBE_CONFIGS: configs.describe_configs,
    messages_admin.ALTER_CONFIGS: configs.alter_configs,
    messages_admin.CREATE_PARTITIONS: topics.create_partitions,
    messages_admin.INCREMENTAL_ALTER_CONFIGS: configs.incremental_alter_configs,
    messages_admin.DESCRIBE_CLUSTER: topics.describe_cluster,
    messages_cluster.DESCRIBE_ACLS: alone.describe_acls,
    messages_cluster.CREATE_ACLS: alone.create_acls,
    messages_cluster.DELETE_ACLS: alone.delete_acls,
    messages_cluster.ALTER_REPLICA_LOG_DIRS: alone.alter_replica_log_dirs,
    messages_cluster.DESCRIBE_LOG_DIRS: alone.describe_log_dirs,
    messages_cluster.ELECT_LEADERS: alone.elect_leaders,
    messages_cluster.ALTER_PARTITION_REASSIGNMENTS: alone.alter_partition_reassignments,
    messages_cluster.LIST_PARTITION_REASSIGNMENTS: alone.list_partition_reassignments,
    messages_cluster.DESCRIBE_PRODUCERS: alone.describe_producers,
    messages_cluster.DESCRIBE_TOPIC_PARTITIONS: alone.describe_topic_partitions,
    messages_security.SASL_HANDSHAKE: authentication.sasl_handshake,
    messages_security.SASL_AUTHENTICATE: authentication.sasl_authenticate,
    messages_share.SHARE_GROUP_HEARTBEAT: share_administration.share_group_heartbeat,
    messages_share.SHARE_GROUP_DESCRIBE: share_administration.share_group_describe,
    messages_share.SHARE_FETCH: share_fetching.share_fetch,
    messages_share.SHARE_ACKNOWLEDGE: share_fetching.share_acknowledge,
    messages_share.DESCRIBE_SHARE_GROUP_OFFSETS: share_administration.describe_share_group_offsets,
    messages_share.ALTER_SHARE_GROUP_OFFSETS: share_administration.alter_share_group_offsets,
    messages_share.DELETE_SHARE_GROUP_OFFSETS: share_administration.delete_share_group_offsets,
}
_BY_KEY = {api.key: api for api in HANDLERS}


def read_call(frame: bytes, peer: Peer) -> Call:
    """Return the request in a frame.

    Raises:
        MalformedError: the bytes are no request.
        UnknownRequestError: they are one that is not answered here.
        UnauthenticatedError: it is not the turn of this one.
    """
    if len(frame) < _OPENING.size:
        raise MalformedError(f"a request of {len(frame)} bytes")
    key, version, correlation_id = _OPENING.unpack_from(frame)
    api = _BY_KEY.get(key)
    if api is not None and peer.login is not None and not peer.login.admits(api):
        raise UnauthenticatedError(f"a request of {api.name} before authentication")
    if api is messages.API_VERSIONS and not api.supports(version):
        return Call(api, version, correlation_id, "", {}, *peer)
    if api is None or not api.supports(version):
        raise UnknownRequestError(f"version {version} of {api.name if api else f'API {key}'}")
    if len(frame) > OTHER_BYTES_MAX and api is not messages.PRODUCE:
        raise MalformedError(
            f"a {api.name} request of {len(frame)} bytes; at most {OTHER_BYTES_MAX}"
        )
    source = Source(frame)
    header = messages.REQUEST_HEADER.read(source)
    if api.flexible(version):
        for _ in range(source.uvarint()):
            source.uvarint()
            source.take(source.uvarint())
    request = api.decode_request(source, version)
    return Call(api, version, correlation_id, header["client_id"] or "", request, *peer)


async def answer(node: Node, call: Call) -> list[Buffer] | None:
    """Return the frame that answers a request, in pieces; None if no answer is wanted."""
    response = await HANDLERS[call.api](node, call)
    return None if response is None else frame_of(call, response)


def frame_of(call: Call, response: Message) -> list[Buffer]:
    """Return a response as it is sent: its length, the header, the message.

    It is in pieces: records of some size are views of what was read from the log, and are not copied.
    """
    version = call.version if call.api.supports(call.version) else 0
    out: list[Buffer] = [b"", call.correlation_id.to_bytes(4, "big", signed=True)]
    # A client cannot know yet what the broker speaks when it reads the answer to ApiVersions, so
    # the header of this one is never flexible.
    if call.api.flexible(version) and call.api is not messages.API_VERSIONS:
        out.append(b"\0")
    call.api.encode_response(response, version, out)
    out[0] = sum(map(len, out)).to_bytes(4, "big")
    return _in_few(out)


def _in_few(pieces: list[Buffer]) -> list[Buffer]:
    """Join the small pieces that stand side by side."""
    few: list[Buffer] = []
    small: list[Buffer] = []
    for piece in pieces:
        if len(piece) < _PIECE_BYTES_MIN:
            small.append(piece)
        else:
            few += [b"".join(small), piece]
            small = []
    few.append(b"".join(small))
    return few
