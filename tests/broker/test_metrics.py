"""The figures of a broker, an edge and a webhook, as their processes serve them."""

from __future__ import annotations

import socket
import time
import urllib.error
import urllib.request

import pytest
from broker.broker_process import AsProcess
from edge.edge_process import Process
from metrics_text import figures
from webhook_receiver import Receiver

import millstream as ms

WAIT_S = 60


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def ask(port, path):
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def until(port, wanted):
    """Scrape until the figures are as wanted; return them."""
    deadline_s = time.monotonic() + WAIT_S
    while not wanted(found := figures(ask(port, "/metrics")[1])):
        assert time.monotonic() < deadline_s, found
        time.sleep(0.1)
    return found


def test_a_broker_counts_connections_requests_refusals_and_syncs(folder):
    pytest.importorskip("confluent_kafka")
    port = free_port()
    with AsProcess(folder, "--metrics", f"127.0.0.1:{port}", "--auto-create") as broker:
        host, _, number = broker.address.rpartition(":")
        with ms.connect(f"kafka://{broker.address}") as log:
            log.create_topic("clicks")
            with log.producer() as producer:
                producer.send("clicks", {"n": 1}).result(timeout=60)
            consumer = log.consumer("clicks", group="readers", follow=False, commit="manual")
            with consumer:
                list(consumer)
                consumer.commit()
            with log.producer() as producer:
                producer.send("clicks", {"n": 2}).result(timeout=60)
        with socket.create_connection((host, int(number)), timeout=60) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
            assert stranger.recv(10) == b""
        found = until(
            port, lambda found: found.get(("millstream_broker_refusals_total", "reason=malformed"))
        )
        assert found["millstream_broker_refusals_total", "reason=malformed"] == 1
        assert found["millstream_broker_connections_total",] >= 2
        assert found["millstream_broker_requests_total", "api=Produce"] == 2
        assert found["millstream_log_sync_seconds_count",] >= 2
        assert found["millstream_broker_log_writable",] == 1
        lag = "group=readers", "partition=0", "topic=clicks"
        assert found["millstream_group_lag_records", *lag] == 1
        assert found["millstream_group_lost_records", *lag] == 0
        assert found["millstream_log_end_offset", "partition=0", "topic=clicks"] == 2
        assert ask(port, "/readyz") == (200, "ready\n")
        assert ask(port, "/healthz") == (200, "alive\n")


def test_an_edge_with_a_token_shows_its_figures_to_who_has_it_and_its_health_to_all(tmp_path):
    with ms.connect(tmp_path / "data") as log:
        log.create_topic("clicks")
    (tmp_path / "token").write_text("0123456789abcdef0123456789abcdef\n")
    arguments = [
        "edge",
        tmp_path / "data",
        "--http",
        "127.0.0.1:0",
        "--token-file",
        tmp_path / "token",
    ]
    with Process(tmp_path / "ready", *arguments) as edge:
        url = edge.ready[0].rstrip("/")
        port = int(url.rpartition(":")[2])
        assert ask(port, "/metrics")[0] == 401
        assert ask(port, "/healthz") == (200, "alive\n")
        assert ask(port, "/readyz") == (200, "ready\n")
        named = {"Authorization": "Bearer 0123456789abcdef0123456789abcdef"}
        posted = urllib.request.Request(
            f"{url}/topics/clicks", b'{"n": 1}', {**named, "Content-Type": "application/json"}
        )
        urllib.request.urlopen(posted, timeout=60).close()
        asked = urllib.request.Request(f"{url}/metrics", headers=named)
        with urllib.request.urlopen(asked, timeout=60) as answer:
            found = figures(answer.read().decode())
        assert found["millstream_edge_events_total",] == 1
        assert found["millstream_edge_requests_total",] == 1
        assert found["millstream_log_sync_seconds_count",] >= 1
        assert found["millstream_edge_refusals_total",] == 0


def test_a_webhook_counts_what_it_delivers(tmp_path):
    with ms.connect(tmp_path / "data") as log:
        for topic in ("clicks", "undelivered"):
            log.create_topic(topic)
        with log.producer() as producer:
            producer.send("clicks", {"n": 1})
    port = free_port()
    receiver = Receiver()
    receiver.thread.start()
    options = ["--group", "hook", "--dead", "undelivered", "--log", tmp_path / "data"]
    options += ["--metrics", f"127.0.0.1:{port}"]
    with Process(tmp_path / "ready", "webhook", "clicks", receiver.url, *options):
        labels = "group=hook", "topic=clicks"
        delivered = "millstream_webhook_delivered_records_total", *labels
        found = until(port, lambda found: found.get(delivered))
        assert found[delivered] == 1
        assert found["millstream_webhook_leading", *labels] == 1
        assert ask(port, "/readyz") == (200, "ready\n")
    receiver.server.shutdown()
    receiver.server.server_close()
