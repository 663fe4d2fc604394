"""``millstream reset``: says what it removes and what stays, asks, and removes it."""

from __future__ import annotations

import json
import sqlite3

import pytest

import millstream as ms
from millstream import testing
from millstream.views.runs.control_files import check_no_reset, hold_run_lock


@pytest.fixture
def app(folder):
    """The folder of an app that has run, and has written to a topic."""
    declared = ms.App("sums", log=folder)
    events = declared.topic("events", {"user": str, "n": int}, key="user")
    events.stream().view("kept", key="user")
    out = testing.run(declared, {"events": [{"user": f"u{n}", "n": n} for n in range(30)]})
    home = folder / "apps" / "sums"
    home.mkdir(parents=True)
    with sqlite3.connect(out._store._path) as made, sqlite3.connect(home / "views.db") as copy:
        made.backup(copy)
    made.close()
    copy.close()
    with (
        ms.connect(folder) as log,
        log.producer(transactional_id="sums/main") as producer,
        producer.transaction() as transaction,
    ):
        transaction.fence("sums/main/one", 3)
    return home


def test_it_says_what_goes_and_asks_and_no_leaves_all_as_it_was(app, call):
    ended = call("reset", "sums", stdin=b"n\n")
    assert ended.code == 130
    assert "view kept: 30 rows" in ended.out
    assert "how far it had written to topics" in ended.out
    assert "start over? [y/N]" in ended.err
    assert app.exists()
    check_no_reset(app)
    assert call("reset", "sums").code == 2  # nobody answered


def test_yes_removes_it(app, folder, call):
    ended = call("reset", "sums", stdin=b"y\n")
    assert (ended.code, ended.out.splitlines()[-1]) == (
        0,
        "sums is reset; its next run starts over.",
    )
    assert not app.exists()
    with ms.connect(folder) as log:
        assert log.fences() == {}
    again = call("reset", "sums", "--yes")
    assert (again.code, "nothing of an app 'sums'" in again.err) == (2, True)


def test_what_was_removed_is_told_as_json(app, done):
    told = json.loads(done("reset", "sums", "--yes", "--json"))
    assert (told["views"]["kept"], told["fences"], told["datasets"]) == (30, 1, {})


def test_a_running_app_is_refused(app, call):
    with hold_run_lock(app, 3):
        ended = call("reset", "sums", "--yes")
    assert (ended.code, "millstream stop sums" in ended.err) == (2, True)
    assert app.exists()


def test_an_app_whose_log_is_behind_brokers_needs_the_folder_of_its_state(call):
    ended = call("reset", "sums", "--log", "kafka://localhost:1", "--yes")
    assert (ended.code, "--state ./data" in ended.err) == (2, True)
