"""The requirements of ``docs/log-contract.md``, by number, on every log that `connect` reaches."""

from __future__ import annotations

import re
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path

import pyarrow as pa
import pytest
from kafka.partitioner.default import murmur2 as kafka_murmur2

from millstream.client import EventLog
from millstream.errors import (
    ConfigError,
    FencedError,
    FencePassedError,
    MillstreamError,
    OffsetOutOfRangeError,
    ProducerFencedError,
    RecordTooLargeError,
    TopicExistsError,
    TopicRecreatedError,
    TransactionAbortedError,
    UnknownTopicError,
)
from millstream.record import Record, TopicPartition

COMPRESSIONS = ["none", "gzip", "snappy", "lz4", "zstd"]
WAIT_S = 60


def send(log: EventLog, topic: str, *values: object, **options: object) -> list[tuple[int, int]]:
    with log.producer() as producer:
        futures = [producer.send(topic, value, **options) for value in values]
        return [future.result(WAIT_S) for future in futures]


def records(log: EventLog, topic: str, **options: object) -> list[Record]:
    with log.consumer(topic, follow=False, **options) as consumer:
        return list(consumer)


def values(log: EventLog, topic: str, **options: object) -> list[bytes | None]:
    return [record.value for record in records(log, topic, **options)]


def test_every_requirement_has_a_test_of_its_number() -> None:
    text = (Path(__file__).parents[2] / "docs" / "log-contract.md").read_text()
    promised = set(re.findall(r"^\| ([TSRCXK]\d+) \|", text, re.MULTILINE))
    tested = {
        part.upper()
        for name in globals()
        if name.startswith("test_")
        for part in re.findall(r"(?<=_)[tsrcxk]\d+(?=_)", name)
    }
    assert promised == tested


# -- topics ------------------------------------------------------------------------------------


def test_t1_a_topic_is_there_for_every_connection_and_after_a_restart(backend) -> None:
    with backend.connect() as log, backend.connect() as other:
        info = log.create_topic("t", partitions=3)
        assert other.topics()["t"] == info
        assert other.offsets("t") == [(0, 0)] * 3
    with backend.connect() as log:
        assert log.topics()["t"] == info


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "ä", "a b", "x" * 250])
def test_t2_a_name_that_cannot_be_is_refused(log: EventLog, name: str) -> None:
    with pytest.raises(ConfigError):
        log.create_topic(name)
    assert log.topics() == {}


def test_t2_a_name_is_taken_once(log: EventLog) -> None:
    for name in ("a", "A.b_c-9", "x" * 249):
        log.create_topic(name)
        with pytest.raises(TopicExistsError, match=re.escape(name)):
            log.create_topic(name)


def test_t2_a_topic_that_may_be_there_stays_as_it_is(log: EventLog) -> None:
    made = log.create_topic("a", partitions=3, exist_ok=True)
    assert made == log.create_topic("a", partitions=2, exist_ok=True) == log.topics()["a"]
    assert made.partitions == 3


def test_t3_an_unknown_topic_is_named(log: EventLog) -> None:
    log.create_topic("there")
    for attempt in (
        lambda: log.offsets("nope"),
        lambda: log.consumer("nope"),
        lambda: log.read("nope", 0),
        lambda: log.delete_topic("nope"),
        lambda: send(log, "nope", b"x"),
        lambda: log.topic_settings("nope"),
    ):
        with pytest.raises(UnknownTopicError, match="nope"):
            attempt()


def test_t4_a_topic_made_again_begins_anew_for_groups_too(log: EventLog) -> None:
    log.create_topic("t")
    send(log, "t", b"old", b"older")
    assert len(records(log, "t", group="g")) == 2
    log.delete_topic("t")
    assert "t" not in log.topics()
    with pytest.raises(UnknownTopicError):
        log.offsets("t")
    log.create_topic("t")
    send(log, "t", b"new")
    assert log.offsets("t") == [(0, 1)]
    assert log.committed_offsets("g") == {}
    assert values(log, "t", group="g") == [b"new"]


def test_t5_partitions_are_added_and_never_taken_away(log: EventLog) -> None:
    log.create_topic("t", partitions=2)
    places = send(log, "t", *[b"%d" % n for n in range(20)])
    assert log.alter_topic("t", partitions=5).partitions == 5
    for n, (partition, offset) in enumerate(places):
        assert log.read("t", partition, offset, offset + 1)["value"].to_pylist() == [b"%d" % n]
    assert send(log, "t", b"x", partition=4) == [(4, 0)]
    with pytest.raises(ConfigError, match="5 partitions"):
        log.alter_topic("t", partitions=4)


def test_t6_settings_are_read_back_changed_and_refused(log: EventLog) -> None:
    log.create_topic("t", retention="2 days", cleanup="compact,delete")
    found = log.topic_settings("t")
    assert (found["retention.ms"], found["cleanup.policy"]) == ("172800000", "compact,delete")
    log.alter_topic("t", settings={"retention.ms": "5000"})
    assert log.topic_settings("t")["retention.ms"] == "5000"
    for settings in ({"retention.ms": "soon"}, {"no.such.setting": "1"}):
        with pytest.raises(ConfigError):
            log.alter_topic("t", settings=settings)
        with pytest.raises(ConfigError):
            log.create_topic("u", settings=settings)
    assert log.topic_settings("t")["retention.ms"] == "5000"
    assert list(log.topics()) == ["t"]


# -- sending -----------------------------------------------------------------------------------


def test_s1_a_record_is_found_where_its_future_said(log: EventLog) -> None:
    log.create_topic("t", partitions=3)
    sent = {f"k{n}": b"v%d" % n for n in range(200)}
    with log.producer() as producer:
        futures = {key: producer.send("t", value, key=key) for key, value in sent.items()}
        places = {key: future.result(WAIT_S) for key, future in futures.items()}
    assert len(set(places.values())) == len(sent)
    for key, (partition, offset) in places.items():
        found = log.read("t", partition, offset, offset + 1)
        assert found["key"].to_pylist() == [key.encode()]
        assert found["value"].to_pylist() == [sent[key]]


def test_s2_a_key_goes_where_kafkas_clients_send_it(log: EventLog) -> None:
    log.create_topic("t", partitions=7)
    for key in (b"", b"a", b"user-17", "ключ".encode(), b"\0" * 33):
        ((partition, _),) = send(log, "t", b"v", key=key)
        assert partition == (kafka_murmur2(key) & 0x7FFFFFFF) % 7


def test_s3_null_and_empty_and_times_stay_what_they_are(log: EventLog) -> None:
    log.create_topic("t")
    moment_ms = 1_700_000_000_123
    sent = [(None, None), (b"", b""), (None, b""), (b"k", None), (b"", b"v"), (None, b"v")]
    with log.producer() as producer:
        for n, (key, value) in enumerate(sent):
            producer.send("t", value, key=key, timestamp_ms=moment_ms + n)
    found = records(log, "t")
    assert [(record.key, record.value) for record in found] == sent
    assert [record.timestamp_ms for record in found] == [moment_ms + n for n in range(len(sent))]
    assert found[0].timestamp == datetime(2023, 11, 14, 22, 13, 20, 123000, UTC)
    assert found[0].json() is None


def test_s3_a_time_may_lie_before_1970(log: EventLog) -> None:
    log.create_topic("t")
    with log.producer() as producer:
        for moment_ms in (-1, 0, 1):
            producer.send("t", b"x", timestamp_ms=moment_ms)
    assert [record.timestamp_ms for record in records(log, "t")] == [-1, 0, 1]


def test_s4_headers_keep_order_repetition_and_nulls(log: EventLog) -> None:
    log.create_topic("t")
    headers = [("a", b"1"), ("b", None), ("a", b""), ("ü", b"\xff\0")]
    with log.producer() as producer:
        producer.send("t", b"x", headers=headers)
        producer.send("t", b"y")
    assert [record.headers for record in records(log, "t")] == [tuple(headers), ()]


def test_s5_order_is_kept_and_offsets_rise_by_one(log: EventLog) -> None:
    log.create_topic("t")
    places = send(log, "t", *[b"%d" % n for n in range(3000)])
    assert places == [(0, n) for n in range(3000)]
    assert values(log, "t") == [b"%d" % n for n in range(3000)]


@pytest.mark.parametrize("partition", [-1, 2, 99])
def test_s6_a_partition_that_is_not_there_is_refused(log: EventLog, partition: int) -> None:
    log.create_topic("t", partitions=2)
    with pytest.raises(ConfigError, match="partition"):
        send(log, "t", b"x", partition=partition)
    assert log.offsets("t") == [(0, 0), (0, 0)]


@pytest.mark.not_in_lane("thresholds", "16 MiB, three bytes at a time, take too long")
def test_s7_large_records_are_kept_and_too_large_ones_refused(log: EventLog) -> None:
    log.create_topic("t")
    large = bytes(range(256)) * 65536
    assert send(log, "t", large) == [(0, 0)]
    with log.producer() as producer:
        with pytest.raises(RecordTooLargeError):
            producer.send("t", bytes(65 << 20)).result(WAIT_S)
        assert producer.send("t", b"small").result(WAIT_S) == (0, 1)
    assert values(log, "t") == [large, b"small"]


def test_s8_what_is_acknowledged_is_seen_by_every_reader_from_then_on(backend) -> None:
    with backend.connect() as log, backend.connect() as other, log.producer() as producer:
        log.create_topic("t")
        for n in range(50):
            producer.send("t", b"%d" % n).result(WAIT_S)
            assert other.end_offsets("t") == [n + 1]
            assert other.read("t", 0, n)["value"].to_pylist() == [b"%d" % n]
    with backend.connect() as log:
        assert len(records(log, "t")) == 50


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_s9_compression_changes_nothing_of_what_is_read(log: EventLog, compression: str) -> None:
    log.create_topic("t")
    sent = [b"the same words again and again %d" % n for n in range(500)]
    with log.producer(compression=compression) as producer:
        for n, value in enumerate(sent):
            producer.send("t", value, key=b"k", headers=[("n", b"%d" % n)], timestamp_ms=n + 1)
        producer.send_many("t", values=sent).result(WAIT_S)
    found = records(log, "t")
    assert [record.value for record in found] == sent + sent
    assert [record.headers for record in found[:500]] == [(("n", b"%d" % n),) for n in range(500)]
    assert log.read("t", 0, 250, 260)["value"].to_pylist() == sent[250:260]


def test_s10_producers_together_lose_and_double_nothing(log: EventLog) -> None:
    log.create_topic("t", partitions=2)

    def work(worker: int) -> list[tuple[tuple[int, int], bytes]]:
        out = []
        with log.producer(linger_ms=worker % 2) as producer:
            pairs = [(b"%d-%d" % (worker, n)) for n in range(300)]
            futures = [(producer.send("t", value, key=value), value) for value in pairs]
            out += [(future.result(WAIT_S), value) for future, value in futures]
        return out

    with ThreadPoolExecutor(6) as pool:
        sent = [pair for part in pool.map(work, range(6)) for pair in part]
    assert len({place for place, _ in sent}) == len(sent) == 1800
    found = {(r.partition, r.offset): r.value for r in records(log, "t")}
    assert found == dict(sent)


def test_s11_columns_are_the_same_records_as_one_by_one(log: EventLog) -> None:
    log.create_topic("one", partitions=3)
    log.create_topic("many", partitions=3)
    keys = [b"k%d" % (n % 17) for n in range(500)]
    payloads = [None if n % 50 == 0 else b"v%d" % n for n in range(500)]
    with log.producer() as producer:
        for n in range(500):
            producer.send("one", payloads[n], key=keys[n], timestamp_ms=n + 1)
        times = pa.array(range(1, 501))
        table = pa.table({"key": pa.array(keys), "value": pa.array(payloads), "timestamp": times})
        assert producer.send_many("many", table).result(WAIT_S) == 500
    for partition in range(3):
        assert log.read("one", partition).equals(log.read("many", partition))


def test_s12_closing_sends_what_is_left_and_refuses_what_comes_after(backend) -> None:
    with backend.connect() as log:
        log.create_topic("t")
        producer = log.producer(linger_ms=10_000)
        for n in range(10):
            producer.send("t", b"%d" % n)
        producer.close()
        assert len(records(log, "t")) == 10
        with pytest.raises(MillstreamError):
            producer.send("t", b"late")
        producer.close()
    with pytest.raises(FencedError):
        log.topics()


# -- reading -----------------------------------------------------------------------------------


def test_r1_a_half_open_range_gives_exactly_its_offsets(log: EventLog) -> None:
    log.create_topic("t")
    for start in range(0, 30, 3):  # several batches
        send(log, "t", *[b"%d" % n for n in range(start, start + 3)])
    for start in range(0, 31, 5):
        for end in range(start, 31, 4):
            table = log.read("t", 0, start, end)
            assert table["offset"].to_pylist() == list(range(start, end))
            assert table["value"].to_pylist() == [b"%d" % n for n in range(start, end)]


def test_r2_outside_of_what_is_held_the_bounds_are_told(log: EventLog) -> None:
    log.create_topic("t")
    send(log, "t", *[b"x"] * 10)
    log.delete_records("t", 0, 4)
    with pytest.raises(OffsetOutOfRangeError) as caught:
        log.read("t", 0, 5, 11)
    assert (caught.value.start, caught.value.end) == (4, 10)
    with pytest.raises(OffsetOutOfRangeError, match=r"\[1, 4\) .* are gone, 3") as caught:
        log.read("t", 0, 1, 6)
    assert (caught.value.start, caught.value.end) == (4, 10)


def test_r3_what_was_read_is_read_again(log: EventLog) -> None:
    log.create_topic("t")
    before = None
    for n in range(20):
        send(log, "t", *[b"%d" % n] * 7, key=b"k")
        now = log.read("t", 0)
        if before is not None:
            assert now.slice(0, before.num_rows).equals(before)
        before = now


def test_r4_a_time_gives_the_first_record_as_old_or_younger(log: EventLog) -> None:
    log.create_topic("t")
    times = [1000, 3000, 2000, 5000, 5000, 4000, 9000]
    with log.producer() as producer:
        for at in times:
            producer.send("t", b"x", timestamp_ms=at).result(WAIT_S)
    for moment in (-2000, -2, -1, 0, 1000, 1001, 3000, 3001, 5000, 5001, 9000, 9001):
        wanted = next((n for n, at in enumerate(times) if at >= moment), len(times))
        assert log.offset_for_time("t", 0, moment) == wanted, moment


def test_r5_only_the_columns_asked_for_come(log: EventLog) -> None:
    log.create_topic("t")
    send(log, "t", b"v", key=b"k", headers=[("h", b"1")])
    assert log.read("t", 0).schema.names == ["offset", "timestamp", "key", "value"]
    assert log.read("t", 0, columns=["value", "offset"]).schema.names == ["value", "offset"]
    assert log.read("t", 0, columns=["headers"])["headers"].to_pylist() == [
        [{"key": "h", "value": b"1"}]
    ]
    with pytest.raises(ConfigError, match="'colour'"):
        log.read("t", 0, columns=["colour"])


def test_r6_deleted_records_are_gone_and_the_rest_stays(backend) -> None:
    with backend.connect() as log:
        log.create_topic("t", partitions=2)
        send(log, "t", *[b"%d" % n for n in range(10)], partition=1)
        assert log.delete_records("t", 1, 6) == 6
        assert log.offsets("t") == [(0, 0), (6, 10)]
        with pytest.raises(OffsetOutOfRangeError):
            log.delete_records("t", 1, 11)
        assert send(log, "t", b"10", partition=1) == [(1, 10)]
    with backend.connect() as log:
        assert log.offsets("t")[1] == (6, 11)
        assert values(log, "t") == [b"%d" % n for n in range(6, 11)]


# -- consuming ---------------------------------------------------------------------------------


def test_c1_a_consumer_begins_where_it_is_told(log: EventLog) -> None:
    log.create_topic("t")
    with log.producer() as producer:
        for n in range(10):
            producer.send("t", b"%d" % n, timestamp_ms=n * 1000 + 1)
    assert len(values(log, "t", start="earliest")) == 10
    assert values(log, "t", start="latest") == []
    assert values(log, "t", start={0: 7}) == [b"7", b"8", b"9"]
    assert values(log, "t", start=datetime.fromtimestamp(8, UTC)) == [b"8", b"9"]
    assert values(log, "t", start="1970-01-01T00:00:07") == [b"7", b"8", b"9"]
    assert values(log, "t", start="1970-01-01T00:00:07.001001") == [b"8", b"9"]
    assert values(log, "t", start="1970-01-02") == []
    for start in ({0: 11}, {0: -1}):
        with pytest.raises(OffsetOutOfRangeError):
            log.consumer("t", start=start)
    for start in ("first", {3: 0}, 5):
        with pytest.raises(ConfigError):
            log.consumer("t", start=start)


def test_c2_following_gets_what_comes_and_not_following_ends(log: EventLog) -> None:
    log.create_topic("t", partitions=2)
    send(log, "t", b"before")
    ends = log.consumer("t", follow=False)
    follows = log.consumer("t")
    thread = threading.Thread(target=send, args=(log, "t", b"after"))
    assert next(follows).value == b"before"
    thread.start()
    assert next(follows).value == b"after"
    thread.join()
    assert [record.value for record in ends] == [b"before"]


def test_c2_t5_following_takes_in_partitions_that_are_added(log: EventLog) -> None:
    log.create_topic("t")
    with log.consumer("t") as follows:
        thread = threading.Thread(
            target=lambda: (
                log.alter_topic("t", partitions=3),
                send(log, "t", b"added", partition=2),
            )
        )
        thread.start()
        found = next(follows)
        thread.join()
    assert (found.partition, found.value) == (2, b"added")


def test_c3_a_group_goes_on_where_it_has_committed(log: EventLog) -> None:
    log.create_topic("t")
    send(log, "t", *[b"%d" % n for n in range(10)])
    with log.consumer("t", group="g", commit="manual", follow=False) as consumer:
        assert [record.value for record in islice(consumer, 4)] == [b"0", b"1", b"2", b"3"]
    assert values(log, "t", group="g", commit="manual")[0] == b"0"
    with log.consumer("t", group="g", commit="manual", follow=False) as consumer:
        list(islice(consumer, 4))
        consumer.commit()
        list(islice(consumer, 4))
    assert values(log, "t", group="g", start="latest") == [b"%d" % n for n in range(4, 10)]
    with pytest.raises(ConfigError, match="group"):
        log.consumer("t").commit()


def test_c4_automatic_commits_count_what_was_finished(log: EventLog) -> None:
    log.create_topic("t")
    send(log, "t", *[b"%d" % n for n in range(6)])
    with log.consumer("t", group="g", follow=False) as consumer:
        list(islice(consumer, 3))
    assert log.committed_offsets("g")[TopicPartition("t", 0)].offset == 3
    assert values(log, "t", group="g") == [b"3", b"4", b"5"]
    assert values(log, "t", group="g") == []


def test_c5_a_record_in_hand_at_an_error_comes_again(log: EventLog) -> None:
    log.create_topic("t")
    send(log, "t", *[b"%d" % n for n in range(6)])
    with (
        pytest.raises(ZeroDivisionError),
        log.consumer("t", group="g", follow=False) as consumer,
    ):
        for record in consumer:
            1 // (2 - int(record.value or b"0"))
    assert values(log, "t", group="g") == [b"2", b"3", b"4", b"5"]


def test_c6_groups_do_not_know_of_each_other(log: EventLog) -> None:
    log.create_topic("t")
    send(log, "t", b"a", b"b")
    assert values(log, "t", group="one") == [b"a", b"b"]
    assert values(log, "t", group="two") == [b"a", b"b"]
    assert log.groups() == ["one", "two"]
    assert log.delete_group_offsets("one") == 1
    assert log.groups() == ["two"]
    assert values(log, "t", group="one") == [b"a", b"b"]


def test_c7_a_committed_offset_is_the_next_and_stays(backend) -> None:
    place = TopicPartition("t", 1)
    with backend.connect() as log:
        log.create_topic("t", partitions=2)
        send(log, "t", b"a", b"b", partition=1)
        log.commit_offsets("g", {place: (1, "noted")})
        for wrong in ({place: -1}, {TopicPartition("t", 2): 0}, {TopicPartition("u", 0): 0}):
            with pytest.raises(ConfigError):
                log.commit_offsets("g", wrong)
    with backend.connect() as log:
        found = log.committed_offsets("g")
        assert list(found) == [place]
        assert (found[place].offset, found[place].metadata) == (1, "noted")
        assert values(log, "t", group="g") == [b"b"]


def test_c8_seek_goes_on_elsewhere(log: EventLog) -> None:
    log.create_topic("t")
    send(log, "t", *[b"%d" % n for n in range(10)])
    consumer = log.consumer("t", follow=False)
    assert next(consumer).value == b"0"
    assert consumer.positions == {0: 1}
    consumer.seek({0: 8})
    assert [record.value for record in consumer] == [b"8", b"9"]
    assert consumer.positions == {0: 10}
    with log.consumer("t", group="g", follow=False) as consumer:
        list(islice(consumer, 5))
        consumer.seek({0: 2})
    assert log.committed_offsets("g")[TopicPartition("t", 0)].offset == 2
    with pytest.raises(OffsetOutOfRangeError):
        consumer.seek({0: 11})
    with pytest.raises(ConfigError):
        consumer.seek({1: 0})


def test_c9_lag_counts_what_is_still_to_be_read(log: EventLog) -> None:
    log.create_topic("t", partitions=2)
    send(log, "t", *[b"x"] * 10, partition=0)
    send(log, "t", *[b"x"] * 4, partition=1)
    log.commit_offsets("g", {TopicPartition("t", 0): 3, TopicPartition("t", 1): 4})
    found = {row.partition: (row.behind, row.end_offset, row.state) for row in log.lag("g")}
    assert found == {0: (7, 10, "ok"), 1: (0, 4, "ok")}
    assert [row.group for row in log.lag()] == ["g", "g"]


def test_c9_lag_is_known_of_partitions_from_which_nothing_came(log: EventLog) -> None:
    log.create_topic("t", partitions=3)
    send(log, "t", b"x", partition=0)
    values(log, "t", group="g")
    send(log, "t", b"x", b"x", partition=2)
    assert [(row.partition, row.behind) for row in log.lag("g")] == [(0, 0), (1, 0), (2, 2)]


def test_c9_x1_a_group_that_has_read_all_is_not_behind_the_end_of_a_transaction(
    log: EventLog,
) -> None:
    log.create_topic("t")
    with log.producer(transactional_id="x") as producer, producer.transaction():
        producer.send("t", b"x")
    assert values(log, "t", group="g") == [b"x"]
    assert [row.behind for row in log.lag("g")] == [0]


def make_again(log: EventLog, topic: str, *sent: object) -> None:
    """Delete a topic, and make it again with more records than it had."""
    log.delete_topic(topic)
    log.create_topic(topic)
    send(log, topic, *sent)


def test_c10_a_consumer_at_work_gives_nothing_of_a_topic_made_again(log: EventLog) -> None:
    log.create_topic("t")
    send(log, "t", *[b"old"] * 5)
    consumer = log.consumer("t", group="g", commit="manual")
    assert next(consumer).value == b"old"
    make_again(log, "t", *[b"new"] * 20)
    with pytest.raises(TopicRecreatedError, match="'t' was deleted and created again"):
        # What it has in hand already is of the old one.
        assert {record.value for record in islice(consumer, 20)} == {b"old"}
    with pytest.raises(TopicRecreatedError):
        consumer.commit()
    assert log.committed_offsets("g") == {}
    assert values(log, "t", group="g") == [b"new"] * 20


def test_c10_a_consumer_that_waits_is_told_of_a_topic_made_again(log: EventLog) -> None:
    log.create_topic("t")
    send(log, "t", b"old")
    consumer = log.consumer("t")
    assert next(consumer).value == b"old"
    with ThreadPoolExecutor(1) as other:
        waiting = other.submit(next, consumer)
        make_again(log, "t", *[b"new"] * 5)
        # It may look just while there is none.
        with pytest.raises((TopicRecreatedError, UnknownTopicError)):
            waiting.result(WAIT_S)


def test_c10_a_consumer_is_told_of_a_topic_made_again_that_is_still_empty(log: EventLog) -> None:
    """Where it was to read on there is nothing yet; that is not for want of retention."""
    log.create_topic("t")
    send(log, "t", *[b"old"] * 5)
    consumer = log.consumer("t")
    assert [record.value for record in islice(consumer, 5)] == [b"old"] * 5
    make_again(log, "t")
    with pytest.raises(TopicRecreatedError):
        next(consumer)


def test_c10_offsets_given_with_the_id_of_another_topic_are_refused(log: EventLog) -> None:
    log.create_topic("t")
    send(log, "t", *[b"old"] * 5)
    with log.consumer("t", follow=False) as consumer:
        list(consumer)
        kept, topic_id = consumer.positions, consumer.topic_id
    assert topic_id == log.topics()["t"].topic_id
    make_again(log, "t", *[b"new"] * 9)
    with pytest.raises(TopicRecreatedError, match=topic_id):
        log.consumer("t", start=kept, topic_id=topic_id)
    place = TopicPartition("t", 0)
    with pytest.raises(TopicRecreatedError, match=topic_id):
        log.commit_offsets("g", {place: 5}, topic_ids={"t": topic_id})
    assert log.committed_offsets("g") == {}
    log.commit_offsets("g", {place: 5}, topic_ids={"t": log.topics()["t"].topic_id})
    assert log.committed_offsets("g")[place].offset == 5


@pytest.mark.not_in_lane("thresholds", "what is counted exactly is less there")
def test_c9_x1_offsets_that_no_reader_is_given_are_not_lag_wherever_the_group_has_committed(
    log: EventLog,
) -> None:
    log.create_topic("t")
    with log.producer(transactional_id="x") as producer:
        for number in range(3):
            with producer.transaction():
                producer.send("t", b"%d" % number)
        with pytest.raises(ZeroDivisionError), producer.transaction():
            producer.send("t", b"taken back").result()
            1 / 0  # noqa: B018 - what takes the transaction back
    places = [record.offset for record in log.consumer("t", follow=False)]
    for read, place in enumerate(places):
        log.commit_offsets("g", {TopicPartition("t", 0): place + 1})  # as clients of Kafka commit
        assert [row.behind for row in log.lag("g")] == [3 - read - 1]


@pytest.mark.parametrize("when", ["before", "after"])
def test_c10_a_transaction_notes_nothing_for_a_topic_made_again(log: EventLog, when: str) -> None:
    log.create_topic("t")
    log.create_topic("out")
    send(log, "t", *[b"old"] * 5)
    with log.consumer("t", follow=False) as consumer:
        list(consumer)
    noted = {TopicPartition("t", 0): 5}
    producer = log.producer(transactional_id="x")
    with pytest.raises(TopicRecreatedError, match="'t'"), producer.transaction() as transaction:
        producer.send("out", b"x")
        if when == "before":
            make_again(log, "t", *[b"new"] * 9)
        transaction.commit_offsets("g", noted, topic_ids={"t": consumer.topic_id})
        if when == "after":
            make_again(log, "t", *[b"new"] * 9)
    assert (log.committed_offsets("g"), values(log, "out")) == ({}, [])
    with producer.transaction() as transaction:  # it goes on
        transaction.commit_offsets("g", noted, topic_ids={"t": log.topics()["t"].topic_id})
    assert log.committed_offsets("g")[TopicPartition("t", 0)].offset == 5
    producer.close()


# -- transactions ------------------------------------------------------------------------------


def test_x1_a_transaction_is_seen_whole_after_its_commit(log: EventLog) -> None:
    log.create_topic("a", partitions=2)
    log.create_topic("b")
    with log.producer(transactional_id="x") as producer:
        with producer.transaction():
            for partition in (0, 1):
                producer.send("a", b"a", partition=partition)
            producer.send("b", b"b")
            producer.flush()
            assert values(log, "a") == values(log, "b") == []
        assert values(log, "a") == [b"a", b"a"]
        assert values(log, "b") == [b"b"]
        with producer.transaction():
            producer.send("b", b"second")
        assert values(log, "b") == [b"b", b"second"]


def test_x2_x4_an_error_aborts_and_nothing_is_ever_seen(backend) -> None:
    with backend.connect() as log:
        log.create_topic("t")
        with log.producer(transactional_id="x") as producer:
            with pytest.raises(ZeroDivisionError), producer.transaction():
                producer.send("t", b"taken back")
                producer.flush()
                raise ZeroDivisionError
            with producer.transaction():
                producer.send("t", b"kept")
        assert values(log, "t") == [b"kept"]
        assert b"taken back" in values(log, "t", isolation="read_uncommitted")
    with backend.connect() as log:
        assert values(log, "t") == [b"kept"]


@pytest.mark.parametrize("commits", [True, False])
def test_x3_offsets_and_fence_go_with_it(log: EventLog, commits: bool) -> None:
    log.create_topic("in")
    log.create_topic("out")
    send(log, "in", b"1", b"2")
    place = TopicPartition("in", 0)
    with log.producer(transactional_id="x") as producer:
        try:
            with producer.transaction() as transaction:
                producer.send("out", b"result")
                transaction.commit_offsets("g", {place: 2})
                transaction.fence("w", batch_id=1)
                if not commits:
                    raise ZeroDivisionError
        except ZeroDivisionError:
            pass
    assert (values(log, "out") == [b"result"]) == commits
    assert (place in log.committed_offsets("g")) == commits
    assert log.fence("w") == (1 if commits else None)


def test_x5_a_second_producer_fences_the_first(log: EventLog) -> None:
    log.create_topic("t")
    first = log.producer(transactional_id="x")
    with pytest.raises(ProducerFencedError), first.transaction():
        first.send("t", b"zombie")
        first.flush()
        second = log.producer(transactional_id="x")
    with second.transaction():
        second.send("t", b"second")
    assert values(log, "t") == [b"second"]
    with pytest.raises(FencedError), first.transaction():
        first.send("t", b"zombie again")
    first.close()
    second.close()
    assert values(log, "t") == [b"second"]


def test_x6_an_open_transaction_holds_readers_of_committed_records_back(log: EventLog) -> None:
    log.create_topic("t")
    send(log, "t", b"before")
    with log.producer(transactional_id="x") as producer:
        with producer.transaction():
            producer.send("t", b"open")
            producer.flush()
            send(log, "t", b"after")
            assert values(log, "t") == [b"before"]
            assert values(log, "t", isolation="read_uncommitted") == [b"before", b"open", b"after"]
        assert values(log, "t") == [b"before", b"open", b"after"]


def test_x7_a_fence_refuses_what_it_has_passed(log: EventLog) -> None:
    log.create_topic("t")
    with log.producer(transactional_id="x") as producer:
        for batch_id in (1, 2, 2, 1, 3):
            try:
                with producer.transaction() as transaction:
                    producer.send("t", b"%d" % batch_id)
                    transaction.fence("w", batch_id=batch_id)
            except FencePassedError as error:
                assert error.batch_id == 2
    assert values(log, "t") == [b"1", b"2", b"3"]
    assert log.fence("w") == 3
    assert log.fence("other") is None
    assert log.fences("w") == {"w": 3}
    assert log.delete_fences("w") == 1
    assert (log.fence("w"), log.delete_fences("w")) == (None, 0)
    with pytest.raises(ConfigError, match="every fence"):
        log.delete_fences("")


def test_x8_a_transaction_ends_with_its_timeout(backend) -> None:
    with backend.connect() as log:
        log.create_topic("t")
        with log.producer(transactional_id="x", transaction_timeout="2 seconds") as producer:
            with pytest.raises(TransactionAbortedError), producer.transaction():
                producer.send("t", b"too slow")
                producer.flush()
                time.sleep(2.1)
                backend.clean(log)
            with producer.transaction():
                producer.send("t", b"in time")
        assert values(log, "t") == [b"in time"]


# -- keeping -----------------------------------------------------------------------------------


def test_k1_by_size_the_oldest_go_and_a_reader_is_told(backend) -> None:
    unit = backend.unit
    with backend.connect() as log:
        settings = {"segment.bytes": str(1000 * unit)}
        log.create_topic("t", retention_bytes=5000 * unit, settings=settings)
        for n in range(100):
            send(log, "t", b"%03d" % n + bytes(100 * unit))
        backend.clean(log)
        ((start, end),) = log.offsets("t")
        assert end == 100
        assert 40 < start < 90
        found = values(log, "t")
        assert [value[:3] for value in found if value] == [b"%03d" % n for n in range(start, 100)]
        with pytest.raises(OffsetOutOfRangeError, match=rf"are gone, {start}"):
            log.read("t", 0, 0, 100)


def compacted(log: EventLog, name: str, *, unit: int, **settings: str) -> None:
    given = {"segment.bytes": str(500 * unit), "min.cleanable.dirty.ratio": "0"}
    log.create_topic(name, cleanup="compact", settings=given | settings)


def padded(number: int, *, unit: int) -> bytes:
    """Return a value that says its number; so large that segments hold only a few."""
    return b"%d " % number + bytes(70 * (unit - 1))


def test_k2_the_last_record_of_every_key_stays_at_its_offset(backend) -> None:
    with backend.connect() as log:
        compacted(log, "t", unit=backend.unit)
        last: dict[bytes, tuple[int, bytes]] = {}
        for n in range(120):
            key, value = b"k%d" % (n % 7), padded(n, unit=backend.unit)
            ((_, offset),) = send(log, "t", value, key=key)
            last[key] = (offset, value)
        backend.clean(log, times=2)
        found = records(log, "t")
        assert len(found) < 60
        assert [record.offset for record in found] == sorted(record.offset for record in found)
        kept = {record.key: (record.offset, record.value) for record in found}
        assert kept == last
        counted = Counter(record.key for record in found)
        assert set(counted) == set(last)
        assert log.offsets("t") == [(0, 120)]


def test_k3_a_record_without_a_key_is_refused(backend) -> None:
    with backend.connect() as log:
        compacted(log, "t", unit=backend.unit)
        with pytest.raises(ConfigError, match="key"):
            send(log, "t", b"no key")
        assert send(log, "t", b"v", key=b"k") == [(0, 0)]
        assert values(log, "t") == [b"v"]


def test_k4_a_tombstone_removes_its_key_and_goes_itself(backend) -> None:
    unit = backend.unit
    with backend.connect() as log:
        compacted(log, "t", unit=unit, **{"delete.retention.ms": "0"})
        send(log, "t", b"v" * 200 * unit, key=b"gone")
        send(log, "t", None, key=b"gone")
        for n in range(12):
            send(log, "t", bytes(200 * unit), key=b"k%d" % n)
        for n in range(6):
            time.sleep(0.005)
            backend.clean(log)
            if b"gone" not in {record.key for record in records(log, "t")}:
                return
            send(log, "t", bytes(200 * unit), key=b"k%d" % n)
        pytest.fail("the tombstone is still there")
