"""A source and its positions in the log: what is refused, what is counted, who writes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

import millstream as ms
from millstream.capture.last_status import LastStatus
from millstream.cli.main import run as run_command
from millstream.client import connect
from millstream.connectors import source_writer
from millstream.connectors.connector import SourceBatch
from millstream.connectors.metrics import source_figures
from millstream.connectors.source import SourceStatus
from millstream.errors import (
    ConfigError,
    ConflictError,
    ProducerFencedError,
    RetriableError,
    UserCodeError,
)
from millstream.metrics.definitions import METRICS, PREFIX
from millstream.testing.connectors import SourceContract


def numbers(count, **options):
    return ms.generate(lambda n, _: {"n": n}, count=count, **options)


def values(log, topic="events"):
    with connect(log) as opened:
        found = opened.read(topic, 0, columns=("value",)).column("value").to_pylist()
    return [json.loads(value) for value in found]


def run(connector, log, **options):
    return ms.source(connector, topic="events", to=log, **options).run(until="caught-up")


# ── what is refused ─────────────────────────────────────────────────────────────────────────


def test_a_source_of_another_kind_or_topic_is_refused(tmp_path):
    run(numbers(3), tmp_path / "log", name="s")
    with pytest.raises(ConflictError, match="reads from generate into the topic 'events'"):
        run(ms.folder(tmp_path), tmp_path / "log", name="s")
    with pytest.raises(ConflictError, match="another name"):
        ms.source(numbers(3), topic="other", to=tmp_path / "log", name="s").run(until="caught-up")


def test_another_address_is_refused_unless_the_data_has_moved(tmp_path):
    log = tmp_path / "log"
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        file = tmp_path / name / "x.jsonl"
        file.write_text('{"n": 1}\n')
        os.utime(file, (1, 1))
    run(ms.folder(tmp_path / "a", changed="skip"), log)
    with pytest.raises(ConflictError, match="moved=True"):
        run(ms.folder(tmp_path / "b", changed="skip"), log)
    run(ms.folder(tmp_path / "b", changed="skip"), log, moved=True)
    run(ms.folder(tmp_path / "b", changed="skip"), log)
    assert values(log) == [{"n": 1}]


def test_a_topic_that_was_made_anew_is_refused(tmp_path):
    run(numbers(3), tmp_path)
    with connect(tmp_path) as log:
        log.delete_topic("events")
    with pytest.raises(ConflictError, match="lacks the 3 records from before"):
        run(numbers(5), tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"topic": "a b"}, "topic is 'a b'"),
        ({"topic": "t", "name": ""}, "name is ''"),
        ({"topic": "s.dead", "name": "s"}, "keeps its own"),
        ({"topic": "t", "partitions": 0}, "partitions is 0"),
    ],
)
def test_an_option_that_is_not_possible_is_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        ms.source(numbers(1), **options)


def test_a_topic_that_is_made_anew_while_the_source_runs_is_noticed(tmp_path, monkeypatch):
    monkeypatch.setattr(source_writer, "TOPIC_LOOK_S", 0.0)

    def make_anew(status):
        if status.records == 2:
            with connect(tmp_path) as log:
                log.delete_topic("events")
                log.create_topic("events")

    made = ms.source(replace(numbers(9), batch=1), topic="events", to=tmp_path)
    with pytest.raises(ConflictError, match="was deleted, and lacks the 2 records from before"):
        made.run(until="caught-up", on_status=make_anew)


def test_positions_that_were_lost_are_noticed_before_anything_is_read_again(tmp_path):
    files = tmp_path / "in"
    files.mkdir()
    for name in ("a.jsonl", "b.jsonl"):
        (files / name).write_text('{"n": 1}\n')
        run(ms.folder(files, settled="0 seconds"), tmp_path / "log")
    (files / "a.jsonl").rename(files / "c.jsonl")  # forgets a split, and has another one
    assert run(ms.folder(files, settled="0 seconds"), tmp_path / "log").records == 2
    with connect(tmp_path / "log") as log:
        keys = log.read("events.positions", 0, columns=("offset", "key")).to_pylist()
        last = max(row["offset"] for row in keys if b"b.jsonl" in row["key"])
        log.delete_records("events.positions", 0, last + 1)
    with pytest.raises(ConflictError, match="has lost positions: of 2 there are 1"):
        run(ms.folder(files, settled="0 seconds"), tmp_path / "log")


def test_a_name_of_a_file_that_is_no_text_is_kept_as_it_is(tmp_path):
    files = tmp_path / "in"
    files.mkdir()
    Path(os.fsdecode(os.fsencode(files) + b"/caf\xe9.jsonl")).write_text('{"n": 1}\nbad\n')
    for _ in range(2):
        status = run(ms.folder(files, settled="0 seconds"), tmp_path / "log")
        assert (status.records, status.dead) == (1, 1)
    with connect(tmp_path / "log") as log:
        (dead,) = log.read("events.dead", 0, columns=("headers",)).to_pylist()
    assert {"key": "where", "value": b"caf\\udce9.jsonl, line 2"} in dead["headers"]


# ── who writes ──────────────────────────────────────────────────────────────────────────────


@dataclass
class Failing:
    """A connector that fails in the middle, while a later source begins."""

    later: object
    kind: str = "failing"
    origin: str = "here"
    guarantee: str = "each once"
    alarm: str = ""
    opened: int = 0

    def open(self, positions):
        self.opened += 1
        return self

    def read(self, wait_s):
        later, self.later = self.later, None
        if later is None:
            return SourceBatch([b"{}"])
        later()
        raise RetriableError("it is away")

    def stored(self, batch):
        pass

    def close(self):
        pass


def test_a_source_that_tries_again_ends_if_a_later_one_has_begun(tmp_path):
    later = ms.source(Failing(None), topic="events", to=tmp_path, name="s")

    def run_later():
        later.run(on_status=lambda _: later.stop())

    earlier = ms.source(Failing(run_later), topic="events", to=tmp_path, name="s")
    with pytest.raises(ProducerFencedError, match="another source 's' has begun"):
        earlier.run()
    assert values(tmp_path) == [{}]


def test_what_is_retried_is_said_in_one_line_with_the_counts_of_before(tmp_path):
    failing = Failing(lambda: None)
    made = ms.source(failing, topic="events", to=tmp_path)
    seen = []

    def take(status):
        seen.append(status)
        if status.records:
            made.stop()

    made.run(on_status=take)
    assert [status.state for status in seen] == ["retrying", "streaming"]
    assert seen[0].problem == "it is away"
    assert failing.opened == 2


def test_a_killed_process_leaves_each_record_once(tmp_path):
    """Killed with its log, at any time, ten times over."""
    (tmp_path / "in").mkdir()
    for number in range(20):
        file = tmp_path / "in" / f"{number:02}.jsonl"
        file.write_text("".join(f'{{"n": {number * 500 + n}}}\n' for n in range(500)))
        os.utime(file, (number, number))
    program = (
        "import millstream as ms, sys\n"
        "from dataclasses import replace\n"
        "made = replace(ms.folder(sys.argv[1]), records_max=137)\n"
        "ms.source(made, topic='events', to=sys.argv[2]).run(until='caught-up', on_status=lambda s: print(s.records, flush=True))\n"
    )
    log = tmp_path / "log"
    for killed_after in (1, 3, 9, 20, None):
        with subprocess.Popen(
            [sys.executable, "-c", program, tmp_path / "in", log], stdout=subprocess.PIPE
        ) as process:
            for count, _ in enumerate(process.stdout, 1):
                if count == killed_after:
                    process.send_signal(signal.SIGKILL)
                    break
            process.wait(300)
    assert process.returncode == 0
    assert values(log) == [{"n": n} for n in range(10_000)]


# ── ms.generate ─────────────────────────────────────────────────────────────────────────────


SCHEMA = {
    "id": int,
    "share": float,
    "ok": bool,
    "name": str,
    "at": datetime,
    "user": range(10, 20),
    "page": ["home", "cart"],
}


def test_events_of_a_seed_are_always_the_same(tmp_path):
    start = datetime(2026, 1, 1, tzinfo=UTC)
    made = ms.generate(SCHEMA, count=500, seed=7, start=start, rate=1e6, key="user", time="at")
    run(made, tmp_path / "whole")
    for count in (1, 2, 100, 350, 500):
        run(replace(made, count=count), tmp_path / "parts")
    assert values(tmp_path / "parts") == values(tmp_path / "whole")
    run(ms.generate(SCHEMA, count=500, seed=8, start=start), tmp_path / "other")
    assert values(tmp_path / "other") != values(tmp_path / "whole")
    events = values(tmp_path / "whole")
    assert [event["id"] for event in events] == list(range(500))
    assert {event["user"] for event in events} == set(range(10, 20))
    assert {event["page"] for event in events} == {"home", "cart"}
    assert all(0 <= event["share"] < 1 for event in events)
    with connect(tmp_path / "whole") as log:
        table = log.read("events", 0)
    assert [key.decode() for key in table["key"].to_pylist()] == [str(e["user"]) for e in events]


def test_times_follow_by_the_rate_and_are_those_of_the_records(tmp_path):
    start = datetime(2026, 1, 1, tzinfo=UTC)
    run(ms.generate({"at": datetime}, count=3, start=start, rate=4, time="at"), tmp_path)
    with connect(tmp_path) as log:
        times = log.read("events", 0)["timestamp"].to_pylist()
    assert times == [start + timedelta(milliseconds=250 * n) for n in range(3)]


def test_as_many_events_are_made_as_are_due():
    now = [0.0]

    def sleep(seconds):
        now[0] += seconds

    made = replace(numbers(100, rate=10), monotonic_s=lambda: now[0], sleep_s=sleep)
    reader = made.open({})
    counts = []
    while (batch := reader.read(0.2)) is not None:
        counts.append((round(now[0], 3), len(batch.values)))
    assert sum(count for _, count in counts) == 100
    made_by = 0
    for at_s, count in counts:
        made_by += count
        assert made_by <= at_s * 10 + 1e-6
        assert made_by >= at_s * 10 - 2
    reader = made.open({"events": 50})  # what fell due while it was stopped is made from now on
    assert len(reader.read(0.2).values) <= 2


def test_a_function_that_fails_is_named_with_its_event(tmp_path):
    def make(number, chance):
        return {"n": 1 / (3 - number)}

    with pytest.raises(UserCodeError, match="event 3 could not be generated: ZeroDivisionError"):
        run(ms.generate(make, count=5), tmp_path)


@pytest.mark.parametrize(
    "options",
    [
        {"rate": 0},
        {"rate": float("inf")},
        {"count": -1},
        {"start": datetime(2026, 1, 1)},  # noqa: DTZ001 - that is what is refused
        {"event": {"a": "text"}},
        {"event": {"a": []}},
        {"event": {"a": dict}},
    ],
)
def test_what_cannot_be_generated_is_refused(options):
    with pytest.raises(ConfigError, match="Give"):
        ms.generate(**{"event": SCHEMA} | options)


# ── URLs and the command ────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("nothing", "one without a scheme"),
        ("ftp://user:secret@host/x", "not known: ftp://…"),
        ("folder://host/x", "is no folder"),
        ("folder:///", "is no folder"),
        ("folder:///dev", "If /dev is meant, give folder:////dev"),
        ("folder:///x?patern=*", "Did you mean 'pattern'"),
        ("folder:///x?columns=id", "Give NAME:TYPE"),
        ("folder:///x?columns=id:it", "Did you mean 'int'"),
        ("s3://user:secret@bucket/x", "can't have"),
        ("redis://host", "names of streams"),
        ("mqtt://host?topics=a", "client is ''"),
        ("mqtt://host:0?topics=a&client=b", "no topic of MQTT"),
    ],
)
def test_a_url_that_is_of_nothing_is_refused_without_its_password(url, message):
    with pytest.raises(ConfigError, match=message) as raised:
        ms.source(url, topic="t")
    assert "secret" not in str(raised.value)


def test_the_command_reads_a_folder_and_says_what_it_did(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in").mkdir()
    file = tmp_path / "in" / "a.csv"
    file.write_text("id;ok\n1;true\nx;true\n")
    os.utime(file, (1, 1))
    url = "folder:///in?delimiter=;&columns=id:int,ok:bool&key=id"
    assert run_command(["source", url, "--topic", "events", "--until", "caught-up"]) == 0
    assert "idle, 1 records, 1 dead letters" in capsys.readouterr().out
    assert values(tmp_path / "data") == [{"id": 1, "ok": True}]
    assert (
        run_command(["source", "folder:///no", "--topic", "events2", "--until", "caught-up"]) == 2
    )
    assert "is no folder. Create it" in capsys.readouterr().err


# ── the contract can fail ───────────────────────────────────────────────────────────────────


class Numbered:
    """A list that is read three events at a time. Each flaw breaks a promise."""

    def __init__(self, flaw=""):
        self.flaw, self.events = flaw, []

    # what the contract puts into
    def connector(self):
        return self

    def put(self, events):
        self.events += [json.dumps(event).encode() for event in events]

    def put_bad(self):
        return 1 if self.flaw == "drops" else 0

    def down(self):
        return None

    # the connector
    kind, origin, guarantee, alarm = "list", "here", "each once", ""

    def open(self, positions):
        at = positions.get("list", 0)
        if self.flaw == "skips":
            at += 1 if at else 0
        if self.flaw == "repeats":
            at = max(0, at - 1)
        return NumberedReader(self, at)


@dataclass
class NumberedReader:
    of: Numbered
    at: int
    alarm: str = ""

    def read(self, wait_s):
        if self.of.flaw == "blocks" and self.at == len(self.of.events):
            time.sleep(0.3)
        found = self.of.events[self.at : self.at + 3]
        if not found:
            return None
        self.at += len(found)
        if self.of.flaw == "reorders":
            found.reverse()
        stored = (
            self.at + 3
            if self.of.flaw == "ahead" and len(self.of.events) > self.at + 3
            else self.at
        )
        return SourceBatch(found, positions={"list": stored})

    def stored(self, batch):
        pass

    def close(self):
        pass


def fails(test, flaw, folder):
    """Return whether a connector with a flaw fails a test of the contract."""

    class Contract(SourceContract):
        rounds = 4

        @contextmanager
        def outside(self, folder):
            yield Numbered(flaw)

    folder.mkdir()
    try:
        getattr(Contract(), test)(folder)
    except AssertionError:
        return True
    return False


def test_a_connector_that_keeps_the_contract_passes(tmp_path):
    for test in [name for name in dir(SourceContract) if name.startswith("test_")]:
        assert not fails(test, "", tmp_path / test), test


@pytest.mark.parametrize(
    ("flaw", "test"),
    [
        ("skips", "test_a_later_run_goes_on_where_the_last_one_stopped"),
        ("repeats", "test_a_later_run_goes_on_where_the_last_one_stopped"),
        ("ahead", "test_a_run_may_die_at_any_call"),
        ("reorders", "test_all_is_in_the_topic_in_order"),
        ("drops", "test_what_is_no_record_is_a_dead_letter_and_the_others_are_read"),
        ("blocks", "test_where_there_is_nothing_a_read_returns"),
    ],
)
def test_a_connector_that_breaks_it_fails(flaw, test, tmp_path, monkeypatch):
    if flaw == "blocks":
        monkeypatch.setattr("millstream.testing.connectors._WAIT_S", 1.0)
    assert fails(test, flaw, tmp_path / "trial")


# ── metrics ─────────────────────────────────────────────────────────────────────────────────


def test_the_figures_of_a_source_are_those_of_its_last_status():
    last = LastStatus(lambda: 70.0)
    last.add(SourceStatus("streaming", 7, 2, 1.5, "", "look"))
    last.add(SourceStatus("retrying", problem="it is away"))
    readings = {}
    source_figures("orders", last)(Collected(readings))
    assert readings == {
        "connector_retrying": 1,
        "connector_last_write_timestamp_seconds": 70,
        "connector_lag_seconds": 1.5,
        "connector_records_total": 7,
        "connector_dead_letters_total": 2,
        "connector_alarm": 1,
    }
    assert last.why_not_ready() == "It tries again: it is away"


@dataclass
class Collected:
    found: dict

    def add(self, name, value, **labels):
        assert labels == {"source": "orders"}
        assert METRICS[PREFIX + name].labels == ("source",)
        self.found[name] = value
