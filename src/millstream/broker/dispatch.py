"""From the bytes of a request to the bytes of its response: which handler handles which request.

``HANDLERS`` lists the requests that the broker handles, and ApiVersions reports them. A request of another
kind or version, and bytes that are no request, cannot have a response, as its form would be unknown: the
connection ends, as it does with Kafka. The protocol has one exception: the response to a version of
ApiVersions that is too new has the oldest form.
"""

from __future__ import annotations

import struct
from collections.abc import Awaitable, Callable, Mapping
from typing import NamedTuple, TypeAlias

from millstream.broker.call import Call
from millstream.broker.log_access import storage_errors
from millstream.broker.node import BrokerNode
from millstream.broker.protocol import (
    messages,
    messages_admin,
    messages_cluster,
    messages_groups,
    messages_security,
    messages_share,
    messages_transactions,
)
from millstream.broker.protocol.error_codes import ErrorCode
from millstream.broker.protocol.schema import Api
from millstream.broker.protocol.wire import ByteReader, BytesLike, MalformedError, Message
from millstream.broker.requests import (
    cluster,
    committed_offsets,
    configs,
    fetch,
    groups,
    list_offsets,
    produce,
    sasl,
    share_fetch,
    share_groups,
    topics,
    transactions,
)
from millstream.broker.security.authentication import SaslSession

Handler: TypeAlias = Callable[[BrokerNode, Call], Awaitable[Message | None]]
NON_PRODUCE_BYTES_MAX = 16 * 1024 * 1024  # of a request without records
_CHUNK_BYTES_MIN = 64 * 1024  # of a response: smaller chunks are joined
_OPENING = struct.Struct(">hhi")  # key, version and correlation id, in every header


class Peer(NamedTuple):
    """The two ends of a connection: where the client reached the broker, and the client.

    ``connection`` counts connections upwards. ``login`` is set where the broker has users.
    """

    host: str
    port: int
    client_host: str
    connection: int = 0
    login: SaslSession | None = None


class UnknownRequestError(Exception):
    """A kind or version of request that the broker does not support."""


class UnauthenticatedError(Exception):
    """A request of an unauthenticated client."""


async def api_versions(node: BrokerNode, call: Call) -> Message:  # noqa: ARG001 - a handler
    """Handle an ApiVersions request."""
    known = call.api.supports(call.version)
    return {
        "error_code": ErrorCode.NONE if known else ErrorCode.UNSUPPORTED_VERSION,
        "api_keys": [
            {"api_key": api.key, "min_version": api.versions[0], "max_version": api.versions[1]}
            for api in sorted(HANDLERS, key=lambda api: api.key)
        ],
    }


HANDLERS: Mapping[Api, Handler] = {
    messages.PRODUCE: produce.produce,
    messages.FETCH: fetch.fetch,
    messages.LIST_OFFSETS: list_offsets.list_offsets,
    messages.METADATA: topics.metadata,
    messages.API_VERSIONS: api_versions,
    messages_groups.OFFSET_COMMIT: committed_offsets.offset_commit,
    messages_groups.OFFSET_FETCH: committed_offsets.offset_fetch,
    messages_groups.OFFSET_DELETE: committed_offsets.offset_delete,
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
    messages_admin.DELETE_RECORDS: list_offsets.delete_records,
    messages_admin.DESCRIBE_CONFIGS: configs.describe_configs,
    messages_admin.ALTER_CONFIGS: configs.alter_configs,
    messages_admin.CREATE_PARTITIONS: topics.create_partitions,
    messages_admin.INCREMENTAL_ALTER_CONFIGS: configs.incremental_alter_configs,
    messages_admin.DESCRIBE_CLUSTER: topics.describe_cluster,
    messages_cluster.DESCRIBE_ACLS: cluster.describe_acls,
    messages_cluster.CREATE_ACLS: cluster.create_acls,
    messages_cluster.DELETE_ACLS: cluster.delete_acls,
    messages_cluster.ALTER_REPLICA_LOG_DIRS: cluster.alter_replica_log_dirs,
    messages_cluster.DESCRIBE_LOG_DIRS: cluster.describe_log_dirs,
    messages_cluster.ELECT_LEADERS: cluster.elect_leaders,
    messages_cluster.ALTER_PARTITION_REASSIGNMENTS: cluster.alter_partition_reassignments,
    messages_cluster.LIST_PARTITION_REASSIGNMENTS: cluster.list_partition_reassignments,
    messages_cluster.DESCRIBE_PRODUCERS: cluster.describe_producers,
    messages_cluster.DESCRIBE_TOPIC_PARTITIONS: cluster.describe_topic_partitions,
    messages_security.SASL_HANDSHAKE: sasl.sasl_handshake,
    messages_security.SASL_AUTHENTICATE: sasl.sasl_authenticate,
    messages_share.SHARE_GROUP_HEARTBEAT: share_groups.share_group_heartbeat,
    messages_share.SHARE_GROUP_DESCRIBE: share_groups.share_group_describe,
    messages_share.SHARE_FETCH: share_fetch.share_fetch,
    messages_share.SHARE_ACKNOWLEDGE: share_fetch.share_acknowledge,
    messages_share.DESCRIBE_SHARE_GROUP_OFFSETS: share_groups.describe_share_group_offsets,
    messages_share.ALTER_SHARE_GROUP_OFFSETS: share_groups.alter_share_group_offsets,
    messages_share.DELETE_SHARE_GROUP_OFFSETS: share_groups.delete_share_group_offsets,
}
_BY_KEY = {api.key: api for api in HANDLERS}


def decode_call(frame: bytes, peer: Peer) -> Call:
    """Return the request in a frame.

    Raises:
        MalformedError: the bytes are no request.
        UnknownRequestError: the broker does not support the request.
        UnauthenticatedError: the client has not authenticated.
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
    if len(frame) > NON_PRODUCE_BYTES_MAX and api is not messages.PRODUCE:
        raise MalformedError(
            f"a {api.name} request of {len(frame)} bytes; at most {NON_PRODUCE_BYTES_MAX}"
        )
    source = ByteReader(frame)
    header = messages.REQUEST_HEADER.read(source)
    if api.flexible(version):
        for _ in range(source.uvarint()):
            source.uvarint()
            source.take(source.uvarint())
    request = api.decode_request(source, version)
    return Call(api, version, correlation_id, header["client_id"] or "", request, *peer)


async def handle_request(node: BrokerNode, call: Call) -> list[BytesLike] | None:
    """Handle a request; return the response frame in chunks, or None if no response is wanted."""
    node.counters.requests[call.api.name] += 1
    with storage_errors():  # an OSError that is raised beside it is the socket's
        response = await HANDLERS[call.api](node, call)
    return None if response is None else encode_frame(call, response)


def encode_frame(call: Call, response: Message) -> list[BytesLike]:
    """Return the bytes of a response: length, header, message.

    They are in chunks: large records are views of what was read from the log, and are not copied.
    """
    version = call.version if call.api.supports(call.version) else 0
    out: list[BytesLike] = [b"", call.correlation_id.to_bytes(4, "big", signed=True)]
    # A client does not know the broker's versions yet when it reads the response to ApiVersions, so
    # the header of this one is never flexible.
    if call.api.flexible(version) and call.api is not messages.API_VERSIONS:
        out.append(b"\0")
    call.api.encode_response(response, version, out)
    out[0] = sum(map(len, out)).to_bytes(4, "big")
    return _coalesce(out)


def _coalesce(chunks: list[BytesLike]) -> list[BytesLike]:
    """Join adjacent small chunks."""
    few: list[BytesLike] = []
    small: list[BytesLike] = []
    for chunk in chunks:
        if len(chunk) < _CHUNK_BYTES_MIN:
            small.append(chunk)
        else:
            few += [b"".join(small), chunk]
            small = []
    few.append(b"".join(small))
    return few
