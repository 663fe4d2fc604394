"""A transaction whose records several processes send, with a broker of ours; `apache_kafka` runs the same on Kafka."""

from __future__ import annotations

import itertools
import pickle
import random
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
from broker.shared_topics import TopicJob, random_frames, written
from example_counts import some, steps_to_die_at
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("confluent_kafka", reason="the extra `kafka` is not installed here")

from millstream.client import connect
from millstream.client.address import kafka_address
from millstream.client.kafka.shared import sender as sender_module
from millstream.client.kafka.shared.brokers import BrokerPlace, Brokers
from millstream.client.kafka.shared.connection import BrokerConnection
from millstream.client.kafka.shared.producer import SharedProducer, why_not_shared
from millstream.client.kafka.shared.sender import PartitionSender, SharedTransaction
from millstream.errors import (
    BrokerUnavailableError,
    FencedError,
    FencePassedError,
    OutOfOrderSequenceError,
    ProducerFencedError,
    RecordTooLargeError,
    StagedRowsLostError,
    TransactionAbortedError,
    UnknownTopicError,
)
from millstream.log.encoding import SimpleRecord, encode_records
from millstream.spark import output_tasks
from millstream.testing.disk import SimulatedCrash
from millstream.views.commit.committer import collect_results
from millstream.views.sink import SinkBatch

_numbers = itertools.count()


@pytest.fixture
def address(broker):
    return f"kafka://{broker.address}?timeout=30+seconds"


@pytest.fixture(autouse=True)
def all_in_tasks(monkeypatch):
    monkeypatch.setattr(output_tasks, "DRIVER_BYTES_MAX", -1)


@pytest.fixture
def topic(address):
    name = f"shared-{next(_numbers)}"
    with connect(address) as log:
        log.create_topic(name, partitions=2)
    return name


@pytest.fixture
def producer(address, topic):
    with connect(address) as log:
        made = log.shared_producer(f"id-{topic}", "1 minute")
        yield made
        made.close()


def batches(count, start=0):
    return [
        encode_records(
            [SimpleRecord(1_700_000_000_000 + i, b"k%d" % i, b"v") for i in range(3 * n, 3 * n + 3)]
        )
        for n in range(start, start + count)
    ]


def begun(producer, topic):
    transaction = producer.begin()
    producer.add_partitions(topic, [0, 1])
    return pickle.loads(pickle.dumps(transaction))


def keys(address, topic, partition=0):
    return [key for (key,) in written(address, topic, ("key",))[partition]]


def expected(count):
    return [b"k%d" % i for i in range(3 * count)]


# -- one transaction ------------------------------------------------------------------------------


def test_records_and_fence_are_there_together_or_not_at_all(address, topic, producer):
    for batch_id, commits in enumerate((True, False, True)):
        transaction = begun(producer, topic)
        with Brokers(transaction.address) as brokers:
            sender = PartitionSender(brokers, transaction, topic, 1)
            for batch in batches(3):
                sender.send(batch)
            sent = sender.finish()
        assert sent.records == 9
        before = keys(address, topic, 1)
        if commits:
            producer.commit("w", batch_id, [sent])
            assert keys(address, topic, 1) == before + expected(3)
        else:
            producer.abort()
            assert keys(address, topic, 1) == before
    with connect(address) as log:
        assert log.fence("w") == 2
        fences = log.read("__millstream_fences", 0, columns=("key", "value")).to_pylist()
        assert [row["value"] for row in fences if row["key"] == b"w"] == [b"0", b"2"]


def test_a_fence_that_is_passed_ends_the_transaction(address, topic, producer):
    begun(producer, topic)
    producer.commit("w", 7, [])
    transaction = begun(producer, topic)
    with Brokers(transaction.address) as brokers:
        sender = PartitionSender(brokers, transaction, topic, 0)
        sender.send(batches(1)[0])
        sent = sender.finish()
    with pytest.raises(FencePassedError):
        producer.commit("w", 7, [sent])
    assert keys(address, topic) == []
    begun(producer, topic)
    producer.commit("w", 8, [])


def test_an_attempt_that_is_repeated_sends_nothing_twice(address, topic, producer):
    transaction = begun(producer, topic)
    for done in (0, 1, 4, 7, 20, 20):  # the last five are known again, others are left out
        with Brokers(transaction.address) as brokers:
            sender = PartitionSender(brokers, transaction, topic, 0)
            for batch in batches(done):
                sender.send(batch)
            sender._advance(0)
    with Brokers(transaction.address) as brokers:
        sender = PartitionSender(brokers, transaction, topic, 0)
        for batch in batches(20):
            sender.send(batch)
        sent = sender.finish()
    assert sent.records == 60
    producer.commit("w", 0, [sent])
    assert keys(address, topic) == expected(20)


@pytest.mark.parametrize("seed", range(some(10)))
def test_attempts_at_the_same_time_send_each_batch_once(address, topic, producer, seed):
    generator = random.Random(seed)
    transaction = begun(producer, topic)
    count = generator.randrange(1, 40)
    attempts, left = [], {}
    for number in range(3):
        brokers = Brokers(transaction.address)
        attempts.append(PartitionSender(brokers, transaction, topic, 0))
        left[number] = batches(count)
    while left:
        number = generator.choice(list(left))
        for _ in range(generator.randrange(1, 9)):
            if left[number]:
                attempts[number].send(left[number].pop(0))
        if not left[number]:
            assert attempts[number].finish().records == 3 * count
            del left[number]
    producer.commit("w", 0, [attempts[0].finish()])
    for attempt in attempts:
        attempt._brokers.close()
    assert keys(address, topic) == expected(count)


def test_attempts_that_differ_are_refused(topic, producer):
    transaction = begun(producer, topic)
    with Brokers(transaction.address) as brokers:
        sender = PartitionSender(brokers, transaction, topic, 0)
        for batch in batches(8):
            sender.send(batch)
        sender.finish()
        other = PartitionSender(brokers, transaction, topic, 0)
        records = [SimpleRecord(1, b"k", b"v")]
        other.send(encode_records(records * 23))
        other.send(encode_records(records * 2))
        with pytest.raises(OutOfOrderSequenceError, match="up to sequence 23"):
            other.finish()
    producer.abort()


def test_what_is_lost_with_a_leader_is_not_left_out(topic, producer, monkeypatch):
    """A leader says that it has ten batches of another attempt; the next one has nothing, and takes any sequence."""
    transaction = begun(producer, topic)
    real, calls = PartitionSender._last_sequence, itertools.count()

    def last_sequence(sender):
        if next(calls):
            return real(sender)
        sender._first_offset = 0
        return 29

    monkeypatch.setattr(PartitionSender, "_last_sequence", last_sequence)
    with Brokers(transaction.address) as brokers:
        sender = PartitionSender(brokers, transaction, topic, 0)
        with pytest.raises(OutOfOrderSequenceError, match="lost records"):
            for batch in batches(20):
                sender.send(batch)
    producer.abort()


def late(transaction, topic, first=0):
    """Send from the batch ``first`` on, as an attempt does that had sent those before."""
    with Brokers(transaction.address) as brokers:
        sender = PartitionSender(brokers, transaction, topic, 0)
        sender._next_sequence, sender._written = 3 * first, -1
        for batch in batches(3, first):
            sender.send(batch)
        return sender.finish()


def refused(transaction, topic):
    """Send late what was sent before, which a broker may know again, and what was not, which it refuses."""
    with suppress(TransactionAbortedError, FencedError, OutOfOrderSequenceError):
        late(transaction, topic)
    for first in (1, 3):
        with pytest.raises((TransactionAbortedError, FencedError, OutOfOrderSequenceError)):
            late(transaction, topic, first)


def test_what_comes_after_the_end_of_a_transaction_is_refused(address, topic, producer):
    committed = begun(producer, topic)
    producer.commit("w", 0, [late(committed, topic)])
    refused(committed, topic)
    aborted = begun(producer, topic)
    late(aborted, topic)
    refused(committed, topic)
    producer.abort()
    refused(aborted, topic)
    current = begun(producer, topic)
    refused(committed, topic)
    refused(aborted, topic)
    sent = late(current, topic)
    refused(aborted, topic)
    producer.commit("w", 1, [sent])
    refused(current, topic)
    assert keys(address, topic) == expected(3) * 2


def test_a_producer_that_was_replaced_is_refused_and_does_not_replace_the_newer_one(
    address, topic, producer
):
    old = begun(producer, topic)
    late(old, topic)
    with connect(address) as log:
        newer = log.shared_producer(f"id-{topic}", "1 minute")
        with pytest.raises(ProducerFencedError):
            late(old, topic, 3)
        with pytest.raises(ProducerFencedError):
            producer.commit("w", 0, [])
        with pytest.raises(ProducerFencedError):
            producer.begin()
        newer.commit("w", 0, [late(begun(newer, topic), topic)])
        newer.close()
    assert keys(address, topic) == expected(3)


def test_the_two_kinds_of_producers_fence_one_another(address, topic):
    with connect(address) as log:
        library = log.producer(transactional_id=f"id-{topic}", transaction_timeout="1 minute")
        shared = log.shared_producer(f"id-{topic}", "1 minute")
        with pytest.raises(ProducerFencedError), library.transaction():
            library.send(topic, b"v")
        shared.begin()
        again = log.producer(transactional_id=f"id-{topic}", transaction_timeout="1 minute")
        with pytest.raises(ProducerFencedError):
            shared.add_partitions(topic, [0])
        with again.transaction():
            again.send(topic, b"v", partition=0)
        shared.close()
    assert len(keys(address, topic)) == 1


def test_a_transaction_that_is_open_for_too_long_is_aborted(address, topic):
    with connect(address) as log:
        producer = log.shared_producer(f"id-{topic}", "1 ms")
        late(begun(producer, topic), topic)
        with pytest.raises(TransactionAbortedError, match=r"longer than its timeout, 0.001 s"):
            producer.commit("w", 0, [])
        producer.close()
    assert keys(address, topic) == []


def test_what_a_topic_does_not_take_is_refused(topic, producer, address, monkeypatch):
    monkeypatch.setattr("millstream.client.kafka.shared.brokers._UNKNOWN_TOPIC_S", 0.1)
    with connect(address) as log:
        log.alter_topic(topic, settings={"max.message.bytes": "2000"})
    transaction = begun(producer, topic)
    with pytest.raises(RecordTooLargeError), Brokers(transaction.address) as brokers:
        sender = PartitionSender(brokers, transaction, topic, 0)
        sender.send(encode_records([SimpleRecord(1, b"k", bytes(3000))]))
        sender.finish()
    with pytest.raises(UnknownTopicError, match="for the topic 'nowhere' failed"):
        producer.add_partitions("nowhere", [0])
    with pytest.raises(UnknownTopicError):  # the response names it behind those that were not tried
        producer.add_partitions(topic, [0, 1, 2])
    producer.abort()


def test_partitions_that_a_broker_has_not_heard_of_yet_are_added_when_it_has(
    address, topic, producer
):
    producer.begin()
    with connect(address) as log, ThreadPoolExecutor(1) as thread:
        added = thread.submit(producer.add_partitions, topic, [0, 1, 2])
        time.sleep(0.2)
        log.alter_topic(topic, partitions=3)
        added.result(60)
    producer.abort()


def test_a_transaction_without_partitions_can_be_aborted(topic, producer):
    producer.begin()
    producer.abort()
    begun(producer, topic)
    producer.commit("w", 0, [])


# -- connections ----------------------------------------------------------------------------------


class Faults:
    """Tears connections, before a request, after it or before a response, and has responses say what passes."""

    def __init__(self, generator, monkeypatch):
        self.generator, self.counted, self.on = generator, 0, True
        send, read = BrokerConnection._send, BrokerConnection._read
        receive = BrokerConnection.receive

        def torn_send(connection, *given):
            if self._strikes():
                connection._socket.close()
            send(connection, *given)

        def torn_read(connection, size):
            if self._strikes():
                connection._socket.close()
            return read(connection, size)

        def refused(connection):
            response = receive(connection)
            if "responses" in response and self._strikes():
                # NOT_LEADER_OR_FOLLOWER, REQUEST_TIMED_OUT, NOT_ENOUGH_REPLICAS_AFTER_APPEND: it is written
                code = self.generator.choice([6, 7, 20])
                response["responses"][0]["partition_responses"][0]["error_code"] = code
            return response

        monkeypatch.setattr(BrokerConnection, "_send", torn_send)
        monkeypatch.setattr(BrokerConnection, "_read", torn_read)
        monkeypatch.setattr(BrokerConnection, "receive", refused)

    def _strikes(self):
        strikes = self.on and self.generator.random() < 0.08
        self.counted += strikes
        return strikes


@pytest.mark.parametrize("seed", range(some(10) // 2))
def test_connections_that_are_torn_lose_and_double_nothing(
    address, topic, producer, seed, monkeypatch
):
    faults = Faults(random.Random(seed), monkeypatch)
    for number in range(3):
        transaction = begun(producer, topic)
        with Brokers(transaction.address) as brokers:
            sender = PartitionSender(brokers, transaction, topic, 0)
            for batch in batches(20):
                sender.send(batch)
            sent = sender.finish()
        if number == 1:
            producer.abort()
        else:
            producer.commit("w", number, [sent])
    faults.on = False
    assert keys(address, topic) == expected(20) * 2
    assert faults.counted


def test_a_leader_that_is_not_there_any_more_is_looked_up_again(topic, producer):
    transaction = begun(producer, topic)
    with Brokers(transaction.address) as brokers:
        sender = PartitionSender(brokers, transaction, topic, 0)
        brokers.close()
        brokers._leaders[topic, 0] = BrokerPlace("127.0.0.1", 1)
        sender.send(batches(1)[0])
        assert sender.finish().records == 3
    producer.abort()


def test_brokers_that_do_not_respond_are_given_up_after_a_time(topic, producer, monkeypatch):
    monkeypatch.setattr("millstream.client.kafka.shared.brokers._PATIENCE", 0.05)
    transaction = begun(producer, topic)
    away = SharedTransaction(
        kafka_address("kafka://127.0.0.1:1?timeout=1+second"), transaction.transactional_id, 1, 1
    )
    with (
        pytest.raises(BrokerUnavailableError, match=r"127\.0\.0\.1:1 does not respond"),
        Brokers(away.address) as brokers,
    ):
        PartitionSender(brokers, away, topic, 0)


def test_where_executors_cannot_send_it_is_said_why(address):
    assert why_not_shared(kafka_address(address)) is None
    kerberos = "&security.protocol=sasl_plaintext&sasl.mechanism=GSSAPI"
    assert why_not_shared(kafka_address(address + kerberos)) == (
        "they can't authenticate with GSSAPI"
    )


# -- a job ----------------------------------------------------------------------------------------


@settings(
    max_examples=some(12),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    deadline=None,
)
@given(
    seed=st.integers(0, 1 << 32),
    partitions=st.sampled_from([1, 4, 7]),
    rows=st.sampled_from([3, 30, 700]),
    count=st.integers(1, 6),
)
def test_tasks_write_the_records_that_the_driver_writes(
    address, tmp_path, seed, partitions, rows, count
):
    """In the same partitions and order; those without a key are in the order of time in each."""
    outputs = ("keyed", "unkeyed", "compacted", "bytes")
    found = {}
    for tasks_write in (False, True):
        name = f"job-{next(_numbers)}"
        with TopicJob(
            tmp_path, address, name, seed=seed, partitions=partitions, outputs=outputs
        ) as job:
            job.start(tasks_write=tasks_write)
            for number in range(2):
                frames = random_frames(
                    random.Random(seed + number), job.plan.sinks, frames=count, rows=rows
                )
                assert job.run(number, frames)
                assert job.staged.keys() == (set(outputs) if tasks_write else set())
            found[tasks_write] = {output: job.written(output) for output in outputs}
            assert not job.notices
    by_driver, by_tasks = found[False], found[True]
    for output in ("compacted", "bytes"):
        without_times = [
            [[row[:2] + row[3:] for row in records] for records in each[output]]
            for each in (by_driver, by_tasks)
        ]
        assert without_times[0] == without_times[1]
    keyed = [
        [[row for row in records if row[0] is not None] for records in each["keyed"]]
        for each in found.values()
    ]
    assert keyed[0] == keyed[1]
    for output in ("keyed", "unkeyed"):
        flat = [sorted(itertools.chain(*each[output]), key=repr) for each in found.values()]
        assert flat[0] == flat[1]
    for records in by_tasks["unkeyed"]:  # of two batches
        times = [row[2] for row in records]
        assert sum(after < before for before, after in itertools.pairwise(times)) <= 1


@pytest.mark.timeout(600)
def test_a_driver_that_dies_anywhere_leaves_each_batch_once(address, tmp_path, monkeypatch):
    """Before and after each request of the driver's, and before each attempt of a task."""
    outputs = ("keyed", "compacted")
    with TopicJob(tmp_path, address, f"job-{next(_numbers)}", outputs=outputs) as whole:
        whole.start()
        for number in range(3):
            whole.run(number)
        expected_records = {output: whole.written(output) for output in outputs}
    died = 0
    job = None
    ask = SharedProducer._ask

    def stepping(producer, *given, **named):
        job.step()
        done = ask(producer, *given, **named)
        job.step()
        return done

    monkeypatch.setattr(SharedProducer, "_ask", stepping)
    for dies_at in steps_to_die_at(slow=True):
        job = TopicJob(tmp_path, address, f"job-{next(_numbers)}", seed=dies_at, outputs=outputs)
        with job:
            job.start()
            job.run(0)
            job.steps, job.dies_at = 0, dies_at
            try:
                job.run(1)
            except SimulatedCrash:
                died += 1
            job.dies_at = None
            if job.generator.random() < 0.5:
                job.tasks.wake()
            job.start()
            if job.next == 1:
                job.run(1)
            job.run(2)
            for tasks in job.woken:
                tasks.wake()
            for output in outputs:
                assert job.written(output) == expected_records[output], (dies_at, output)
            if job.steps < dies_at:
                break
    assert died


def test_a_driver_that_was_replaced_writes_nothing(address, tmp_path):
    with TopicJob(tmp_path, address, f"job-{next(_numbers)}") as job:
        job.start().run(0)
        old, outputs = job.committer, job.outputs_in_tasks
        rows = job.batch(1)
        left, staged = outputs.stage(1, rows)
        before = job.written("keyed")
        job.start()
        with pytest.raises(FencedError):
            old.sinks[0].commit(old._fence(1), collect_results_part(job.plan, left, staged))
        with pytest.raises(FencedError):
            outputs.stage(1, rows)
        assert job.written("keyed") == before
        assert job.run(1)
        assert not job.committer.sinks[0].commit(
            job.committer._fence(1), collect_results_part(job.plan, left, staged)
        )
        after = job.written("keyed")
    assert sum(map(len, after)) == sum(
        collect_results(job.plan, job.batch(number), {}).rows["keyed"].height for number in (0, 1)
    )


def collect_results_part(plan, left, staged):
    result = collect_results(plan, left, staged)
    return SinkBatch(result.rows, result.position, result.staged)


def test_what_executors_cannot_send_the_driver_sends_and_says_so(address, tmp_path, monkeypatch):
    outputs = ("bytes", "compacted")
    with TopicJob(tmp_path, address, f"job-{next(_numbers)}", outputs=outputs) as whole:
        whole.start().run(0)
        whole.run(1)
        right = {output: whole.written(output) for output in outputs}
    real = sender_module.send_partition

    def send_partition(transaction, topic, partition, columns, **options):
        if topic.endswith("compacted"):
            raise BrokerUnavailableError("no way to the broker at b:9092")
        return real(transaction, topic, partition, columns, **options)

    monkeypatch.setattr(sender_module, "send_partition", send_partition)
    with TopicJob(tmp_path, address, f"job-{next(_numbers)}", outputs=outputs) as job:
        job.start()
        rows = job.batch(0)
        left, staged = job.outputs_in_tasks.stage(0, rows)
        assert staged.keys() == {"bytes"}
        with pytest.raises(StagedRowsLostError, match="bytes was aborted"):
            job.committer.commit(0, collect_results(job.plan, left, staged), {})
        assert job.committer.commit(0, collect_results(job.plan, rows), {})
        job.run(1)
        (notice,) = job.notices
        assert "'compacted'" in notice
        assert "no way to the broker at b:9092" in notice
        assert {output: job.written(output) for output in outputs} == right
