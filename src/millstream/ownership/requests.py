"""The requests that the owner handles.

The same functions handle the requests of clients, over the owner's socket, and those of the owner's own
process, called directly. ``retry`` says that the request may have been sent, and even handled, before: by
this owner, or by one that died before its response arrived. So each request is idempotent:

====================  ==========================================================================
a request             that is retried
====================  ==========================================================================
append                batches have a producer and a sequence: a batch in the log is not written again
append_at             the same: a batch in the log is found before the end is compared, unless its topic was made
                      anew since, which is said
register              returns the next producer epoch; nobody uses the one before
begin                 continues the transaction that is open
end                   returns the decision that control.db has
create_topic          carries a topic id: a topic that has this id was created by the first attempt
delete_topic          finds no topic, and succeeds
the others            have the same effect twice as once
====================  ==========================================================================
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import google_crc32c

from millstream.errors import (
    ConfigError,
    CorruptBatchError,
    MillstreamError,
    ProducerFencedError,
    TopicExistsError,
    TransactionAbortedError,
    UnknownTopicError,
)
from millstream.log.batch import (
    COMPRESSION_MASK,
    CONTROL,
    PREFIX_BYTES,
    TAIL,
    TRANSACTIONAL,
    EncodedBatch,
    ProducerStamp,
)
from millstream.log.excision import excise_values
from millstream.log.group_commit import Durability, PendingAppend
from millstream.log.groups import OffsetAndMetadata, Offsets, offset_and_metadata
from millstream.log.producer_identity import PRODUCER_EPOCH_MAX, ProducerIdentity
from millstream.log.remote_transactions import remote_transaction
from millstream.log.topics import check_topic_id
from millstream.log.writer import LogWriter
from millstream.ownership.frames import error_as_plain, error_from_plain
from millstream.record import TopicPartition

_CRC = struct.Struct(">I")
_COMPRESSIONS = range(5)


@dataclass(frozen=True, slots=True)
class OwnerRequest:
    """One request; ``retry`` says that it may have been sent before.

    ``in_process`` says that it comes from the owner's own process.
    """

    name: str
    args: Mapping[str, Any]
    payload: bytes = b""
    retry: bool = False
    in_process: bool = False


def handle_request(writer: LogWriter, request: OwnerRequest) -> Any:
    """Handle a request; return the result in values that JSON has.

    Raises:
        MillstreamError: the request failed.
        ConfigError: there is no such request.
    """
    handler = _HANDLERS.get(request.name)
    if handler is None:
        raise ConfigError(
            f"the owner does not know the request {request.name!r}; run the same version of Millstream in "
            "both processes"
        )
    return handler(writer, request)


# -- appending ------------------------------------------------------------------------------------


def append_request(
    batches: Iterable[tuple[TopicPartition, EncodedBatch]],
    durability: Durability,
    expected_ends: Sequence[int | None] = (),
    topic_ids: Sequence[str | None] = (),
) -> OwnerRequest:
    """Return the request to append batches, each of which has its producer and sequence.

    With any of ``expected_ends`` or ``topic_ids`` it has another name: an older owner, which would not compare
    them, refuses it.
    """
    descriptions, tails = [], []
    identity = None
    for name, batch in batches:
        descriptions.append([name.topic, name.partition, len(batch.tail), batch.unkeyed])
        tails.append(batch.tail)
        if batch.attributes & TRANSACTIONAL:
            identity = [batch.producer.producer_id, batch.producer.producer_epoch]
    args: dict[str, Any] = {
        "batches": descriptions,
        "durability": durability,
        "identity": identity,
    }
    if all(one is None for one in (*expected_ends, *topic_ids)):
        return OwnerRequest("append", args, b"".join(tails))
    args |= {"expected_ends": list(expected_ends), "topic_ids": list(topic_ids)}
    return OwnerRequest("append_at", args, b"".join(tails))


def append_results(results: Sequence[Any]) -> list[int | MillstreamError]:
    """Return for each batch its offset, or the error."""
    return [one if isinstance(one, int) else error_from_plain(one) for one in results]


def _append(writer: LogWriter, request: OwnerRequest) -> list[int | dict[str, Any]]:
    batches = decode_batches(request)
    ends, topic_ids = (
        request.args.get(name) or [None] * len(batches) for name in ("expected_ends", "topic_ids")
    )
    appends = [
        PendingAppend(name, batch, expected_end=end, topic_id=topic_id)
        for (name, batch), end, topic_id in zip(batches, ends, topic_ids, strict=True)
    ]
    writer.commit(appends, request.args["durability"])
    return [error_as_plain(one.error) if one.error else one.offset for one in appends]


def decode_batches(request: OwnerRequest) -> list[tuple[TopicPartition, EncodedBatch]]:
    """Return the batches of an append.

    Raises:
        CorruptBatchError: the bytes differ from those sent; nothing was appended.
    """
    batches, at = [], 0
    for topic, partition, size, unkeyed in request.args["batches"]:
        tail = request.payload[at : at + size]
        at += size
        batches.append((TopicPartition(topic, partition), _decode_batch(tail, unkeyed=unkeyed)))
    return batches


def _decode_batch(tail: bytes, *, unkeyed: bool) -> EncodedBatch:
    """Return the batch whose ``tail`` this is: all but the 17 bytes that the owner writes in front."""
    fault = "it is truncated"
    if len(tail) >= _CRC.size + TAIL.size:
        attributes, last_delta, _, max_ms, *producer, records = TAIL.unpack_from(tail, _CRC.size)
        fault = "its bytes do not match its CRC-32C"
        if google_crc32c.value(tail[_CRC.size :]) == _CRC.unpack_from(tail)[0]:
            fault = "its header is invalid"
            known = attributes & COMPRESSION_MASK in _COMPRESSIONS and not attributes & CONTROL
            if known and 0 <= records <= last_delta + 1 and producer[0] >= 0 and producer[2] >= 0:
                stamp = ProducerStamp(*producer)
                return EncodedBatch(tail, last_delta + 1, max_ms, attributes, stamp, unkeyed)
    raise CorruptBatchError(
        f"a record batch of {PREFIX_BYTES + len(tail)} bytes arrived at the owner damaged: "
        f"{fault}; nothing was appended",
        path="the owner's socket",
        position=0,
    )


# -- producers and transactions -------------------------------------------------------------------


def _register(writer: LogWriter, request: OwnerRequest) -> list[int]:
    identity = writer.transactions.register(
        request.args["transactional_id"],
        timeout_ms=request.args["timeout_ms"],
        in_process=request.in_process,
    )
    return list(identity)


def _begin(writer: LogWriter, request: OwnerRequest) -> None:
    writer.transactions.begin(
        ProducerIdentity(*request.args["identity"]),
        again=request.retry or not request.in_process,
        in_process=request.in_process,
    )


def _end(writer: LogWriter, request: OwnerRequest) -> list[int]:
    """End a transaction, unless it has ended already; return the identity for the next one."""
    identity = ProducerIdentity(*request.args["identity"])
    commit = request.args["commit"]
    fence = request.args["fence"]
    try:
        following = writer.transactions.end(
            identity,
            commit=commit,
            offsets={group: _offsets(rows) for group, rows in request.args["offsets"]},
            fence=None if fence is None else (fence[0], fence[1]),
        )
    except (ProducerFencedError, TransactionAbortedError):
        if not _was_ended(writer, request, identity):
            raise
        if identity.producer_epoch + 1 >= PRODUCER_EPOCH_MAX - 1:
            return _register(writer, request)
        return [identity.producer_id, identity.producer_epoch + 1]
    return list(following)


def _was_ended(writer: LogWriter, request: OwnerRequest, identity: ProducerIdentity) -> bool:
    """Return whether a transaction has ended as requested, so that only the response was lost.

    The end of a transaction raises the producer epoch by one. A producer of the same name that registered
    after a commit has a higher producer epoch than that. One that registered while the transaction was open
    aborted it and raised that by two: else this would look like the abort requested here, and two
    producers would share an identity.
    """
    commit = request.args["commit"]
    last = remote_transaction(writer.control, identity.producer_id)
    if not request.retry or last != (identity.producer_epoch, "committed" if commit else "aborted"):
        return False
    following = identity._replace(producer_epoch=identity.producer_epoch + 1)
    return commit or writer.transactions.identity_of(request.args["transactional_id"]) == following


def offsets_as_plain(offsets: Offsets) -> list[list[object]]:
    """Return offsets of groups in values that JSON has."""
    return [
        [name.topic, name.partition, *offset_and_metadata(given)] for name, given in offsets.items()
    ]


def _offsets(rows: Sequence[Sequence[Any]]) -> Offsets:
    return {
        TopicPartition(topic, partition): OffsetAndMetadata(*rest)
        for topic, partition, *rest in rows
    }


# -- topics, and the rest -------------------------------------------------------------------------


def _create_topic(writer: LogWriter, request: OwnerRequest) -> dict[str, Any]:
    name, topic_id = request.args["name"], request.args["topic_id"]
    try:
        topic = writer.create_topic(
            name,
            partitions=request.args["partitions"],
            settings=request.args["settings"],
            topic_id=topic_id,
        )
    except TopicExistsError:
        existing = writer.topics().get(name)
        if existing is None or (existing.topic_id != topic_id and not request.args["exist_ok"]):
            raise
        topic = existing
    return asdict(topic)


def _alter_topic(writer: LogWriter, request: OwnerRequest) -> dict[str, Any]:
    return asdict(
        writer.alter_topic(
            request.args["name"],
            partitions=request.args["partitions"],
            settings=request.args["settings"],
        )
    )


def _delete_topic(writer: LogWriter, request: OwnerRequest) -> None:
    try:
        writer.delete_topic(request.args["name"])
    except UnknownTopicError:
        if not request.retry:
            raise


def _delete_records(writer: LogWriter, request: OwnerRequest) -> int:
    name = TopicPartition(request.args["topic"], request.args["partition"])
    return writer.delete_records(name, request.args["before_offset"])


def excise_request(
    name: TopicPartition, values: Mapping[int, bytes], topic_id: str | None = None
) -> OwnerRequest:
    """Return the request to put other values in the place of those at these offsets of the topic with this id."""
    places = [[offset, len(value)] for offset, value in values.items()]
    args = {"topic": name.topic, "partition": name.partition, "values": places}
    args |= {"topic_id": topic_id}
    return OwnerRequest("excise", args, b"".join(values.values()))


def _excise(writer: LogWriter, request: OwnerRequest) -> dict[str, Any]:
    values, at = {}, 0
    for offset, size in request.args["values"]:
        values[offset] = request.payload[at : at + size]
        at += size
    name = TopicPartition(request.args["topic"], request.args["partition"])
    partition = writer.partition(name)
    found = writer.topic_ids([name.topic])[name.topic]  # after the partition: see LogWriter.commit
    check_topic_id(name.topic, request.args.get("topic_id"), found)
    return asdict(excise_values(writer, partition, values))


def _run_maintenance(writer: LogWriter, _: OwnerRequest) -> dict[str, Any]:
    return asdict(writer.run_maintenance())


_HANDLERS: Mapping[str, Callable[[LogWriter, OwnerRequest], Any]] = {
    "append": _append,
    "append_at": _append,
    "register": _register,
    "begin": _begin,
    "end": _end,
    "create_topic": _create_topic,
    "alter_topic": _alter_topic,
    "delete_topic": _delete_topic,
    "delete_records": _delete_records,
    "excise": _excise,
    "run_maintenance": _run_maintenance,
}
