"""What a sink does beside the contract: flawed connectors fail the suite, stores that were set back, options, the command."""

from __future__ import annotations

import json
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
from click.testing import CliRunner
from http_service import serving

import millstream as ms
from millstream.cli.main import millstream
from millstream.connectors.sinks.connector import RefusedRecord, WrittenBatch
from millstream.connectors.sinks.record_batches import RecordBatches
from millstream.connectors.sinks.sink_note import BatchNote
from millstream.connectors.sinks.urls import sink_connector_of
from millstream.errors import (
    ConfigError,
    ConflictError,
    FencedError,
    OffsetOutOfRangeError,
    RetriableError,
)
from millstream.testing.connectors import SinkContract


@dataclass
class Store:
    """A store in memory that has the guarantee "transaction"; ``flaw`` is what it does wrong."""

    flaw: str = ""
    taken: list = field(default_factory=list)
    note: BatchNote | None = None
    token: str = ""
    keyed = False

    # as what is outside
    def connector(self):
        return StoreConnector(self)

    def rows(self):
        return self.taken

    def bad_row(self):
        return {"bad": True}

    def down(self):
        return None


@dataclass
class StoreConnector:
    store: Store
    kind: str = "store"
    origin: str = "here"
    guarantee: str = "transaction"
    records_max: int = 7
    bytes_max: int = 1 << 20

    def open(self, opening):
        return StoreWriter(self.store, opening.token)


class StoreWriter:
    def __init__(self, store, token):
        self.store, self.token, self.last = store, token, store.note and store.note.batch
        if store.flaw != "no fence":
            store.token = token

    def write(self, batch):
        store = self.store
        if store.flaw != "no fence" and store.token != self.token:
            raise FencedError("a later one has begun")
        if store.note and store.note.batch.number == batch.number and store.flaw != "again":
            return [] if store.flaw == "refused once" else store.note.refused
        bad = [one for one in batch.records if one.row and one.row.get("bad")]
        if bad and store.flaw == "refuses all":
            bad = batch.records
        if store.flaw == "silent":
            refused = []
        else:
            refused = [RefusedRecord(one.partition, one.offset, "it is bad") for one in bad]
        store.taken += [one.row for one in batch.records if one not in bad]
        store.note = BatchNote.of(batch, refused)
        return refused

    def close(self):
        pass


class OfStore(SinkContract):
    flaw = ""

    @contextmanager
    def outside(self, folder):
        yield Store(self.flaw)


class TestStore(OfStore):
    pass


ALL = sorted(name for name in dir(OfStore) if name.startswith("test_"))
DEAD = "test_what_cannot_be_written_is_a_dead_letter_and_the_others_are_written"


@pytest.mark.parametrize(
    ("flaw", "test"),
    [
        ("no fence", "test_a_later_sink_of_the_name_stops_the_earlier"),
        ("again", "test_a_run_may_die_at_any_call"),
        ("refused once", DEAD),
        ("refuses all", DEAD),
        ("silent", DEAD),
    ],
)
def test_the_suite_fails_a_connector_with_a_flaw(tmp_path, flaw, test):
    contract = OfStore()
    contract.flaw = flaw
    with pytest.raises((AssertionError, ConflictError)):
        getattr(contract, test)(tmp_path)


def _send(log_folder, *rows, topic="t", partition=None):
    with ms.connect(log_folder) as log:
        log.create_topic(topic, exist_ok=True)
        with log.producer() as producer:
            for row in rows:
                value = row if isinstance(row, bytes) else json.dumps(row).encode()
                producer.send(topic, value, partition=partition)


def _run(store, log, **settings):
    made = ms.sink(store.connector(), topic="t", log=log, name="out", **settings)
    return made.run(until="caught-up")


def test_a_store_that_was_replaced_gets_all_again_with_an_alarm(tmp_path):
    _send(tmp_path, *({"n": n} for n in range(30)))
    store = Store()
    _run(store, tmp_path)
    empty = Store()
    status = _run(empty, tmp_path)
    assert empty.taken == store.taken == [{"n": n} for n in range(30)]
    assert "was replaced, or restored" in status.alarm


def test_a_store_that_was_restored_gets_what_it_lacks(tmp_path):
    _send(tmp_path, *({"n": n} for n in range(30)))
    store = Store()
    _run(store, tmp_path)
    # A copy of it from after two batches: 14 rows.
    copy = Store(taken=store.taken[:14], note=BatchNote(WrittenBatch(1, {0: 14})))
    assert "up to 1, and the log has written them up to 4" in _run(copy, tmp_path).alarm
    assert copy.taken == store.taken


def test_a_log_that_was_set_back_is_refused(tmp_path):
    _send(tmp_path, {"n": 1})
    ahead = Store(note=BatchNote(WrittenBatch(5, {0: 40})))
    with pytest.raises(ConflictError, match="up to 5, and the log has written them up to -1"):
        _run(ahead, tmp_path)
    assert not ahead.taken


def test_a_new_sink_may_begin_with_the_next_record(tmp_path):
    _send(tmp_path, {"n": 1})
    store = Store()
    _run(store, tmp_path, start="latest")
    _send(tmp_path, {"n": 2})
    _run(store, tmp_path, start="latest")
    assert store.taken == [{"n": 2}]


def test_a_new_sink_may_begin_at_an_offset_or_a_time_and_goes_on_from_where_it_is(tmp_path):
    _send(tmp_path, *({"n": n} for n in range(4)))
    store = Store()
    _run(store, tmp_path, start={0: 2})
    with ms.connect(tmp_path) as log:
        log.delete_records("t", 0, 3)  # its start is not asked for again
    _send(tmp_path, {"n": 4})
    _run(store, tmp_path, start={0: 2})
    assert store.taken == [{"n": 2}, {"n": 3}, {"n": 4}]
    with pytest.raises(
        OffsetOutOfRangeError, match=r"start is offset 2 of t/0, which holds \[3, 5\)"
    ):
        ms.sink(Store().connector(), topic="t", log=tmp_path, name="b", start={0: 2}).run(
            until="caught-up"
        )
    ahead = Store()
    _run_as("c", ahead, tmp_path, start="2500-01-01")
    _send(tmp_path, {"n": 5})
    _run_as("c", ahead, tmp_path, start="2500-01-01")
    assert ahead.taken == [{"n": 5}]


def _run_as(name, store, log, **settings):
    ms.sink(store.connector(), topic="t", log=log, name=name, **settings).run(until="caught-up")


def test_a_name_is_of_one_topic_one_store_and_no_source(tmp_path):
    _send(tmp_path, {"n": 1})
    _send(tmp_path, {"n": 1}, topic="u")
    _run(Store(), tmp_path)
    made = StoreConnector(Store())
    with pytest.raises(ConflictError, match="Give this one another name"):
        ms.sink(made, topic="u", log=tmp_path, name="out").run(until="caught-up")
    made.origin = "there"
    with pytest.raises(ConflictError, match=r"to here .*to be written to there"):
        ms.sink(made, topic="t", log=tmp_path, name="out").run(until="caught-up")
    ms.source(ms.generate({"n": int}, count=1), topic="made", to=tmp_path).run(until="caught-up")
    with pytest.raises(ConflictError, match="the positions of a source"):
        ms.sink(StoreConnector(Store()), topic="t", log=tmp_path, name="made").run()


def test_a_mistyped_address_does_not_cost_the_name(tmp_path):
    _send(tmp_path, {"n": 1})
    mistyped, store = StoreConnector(Store()), Store()
    mistyped.origin, mistyped.open = "hree", _nothing_is_there
    with pytest.raises(ConfigError, match="nothing is there"):
        ms.sink(mistyped, topic="t", log=tmp_path, name="out").run(until="caught-up")
    _run(store, tmp_path)
    assert store.taken == [{"n": 1}]


def _nothing_is_there(_opening):
    raise ConfigError("nothing is there")


def test_a_topic_that_was_made_anew_is_refused(tmp_path):
    _send(tmp_path, {"n": 1})
    _run(Store(), tmp_path)
    with ms.connect(tmp_path) as log:
        log.delete_topic("t")
    with pytest.raises(ConfigError, match="there is no topic 't'"):
        _run(Store(), tmp_path)
    _send(tmp_path, {"n": 1})
    with pytest.raises(ConflictError, match="deleted and made anew"):
        _run(Store(), tmp_path)


def test_records_that_are_gone_stop_it(tmp_path):
    _send(tmp_path, *({"n": n} for n in range(3)))
    store = Store()
    _run(store, tmp_path)
    _send(tmp_path, *({"n": n} for n in range(3)))
    with ms.connect(tmp_path) as log:
        log.delete_records("t", 0, 5)
    with pytest.raises(ConflictError, match=r"the next one was 3, and the topic has \[5, 6\)"):
        _run(store, tmp_path)


@pytest.mark.parametrize("before", [(), ({"n": 0},)])
def test_records_that_are_gone_from_a_partition_never_read_stop_it(tmp_path, before):
    with ms.connect(tmp_path) as log:
        log.create_topic("t", partitions=2)
    _send(tmp_path, *before, partition=0)
    _run(Store(), tmp_path)
    _send(tmp_path, *({"n": n} for n in range(1, 6)), partition=1)
    with ms.connect(tmp_path) as log:
        log.delete_records("t", 1, 3)
    store = Store(note=BatchNote(WrittenBatch(0, {0: 1})) if before else None)
    with pytest.raises(ConflictError, match=r"the next one was 0, and the topic has \[3, 5\)"):
        _run(store, tmp_path)


def test_a_topic_that_is_shorter_than_what_was_written_stops_it(tmp_path):
    _send(tmp_path, {"n": 1})
    with ms.connect(tmp_path) as log:
        batches = RecordBatches(log, "t", log.topics()["t"].topic_id, 10, 1 << 20)
        with pytest.raises(ConflictError, match="t/0 ends at 1, and was written up to 3"):
            batches.next({0: 3})


@pytest.mark.parametrize("number", ["1e400", "-1e400", "NaN", "-Infinity", "9" * 5000])
def test_a_number_that_would_be_another_is_a_dead_letter(tmp_path, number):
    _send(tmp_path, {"n": 1})
    _send(tmp_path, f'{{"n": {number}}}'.encode())
    store = Store()
    assert _run(store, tmp_path).dead == 1
    assert store.taken == [{"n": 1}]


def test_rows_that_take_others_back_are_dead_letters(tmp_path):
    _send(tmp_path, {"n": 1}, {"n": 1, "_diff": -1}, {"n": 2, "_diff": 1})
    store = Store()
    assert _run(store, tmp_path).dead == 1
    assert store.taken == [{"n": 1}, {"n": 2, "_diff": 1}]
    with ms.connect(tmp_path) as log:
        headers = log.read("out.dead", 0, columns=("headers",))["headers"].to_pylist()[0]
    said = {one["key"]: one["value"].decode() for one in headers}
    assert (said["topic"], said["partition"], said["offset"], said["step"]) == (
        "t",
        "0",
        "1",
        "out",
    )
    assert 'cleanup="compact"' in said["reason"]


# ── HTTP ────────────────────────────────────────────────────────────────────────────────────


def _answers(*statuses):
    """Return what answers with these, one after the other, and then with 200."""
    return lambda _, number: (
        (*statuses[number - 1], {})[:3] if number <= len(statuses) else (200, {})
    )


def test_a_batch_is_sent_again_under_its_key_not_before_retry_after(tmp_path):
    _send(tmp_path, {"n": 1}, {"n": 2})
    statuses = []
    with serving(_answers((429, {}, {"Retry-After": "1"}), (500, {}))) as service:
        made = ms.sink(ms.to_http(service.url), topic="t", log=tmp_path)
        made.run(until="caught-up", on_status=statuses.append)
    assert [status.state for status in statuses] == ["retrying", "retrying", "writing", "idle"]
    assert [status.behind for status in statuses] == [2, 2, 0, 0]
    assert len(service.asked) == 3
    assert len({(one.headers["Idempotency-Key"], one.body) for one in service.asked}) == 1
    assert "responded 429" in statuses[0].problem


def test_what_the_receiver_asks_to_wait_is_waited(tmp_path):
    with serving(_answers((503, {}, {"Retry-After": "7"}))) as service:
        from millstream.connectors.sinks.connector import RecordsToWrite, SinkOpening, SinkRecord

        writer = ms.to_http(service.url).open(SinkOpening("out", "t", "l", "x"))
        record = SinkRecord(0, 0, 0, None, b"{}", {})
        with pytest.raises(RetriableError) as raised:
            writer.write(RecordsToWrite("out-l-0", 0, [record], {0: 1}))
    assert raised.value.retry_after_s == 7


def test_refused_records_are_found_by_halves(tmp_path):
    _send(tmp_path, *({"n": n} for n in range(16)))

    def answer(asked, _):
        return (422 if any(row["n"] in (3, 11) for row in asked.json()) else 200), {}

    with serving(answer) as service:
        status = ms.sink(ms.to_http(service.url), topic="t", log=tmp_path).run(until="caught-up")
        taken = [
            row["n"] for one in service.asked if answer(one, 0)[0] == 200 for row in one.json()
        ]
        keys = [one.headers["Idempotency-Key"] for one in service.asked]
    assert (status.records, status.dead) == (14, 2)
    assert taken == [n for n in range(16) if n not in (3, 11)]
    assert len(set(keys)) == len(keys) == 15


@pytest.mark.parametrize("status", [401, 404, 302])
def test_an_address_that_is_wrong_stops_it(tmp_path, status):
    _send(tmp_path, {"n": 1})
    with serving(lambda *_: (status, {}, {"Location": "http://127.0.0.2/"})) as service:
        made = ms.sink(ms.to_http(f"{service.url}/x?token=secret"), topic="t", log=tmp_path)
        with pytest.raises(ConfigError) as raised:
            made.run()
    assert "secret" not in str(raised.value)
    assert "/x" in str(raised.value)


def test_headers_forms_and_contents(tmp_path, monkeypatch):
    monkeypatch.setenv("MILLSTREAM_SINK_AUTHORIZATION", "Bearer hush")
    _send(tmp_path, {"n": 1})
    with ms.connect(tmp_path) as log, log.producer() as producer:
        producer.send("t", None, key=b"gone")
    with serving(_answers()) as service:
        made = ms.to_http(service.url, form="lines", content="record", headers={"X-A": "b"})
        assert "hush" not in repr(made)
        assert ms.sink(made, topic="t", log=tmp_path).run(until="caught-up").dead == 0
        asked = service.asked[0]
        assert [row["row"] for row in map(json.loads, asked.body.splitlines())] == [{"n": 1}, None]
        assert [row["key"] for row in map(json.loads, asked.body.splitlines())] == [None, "gone"]
        assert (asked.headers["Authorization"], asked.headers["X-A"]) == ("Bearer hush", "b")
        assert asked.headers["Content-Type"] == "application/x-ndjson"
        rows = ms.sink(ms.to_http(service.url), topic="t", log=tmp_path, name="rows")
        assert rows.run(until="caught-up").dead == 1


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: ms.to_http("ftp://x/"), "no URL of HTTP"),
        (lambda: ms.to_http("https://me:hush@x/"), "a user or a password"),
        (lambda: ms.to_http("https://x/", batch=0), "batch is 0"),
        (lambda: ms.to_http("https://x/", form="xml"), "xml"),
        (lambda: ms.to_http("https://x/", headers={"Idempotency-Key": "1"}), "Idempotency-Key"),
        (lambda: ms.to_http("https://x/", headers={"a": "b\nc: d"}), "one line of ASCII"),
        (lambda: ms.to_redis("redis://x/?db=1", stream="s"), "none of Redis"),
        (lambda: ms.to_redis("redis://x/0"), "Give one of them"),
        (lambda: ms.to_redis("redis://x/0", hashes="a", length=3), "length is 3"),
        (lambda: ms.sink("ftp://hush@x/", topic="t"), "begins with http://"),
        (lambda: ms.sink("https://x/", topic="t/u"), "topic is 't/u'"),
        (lambda: ms.sink("https://x/", topic="t", start="now"), "start"),
        (lambda: sink_connector_of("https://x/", {"bach": "1"}), "bach"),
        (lambda: sink_connector_of("https://x/", {"batch": "one"}), "Give a number"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(make, words):
    with pytest.raises(ConfigError, match=words) as raised:
        make()
    assert "hush" not in str(raised.value)


def test_the_command_writes_a_topic(tmp_path):
    _send(tmp_path, {"n": 1}, b"[]")
    with serving(_answers()) as service:
        arguments = ["sink", service.url, "--topic", "t", "--log", str(tmp_path)]
        arguments += ["-o", "form=lines", "--until", "caught-up"]
        said = CliRunner().invoke(millstream, arguments, prog_name="millstream")
        assert service.asked[0].body == b'{"n": 1}\n'
    assert said.exit_code == 0, said.output
    assert "idle, 1 records, 1 dead letters, 0 to come" in said.output
    wrong = CliRunner().invoke(millstream, [*arguments[:6], "-o", "form"], prog_name="millstream")
    assert wrong.exit_code == 2
    assert "NAME=VALUE" in wrong.output
