"""Clients and tools that others wrote, in C, JavaScript, Go and Java, and Spark's own connector.

Each language's program (``programs/``) runs once, part by part; each test is about one part. One broker
serves them all, and a second one those parts that come with a password.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from broker.broker_process import InProcess
from broker.certificates import Certificate, made
from broker.language_clients import go_program, jars, node_package, program
from broker.raw_client import RawClient, create

from millstream.broker.security.users import UsersFile

PROGRAMS = Path(__file__).parent / "programs"
PROGRAM_S = 240
USER, PASSWORD = "alice", "a secret of hers"
KAFKA, KAFKA_OLDER = "4.3.1", "2.0.1"
FLINK = "2.2.0"
QUICK = ("-Xmx512m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")
# Of Spark's connector not every version can be had; these fit together.
CONNECTOR = (
    "org.apache.spark:spark-sql-kafka-0-10_2.13:4.2.0",
    "org.apache.spark:spark-token-provider-kafka-0-10_2.13:4.0.0",
    "org.apache.kafka:kafka-clients:4.1.1",
    "org.apache.commons:commons-pool2:2.12.1",
)

FLINKS_CONNECTOR = (
    "org.apache.flink:flink-connector-kafka:5.0.0-2.2",
    *(f"org.apache.flink:flink-{name}:{FLINK}" for name in ("connector-base", "clients")),
    f"org.apache.flink:flink-streaming-java:{FLINK}",
    "org.slf4j:slf4j-nop:1.7.36",
)

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.timeout(900),  # what is fetched for the first time may take minutes to come
]


@pytest.fixture(scope="module")
def open_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[InProcess]:
    folder = tmp_path_factory.mktemp("open") / "data"
    with InProcess(folder, rebalance_delay_ms=0) as running:
        yield running


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    return made(tmp_path_factory.mktemp("certificate"))


@pytest.fixture(scope="module")
def closed_broker(
    tmp_path_factory: pytest.TempPathFactory, certificate: Certificate
) -> Iterator[InProcess]:
    folder = tmp_path_factory.mktemp("closed")
    UsersFile(folder / "users").put(USER, PASSWORD)
    door = {"tls_cert": certificate.cert, "tls_key": certificate.key, "users": folder / "users"}
    with InProcess(folder / "data", door=door, rebalance_delay_ms=0) as running:
        yield running


def make(broker: InProcess, topic: str, partitions: int) -> None:
    with RawClient(broker.address) as client:
        (made_topic,) = client.request("CreateTopics", 4, create(topic, partitions))["topics"]
        assert made_topic["error_code"] == 0, made_topic


@dataclass(frozen=True)
class Outcomes:
    """What a program says of its parts."""

    version: str
    parts: Mapping[str, str]
    errors: str
    folder: Path


def outcomes(command: Sequence[str | Path], folder: Path) -> Outcomes:
    """Run a program whose lines are the name of a part, its outcome and its time."""
    try:
        done = subprocess.run(
            [str(word) for word in command],
            capture_output=True,
            text=True,
            timeout=PROGRAM_S,
            check=False,
        )
        said, errors = done.stdout, done.stderr
    except subprocess.TimeoutExpired as late:
        said = (late.stdout or b"").decode()
        errors = f"ended after {PROGRAM_S} s; {(late.stderr or b'').decode()}"
    parts = {}
    for line in said.splitlines():
        name, found, *_ = [*line.split("\t"), ""]
        parts[name] = found
    return Outcomes(parts.pop("version", "unknown"), parts, errors, folder)


@pytest.fixture
def went_well(record_property: Callable[[str, object], None]) -> Callable[[Outcomes, str], None]:
    def check(found: Outcomes, part: str) -> None:
        record_property("version", found.version)
        assert found.parts.get(part) == "ok", f"{found.parts.get(part)} {found.errors}"

    return check


# -- kcat -------------------------------------------------------------------------------------

kcat_test = pytest.mark.client("kcat")


@pytest.fixture
def kcat(open_broker: InProcess, record_property) -> Callable[..., str]:
    path = program("kcat", "kcat")

    def run(*words: str, given: str = "", address: str = open_broker.address) -> str:
        done = subprocess.run(
            [path, "-b", address, *words],
            input=given,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    said = subprocess.run([path, "-V"], capture_output=True, text=True, check=True).stdout
    version = re.search(r"Version (\S+) .*librdkafka (\S+)", said)
    record_property("version", f"{version[1]} (librdkafka {version[2]})")
    return run


@pytest.fixture(scope="module")
def kcat_topic(open_broker: InProcess) -> str:
    make(open_broker, "kcat", 1)
    return "kcat"


@kcat_test
def test_kcat_writes_and_reads_keys_headers_and_compressions(kcat, kcat_topic) -> None:
    for compression in ("none", "gzip", "snappy", "lz4", "zstd"):
        lines = "".join(f"k:{compression}{number}\n" for number in range(100))
        how = ["-P", "-t", kcat_topic, "-p", "0", "-K:", "-H", "a=1", "-z", compression]
        kcat(*how, "-X", "enable.idempotence=true", given=lines)
    found = kcat("-C", "-t", kcat_topic, "-o", "beginning", "-e", "-q", "-f", "%o %k %h %s\n")
    assert found.splitlines() == [
        f"{place * 100 + number} k a=1 {compression}{number}"
        for place, compression in enumerate(("none", "gzip", "snappy", "lz4", "zstd"))
        for number in range(100)
    ]


@kcat_test
def test_kcat_reads_as_a_group_and_asks_for_offsets_by_time(kcat, kcat_topic) -> None:
    kcat("-P", "-t", kcat_topic, given="one more\n")
    settings = ["-X", "auto.offset.reset=earliest", "-X", "session.timeout.ms=6000"]
    found = kcat(*settings, "-q", "-e", "-f", "%s\n", "-G", "kcat-group", kcat_topic)
    assert found.splitlines()[-1] == "one more"
    end = len(kcat("-C", "-t", kcat_topic, "-e", "-q", "-f", "%o\n").splitlines())
    assert kcat("-Q", "-t", f"{kcat_topic}:0:-1").strip().endswith(f"offset {end}")


@kcat_test
def test_kcat_lists_the_broker_and_its_topics(kcat, kcat_topic, open_broker) -> None:
    found = json.loads(kcat("-L", "-J"))
    assert [one["name"] for one in found["brokers"]] == [open_broker.address]
    (topic,) = [one for one in found["topics"] if one["topic"] == kcat_topic]
    assert [one["leader"] for one in topic["partitions"]] == [1]


@kcat_test
def test_kcat_comes_with_a_password(kcat, closed_broker, certificate) -> None:
    how = {
        "security.protocol": "SASL_SSL",
        "sasl.mechanism": "PLAIN",
        "sasl.username": USER,
        "sasl.password": PASSWORD,
        "ssl.ca.location": str(certificate.cert),
    }
    words = [word for name, value in how.items() for word in ("-X", f"{name}={value}")]
    found = json.loads(kcat(*words, "-L", "-J", address=closed_broker.address))
    assert [one["name"] for one in found["brokers"]] == [closed_broker.address]


# -- kafkajs ----------------------------------------------------------------------------------

kafkajs_test = pytest.mark.client("kafkajs")


@pytest.fixture(scope="module")
def kafkajs(open_broker, closed_broker, certificate, tmp_path_factory) -> Outcomes:
    node, library = program("node", "nodejs"), node_package("kafkajs", "2.2.4")
    door = [closed_broker.address, certificate.cert, USER, PASSWORD]
    command = [node, PROGRAMS / "clients.js", library, open_broker.address, *door]
    return outcomes(command, tmp_path_factory.mktemp("node"))


@kafkajs_test
def test_kafkajs_writes_and_its_group_reads_in_order(kafkajs, went_well) -> None:
    went_well(kafkajs, "records")


@kafkajs_test
def test_kafkajs_commits_and_aborts_transactions_with_offsets(kafkajs, went_well) -> None:
    went_well(kafkajs, "transactions")


@kafkajs_test
def test_kafkajs_administers_topics_and_groups(kafkajs, went_well) -> None:
    went_well(kafkajs, "administration")


@kafkajs_test
def test_kafkajs_comes_with_a_password_and_is_told_of_a_wrong_one(kafkajs, went_well) -> None:
    went_well(kafkajs, "password")


# -- franz-go ---------------------------------------------------------------------------------

franz_go_test = pytest.mark.client("franz-go")


@pytest.fixture(scope="module")
def franz_go(open_broker, closed_broker, certificate, tmp_path_factory) -> Outcomes:
    modules = ["github.com/twmb/franz-go@v1.18.1", "github.com/twmb/franz-go/pkg/kadm@v1.14.0"]
    built = go_program(PROGRAMS / "clients.go", *modules)
    door = [closed_broker.address, certificate.cert, USER, PASSWORD]
    return outcomes([built, open_broker.address, *door], tmp_path_factory.mktemp("go"))


@franz_go_test
def test_franz_go_writes_in_all_compressions_and_its_group_reads_in_order(
    franz_go, went_well
) -> None:
    went_well(franz_go, "records")


@franz_go_test
def test_franz_go_goes_from_topic_to_topic_exactly_once(franz_go, went_well) -> None:
    went_well(franz_go, "transactions")


@franz_go_test
def test_franz_go_administers_topics_settings_and_groups(franz_go, went_well) -> None:
    went_well(franz_go, "administration")


@franz_go_test
def test_franz_go_comes_with_a_password_and_is_told_of_a_wrong_one(franz_go, went_well) -> None:
    went_well(franz_go, "password")


# -- Java -------------------------------------------------------------------------------------

java_test = pytest.mark.client("Apache Kafka's Java clients")
older_test = pytest.mark.client("Apache Kafka's Java clients of years ago")
tools_test = pytest.mark.client("Apache Kafka's command-line tools")
streams_test = pytest.mark.client("Kafka Streams")
connect_test = pytest.mark.client("Kafka Connect")


@pytest.fixture(scope="module")
def java(open_broker, closed_broker, certificate, tmp_path_factory) -> Outcomes:
    program("javac", "default-jdk-headless")  # the program is compiled as it is started
    found = jars(
        f"org.apache.kafka:kafka-tools:{KAFKA}",
        f"org.apache.kafka:kafka-streams:{KAFKA}",
        f"org.apache.kafka:connect-file:{KAFKA}",
        "org.slf4j:slf4j-nop:1.7.36",
    )
    folder = tmp_path_factory.mktemp("java")
    door = [closed_broker.address, certificate.cert, USER, PASSWORD]
    command = [program("java", "default-jdk-headless"), *QUICK, "-cp", f"{found}/*"]
    return outcomes(
        [*command, PROGRAMS / "Clients.java", open_broker.address, folder, *door], folder
    )


@java_test
def test_java_writes_in_all_compressions_and_its_group_reads_in_order(java, went_well) -> None:
    went_well(java, "records")


@java_test
def test_java_shares_partitions_cooperatively(java, went_well) -> None:
    went_well(java, "rebalance")


@java_test
def test_java_commits_aborts_and_fences_transactions(java, went_well) -> None:
    went_well(java, "transactions")


@java_test
def test_java_administers_topics_records_settings_and_groups(java, went_well) -> None:
    went_well(java, "administration")


@java_test
def test_java_comes_with_a_password_and_is_told_of_a_wrong_one(java, went_well) -> None:
    went_well(java, "password")


@older_test
def test_java_clients_of_years_ago_copy_a_topic_exactly_once(
    open_broker, went_well, tmp_path
) -> None:
    program("javac", "default-jdk-headless")
    found = jars(f"org.apache.kafka:kafka-clients:{KAFKA_OLDER}", "org.slf4j:slf4j-nop:1.7.36")
    command = ["java", *QUICK, "-cp", f"{found}/*", PROGRAMS / "Older.java", open_broker.address]
    went_well(outcomes(command, tmp_path), "older")


@tools_test
def test_what_the_console_producer_is_given_the_console_consumer_prints(java, went_well) -> None:
    went_well(java, "console")
    assert (java.folder / "console").read_text().splitlines() == [
        "Offset:0\tk1\tone",
        "Offset:1\tk2\ttwo",
        "Offset:2\tk3\tthree",
    ]


@tools_test
def test_what_the_verifiable_producer_was_acknowledged_the_verifiable_consumer_reads(
    java, went_well
) -> None:
    went_well(java, "verifiable")
    found = [json.loads(line) for line in (java.folder / "verifiable").read_text().splitlines()]
    sent = {
        (one["partition"], one["offset"]) for one in found if one["name"] == "producer_send_success"
    }
    assert len(sent) == 2000
    ranges = [
        (one["partition"], number)
        for line in found
        if line["name"] == "records_consumed"
        for one in line["partitions"]
        for number in range(one["minOffset"], one["maxOffset"] + 1)
    ]
    assert sorted(ranges) == sorted(sent)
    commits = [one for one in found if one["name"] == "offsets_committed"]
    assert all(one["success"] for one in commits)
    ends = {partition: 0 for partition, _ in sent}  # all may lie in one of the two
    for partition, offset in sent:
        ends[partition] = max(ends[partition], offset + 1)
    last = {one["partition"]: one["offset"] for line in commits for one in line["offsets"]}
    assert last == ends


@streams_test
def test_streams_counts_words_exactly_once_and_goes_on_from_its_changelog(java, went_well) -> None:
    went_well(java, "streams")


@connect_test
def test_connect_copies_files_through_a_topic_exactly_once_as_a_cluster_of_one(
    java, went_well
) -> None:
    went_well(java, "connect")


# -- Spark ------------------------------------------------------------------------------------

spark_test = pytest.mark.client("Spark's connector for Kafka")


@pytest.fixture(scope="module")
def spark(open_broker, tmp_path_factory) -> Outcomes:
    pytest.importorskip("pyspark", reason="the extra `spark` is not installed here")
    found = jars(*CONNECTOR, alone=True)
    for name in ("spark-in", "spark-out"):
        make(open_broker, name, 2)
    folder = tmp_path_factory.mktemp("spark")
    command = [sys.executable, PROGRAMS / "spark_kafka.py", open_broker.address, found, folder]
    result = outcomes(command, folder)
    connector = CONNECTOR[0].rpartition(":")[2]
    return replace(result, version=f"{connector} on PySpark {result.version}")


@spark_test
def test_spark_writes_a_batch_and_reads_it_by_offsets_and_times(spark, went_well) -> None:
    went_well(spark, "write_and_read")


@spark_test
def test_spark_streams_from_topic_to_topic_and_goes_on_after_a_restart(spark, went_well) -> None:
    went_well(spark, "stream")


# -- Flink ------------------------------------------------------------------------------------


@pytest.mark.client("Apache Flink's connector for Kafka")
def test_flink_copies_a_topic_exactly_once_through_a_failure(
    open_broker, went_well, tmp_path
) -> None:
    compiler = program("javac", "default-jdk-headless")
    found = jars(*FLINKS_CONNECTOR)
    # Its tasks look the functions that they are sent up by name, so they must lie in files.
    words = [compiler, "-cp", f"{found}/*", "-d", tmp_path, PROGRAMS / "Flink.java"]
    subprocess.run(words, check=True, timeout=PROGRAM_S)
    command = ["java", *QUICK, "-cp", f"{tmp_path}:{found}/*", "Flink", open_broker.address]
    result = outcomes(command, tmp_path)
    connector = FLINKS_CONNECTOR[0].rpartition(":")[2]
    went_well(replace(result, version=f"{connector} on Flink {result.version}"), "flink")
