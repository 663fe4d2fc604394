"""The client of a schema registry: what is asked how often, and what becomes of faults."""

import base64
import logging

import http_service
import pytest
import registry_server

from millstream.errors import ConfigError, RetriableError
from millstream.schema_registry import RegisteredSchema, SchemaRegistry

UNAVAILABLE = (503, b"<html>")


class Clock:
    """Time that passes while it is slept."""

    def __init__(self):
        self.now_s = 0.0
        self.slept = []

    def sleep(self, seconds):
        self.slept.append(seconds)
        self.now_s += seconds

    def monotonic_s(self):
        return self.now_s


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def server():
    with registry_server.serving() as started:
        started.add("JSON", "{}", number=7)
        yield started


def client(server, clock, path=""):
    return SchemaRegistry(server.url + path, sleep=clock.sleep, monotonic_s=clock.monotonic_s)


SEVEN = RegisteredSchema(7, "JSON", "{}")
UNKNOWN = "the value is of the schema {}, which the registry does not know"


def test_each_number_is_asked_for_once(server, clock):
    registry = client(server, clock)
    assert registry.schemas([7, 7]) == registry.schemas({7}) == {7: SEVEN}
    assert registry.schemas([]) == {}
    assert server.targets == ["/schemas/ids/7"]
    assert clock.slept == []


def test_an_unknown_number_is_asked_for_twice_and_again_after_a_while(server, clock):
    registry = client(server, clock)
    numbers = [8, 9, (1 << 31), (1 << 32) - 1]
    for _ in range(2):
        assert registry.schemas(numbers) == {n: UNKNOWN.format(n) for n in numbers}
    assert server.targets == ["/schemas/ids/8", "/schemas/ids/9"] * 2
    assert clock.slept == [1.0]  # for all of them
    clock.sleep(31)
    server.add("JSON", "{}", number=8)
    assert isinstance(registry.schemas([8])[8], RegisteredSchema)


def test_a_number_that_a_registry_learns_a_moment_later_is_known(server, clock):
    clock.sleep = lambda _seconds: server.add("JSON", "{}", number=8)
    registry = client(server, clock)
    assert isinstance(registry.schemas([8])[8], RegisteredSchema)


@pytest.mark.parametrize(
    "fault", [UNAVAILABLE, (429, {}), (408, b""), (500, {"error_code": 50001})]
)
def test_a_registry_that_does_not_respond_is_asked_again_with_one_line(
    server, clock, caplog, fault
):
    server.faults = [fault] * 5
    with caplog.at_level(logging.WARNING):
        assert client(server, clock).schemas([7]) == {7: SEVEN}
    assert clock.slept == [0.5, 1, 2, 4, 8]
    (line,) = caplog.messages
    assert (
        line
        == f"The schema registry at {server.url} responds {fault[0]}. It is asked again for 60 seconds."
    )


def test_after_a_minute_the_batch_fails_and_the_next_one_asks_anew(server, clock, caplog):
    registry = client(server, clock)
    server.faults = [UNAVAILABLE] * 1000
    with pytest.raises(
        RetriableError, match=r"responds 503\. It was asked for 60 seconds; nothing"
    ):
        registry.schemas([7])
    assert 45 < sum(clock.slept) <= 60
    server.faults = []
    assert registry.schemas([7]) == {7: SEVEN}


def test_a_registry_that_is_not_there_is_asked_again(clock):
    with registry_server.serving() as gone:
        url = gone.url
    registry = SchemaRegistry(url, sleep=clock.sleep, monotonic_s=clock.monotonic_s)
    with pytest.raises(RetriableError, match="does not respond"):
        registry.schemas([7])


def test_a_connection_that_breaks_in_a_body_is_asked_again(clock):
    def talk(connection):
        connection.recv(4096)
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{")

    with http_service.raw_serving(talk) as url:
        registry = SchemaRegistry(url, sleep=clock.sleep, monotonic_s=clock.monotonic_s)
        with pytest.raises(RetriableError, match="does not respond"):
            registry.schemas([7])


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ((401, {"error_code": 401}), "it refuses who asks"),
        ((403, b""), "it refuses who asks"),
        ((404, b"<html>"), "responds 404 to GET /schemas/ids/7, as no schema registry does"),
        ((404, {"error_code": 404}), "as no schema registry does"),
        ((302, b"", {"Location": "http://127.0.0.1:1/"}), "responds 302"),
        ((200, b"<html>"), "responds 200"),
        ((200, [1]), "describes the schema 7 in another form"),
        ((200, {"schema": 5}), "gave a schema without its text"),
        (
            (200, {"schema": "{}", "references": [{"name": "x"}]}),
            "describes the schema 7 in another form",
        ),
    ],
)
def test_what_is_no_registry_stops_the_job(server, clock, fault, said):
    server.faults = [fault] * 2
    with pytest.raises(ConfigError, match=said):
        client(server, clock).schemas([7])
    assert clock.slept == []


def test_user_and_password_are_sent_and_shown_nowhere(server, clock, monkeypatch):
    monkeypatch.setenv("REGISTRY_PASSWORD", "p@ss/word")
    url = server.url.replace("http://", "http://ann:${env:REGISTRY_PASSWORD}@")
    registry = SchemaRegistry(url, sleep=clock.sleep)
    registry.schemas([7])
    sent = server.service.asked[0].headers["Authorization"]
    assert base64.b64decode(sent.removeprefix("Basic ")) == b"ann:p@ss/word"
    server.faults = [(401, {})]
    with pytest.raises(ConfigError) as raised:
        registry.schemas([8])
    assert not any(secret in str(raised.value) for secret in ("p@ss", "p%40ss", "ss/word"))
    assert "ann" not in registry.shown


def test_a_registry_may_be_below_a_path(server, clock):
    with pytest.raises(ConfigError, match="as no schema registry does"):
        client(server, clock, "/apis/ccompat/v7/").schemas([7])
    assert server.targets == ["/apis/ccompat/v7/schemas/ids/7"]


def test_protobuf_as_text_alone_is_refused(server, clock):
    server.knows_serialized = False
    server.add("PROTOBUF", 'syntax = "proto3"; message M {}', number=8)
    with pytest.raises(ConfigError, match="One is needed that knows format=serialized"):
        client(server, clock).schemas([8])
