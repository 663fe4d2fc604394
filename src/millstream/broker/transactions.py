"""The requests of producers that number their batches, and of those that commit transactions.

The coordinator is the log's (``log.transactions``). What this adds is the protocol before KIP-890: a
producer keeps its producer epoch from one transaction to the next, says which partitions and groups
take part, and asks again when it was not answered, of this broker or of the next one on the folder.

=========================================  ==========================  ===========================
who asks                                   InitProducerId              others
=========================================  ==========================  ===========================
the producer that has the name             its next life begins        done
one that was replaced, or was too slow     ``PRODUCER_FENCED``         ``PRODUCER_FENCED``
one of another id than the name has        ``PRODUCER_FENCED``         ``INVALID_PRODUCER_ID_MAPPING``
=========================================  ==========================  ===========================

The protocol before KIP-890 cannot tell an end that was held up on its way from the end of the next
transaction. But a client sends again on another connection only after it has given up the one before: so
what comes on a producer's earlier connection once a later one was used is ``NOT_COORDINATOR``.

Where a version does not know ``PRODUCER_FENCED``, it is told ``INVALID_PRODUCER_EPOCH``. A transaction
that was too slow was aborted, and its producer may begin its next life. While the disk is full, all of
this is ``COORDINATOR_NOT_AVAILABLE``, so that producers ask again; and one that gives up meanwhile may
abort a transaction that it could not begin.

Source: KIP-98, KIP-360, KIP-447; Kafka ``TransactionCoordinator``.
"""

from __future__ import annotations

from collections.abc import Callable

from millstream.broker.codes import Code, Refused, coordinator_code_of
from millstream.broker.committed import acceptable, outcomes
from millstream.broker.coordinator import check_name
from millstream.broker.listing import partition_code
from millstream.broker.members import Identity
from millstream.broker.node import Call, Node
from millstream.broker.wire import Message
from millstream.errors import (
    MillstreamError,
    ProducerFencedError,
    TransactionAbortedError,
)
from millstream.log.named_producers import TIMEOUT_MS_MAX, NamedProducer, ProducerIdentity
from millstream.log.remote import remote_transaction
from millstream.record import TopicPartition

_FENCED_FROM = {22: 4, 24: 2, 25: 2, 26: 2}  # by API key: the version that knows PRODUCER_FENCED
_STATES = {"open": "Ongoing", "committed": "CompleteCommit", "aborted": "CompleteAbort"}
_EMPTY = "Empty"
ID_CHARACTERS_MAX = 1000  # of a transactional id
_SPEAKERS_MAX = 10_000  # producers whose last connection is known
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


async def init_producer_id(node: Node, call: Call) -> Message:
    """Answer an InitProducerId request."""
    request = call.request
    name, timeout_ms = request["transactional_id"], request["transaction_timeout_ms"]
    if name is None:
        return await _answered(
            node, call, lambda: _identity(node.writer.transactions.register(in_process=False))
        )
    if not name or not 0 < timeout_ms <= TIMEOUT_MS_MAX:
        code = Code.INVALID_TRANSACTION_TIMEOUT if name else Code.INVALID_REQUEST
        return {"error_code": code}
    if len(name) > ID_CHARACTERS_MAX or not _has_room(node, name):
        return {"error_code": Code.POLICY_VIOLATION}
    resumes = None
    if request["producer_id"] >= 0:
        resumes = ProducerIdentity(request["producer_id"], request["producer_epoch"])

    def register() -> Message:
        return _identity(
            node.writer.transactions.register(
                name, timeout_ms=timeout_ms, in_process=False, resumes=resumes
            )
        )

    return await _answered(node, call, register)


def _has_room(node: Node, name: str) -> bool:
    """Return whether a name is known, or one more may be."""
    transactions = node.writer.transactions
    known = transactions.identity_of(name) is not None
    return known or transactions.named_count() < node.settings.transactional_ids_max


def _identity(identity: ProducerIdentity) -> Message:
    return {"producer_id": identity.producer_id, "producer_epoch": identity.producer_epoch}


async def _answered(node: Node, call: Call, work: Callable[[], Message]) -> Message:
    """Return what ``work`` does in a thread, or the code of its error."""
    try:
        return await node.change(work)
    except (MillstreamError, Refused) as error:
        return {"error_code": _code(call, error)}


async def _done(node: Node, call: Call, work: Callable[[], None]) -> Code:
    """Do ``work`` in a thread; return what the producer is told."""

    def do() -> Message:
        work()
        return {"error_code": Code.NONE}

    return Code((await _answered(node, call, do))["error_code"])


def _code(call: Call, error: MillstreamError | Refused) -> Code:
    """Return what a producer is told of an error."""
    replaced = isinstance(error, ProducerFencedError) or (
        isinstance(error, TransactionAbortedError) and error.timed_out
    )
    if not replaced:
        return coordinator_code_of(error)
    knows = call.version >= _FENCED_FROM.get(call.api.key, call.version + 1)
    return Code.PRODUCER_FENCED if knows else Code.INVALID_PRODUCER_EPOCH


def _known(node: Node, name: str, producer_id: int, producer_epoch: int) -> ProducerIdentity:
    """Return the identity of a request, if the name is this producer's.

    Raises:
        Refused: it is not.
    """
    known = node.writer.transactions.identity_of(name)
    if known is None or known.producer_id != producer_id:
        raise Refused(
            Code.INVALID_PRODUCER_ID_MAPPING,
            f"the transactional id {name!r} is not that of producer {producer_id}",
        )
    return ProducerIdentity(producer_id, producer_epoch)


def _is_held_up(node: Node, call: Call, producer_id: int) -> bool:
    """Return whether a request comes on a connection that its producer has given up."""
    last = node.spoke.pop(producer_id, 0)
    node.spoke[producer_id] = max(last, call.connection)  # as the newest of all
    if len(node.spoke) > _SPEAKERS_MAX:  # whoever asks may name any number of producers
        del node.spoke[next(iter(node.spoke))]
    return call.connection < last


async def add_partitions_to_txn(node: Node, call: Call) -> Message:
    """Answer an AddPartitionsToTxn request: the transaction is open from here on."""
    request = call.request
    topics = request["v3_and_below_topics"]
    places = [
        TopicPartition(topic["name"], number) for topic in topics for number in topic["partitions"]
    ]
    codes = dict.fromkeys(places, Code.NONE)
    for place in places:
        try:
            node.writer.partition(place)
        except MillstreamError as error:
            codes[place] = partition_code(error)
    if _is_held_up(node, call, request["v3_and_below_producer_id"]):
        codes = dict.fromkeys(places, Code.NOT_COORDINATOR)
    elif any(codes.values()):  # all or none
        codes = {place: code or Code.OPERATION_NOT_ATTEMPTED for place, code in codes.items()}
    else:
        begun = await _done(node, call, lambda: _begin(node, request, "v3_and_below_"))
        codes = dict.fromkeys(places, begun)
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


def _begin(node: Node, request: Message, prefix: str = "") -> None:
    """Open a transaction, or go on with the one that is open."""
    name, *numbers = (
        request[f"{prefix}{key}"] for key in ("transactional_id", "producer_id", "producer_epoch")
    )
    node.writer.transactions.begin(_known(node, name, *numbers), again=True)


async def add_offsets_to_txn(node: Node, call: Call) -> Message:
    """Answer an AddOffsetsToTxn request: offsets of a group will be part of the transaction."""
    try:
        check_name(call.request["group_id"])
    except Refused as error:
        return {"error_code": error.code}
    if _is_held_up(node, call, call.request["producer_id"]):
        return {"error_code": Code.NOT_COORDINATOR}
    return {"error_code": await _done(node, call, lambda: _begin(node, call.request))}


async def txn_offset_commit(node: Node, call: Call) -> Message:
    """Answer a TxnOffsetCommit request: the offsets count once the transaction is committed."""
    request = call.request
    topics, group = request["topics"], request["group_id"]
    try:
        check_name(group)
        if request["member_id"] or request["generation_id"] >= 0:
            who = Identity(request["member_id"], request["group_instance_id"])
            node.groups.check_commit(group, who, request["generation_id"])
    except Refused as error:
        return {"topics": outcomes(topics, {}, error.code)}
    offsets, codes = acceptable(node, topics)

    def add() -> None:
        identity = _known(
            node, request["transactional_id"], request["producer_id"], request["producer_epoch"]
        )
        node.writer.transactions.add_offsets(identity, group, offsets)

    added = await _done(node, call, add)
    codes |= dict.fromkeys(offsets, added)
    return {"topics": outcomes(topics, codes)}


async def end_txn(node: Node, call: Call) -> Message:
    """Answer an EndTxn request: commit or abort."""
    if _is_held_up(node, call, call.request["producer_id"]):
        return {"error_code": Code.NOT_COORDINATOR}
    return {"error_code": await _done(node, call, lambda: _end(node, call.request))}


def _end(node: Node, request: Message) -> None:
    identity = _known(
        node, request["transactional_id"], request["producer_id"], request["producer_epoch"]
    )
    commit = request["committed"]
    try:
        # The protocol cannot tell the producer of another producer epoch.
        node.writer.transactions.end(identity, commit=commit, raise_epoch=False)
    except TransactionAbortedError as error:
        last = remote_transaction(node.writer.control, identity.producer_id)
        wanted = (identity.producer_epoch, "committed" if commit else "aborted")
        if error.timed_out or last != wanted:  # else it asks again, for it was not told
            raise


# -- looking at transactions ------------------------------------------------------------------


async def describe_transactions(node: Node, call: Call) -> Message:
    """Answer a DescribeTransactions request."""
    asked = dict.fromkeys(call.request["transactional_ids"])

    def describe() -> list[Message]:
        named = {one.transactional_id: one for one in node.writer.transactions.named()}
        places = node.writer.open_partitions()
        found = []
        for name in asked:
            one = named.get(name)
            if one is None:
                code = Code.TRANSACTIONAL_ID_NOT_FOUND
                found.append({"error_code": code, "transactional_id": name})
            else:
                of_producer = places.get(one.identity.producer_id, [])
                found.append(_described(node, one, [place.name for place in of_producer]))
        return found

    return {"transaction_states": await node.change(describe)}


def _described(node: Node, one: NamedProducer, places: list[TopicPartition]) -> Message:
    topics: dict[str, list[int]] = {}
    for place in places:
        topics.setdefault(place.topic, []).append(place.partition)
    return {
        "transactional_id": one.transactional_id,
        "transaction_state": _state(node, one),
        "transaction_timeout_ms": one.timeout_ms,
        "transaction_start_time_ms": -1 if one.open_since_ms is None else one.open_since_ms,
        "producer_id": one.identity.producer_id,
        "producer_epoch": one.identity.producer_epoch,
        "topics": [{"topic": name, "partitions": numbers} for name, numbers in topics.items()],
    }


def _state(node: Node, one: NamedProducer) -> str:
    if one.open_since_ms is not None:
        return _STATES["open"]
    last = remote_transaction(node.writer.control, one.identity.producer_id)
    if last is None or last.producer_epoch != one.identity.producer_epoch:
        return _EMPTY
    return _STATES[last.state]


async def list_transactions(node: Node, call: Call) -> Message:
    """Answer a ListTransactions request."""
    request = call.request
    wanted, ids = set(request["state_filters"]), set(request["producer_id_filters"])
    older_ms = request["duration_filter"]
    now_ms = node.clock_ms()

    def listed() -> list[Message]:
        found = []
        for one in node.writer.transactions.named():
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
        "transaction_states": await node.change(listed),
    }
