"""What the sink to Redis does beside the contract: a server that goes back, names that are taken, values."""

from __future__ import annotations

import json

import pytest
import redis_server

import millstream as ms
from millstream.errors import ConfigError


@pytest.fixture
def server(tmp_path):
    folder = tmp_path / "server"
    folder.mkdir()
    with redis_server.start(folder) as started:
        yield started


@pytest.fixture
def client(server):
    import redis

    with redis.Redis.from_url(server.url, decode_responses=True) as opened:
        yield opened


def _send(log_folder, *pairs):
    with ms.connect(log_folder) as log:
        log.create_topic("t", exist_ok=True)
        with log.producer() as producer:
            for key, row in pairs:
                raw = isinstance(row, bytes) or row is None
                producer.send("t", row if raw else json.dumps(row).encode(), key=key)


def _run(server, log, **options):
    made = ms.to_redis(server.url, **options)
    return ms.sink(made, topic="t", log=log, name="out").run(until="caught-up")


def test_a_server_that_lost_a_moment_gets_what_it_lacks(tmp_path, server, client):
    log = tmp_path / "log"
    _send(log, (b"a", {"n": 1}))
    _run(server, log, stream="s")
    import redis

    raw = redis.Redis.from_url(server.url)  # what is dumped is no text
    copy = {name: raw.dump(name) for name in raw.keys("*")}
    _send(log, (b"a", {"n": 2}), (b"a", {"n": 3}))
    _run(server, log, stream="s")
    raw.flushdb()
    for name, dumped in copy.items():
        raw.restore(name, 0, dumped)
    raw.close()
    status = _run(server, log, stream="s")
    assert "restored" in status.alarm
    assert [fields for _, fields in client.xrange("s")] == [{"n": "1"}, {"n": "2"}, {"n": "3"}]


def test_a_hash_has_the_fields_of_the_last_row_alone(tmp_path, server, client):
    log = tmp_path / "log"
    client.set("u:a", "somebody's")
    _send(
        log,
        (b"a", {"old": 1, "n": 1}),
        (b"a", {"n": 2.5, "yes": True, "list": [1, "x"], "none": None, "text": "ü"}),
        (b"b", {"n": 1}),
        (b"b", None),
        (None, {"n": 4}),
        (b"c", {"n": None}),
    )
    assert _run(server, log, hashes="u:").dead == 2
    assert client.keys("u:*") == ["u:a"]
    assert client.hgetall("u:a") == {"n": "2.5", "yes": "true", "list": '[1,"x"]', "text": "ü"}


@pytest.mark.parametrize("how", [{"hashes": "u:"}, {"stream": "u:a"}])
def test_half_a_surrogate_pair_is_written_wherever_it_is(tmp_path, server, client, how):
    log = tmp_path / "log"
    _send(log, (b"a", {"text": "\ud800", "list": ["\ud800"], "\ud801": 1}))
    assert _run(server, log, **how).records == 1
    found = client.hgetall("u:a") if "hashes" in how else client.xrange("u:a")[0][1]
    assert found == {"text": r"\ud800", "list": r'["\ud800"]', r"\ud801": "1"}


def test_numbers_keep_the_digits_that_they_came_with(tmp_path, server, client):
    log = tmp_path / "log"
    raw = b'{"a":12345678901234567.89,"b":1.10,"c":[{"d":-0.0,"e":9007199254740993.5}],"f":1e2}'
    deep = b'{"a":' + b"[" * 700 + b"1.5" + b"]" * 700 + b"}"
    _send(log, (b"a", raw), (b"deep", deep))
    assert _run(server, log, hashes="u:").dead <= 1  # how deep is too deep depends on the stack
    found = {"a": "12345678901234567.89", "b": "1.10", "f": "1e2"}
    assert client.hgetall("u:a") == {**found, "c": '[{"d":-0.0,"e":9007199254740993.5}]'}


def test_a_name_that_is_no_stream_is_refused_and_nothing_is_noted(tmp_path, server, client):
    log = tmp_path / "log"
    client.set("s", "somebody's")
    _send(log, (b"a", {"n": 1}))
    with pytest.raises(ConfigError, match=r"'s' of .* is no stream"):
        _run(server, log, stream="s")
    client.delete("s")
    assert _run(server, log, stream="s").records == 1
    assert client.xlen("s") == 1


def test_a_name_that_stops_being_a_stream_meanwhile_loses_no_row(
    tmp_path, server, client, monkeypatch
):
    from redis.client import Pipeline

    log = tmp_path / "log"
    _send(log, (b"a", {"n": 1}))
    execute = Pipeline.execute

    def taken_meanwhile(pipe, *args, **settings):
        client.set("s", "somebody's")
        return execute(pipe, *args, **settings)

    with monkeypatch.context() as patch:
        patch.setattr(Pipeline, "execute", taken_meanwhile)
        with pytest.raises(ConfigError, match="WRONGTYPE"):
            _run(server, log, stream="s")
    client.delete("s")
    assert _run(server, log, stream="s").records == 1
    assert client.xlen("s") == 1


def test_a_server_without_memory_is_waited_for(tmp_path, server, client):
    log = tmp_path / "log"
    client.config_set("maxmemory-policy", "noeviction")
    _send(log, (b"a", {"n": 1}))
    _run(server, log, stream="s")
    _send(log, (b"a", {"n": 2}))
    client.config_set("maxmemory", "1")
    made = ms.sink(ms.to_redis(server.url, stream="s"), topic="t", log=log, name="out")
    seen = []

    def give_memory(status):
        seen.append(status)
        client.config_set("maxmemory", "0")

    made.run(until="caught-up", on_status=give_memory)
    assert seen[0].state == "retrying"
    assert "no memory left" in seen[0].problem
    assert client.xlen("s") == 2


def test_a_stream_keeps_about_as_many_entries_as_are_asked_for(tmp_path, server, client):
    log = tmp_path / "log"
    _send(log, *((b"a", {"n": n}) for n in range(1000)))
    _run(server, log, stream="s", length=100)
    assert 100 <= client.xlen("s") < 400
