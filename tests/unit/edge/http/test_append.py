"""Events over HTTP: taken, refused with a reason, and acknowledged only when they are in the log."""

from __future__ import annotations

import socket
import threading
from datetime import UTC, datetime
from urllib.parse import urlsplit

import pytest
from edge_client import serving_edge

import millstream as ms
from millstream.edge.http.appender import EventAppender
from millstream.edge.http.request_body import AppendParams, Event, RequestLimits
from millstream.errors import DiskFullError, SyncFailedError

LINES = "application/x-ndjson"


def test_an_event_is_answered_with_its_place(edge, values):
    answer = edge.post("/topics/one", b' {"ad": 7}\n')
    assert answer.status == 200
    assert answer.json == {
        "topic": "one",
        "appended": 1,
        "partition": 0,
        "offset": 0,
        "position": {"one": {"0": 1}},
    }
    assert values("one") == [b'{"ad": 7}']


def test_lines_are_appended_in_their_order_with_keys_times_and_headers(edge, folder):
    body = b'{"u": "a", "at": "2026-01-01T00:00:00Z"}\r\n\n{"u": 17, "at": 1000}\n'
    answer = edge.post(
        "/topics/one?key_field=u&timestamp_field=at", body, LINES, Millstream_Header="trace=17"
    )
    assert answer.json == {"topic": "one", "appended": 2, "position": {"one": {"0": 2}}}
    with ms.connect(folder) as log:
        first, second = log.consumer("one", follow=False)
    assert (first.key, first.timestamp) == (b"a", datetime(2026, 1, 1, tzinfo=UTC))
    assert (second.key, second.timestamp_ms) == (b"17", 1000)
    assert first.headers == (("trace", b"17"),)


def test_a_key_decides_the_partition_as_it_does_for_every_producer(edge, folder):
    with ms.connect(folder) as log, log.producer() as producer:
        places = [producer.send("clicks", b"{}", key=key).result() for key in ("u1", "u2", "ü3")]
    by_header = edge.post("/topics/clicks", b"1", Millstream_Key="u1").json
    by_parameter = edge.post("/topics/clicks?key=%C3%BC3", b"1").json
    by_field = edge.post("/topics/clicks?key_field=u", b'{"u": "u2"}').json
    found = [each["partition"] for each in (by_header, by_field, by_parameter)]
    assert found == [place.partition for place in places]


def test_bytes_are_taken_as_they_are(edge, values):
    assert edge.post("/topics/one", b"\xff\n", "application/octet-stream").status == 200
    assert edge.post("/topics/one", b" text ", "text/plain; charset=UTF-8").status == 200
    assert values("one") == [b"\xff\n", b" text "]


ONE_BAD = b'{"n": 1}\n{"n": \n\n{"n": 3}\n'


def test_one_bad_line_is_named_and_nothing_is_appended(edge, values):
    answer = edge.post("/topics/one", ONE_BAD, LINES)
    assert answer.status == 400
    error = answer.json["error"]
    assert (error["kind"], error["appended"], error["bad"]) == ("BadEvents", 0, 1)
    assert error["message"].startswith("Line 2 is not JSON (")
    assert "Nothing of this request was appended" in error["message"]
    assert "bad=skip" in error["message"]
    assert [(bad["line"], bad["begins"]) for bad in error["bad_lines"]] == [(2, '{"n":')]
    assert values("one") == []


def test_or_the_other_lines_are_appended_if_that_was_asked_for(edge, values):
    answer = edge.post("/topics/one?bad=skip", ONE_BAD, LINES)
    assert answer.status == 200
    assert (answer.json["appended"], answer.json["bad"]) == (2, 1)
    assert answer.json["bad_lines"][0]["line"] == 2
    assert values("one") == [b'{"n": 1}', b'{"n": 3}']
    assert edge.get("/status").json["http"]["bad_events"] == 1


@pytest.mark.parametrize(
    ("path", "body", "kind", "status", "says"),
    [
        ("/topics/one", b"", "application/json", 400, "is not JSON"),
        ("/topics/one", b"\n \n", LINES, 400, "has no event"),
        ("/topics/one", b"nan", "application/json", 400, "is not JSON"),
        ("/topics/one", b'{"a": NaN}', "application/json", 400, "NaN is not a JSON number"),
        (
            "/topics/one",
            b'{"a": -Infinity}',
            "application/json",
            400,
            "-Infinity is not a JSON number",
        ),
        ("/topics/one", b"[" * 100_000, "application/json", 400, "nested too deeply"),
        ("/topics/one", b"9" * 5000, "application/json", 400, "is not JSON"),
        ("/topics/one", b'"\xff"', "application/json", 400, "is not UTF-8 (byte 1)"),
        ("/topics/one", '{"a":1}'.encode("utf-16"), "application/json", 400, "is not UTF-8"),
        ("/topics/one", b"\xef\xbb\xbf{}", "application/json", 400, "is not JSON"),
        ("/topics/one", b"{}{}", "application/json", 400, "Extra data"),
        ("/topics/one?key_field=u", b'{"v": 1}', "application/json", 400, "in the field 'u'"),
        ("/topics/one?key_field=u", b'{"u": true}', "application/json", 400, "in the field 'u'"),
        ("/topics/one?key_field=u", b"7", "application/json", 400, "in the field 'u'"),
        (
            "/topics/one?key_field=u",
            b'{"u": "\\ud800"}',
            "application/json",
            400,
            "in the field 'u'",
        ),
        ("/topics/one?timestamp_field=at", b'{"at": "x"}', "application/json", 400, "has no time"),
        ("/topics/one?key_feild=u", b"{}", "application/json", 400, "a parameter is 'key_feild'"),
        ("/topics/one?key=a&key_field=u", b"{}", "application/json", 400, "give one of them"),
        ("/topics/one?key=a&key=b", b"{}", "application/json", 400, "given twice"),
        ("/topics/one?bad=drop", b"{}", "application/json", 400, 'Choose "refuse" or "skip"'),
        ("/topics/one?partition=x", b"{}", "application/json", 400, "give a number"),
        ("/topics/one?partition=7", b"{}", "application/json", 400, "no partition 7"),
        ("/topics/one?key_field=u", b"{}", "text/plain", 400, "needs events in JSON"),
        ("/topics/none", b"{}", "application/json", 404, "no topic 'none'"),
        ("/topics/one", b"{}", "application/x-www-form-urlencoded", 415, "say what the body is"),
        ("/topics/one", b"{}", "application/json; charset=latin-1", 415, "in UTF-8"),
        ("/topics/one/two", b"{}", "application/json", 404, "There is nothing to POST"),
    ],
)
def test_what_is_malformed_is_answered_with_what_to_correct(
    standing, path, body, kind, status, says
):
    edge, ends = standing
    answer = edge.post(path, body, kind)
    assert (answer.status, says in answer.json["error"]["message"]) == (status, True), answer.json
    assert ends() == [0]


@pytest.fixture(scope="module")
def standing(tmp_path_factory):
    """Return an edge for many requests that append nothing, and what tells where its topic ends."""
    folder = tmp_path_factory.mktemp("standing") / "data"
    with ms.connect(folder) as log:
        log.create_topic("one")
        with serving_edge(folder) as up:
            yield up, lambda: log.end_offsets("one")


def test_more_of_what_a_request_can_say_wrongly(edge, values):
    for headers, status in (
        ({"Idempotency_Key": "x" * 201}, 400),
        ({"Idempotency_Key": ""}, 400),
        ({"Millstream_Timestamp": "soon"}, 400),
        ({"Millstream_Header": "no value"}, 400),
        ({"Content_Encoding": "gzip"}, 415),
    ):
        assert edge.post("/topics/one", b"{}", **headers).status == status, headers
    assert edge.ask("PUT", "/topics/one", b"{}").status == 405
    assert values("one") == []


def test_what_is_too_large_is_refused_before_anything_is_appended(folder, edge_on, values):
    limits = RequestLimits(event_bytes_max=20, body_bytes_max=100, lines_max=3)
    with edge_on(folder, limits=limits) as edge:
        answer = edge.post("/topics/one", b'{"a": "' + b"x" * 20 + b'"}')
        assert (answer.status, "an event may have 20" in answer.json["error"]["message"]) == (
            400,
            True,
        )
        assert edge.post("/topics/one", b"1\n" * 51, LINES).status == 413
        assert edge.post("/topics/one", b"1\n" * 4, LINES).json["error"]["kind"] == "TooManyLines"
        chunked = edge.ask("POST", "/topics/one", iter([b"1\n"] * 60), Content_Type=LINES)
        assert chunked.json["error"]["kind"] == "BodyTooLarge"
        assert values("one") == []
        assert edge.post("/topics/one", b"1\n" * 3, LINES).json["appended"] == 3


# Overload.


def test_beyond_what_may_be_on_its_way_it_says_to_come_later(folder, edge_on, values):
    """A request that has said how much it brings, and has not brought it, takes the room."""
    with edge_on(folder, in_flight_bytes=400) as edge:
        place = urlsplit(edge.url)
        with socket.create_connection((place.hostname, place.port), timeout=60) as slow:
            slow.sendall(
                b"POST /topics/one HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: text/plain\r\n"
                b"Content-Length: 90\r\n\r\n" + b"x" * 10
            )
            while edge.get("/status").json["http"]["appending_bytes"] < 360:
                pass
            refused = edge.post("/topics/one", b'"' + b"y" * 20 + b'"')
            assert (refused.status, refused.headers["retry-after"]) == (429, "1")
            assert "nothing of this one was appended" in refused.json["error"]["message"]
            slow.sendall(b"x" * 80)
            assert slow.recv(1000).startswith(b"HTTP/1.1 200")
        assert edge.post("/topics/one", b'"z"').status == 200
        assert edge.get("/status").json["http"]["refused_for_load"] == 1
    assert values("one") == [b"x" * 90, b'"z"']


def test_lines_take_room_by_their_number(folder, edge_on):
    """Many lines of one byte are more on the way than their bytes."""
    with edge_on(folder, in_flight_bytes=5000) as edge:
        assert edge.post("/topics/one", b"1\n" * 100, LINES).status == 200  # alone it has room
        place = urlsplit(edge.url)
        with socket.create_connection((place.hostname, place.port), timeout=60) as slow:
            slow.sendall(
                b"POST /topics/one HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: text/plain\r\n"
                b"Content-Length: 100\r\n\r\n"
            )
            while not edge.get("/status").json["http"]["appending_bytes"]:
                pass
            assert edge.post("/topics/one", b"1\n" * 100, LINES).status == 429
            assert edge.post("/topics/one", b"1\n" * 3, LINES).status == 200


def test_under_overload_what_was_acknowledged_is_there_and_nothing_else(folder, edge_on, values):
    """Threads that send more than there is room for, and count the status codes."""
    statuses: dict[int, int] = {}
    with edge_on(folder, requests_max=2) as edge:

        def send(worker):
            for n in range(worker, 160, 8):
                statuses[n] = edge.post("/topics/one", b'{"n": %d}' % n).status

        threads = [threading.Thread(target=send, args=(worker,)) for worker in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        counted = edge.get("/status").json["http"]
    taken = sorted(n for n, status in statuses.items() if status == 200)
    assert set(statuses.values()) <= {200, 429}
    assert len(statuses) == 160
    assert sorted(int(value[6:-1]) for value in values("one")) == taken
    assert counted["refused_for_load"] == 160 - len(taken)


def test_a_full_disk_is_answered_with_503_and_the_next_request_is_as_before(
    edge, monkeypatch, values
):
    full = DiskFullError("there is no room")

    def refuse(*args, **kwargs):
        raise full

    with monkeypatch.context() as disk:
        disk.setattr("millstream.client.folder.producer.FolderProducer.send", refuse)
        answer = edge.post("/topics/one", b"1")
    assert (answer.status, answer.headers["retry-after"]) == (503, "1")
    assert answer.json["error"]["kind"] == "DiskFullError"
    assert edge.post("/topics/one", b"2").status == 200
    assert values("one") == [b"2"]


def test_what_ends_all_appending_ends_the_edge(folder, edge_on, monkeypatch):
    failures = []
    with edge_on(folder, failures=failures) as edge:

        def fail(*args, **kwargs):
            raise SyncFailedError("the disk failed")

        with monkeypatch.context() as disk:
            disk.setattr("millstream.client.folder.producer.FolderProducer.send", fail)
            assert edge.post("/topics/one", b"1").status == 500
        assert failures == [1]
        assert isinstance(edge.serving.failed(), SyncFailedError)


# Idempotency keys.


def test_a_request_with_a_key_is_appended_once_across_restarts(folder, edge_on, values):
    body = b'{"n": 1}\n{"n": 2}\n'
    with edge_on(folder) as edge:
        first = edge.post("/topics/one", body, LINES, Idempotency_Key="order-17").json
        again = edge.post("/topics/one", body, LINES, Idempotency_Key="order-17").json
        assert first == {"topic": "one", "appended": 2, "position": {"one": {"0": 2}}}
        assert again == {"topic": "one", "appended": 0, "duplicate": True}
        assert edge.get("/status").json["http"]["duplicates"] == 1
        # A key belongs to its topic, and what was refused has not used it up.
        assert edge.post("/topics/clicks", b"{", Idempotency_Key="order-17").status == 400
        assert (
            edge.post("/topics/clicks?partition=9", b"1", Idempotency_Key="order-17").status == 400
        )
        assert edge.post("/topics/clicks", b"1", Idempotency_Key="order-17").json["appended"] == 1
    with edge_on(folder) as edge:
        assert edge.post("/topics/one", body, LINES, Idempotency_Key="order-17").json["duplicate"]
        assert edge.post("/topics/clicks", b"1", Idempotency_Key="order-17").json["duplicate"]
    assert values("one") == [b'{"n": 1}', b'{"n": 2}']
    assert values("clicks") == [b"1"]


def test_requests_with_one_key_at_the_same_time_are_appended_once(edge, values):
    answers = []

    def send():
        answers.append(edge.post("/topics/one", b"1", Idempotency_Key="k").json)

    threads = [threading.Thread(target=send) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(answer["appended"] for answer in answers) == [0, 0, 0, 0, 0, 1]
    assert values("one") == [b"1"]


def test_keys_hold_over_midnight_and_are_forgotten_after_two_days(folder):
    when = datetime(2026, 1, 1, 23, 59, tzinfo=UTC)
    with ms.connect(folder) as log:
        appender = EventAppender(log, buffer_bytes=1 << 20, now=lambda: when)

        def append():
            return appender.append_once(
                "one", "k", [Event(1, b"1", None, None)], AppendParams()
            ).appended

        assert append() == 1
        when = datetime(2026, 1, 2, 23, 58, tzinfo=UTC)
        assert append() == 0
        assert len(log.fences("edge/")) == 1
        when = datetime(2026, 1, 3, 0, 1, tzinfo=UTC)
        assert append() == 1
        assert next(iter(log.fences("edge/"))).startswith("edge/2026-01-03/")
        appender.close()
