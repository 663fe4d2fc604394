"""confluent-kafka (librdkafka) as users write it: producers, groups, transactions, administration."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from broker.broker_process import InProcess

pytest.importorskip("confluent_kafka", reason="the extra `kafka` is not installed here")
from confluent_kafka import (
    OFFSET_BEGINNING,
    Consumer,
    ConsumerGroupState,
    IsolationLevel,
    KafkaError,
    KafkaException,
    Producer,
    TopicPartition,
)
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewPartitions,
    NewTopic,
    OffsetSpec,
    ResourceType,
)
from confluent_kafka.aio import AIOConsumer, AIOProducer

from millstream.broker.call import Call
from millstream.broker.dispatch import HANDLERS
from millstream.broker.node import BrokerNode
from millstream.broker.protocol.messages import PRODUCE
from millstream.broker.protocol.messages_transactions import INIT_PRODUCER_ID
from millstream.broker.protocol.wire import Message
from millstream.errors import DiskFullError
from millstream.log.writer import LogWriter

pytestmark = pytest.mark.client("confluent-kafka")

WAIT_S = 60
SILENT = {"log_level": 0}


def admin(broker: InProcess) -> AdminClient:
    """Return a client that is kept: its responses depend on it."""
    if broker.admin is None:
        broker.admin = AdminClient({"bootstrap.servers": broker.address, **SILENT})
    return broker.admin


def make(broker: InProcess, name: str = "t", partitions: int = 1, **config: str) -> None:
    given = {key.replace("_", "."): value for key, value in config.items()}
    made = admin(broker).create_topics([NewTopic(name, partitions, 1, config=given)])
    made[name].result(WAIT_S)


def producer(broker: InProcess, **options: object) -> Producer:
    config = {key.replace("_", "."): value for key, value in options.items()}
    return Producer({"bootstrap.servers": broker.address, "linger.ms": 1, **SILENT, **config})


def send(made: Producer, topic: str, *values: bytes, **options: object) -> list[tuple[int, int]]:
    """Send and return where each went."""
    places: dict[int, tuple[int, int]] = {}
    errors: list[object] = []

    def on_delivery(number: int) -> Callable[[object, object], None]:
        def report(error, message) -> None:
            if error is not None:
                errors.append(error)
            else:
                places[number] = (message.partition(), message.offset())

        return report

    for number, value in enumerate(values):
        made.produce(topic, value, on_delivery=on_delivery(number), **options)
    assert made.flush(WAIT_S) == 0
    assert not errors, errors
    return [places[number] for number in range(len(values))]


@contextmanager
def consumer(broker: InProcess, group: str = "g", **options: object) -> Iterator[Consumer]:
    config = {key.replace("_", "."): value for key, value in options.items()}
    made = Consumer(
        {
            "bootstrap.servers": broker.address,
            "group.id": group,
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
            "session.timeout.ms": 6000,
            "heartbeat.interval.ms": 300,
            **SILENT,
            **config,
        }
    )
    try:
        yield made
    finally:
        made.close()


def until(true: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not true():
        assert time.monotonic() < deadline_s, "it never came to that"


def take(made: Consumer, count: int) -> list:
    """Return so many messages, and see that no more come with them."""
    found: list = []

    def more() -> bool:
        found.extend(made.consume(1000, 0.1))
        return len(found) >= count

    until(more)
    assert [one.error() for one in found if one.error()] == []
    return found


def read(broker: InProcess, topic: str, count: int, *, partition: int = 0, **options) -> list:
    with consumer(broker, **options) as made:
        made.assign([TopicPartition(topic, partition, OFFSET_BEGINNING)])
        found = take(made, count)
        assert len(found) == count
        return found


# -- records ----------------------------------------------------------------------------------


@pytest.mark.parametrize("compression", ["none", "gzip", "snappy", "lz4", "zstd"])
@pytest.mark.parametrize("idempotent", [False, True])
def test_records_come_back_as_they_were_sent(broker, compression, idempotent) -> None:
    make(broker)
    made = producer(broker, compression_type=compression, enable_idempotence=idempotent)
    values = [b"%d" % number * 20 for number in range(500)]
    headers = [("a", b"1"), ("b", None), ("a", b"")]
    places = send(made, "t", *values, key=b"k", headers=headers, timestamp=1_700_000_000_123)
    assert places == [(0, number) for number in range(500)]
    found = read(broker, "t", 500)
    assert [one.value() for one in found] == values
    assert {one.key() for one in found} == {b"k"}
    assert found[0].headers() == headers
    assert {one.timestamp()[1] for one in found} == {1_700_000_000_123}


def test_null_and_empty_are_told_apart(broker) -> None:
    make(broker)
    made = producer(broker)
    for key, value in [(None, None), (b"", b""), (b"k", None)]:
        made.produce("t", value, key=key)
    made.flush(WAIT_S)
    found = [(one.key(), one.value()) for one in read(broker, "t", 3)]
    assert found == [(None, None), (b"", b""), (b"k", None)]


@pytest.mark.parametrize("acks", ["0", "1", "all"])
def test_every_kind_of_acknowledgement(broker, acks) -> None:
    make(broker)
    made = producer(broker, acks=acks)
    for number in range(100):
        made.produce("t", b"%d" % number)
    assert made.flush(WAIT_S) == 0
    assert [one.value() for one in read(broker, "t", 100)] == [b"%d" % n for n in range(100)]


def test_a_large_record_is_kept_and_one_above_the_topics_limit_refused(broker) -> None:
    make(broker, "large")
    make(broker, "small", max_message_bytes="1000")
    made = producer(broker, message_max_bytes=20_000_000)
    big = bytes(range(256)) * 50_000
    assert send(made, "large", big) == [(0, 0)]
    assert read(broker, "large", 1, fetch_message_max_bytes=1000)[0].value() == big
    errors = []
    made.produce("small", b"x" * 5000, on_delivery=lambda error, _: errors.append(error))
    made.flush(WAIT_S)
    assert [error.code() for error in errors] == [KafkaError.MSG_SIZE_TOO_LARGE]
    assert send(made, "small", b"x") == [(0, 0)]


def test_a_compacted_topic_refuses_a_record_without_a_key(broker) -> None:
    make(broker, cleanup_policy="compact")
    errors = []
    made = producer(broker)
    made.produce("t", b"v", on_delivery=lambda error, _: errors.append(error))
    made.flush(WAIT_S)
    assert [error.code() for error in errors] == [KafkaError.INVALID_RECORD]
    assert send(made, "t", b"v", key=b"k") == [(0, 0)]


def test_a_consumer_waits_for_what_comes_later(broker) -> None:
    make(broker)
    made = producer(broker)
    with consumer(broker, fetch_wait_max_ms=30_000) as waiting:
        waiting.assign([TopicPartition("t", 0, 0)])
        assert waiting.consume(1, 0.3) == []
        begun_s = time.monotonic()
        send(made, "t", b"late")
        assert take(waiting, 1)[0].value() == b"late"
        assert time.monotonic() - begun_s < 20


def test_offsets_are_found_by_time_and_at_the_ends(broker) -> None:
    make(broker)
    made = producer(broker)
    for number in range(10):
        send(made, "t", b"x", timestamp=1_700_000_000_000 + 1000 * number)
    with consumer(broker) as made_consumer:
        place = TopicPartition("t", 0)
        assert made_consumer.get_watermark_offsets(place, WAIT_S) == (0, 10)
        for wanted_ms, offset in [(0, 0), (1_700_000_003_001, 4), (1_800_000_000_000, -1)]:
            asked = [TopicPartition("t", 0, wanted_ms)]
            (found,) = made_consumer.offsets_for_times(asked, WAIT_S)
            assert found.offset == offset
    specs = {TopicPartition("t", 0): OffsetSpec.for_timestamp(1_700_000_003_001)}
    result = admin(broker).list_offsets(specs)[TopicPartition("t", 0)].result(WAIT_S)
    assert (result.offset, result.timestamp) == (4, 1_700_000_004_000)


def test_a_reader_below_the_start_is_told(broker) -> None:
    make(broker)
    send(producer(broker), "t", *[b"%d" % number for number in range(10)])
    place = TopicPartition("t", 0, 6)
    deleted = admin(broker).delete_records([place])
    assert deleted[place].result(WAIT_S).low_watermark == 6
    with consumer(broker, auto_offset_reset="error") as made:
        made.assign([TopicPartition("t", 0, 2)])
        errors: list = []
        until(lambda: bool(errors.extend(made.consume(1, 0.2)) or errors))
        assert errors[0].error().code() == KafkaError._AUTO_OFFSET_RESET
    assert [one.value() for one in read(broker, "t", 4)] == [b"6", b"7", b"8", b"9"]


def test_the_clients_for_asyncio(broker) -> None:
    make(broker)
    config = {"bootstrap.servers": broker.address, **SILENT}

    async def story() -> list[bytes]:
        made = AIOProducer(config)
        sent = [await made.produce("t", value=b"%d" % number) for number in range(10)]
        await made.flush()
        assert [(await one).offset() for one in sent] == list(range(10))
        await made.close()
        reading = AIOConsumer({**config, "group.id": "g", "auto.offset.reset": "earliest"})
        await reading.subscribe(["t"])
        found: list[bytes] = []
        while len(found) < 10:
            found += [one.value() for one in await reading.consume(10, timeout=1)]
        await reading.close()
        return found

    assert asyncio.run(asyncio.wait_for(story(), WAIT_S)) == [
        b"%d" % number for number in range(10)
    ]


# -- groups -----------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["range", "roundrobin", "cooperative-sticky"])
def test_a_group_shares_a_topic_and_hands_over(broker, strategy) -> None:
    make(broker, partitions=4)
    made = producer(broker)
    for partition in range(4):
        send(made, "t", *[b"%d-%d" % (partition, n) for n in range(50)], partition=partition)
    options = {"partition_assignment_strategy": strategy}
    seen: set[tuple[int, int]] = set()

    def work(*members: Consumer) -> None:
        for member in members:
            for message in member.consume(50, 0.05):
                assert message.error() is None
                seen.add((message.partition(), message.offset()))

    with consumer(broker, **options) as first:
        first.subscribe(["t"])
        with consumer(broker, **options) as second:
            second.subscribe(["t"])

            def shared() -> bool:
                work(first, second)
                sizes = [len(one.assignment()) for one in (first, second)]
                return sizes == [2, 2] and len(seen) == 200

            until(shared)
            described = admin(broker).describe_consumer_groups(["g"])["g"].result(WAIT_S)
            assert described.state == ConsumerGroupState.STABLE
            assert sorted(
                place.partition
                for member in described.members
                for place in member.assignment.topic_partitions
            ) == [0, 1, 2, 3]

        def whole() -> bool:
            work(first)
            return len(first.assignment()) == 4

        until(whole)
        first.commit(offsets=[TopicPartition("t", 0, 50)], asynchronous=False)
    left = admin(broker).describe_consumer_groups(["g"])["g"].result(WAIT_S)
    assert (left.state, left.members) == (ConsumerGroupState.EMPTY, [])


def test_a_group_goes_on_where_it_committed(broker) -> None:
    make(broker)
    send(producer(broker), "t", *[b"%d" % number for number in range(10)])
    with consumer(broker) as made:
        made.subscribe(["t"])
        take(made, 10)
        made.commit(offsets=[TopicPartition("t", 0, 7, metadata="noted")], asynchronous=False)
        (found,) = made.committed([TopicPartition("t", 0)], WAIT_S)
        assert (found.offset, found.metadata) == (7, "noted")
    with consumer(broker) as made:
        made.subscribe(["t"])
        assert [one.offset() for one in take(made, 3)] == [7, 8, 9]


def test_a_stale_member_cannot_commit(broker) -> None:
    make(broker, partitions=2)
    send(producer(broker), "t", b"1", partition=0)
    with consumer(broker) as made:
        made.subscribe(["t"])
        take(made, 1)
        stale = consumer(broker)
        with stale as outside, pytest.raises(KafkaException) as caught:
            outside.commit(offsets=[TopicPartition("t", 0, 1)], asynchronous=False)
        assert caught.value.args[0].code() == KafkaError.UNKNOWN_MEMBER_ID


def test_a_static_member_takes_its_place_again(broker) -> None:
    make(broker, partitions=2)
    rebalances = []

    def note(_, places) -> None:
        rebalances.append(places)

    with consumer(broker, group_instance_id="a") as first:
        first.subscribe(["t"], on_assign=note)
        second = Consumer(
            {
                "bootstrap.servers": broker.address,
                "group.id": "g",
                "group.instance.id": "b",
                "session.timeout.ms": 30_000,
                "heartbeat.interval.ms": 300,
                **SILENT,
            }
        )
        second.subscribe(["t"])

        def both() -> bool:
            first.poll(0.05)
            second.poll(0.05)
            return len(first.assignment()) == 1 and len(second.assignment()) == 1

        until(both)
        place = second.assignment()
        known = len(rebalances)
        second.close()  # a static member does not leave
        with consumer(broker, group_instance_id="b", session_timeout_ms=30_000) as again:
            again.subscribe(["t"])
            until(lambda: again.poll(0.05) is None and len(again.assignment()) == 1)
            assert again.assignment() == place
            for _ in range(10):
                first.poll(0.05)
            assert len(rebalances) == known


def test_groups_are_listed_and_deleted(broker) -> None:
    make(broker)
    send(producer(broker), "t", b"1", b"2")
    client = admin(broker)
    with consumer(broker, "busy") as made:
        made.subscribe(["t"])
        take(made, 2)
        made.commit(asynchronous=False)
        listed = client.list_consumer_groups().result(WAIT_S).valid
        assert [(one.group_id, one.state) for one in listed] == [
            ("busy", ConsumerGroupState.STABLE)
        ]
        with pytest.raises(KafkaException) as caught:
            client.delete_consumer_groups(["busy"])["busy"].result(WAIT_S)
        assert caught.value.args[0].code() == KafkaError.NON_EMPTY_GROUP
    client.delete_consumer_groups(["busy"])["busy"].result(WAIT_S)
    assert client.list_consumer_groups().result(WAIT_S).valid == []
    with pytest.raises(KafkaException) as caught:
        client.delete_consumer_groups(["busy"])["busy"].result(WAIT_S)
    assert caught.value.args[0].code() == KafkaError.GROUP_ID_NOT_FOUND


# -- transactions -----------------------------------------------------------------------------


def values(broker: InProcess, topic: str, isolation: str) -> list[bytes]:
    """Read to the end as it is now."""
    with consumer(broker, isolation_level=isolation, enable_partition_eof=True) as made:
        made.assign([TopicPartition(topic, 0, OFFSET_BEGINNING)])
        found = []
        deadline_s = time.monotonic() + WAIT_S
        while time.monotonic() < deadline_s:
            message = made.poll(1)
            if message is None:
                continue
            if message.error() is not None:
                assert message.error().code() == KafkaError._PARTITION_EOF
                return found
            found.append(message.value())
        raise AssertionError("the end never came")


def test_a_transaction_is_seen_whole_or_not_at_all(broker) -> None:
    make(broker, "in")
    make(broker, "out")
    made = producer(broker, transactional_id="x")
    made.init_transactions(WAIT_S)
    send(producer(broker), "in", *[b"%d" % n for n in range(10)])
    with consumer(broker) as reading:
        reading.subscribe(["in"])
        take(reading, 10)
        for number, commit in enumerate((True, False, True)):
            made.begin_transaction()
            for _ in range(3):
                made.produce("out", b"%d" % number)
            made.flush(WAIT_S)
            places = [TopicPartition("in", 0, 2 * number + 1)]
            made.send_offsets_to_transaction(places, reading.consumer_group_metadata(), WAIT_S)
            assert b"%d" % number not in values(broker, "out", "read_committed")
            assert b"%d" % number in values(broker, "out", "read_uncommitted")
            (made.commit_transaction if commit else made.abort_transaction)(WAIT_S)
            (at,) = reading.committed([TopicPartition("in", 0)], WAIT_S)
            assert at.offset == (1, 1, 5)[number]
    assert values(broker, "out", "read_committed") == [b"0"] * 3 + [b"2"] * 3
    assert len(values(broker, "out", "read_uncommitted")) == 9


def test_an_open_transaction_holds_committed_readers_back(broker) -> None:
    make(broker)
    made = producer(broker, transactional_id="x")
    made.init_transactions(WAIT_S)
    made.begin_transaction()
    made.produce("t", b"open")
    made.flush(WAIT_S)
    send(producer(broker), "t", b"behind")
    assert values(broker, "t", "read_committed") == []
    place = TopicPartition("t", 0)
    ends = {}
    for level in (IsolationLevel.READ_COMMITTED, IsolationLevel.READ_UNCOMMITTED):
        asked = admin(broker).list_offsets({place: OffsetSpec.latest()}, isolation_level=level)
        ends[level] = asked[place].result(WAIT_S).offset
    assert list(ends.values()) == [0, 2]
    made.commit_transaction(WAIT_S)
    assert values(broker, "t", "read_committed") == [b"open", b"behind"]


def test_a_fenced_producer_is_told_so(broker) -> None:
    make(broker)
    old, new = (producer(broker, transactional_id="x") for _ in range(2))
    old.init_transactions(WAIT_S)
    old.begin_transaction()
    old.produce("t", b"zombie")
    old.flush(WAIT_S)
    new.init_transactions(WAIT_S)
    with pytest.raises(KafkaException) as caught:
        old.commit_transaction(WAIT_S)
    assert caught.value.args[0].code() == KafkaError._FENCED
    assert caught.value.args[0].fatal()
    new.begin_transaction()
    new.produce("t", b"new")
    new.commit_transaction(WAIT_S)
    assert values(broker, "t", "read_committed") == [b"new"]


def test_a_transaction_that_is_too_slow_is_aborted(broker) -> None:
    make(broker)
    slow = producer(broker, transactional_id="x", transaction_timeout_ms=1000)
    slow.init_transactions(WAIT_S)
    slow.begin_transaction()
    slow.produce("t", b"slow")
    slow.flush(WAIT_S)
    send(producer(broker), "t", b"behind")
    until(lambda: values(broker, "t", "read_committed") == [b"behind"])
    with pytest.raises(KafkaException):
        slow.commit_transaction(WAIT_S)


def test_a_producer_whose_next_life_was_not_told_to_it_goes_on(broker, monkeypatch) -> None:
    """A batch gets no response, so it requests its next producer epoch; the response to that is lost."""
    make(broker)
    made = producer(broker, transactional_id="x", message_timeout_ms=500, socket_timeout_ms=500)
    made.init_transactions(WAIT_S)
    produce, init = (HANDLERS[one] for one in (PRODUCE, INIT_PRODUCER_ID))
    asked: list[tuple[int, int]] = []

    async def unanswered(node: BrokerNode, call: Call) -> None:
        await produce(node, call)

    async def lost_once(node: BrokerNode, call: Call) -> Message | None:
        response = await init(node, call)
        asked.append((call.request["producer_id"], call.request["producer_epoch"]))
        if len(asked) == 1:
            raise ConnectionError("the response is lost")
        return response

    with monkeypatch.context() as patch:
        patch.setitem(HANDLERS, INIT_PRODUCER_ID, lost_once)
        patch.setitem(HANDLERS, PRODUCE, unanswered)
        made.begin_transaction()
        made.produce("t", b"lost")
        made.flush(WAIT_S)
        patch.setitem(HANDLERS, PRODUCE, produce)
        with pytest.raises(KafkaException) as caught:
            made.commit_transaction(WAIT_S)
        assert caught.value.args[0].txn_requires_abort()
        made.abort_transaction(WAIT_S)
    assert len(asked) > 1
    assert len(set(asked)) == 1
    made.begin_transaction()
    made.produce("t", b"kept")
    made.commit_transaction(WAIT_S)
    assert values(broker, "t", "read_committed") == [b"kept"]


def test_a_transaction_that_meets_a_full_disk_is_aborted_and_the_next_goes_on(
    broker, monkeypatch
) -> None:
    make(broker)
    made = producer(broker, transactional_id="x")
    made.init_transactions(WAIT_S)

    def full(*_: object) -> None:
        raise DiskFullError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(LogWriter, "append_markers", full)
        made.begin_transaction()
        made.produce("t", b"first")
        made.commit_transaction(WAIT_S)  # it is decided, and its markers wait for room
        made.begin_transaction()
        made.produce("t", b"second")
        assert made.flush(0.5) == 1  # it asks again and again, and gives up
        made.abort_transaction(WAIT_S)
    made.begin_transaction()
    made.produce("t", b"third")
    made.commit_transaction(WAIT_S)
    assert values(broker, "t", "read_committed") == [b"first", b"third"]


# -- administration ---------------------------------------------------------------------------


def test_topics_are_made_enlarged_and_removed(broker) -> None:
    client = admin(broker)
    make(broker, partitions=3)
    topic = client.list_topics(timeout=WAIT_S).topics["t"]
    assert {one.leader for one in topic.partitions.values()} == {1}
    client.create_partitions([NewPartitions("t", 5)])["t"].result(WAIT_S)
    assert len(client.list_topics(timeout=WAIT_S).topics["t"].partitions) == 5
    for wrong, code in [
        (NewTopic("t", 1, 1), KafkaError.TOPIC_ALREADY_EXISTS),
        (NewTopic("a/b", 1, 1), KafkaError.TOPIC_EXCEPTION),
        (NewTopic("u", 1, 3), KafkaError.INVALID_REPLICATION_FACTOR),
        (NewTopic("u", 9000, 1), KafkaError.INVALID_PARTITIONS),
        (NewTopic("u", 1, 1, config={"no.such": "1"}), KafkaError.INVALID_CONFIG),
        (NewTopic("u", 1, 1, config={"retention.ms": "soon"}), KafkaError.INVALID_CONFIG),
    ]:
        with pytest.raises(KafkaException) as caught:
            client.create_topics([wrong])[wrong.topic].result(WAIT_S)
        assert caught.value.args[0].code() == code
    with pytest.raises(KafkaException) as caught:
        client.create_partitions([NewPartitions("t", 2)])["t"].result(WAIT_S)
    assert caught.value.args[0].code() == KafkaError.INVALID_PARTITIONS
    client.delete_topics(["t"])["t"].result(WAIT_S)
    assert client.list_topics(timeout=WAIT_S).topics == {}
    with pytest.raises(KafkaException) as caught:
        client.delete_topics(["t"])["t"].result(WAIT_S)
    assert caught.value.args[0].code() == KafkaError.UNKNOWN_TOPIC_OR_PART


def test_a_topic_that_is_only_to_be_checked_is_not_made(broker) -> None:
    client = admin(broker)
    client.create_topics([NewTopic("t", 1, 1)], validate_only=True)["t"].result(WAIT_S)
    assert client.list_topics(timeout=WAIT_S).topics == {}


def configs(broker: InProcess, kind: ResourceType, name: str) -> dict[str, ConfigEntry]:
    resource = ConfigResource(kind, name)
    return admin(broker).describe_configs([resource])[resource].result(WAIT_S)


def test_settings_are_described_and_altered(broker) -> None:
    make(broker, cleanup_policy="compact", compression_type="producer")
    found = configs(broker, ResourceType.TOPIC, "t")
    assert (found["cleanup.policy"].value, found["cleanup.policy"].is_default) == ("compact", False)
    assert (found["retention.ms"].value, found["retention.ms"].is_default) == ("-1", True)
    assert found["min.insync.replicas"].is_read_only
    client = admin(broker)

    def alter(*entries: ConfigEntry) -> None:
        resource = ConfigResource(ResourceType.TOPIC, "t", incremental_configs=list(entries))
        client.incremental_alter_configs([resource])[resource].result(WAIT_S)

    alter(
        ConfigEntry("retention.ms", "5000", incremental_operation=AlterConfigOpType.SET),
        ConfigEntry("cleanup.policy", "delete", incremental_operation=AlterConfigOpType.APPEND),
    )
    found = configs(broker, ResourceType.TOPIC, "t")
    assert found["retention.ms"].value == "5000"
    assert found["cleanup.policy"].value == "compact,delete"
    alter(
        ConfigEntry("retention.ms", "", incremental_operation=AlterConfigOpType.DELETE),
        ConfigEntry("cleanup.policy", "compact", incremental_operation=AlterConfigOpType.SUBTRACT),
    )
    found = configs(broker, ResourceType.TOPIC, "t")
    assert (found["retention.ms"].value, found["cleanup.policy"].value) == ("-1", "delete")
    with pytest.raises(KafkaException) as caught:
        alter(ConfigEntry("retention.ms", "soon", incremental_operation=AlterConfigOpType.SET))
    assert caught.value.args[0].code() == KafkaError.INVALID_CONFIG
    assert configs(broker, ResourceType.BROKER, "1")["num.partitions"].value == "1"


def test_the_cluster_is_described(broker) -> None:
    cluster = admin(broker).describe_cluster().result(WAIT_S)
    assert [(one.id, one.host, one.port) for one in cluster.nodes] == [
        (1, "127.0.0.1", broker.port)
    ]
    assert len(cluster.cluster_id) == 22


def test_an_unknown_topic_is_not_made_unless_that_is_wanted(broker, folder, tmp_path) -> None:
    errors = []
    made = producer(broker, message_timeout_ms=3000, topic_metadata_refresh_interval_ms=500)
    made.produce("nope", b"x", on_delivery=lambda error, _: errors.append(error))
    made.flush(WAIT_S)
    assert errors
    assert errors[0] is not None
    assert admin(broker).list_topics(timeout=WAIT_S).topics == {}
    with InProcess(tmp_path / "other", auto_create=True, default_partitions=3) as other:
        send(producer(other), "made", b"x")
        assert len(admin(other).list_topics(timeout=WAIT_S).topics["made"].partitions) == 3
