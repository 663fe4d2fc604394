"""AMQP as a source: by the contract, and what a message becomes, refusals, TLS and kills; on a real broker."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import ssl
import struct
import subprocess
import sys
import time
import uuid
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime

import certificate
import pytest
import rabbitmq_server

import millstream as ms
from millstream.client import connect
from millstream.connectors.amqp_stored import REMEMBERED, StoredMessages
from millstream.connectors.connector import BYTES_MAX
from millstream.errors import ConfigError, RetriableError
from millstream.testing.connectors import SourceContract

exceptions = pytest.importorskip(
    "pika.exceptions", reason="the client of AMQP is not installed here"
)
_WAIT_S = 120.0


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with rabbitmq_server.start(tmp_path_factory.mktemp("rabbit"), certificate.write) as started:
        yield started


@dataclass
class Queue:
    """A durable queue that no other test has."""

    server: rabbitmq_server.RabbitServer
    prefetch: int = 1000

    def __post_init__(self):
        self.name = uuid.uuid4().hex
        with self.server.channel() as channel:
            channel.queue_declare(self.name, durable=True)

    def connector(self):
        return replace(
            ms.amqp(self.server.url, self.name, prefetch=self.prefetch),
            records_max=7,
        )

    def put(self, events):
        self.server.publish(self.name, [json.dumps(event).encode() for event in events])

    def put_bad(self):
        return 0

    @contextmanager
    def down(self):
        self.server.kill()
        yield
        self.server.start()


@pytest.mark.long
class TestAmqp(SourceContract):
    rounds = 6

    @pytest.fixture(autouse=True)
    def _server(self, server):
        self.server = server

    @contextmanager
    def outside(self, folder):
        yield Queue(self.server)


class QueueOfIds(Queue):
    """Its messages have ids, so each is once in the topic."""

    def connector(self):
        return replace(super().connector(), guarantee="each once")  # what the suite is to ask for

    def put(self, events):
        bodies = [json.dumps(event).encode() for event in events]
        self.server.publish(
            self.name, [(body, {"message_id": uuid.uuid4().hex}) for body in bodies]
        )


class TestAmqpOfMessagesWithIds(SourceContract):
    rounds = 6

    @pytest.fixture(autouse=True)
    def _server(self, server):
        self.server = server

    @contextmanager
    def outside(self, folder):
        yield QueueOfIds(self.server, prefetch=20)


@pytest.fixture
def queue(server):
    return Queue(server)


def run(queue, log, **options):
    connector = replace(ms.amqp(queue.server.url, queue.name), **options)
    return ms.source(connector, topic="events", to=log).run(until="caught-up")


def rows(log):
    with connect(log) as opened:
        columns = ("key", "value", "headers", "timestamp")
        return opened.read("events", 0, columns=columns).to_pylist()


def values(log):
    return [row["value"] for row in rows(log)]


def test_a_message_is_a_record_with_its_routing_key_time_and_headers(queue, tmp_path):
    made_s = 1_700_000_000
    given = {
        "headers": {
            "text": "größer",
            "raw": b"\xff",
            "n": 7,
            "none": None,
            "ok": True,
            "list": [1, "a"],
        },
        "message_id": "m-1",
        "timestamp": made_s,
        "content_type": "application/json",
    }
    queue.server.publish(queue.name, [(b"\xff\x00", given), b""])
    run(queue, tmp_path / "log", clock_ms=lambda: 5000)
    first, second = rows(tmp_path / "log")
    key = queue.name.encode()
    assert (first["key"], first["value"]) == (key, b"\xff\x00")
    assert first["timestamp"] == datetime.fromtimestamp(made_s, UTC)
    assert [(header["key"], header["value"]) for header in first["headers"]] == [
        ("text", "größer".encode()),
        ("raw", b"\xff"),
        ("n", b"7"),
        ("none", b"null"),
        ("ok", b"true"),
        ("list", b'[1, "a"]'),
        ("amqp-exchange", b""),
        ("amqp-routing-key", key),
        ("amqp-message-id", b"m-1"),
        ("amqp-content-type", b"application/json"),
    ]
    assert (second["value"], second["timestamp"]) == (b"", datetime.fromtimestamp(5, UTC))
    assert [header["key"] for header in second["headers"]] == ["amqp-exchange", "amqp-routing-key"]


def test_names_that_are_no_utf8_are_kept_as_bytes(queue, tmp_path):
    with queue.server.channel() as channel:
        channel.exchange_declare(queue.name, "fanout")
        channel.queue_bind(queue.name, queue.name)
    queue.server.publish(
        b"\xfe", [(b"a", {"message_id": b"\xff", "headers": {b"\xfd": 1}})], exchange=queue.name
    )
    run(queue, tmp_path / "log")
    [row] = rows(tmp_path / "log")
    assert row["key"] == b"\xfe"
    assert [header["value"] for header in row["headers"]] == [
        b"1",
        queue.name.encode(),
        b"\xfe",
        b"\xff",
    ]


def test_a_message_that_comes_again_is_left_out_only_if_its_bytes_are_the_same(queue, tmp_path):
    same = {"message_id": "always the same"}
    queue.server.publish(queue.name, [(b"1", same), (b"2", same), (b"1", same), b"1", b"1"])
    run(queue, tmp_path / "log")
    assert values(tmp_path / "log") == [b"1", b"2", b"1", b"1"]
    with connect(tmp_path / "log") as log:
        positions = log.read("events.positions", 0, columns=("value",)).column(0).to_pylist()
    assert b'"repeated":1' in b"".join(value or b"" for value in positions).replace(b" ", b"")


def test_the_last_messages_are_known_however_they_were_divided_into_batches():
    chance = random.Random(7)
    names = [n.to_bytes(8, "big") for n in range(REMEMBERED * 2)]
    positions, at = {}, 0
    while at < len(names):
        stored, end = StoredMessages("q", positions), at + chance.choice((1, 30, 1024, 9000))
        assert all(map(stored.is_new, names[at:end]))
        positions |= json.loads(json.dumps(stored.positions()))
        at = end
    again = StoredMessages("q", positions)
    assert not any(map(again.is_new, names[-REMEMBERED:]))
    assert again.positions() == {"q": positions["q"] | {"repeated": REMEMBERED}}
    assert all(map(again.is_new, names[: REMEMBERED // 2]))  # it does not remember all


def test_a_batch_and_what_is_out_are_bounded(queue, tmp_path):
    queue.server.publish(queue.name, [b"x" * (BYTES_MAX // 4)] * 12)
    reader = ms.amqp(queue.server.url, queue.name, prefetch=8).open({})
    sizes = []
    try:
        while sum(sizes) < 12:
            batch = reader.read(_WAIT_S)
            assert len(reader._messages) + len(batch.values) <= 8
            reader.stored(batch)
            sizes.append(len(batch.values))
    finally:
        reader.close()
    assert max(sizes) <= 4


def test_a_message_that_is_no_record_is_a_dead_letter(queue, tmp_path, monkeypatch):
    monkeypatch.setattr("millstream.connectors.amqp_source._MESSAGE_BYTES_MAX", 1000)
    queue.server.publish(queue.name, [b"1", (b"x" * 1001, {"message_id": "big"}), b"2"])
    assert run(queue, tmp_path / "log").dead == 1
    assert values(tmp_path / "log") == [b"1", b"2"]
    with connect(tmp_path / "log") as log:
        [letter] = log.read("events.dead", 0, columns=("headers",)).column(0).to_pylist()
    said = {header["key"]: header["value"].decode() for header in letter}
    assert "it has 1,001 bytes" in said["reason"]
    assert "message 'big'" in said["where"]


def test_headers_that_the_client_cannot_decode_are_one_error(queue, tmp_path, monkeypatch):
    import pika.data

    encode = pika.data.encode_value

    def encode_late(pieces, value):
        if value != 2**60:
            return encode(pieces, value)
        pieces.append(struct.pack(">cQ", b"T", value))  # a time, long after the year 9999
        return 9

    monkeypatch.setattr(pika.data, "encode_value", encode_late)
    queue.server.publish(queue.name, [(b"1", {"headers": {"x": 2**60}})])
    with pytest.raises(ConfigError, match="headers cannot be decoded"):
        run(queue, tmp_path / "log")


def test_what_a_broker_refuses_is_an_error_and_one_that_is_away_is_tried_again(queue, monkeypatch):
    url, name = queue.server.url, queue.name
    with pytest.raises(ConfigError, match=r"no queue 'absent'.*Correct the queue"):
        ms.amqp(url, "absent").open({})
    with pytest.raises(ConfigError, match="vhost absent not found"):
        ms.amqp(f"{url}/absent", name).open({})
    with pytest.raises(ConfigError, match=r"refuses the source. Correct the user") as raised:
        ms.amqp(url.replace("//", "//guest:wrong@"), name).open({})
    assert "wrong" not in str(raised.value)
    monkeypatch.setenv("MILLSTREAM_SOURCE_PASSWORD", "wrong")
    with pytest.raises(ConfigError, match=r"refuses the source. Correct the user"):
        ms.amqp(url, name).open({})
    ms.amqp(url.replace("//", "//guest:guest@") + "/%2F", name).open({}).close()
    with pytest.raises(RetriableError, match="Connection refused"):
        ms.amqp("amqp://guest:guest@127.0.0.1:1", name).open({})


def test_a_broker_that_is_partly_down_is_tried_again(queue, monkeypatch):
    """Of what takes a cluster, the broker's own text."""
    with closing(ms.amqp(queue.server.url, queue.name).open({})) as reader:
        for text, kind in (
            (
                "NOT_FOUND - home node 'a' of durable queue 'q' is down or inaccessible",
                RetriableError,
            ),
            ("NOT_ALLOWED - connection limit (2) is reached", RetriableError),
            ("NOT_FOUND - no queue 'q' in vhost '/'", ConfigError),
        ):
            with pytest.raises(kind, match=re.escape(text)), reader._translated():
                raise exceptions.ChannelClosedByBroker(404, text)


def test_a_queue_that_is_deleted_is_noticed(queue):
    reader = ms.amqp(queue.server.url, queue.name).open({})
    try:
        with queue.server.channel() as channel:
            channel.queue_delete(queue.name)
        with pytest.raises(RetriableError, match="has cancelled the source"):
            read_until_it_fails(reader)
    finally:
        reader.close()
    with pytest.raises(ConfigError, match="no queue"):
        ms.amqp(queue.server.url, queue.name).open({})


def read_until_it_fails(reader):
    end_s = time.monotonic() + _WAIT_S
    while time.monotonic() < end_s:
        reader.read(0.1)


def test_a_stream_is_refused(server):
    name = uuid.uuid4().hex
    with server.channel() as channel:
        channel.queue_declare(name, durable=True, arguments={"x-queue-type": "stream"})
    reader = ms.amqp(server.url, name).open({})
    try:
        server.publish(name, [b"1"])
        with pytest.raises(ConfigError, match="is a stream"):
            read_until_it_fails(reader)
    finally:
        reader.close()


def test_tls_checks_the_server(queue, tmp_path, monkeypatch):
    server = queue.server
    url = f"amqps://127.0.0.1:{server.tls_port}"
    with pytest.raises(ConfigError, match=r"certificate that is not trusted.*SSL_CERT_FILE"):
        ms.amqp(url, queue.name).open({})
    monkeypatch.setenv("SSL_CERT_FILE", str(server.folder / "server.crt"))
    assert ssl.create_default_context().get_ca_certs()
    server.publish(queue.name, [b"1"])
    connector = ms.amqp(url, queue.name)
    ms.source(connector, topic="events", to=tmp_path / "log").run(until="caught-up")
    assert values(tmp_path / "log") == [b"1"]
    with pytest.raises(ConfigError, match="certificate that is not trusted"):
        ms.amqp(url.replace("127.0.0.1", "localhost"), queue.name).open({})


def test_each_message_with_an_id_is_there_once_after_kills_of_the_command_and_of_the_broker(
    queue, tmp_path
):
    log = tmp_path / "log"
    messages = [(b"%d" % n, {"message_id": str(n)}) for n in range(600)]
    command = [sys.executable, "-m", "millstream", "source", queue.server.url]
    options = ["-o", f"queue={queue.name}", "-o", "prefetch=20", "--topic", "events"]
    for first, is_brokers in ((0, False), (200, True)):
        queue.server.publish(queue.name, messages[first : first + 200])
        with started([*command, *options, "--to", str(log)]) as process:
            wait_for_records(log, first + 50)
            if is_brokers:
                queue.server.kill()
                queue.server.start()
            process.send_signal(signal.SIGKILL)
            process.wait()
    queue.server.publish(queue.name, messages[400:])
    wait_until_nothing_is_out(queue)
    run(queue, log)
    assert sorted(values(log), key=int) == [body for body, _ in messages]


@contextmanager
def started(command):
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, env=dict(os.environ)) as process:
        try:
            yield process
        finally:
            process.kill()


def wait_for_records(log, count):
    end_s = time.monotonic() + _WAIT_S
    while time.monotonic() < end_s:
        with connect(log) as opened:
            if "events" in opened.topics() and len(opened.read("events", 0)) >= count:
                return
        time.sleep(0.05)
    raise AssertionError("the source does not read")


def wait_until_nothing_is_out(queue):
    """Wait until the broker has noticed that the killed source is gone."""
    end_s = time.monotonic() + _WAIT_S
    while time.monotonic() < end_s:
        with queue.server.channel() as channel:
            if not channel.queue_declare(queue.name, passive=True).method.consumer_count:
                return
        time.sleep(0.1)
    raise AssertionError("the broker still has the consumer of the killed source")


@pytest.mark.parametrize(
    ("url", "wrong"),
    [
        ("amqp://h", "queue is ''"),
        ("amqp://h?queue=a&prefetch=0", "prefetch is 0. Give 1 to 10,000"),
        ("amqp://h?queue=a&prefetch=many", "prefetch is 'many'"),
        ("amqp://h/a/b?queue=a", "no broker of AMQP"),
        ("amqp://h:0?queue=a", "no broker of AMQP"),
        ("amqp:///a?queue=a", "no broker of AMQP"),
        ("amqp://h?queue=a&queues=b", "the option 'queues'.*queue, prefetch"),
    ],
)
def test_a_url_that_is_wrong_is_one_error(url, wrong):
    with pytest.raises(ConfigError, match=wrong):
        ms.source(url, topic="t")


def test_a_password_in_a_url_is_not_shown():
    made = ms.source("amqp://me:secret@broker.example/v?queue=q", topic="t")
    assert "secret" not in repr(made)
    assert made.connector.origin == "amqp://broker.example:5672/v, q"
