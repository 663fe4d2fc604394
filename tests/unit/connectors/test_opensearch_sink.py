"""The sink to OpenSearch: by the contract, and late requests, refusals, kills and overload; on a real server."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
import uuid
from contextlib import contextmanager
from dataclasses import dataclass, replace

import http_service
import opensearch_server
import pytest

import millstream as ms
from millstream.connectors.sinks.connector import RecordsToWrite, SinkOpening, SinkRecord
from millstream.errors import ConfigError, FencedError, RetriableError
from millstream.testing.connectors import SinkContract

_WAIT_S = 120.0


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with opensearch_server.start(tmp_path_factory.mktemp("opensearch")) as started:
        yield started


@dataclass
class Index:
    """An index that no other test has, in which ``seq`` is a number."""

    server: opensearch_server.OpenSearchServer
    keyed = True

    def __post_init__(self):
        self.name = uuid.uuid4().hex
        body = {
            "settings": {"number_of_replicas": 0},
            "mappings": {"properties": {"seq": {"type": "long"}}},
        }
        assert self.server.ask("PUT", f"/{self.name}", body)[0] == 200

    def connector(self):
        return replace(ms.to_opensearch(self.server.url, index=self.name), records_max=7)

    def rows(self):
        return list(self.server.documents(self.name).values())

    def bad_row(self):
        return {"seq": "no number"}

    @contextmanager
    def down(self):
        self.server.kill()
        yield
        self.server.start()


@pytest.mark.long
class TestOpenSearch(SinkContract):
    rounds = 6

    @pytest.fixture(autouse=True)
    def _server(self, server):
        self.server = server

    @contextmanager
    def outside(self, folder):
        yield Index(self.server)


@pytest.fixture
def index(server):
    return Index(server)


def send(log_folder, *pairs):
    with ms.connect(log_folder) as log:
        log.create_topic("t", exist_ok=True)
        with log.producer() as producer:
            for key, row in pairs:
                raw = isinstance(row, bytes) or row is None
                producer.send("t", row if raw else json.dumps(row).encode(), key=key)


def run(connector, log, name="out", on_status=lambda _: None):
    return ms.sink(connector, topic="t", log=log, name=name).run(
        until="caught-up", on_status=on_status
    )


def letters(log_folder):
    with ms.connect(log_folder) as log:
        rows = log.read("out.dead", 0, columns=("headers",)).column(0).to_pylist()
    return [{one["key"]: one["value"].decode() for one in row}["reason"] for row in rows]


# ── documents ───────────────────────────────────────────────────────────────────────────────


def test_a_document_is_the_last_row_of_its_key_as_the_record_has_it(index, tmp_path):
    raw = b'{"text":\n "gr\xc3\xb6\xc3\x9fer", "big": 12345678901234567.89, "list": [1.5, 2.50], "in": {"a": null}}'
    send(
        tmp_path / "log",
        ("grün/ä?#".encode(), {"seq": 1}),
        ("grün/ä?#".encode(), raw),
        (b"gone", {"seq": 1}),
        (b"gone", None),
        (b"never", None),
        (b"back", {"seq": 1}),
        (b"back", None),
        (b"back", {"seq": 2}),
    )
    assert not run(index.connector(), tmp_path / "log").dead, letters(tmp_path / "log")
    assert index.server.documents(index.name) == {"grün/ä?#": json.loads(raw), "back": {"seq": 2}}
    _, found = index.server.ask("GET", f"/{index.name}/_settings?flat_settings=true")
    assert "index.refresh_interval" not in found[index.name]["settings"]


def test_a_refused_row_leaves_the_one_before_it_and_is_a_dead_letter(index, tmp_path):
    send(
        tmp_path / "log",
        (b"a", {"seq": 1}),
        (b"a", {"seq": "x"}),
        (None, {"seq": 3}),
        (b"", {"seq": 4}),
        (b"\xff", {"seq": 5}),
        (b"k" * 513, {"seq": 6}),
        (b"k" * 512, {"seq": 7}),
    )
    assert run(ms.to_opensearch(index.server.url, index=index.name), tmp_path / "log").dead == 5
    assert index.server.documents(index.name) == {"a": {"seq": 1}, "k" * 512: {"seq": 7}}
    reasons = letters(tmp_path / "log")
    wanted = ("failed to parse field [seq]", "no key", "no key", "no UTF-8", "has 513 bytes")
    for text in wanted:
        assert any(text in reason for reason in reasons), (text, reasons)


def test_values_that_would_be_lines_of_a_request_are_dead_letters(index, tmp_path):
    values = (b"", b"\n", b"}", b"5", b'{"a": "1\n2"}', b'{"a": 1}\n{"delete": {}}', b"\xff")
    send(
        tmp_path / "log",
        (b"a", {"seq": 1}),
        *((b"b", value) for value in values),
        (b"c", {"seq": 2}),
    )
    dead = run(ms.to_opensearch(index.server.url, index=index.name), tmp_path / "log").dead
    assert dead == len(values)
    assert index.server.documents(index.name) == {"a": {"seq": 1}, "c": {"seq": 2}}


def test_an_index_that_is_not_there_is_made_with_the_servers_mapping(server, tmp_path):
    name = uuid.uuid4().hex
    send(tmp_path / "log", (b"a", {"n": 1, "text": "x"}))
    run(ms.to_opensearch(server.url, index=name), tmp_path / "log")
    _, found = server.ask("GET", f"/{name}")
    assert found[name]["mappings"]["properties"]["n"] == {"type": "long"}


# ── late, again, and by others ──────────────────────────────────────────────────────────────


def test_requests_that_come_late_or_again_change_nothing(index, tmp_path):
    """Every request that was ever sent, once more in any order, against a naive model: the last row of each key."""
    chance, model, bodies = random.Random(5), {}, []

    def answer(asked, _number):
        if asked.target.startswith("/_bulk"):
            bodies.append(asked.body)
        return index.server.ask(asked.method, asked.target, asked.body or None)

    with http_service.serving(answer) as service:
        url = service.url.replace("http", "opensearch")
        connector = replace(ms.to_opensearch(url, index=index.name), records_max=9)
        for number in range(5):
            pairs = []
            for n in range(chance.randrange(1, 30)):
                key = f"k{chance.randrange(12)}"
                row = chance.choice((None, {"seq": n, "round": number}, {"seq": "bad"}))
                pairs.append((key.encode(), row))
                if row is None:
                    model.pop(key, None)
                elif row["seq"] != "bad":
                    model[key] = row
            send(tmp_path / "log", *pairs)
            run(connector, tmp_path / "log")
            for body in chance.sample(bodies, len(bodies)):
                assert index.server.ask("POST", "/_bulk", body)[0] == 200
            # A refresh of what was sent late shows nothing else.
            assert index.server.documents(index.name) == model


def test_a_topic_with_more_partitions_than_before_keeps_the_order_of_a_key(index):
    """Of a key that moves to another partition, whose offsets begin again."""
    writer = index.connector().open(SinkOpening("moved", "t", uuid.uuid4().hex, "token"))
    for number, (partition, offset) in enumerate(((0, 900), (1, 0)), 1):
        row = {"seq": number}
        record = SinkRecord(partition, offset, 0, b"a", json.dumps(row).encode(), row)
        assert writer.write(RecordsToWrite(str(number), number, [record], {})) == []
    assert index.server.documents(index.name) == {"a": {"seq": 2}}


def test_a_sink_that_begins_later_takes_an_index_over(index, tmp_path):
    send(tmp_path / "log", (b"a", {"seq": 1}), (b"b", {"seq": 1}))
    connector = index.connector()
    run(connector, tmp_path / "log")
    later = replace(connector, clock_s=lambda: time.time() + 60)
    assert run(later, tmp_path / "log", name="anew").records == 2
    send(tmp_path / "log", (b"a", {"seq": 2}))
    with pytest.raises(FencedError, match=r"later version of the document 'a'.*Another sink"):
        run(connector, tmp_path / "log")
    run(later, tmp_path / "log", name="anew")
    assert index.server.documents(index.name) == {"a": {"seq": 2}, "b": {"seq": 1}}


# ── what a server refuses ───────────────────────────────────────────────────────────────────


def test_an_index_in_which_a_version_or_an_acknowledgement_means_nothing_is_refused(
    server, tmp_path
):
    first, second, alias = (uuid.uuid4().hex for _ in range(3))
    send(tmp_path / "log", (b"a", {"n": 1}))
    for name in (first, second):
        body = {"aliases": {alias: {}}, "settings": {"index.translog.durability": "async"}}
        server.ask("PUT", f"/{name}", body)
    with pytest.raises(ConfigError, match=r"durability async.*Set it to request"):
        run(ms.to_opensearch(server.url, index=first), tmp_path / "log")
    with pytest.raises(ConfigError, match=r"is 2 indexes.*alias of one"):
        run(ms.to_opensearch(server.url, index=alias), tmp_path / "log")
    template = {"index_patterns": [f"{alias}-*"], "data_stream": {}}
    assert server.ask("PUT", f"/_index_template/{alias}", template)[0] == 200
    assert server.ask("PUT", f"/_data_stream/{alias}-s")[0] in (200, 400, 404, 405)
    server.ask("PUT", f"/{first}/_settings", {"index.translog.durability": "request"})
    server.ask("POST", "/_aliases", {"actions": [{"remove": {"index": second, "alias": alias}}]})
    run(ms.to_opensearch(server.url, index=alias), tmp_path / "log")
    assert server.documents(first) == {"a": {"n": 1}}
    server.ask("PUT", f"/{first}/_settings", {"index.blocks.write": True})
    send(tmp_path / "log", (b"a", {"n": 2}))
    with pytest.raises(ConfigError, match=r"refuses changes: 403.*blocked"):
        run(ms.to_opensearch(server.url, index=alias), tmp_path / "log")


@dataclass
class Faulty:
    """Passes requests on to a server, but for those to ``_bulk`` that have a fault, one after the other."""

    server: opensearch_server.OpenSearchServer
    faults: list

    def answer(self, asked, _number):
        fault = self.faults.pop(0) if self.faults and asked.target.startswith("/_bulk") else None
        if fault == "partial":
            return self.partly(asked)
        if isinstance(fault, int):
            return fault, {"error": {"type": "busy", "reason": "too much"}}, {"Retry-After": "0"}
        found = self.server.ask(asked.method, asked.target, asked.body or None)
        return (504, {}) if fault == "after" else found

    def partly(self, asked):
        """Take every second change, and say of the others that the queue is full."""
        lines = asked.body.splitlines(keepends=True)
        taken = b"".join(b"".join(lines[at : at + 2]) for at in range(0, len(lines), 4))
        status, found = self.server.ask("POST", asked.target, taken)
        error = {"type": "rejected_execution_exception", "reason": "queue full"}
        full = {"index": {"status": 429, "error": error}}
        items = [each for item in found["items"] for each in (item, full)][: len(lines) // 2]
        return status, {"errors": True, "items": items}


@pytest.mark.parametrize("fault", [429, 503, "after", "partial"])
def test_an_overloaded_server_is_tried_again_and_gets_all(index, tmp_path, fault):
    rows = [(f"k{n % 7}".encode(), {"seq": n}) for n in range(40)]
    send(tmp_path / "log", *rows)
    seen = []
    faulty = Faulty(index.server, [fault, None, fault, fault])
    with http_service.serving(faulty.answer) as service:
        url = service.url.replace("http", "opensearch")
        connector = replace(ms.to_opensearch(url, index=index.name), records_max=15)
        status = run(connector, tmp_path / "log", on_status=seen.append)
    assert (status.records, status.dead, faulty.faults) == (40, 0, [])
    problems = {each.problem for each in seen if each.state == "retrying"}
    wanted = {"partial": "did not take 7 of 15 changes: rejected", "after": "responded 504"}
    text = wanted.get(fault, f"responded {fault}.")
    assert any(text in problem for problem in problems), problems
    assert index.server.documents(index.name) == {key.decode(): row for key, row in rows}


def test_a_request_that_is_too_large_is_divided(index, tmp_path):
    rows = [(f"k{n}".encode(), {"seq": n, "text": "x" * (500 if n == 3 else 10)}) for n in range(9)]
    send(tmp_path / "log", *rows)

    def answer(asked, _number):
        if asked.target.startswith("/_bulk") and len(asked.body) > 500:
            return 413, {}
        return index.server.ask(asked.method, asked.target, asked.body or None)

    with http_service.serving(answer) as service:
        url = service.url.replace("http", "opensearch")
        assert run(ms.to_opensearch(url, index=index.name), tmp_path / "log").dead == 1
    assert sorted(index.server.documents(index.name)) == [f"k{n}" for n in range(9) if n != 3]
    assert letters(tmp_path / "log") == ["it is larger than the server takes"]


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        ((401, {}), "responded 401.*MILLSTREAM_SINK_PASSWORD"),
        ((301, {}, {"Location": "http://elsewhere.example/"}), "elsewhere|redirect|another"),
        ((200, {"hello": "world"}), "is no OpenSearch"),
    ],
)
def test_another_server_than_opensearch_is_one_error(tmp_path, answer, error):
    send(tmp_path / "log", (b"a", {"n": 1}))
    with http_service.serving(lambda *_: answer) as service:
        url = service.url.replace("http://", "opensearch://me:secret@")
        with pytest.raises(ConfigError, match=error) as raised:
            run(ms.to_opensearch(url, index="a"), tmp_path / "log")
        assert service.asked[0].headers["Authorization"] == "Basic bWU6c2VjcmV0"
    assert "secret" not in str(raised.value)


def test_a_server_that_is_away_is_tried_again():
    sink = ms.to_opensearch("opensearch://127.0.0.1:1", index="a")
    with pytest.raises(RetriableError, match="tried again"):
        sink.open(SinkOpening("out", "t", "life", "token"))


@pytest.mark.parametrize(
    ("url", "options", "wrong"),
    [
        ("opensearch://h", {}, "needs index: -o index=NAME"),
        ("opensearch://h", {"index": "Big"}, "index is 'Big'"),
        ("opensearch://h", {"index": "_a"}, "index is '_a'"),
        ("opensearch://h", {"index": "a,b"}, "index is 'a,b'"),
        ("opensearch://h", {"index": "a*"}, r"index is 'a\*'"),
        ("opensearch://h", {"index": "ä" * 128}, "255 bytes"),
        ("opensearch://h/path", {"index": "a"}, "none of OpenSearch"),
        ("opensearch://h:0", {"index": "a"}, "none of OpenSearch"),
        ("opensearch://h", {"index": "a", "batch": "0"}, "batch is 0"),
        ("opensearch://h", {"index": "a", "timeout_s": "0"}, "timeout_s is 0.0"),
        ("opensearch://h", {"index": "a", "refresh": "true"}, "the option 'refresh'"),
    ],
)
def test_a_url_or_an_option_that_is_wrong_is_one_error(url, options, wrong):
    from millstream.connectors.sinks.urls import sink_connector_of

    with pytest.raises(ConfigError, match=wrong):
        sink_connector_of(url, options)


# ── kills ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.long
def test_all_is_there_after_kills_of_the_command_and_of_the_server(index, tmp_path):
    log, rows = tmp_path / "log", []
    command = [sys.executable, "-m", "millstream", "sink", index.server.url, "--topic", "t"]
    options = ["--log", str(log), "--name", "out", "-o", f"index={index.name}", "-o", "batch=20"]
    for first, is_servers in ((0, False), (1000, True)):
        more = [(f"k{n % 300}".encode(), {"seq": n}) for n in range(first, first + 1000)]
        rows += more
        send(log, *more)
        with subprocess.Popen([*command, *options], stdout=subprocess.DEVNULL) as process:
            try:
                wait_for(lambda at=first: highest(index) >= at + 50)
                if is_servers:
                    index.server.kill()
                    index.server.start()
            finally:
                process.send_signal(signal.SIGKILL)
    run(ms.to_opensearch(index.server.url, index=index.name), log)
    assert index.server.documents(index.name) == {key.decode(): row for key, row in rows}


def highest(index):
    return max((row["seq"] for row in index.rows()), default=-1)


def wait_for(met):
    end_s = time.monotonic() + _WAIT_S
    while not met():
        assert time.monotonic() < end_s, "the sink does not write"
        time.sleep(0.02)
