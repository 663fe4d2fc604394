"""Records as server-sent events: from any position, gone on from, bounded, and told when they end."""

from __future__ import annotations

import json
import socket
import time
from contextlib import contextmanager
from http.client import HTTPConnection
from urllib.parse import urlsplit

import pytest

import millstream as ms
from millstream.edge.http import event_streams

WAIT_S = 60


class Stream:
    """A connection to a stream; ``next`` gives the next event as id, kind and data."""

    def __init__(self, url, path, **headers):
        place = urlsplit(url)
        self.connection = HTTPConnection(place.hostname, place.port, timeout=WAIT_S)
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        self.connection.request("GET", path, headers=named)
        self.answer = self.connection.getresponse()
        self.comments = 0

    def next(self):
        found = {}
        while True:
            line = self.answer.readline().decode()
            assert line, "the stream has ended"
            if line == "\n":
                if "data" in found:
                    return found.get("id"), found.get("event"), json.loads(found["data"])
                found = {}
            elif line.startswith(":"):
                self.comments += 1
            else:
                name, _, value = line.rstrip("\n").partition(": ")
                found[name] = value

    def values(self, count):
        found = [self.next() for _ in range(count)]
        assert [event for event in found if "value" not in event[2]] == []
        return [data["value"] for _, _, data in found]


@pytest.fixture
def stream(edge):
    with streamed(edge) as one:
        yield one


@contextmanager
def streamed(edge):
    opened = []

    def one(path, **headers):
        opened.append(Stream(edge.url, path, **headers))
        return opened[-1]

    yield one
    for each in opened:
        each.connection.close()


def post(edge, topic, *values, **options):
    body = "\n".join(map(json.dumps, values)).encode()
    answer = edge.post(f"/topics/{topic}", body, "application/x-ndjson", **options)
    assert answer.status == 200, answer.json


def id_of(folder, topic):
    with ms.connect(folder) as log:
        return log.topics()[topic].topic_id


def make_anew(folder, topic, records):
    """Delete a topic, and create it with more records than the old one had."""
    with ms.connect(folder) as log:
        log.delete_topic(topic)
        log.create_topic(topic)
        with log.producer() as producer:
            for number in range(records):
                producer.send(topic, number)


def test_a_stream_begins_where_it_is_told_to(edge, stream):
    post(edge, "one", 0, 1, 2)
    assert stream("/topics/one/events?from=earliest").values(3) == [0, 1, 2]
    assert stream("/topics/one/events?from=1").values(2) == [1, 2]
    assert stream("/topics/one/events?from=0:2").values(1) == [2]
    assert stream("/topics/one/events?from=2000-01-01T00:00").values(1) == [0]
    newest = stream("/topics/one/events")
    assert newest.answer.headers["content-type"].startswith("text/event-stream")
    post(edge, "one", 3)
    assert newest.values(1) == [3]


def test_an_event_has_all_of_its_record(edge, stream, folder):
    with ms.connect(folder) as log, log.producer() as producer:
        producer.send("one", None, key="k", timestamp_ms=1000, headers={"h": b"\xff"}).result()
        producer.send("one", b"\xff").result()
    reading = stream("/topics/one/events?from=earliest")
    name, kind, first = reading.next()
    assert (name, kind) == (f"0:1@{id_of(folder, 'one')}", None)
    assert first == {
        "topic": "one",
        "partition": 0,
        "offset": 0,
        "timestamp": "1970-01-01T00:00:01.000+00:00",
        "timestamp_ms": 1000,
        "key": "k",
        "value": None,
        "headers": [{"name": "h", "value_base64": "/w=="}],
    }
    assert reading.next()[2]["value_base64"] == "/w=="


def test_last_event_id_goes_on_in_every_partition_and_misses_nothing(edge, stream):
    post(edge, "clicks?partition=0", *range(5))
    post(edge, "clicks?partition=1", *range(10, 15))
    reading, seen = stream("/topics/clicks/events?from=earliest"), []
    for _ in range(10):
        name, _, record = reading.next()
        seen.append(record["value"])
        reading.connection.close()
        # As a browser comes back: the same address, and the id that it had last.
        reading = stream("/topics/clicks/events?from=earliest", Last_Event_ID=name)
    assert sorted(seen) == [*range(5), *range(10, 15)]
    assert [n for n in seen if n < 10] == list(range(5))
    assert [n for n in seen if n >= 10] == list(range(10, 15))
    post(edge, "clicks?partition=1", 99)
    assert reading.values(1) == [99]


def test_one_partition_can_be_read_alone(edge, stream, folder):
    post(edge, "clicks?partition=0", 1)
    post(edge, "clicks?partition=1", 2)
    name, _, record = stream("/topics/clicks/events?from=earliest&partition=1").next()
    assert (name, record["value"]) == (f"1:1@{id_of(folder, 'clicks')}", 2)
    assert stream("/topics/clicks/events?from=0&partition=1").values(1) == [2]


def test_partitions_that_are_added_are_read_too(edge, stream, folder):
    reading = stream("/topics/one/events")
    with ms.connect(folder) as log:
        log.alter_topic("one", partitions=2)
    post(edge, "one?partition=1", 7)
    assert reading.values(1) == [7]


@pytest.mark.parametrize(
    ("path", "status", "says"),
    [
        ("/topics/none/events", 404, "no topic 'none'"),
        ("/topics/one/events?from=7", 410, "holds [0, 1)"),
        ("/topics/one/events?from=0:7", 410, "holds [0, 1)"),
        ("/topics/clicks/events?from=0", 400, "has 2 partitions"),
        ("/topics/one/events?partition=3", 400, "no partition 3"),
        ("/topics/one/events?partition=-1", 400, "give a number"),
        ("/topics/one/events?from=now", 400, "give earliest, latest"),
        ("/topics/one/events?form=earliest", 400, "a parameter is 'form'"),
    ],
)
def test_a_position_that_is_none_is_said_to_be(edge, path, status, says):
    post(edge, "one", 1)
    answer = edge.get(path)
    assert (answer.status, says in answer.json["error"]["message"]) == (status, True), answer.json


def test_what_retention_has_removed_is_said_to_be_gone(edge, folder):
    post(edge, "one", *range(5))
    with ms.connect(folder) as log:
        log.delete_records("one", 0, 3)
    answer = edge.get("/topics/one/events", Last_Event_ID=f"0:1@{id_of(folder, 'one')}")
    assert answer.status == 410
    assert (answer.json["error"]["start"], answer.json["error"]["end"]) == (3, 5)


def test_a_topic_made_anew_ends_its_streams(edge, stream, folder):
    post(edge, "one", 1, 2)
    reading = stream("/topics/one/events?from=earliest")
    reading.values(2)
    make_anew(folder, "one", 5)
    name, kind, told = reading.next()
    assert (name, kind) == (None, "gone")
    assert told["kind"] in {"UnknownTopicError", "TopicRecreatedError"}  # it may see it deleted


def test_the_id_of_an_event_of_a_topic_that_was_made_anew_is_refused(edge, stream, folder):
    post(edge, "one", 1, 2)
    first, *_ = stream("/topics/one/events?from=earliest").next()
    make_anew(folder, "one", 5)
    for answer in (
        edge.get("/topics/one/events", Last_Event_ID=first),
        edge.get(f"/topics/one/events?from={first}"),
    ):
        assert (answer.status, answer.json["error"]["kind"]) == (410, "TopicRecreatedError")
    assert stream("/topics/one/events?from=earliest").values(1) == [0]  # the others are not held up


@pytest.mark.parametrize("given", ["0:1", "17", "earliest", "0:1@", "0:1@" + "g" * 32])
def test_a_last_event_id_that_is_none_of_ours_is_refused(edge, given):
    answer = edge.get("/topics/one/events", Last_Event_ID=given)
    assert (answer.status, "Last-Event-ID" in answer.json["error"]["message"]) == (400, True)


def test_silence_is_broken_by_comments(folder, edge_on):
    with edge_on(folder, heartbeat_s=0.05) as edge, streamed(edge) as stream:
        reading = stream("/topics/one/events")
        while not reading.answer.readline().startswith(b":"):
            pass
        post(edge, "one", 1)
        assert reading.values(1) == [1]


def test_a_reader_that_does_not_read_holds_up_nobody_and_costs_little(edge, stream, monkeypatch):
    """32 MB are before it, of which the server reads ahead no more than sockets take."""
    value = "x" * 100_000
    for _ in range(20):
        post(edge, "one", *[value] * 16)
    place = urlsplit(edge.url)
    with socket.socket() as lazy:
        lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        lazy.connect((place.hostname, place.port))
        lazy.sendall(b"GET /topics/one/events?from=earliest HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        assert lazy.recv(100).startswith(b"HTTP/1.1 200")
        assert len(stream("/topics/one/events?from=earliest").values(320)) == 320
        taken, before = edge.get("/status").json["http"]["streamed_bytes"], -1
        while taken != before:  # until the lazy one's sockets are full
            time.sleep(0.3)
            taken, before = edge.get("/status").json["http"]["streamed_bytes"], taken
        of_the_quick = 320 * 100_000
        assert taken - of_the_quick < 12e6
        assert edge.get("/status").json["http"]["streams_open"] == 2
    post(edge, "one", 1)
    deadline_s = time.monotonic() + WAIT_S
    while edge.get("/status").json["http"]["streams_open"] > 1:
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def test_many_small_records_come_in_parts(edge, stream, monkeypatch):
    monkeypatch.setattr(event_streams, "RECORDS_AT_ONCE", 7)
    post(edge, "one", *range(100))
    assert stream("/topics/one/events?from=earliest").values(100) == list(range(100))


def test_there_are_no_more_streams_than_there_may_be(folder, edge_on):
    with edge_on(folder, subscribers_max=1) as edge, streamed(edge) as stream:
        post(edge, "one", 1)
        stream("/topics/one/events?from=earliest").values(1)
        refused = edge.get("/topics/one/events")
        assert (refused.status, refused.headers["retry-after"]) == (503, "1")


def test_streams_end_with_the_server(folder, edge_on):
    with edge_on(folder) as edge, streamed(edge) as stream:
        reading = stream("/topics/one/events?from=earliest")
        post(edge, "one", 1)
        reading.values(1)
    assert reading.answer.read() == b""


def test_aborted_records_are_not_seen_and_markers_are_passed(edge, stream, folder):
    with ms.connect(folder) as log, log.producer(transactional_id="t") as producer:
        with pytest.raises(KeyError), producer.transaction():
            producer.send("one", 1)
            raise KeyError
        with producer.transaction():
            producer.send("one", 2)
    post(edge, "one", 3)
    assert stream("/topics/one/events?from=earliest").values(2) == [2, 3]
