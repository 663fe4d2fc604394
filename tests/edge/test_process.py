"""The edge and webhooks as processes: killed, stopped and started again, over a folder and over a broker."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, contextmanager
from http.client import HTTPConnection, HTTPException
from urllib.parse import urlsplit

import pytest
from broker.broker_process import InProcess
from edge.edge_process import Process
from edge_client import ask, serving_edge
from webhook_receiver import Receiver

import millstream as ms

LINES = {"Content_Type": "application/x-ndjson"}
TOPICS = {"clicks": 2, "metrics": 1, "dead": 1}


def make_topics(log):
    for name, partitions in TOPICS.items():
        log.create_topic(name, partitions=partitions)


@pytest.fixture(params=["folder", "kafka"])
def address(request, tmp_path):
    """The address of a log with topics, of each kind."""
    if request.param == "folder":
        with ms.connect(tmp_path / "data") as log:
            make_topics(log)
        yield tmp_path / "data"
        return
    pytest.importorskip("confluent_kafka")
    with InProcess(tmp_path / "data") as broker:
        at = f"kafka://{broker.address}"
        with ms.connect(at) as log:
            make_topics(log)
        yield at


of_folders = pytest.mark.parametrize("address", ["folder"], indirect=True)


def until(condition):
    deadline_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


@contextmanager
def edge(address, tmp_path, *options):
    with Process(tmp_path / "ready", "edge", address, "--http", "127.0.0.1:0", *options) as up:
        yield up


def values(address, topic="clicks"):
    with ms.connect(address) as log:
        return [record.json() for record in log.consumer(topic, follow=False)]


class Posting:
    """Threads that post numbers, one event a request, and keep what was acknowledged."""

    def __init__(self, url, keyed):
        self.url, self.keyed = url, keyed
        self.acknowledged, self.tried = [], []
        self.ended = threading.Event()
        self.enough = threading.Semaphore(0)
        self.threads = [threading.Thread(target=self.run, args=(n,)) for n in range(4)]
        for thread in self.threads:
            thread.start()

    def run(self, worker):
        n = worker
        while not self.ended.is_set():
            headers = {"Idempotency_Key": f"event-{n}"} if self.keyed else {}
            self.tried.append(n)
            try:
                answer = ask(
                    self.url,
                    "POST",
                    "/topics/clicks",
                    b"%d" % n,
                    Content_Type="application/json",
                    **headers,
                )
            except (OSError, HTTPException):
                return
            if answer.status == 200:
                self.acknowledged.append(n)
                self.enough.release()
            n += 4

    def end(self):
        self.ended.set()
        for thread in self.threads:
            thread.join()


@pytest.mark.parametrize("keyed", [False, True], ids=["plain", "keyed"])
def test_killed_while_events_come_it_has_all_that_it_acknowledged(address, tmp_path, keyed):
    with edge(address, tmp_path) as up:
        posting = Posting(up.ready[0], keyed)
        for _ in range(15 if keyed else 40):  # one with a key is a transaction
            assert posting.enough.acquire(timeout=60)
        up.kill()
        posting.end()
    if keyed:
        with edge(address, tmp_path) as up:  # each is sent again, and none is there twice
            for n in posting.tried:
                answer = ask(
                    up.ready[0],
                    "POST",
                    "/topics/clicks",
                    b"%d" % n,
                    Content_Type="application/json",
                    Idempotency_Key=f"event-{n}",
                )
                assert answer.status == 200, answer.json
                assert answer.json.get("duplicate") or n not in posting.acknowledged
        assert sorted(values(address)) == sorted(posting.tried)
    else:
        found = values(address)
        assert set(posting.acknowledged) <= set(found) <= set(posting.tried)
        assert len(found) == len(set(found))


@of_folders
def test_told_to_end_it_answers_what_it_let_in(address, tmp_path):
    with edge(address, tmp_path) as up:
        posting = Posting(up.ready[0], keyed=False)
        for _ in range(20):
            assert posting.enough.acquire(timeout=60)
        code, out, err = up.stop()
        posting.end()
    assert (code, err) == (0, "")
    assert out.startswith(f"HTTP reaches {address} at {up.ready[0]} (Ctrl-C ends it)")
    assert set(posting.acknowledged) <= set(values(address)) <= set(posting.tried)
    assert not (tmp_path / "ready").exists()


def events(url, count, last_id=None):
    """Read so many events, as a browser that comes back with the id that it had last."""
    place = urlsplit(url)
    connection = HTTPConnection(place.hostname, place.port, timeout=60)
    headers = {} if last_id is None else {"Last-Event-ID": last_id}
    connection.request("GET", "/topics/clicks/events?from=earliest", headers=headers)
    answer = connection.getresponse()
    found = []
    while len(found) < count:
        line = answer.readline().decode()
        assert line
        if line.startswith("id: "):
            last_id = line[4:].strip()
        elif line.startswith("data: "):
            found.append(json.loads(line[6:])["value"])
    connection.close()
    return found, last_id


def test_streams_go_on_from_the_last_id_across_a_restart_and_miss_nothing(address, tmp_path):
    body = "\n".join(map(str, range(50))).encode()
    with edge(address, tmp_path) as up:
        assert ask(up.ready[0], "POST", "/topics/clicks?bad=skip", body, **LINES).status == 200
        first, last_id = events(up.ready[0], 30)
        up.kill()
    with edge(address, tmp_path) as up:
        more = ask(up.ready[0], "POST", "/topics/clicks", b"50\n51\n", **LINES)
        assert more.json["appended"] == 2
        rest, _ = events(up.ready[0], 22, last_id)
    assert sorted(first + rest) == list(range(52))


@of_folders
def test_datagrams_come_in_and_what_was_lost_is_told_at_the_end(address, tmp_path):
    options = ("--statsd", "127.0.0.1:0", "--statsd-topic", "metrics")
    with edge(address, tmp_path, *options) as up:
        host, _, port = up.ready[1].rpartition(":")
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
            for n in (0, 1, 4):
                sender.sendto(b"a:%d|c\nbad\ndatagram.sequence:%d|g" % (n, n), (host, int(port)))
        until(lambda: ask(up.ready[0], "GET", "/status").json["statsd"]["appended"] == 3)
        code, out, _ = up.stop()
    counts = json.loads(out.partition("StatsD: ")[2])
    assert code == 0
    assert {name: counts[name] for name in ("datagrams", "malformed", "lost_in_sequence")} == {
        "datagrams": 3,
        "malformed": 3,
        "lost_in_sequence": 2,
    }
    assert [value["value"] for value in values(address, "metrics")] == [0, 1, 4]


# Webhooks.


@contextmanager
def webhook(address, url, tmp_path, *options):
    with Process(
        tmp_path / "webhook-ready",
        *("webhook", "clicks", url, "--group", "g", "--dead", "dead", "--log", address),
        *("--backoff", "50 ms", "--backoff-max", "100 ms", *options),
    ) as up:
        yield up


def committed(address):
    with ms.connect(address) as log:
        return sum(at.offset for at in log.committed_offsets("g").values())


def test_killed_between_delivery_and_commit_it_delivers_again_with_the_same_key(address, tmp_path):
    """The receiver kills the sender as it answers the 5th request, and again the 12th."""
    with ms.connect(address) as log, log.producer() as producer:
        for n in range(20):
            producer.send("clicks", n, key=f"k{n % 5}").result()
    kills = {5, 12}
    up, begun = None, threading.Event()

    def answer(request):
        assert begun.wait(60)
        n = len(receiver.requests)
        if n in kills:
            kills.discard(n)
            up.kill()
            return None
        return 200

    with Receiver(answer) as receiver:
        for wanted in (5, 12):
            with webhook(address, receiver.url, tmp_path, "--parallel", "1") as up:
                begun.set()
                receiver.wait(wanted)
                up.process.wait(60)
                begun.clear()
            assert up.process.returncode == -9
        begun.set()
        with webhook(address, receiver.url, tmp_path) as up:
            until(lambda: committed(address) == 20)
            code, out, err = up.stop()
    assert code == 0
    assert all("died a moment ago; on standby" in line for line in err.splitlines())
    by_value: dict[int, set[str]] = {}
    for request in receiver.requests:
        value = json.loads(request["body"])["value"]
        by_value.setdefault(value, set()).add(request["idempotency-key"])
    assert sorted(by_value) == list(range(20))  # none was left out
    assert all(len(keys) == 1 for keys in by_value.values())
    assert len(receiver.requests) > 20  # and some came again
    assert " delivered, 0 dead-lettered, 0 attempts failed" in out
    for key in range(5):  # what came first, came in order
        mine = [json.loads(r["body"])["value"] for r in receiver.requests]
        mine = [n for i, n in enumerate(mine) if n % 5 == key and n not in mine[:i]]
        assert mine == list(range(key, 20, 5))


@of_folders
def test_told_to_end_it_commits_what_was_taken_and_gives_up_nothing(address, tmp_path):
    with ms.connect(address) as log, log.producer() as producer:
        for n in range(6):
            producer.send("clicks", n, partition=0).result()
    with Receiver(lambda request: 500 if b'"value": 3,' in request["body"] else 200) as receiver:
        with webhook(address, receiver.url, tmp_path, "--attempts", "100000") as up:
            receiver.wait(6)
            code, out, err = up.stop()
        assert code == 0
        assert out.splitlines()[-1].startswith("3 records delivered, 0 dead-lettered")
        assert "fails (500" in err
        assert committed(address) == 3
        with webhook(address, receiver.url, tmp_path, "--attempts", "2") as up:
            until(lambda: committed(address) == 6)
            up.stop()
    assert list(values(address, "dead")) == [3]


def test_two_edges_of_one_broker_append_what_has_a_key_once(tmp_path):
    """Each request goes to both at the same time, again and again until it is answered with 200."""
    pytest.importorskip("confluent_kafka")
    with InProcess(tmp_path / "data") as broker:
        address = f"kafka://{broker.address}"
        with ms.connect(address) as log:
            make_topics(log)
        appended = []

        def send(edge):
            for n in range(8):
                body = json.dumps([n]).encode()
                answer = None
                while answer is None or answer.status == 503:
                    answer = edge.post("/topics/clicks", body, Idempotency_Key=f"k{n}")
                assert answer.status == 200, answer.json
                appended.append(answer.json["appended"])

        with serving_edge(address) as one, serving_edge(address) as other:
            threads = [threading.Thread(target=send, args=(edge,)) for edge in (one, other)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        assert (len(appended), sum(appended) <= 8) == (16, True)
        assert sorted(values(address)) == [[n] for n in range(8)]


# No file may be larger than 300 kB: what a full disk says, by a limit of the process's own.
LIMITED = ("sh", "-c", 'ulimit -f 600; exec "$0" "$@"')


@of_folders
def test_a_full_disk_is_answered_503_and_what_was_acknowledged_before_is_there(address, tmp_path):
    acknowledged = 0
    with Process(tmp_path / "ready", "edge", address, "--http", "127.0.0.1:0", under=LIMITED) as up:
        while True:
            body = b'"' + b"x" * 20_000 + b'"'
            answer = ask(
                up.ready[0], "POST", "/topics/clicks?key=k", body, Content_Type="application/json"
            )
            if answer.status != 200:
                break
            acknowledged += 1
        assert (answer.status, answer.headers["retry-after"]) == (503, "1"), answer.json
        assert answer.json["error"]["kind"] == "DiskFullError"
        assert answer.json["error"]["appended"] == 0
        assert ask(up.ready[0], "GET", "/topics").status == 200
    assert 5 < acknowledged < 20
    assert len(values(address)) == acknowledged


def test_a_broker_that_is_away_is_answered_503_until_it_is_back(tmp_path):
    pytest.importorskip("confluent_kafka")
    with InProcess(tmp_path / "data") as broker:
        with ms.connect(f"kafka://{broker.address}") as log:
            make_topics(log)
        port = broker.port
    address = f"kafka://127.0.0.1:{port}"
    with ExitStack() as opened:
        with InProcess(tmp_path / "data", listen=f"127.0.0.1:{port}"):
            edge = opened.enter_context(serving_edge(address))
            assert edge.post("/topics/clicks", b"1").status == 200
            assert edge.post("/topics/none", b"1").status == 404
        away = edge.post("/topics/clicks", b"2")
        assert (away.status, away.headers["retry-after"]) == (503, "1"), away.json
        with InProcess(tmp_path / "data", listen=f"127.0.0.1:{port}"):
            until(lambda: edge.post("/topics/clicks", b"3").status == 200)
            opened.close()
            found = values(address)
    assert {1, 3} <= set(found) <= {1, 2, 3}


# The command, where the disk fails to keep what is written: from then on nothing may be acknowledged.
FAILING = """
import os, sys
from millstream.cli.main import run
real = os.fdatasync
def fdatasync(handle):
    if os.path.exists(sys.argv[1] + ".fails"):
        raise OSError(5, "Input/output error")
    real(handle)
os.fdatasync = fdatasync
sys.exit(run(["edge", sys.argv[1], "--http", "127.0.0.1:0", "--ready-file", sys.argv[2]]))
"""


@of_folders
def test_a_disk_that_fails_ends_it_with_an_error_and_nothing_more_is_acknowledged(
    address, tmp_path
):
    ready = tmp_path / "ready"
    with subprocess.Popen(
        [sys.executable, "-c", FAILING, str(address), str(ready)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    ) as process:
        until(ready.exists)
        url = ready.read_text().strip()
        path, kind = "/topics/clicks", {"Content_Type": "application/json"}
        assert ask(url, "POST", path, b"1", **kind).status == 200
        (tmp_path / "data.fails").touch()
        failed = ask(url, "POST", path, b"2", **kind)
        assert (failed.status, failed.json["error"]["kind"]) == (500, "SyncFailedError")
        err = process.stderr.read().decode()
        assert process.wait(60) == 1
    assert err.startswith("millstream: ")
    assert "Traceback" not in err
    assert values(address)[:1] == [1]
