"""Share groups with the Java client: workers that are killed, a broker that is, and records that fail.

Each worker is a JVM with one KafkaShareConsumer (``programs/Shares.java``); what it does with a record is
what the record's value says.
"""

from __future__ import annotations

import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from broker.broker_process import AsProcess, InProcess
from broker.language_clients import jars, program
from broker.raw_client import RawClient, create, produce, raw

from millstream.broker.protocol.error_codes import ErrorCode
from millstream.log.encoding import SimpleRecord, encode_records
from millstream.log.reader import LogReader

KAFKA = "4.3.1"
PROGRAM = Path(__file__).parent / "programs" / "Shares.java"
QUICK = ("-Xmx128m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")
WAIT_S = 90
GROUP = 32  # the kind of resource

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.timeout(600),
    pytest.mark.client("Apache Kafka's Java clients"),
]


class Line(NamedTuple):
    """What a worker has printed."""

    what: str
    value: str = ""
    detail: str = ""
    at_ms: str = "0"


class Worker:
    """A member of a share group, in a JVM of its own."""

    def __init__(self, command: list[str]) -> None:
        self.lines: list[Line] = []
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._reading = threading.Thread(target=self._read)
        self._reading.start()

    def _read(self) -> None:
        for line in self.process.stdout:
            self.lines.append(Line(*line.rstrip("\n").split("\t")))

    def of(self, what: str) -> list[Line]:
        return [line for line in self.lines.copy() if line.what == what]

    def kill(self) -> None:
        self.process.kill()
        self._end()

    def close(self) -> None:
        """Let it end by itself."""
        self.process.stdin.write("enough\n")
        self.process.stdin.flush()
        try:
            self.process.wait(WAIT_S)
        finally:
            self.process.kill()
            errors = self.process.stderr.read()
            self._end()
        assert self.lines[-1].what == "closed", errors

    def _end(self) -> None:
        self.process.wait(WAIT_S)
        self._reading.join(WAIT_S)
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            stream.close()


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What runs the program."""
    libraries = jars(  # those that test_other_languages has fetched
        f"org.apache.kafka:kafka-tools:{KAFKA}",
        f"org.apache.kafka:kafka-streams:{KAFKA}",
        f"org.apache.kafka:connect-file:{KAFKA}",
        "org.slf4j:slf4j-nop:1.7.36",
    )
    folder = tmp_path_factory.mktemp("classes")
    javac = program("javac", "openjdk-17-jdk-headless")
    subprocess.run([javac, "-cp", f"{libraries}/*", "-d", str(folder), str(PROGRAM)], check=True)
    return [program("java", "default-jre"), *QUICK, "-cp", f"{folder}:{libraries}/*", "Shares"]


@pytest.fixture
def work(compiled, record_property) -> Iterator[Callable[..., Worker]]:
    workers: list[Worker] = []
    record_property("version", KAFKA)

    def start(address: str, group: str, *settings: str, mode: str = "explicit") -> Worker:
        workers.append(Worker([*compiled, address, group, "t", mode, *settings]))
        return workers[-1]

    yield start
    for worker in workers:
        if worker.process.poll() is None:
            worker.kill()


def until(holds: Callable[[], bool], *workers: Worker) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not holds():
        for worker in workers:
            assert worker.process.poll() is None, worker.process.stderr.read()
        assert time.monotonic() < deadline_s, [worker.lines[-20:] for worker in workers]
        time.sleep(0.05)


def made(address: str, group: str, partitions: int = 1, **settings: object) -> None:
    """Make the topic, and say how the group is to be."""
    settings_by_name = {"share.auto.offset.reset": "earliest"}
    settings_by_name |= {name.replace("_", "."): str(value) for name, value in settings.items()}
    configs = [
        {"name": name, "config_operation": 0, "value": settings_by_name[name]}
        for name in settings_by_name
    ]
    resource = {"resource_type": GROUP, "resource_name": group, "configs": configs}
    with RawClient(address) as client:
        client.request("CreateTopics", 4, create("t", partitions))
        (done,) = client.request("IncrementalAlterConfigs", 1, {"resources": [resource]})[
            "responses"
        ]
    assert done["error_code"] == 0, done


def send(address: str, values: list[str], partition: int = 0) -> None:
    rows = [SimpleRecord(1000, None, value.encode()) for value in values]
    with RawClient(address) as client:
        for at in range(0, len(rows), 10):  # batches of ten
            parts = [b""] * partition + [raw(encode_records(rows[at : at + 10]))]
            request = produce(*parts)
            request["topic_data"][0]["partition_data"] = [
                {"index": partition, "records": parts[-1]}
            ]
            response = client.request("Produce", 7, request)
            (one,) = response["responses"][0]["partition_responses"]
            assert one["error_code"] == 0, one


def lag(address: str, group: str) -> int:
    with RawClient(address) as client:
        request = {"groups": [{"group_id": group, "topics": None}]}
        (response,) = client.request("DescribeShareGroupOffsets", 1, request)["groups"]
    assert response["error_code"] in (0, ErrorCode.GROUP_ID_NOT_FOUND), response
    parts = [one for topic in response["topics"] for one in topic["partitions"]]
    return sum(one["lag"] for one in parts) if parts else -1


def held(worker: Worker) -> set[str]:
    """Return the slow records that a worker has in hand."""
    got, said = ({line.value for line in worker.of(what)} for what in ("got", "said"))
    return {value for value in got - said if value.startswith("slow")}


def read(folder: Path, topic: str) -> list[dict]:
    """Return the committed records of a topic of one partition."""
    reader = LogReader(folder, isolation="read_committed")
    try:
        ((start, end),) = reader.offsets(topic)
        parts = reader.read(topic, 0, start, end, columns=("offset", "value", "headers"))
        return [row for part in parts for row in part.to_pylist()]
    finally:
        reader.close()


def check_books(workers: list[Worker], values: list[str]) -> None:
    """Every record was processed, and none was given out after it was said to be."""
    said = {line.value: int(line.at_ms) for one in workers for line in one.of("said")}
    got = Counter(line.value for one in workers for line in one.of("got"))
    assert set(got) == set(values)
    for one in workers:
        for line in one.of("got"):
            if line.value.startswith("ok"):
                assert int(line.at_ms) <= said.get(line.value, 1 << 60), line


def test_two_share_consumers_lose_nothing_as_one_of_them_and_the_broker_are_killed(
    work, folder
) -> None:
    values = [f"slow-200-{one}" if one % 20 == 0 else f"ok-{one}" for one in range(400)]
    with AsProcess(folder) as broker:
        address = broker.address
        made(address, "g")
        settings = ("max.poll.records=10", "share.acquire.mode=record_limit")
        ann, bob = (work(address, "g", *settings) for _ in range(2))
        send(address, values[:200])
        until(lambda: held(ann) and len(ann.of("said")) > 5 and len(bob.of("said")) > 5, ann, bob)
        ann.kill()
        send(address, values[200:])
        until(lambda: held(bob) and len(bob.of("said")) > 100, bob)
        broker.kill()
        with AsProcess(folder, listen=address) as again:
            eve = work(address, "g", *settings)
            until(lambda: lag(address, "g") == 0, bob, eve)
            bob.close()
            eve.close()
            assert again.process.poll() is None
    check_books([ann, bob, eve], values)
    again = [line for one in (ann, bob, eve) for line in one.of("got") if int(line.detail) > 1]
    assert 0 < len(again) < 100, "what was in the hands of the killed was given out again"


def test_a_share_consumer_releases_rejects_and_sees_a_poison_record_go(work, folder) -> None:
    values = ["ok-1", "again-1", "bad-1", "poison-1", *(f"ok-{number}" for number in range(2, 30))]
    with InProcess(folder) as broker:
        made(broker.address, "g", errors_deadletterqueue_topic_name="given-up")
        send(broker.address, values)
        worker = work(broker.address, "g")
        until(lambda: lag(broker.address, "g") == 0, worker)
        worker.close()
    deliveries = {}
    for line in worker.of("got"):
        deliveries.setdefault(line.value, []).append(int(line.detail))
    assert deliveries["again-1"] == [1, 2, 3]
    assert deliveries["bad-1"] == [1]
    assert deliveries["poison-1"] == [1, 2, 3, 4, 5]
    assert all(deliveries[value] == [1] for value in values if value.startswith("ok"))
    found = {
        row["value"]: {one["key"]: one["value"] for one in row["headers"]}
        for row in read(folder, "given-up")
    }
    assert sorted(found) == [b"bad-1", b"poison-1"]
    headers = found[b"poison-1"]
    assert headers["__dlq.errors.delivery.count"] == b"5"
    assert (headers["__dlq.errors.topic"], headers["__dlq.errors.offset"]) == (b"t", b"3")


def test_a_share_consumer_renews_its_lock_and_loses_one_that_it_does_not_renew(
    work, folder
) -> None:
    with InProcess(folder) as broker:
        made(broker.address, "g", share_record_lock_duration_ms=3000)
        send(broker.address, ["renewed-1600-1", "slow-3500-1"])
        ann = work(broker.address, "g", "max.poll.records=1", "share.acquire.mode=record_limit")
        until(lambda: len([one for one in ann.of("got") if one.value.startswith("slow")]) >= 2, ann)
        renewed = [line.detail for line in ann.of("got") if line.value == "renewed-1600-1"]
        assert renewed == ["1"] * 3, "it was given out once, and kept for longer than a lock lasts"
        assert "accept" in [
            line.detail for line in ann.of("said") if line.value == "renewed-1600-1"
        ]
        assert ann.of("failed"), "an acknowledgement that is too late fails"


def test_members_of_a_share_group_share_partitions_and_accept_implicitly(work, folder) -> None:
    values = [[f"ok-{part}-{number}" for number in range(100)] for part in range(2)]
    with InProcess(folder) as broker:
        made(broker.address, "g", partitions=2)
        workers = [work(broker.address, "g", mode="implicit") for _ in range(3)]

        def members() -> list:
            with RawClient(broker.address) as client:
                (group,) = client.request("ShareGroupDescribe", 1, {"group_ids": ["g"]})["groups"]
            return group["members"]

        until(lambda: len(members()) == 3, *workers)
        assigned = [
            tuple(
                number
                for topic in one["assignment"]["topic_partitions"]
                for number in topic["partitions"]
            )
            for one in members()
        ]
        assert sorted(map(len, assigned)) == [1, 1, 1]
        assert {number for one in assigned for number in one} == {0, 1}
        for part in range(2):
            send(broker.address, values[part], part)
        until(lambda: lag(broker.address, "g") == 0, *workers)
        for worker in workers:
            worker.close()
        until(lambda: not members())
    got = Counter(line.value for one in workers for line in one.of("got"))
    assert got == Counter(value for part in values for value in part)
