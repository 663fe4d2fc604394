"""What a user meets at ``kafka://`` besides what every log promises: errors, silence, overload, restarts."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest
from broker.broker_process import AsProcess, InProcess

pytest.importorskip("confluent_kafka", reason="the extra `kafka` is not installed here")
from confluent_kafka import KafkaError, KafkaException, Message

from millstream.client import EventLog, connect
from millstream.client.address import kafka_address
from millstream.client.kafka.cluster import Cluster
from millstream.client.kafka.errors import to_millstream_error
from millstream.client.kafka.fetcher import Fetcher
from millstream.client.kafka.groups import KafkaGroups
from millstream.client.kafka.reader import KafkaReader
from millstream.demo.ads_run import clear_log
from millstream.demo.folder import DemoRun, mark_completed, prepare
from millstream.errors import (
    ConfigError,
    FencePassedError,
    MillstreamError,
    OffsetOutOfRangeError,
    OverloadError,
    ProducerFencedError,
    TopicRecreatedError,
)
from millstream.record import TopicPartition
from millstream.testing.free_ports import free_ports

WAIT_S = 60


def nobody() -> str:
    """Return an address where nobody listens."""
    return f"127.0.0.1:{free_ports(1)[0]}"


def test_every_error_of_the_library_becomes_one_of_ours() -> None:
    codes = [getattr(KafkaError, name) for name in dir(KafkaError)]
    for code in (code for code in codes if isinstance(code, int)):
        error = to_millstream_error(KafkaError(code), "it failed")
        assert isinstance(error, MillstreamError)
        assert str(error).startswith("it failed (")


def test_brokers_that_are_not_there_are_one_error_and_nothing_on_the_terminal() -> None:
    program = (
        "import millstream as ms\n"
        "try:\n"
        f"    ms.connect('kafka://{nobody()}?timeout=1+second')\n"
        "except ms.RetriableError as error:\n"
        "    print(type(error).__name__, error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.stderr == ""
    assert done.returncode == 0
    assert "BrokerUnavailableError no broker responded at kafka://127.0.0.1:" in done.stdout
    assert "within 1 s" in done.stdout
    assert "Connection refused" in done.stdout


def test_an_option_that_the_client_refuses_is_told() -> None:
    with pytest.raises(ConfigError, match=r"security\.protocol"):
        connect(f"kafka://{nobody()}?security.protocol=carrier-pigeon")


@pytest.mark.parametrize(
    "code",
    [
        KafkaError.FENCED_LEADER_EPOCH,
        KafkaError.LEADER_NOT_AVAILABLE,
        KafkaError.OFFSET_NOT_AVAILABLE,
        KafkaError.UNKNOWN_LEADER_EPOCH,
    ],
)
def test_a_broker_that_does_not_know_a_new_partition_yet_is_asked_again(
    broker: InProcess, code: int
) -> None:
    cluster = Cluster(kafka_address(f"kafka://{broker.address}"))
    answers: list[Exception | int] = [KafkaException(KafkaError(code)) for _ in range(3)] + [7]

    def send() -> Future[int]:
        answer, future = answers.pop(0), Future[int]()
        future.set_exception(answer) if isinstance(answer, Exception) else future.set_result(answer)
        return future

    assert cluster.call(send, "it failed", reads=True) == 7
    assert not answers


def test_a_producer_says_what_only_folders_can(broker: InProcess) -> None:
    with connect(f"kafka://{broker.address}") as log:
        for options in ({"overload": "spill", "name": "p"}, {"overload": "drop_oldest"}):
            with pytest.raises(ConfigError, match="choose overload='block' or 'drop_newest'"):
                log.producer(**options)
        with pytest.raises(ConfigError, match="for logs in a folder"):
            log.run_maintenance()


@pytest.mark.parametrize("overload", ["block", "drop_newest"])
def test_beyond_the_buffer_what_was_chosen_happens(broker: InProcess, overload: str) -> None:
    with connect(f"kafka://{broker.address}") as log:
        log.create_topic("t")
        given = {"overload": overload, "buffer_bytes": 2 << 20, "block_timeout": "1 second"}
        with log.producer(linger_ms=60_000, **given) as producer:
            futures, refused = [], 0
            for _ in range(40):
                try:
                    futures.append(producer.send("t", bytes(100_000)))
                except OverloadError:
                    refused += 1
            if overload == "drop_newest":
                assert producer.dropped > 0
                with pytest.raises(OverloadError):
                    producer.flush()
            producer.close()
        found = log.read("t", 0).num_rows
        assert found + producer.dropped + refused == 40


def test_a_consumer_waits_for_a_broker_that_comes_back(folder) -> None:
    with AsProcess(folder) as first:
        address = first.address
        with connect(f"kafka://{address}") as log:
            log.create_topic("t")
            with log.producer() as producer:
                producer.send("t", b"before").result(WAIT_S)
            follows = log.consumer("t")
            assert next(follows).value == b"before"
            first.kill()
            with AsProcess(folder, listen=address):
                with connect(f"kafka://{address}") as again, again.producer() as producer:
                    producer.send("t", b"after").result(WAIT_S)
                assert next(follows).value == b"after"
                assert log.end_offsets("t") == [2]
                assert log.read("t", 0).num_rows == 2


def test_a_transaction_whose_broker_is_killed_counts_or_not_and_its_producer_ends(folder) -> None:
    """Its commit got no response: the next producer finds it committed or aborted."""
    with AsProcess(folder) as first:
        address = first.address
        with connect(f"kafka://{address}?timeout=2+seconds") as log:
            log.create_topic("t")
            producer = log.producer(transactional_id="x", transaction_timeout="5 seconds")
            with pytest.raises(MillstreamError), producer.transaction():
                producer.send("t", b"lost").result(WAIT_S)
                first.kill()
            with pytest.raises(MillstreamError):
                producer.transaction().__enter__()
        with AsProcess(folder, listen=address), connect(f"kafka://{address}") as log:
            with log.producer(transactional_id="x") as producer, producer.transaction() as made:
                producer.send("t", b"kept")
                made.commit_offsets("g", {TopicPartition("t", 0): 1})
            found = [record.value for record in log.consumer("t", follow=False)]
            assert found in ([b"kept"], [b"lost", b"kept"])
            assert log.committed_offsets("g")[TopicPartition("t", 0)].offset == 1


def test_a_transaction_with_offsets_outlives_a_broker_that_was_away_for_a_while(folder) -> None:
    """Away for so long that the client gives up all connections, between two transactions and in one."""
    with AsProcess(folder) as first:
        address = first.address
        with connect(f"kafka://{address}?timeout=10+seconds") as log:
            log.create_topic("t")
            producer = log.producer(transactional_id="x")

            def transact(offset: int, value: bytes) -> None:
                with producer.transaction() as made:
                    producer.send("t", value).result(WAIT_S)
                    made.commit_offsets("g", {TopicPartition("t", 0): offset})

            transact(1, b"one")
            first.kill()
            time.sleep(1)  # meanwhile the client looks for its brokers, in vain
            with AsProcess(folder, listen=address) as second, ExitStack() as third:
                transact(2, b"two")
                with producer.transaction() as made:
                    producer.send("t", b"three").result(WAIT_S)
                    made.commit_offsets("g", {TopicPartition("t", 0): 3})
                    second.kill()
                    time.sleep(1)
                    third.enter_context(AsProcess(folder, listen=address))
                found = [record.value for record in log.consumer("t", follow=False)]
                assert found == [b"one", b"two", b"three"]
                assert log.committed_offsets("g")[TopicPartition("t", 0)].offset == 3


def test_who_was_replaced_stays_so(broker: InProcess) -> None:
    address = f"kafka://{broker.address}"
    with connect(address) as log, connect(address) as other:
        log.create_topic("t")
        old = log.producer(transactional_id="x")
        with other.producer(transactional_id="x") as new:
            for _ in range(2):
                with pytest.raises(ProducerFencedError), old.transaction():
                    old.send("t", b"stale")
            with new.transaction():
                new.send("t", b"new")
        assert [record.value for record in log.consumer("t", follow=False)] == [b"new"]


def test_a_fork_leaves_the_clients_to_its_parent(broker: InProcess) -> None:
    program = f"""
import os
import millstream as ms
log = ms.connect("kafka://{broker.address}")
log.create_topic("t")
producer = log.producer()
producer.send("t", b"1").result(30)
pid = os.fork()
if not pid:
    try:
        for call in (lambda: producer.send("t", b"child"), log.topics):
            try:
                call()
            except ms.FencedError as error:
                assert "before a fork" in str(error), error
            else:
                os._exit(1)
        os._exit(0)
    finally:
        os._exit(2)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
producer.send("t", b"2").result(30)
print(log.read("t", 0).num_rows)
log.close()
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.stderr) == ("2\n", "")


def test_a_fence_outlives_the_offset_that_a_broker_forgets(broker: InProcess) -> None:
    with connect(f"kafka://{broker.address}") as log:
        with log.producer(transactional_id="x") as producer:
            for writer, batch_id in (("w", 1), ("w", 2), ("v", 7)):
                with producer.transaction() as transaction:
                    transaction.fence(writer, batch_id)
            log._cluster.admin.delete_consumer_groups(["millstream-fence:w"])[
                "millstream-fence:w"
            ].result(WAIT_S)
            assert log.fences() == {"v": 7, "w": 2}
            with pytest.raises(FencePassedError), producer.transaction() as transaction:
                transaction.fence("w", 2)
            with producer.transaction() as transaction:
                transaction.fence("w", 3)
        assert log.fences() == {"v": 7, "w": 3}
        assert log.delete_fences("w") == 1
        assert log.fences() == {"v": 7}
        assert log.topics() == {}


def test_a_demo_removes_what_its_own_runs_made_and_nothing_else(
    broker: InProcess, tmp_path: Path
) -> None:
    run = DemoRun("ads", {"log": f"kafka://{broker.address}"})
    with connect(f"kafka://{broker.address}") as log:
        log.create_topic("somebodys")
        assert prepare(tmp_path / "one", run, clear=partial(clear_log, log)) is False
        log.create_topic("decisions")
        with log.producer(transactional_id="ads/main") as producer:
            for writer in ("ads/main/checkpoint", "another/main/checkpoint"):
                with producer.transaction() as transaction:
                    transaction.fence(writer, 3)
        with pytest.raises(ConfigError, match=r"has the topics decisions already.*--folder"):
            prepare(tmp_path / "two", run, clear=partial(clear_log, log))
        assert prepare(tmp_path / "one", run, clear=partial(clear_log, log)) is True  # it goes on
        assert sorted(log.topics()) == ["decisions", "somebodys"]
        mark_completed(tmp_path / "one", run)
        assert prepare(tmp_path / "one", run, clear=partial(clear_log, log)) is False
        assert sorted(log.topics()) == ["somebodys"]
        assert log.fences() == {"another/main/checkpoint": 3}


def test_closing_ends_a_consumer_that_waits(broker: InProcess) -> None:
    with connect(f"kafka://{broker.address}") as log:
        log.create_topic("t")
        consumer = log.consumer("t")
        ended = threading.Thread(target=lambda: list(consumer))
        ended.start()
        time.sleep(0.3)
        consumer.close()
        ended.join(WAIT_S)
        assert not ended.is_alive()


def made(log: EventLog, count: int) -> str:
    """Make the topic, again if it is there, with so many records; return its id."""
    if "again" in log.topics():
        log.delete_topic("again")
    log.create_topic("again")
    with log.producer() as producer:
        for _ in range(count):
            producer.send("again", b"x")
    return log.topics()["again"].topic_id


def test_records_of_a_topic_made_again_while_they_were_fetched_are_not_given(
    broker: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    with connect(f"kafka://{broker.address}") as log:
        old = made(log, 3)
        reader = KafkaReader(f"kafka://{broker.address}").pinned({"again": old})
        assert [batch.num_rows for batch in reader.read("again", 0, 0, 3)] == [3]
        fetched = KafkaReader._read

        def made_again(self, *args, **options):
            for batch in fetched(self, *args, **options):
                made(log, 9)
                yield batch

        monkeypatch.setattr(KafkaReader, "_read", made_again)
        reading = reader.read("again", 0, 0, 3)
        with pytest.raises(TopicRecreatedError, match="'again'"):
            next(reading)
        reader.close()


def test_a_consumer_whose_offset_is_beyond_a_topic_made_again_is_told_of_the_topic(
    broker: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that fetches between the deletion and the send first gets an error: its offset does not exist."""
    with connect(f"kafka://{broker.address}") as log:
        log.create_topic("beyond")
        log.producer().send("beyond", b"old").result(WAIT_S)
        consumer = log.consumer("beyond")
        assert next(consumer).value == b"old"
        log.delete_topic("beyond")
        log.create_topic("beyond")

        def refused(stream: Fetcher, _timeout_s: float) -> list[Message]:
            raise OffsetOutOfRangeError("the records to be read next are gone", start=0, end=0)

        monkeypatch.setattr(Fetcher, "poll", refused)
        with pytest.raises(TopicRecreatedError, match="'beyond' was deleted and created again"):
            next(consumer)


def test_a_commit_that_a_topic_made_again_gets_skips_none_of_its_records(
    broker: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    with connect(f"kafka://{broker.address}") as log:
        old, other = made(log, 5), TopicPartition("other", 0)
        log.create_topic("other")
        put, place = KafkaGroups._put, TopicPartition("again", 0)
        times = []

        def made_again(self, group, offsets):
            if not times:
                made(log, 9)
            times.append(dict(offsets))
            put(self, group, offsets)

        monkeypatch.setattr(KafkaGroups, "_put", made_again)
        with pytest.raises(TopicRecreatedError, match="'again'"):
            log.commit_offsets("late", {place: 5, other: 3}, topic_ids={"again": old})
        assert times == [{place: 5, other: 3}, {place: 0}]
        assert log.committed_offsets("late")[place].offset == 0
        assert log.committed_offsets("late")[other].offset == 3
