"""The requests of idempotent and transactional producers.

The log has the coordinator (``log.transactions``). This module adds the protocol before KIP-890: a
producer keeps its producer epoch from one transaction to the next, adds partitions and groups to the
transaction, and retries requests without a response, with this broker or the next one on the folder.

=========================================  ==========================  ===============================
a request of                               InitProducerId              others
=========================================  ==========================  ===============================
the producer that has the id               next producer epoch         done
one that was replaced, or was too slow     ``PRODUCER_FENCED``         ``PRODUCER_FENCED``
one with another producer id               ``PRODUCER_FENCED``         ``INVALID_PRODUCER_ID_MAPPING``
=========================================  ==========================  ===============================

The protocol before KIP-890 cannot tell a delayed EndTxn from the end of the next transaction. But a client
retries on another connection only after it has closed the one before: so a request on an earlier
connection of a producer, once it has used a later one, gets ``NOT_COORDINATOR``. The producer that it replaced
has the same producer id and may connect later than its successor: connections count per producer epoch.

A request of a version without ``PRODUCER_FENCED`` gets ``INVALID_PRODUCER_EPOCH``. A transaction that was
too slow was aborted, and its producer may continue with the next producer epoch. While the disk is full,
all of this is ``COORDINATOR_NOT_AVAILABLE``, so that producers retry; a producer that ends meanwhile may
abort a transaction that it could not begin.

Source: KIP-98, KIP-360, KIP-447; Kafka ``TransactionCoordinator``.
"""

from __future__ import annotations

from collections.abc import Callable

from millstream.broker.call import Call
from millstream.broker.groups.coordinator import check_group_id
from millstream.broker.groups.member import Identity
from millstream.broker.node import BrokerNode
from millstream.broker.protocol.error_codes import ApiError, ErrorCode, coordinator_code_of
from millstream.broker.protocol.wire import Message
from millstream.broker.requests.committed_offsets import partition_responses, split_committable
from millstream.broker.requests.list_offsets import partition_code
from millstream.errors import (
    MillstreamError,
    ProducerFencedError,
    TransactionAbortedError,
)
from millstream.log.producer_identity import (
    TIMEOUT_MS_MAX,
    ProducerIdentity,
    TransactionDescription,
)
from millstream.log.remote_transactions import remote_transaction
from millstream.record import TopicPartition

_FENCED_FROM = {22: 4, 24: 2, 25: 2, 26: 2}  # by API key: the first version with PRODUCER_FENCED
_STATES = {"open": "Ongoing", "committed": "CompleteCommit", "aborted": "CompleteAbort"}
_EMPTY = "Empty"
ID_CHARACTERS_MAX = 1000  # of a transactional id
_PRODUCER_CONNECTIONS_MAX = 10_000  # producers whose last connection is remembered
_KNOWN_STATES = frozenset(
    {
        *_STATES.values(),
        _EMPTY,
        "PrepareCommit",
        "PrepareAbort",
        "Dead",
        "PrepareEpochFence",
    }
)


async def init_producer_id(node: BrokerNode, call: Call) -> Message:
    """Handle an InitProducerId request."""
    request = call.request
    name, timeout_ms = request["transactional_id"], request["transaction_timeout_ms"]
    if name is None:
        return await _respond(
            node, call, lambda: _identity(node.log.writer.transactions.register(in_process=False))
        )
    if not name or not 0 < timeout_ms <= TIMEOUT_MS_MAX:
        code = ErrorCode.INVALID_TRANSACTION_TIMEOUT if name else ErrorCode.INVALID_REQUEST
        return {"error_code": code}
    if len(name) > ID_CHARACTERS_MAX or not _may_register(node, name):
        return {"error_code": ErrorCode.POLICY_VIOLATION}
    resumes = None
    if request["producer_id"] >= 0:
        resumes = ProducerIdentity(request["producer_id"], request["producer_epoch"])

    def register() -> Message:
        return _identity(
            node.log.writer.transactions.register(
                name, timeout_ms=timeout_ms, in_process=False, resumes=resumes
            )
        )

    return await _respond(node, call, register)


def _may_register(node: BrokerNode, name: str) -> bool:
    """Return whether a transactional id exists, or one more may be added."""
    transactions = node.log.writer.transactions
    known = transactions.identity_of(name) is not None
    return known or transactions.transactional_count() < node.settings.transactional_ids_max


def _identity(identity: ProducerIdentity) -> Message:
    return {"producer_id": identity.producer_id, "producer_epoch": identity.producer_epoch}


async def _respond(node: BrokerNode, call: Call, work: Callable[[], Message]) -> Message:
    """Run ``work`` in a thread; return its result, or the code of its error."""
    try:
        return await node.log.run_write(work)
    except (MillstreamError, ApiError) as error:
        return {"error_code": _code(call, error)}


async def _run(node: BrokerNode, call: Call, work: Callable[[], None]) -> ErrorCode:
    """Run ``work`` in a thread; return the error code for the producer."""

    def do() -> Message:
        work()
        return {"error_code": ErrorCode.NONE}

    return ErrorCode((await _respond(node, call, do))["error_code"])


def _code(call: Call, error: MillstreamError | ApiError) -> ErrorCode:
    """Return the error code for a producer."""
    replaced = isinstance(error, ProducerFencedError) or (
        isinstance(error, TransactionAbortedError) and error.timed_out
    )
    if not replaced:
        return coordinator_code_of(error)
    has_fenced = call.version >= _FENCED_FROM.get(call.api.key, call.version + 1)
    return ErrorCode.PRODUCER_FENCED if has_fenced else ErrorCode.INVALID_PRODUCER_EPOCH


def _check_identity(
    node: BrokerNode, name: str, producer_id: int, producer_epoch: int
) -> ProducerIdentity:
    """Return the identity in a request, if the transactional id is this producer's.

    Raises:
        ApiError: it is not.
    """
    known = node.log.writer.transactions.identity_of(name)
    if known is None or known.producer_id != producer_id:
        raise ApiError(
            ErrorCode.INVALID_PRODUCER_ID_MAPPING,
            f"the transactional id {name!r} is not that of producer {producer_id}",
        )
    return ProducerIdentity(producer_id, producer_epoch)


def _is_stale_connection(node: BrokerNode, call: Call, prefix: str = "") -> bool:
    """Return whether the producer has used a later connection than that of the request."""
    request = call.request
    who = ProducerIdentity(request[f"{prefix}producer_id"], request[f"{prefix}producer_epoch"])
    last = node.producer_connections.pop(who, 0)
    node.producer_connections[who] = max(last, call.connection)  # as the most recent entry
    if len(node.producer_connections) > _PRODUCER_CONNECTIONS_MAX:  # ids come from clients
        del node.producer_connections[next(iter(node.producer_connections))]
    return call.connection < last


async def add_partitions_to_txn(node: BrokerNode, call: Call) -> Message:
    """Handle an AddPartitionsToTxn request: it opens the transaction."""
    request = call.request
    topics = request["v3_and_below_topics"]
    names = [
        TopicPartition(topic["name"], number) for topic in topics for number in topic["partitions"]
    ]
    codes = dict.fromkeys(names, ErrorCode.NONE)
    for partition in names:
        try:
            node.log.writer.partition(partition)
        except MillstreamError as error:
            codes[partition] = partition_code(error)
    if _is_stale_connection(node, call, "v3_and_below_"):
        codes = dict.fromkeys(names, ErrorCode.NOT_COORDINATOR)
    elif any(codes.values()):  # all or none
        codes = {
            partition: code or ErrorCode.OPERATION_NOT_ATTEMPTED
            for partition, code in codes.items()
        }
    else:
        begun = await _run(node, call, lambda: _begin(node, request, "v3_and_below_"))
        codes = dict.fromkeys(names, begun)
    return {
        "results_by_topic_v3_and_below": [
            {
                "name": topic["name"],
                "results_by_partition": [
                    {
                        "partition_index": number,
                        "partition_error_code": codes[TopicPartition(topic["name"], number)],
                    }
                    for number in topic["partitions"]
                ],
            }
            for topic in topics
        ]
    }


def _begin(node: BrokerNode, request: Message, prefix: str = "") -> None:
    """Open a transaction, or continue the open one."""
    name, *numbers = (
        request[f"{prefix}{key}"] for key in ("transactional_id", "producer_id", "producer_epoch")
    )
    node.log.writer.transactions.begin(_check_identity(node, name, *numbers), again=True)


async def add_offsets_to_txn(node: BrokerNode, call: Call) -> Message:
    """Handle an AddOffsetsToTxn request: the transaction will commit offsets of a group."""
    try:
        check_group_id(call.request["group_id"])
    except ApiError as error:
        return {"error_code": error.code}
    if _is_stale_connection(node, call):
        return {"error_code": ErrorCode.NOT_COORDINATOR}
    return {"error_code": await _run(node, call, lambda: _begin(node, call.request))}


async def txn_offset_commit(node: BrokerNode, call: Call) -> Message:
    """Handle a TxnOffsetCommit request: the offsets take effect when the transaction is committed."""
    request = call.request
    topics, group = request["topics"], request["group_id"]
    try:
        check_group_id(group)
        if request["member_id"] or request["generation_id"] >= 0:
            who = Identity(request["member_id"], request["group_instance_id"])
            node.groups.check_commit(group, who, request["generation_id"])
    except ApiError as error:
        return {"topics": partition_responses(topics, {}, error.code)}
    offsets, codes = split_committable(node, topics)

    def add() -> None:
        identity = _check_identity(
            node, request["transactional_id"], request["producer_id"], request["producer_epoch"]
        )
        node.log.writer.transactions.add_offsets(identity, group, offsets)

    added = await _run(node, call, add)
    codes |= dict.fromkeys(offsets, added)
    return {"topics": partition_responses(topics, codes)}


async def end_txn(node: BrokerNode, call: Call) -> Message:
    """Handle an EndTxn request: commit or abort."""
    if _is_stale_connection(node, call):
        return {"error_code": ErrorCode.NOT_COORDINATOR}
    return {"error_code": await _run(node, call, lambda: _end(node, call.request))}


def _end(node: BrokerNode, request: Message) -> None:
    identity = _check_identity(
        node, request["transactional_id"], request["producer_id"], request["producer_epoch"]
    )
    commit = request["committed"]
    try:
        # The protocol cannot give the producer another producer epoch.
        node.log.writer.transactions.end(identity, commit=commit, raise_epoch=False)
    except TransactionAbortedError as error:
        last = remote_transaction(node.log.writer.control, identity.producer_id)
        wanted = (identity.producer_epoch, "committed" if commit else "aborted")
        if error.timed_out or last != wanted:  # else it is a retry whose response was lost
            raise


# -- describing transactions ------------------------------------------------------------------


async def describe_transactions(node: BrokerNode, call: Call) -> Message:
    """Handle a DescribeTransactions request."""
    wanted = dict.fromkeys(call.request["transactional_ids"])

    def describe() -> list[Message]:
        named = {
            one.transactional_id: one
            for one in node.log.writer.transactions.transactional_producers()
        }
        names = node.log.writer.open_partitions()
        found = []
        for name in wanted:
            one = named.get(name)
            if one is None:
                code = ErrorCode.TRANSACTIONAL_ID_NOT_FOUND
                found.append({"error_code": code, "transactional_id": name})
            else:
                of_producer = names.get(one.identity.producer_id, [])
                found.append(_describe(node, one, [partition.name for partition in of_producer]))
        return found

    return {"transaction_states": await node.log.run_write(describe)}


def _describe(
    node: BrokerNode, one: TransactionDescription, names: list[TopicPartition]
) -> Message:
    topics: dict[str, list[int]] = {}
    for partition in names:
        topics.setdefault(partition.topic, []).append(partition.partition)
    return {
        "transactional_id": one.transactional_id,
        "transaction_state": _state(node, one),
        "transaction_timeout_ms": one.timeout_ms,
        "transaction_start_time_ms": -1 if one.open_since_ms is None else one.open_since_ms,
        "producer_id": one.identity.producer_id,
        "producer_epoch": one.identity.producer_epoch,
        "topics": [{"topic": name, "partitions": numbers} for name, numbers in topics.items()],
    }


def _state(node: BrokerNode, one: TransactionDescription) -> str:
    if one.open_since_ms is not None:
        return _STATES["open"]
    last = remote_transaction(node.log.writer.control, one.identity.producer_id)
    if last is None or last.producer_epoch != one.identity.producer_epoch:
        return _EMPTY
    return _STATES[last.state]


async def list_transactions(node: BrokerNode, call: Call) -> Message:
    """Handle a ListTransactions request."""
    request = call.request
    wanted, ids = set(request["state_filters"]), set(request["producer_id_filters"])
    older_ms = request["duration_filter"]
    now_ms = node.log.clock_ms()

    def listed() -> list[Message]:
        found = []
        for one in node.log.writer.transactions.transactional_producers():
            state = _state(node, one)
            lasts_ms = now_ms - one.open_since_ms if one.open_since_ms is not None else -1
            if (
                (not wanted or state in wanted)
                and (not ids or one.identity.producer_id in ids)
                and (older_ms < 0 or lasts_ms >= older_ms)
            ):
                found.append(
                    {
                        "transactional_id": one.transactional_id,
                        "producer_id": one.identity.producer_id,
                        "transaction_state": state,
                    }
                )
        return found

    return {
        "unknown_state_filters": sorted(wanted - _KNOWN_STATES),
        "transaction_states": await node.log.run_write(listed),
    }
