"""Every sink connector of ours, by the contract that is shipped for those of others."""

from __future__ import annotations

import json
import types
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import http_service
import redis_server

import millstream as ms
from millstream.testing.connectors import SinkContract


@dataclass
class HttpReceiver:
    """A receiver that keeps the key of each request that it took, and takes none twice; or one that keeps no keys."""

    keeps_keys: bool
    keyed = False
    url: str = ""
    taken: list = field(default_factory=list)
    keys: set = field(default_factory=set)
    is_down: bool = False

    def answer(self, asked, _):
        if self.is_down:
            return 503, {}
        rows = asked.json()
        if any(row.get("bad") for row in rows):
            return 422, {}
        key = asked.headers["Idempotency-Key"]
        if not (self.keeps_keys and key in self.keys):
            self.taken += rows
        self.keys.add(key)
        return 200, {}

    def connector(self):
        made = ms.to_http(self.url, batch=7)
        # To who keeps the keys, each row comes once.
        return replace(made, guarantee="transaction") if self.keeps_keys else made

    def rows(self):
        return self.taken

    def bad_row(self):
        return {"bad": True}

    @contextmanager
    def down(self):
        self.is_down = True
        yield
        self.is_down = False


class TestHttp(SinkContract):
    @contextmanager
    def outside(self, folder):
        receiver = HttpReceiver(keeps_keys=False)
        with http_service.serving(receiver.answer) as service:
            receiver.url = f"{service.url}/rows"
            yield receiver


@dataclass
class Redis:
    server: redis_server.RedisServer
    options: dict

    @property
    def keyed(self):
        return "hashes" in self.options

    def client(self):
        import redis

        return redis.Redis.from_url(self.server.url, decode_responses=True)

    def connector(self):
        return replace(ms.to_redis(self.server.url, **self.options), records_max=7)

    def rows(self):
        with self.client() as client:
            if self.keyed:
                return [client.hgetall(name) for name in client.keys("row:*")]
            return [fields for _, fields in client.xrange("out")]

    def bad_row(self):
        return {"n": None}

    @contextmanager
    def down(self):
        self.server.kill()
        yield
        self.server.start()


class TestRedisHashes(SinkContract):
    options = types.MappingProxyType({"hashes": "row:"})

    @contextmanager
    def outside(self, folder):
        with redis_server.start(folder) as server:
            yield Redis(server, self.options)


class TestRedisStream(TestRedisHashes):
    options = types.MappingProxyType({"stream": "out"})


def test_rows_are_as_json_has_them(tmp_path):
    taken = HttpReceiver(keeps_keys=False)
    with http_service.serving(taken.answer) as service, ms.connect(tmp_path / "log") as log:
        log.create_topic("t")
        with log.producer() as producer:
            producer.send("t", b'{"a":\n [1, 2.50, "x\\ny"]}', key=b"k")
        ms.sink(ms.to_http(service.url, form="array"), topic="t", log=tmp_path / "log").run(
            until="caught-up"
        )
        body = service.asked[-1].body
    assert json.loads(body) == [{"a": [1, 2.5, "x\ny"]}]
    assert b"2.50" in body
