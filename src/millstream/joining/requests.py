"""What can be asked of the owner: each question with what the owner does for it.

The same functions answer a guest, through the gate, and the owner's own process, directly. ``again``
says that the question may have been asked, and even been answered, before: of this owner or of one
that died before it could tell. So each does the same when it comes a second time:

====================  ==========================================================================
a question            that comes again
====================  ==========================================================================
append                batches have a producer and a sequence: what is there is not written again
register              gives the next life; nobody knows the one before
begin                 goes on with the transaction that is open
end                   is answered by what control.db says about it
create_topic          brings its topic id: the topic is its own if it has that
delete_topic          finds no topic, as was wanted
the others            do the same once more
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
from millstream.joining.frames import error_as_plain, error_from_plain
from millstream.log.batch import (
    COMPRESSION_MASK,
    CONTROL,
    PREFIX_BYTES,
    TAIL,
    TRANSACTIONAL,
    EncodedBatch,
    ProducerStamp,
)
from millstream.log.group_commit import Durability, PendingAppend
from millstream.log.groups import NotedOffset, Offsets, noted
from millstream.log.named_producers import PRODUCER_EPOCH_MAX, ProducerIdentity
from millstream.log.remote import remote_transaction
from millstream.log.writer import LogWriter
from millstream.record import TopicPartition

_CRC = struct.Struct(">I")
_COMPRESSIONS = range(5)


@dataclass(frozen=True, slots=True)
class Asked:
    """One question: ``name`` says which, ``again`` whether it was perhaps asked before.

    ``in_process`` says that it comes from the owner's own process.
    """

    name: str
    args: Mapping[str, Any]
    payload: bytes = b""
    again: bool = False
    in_process: bool = False


def answer(writer: LogWriter, asked: Asked) -> Any:
    """Return what the owner answers, in values that JSON has.

    Raises:
        MillstreamError: as the owner says.
        ConfigError: there is no such question.
    """
    found = _QUESTIONS.get(asked.name)
    if found is None:
        raise ConfigError(f"the owner cannot be asked to {asked.name!r}; use the same version")
    return found(writer, asked)


# -- appending ------------------------------------------------------------------------------------


def append_question(
    batches: Iterable[tuple[TopicPartition, EncodedBatch]], durability: Durability
) -> Asked:
    """Return the question to append batches, each of which has its producer and sequence."""
    places, tails = [], []
    identity = None
    for name, batch in batches:
        places.append([name.topic, name.partition, len(batch.tail), batch.unkeyed])
        tails.append(batch.tail)
        if batch.attributes & TRANSACTIONAL:
            identity = [batch.producer.producer_id, batch.producer.producer_epoch]
    args = {"batches": places, "durability": durability, "identity": identity}
    return Asked("append", args, b"".join(tails))


def append_outcomes(answered: Sequence[Any]) -> list[int | MillstreamError]:
    """Return for each batch its offset, or why it has none."""
    return [one if isinstance(one, int) else error_from_plain(one) for one in answered]


def _append(writer: LogWriter, asked: Asked) -> list[int | dict[str, Any]]:
    outcomes: list[int | dict[str, Any]] = []
    appends: list[tuple[int, PendingAppend]] = []
    for name, batch in arrived(asked):
        outcomes.append(-1)
        try:
            appends.append((len(outcomes) - 1, writer.pending(*name, batch)))
        except MillstreamError as error:
            outcomes[-1] = error_as_plain(error)
    writer.commit([append for _, append in appends], asked.args["durability"])
    for place, append in appends:
        outcomes[place] = error_as_plain(append.error) if append.error else append.offset
    return outcomes


def arrived(asked: Asked) -> list[tuple[TopicPartition, EncodedBatch]]:
    """Return the batches of an append.

    Raises:
        CorruptBatchError: their bytes are not what was sent; nothing was appended.
    """
    found, at = [], 0
    for topic, partition, size, unkeyed in asked.args["batches"]:
        tail = asked.payload[at : at + size]
        at += size
        found.append((TopicPartition(topic, partition), _batch(tail, unkeyed=unkeyed)))
    return found


def _batch(tail: bytes, *, unkeyed: bool) -> EncodedBatch:
    """Return the batch of which ``tail`` is all but the 17 bytes that the owner puts before it."""
    fault = "it is cut short"
    if len(tail) >= _CRC.size + TAIL.size:
        attributes, last_delta, _, max_ms, *producer, records = TAIL.unpack_from(tail, _CRC.size)
        fault = "its bytes do not match its CRC-32C"
        if google_crc32c.value(tail[_CRC.size :]) == _CRC.unpack_from(tail)[0]:
            fault = "its header is impossible"
            known = attributes & COMPRESSION_MASK in _COMPRESSIONS and not attributes & CONTROL
            if known and 0 <= records <= last_delta + 1 and producer[0] >= 0 and producer[2] >= 0:
                stamp = ProducerStamp(*producer)
                return EncodedBatch(tail, last_delta + 1, max_ms, attributes, stamp, unkeyed)
    raise CorruptBatchError(
        f"a record batch of {PREFIX_BYTES + len(tail)} bytes did not come to the owner as it was "
        f"sent: {fault}; nothing was appended",
        path="the owner's gate",
        position=0,
    )


# -- producers and transactions -------------------------------------------------------------------


def _register(writer: LogWriter, asked: Asked) -> list[int]:
    identity = writer.transactions.register(
        asked.args["transactional_id"],
        timeout_ms=asked.args["timeout_ms"],
        in_process=asked.in_process,
    )
    return list(identity)


def _begin(writer: LogWriter, asked: Asked) -> None:
    writer.transactions.begin(
        ProducerIdentity(*asked.args["identity"]),
        again=asked.again or not asked.in_process,
        in_process=asked.in_process,
    )


def _end(writer: LogWriter, asked: Asked) -> list[int]:
    """End a transaction, or say how it ended; return the identity for the next one."""
    identity = ProducerIdentity(*asked.args["identity"])
    commit = asked.args["commit"]
    fence = asked.args["fence"]
    try:
        following = writer.transactions.end(
            identity,
            commit=commit,
            offsets={group: _offsets(rows) for group, rows in asked.args["offsets"]},
            fence=None if fence is None else (fence[0], fence[1]),
        )
    except (ProducerFencedError, TransactionAbortedError):
        if not _was_ended(writer, asked, identity):
            raise
        if identity.producer_epoch + 1 >= PRODUCER_EPOCH_MAX - 1:
            return _register(writer, asked)
        return [identity.producer_id, identity.producer_epoch + 1]
    return list(following)


def _was_ended(writer: LogWriter, asked: Asked, identity: ProducerIdentity) -> bool:
    """Return whether a transaction has ended as asked for, so that only the answer was lost.

    Whoever ends a transaction raises the producer epoch by one. A producer of the same name that came
    after a commit has a later life than the one behind it. One that took an open transaction back
    raised it by two: else that would look like the abort asked for, and two producers be one.
    """
    commit = asked.args["commit"]
    last = remote_transaction(writer.control, identity.producer_id)
    if not asked.again or last != (identity.producer_epoch, "committed" if commit else "aborted"):
        return False
    behind = identity._replace(producer_epoch=identity.producer_epoch + 1)
    return commit or writer.transactions.identity_of(asked.args["transactional_id"]) == behind


def offsets_as_plain(offsets: Offsets) -> list[list[object]]:
    """Return offsets of groups in values that JSON has."""
    return [[name.topic, name.partition, *noted(given)] for name, given in offsets.items()]


def _offsets(rows: Sequence[Sequence[Any]]) -> Offsets:
    return {
        TopicPartition(topic, partition): NotedOffset(*rest) for topic, partition, *rest in rows
    }


# -- topics, and the rest -------------------------------------------------------------------------


def _create_topic(writer: LogWriter, asked: Asked) -> dict[str, Any]:
    name, topic_id = asked.args["name"], asked.args["topic_id"]
    try:
        made = writer.create_topic(
            name,
            partitions=asked.args["partitions"],
            settings=asked.args["settings"],
            topic_id=topic_id,
        )
    except TopicExistsError:
        there = writer.topics().get(name)
        if there is None or (there.topic_id != topic_id and not asked.args["exist_ok"]):
            raise
        made = there
    return asdict(made)


def _alter_topic(writer: LogWriter, asked: Asked) -> dict[str, Any]:
    return asdict(
        writer.alter_topic(
            asked.args["name"],
            partitions=asked.args["partitions"],
            settings=asked.args["settings"],
        )
    )


def _delete_topic(writer: LogWriter, asked: Asked) -> None:
    try:
        writer.delete_topic(asked.args["name"])
    except UnknownTopicError:
        if not asked.again:
            raise


def _delete_records(writer: LogWriter, asked: Asked) -> int:
    name = TopicPartition(asked.args["topic"], asked.args["partition"])
    return writer.delete_records(name, asked.args["before_offset"])


def _keep_house(writer: LogWriter, _: Asked) -> dict[str, Any]:
    return asdict(writer.keep_house())


_QUESTIONS: Mapping[str, Callable[[LogWriter, Asked], Any]] = {
    "append": _append,
    "register": _register,
    "begin": _begin,
    "end": _end,
    "create_topic": _create_topic,
    "alter_topic": _alter_topic,
    "delete_topic": _delete_topic,
    "delete_records": _delete_records,
    "keep_house": _keep_house,
}
