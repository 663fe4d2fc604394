"""Every connector of ours, by the contract that is shipped for those of others."""

from __future__ import annotations

import csv
import gzip
import json
import uuid
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import http_service
import mqtt_server
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import redis_server
import s3_server

import millstream as ms
from millstream.object_store.client import ObjectClient
from millstream.testing.connectors import SourceContract


@dataclass
class Folder:
    """A folder into which each ``put`` moves a whole file."""

    folder: Path
    ending: str
    files: int = 0

    def connector(self):
        made = ms.folder(self.folder, settled=timedelta(0), every="10ms")
        return replace(made, records_max=7)

    def put(self, events):
        self.write(lambda file: self.write_events(file, events))

    def write(self, write):
        draft = self.folder / "draft.tmp"
        write(draft)
        draft.rename(self.folder / f"{self.files:06}{self.ending}")
        self.files += 1

    def write_events(self, file, events):
        lines = "".join(json.dumps(event, ensure_ascii=False) + "\n" for event in events)
        file.write_bytes(self.compressed(lines.encode()))

    def compressed(self, data):
        if self.ending.endswith(".gz"):
            return gzip.compress(data)
        return pa.compress(data, "zstd", asbytes=True) if self.ending.endswith(".zst") else data

    def put_bad(self):
        bad = b'{"n": \n[1]\n\xff\n{"n": NaN}\n'
        self.write(lambda file: file.write_bytes(self.compressed(bad)))
        return 4

    @contextmanager
    def down(self):
        away = self.folder.with_name("away")
        self.folder.rename(away)
        yield
        away.rename(self.folder)


class CsvFolder(Folder):
    def write_events(self, file, events):
        with file.open("w", newline="", encoding="utf-8") as stream:
            writer = csv.DictWriter(stream, ["n", "text"])
            writer.writeheader()
            writer.writerows(events)

    def put_bad(self):
        self.write(lambda file: file.write_bytes(b'n,text\r\n1,2,3\r\n"a"b,c\r\nx\r\n\xff,y\r\n'))
        return 4


class ParquetFolder(Folder):
    def write_events(self, file, events):
        pq.write_table(pa.Table.from_pylist(events), file, row_group_size=4)

    def put_bad(self):
        self.write(lambda file: file.write_bytes(b"PAR1 and then nothing"))
        self.write(
            lambda file: pq.write_table(pa.table({"n": [1.0, float("nan"), float("inf")]}), file)
        )
        return 3


class OfFiles(SourceContract):
    made = Folder
    ending = ".jsonl"

    @contextmanager
    def outside(self, folder):
        inner = folder / "in"  # which may be moved away
        inner.mkdir()
        yield self.made(inner, self.ending)


class TestJsonLines(OfFiles):
    pass


@pytest.mark.long
class TestJsonLinesInGzip(OfFiles):
    ending = ".ndjson.gz"


@pytest.mark.long
class TestJsonLinesInZstandard(OfFiles):
    ending = ".jsonl.zst"


class TestCsv(OfFiles):
    made = CsvFolder
    ending = ".csv"


@pytest.mark.long
class TestParquet(OfFiles):
    made = ParquetFolder
    ending = ".parquet"

    def test_what_is_no_record_is_a_dead_letter_and_the_others_are_read(self, tmp_path):
        """Of the file with numbers one row is a record."""
        with self._trial(tmp_path) as trial:
            trial.put(5)
            trial.put_bad()
            trial.put(5)
            assert trial.run().dead == 3
            assert [event for event in trial.read() if event["n"] != "1.0"] == trial.events
            assert all(letter["reason"] and letter["where"] for letter in trial.dead_letters())


@dataclass
class Objects(Folder):
    """The same in an object store, through its client: an object is there as soon as it is whole."""

    url: str = ""

    def connector(self):
        return replace(ms.folder(self.url, every="10ms"), records_max=7)

    def write(self, write):
        draft = self.folder / "draft"
        write(draft)
        ObjectClient(self.url).put(f"{self.files:06}{self.ending}", memoryview(draft.read_bytes()))
        self.files += 1

    def down(self):
        return None  # a request is tried again for long: the tests of the client have that


@pytest.mark.long
@pytest.mark.skipif(s3_server.find_binary() is None, reason=s3_server.HOW_TO_GET_IT)
class TestObjects(SourceContract):
    rounds = 4

    @pytest.fixture(autouse=True)
    def _server(self, tmp_path_factory, monkeypatch):
        with s3_server.s3_server(tmp_path_factory.mktemp("s3"), "events") as port:
            for name, value in s3_server.environment(port).items():
                monkeypatch.setenv(name, value)
            yield

    @contextmanager
    def outside(self, folder):
        yield Objects(folder, ".jsonl", url=f"s3://events/{uuid.uuid4().hex}")


@dataclass
class Generated:
    """Events that a function makes from those that were put."""

    events: list
    rate: float | None = None

    def connector(self):
        made = ms.generate(
            lambda number, _: self.events[number], count=len(self.events), rate=self.rate
        )
        return replace(made, batch=7)

    def put(self, events):
        self.events += events

    def put_bad(self):
        return 0

    def down(self):
        return None


class TestGenerated(SourceContract):
    @contextmanager
    def outside(self, folder):
        yield Generated([])

    def test_what_is_put_while_it_runs_is_read(self, tmp_path):
        """Nothing is put: events fall due."""
        with self._trial(tmp_path) as trial:
            trial.put(9)
            trial.outside.rate = 50
            with trial.running() as running:
                running.wait_for(lambda status: status.records > 0)
                running.wait_for(lambda status: status.records == 9 and status.state == "idle")
            trial.check()


@dataclass
class Streams:
    """A stream of a Redis server, which no other test has."""

    server: redis_server.RedisServer

    def __post_init__(self):
        redis = pytest.importorskip("redis")
        self.client = redis.Redis(port=self.server.port)
        self.name = uuid.uuid4().hex

    def connector(self):
        return replace(ms.redis_stream(self.server.url, self.name), entries=7)

    def put(self, events):
        with self.client.pipeline() as pipe:
            for event in events:
                pipe.xadd(self.name, event)
            pipe.execute()

    def put_bad(self):
        self.client.xadd(self.name, {"n": b"\xff"})
        return 1

    @contextmanager
    def down(self):
        self.server.kill()
        yield
        self.server.start()


class TestRedisStream(SourceContract):
    @pytest.fixture(autouse=True)
    def _server(self, tmp_path_factory):
        with redis_server.start(tmp_path_factory.mktemp("redis")) as self.server:
            yield

    @contextmanager
    def outside(self, folder):
        yield Streams(self.server)


@dataclass
class Polled:
    """Rows that a server gives by HTTP: all of them on one page, or those from a time on, in pages of seven."""

    by_cursor: bool
    rows: list = field(default_factory=list)
    is_down: bool = False
    url: str = ""

    def connector(self):
        options = {"cursor": "seq", "since": "from", "next": "next"} if self.by_cursor else {}
        return ms.http_poll(f"{self.url}/events", rows="data", every="10ms", **options)

    def put(self, events):
        # Two follow one another at the same time.
        self.rows += [event | {"seq": (len(self.rows) + n) // 2} for n, event in enumerate(events)]

    def put_bad(self):
        self.rows.append(["no", "object"])
        return 1

    def answer(self, asked, _number):
        if self.is_down:
            return 503, b"away", {"Retry-After": "0"}
        query = parse_qs(urlsplit(asked.target).query)
        start, page = (int(query.get(name, ["0"])[0]) for name in ("from", "page"))
        if not self.by_cursor:
            return 200, {"data": self.rows}
        rows = [row for row in self.rows if isinstance(row, list) or row["seq"] >= start]
        shown, end = rows[page * 7 : page * 7 + 7], (page + 1) * 7
        following = f"/events?from={start}&page={page + 1}" if end < len(rows) else None
        return 200, {"data": shown, "next": following}

    @contextmanager
    def down(self):
        self.is_down = True
        yield
        self.is_down = False


class TestHttpPoll(SourceContract):
    by_cursor = False

    @contextmanager
    def outside(self, folder):
        polled = Polled(self.by_cursor)
        with http_service.serving(polled.answer) as service:
            polled.url = service.url
            yield polled

    @contextmanager
    def _trial(self, folder):
        """Compare without the field that the server adds."""
        with super()._trial(folder) as trial:
            read = trial.read
            trial.read = lambda: [{name: event[name] for name in ("n", "text")} for event in read()]
            yield trial


class TestHttpPollByCursor(TestHttpPoll):
    by_cursor = True


@dataclass
class Messages:
    """Topics of an MQTT broker, which no other test has, subscribed to before anything is published."""

    server: mqtt_server.MqttServer

    def __post_init__(self):
        self.name = uuid.uuid4().hex
        self.connector().open({}).close()

    def connector(self):
        made = ms.mqtt(self.server.url, f"{self.name}/#", client=self.name)
        return replace(made, records_max=7)

    def put(self, events):
        self.server.publish([(f"{self.name}/a", json.dumps(event)) for event in events])

    def put_bad(self):
        return 0

    @contextmanager
    def down(self):
        self.server.kill()
        yield
        self.server.start()


class TestMqtt(SourceContract):
    @pytest.fixture(autouse=True)
    def _server(self, tmp_path_factory):
        with mqtt_server.start(tmp_path_factory.mktemp("mqtt")) as self.server:
            yield

    @contextmanager
    def outside(self, folder):
        yield Messages(self.server)
