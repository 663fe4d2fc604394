import json
import sqlite3
import threading
from dataclasses import dataclass

import polars as pl
import pytest

import millstream as ms
from millstream import testing
from millstream.errors import ConfigError
from millstream.views.runs.control_files import hold_run_lock, stop_request_file
from millstream.views.runs.failure import record_failure


@dataclass
class Event:
    user: str
    n: int


@pytest.fixture
def home(folder):
    """The folder of an app that has run over 30 events, in three batches."""
    app = ms.App("sums", log=folder)
    events = app.topic("events", Event, key="user")
    kept = events.stream().filter(pl.col("n") > 0, name="positive")
    kept.view("kept", key="user")
    rows = [{"user": f"u{n}", "n": n % 3} for n in range(30)]
    out = testing.run(app, {"events": rows}, batches=3)
    home = folder / "apps" / "sums"
    home.mkdir(parents=True)
    with sqlite3.connect(out._store._path) as made, sqlite3.connect(home / "views.db") as copy:
        made.backup(copy)
    made.close()
    copy.close()
    return home


def test_the_ledger_adds_up_every_batch(home, call):
    rows = json.loads(call("ledger", "sums", "--json").out)
    (source,) = [row for row in rows if row["step"] == "events"]
    assert (source["read"], source["emitted"], source["balance"]) == (30, 30, 0)
    assert sum(row["filtered"] for row in rows) == 10


def test_the_ledger_is_shown_batch_by_batch_and_for_one_step(home, call):
    shown = call("ledger", "sums", "--each", "--step", "events", "--json").out
    rows = json.loads(shown)
    assert [row["batch_id"] for row in rows] == [0, 1, 2]
    assert sum(row["read"] for row in rows) == 30
    last = json.loads(
        call("ledger", "sums", "--each", "--batches", "1", "--step", "events", "--json").out
    )
    assert last == rows[-1:]


def test_an_app_that_is_not_there_is_named_with_those_that_are(home, call):
    ended = call("ledger", "summs")
    assert ended.code == 2
    assert "no app 'summs' (apps: sums)" in ended.err


def test_stopping_what_does_not_run_says_so(home, call):
    assert call("stop", "sums").out == "sums is not running\n"


def test_stop_waits_until_the_run_has_ended(home, call):
    running, asked = threading.Event(), threading.Event()

    def work():
        with hold_run_lock(home, 1):
            running.set()
            while not stop_request_file(home).exists():
                asked.wait(0.01)

    thread = threading.Thread(target=work)
    thread.start()
    running.wait()
    ended = call("stop", "sums")
    thread.join()
    assert ended.out == "sums has stopped\n"
    assert not stop_request_file(home).exists()


def test_a_run_that_does_not_stop_in_time_is_named_by_its_process(home, call):
    with hold_run_lock(home, 1):
        ended = call("stop", "sums", "--timeout", "100 ms")
    assert ended.code == 1
    assert "has not stopped within 100 ms" in ended.err


def test_why_answers_from_the_status_of_the_app(home, call):
    assert call("why", "late", "sums").out == "no event came too late\n"
    assert call("why", "open", "sums").out == "no step of the app waits for time\n"
    assert json.loads(call("why", "open", "sums", "--json").out) == []
    assert "no app 'summs'" in call("why", "open", "summs").err


def test_how_an_app_failed_is_said_by_the_commands_that_look_at_it(home, call):
    with pytest.raises(ConfigError), record_failure(home, lambda: 0.0):
        raise ConfigError("the field is gone.")
    for command in (["ledger", "sums"], ["stop", "sums"], ["view", "list"]):
        said = call(*command).err
        assert "sums does not run: ConfigError, 1970-01-01 00:00:00 UTC: the field is gone." in said
        assert "run the app again" in said
