from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pytest

from millstream.client import connect
from millstream.errors import (
    ConfigError,
    FencedError,
    FolderOwnedError,
    OffsetOutOfRangeError,
    UnknownTopicError,
)
from millstream.log.files import DISK
from millstream.log.murmur2 import partition_of
from millstream.log.owner import lock_folder
from millstream.log.reader import LogReader


def test_what_is_sent_comes_back_as_records(tmp_path: Path) -> None:
    with connect(tmp_path / "data") as log:
        log.create_topic("t", partitions=4)
        with log.producer() as producer:
            sent = [
                producer.send("t", {"ad": 7}, key="u1", timestamp_ms=1_700_000_000_123),
                producer.send("t", "text", key=17),
                producer.send("t", None, key=b"\xff"),
            ]
            places = [future.result(30) for future in sent]
        assert [partition for partition, _ in places] == [
            partition_of(key, 4) for key in (b"u1", b"17", b"\xff")
        ]
        found = {(r.partition, r.offset): r for r in log.consumer("t", follow=False)}
        first, text, tombstone = (found[place] for place in places)
    assert first.json() == {"ad": 7}
    assert first.value == b'{"ad":7}'
    assert first.timestamp == datetime.fromtimestamp(1_700_000_000.123, UTC)
    assert (text.key, text.value) == (b"17", b"text")
    assert tombstone.value is None
    assert tombstone.json() is None


def test_records_without_a_key_take_turns_over_partitions_batch_by_batch(tmp_path: Path) -> None:
    with connect(tmp_path) as log, log.producer(linger_ms=0) as producer:
        log.create_topic("t", partitions=3)
        places = [producer.send("t", b"v").result(30) for _ in range(9)]
    assert {partition for partition, _ in places} == {0, 1, 2}


@pytest.mark.not_in_lane("thresholds", "so many rows, three at a time, take minutes")
def test_columns_are_sent_in_order_to_the_partitions_of_their_keys(tmp_path: Path) -> None:
    rows = 250_000
    keys = [b"k%d" % (n % 1000) if n % 7 else None for n in range(rows)]
    values = pa.array([b"%d" % n for n in range(rows)])
    with connect(tmp_path) as log, log.producer() as producer:
        log.create_topic("t", partitions=3)
        assert producer.send_many("t", keys=keys, values=values).result(60) == rows
        seen = 0
        for partition in range(3):
            table = log.read("t", partition)
            seen += table.num_rows
            numbers = table["value"].cast(pa.string()).cast(pa.int64()).to_pylist()
            assert numbers == sorted(numbers)
            for key in {key for key in table["key"].to_pylist() if key is not None}:
                assert partition_of(key, 3) == partition
        assert seen == rows
        table = pa.table({"value": ["a", None], "timestamp": pa.array([1, 2], pa.timestamp("ms"))})
        assert producer.send_many("t", table).result(30) == 2
        assert producer.send_many("t", values=pa.array([], pa.binary())).result(30) == 0


def test_a_send_and_a_bulk_send_to_one_partition_keep_their_order(tmp_path: Path) -> None:
    with connect(tmp_path) as log, log.producer(linger_ms=1000) as producer:
        log.create_topic("t")
        producer.send("t", b"1")
        producer.send_many("t", values=[b"2", b"3"])
        producer.send("t", b"4")
        producer.flush()
        assert log.read("t", 0, columns=("value",))["value"].to_pylist() == [b"1", b"2", b"3", b"4"]


def test_a_consumer_starts_where_it_is_told(tmp_path: Path) -> None:
    with connect(tmp_path) as log, log.producer() as producer:
        log.create_topic("t")
        for second in range(10):
            producer.send("t", str(second), timestamp_ms=second * 1000)
        producer.flush()

        def values(start: object) -> list[bytes | None]:
            return [r.value for r in log.consumer("t", start=start, follow=False)]  # type: ignore[arg-type]

        assert values("earliest")[0] == b"0"
        assert values("latest") == []
        assert values({0: 7}) == [b"7", b"8", b"9"]
        assert values(datetime.fromtimestamp(7.5, UTC)) == [b"8", b"9"]
        with pytest.raises(OffsetOutOfRangeError, match=r"holds \[0, 10\)"):
            values({0: 11})
        with pytest.raises(ConfigError, match="'newest'"):
            values("newest")


def test_a_following_consumer_wakes_when_something_is_committed(tmp_path: Path) -> None:
    with connect(tmp_path) as log, log.producer() as producer:
        log.create_topic("t", partitions=2)
        consumer = log.consumer("t", start="latest")
        for number in range(50):
            producer.send("t", str(number))
            assert next(consumer).value == b"%d" % number
        consumer.close()
        assert list(consumer) == []


def test_misuse_is_told_with_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="begins with http://; give the path of a folder"):
        connect("http://localhost:9092")
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="is not a folder"):
        connect(tmp_path / "file")
    with connect(tmp_path / "data") as log, log.producer() as producer:
        log.create_topic("t")
        for call, words in [
            (lambda: producer.send("u", b"v"), "no topic 'u'"),
            (lambda: producer.send("t", b"v", partition=1), "no partition 1"),
            (lambda: producer.send("t", object()), "has no form in JSON"),
            (lambda: producer.send("t", float("nan")), "not JSON compliant"),
            (lambda: producer.send("t", b"v", key=1.5), "give bytes, str or int"),
            (lambda: producer.send_many("t"), "no values"),
            (lambda: producer.send_many("t", values=[1, 2]), "column of int64"),
            (lambda: producer.send_many("t", values=["a"], keys=["a", "b"]), "keys has 2 rows"),
            (lambda: log.producer(linger_ms=-1), "linger_ms is -1"),
        ]:
            with pytest.raises(ConfigError, match=words):
                call()
    with pytest.raises(FencedError, match="connect again"):
        log.topics()


def test_a_failure_reaches_the_future_and_the_next_flush(tmp_path: Path) -> None:
    with connect(tmp_path) as log:
        log.create_topic("t")
        producer = log.producer(linger_ms=60_000)
        future = producer.send("t", b"v")
        log.delete_topic("t")
        with pytest.raises(UnknownTopicError):
            producer.flush()
        assert isinstance(future.exception(30), UnknownTopicError)
        producer.close()
        with pytest.raises(FencedError, match="was closed"):
            producer.send("t", b"v")


def test_fences_are_listed_by_the_beginning_of_their_names(tmp_path: Path) -> None:
    with connect(tmp_path / "data") as log:
        assert log.fences() == {}
        log.create_topic("t")
        with log.producer(transactional_id="x") as producer:
            for writer, batch_id in (("a/1", 3), ("a/2", 0), ("b/1", 9), ("A/1", 1)):
                with producer.transaction() as transaction:
                    transaction.fence(writer, batch_id)
        assert log.fences("a/") == {"a/1": 3, "a/2": 0}
        assert log.fences("a/1") == {"a/1": 3}
        assert len(log.fences()) == 4


def test_a_folder_can_be_owned_before_anything_is_written(tmp_path: Path) -> None:
    with connect(tmp_path / "data") as log:
        log.acquire_ownership()
        log.acquire_ownership()
        with pytest.raises(FolderOwnedError):
            lock_folder(tmp_path / "data", DISK)
    lock_folder(tmp_path / "data", DISK).release()


def test_connections_of_one_process_share_the_folder(tmp_path: Path) -> None:
    with connect(tmp_path) as one, connect(tmp_path) as two:
        one.create_topic("t")
        with two.producer() as producer:
            one.close()
            assert producer.send("t", b"v").result(30) == (0, 0)


PRODUCER = """
import sys
from millstream.client import connect
with connect(sys.argv[1]) as log:
    if "t" not in log.topics():
        log.create_topic("t", partitions=2)
    with log.producer(linger_ms=0) as producer:
        number = 0
        while True:
            number += 1
            value = f"{sys.argv[2]}:{number}"
            waiting = [(producer.send("t", f"{value}:{n}", key=n), f"{value}:{n}") for n in range(3)]
            for future, text in waiting:
                partition, offset = future.result()
                print(partition, offset, text, flush=True)
"""


def test_every_acknowledged_record_outlives_kill_9_exactly_once_at_its_offset(
    tmp_path: Path,
) -> None:
    rng = random.Random(7)
    acknowledged: dict[tuple[int, int], bytes] = {}
    for life in range(4):
        process = subprocess.Popen(
            [sys.executable, "-c", PRODUCER, str(tmp_path), str(life)], stdout=subprocess.PIPE
        )
        assert process.stdout is not None
        for _ in range(rng.randint(1, 120)):
            partition, offset, value = process.stdout.readline().split()
            acknowledged[int(partition), int(offset)] = value
        os.kill(process.pid, signal.SIGKILL)
        for line in process.stdout:  # what it said before it died
            if line.endswith(b"\n"):
                partition, offset, value = line.split()
                acknowledged[int(partition), int(offset)] = value
        process.stdout.close()
        process.wait()
    with connect(tmp_path) as log:
        with log.producer():  # takes the folder over, which recovers it
            pass
        found = {(r.partition, r.offset): r.value for r in log.consumer("t", follow=False)}
    assert found.items() >= acknowledged.items()
    assert len(set(found.values())) == len(found)


def test_a_reader_in_another_process_sees_what_is_committed(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", PRODUCER, str(tmp_path), "0"], stdout=subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        partition, offset, value = process.stdout.readline().split()
        reader = LogReader(tmp_path)
        seen = [end for _, end in reader.offsets("t")]
        assert seen[int(partition)] > int(offset)
        assert reader.wait("t", seen, 30)
        (batch,) = reader.read("t", int(partition), int(offset), int(offset) + 1)
        assert batch["value"].to_pylist() == [value]
        with connect(tmp_path) as log, pytest.raises(FolderOwnedError, match=str(process.pid)):
            log.acquire_ownership()
    finally:
        process.kill()
        process.communicate()
