"""kafka-python: another implementation of the same protocol, in versions of its own choosing."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest
from broker.broker_process import InProcess
from kafka import KafkaConsumer, KafkaProducer, TopicPartition
from kafka.admin import KafkaAdminClient, NewTopic
from kafka.errors import TopicAlreadyExistsError
from kafka.structs import OffsetAndMetadata

WAIT_MS = 60_000

pytestmark = [
    pytest.mark.client("kafka-python"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:kafka"),
]


@pytest.fixture
def admin(broker: InProcess) -> Iterator[KafkaAdminClient]:
    with closing(KafkaAdminClient(bootstrap_servers=broker.address)) as client:
        yield client


@pytest.fixture
def topic(admin: KafkaAdminClient) -> str:
    admin.create_topics([NewTopic("t", 2, 1)])
    return "t"


def consumer(broker: InProcess, *topics: str, **options: object) -> KafkaConsumer:
    """Return a consumer that knows the partitions of its topics before it joins a group.

    kafka-python 3.0.12 compares what it assigned with what it knew of the topics since it subscribed. Where
    it joins before it was told of them, it joins anew at once; and where a poll ends while that goes on, the
    next one finds nothing to do, and the member stays in the state "rebalancing" for good.
    """
    made = KafkaConsumer(
        bootstrap_servers=broker.address,
        auto_offset_reset="earliest",
        enable_auto_commit=False,
        **options,
    )
    if topics:
        made.subscribe(list(topics))
        assert set(topics) <= made.topics()  # asks the broker, and notes the partitions
    return made


def take(made: KafkaConsumer, count: int) -> list:
    found: list = []
    deadline_s = time.monotonic() + WAIT_MS / 1000
    while len(found) < count:
        assert time.monotonic() < deadline_s, found
        for records in made.poll(200).values():
            found += records
    return found


@pytest.mark.parametrize("compression", [None, "gzip", "snappy", "lz4", "zstd"])
@pytest.mark.parametrize("idempotent", [False, True])
def test_records_come_back_as_they_were_sent(broker, topic, compression, idempotent) -> None:
    with closing(
        KafkaProducer(
            bootstrap_servers=broker.address,
            compression_type=compression,
            enable_idempotence=idempotent,
            acks="all",
        )
    ) as made:
        sent = [
            made.send(topic, b"%d" % n * 20, key=b"k", headers=[("a", b"1")], partition=1)
            for n in range(200)
        ]
        places = [one.get(WAIT_MS / 1000) for one in sent]
    assert [(one.partition, one.offset) for one in places] == [(1, n) for n in range(200)]
    with closing(consumer(broker)) as made:
        made.assign([TopicPartition(topic, 1)])
        found = take(made, 200)
    assert [one.value for one in found] == [b"%d" % n * 20 for n in range(200)]
    assert list(found[0].headers) == [("a", b"1")]


def send(broker: InProcess, topic: str, count: int) -> None:
    with closing(KafkaProducer(bootstrap_servers=broker.address)) as made:
        for number in range(count):
            made.send(
                topic, b"%d" % number, partition=number % 2, timestamp_ms=1_700_000_000_000 + number
            )
        made.flush(WAIT_MS / 1000)


def test_a_group_commits_and_goes_on(broker, topic) -> None:
    send(broker, topic, 20)
    with closing(consumer(broker, topic, group_id="g")) as made:
        assert len(take(made, 20)) == 20
        made.commit()
        made.commit({TopicPartition(topic, 0): OffsetAndMetadata(3, "noted", -1)})
        assert made.committed(TopicPartition(topic, 0)) == 3
        assert made.committed(TopicPartition(topic, 0), metadata=True).metadata == "noted"
    with closing(consumer(broker, topic, group_id="g")) as made:
        assert {one.partition for one in take(made, 1)} == {0}


def test_two_members_share_a_topic(broker, topic) -> None:
    with (
        closing(consumer(broker, topic, group_id="g", heartbeat_interval_ms=300)) as first,
        closing(consumer(broker, topic, group_id="g", heartbeat_interval_ms=300)) as second,
    ):
        done = threading.Event()

        def work(member: KafkaConsumer) -> None:
            while not done.is_set():
                member.poll(100)

        with ThreadPoolExecutor() as pool:
            working = [pool.submit(work, member) for member in (first, second)]
            deadline_s = time.monotonic() + WAIT_MS / 1000
            while [len(one.assignment()) for one in (first, second)] != [1, 1]:
                if time.monotonic() > deadline_s:
                    break
                time.sleep(0.02)
            done.set()
        assert [one.result() for one in working] == [None, None]
        assert [len(one.assignment()) for one in (first, second)] == [1, 1]
        assert first.assignment() | second.assignment() == {
            TopicPartition(topic, 0),
            TopicPartition(topic, 1),
        }


def test_offsets_by_time_and_ends(broker, topic) -> None:
    with closing(KafkaProducer(bootstrap_servers=broker.address)) as made:
        for number in range(10):
            made.send(topic, b"x", timestamp_ms=1_700_000_000_000 + number, partition=0)
            made.flush(WAIT_MS / 1000)
    place = TopicPartition(topic, 0)
    with closing(consumer(broker)) as made:
        assert made.beginning_offsets([place]) == {place: 0}
        assert made.end_offsets([place]) == {place: 10}
        found = made.offsets_for_times({place: 1_700_000_000_004})[place]
        assert (found.offset, found.timestamp) == (4, 1_700_000_000_004)
        assert made.offsets_for_times({place: 1_800_000_000_000})[place] is None


def test_a_transaction_is_seen_whole_or_not_at_all(broker, topic) -> None:
    with closing(
        KafkaProducer(bootstrap_servers=broker.address, transactional_id="x", acks="all")
    ) as made:
        made.init_transactions()
        for number, commit in enumerate((True, False, True)):
            made.begin_transaction()
            for _ in range(3):
                made.send(topic, b"%d" % number, partition=0)
            (made.commit_transaction if commit else made.abort_transaction)()
    with closing(consumer(broker, isolation_level="read_committed")) as made:
        made.assign([TopicPartition(topic, 0)])
        assert [one.value for one in take(made, 6)] == [b"0"] * 3 + [b"2"] * 3


def test_administration(broker, admin, topic) -> None:
    assert admin.list_topics() == [topic]
    with pytest.raises(TopicAlreadyExistsError):
        admin.create_topics([NewTopic(topic, 1, 1)])
    send(broker, topic, 5)
    with closing(consumer(broker, topic, group_id="g")) as made:
        take(made, 5)
        made.commit()
    offsets = admin.list_group_offsets(["g"])["g"] if hasattr(admin, "list_group_offsets") else {}
    assert sum(one.offset for one in offsets.values()) == 5
    admin.delete_topics([topic])
    assert admin.list_topics() == []
