"""Requests that no client sends: malformed, unknown, too large, too slow; and the responses."""

from __future__ import annotations

import random
import struct
import threading
import time
from contextlib import suppress

import pytest
from broker.broker_process import InProcess
from broker.raw_client import (
    BY_NAME,
    RawClient,
    batch,
    create,
    fetch,
    fetched,
    only,
    produce,
    produced,
    raw,
)

from millstream.broker.memory import SMALL_BYTES_MAX
from millstream.broker.protocol.error_codes import ErrorCode
from millstream.broker.protocol.schema import FieldSpec
from millstream.broker.protocol.wire import Message
from millstream.broker.requests.fetch import _read
from millstream.log.batch import (
    CONTROL,
    LOG_APPEND_TIME,
    TRANSACTIONAL,
    ProducerStamp,
    finish,
    walk,
)
from millstream.log.compression import compress
from millstream.log.encoding import SimpleRecord, encode_records

GOOD = batch(b"one", b"two")


@pytest.fixture
def raw_client(broker: InProcess):
    with RawClient(broker.address) as client:
        client.request("CreateTopics", 4, create())
        yield client


def is_well(broker: InProcess) -> bool:
    """Return whether another client is served as ever."""
    with RawClient(broker.address) as other:
        return [
            one["name"] for one in other.request("Metadata", 9, {"topics": None})["topics"]
        ] == ["t"]


# -- frames -----------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [-1, 0, 7, 100 * 1024 * 1024 + 1, (1 << 31) - 1])
def test_a_size_that_cannot_be_ends_the_connection(broker, raw_client, size) -> None:
    raw_client.socket.sendall(struct.pack(">i", size) + bytes(100))
    assert raw_client.is_closed()
    assert is_well(broker)


@pytest.mark.parametrize(
    "frame",
    [
        struct.pack(">hhih", 999, 0, 1, -1),
        struct.pack(">hhih", 3, 99, 1, -1),
        struct.pack(">hhih", 3, 1, 1, -1) + struct.pack(">i", 1 << 30),
        struct.pack(">hhih", 3, 1, 1, 20) + b"short",
        b"GET / HTTP/1.1\r\n",
    ],
)
def test_what_cannot_be_read_ends_the_connection_and_no_other(broker, raw_client, frame) -> None:
    raw_client.socket.sendall(struct.pack(">i", len(frame)) + frame)
    assert raw_client.is_closed()
    assert is_well(broker)


def test_a_newer_apiversions_gets_the_supported_versions(raw_client) -> None:
    raw_client.socket.sendall(struct.pack(">ihhih", 10, 18, 77, 1, -1))
    raw_client._sent.append((BY_NAME["ApiVersions"], 0))
    response = raw_client.receive()
    assert response["error_code"] == ErrorCode.UNSUPPORTED_VERSION
    assert {
        one["api_key"]: (one["min_version"], one["max_version"]) for one in response["api_keys"]
    } == {api.key: api.versions for api in BY_NAME.values()}


def test_thousands_of_changed_requests_do_no_harm(broker, raw_client) -> None:
    """Real requests with a few bytes changed, each on its way to a handler if it can be read."""
    chance = random.Random(7)
    good = [
        raw_client.frame("Produce", 7, produce(batch(b"x"))),
        raw_client.frame("Fetch", 11, fetch(0)),
        raw_client.frame("JoinGroup", 7, {"group_id": "g", "session_timeout_ms": 6000}),
        raw_client.frame("OffsetCommit", 8, {"group_id": "g", "topics": []}),
        raw_client.frame("OffsetFetch", 8, {"groups": [{"group_id": "g", "topics": []}]}),
        raw_client.frame("CreateTopics", 7, {"topics": [], "validate_only": True}),
        raw_client.frame("DescribeConfigs", 4, {"resources": []}),
        raw_client.frame(
            "InitProducerId", 4, {"transactional_id": "x", "transaction_timeout_ms": 9}
        ),
        raw_client.frame("EndTxn", 3, {"transactional_id": "x", "producer_id": 1}),
        raw_client.frame("ListOffsets", 6, {"topics": []}),
    ]
    for _ in range(1000):
        frame = bytearray(chance.choice(good))
        for _ in range(chance.randint(1, 3)):
            frame[chance.randrange(12, len(frame))] = chance.randrange(256)
        with RawClient(broker.address) as client:
            client.socket.sendall(frame)
    with RawClient(broker.address) as other:
        assert "t" in {
            one["name"] for one in other.request("Metadata", 1, {"topics": None})["topics"]
        }


class Anything:
    """Requests that can be read and make no sense, from a seed."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)

    def message(self, fields: list[FieldSpec], version: int) -> Message:
        here = [one for one in fields if one.first <= version <= one.last]
        return {one.name: self.value(one, version) for one in here}

    def value(self, field: FieldSpec, version: int) -> object:
        if version >= field.null and self.chance.random() < 0.15:
            return None
        count = self.chance.choice([0, 1, 1, 2])
        if field.kind == "{}":
            return self.message(field.fields, version)
        if field.kind == "[]":
            return [self.message(field.fields, version) for _ in range(count)]
        if field.kind.startswith("[]"):
            return [self.scalar(field.kind[2:]) for _ in range(count)]
        return 10 if field.name == "max_wait_ms" else self.scalar(field.kind)

    def scalar(self, kind: str) -> object:
        if kind.startswith("int"):
            end = 1 << int(kind[3:]) - 1
            common = [0, 1, -1, 2, 3, end - 1, -end, self.chance.randrange(-end, end)]
            return self.chance.choice(common if kind == "int8" else [*common, 6000])
        choices = {
            "bool": [True, False],
            "uuid": [bytes(16), self.chance.randbytes(16)],
            "string": ["", "t", "g", "consumer", "range", "a/b", "\u00e9" * 3, "t" * 300, "\0"],
            "bytes": [b"", self.chance.randbytes(30)],
            "records": [b"", GOOD, bytes(70), self.chance.randbytes(90)],
        }
        return self.chance.choice(choices[kind])


@pytest.mark.parametrize("seed", range(3))
def test_requests_that_make_no_sense_all_get_responses(broker, raw_client, caplog, seed) -> None:
    anything = Anything(seed)
    apis = [api for api in BY_NAME.values() if api.name != "JoinGroup"]  # which may wait for others
    for number in range(600):
        api = apis[number % len(apis)]
        version = anything.chance.randint(*api.versions)
        with RawClient(broker.address) as client:
            request = anything.message(api.request, version)
            client.send(api.name, version, request)
            if not (api.name == "Produce" and request["acks"] == 0):
                client.receive()
    assert [one for one in caplog.records if one.levelname == "ERROR"] == []


def test_a_request_that_never_arrives_whole_ends_the_connection(folder) -> None:
    with InProcess(folder, stalled_s=0.3) as broker, RawClient(broker.address) as client:
        client.socket.sendall(struct.pack(">i", 1000) + bytes(10))
        assert client.is_closed()


def test_a_connection_that_is_silent_for_too_long_is_closed(folder) -> None:
    with InProcess(folder, idle_s=0.3) as broker, RawClient(broker.address) as client:
        client.request("CreateTopics", 4, create())
        client.send("Fetch", 11, fetch(0, max_wait_ms=1000))
        assert (
            fetched(client.receive())["error_code"] == 0
        )  # a client that waits for a response is not idle
        assert client.is_closed()


def test_one_connection_too_many_is_closed(folder) -> None:
    with InProcess(folder, connections_max=2) as broker:
        first, second = RawClient(broker.address), RawClient(broker.address)
        with first, second:
            for client in (first, second):
                client.request("Metadata", 1, {"topics": []})
            with RawClient(broker.address) as third:
                assert third.is_closed()
        deadline_s = time.monotonic() + 30
        while not is_served(broker):
            assert time.monotonic() < deadline_s


def is_served(broker: InProcess) -> bool:
    """Return whether a new connection is taken."""
    with RawClient(broker.address) as client:
        try:
            return "brokers" in client.request("Metadata", 1, {"topics": []})
        except (AssertionError, ConnectionError):
            return False


# -- Produce ----------------------------------------------------------------------------------


def test_requests_that_follow_each_other_get_responses_in_order(raw_client) -> None:
    frames = []
    for number in range(200):
        if number == 100:
            frames.append(raw_client.frame("Metadata", 1, {"topics": []}))
        frames.append(raw_client.frame("Produce", 7, produce(batch(b"%d" % number))))
    raw_client.socket.sendall(b"".join(frames))
    responses = [raw_client.receive() for _ in range(201)]
    del responses[100]
    assert [produced(one)["base_offset"] for one in responses] == list(range(200))


def test_a_batch_sent_again_is_there_once_and_a_gap_is_refused(raw_client) -> None:
    for sequence, code, offset in [(0, 0, 0), (2, 0, 2), (0, 0, 0), (2, 0, 2), (9, 45, -1)]:
        data = batch(b"a", b"b", producer=ProducerStamp(77, 0, sequence))
        found = produced(raw_client.request("Produce", 7, produce(data)))
        assert (found["error_code"], found["base_offset"]) == (code, offset)
    assert fetched(raw_client.request("Fetch", 11, fetch(0)))["high_watermark"] == 4


def changed(data: bytes, at: int, value: int) -> bytes:
    return data[:at] + bytes([value]) + data[at + 1 :]


def with_attributes(attributes: int) -> bytes:
    made = encode_records([SimpleRecord(0, b"k", b"v")])
    times = (0, 0)
    return raw(finish(made.tail[44:], records=1, timestamps_ms=times, attributes=attributes))


def lying(records: int, taken: int) -> bytes:
    made = encode_records([SimpleRecord(0, b"k", b"v"), SimpleRecord(0, b"k", b"w")])
    return raw(finish(made.tail[44:], records=records, count=taken, timestamps_ms=(0, 0)))


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"", ErrorCode.INVALID_RECORD),
        (None, ErrorCode.INVALID_RECORD),
        (GOOD[:60], ErrorCode.INVALID_RECORD),
        (GOOD[:-1], ErrorCode.INVALID_RECORD),
        (GOOD + GOOD, ErrorCode.INVALID_RECORD),
        (changed(GOOD, 16, 1), ErrorCode.INVALID_RECORD),  # an older format
        (changed(GOOD, len(GOOD) - 3, 0), ErrorCode.CORRUPT_MESSAGE),
        (changed(GOOD, 18, GOOD[18] ^ 1), ErrorCode.CORRUPT_MESSAGE),
        (with_attributes(CONTROL | TRANSACTIONAL), ErrorCode.INVALID_RECORD),
        (with_attributes(TRANSACTIONAL), ErrorCode.INVALID_RECORD),
        (with_attributes(LOG_APPEND_TIME), ErrorCode.INVALID_TIMESTAMP),
        (with_attributes(7), ErrorCode.UNSUPPORTED_COMPRESSION_TYPE),
        (with_attributes(2), ErrorCode.INVALID_RECORD),  # not what snappy writes
        (lying(3, 3), ErrorCode.INVALID_RECORD),
        (lying(1, 1), ErrorCode.INVALID_RECORD),
        (lying(2, 5), ErrorCode.INVALID_RECORD),
        (lying(0, 1), ErrorCode.INVALID_RECORD),
    ],
)
def test_a_batch_that_lies_is_refused_and_nothing_is_written(raw_client, data, code) -> None:
    found = produced(raw_client.request("Produce", 8, produce(data)))
    assert (found["error_code"], found["base_offset"]) == (code, -1)
    assert found["error_message"]
    assert produced(raw_client.request("Produce", 8, produce(GOOD)))["base_offset"] == 0


def test_each_partition_has_its_own_result(raw_client) -> None:
    raw_client.request("CreateTopics", 4, create("two", 2))
    response = raw_client.request("Produce", 7, produce(b"bad", GOOD, GOOD, topic="two"))
    (topic,) = response["responses"]
    assert [one["error_code"] for one in topic["partition_responses"]] == [
        ErrorCode.INVALID_RECORD,
        ErrorCode.NONE,
        ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
    ]
    response = raw_client.request("Produce", 7, produce(GOOD, topic="nope"))
    assert produced(response)["error_code"] == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION


def test_a_partition_that_is_named_twice_gets_both_batches(raw_client) -> None:
    request = produce(GOOD, GOOD)
    request["topic_data"][0]["partition_data"][1]["index"] = 0
    (topic,) = raw_client.request("Produce", 7, request)["responses"]
    assert [one["base_offset"] for one in topic["partition_responses"]] == [0, 2]


def test_invalid_parameters_are_rejected(raw_client) -> None:
    found = produced(raw_client.request("Produce", 7, produce(GOOD, acks=2)))
    assert found["error_code"] == ErrorCode.INVALID_REQUIRED_ACKS
    for version in (0, 1, 2):
        found = produced(raw_client.request("Produce", version, produce(GOOD)))
        assert found["error_code"] == ErrorCode.UNSUPPORTED_VERSION


def test_without_acknowledgements_there_is_no_response_and_the_records_are_there(
    raw_client,
) -> None:
    raw_client.socket.sendall(raw_client.frame("Produce", 7, produce(GOOD, acks=0)))
    raw_client._sent.pop()
    assert produced(raw_client.request("Produce", 7, produce(GOOD)))["base_offset"] == 2


def test_what_was_sent_before_the_client_went_is_appended(broker, raw_client) -> None:
    with RawClient(broker.address) as client:
        client.socket.sendall(
            b"".join(client.frame("Produce", 7, produce(GOOD, acks=0)) for _ in range(20))
        )
    deadline_s = time.monotonic() + 30
    while fetched(raw_client.request("Fetch", 11, fetch(0)))["high_watermark"] < 40:
        assert time.monotonic() < deadline_s


def test_the_largest_timestamp_is_put_right(raw_client) -> None:
    made = encode_records([SimpleRecord(5000, b"k", b"v"), SimpleRecord(9000, b"k", b"w")])
    wrong = raw(finish(made.tail[44:], records=2, timestamps_ms=(5000, 1 << 60)))
    assert produced(raw_client.request("Produce", 7, produce(wrong)))["error_code"] == 0
    found = fetched(raw_client.request("Fetch", 11, fetch(0)))["records"]
    ((_, header),) = walk(found, 0)
    assert (header.max_timestamp_ms, header.base_timestamp_ms) == (9000, 5000)


# -- Fetch ------------------------------------------------------------------------------------


def test_a_batch_passes_through_as_it_was_sent(raw_client) -> None:
    for _ in range(3):
        raw_client.request("Produce", 7, produce(GOOD))
    found = fetched(raw_client.request("Fetch", 11, fetch(0)))["records"]
    batches = list(walk(found, 0))
    assert [header.base_offset for _, header in batches] == [0, 2, 4]
    for at, header in batches:
        assert found[at + 16 : at + header.size] == GOOD[16:]


def test_a_fetch_ends_with_what_it_asked_for(raw_client) -> None:
    for _ in range(10):
        raw_client.request("Produce", 7, produce(GOOD))
    whole = len(GOOD)
    for limit, count in [(1, 1), (whole, 1), (3 * whole - 1, 2), (3 * whole, 3), (1 << 20, 10)]:
        found = fetched(raw_client.request("Fetch", 11, fetch(0, max_bytes=limit)))["records"]
        assert len(list(walk(found, 0))) == count
    # From the middle of a batch: the batch that holds the offset.
    found = fetched(raw_client.request("Fetch", 11, fetch(5, max_bytes=1)))["records"]
    assert next(walk(found, 4))[1].base_offset == 4


def test_a_fetch_out_of_range_gets_the_log_start(raw_client) -> None:
    raw_client.request("Produce", 7, produce(GOOD))
    for offset in (3, 1 << 40, -1):
        found = fetched(raw_client.request("Fetch", 11, fetch(offset)))
        assert (found["error_code"], found["log_start_offset"]) == (
            ErrorCode.OFFSET_OUT_OF_RANGE,
            0,
        )
    found = fetched(raw_client.request("Fetch", 11, fetch(0, topic="nope")))
    assert found["error_code"] == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    found = fetched(raw_client.request("Fetch", 11, fetch(2)))
    assert (found["error_code"], found["records"], found["high_watermark"]) == (0, b"", 2)


def test_a_fetch_waits_for_as_many_bytes_as_it_wants(broker, raw_client) -> None:
    with RawClient(broker.address) as waiting:
        wanted = 3 * len(GOOD)
        waiting.send("Fetch", 11, fetch(0, max_wait_ms=60_000, min_bytes=wanted))
        for _ in range(3):
            raw_client.request("Produce", 7, produce(GOOD))
        assert len(fetched(waiting.receive())["records"]) == wanted
        waiting.send("Fetch", 11, fetch(6, max_wait_ms=300, min_bytes=1 << 20))
        raw_client.request("Produce", 7, produce(GOOD))
        assert len(fetched(waiting.receive())["records"]) == len(GOOD)  # the time was over


def made_again(raw_client: RawClient, *batches: bytes) -> None:
    """Delete the topic, and create it with these batches."""
    only(raw_client.request("DeleteTopics", 3, {"topic_names": ["t"]}), "responses")
    only(raw_client.request("CreateTopics", 4, create()), "topics")
    for sent in batches:
        produced(raw_client.request("Produce", 7, produce(sent)))


def id_of(raw_client: RawClient) -> bytes:
    return only(raw_client.request("Metadata", 12, {"topics": [{"name": "t"}]}), "topics")[
        "topic_id"
    ]


def test_a_fetch_by_id_finds_what_one_by_name_does(raw_client) -> None:
    raw_client.request("Produce", 7, produce(GOOD))
    topic_id = id_of(raw_client)
    by_name = fetched(raw_client.request("Fetch", 12, fetch(0)))
    by_id = raw_client.request("Fetch", 13, fetch(0, topic_id=topic_id))
    assert only(by_id, "responses")["topic_id"] == topic_id
    assert fetched(by_id)["records"] == by_name["records"] != b""
    for changes, code in [
        ({"topic_id": bytes(16)}, ErrorCode.UNKNOWN_TOPIC_ID),
        ({"topic_id": b"x" * 16}, ErrorCode.UNKNOWN_TOPIC_ID),
        ({"partition": 9}, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION),
    ]:
        found = fetched(
            raw_client.request("Fetch", 13, fetch(0, **{"topic_id": topic_id, **changes}))
        )
        assert (found["error_code"], found["records"]) == (code, b""), changes


def test_the_id_of_a_topic_that_was_made_again_gives_nothing_of_the_new_one(raw_client) -> None:
    raw_client.request("Produce", 7, produce(GOOD))
    old = id_of(raw_client)
    made_again(raw_client, GOOD, GOOD)
    for offset in (0, 2, 1 << 40):
        found = fetched(raw_client.request("Fetch", 13, fetch(offset, topic_id=old)))
        assert (found["error_code"], found["records"]) == (ErrorCode.UNKNOWN_TOPIC_ID, b"")
    found = fetched(raw_client.request("Fetch", 13, fetch(2, topic_id=id_of(raw_client))))
    assert (found["error_code"], len(found["records"])) == (ErrorCode.NONE, len(GOOD))


@pytest.mark.parametrize(
    ("version", "code"),
    [(11, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION), (13, ErrorCode.UNKNOWN_TOPIC_ID)],
)
def test_a_fetch_that_waits_mixes_nothing_of_a_topic_made_again_with_the_old_one(
    broker, raw_client, version, code, monkeypatch
) -> None:
    has_read = threading.Event()

    def read(*arguments) -> None:
        _read(*arguments)
        has_read.set()

    raw_client.request("Produce", 7, produce(GOOD))
    topic_id = id_of(raw_client)
    monkeypatch.setattr("millstream.broker.requests.fetch._read", read)
    with RawClient(broker.address) as waiting:
        wait = {"max_wait_ms": 60_000, "min_bytes": 1 << 20}
        waiting.send("Fetch", version, fetch(0, topic_id=topic_id, **wait))
        assert has_read.wait(60)  # a fetch by name that comes later is one of the new topic
        made_again(raw_client, GOOD, GOOD)
        found = fetched(waiting.receive())
        assert (found["error_code"], found["records"]) == (code, b"")


def test_a_waiting_fetch_gets_an_error_when_its_topic_is_deleted(broker, raw_client) -> None:
    with RawClient(broker.address) as waiting:
        waiting.send("Fetch", 11, fetch(0, max_wait_ms=60_000))
        raw_client.request("DeleteTopics", 3, {"topic_names": ["t"], "timeout_ms": 1000})
        assert fetched(waiting.receive())["error_code"] == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION


def test_a_fetch_session_is_refused(raw_client) -> None:
    response = raw_client.request("Fetch", 11, fetch(0, session_id=0, session_epoch=0))
    assert (response["error_code"], response["session_id"]) == (0, 0)
    response = raw_client.request("Fetch", 11, fetch(0, session_id=5, session_epoch=1))
    assert response["error_code"] == ErrorCode.FETCH_SESSION_ID_NOT_FOUND


def test_readers_that_take_nothing_slow_nobody_down_and_hold_little(folder) -> None:
    """Twenty readers leave 8 MiB each lying; another one reads all of it, and producers go on."""
    settings = {"responses_bytes_max": 16 << 20, "stalled_s": 30.0}
    with InProcess(folder, **settings) as broker, RawClient(broker.address) as client:
        client.request("CreateTopics", 4, create())
        big = batch(bytes(1 << 20))
        for _ in range(8):
            assert produced(client.request("Produce", 7, produce(big)))["error_code"] == 0
        stuck = [RawClient(broker.address, receive_bytes=4096) for _ in range(20)]
        for one in stuck:
            one.send("Fetch", 11, fetch(0))
        offset = 0
        while offset < 8:
            found = fetched(client.request("Fetch", 11, fetch(offset)))["records"]
            offset = max(header.next_offset for _, header in walk(found, offset))
        assert produced(client.request("Produce", 7, produce(GOOD)))["base_offset"] == 8
        for one in stuck:
            with one:  # each gets its response once it reads it
                assert fetched(one.receive())["error_code"] == 0


def test_large_requests_wait_for_room_and_all_are_taken(folder) -> None:
    """There is room for three of them at a time."""
    big = batch(bytes(3 << 20))
    with InProcess(folder, requests_bytes_max=10 << 20) as broker:
        with RawClient(broker.address) as client:
            client.request("CreateTopics", 4, create())
        offsets: list[int] = []

        def send() -> None:
            with RawClient(broker.address) as one:
                responses = [one.request("Produce", 7, produce(big)) for _ in range(3)]
                offsets.extend(produced(response)["base_offset"] for response in responses)

        threads = [threading.Thread(target=send) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert sorted(offsets) == list(range(24))


def test_who_announces_much_and_sends_little_keeps_nobody_waiting(folder) -> None:
    """Some send only how much is to come, others enough of it to have room for all of it."""
    settings = {"requests_bytes_max": 10 << 20, "contended_s": 0.2}
    with InProcess(folder, **settings) as broker, RawClient(broker.address) as client:
        client.request("CreateTopics", 4, create())
        announced = struct.pack(">i", 7 << 20)
        idle = [RawClient(broker.address) for _ in range(4)]
        half = [RawClient(broker.address) for _ in range(2)]
        for one in (*idle, *half):
            one.socket.sendall(announced + bytes(8 if one in idle else SMALL_BYTES_MAX))
        for _ in range(10):
            assert produced(client.request("Produce", 7, produce(GOOD)))["error_code"] == 0
        big = produced(client.request("Produce", 7, produce(batch(bytes(3 << 20)))))
        assert big["error_code"] == 0  # once those who had the room were ended
        for one in half:
            with one:
                assert one.is_closed()
        for one in idle:
            one.socket.close()


def test_what_is_sent_behind_a_request_that_waits_is_not_read(folder) -> None:
    settings = {"requests_bytes_max": 2 << 20}
    join = {
        "group_id": "g",
        "session_timeout_ms": 60_000,
        "rebalance_timeout_ms": 60_000,
        "protocol_type": "consumer",
        "protocols": [{"name": "range", "metadata": b""}],
    }
    with (
        InProcess(folder, rebalance_delay_ms=5_000, **settings) as broker,
        RawClient(broker.address) as waiting,
        RawClient(broker.address) as client,
    ):
        waiting.send("JoinGroup", 3, join)
        behind = waiting.frame("Metadata", 1, {"topics": [{"name": "x" * 30_000}] * 2})
        waiting.socket.setblocking(False)
        with suppress(BlockingIOError):
            for _ in range(100):
                waiting.socket.sendall(behind)
        client.socket.settimeout(3)
        for _ in range(3):
            assert client.request("Metadata", 1, {"topics": []})["brokers"]


@pytest.mark.parametrize("name", ["Metadata", "DescribeGroups", "DescribeConfigs", "OffsetFetch"])
def test_what_is_requested_many_times_is_in_the_response_once(broker, raw_client, name) -> None:
    """A few bytes that name a topic of many partitions cause a large response."""
    version, request, answered = {
        "Metadata": (1, {"topics": [{"name": "t"}] * 1000}, "topics"),
        "DescribeGroups": (5, {"groups": ["g"] * 1000}, "groups"),
        "DescribeConfigs": (
            1,
            {"resources": [{"resource_type": 2, "resource_name": "t"}] * 1000},
            "results",
        ),
        "OffsetFetch": (8, {"groups": [{"group_id": "g", "topics": None}] * 1000}, "groups"),
    }[name]
    assert len(raw_client.request(name, version, request)[answered]) == 1


@pytest.mark.parametrize(
    "settings", [{"batch_plain_bytes_max": 1 << 20}, {"batch_records_max": 1000}]
)
def test_a_batch_that_stands_for_too_much_is_refused_before_it_is_unfolded(
    folder, settings
) -> None:
    many = encode_records([SimpleRecord(0, None, bytes(1000)) for _ in range(1100)])
    packed = raw(compress(many, "zstd"))
    assert len(packed) < 10_000
    with InProcess(folder, **settings) as broker, RawClient(broker.address) as client:
        client.request("CreateTopics", 4, create())
        response = produced(client.request("Produce", 8, produce(packed)))
        assert response["error_code"] == ErrorCode.MESSAGE_TOO_LARGE
        assert produced(client.request("Produce", 8, produce(GOOD)))["error_code"] == 0


def test_only_so_many_names_of_producers_are_known(folder) -> None:
    with InProcess(folder, transactional_ids_max=2) as broker, RawClient(broker.address) as client:

        def code(name: str | None) -> int:
            request = {"transactional_id": name, "transaction_timeout_ms": 1000}
            return client.request("InitProducerId", 4, request)["error_code"]

        assert [code(name) for name in ("a", "b", "c", "a", None)] == [
            *(0, 0, ErrorCode.POLICY_VIOLATION),
            *(0, 0),
        ]
        assert code("x" * 1001) == ErrorCode.POLICY_VIOLATION


def test_a_request_that_there_can_never_be_room_for_is_refused(folder) -> None:
    with (
        InProcess(folder, requests_bytes_max=1 << 20) as broker,
        RawClient(broker.address) as client,
    ):
        client.socket.sendall(struct.pack(">i", (1 << 20) + 1))
        assert client.is_closed()


def test_all_that_was_sent_before_the_client_went_is_taken_up(broker, raw_client) -> None:
    """More than may wait for one connection, and the client is gone before they are read."""
    with RawClient(broker.address) as client:
        frames = [client.frame("Produce", 7, produce(GOOD, acks=0)) for _ in range(500)]
        client.socket.sendall(b"".join(frames))
    deadline_s = time.monotonic() + 60
    while fetched(raw_client.request("Fetch", 11, fetch(0)))["high_watermark"] < 1000:
        assert time.monotonic() < deadline_s


@pytest.mark.parametrize("version", [10, 11, 12])
def test_a_topic_is_requested_by_its_id(raw_client, version) -> None:
    (known,) = raw_client.request("Metadata", version, {"topics": None})["topics"]
    stranger = b"\1" * 16
    asked = [{"topic_id": one, "name": None} for one in (known["topic_id"], stranger)]
    found, missing = raw_client.request("Metadata", version, {"topics": asked})["topics"]
    assert found == known
    assert (missing["error_code"], missing["topic_id"]) == (ErrorCode.UNKNOWN_TOPIC_ID, stranger)
    request = {"topics": [{"topic_id": known["topic_id"], "name": None}], "timeout_ms": 1000}
    (gone,) = raw_client.request("DeleteTopics", 6, request)["responses"]
    assert (gone["error_code"], gone["name"]) == (ErrorCode.NONE, "t")
    assert raw_client.request("Metadata", version, {"topics": None})["topics"] == []
