"""The clients of a soak, each a process: they send, read and transform, and keep a journal.

    python -m soak.clients ROLE NAME LIFE ADDRESS FOLDER

A client runs until a file ``stop`` is in the folder. Its heartbeat file has its current step, so that a
hanging client is found, and where. When it cannot continue by the rules of its protocol (its producer is
fenced, a response never arrived) it ends, and the process that started it starts it again.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from confluent_kafka import (
    OFFSET_BEGINNING,
    Consumer,
    KafkaError,
    KafkaException,
    Message,
    Producer,
    TopicPartition,
)
from soak.history import Isolation, Journal, Place, Read, Sent

TOPICS = {"plain": 3, "input": 2, "ledger": 1, "output": 3}
TRANSFORM, MEMBERS = "transform", "members"  # the groups
CALL_S = 25.0  # what a call may take
SESSION_MS = 6000
TRANSACTION_MS = 20_000
_PADDINGS = (0, 10, 100, 1000)
_COMPRESSIONS = ("none", "lz4", "zstd", "gzip", "snappy")
_FENCED = (
    KafkaError._FENCED,
    KafkaError.PRODUCER_FENCED,
    KafkaError.INVALID_PRODUCER_EPOCH,
)
_NOT_COMMITTED = (
    KafkaError.ILLEGAL_GENERATION,
    KafkaError.UNKNOWN_MEMBER_ID,
    KafkaError.REBALANCE_IN_PROGRESS,
    KafkaError.FENCED_INSTANCE_ID,
)


class EndedError(Exception):
    """This life of the client is at its end, and why."""


class Client:
    """What all roles share: the journal, the heartbeat, the random choices, the client's settings."""

    def __init__(self, name: str, life: int, address: str, folder: Path) -> None:
        self.name, self.process = name, f"{name}.{life}"
        self.chance = random.Random(f"{name} {life} {folder.name}")
        self.journal = Journal(folder / "journals" / f"{self.process}.jsonl")
        self._stop = folder / "stop"
        self._beat = os.open(folder / "beats" / name, os.O_WRONLY | os.O_CREAT)
        self._address = address
        self._count = 0

    def beat(self, step: str) -> None:
        """Write the current step to the heartbeat."""
        os.pwrite(self._beat, f"{step:40}".encode(), 0)

    def goes_on(self) -> bool:
        self.beat("turn")
        return not self._stop.exists()

    def settings(self, **more: object) -> dict[str, object]:
        return {
            "bootstrap.servers": self._address,
            "reconnect.backoff.ms": 20,
            "reconnect.backoff.max.ms": 200,
            "socket.timeout.ms": 10_000,
            "log_level": 0,
            **{name.replace("_", "."): value for name, value in more.items()},
        }

    def sent(self, topic: str, source: str | None = None) -> Sent:
        """Return the next record, and where it goes."""
        self._count += 1
        place = Place(topic, self.chance.randrange(TOPICS[topic]))
        return Sent(place, f"{self.process}:{self._count}", None, source)

    def consumer(self, group: str, isolation: Isolation = "committed", **more: object) -> Consumer:
        return Consumer(
            {
                **self.settings(
                    group_id=group,
                    isolation_level=f"read_{isolation}",
                    enable_auto_commit=False,
                    auto_offset_reset="earliest",
                    session_timeout_ms=SESSION_MS,
                    heartbeat_interval_ms=1000,
                    fetch_wait_max_ms=200,
                ),
                **{name.replace("_", "."): value for name, value in more.items()},
            }
        )

    def producer(self, **more: object) -> Producer:
        return Producer(
            self.settings(
                linger_ms=self.chance.choice((0, 2, 20)),
                compression_type=self.chance.choice(_COMPRESSIONS),
                **more,
            )
        )

    def put(self, producer: Producer, sent: Sent, on_delivery: Callable[..., None]) -> None:
        """Pass a record to the producer."""
        value = f"{sent.value}|{'x' * self.chance.choice(_PADDINGS)}".encode()
        while True:
            try:
                producer.produce(
                    sent.place.topic, value, partition=sent.place.partition, on_delivery=on_delivery
                )
            except BufferError:
                self.beat("room in the producer's queue")
                producer.poll(0.1)
            except KafkaException as error:
                raise EndedError(f"produce: {error.args[0].name()}") from None
            else:
                return

    def note_committed(self, consumer: Consumer, group: str, places: Iterable[Place]) -> None:
        """Fetch the committed offsets, and write them to the journal."""
        self.beat("committed offsets")
        began = time.monotonic_ns()
        try:
            found = consumer.committed([TopicPartition(*place) for place in places], CALL_S)
        except KafkaException as error:
            if error.args[0].code() in (*_NOT_COMMITTED, KafkaError._TIMED_OUT):
                return
            raise EndedError(f"committed: {error.args[0].name()}") from None
        offsets = {Place(one.topic, one.partition): max(one.offset, -1) for one in found}
        if not any(one.error for one in found):
            self.journal.note("committed", began, group=group, offsets=offsets)


def reads(messages: Iterable[Message]) -> list[Read]:
    """Return what was read; errors that pass by themselves are left out.

    Raises:
        EndedError: one does not.
    """
    found = []
    for one in messages:
        error = one.error()
        if error is None:
            value = one.value().partition(b"|")[0].decode()
            found.append(Read(Place(one.topic(), one.partition()), one.offset(), value))
        elif error.fatal() or error.code() == KafkaError._AUTO_OFFSET_RESET:
            raise EndedError(f"consume: {error.name()}")
    return found


# -- the roles --------------------------------------------------------------------------------


def send(client: Client) -> None:
    """Send by an idempotent producer, many at a time."""
    producer = client.producer(enable_idempotence=True, message_timeout_ms=120_000)
    failed: list[KafkaError] = []

    def told_of(number: int, sent: Sent) -> Callable[[KafkaError | None, Message], None]:
        def on_delivery(error: KafkaError | None, message: Message) -> None:
            if error is None:
                sent.offset = message.offset() if message.offset() >= 0 else None
                client.journal.end(number, "ok", sent=[sent])
            else:
                client.journal.end(number, "info")
                failed.append(error)

        return on_delivery

    while client.goes_on():
        for _ in range(client.chance.choice((1, 1, 5, 20))):
            sent = client.sent("plain")
            client.put(producer, sent, told_of(client.journal.begin("send", sent=[sent]), sent))
        producer.poll(0)
        time.sleep(client.chance.choice((0.01, 0.05, 0.1, 0.2)))
        if failed:
            raise EndedError(f"delivery: {failed[0].name()}")
    client.beat("flush")
    producer.flush(2 * CALL_S)


class Transactions:
    """A transactional producer; each transaction in the journal.

    The library forgets all brokers when none of them responds, and starts over with those it was given first.
    Some versions then wait for ever for a forgotten one, when offsets are added to a transaction. So every
    other client does without; the others show what the check of heartbeats is for.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        forgets = int(client.name.rpartition("-")[2]) % 2 == 0
        self._producer = client.producer(
            metadata_recovery_strategy="rebootstrap" if forgets else "none",
            transactional_id=client.name,
            transaction_timeout_ms=TRANSACTION_MS,
            message_timeout_ms=TRANSACTION_MS,
        )
        self._step("init_transactions", self._producer.init_transactions, CALL_S)

    def run(
        self,
        records: list[Sent],
        *,
        abort: bool = False,
        consumer: Consumer | None = None,
        **what: object,
    ) -> bool:
        """Do one transaction; return whether it was committed.

        Raises:
            EndedError: nobody knows, or this producer was replaced.
        """
        journal, producer = self._client.journal, self._producer
        number = journal.begin("transaction", sent=records, **what)
        try:
            self._step("begin_transaction", producer.begin_transaction)
            for sent in records:
                self._client.put(producer, sent, _noting(sent))
            if self._client.chance.random() < 0.3:
                self._step("flush", producer.flush, CALL_S)
            if consumer is not None:
                offsets = [TopicPartition(*at, offset) for at, offset in what["offsets"].items()]
                group = consumer.consumer_group_metadata()
                call = producer.send_offsets_to_transaction
                self._step("send_offsets_to_transaction", call, offsets, group, CALL_S)
            if not abort:
                journal.commit_began(number)
                self._step("commit_transaction", producer.commit_transaction, CALL_S)
                journal.end(number, "ok", sent=records)
                return True
        except _MustAbortError:
            pass
        self._step("abort_transaction", producer.abort_transaction, CALL_S)
        journal.end(number, "fail", sent=records)
        return False

    def _step(self, name: str, call: Callable[..., object], *given: object) -> None:
        """Do a step; retry it where the client says that it may succeed."""
        end = time.monotonic() + 2 * CALL_S
        while True:
            self._client.beat(name)
            try:
                call(*given)
            except KafkaException as error:
                reason = error.args[0]
                if reason.txn_requires_abort() and name != "abort_transaction":
                    raise _MustAbortError(reason.name()) from None
                if reason.fatal() or reason.code() in _FENCED or not reason.retriable():
                    raise EndedError(f"{name}: {reason.name()}") from None
                if time.monotonic() > end:
                    raise EndedError(f"{name}: {reason.name()}, again and again") from None
            else:
                return


class _MustAbortError(Exception):
    """The client's library says that the transaction can only be taken back."""


def _noting(sent: Sent) -> Callable[[KafkaError | None, Message], None]:
    def on_delivery(error: KafkaError | None, message: Message) -> None:
        if error is None and message.offset() >= 0:
            sent.offset = message.offset()

    return on_delivery


def transact(client: Client) -> None:
    """Send to several partitions of two topics, all or nothing; abort one of five."""
    transactions = Transactions(client)
    while client.goes_on():
        topics = [client.chance.choice(("input", "input", "ledger")) for _ in range(4)]
        records = [client.sent(topic) for topic in topics[: client.chance.randint(1, 4)]]
        transactions.run(records, abort=client.chance.random() < 0.2)
        time.sleep(client.chance.choice((0.0, 0.05, 0.2, 0.4)))


def transform(client: Client) -> None:
    """Send one record for each that is read, in one transaction with the committed offsets."""
    transactions = Transactions(client)
    consumer = client.consumer(TRANSFORM)

    def assigned(consumer: Consumer, partitions: list[TopicPartition]) -> None:
        _note_assigned(client, TRANSFORM, consumer, partitions)

    consumer.subscribe(["input"], on_assign=assigned)
    while client.goes_on():
        found = reads(consumer.consume(client.chance.choice((1, 5, 50)), 0.3))
        if not found:
            continue
        offsets: dict[Place, int] = {}
        for read in found:
            offsets[read.place] = read.offset + 1
        records = [client.sent("output", read.value) for read in found]
        what = {"read": found, "offsets": offsets, "group": TRANSFORM}
        abort = client.chance.random() < 0.1
        if not transactions.run(records, abort=abort, consumer=consumer, **what):
            _go_back(client, consumer)
    client.beat("close")
    consumer.close()


def _note_assigned(
    client: Client, group: str, consumer: Consumer, partitions: list[TopicPartition]
) -> None:
    places = [Place(one.topic, one.partition) for one in partitions]
    number = client.journal.begin("assign", offsets=dict.fromkeys(places, -1))
    client.journal.end(number, "ok")
    if places:
        client.note_committed(consumer, group, places)


def _go_back(client: Client, consumer: Consumer) -> None:
    """Read again from what is committed."""
    client.beat("going back")
    try:
        assigned = consumer.assignment()
        if not assigned:
            return
        for one in consumer.committed(assigned, CALL_S):
            if one.error:
                raise EndedError(f"going back: {one.error.name()}")
            offset = one.offset if one.offset >= 0 else OFFSET_BEGINNING
            consumer.seek(TopicPartition(one.topic, one.partition, offset))
    except KafkaException as error:
        raise EndedError(f"going back: {error.args[0].name()}") from None
    places = {Place(one.topic, one.partition): -1 for one in assigned}
    client.journal.end(client.journal.begin("assign", offsets=places), "ok")


def be_member(client: Client) -> None:
    """Read in a group, and commit by hand how far."""
    consumer = client.consumer(MEMBERS)

    def assigned(consumer: Consumer, partitions: list[TopicPartition]) -> None:
        _note_assigned(client, MEMBERS, consumer, partitions)
        positions.clear()

    def gone(*_: object) -> None:
        # Nor when others have them: in the next generation this member may commit again.
        positions.clear()

    positions: dict[Place, int] = {}
    consumer.subscribe(["plain", "output"], on_assign=assigned, on_revoke=gone, on_lost=gone)
    while client.goes_on():
        began = time.monotonic_ns()
        found = reads(consumer.consume(100, client.chance.choice((0.05, 0.3))))
        if found:
            client.journal.note("poll", began, read=found)
            positions.update((read.place, read.offset + 1) for read in found)
        if positions and client.chance.random() < 0.3:
            _commit(client, consumer, dict(positions))
    client.beat("close")
    consumer.close()


def _commit(client: Client, consumer: Consumer, offsets: dict[Place, int]) -> None:
    client.beat("commit")
    number = client.journal.begin("commit", group=MEMBERS, offsets=offsets)
    given = [TopicPartition(*place, offset) for place, offset in offsets.items()]
    try:
        done = consumer.commit(offsets=given, asynchronous=False)
    except KafkaException:
        # Rejected or not: the library retries by itself, and an earlier attempt may have succeeded.
        client.journal.end(number, "info")
    else:
        client.journal.end(number, "info" if any(one.error for one in done) else "ok")


def read_committed(client: Client) -> None:
    """Read every partition, from here and there, what is committed."""
    _read(client, "committed")


def read_uncommitted(client: Client) -> None:
    """Read every partition, from here and there, whatever there is."""
    _read(client, "uncommitted")


def _read(client: Client, isolation: Isolation) -> None:
    consumer = client.consumer(f"of {client.name}", isolation)
    again_s = 0.0
    while client.goes_on():
        if time.monotonic() > again_s:
            starts = _starts(client, consumer)
            number = client.journal.begin("assign", offsets=starts)
            consumer.assign([TopicPartition(*place, at) for place, at in starts.items()])
            client.journal.end(number, "ok")
            again_s = time.monotonic() + client.chance.uniform(5, 40)
        began = time.monotonic_ns()
        found = reads(consumer.consume(200, 0.2))
        if found:
            client.journal.note("poll", began, read=found, isolation=isolation)
    client.beat("close")
    consumer.close()


def _starts(client: Client, consumer: Consumer) -> dict[Place, int]:
    """Return where to begin: somewhere in what the last minutes brought, seldom further back."""
    starts = {}
    for topic, count in TOPICS.items():
        for number in range(count):
            client.beat("watermarks")
            try:
                _, end = consumer.get_watermark_offsets(TopicPartition(topic, number), CALL_S)
            except KafkaException:
                end = 0
            back = client.chance.choice((100, 1000, 1000, 5000))
            starts[Place(topic, number)] = client.chance.randint(max(0, end - back), end)
    return starts


def finish(client: Client) -> None:
    """End what others left open, read everything from the beginning, and what groups committed."""
    names = sorted({path.name for path in Path(sys.argv[5], "beats").iterdir()})
    for name in names:
        if name.startswith(("transact", "transform")):
            client.beat(f"ending {name}")
            Producer(client.settings(transactional_id=name)).init_transactions(2 * CALL_S)
    for isolation in ("committed", "uncommitted"):
        _read_all(client, isolation)
    for group, topics in ((TRANSFORM, ["input"]), (MEMBERS, ["plain", "output"])):
        consumer = client.consumer(group)
        places = [Place(topic, number) for topic in topics for number in range(TOPICS[topic])]
        client.note_committed(consumer, group, places)
        consumer.close()


def _read_all(client: Client, isolation: Isolation) -> None:
    consumer = client.consumer(f"all {isolation}", isolation, enable_partition_eof=True)
    starts = {Place(topic, one): 0 for topic, count in TOPICS.items() for one in range(count)}
    client.journal.end(client.journal.begin("assign", offsets=starts), "ok")
    consumer.assign([TopicPartition(*place, 0) for place in starts])
    left = set(starts)
    end_s = time.monotonic() + 300
    while left:
        client.beat(f"reading all {isolation}")
        began = time.monotonic_ns()
        messages = consumer.consume(1000, 0.5)
        found = reads(messages)
        if found:
            client.journal.note("poll", began, read=found, isolation=isolation)
        for one in messages:
            if one.error() and one.error().code() == KafkaError._PARTITION_EOF:
                left.discard(Place(one.topic(), one.partition()))
        if time.monotonic() > end_s:
            raise EndedError(f"the end of {sorted(left)} was not reached")
    consumer.close()


ROLES: dict[str, Callable[[Client], None]] = {
    "send": send,
    "transact": transact,
    "transform": transform,
    "member": be_member,
    "committed": read_committed,
    "uncommitted": read_uncommitted,
    "finish": finish,
}


def main() -> None:
    role, name, life, address, folder = sys.argv[1:]
    client = Client(name, int(life), address, Path(folder))
    try:
        ROLES[role](client)
    except EndedError as error:
        print(f"ended {name} {error}", flush=True)
        sys.stdout.flush()
        os._exit(3)  # not waiting for what a library may still wait for


if __name__ == "__main__":
    main()
