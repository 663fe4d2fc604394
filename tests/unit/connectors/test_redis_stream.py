"""Streams of Redis as a source: what was trimmed before it was read, other streams, and what entries become."""

from __future__ import annotations

import json
import time
from dataclasses import replace

import pytest
import redis_server

import millstream as ms
from millstream.client import connect
from millstream.connectors.connector import BYTES_MAX
from millstream.errors import ConfigError, ConflictError, RetriableError


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with redis_server.start(tmp_path_factory.mktemp("redis")) as started:
        yield started


@pytest.fixture
def client(server):
    redis = pytest.importorskip("redis")
    with redis.Redis(port=server.port) as opened:
        opened.flushall()
        yield opened


def run(server, log, *streams, entries=3, **options):
    connector = replace(
        ms.redis_stream(server.url, *(streams or ("s",)), **options), entries=entries
    )
    return ms.source(connector, topic="events", to=log).run(until="caught-up")


def values(log):
    with connect(log) as opened:
        found = opened.read("events", 0, columns=("value",)).column("value").to_pylist()
    return [json.loads(value) for value in found]


def add(client, *numbers, stream="s"):
    for number in numbers:
        client.xadd(stream, {"n": number}, id=f"{number}-1")


@pytest.mark.parametrize("read", [0, 4])
@pytest.mark.parametrize("kept", [0, 2])
def test_entries_that_were_trimmed_before_they_were_read_are_counted(
    server, client, tmp_path, read, kept
):
    add(client, *range(1, 3 + 1))
    client.xtrim("s", maxlen=1, approximate=False)  # before the source was there
    add(client, *range(4, 3 + read + 1))
    run(server, tmp_path)
    before = len(values(tmp_path))
    add(client, *range(20, 30))
    client.xtrim("s", maxlen=kept, approximate=False)
    with pytest.raises(
        ConflictError, match=f"^{10 - kept} entries of the stream 's' were trimmed before"
    ):
        run(server, tmp_path)
    status = run(server, tmp_path, lost="skip")
    assert f"{10 - kept} entries" in status.alarm
    assert len(values(tmp_path)) == before + kept
    add(client, 40, 41)
    run(server, tmp_path)
    assert [event["n"] for event in values(tmp_path)][-2:] == ["40", "41"]


def test_what_is_trimmed_after_it_was_read_is_nobodys_loss(server, client, tmp_path):
    for first in (1, 11, 21):
        add(client, *range(first, first + 10))
        assert run(server, tmp_path).records == first + 9
        client.xtrim("s", maxlen=0 if first == 11 else 2, approximate=False)
    assert [int(event["n"]) for event in values(tmp_path)] == list(range(1, 31))


@pytest.mark.parametrize("how", ["deleted", "made anew"])
def test_another_stream_of_the_name_is_refused(server, client, tmp_path, how):
    add(client, 5, 6)
    run(server, tmp_path)
    client.delete("s")
    if how == "made anew":
        add(client, 1, 2)
    with pytest.raises(ConflictError, match="is not the stream that was read"):
        run(server, tmp_path)


@pytest.mark.parametrize("lost", ["stop", "skip"])
@pytest.mark.parametrize(
    ("count", "found"), [(7, "only 7 entries were ever added"), (12, "of 12 entries 0 are gone")]
)
def test_a_stream_that_was_made_anew_is_refused_though_its_ids_go_on(
    server, client, tmp_path, lost, count, found
):
    add(client, *range(1, 9))
    client.xtrim("s", maxlen=6, approximate=False)
    run(server, tmp_path)
    add(client, 20, 21)  # nobody will read these
    client.delete("s")
    add(client, *range(30, 30 + count))
    with pytest.raises(ConflictError, match=f"{found}, and 8-1 was read"):
        run(server, tmp_path, lost=lost)


def test_a_stream_that_is_not_asked_for_any_more_is_not_read(server, client, tmp_path):
    add(client, 1, stream="a")
    add(client, 2, stream="b")
    run(server, tmp_path, "a", "b")
    add(client, 3, stream="b")
    assert run(server, tmp_path, "a").records == 2
    assert run(server, tmp_path, "a", "b").records == 3


def test_a_wrong_password_is_refused_and_not_tried_without_end(server, client, monkeypatch):
    monkeypatch.setenv("MILLSTREAM_SOURCE_PASSWORD", "wrong")
    client.config_set("requirepass", "right")
    try:
        with pytest.raises(ConfigError, match=r"refuses the source: .*MILLSTREAM_SOURCE_PASSWORD"):
            ms.redis_stream(server.url, "s").open({})
        monkeypatch.setenv("MILLSTREAM_SOURCE_PASSWORD", "right")
        ms.redis_stream(server.url, "s").open({}).close()
    finally:
        client.config_set("requirepass", "")


@pytest.mark.parametrize("rest", ["/sales", "/0?db=3", "/0?decode_responses=True", "/1/2", "/0#x"])
def test_an_address_that_would_be_read_as_another_is_refused(rest):
    with pytest.raises(ConfigError, match="with the database as a number"):
        ms.redis_stream(f"redis://:secret@cache.example{rest}", "s")


def test_a_password_in_a_url_is_not_shown():
    made = ms.source(ms.redis_stream("redis://:secret@cache.example", "s"), topic="t")
    assert "secret" not in repr(made)
    with pytest.raises(ConfigError) as caught:
        ms.source("redis://:sec?ret@cache.example?streams=s", topic="t")
    assert "ret@" not in str(caught.value)


def test_many_streams_are_read_each_from_its_place(server, client, tmp_path):
    add(client, 1, 2, stream="a")
    run(server, tmp_path, "a", "b")
    add(client, 3, 4, stream="b")
    add(client, 5, 6, 7, 8, stream="a")
    run(server, tmp_path, "a", "b")
    found = [int(event["n"]) for event in values(tmp_path)]
    assert sorted(found) == list(range(1, 9))
    assert [n for n in found if n in (3, 4)] == [3, 4]
    assert [n for n in found if n not in (3, 4)] == [1, 2, 5, 6, 7, 8]


def test_a_field_is_the_value_as_its_bytes_are_and_the_time_is_the_ids(server, client, tmp_path):
    client.xadd("s", {"body": b'{"id": 7}', "x": b"\xff"}, id="5000-0")
    client.xadd("s", {"other": b"1"}, id="6000-0")
    client.xadd("s", {"body": b"no json"}, id="7000-0")
    client.xadd("s", {"body": b'{"id": 8}'}, id=f"{2**63}-0")
    assert run(server, tmp_path, field="body", key="id").dead == 2
    with connect(tmp_path) as log:
        rows = log.read("events", 0).to_pylist()
    assert [(row["value"], row["key"]) for row in rows] == [
        (b'{"id": 7}', b"7"),
        (b'{"id": 8}', b"8"),
    ]
    assert rows[0]["timestamp"].timestamp() == 5
    assert rows[1]["timestamp"].year == 9999


def test_what_is_no_stream_and_a_server_that_is_away_are_told_apart(server, client, tmp_path):
    client.set("s", "text")
    with pytest.raises(ConfigError, match="refused to be read: WRONGTYPE"):
        run(server, tmp_path)
    with pytest.raises(RetriableError, match=r"redis://127\.0\.0\.1:1 does not respond"):
        ms.redis_stream("redis://user:secret@127.0.0.1:1", "s").open({})


def test_a_position_of_something_else_is_refused(server, client):
    with pytest.raises(ConflictError, match="none in a stream of Redis"):
        ms.redis_stream(server.url, "s").open({"s": {"offset": 1}})


def test_a_lag_is_that_of_entries_which_were_read_and_not_of_a_stream_without_any(server, client):
    add(client, 1)
    client.xtrim("s", maxlen=0, approximate=False)
    reader = ms.redis_stream(server.url, "s").open({})
    assert reader.read(0).ready_ms is None  # it says how many entries are gone
    before_ms = time.time() * 1000 - 60_000
    client.xadd("s", {"n": 2})
    assert reader.read(0).ready_ms > before_ms
    reader.close()


def batches(source):
    reader = source.open({})
    while (batch := reader.read(0)) is not None:
        yield batch
    reader.close()


def test_a_batch_is_bounded_by_its_bytes_and_each_stream_has_its_turn(server, client):
    text = "x" * (BYTES_MAX // 4)
    for n in range(1, 7):
        for stream in ("a", "b"):
            client.xadd(stream, {"n": n, "text": text}, id=f"{n}-1")
    found = list(batches(ms.redis_stream(server.url, "a", "b")))
    assert max(sum(map(len, batch.values)) for batch in found) < BYTES_MAX + 2 * len(text)
    assert {*found[0].positions, *found[1].positions} == {"a", "b"}  # nobody waits for the other
    for stream in ("a", "b"):
        read = [batch.positions[stream]["read"] for batch in found if stream in batch.positions]
        assert read == sorted(read)
        assert read[-1] == 6
    assert sum(len(batch.values) for batch in found) == 12


def test_a_batch_is_bounded_by_its_records(server, client):
    for stream in ("a", "b", "c"):
        add(client, *range(1, 8), stream=stream)
    source = replace(ms.redis_stream(server.url, "a", "b", "c"), entries=3, records_max=5)
    found = list(batches(source))
    assert max(len(batch.values) for batch in found) == 5
    assert sum(len(batch.values) for batch in found) == 21
    assert {stream for batch in found[:2] for stream in batch.positions} == {"a", "b", "c"}
    last = {stream: place for batch in found for stream, place in batch.positions.items()}
    assert {place["id"] for place in last.values()} == {"7-1"}


def test_what_a_read_fetches_follows_the_size_of_entries(server, client):
    for n in range(1, 201):
        client.xadd("s", {"n": n, "text": "x" * 100_000}, id=f"{n}-1")
    before = client.info("stats")["total_net_output_bytes"]
    found = list(batches(ms.redis_stream(server.url, "s")))
    sent = client.info("stats")["total_net_output_bytes"] - before
    assert sum(len(batch.values) for batch in found) == 200
    assert sent < 2 * 200 * 100_000  # and not each entry again and again
