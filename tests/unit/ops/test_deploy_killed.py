"""Processes that deploy, killed by SIGKILL in front of each step of the switch; and readers while it is made."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import urllib.request
from contextlib import closing
from pathlib import Path
from unittest import mock

import pytest
from edited_app import EDIT, EditedApp, answers, edited_answers, events, per_kind

import millstream as ms
from millstream.errors import OffsetOutOfRangeError
from millstream.ops.deploy import deploy
from millstream.ops.rollback import rollback
from millstream.views.runs.control_files import hold_run_lock
from millstream.views.server.server import serve
from millstream.views.state_store import store as state_store
from millstream.views.store_location import open_state_store

TESTS = Path(__file__).parents[2]


def began(folder):
    edited = EditedApp(folder, 4)
    edited.create()
    rows = events(150, 5)
    edited.append(rows)
    edited.run(edited.write())
    return edited, rows


@pytest.mark.thorough
def test_killed_in_front_of_each_step_of_the_switch_one_version_is_there(tmp_path):
    edited, rows = began(tmp_path / "base")
    app = edited.write(*EDIT)
    with hold_run_lock(app.folder, 1):
        assert not deploy(app).switched  # all is computed, and left to be switched
    done = subprocess.run(
        [sys.executable, TESTS / "killed_deployment.py", tmp_path / "base", tmp_path, "4"],
        env={**os.environ, "PYTHONPATH": str(TESTS)},
        capture_output=True,
        text=True,
        check=True,
    )
    last = int(done.stdout)
    old, new = answers(rows), edited_answers(rows)
    found = []
    for number in range(1, last + 1):
        killed = EditedApp(tmp_path / str(number), 4)
        views = killed.views(killed.write())
        assert views in (old, new), number
        found.append(views == new)
    assert found == sorted(found)  # old until one step, and new from there on
    switched = found.index(True) + 1
    assert 10 < switched < last
    more = events(40, 6, first=len(rows))
    for number in {1, switched - 2, switched - 1, switched, switched + 1, last}:
        killed = EditedApp(tmp_path / str(number), 4)
        killed.append(more)
        killed.run(killed.write(*(EDIT if found[number - 1] else ())))
        app = killed.write(*EDIT)
        assert deploy(app).switched
        assert killed.views(app) == edited_answers([*rows, *more]), number
        # A version to go back to is there, whenever one was switched away from.
        app = killed.write()
        assert rollback(app).switched
        assert killed.views(app) == answers([*rows, *more]), number


class Reader(threading.Thread):
    """Reads again and again until the block ends, and keeps every answer that is another than the one before."""

    def __init__(self, read):
        super().__init__()
        self.read, self.found, self.rounds = read, [], 0
        self.lock, self.ended = threading.Condition(), False

    def run(self):
        while not self.ended:
            answer = self.read()
            if not self.found or self.found[-1] != answer:
                self.found.append(answer)
            with self.lock:
                self.rounds += 1
                self.lock.notify_all()

    def wait_for_a_round(self):
        """Wait until a read that began after this call has ended."""
        with self.lock:
            goal = self.rounds + 2
            self.lock.wait_for(lambda: self.rounds >= goal, timeout=60)

    def end(self):
        self.wait_for_a_round()
        self.ended = True
        self.join()


def test_readers_over_http_and_sql_see_the_old_rows_or_the_new_ones(tmp_path):
    edited, rows = began(tmp_path)
    app = edited.write(*EDIT)

    def over_http(view):
        with urllib.request.urlopen(f"{serving.url}views/{view}", timeout=60) as answer:
            return [sorted(row.items()) for row in json.loads(answer.read())["rows"]]

    def by_sql(view):
        with open_state_store(app.state_store, readonly=True) as store:
            return {*store.scan(view).iter_rows()}

    put = state_store.put_program

    def put_slowly(*args):
        put(*args)  # the transaction has written all, and is not committed
        for reader in readers:
            reader.wait_for_a_round()

    with serve(edited.log, listen="127.0.0.1:0") as serving:
        reads = [
            lambda: over_http("per_ad"),
            lambda: over_http("per_kind"),
            lambda: by_sql("per_ad"),
            lambda: by_sql("per_kind"),
        ]
        readers = [Reader(read) for read in reads]
        before = [read() for read in reads]
        for reader in readers:
            reader.start()
        try:
            with mock.patch.object(state_store, "put_program", put_slowly):
                assert deploy(app).switched
        finally:
            for reader in readers:
                reader.end()
        after = [read() for read in reads]
    for reader, old, new in zip(readers, before, after, strict=True):
        assert reader.found == [old, new]
    assert before[2:] == [answers(rows)[view] for view in ("per_ad", "per_kind")]
    assert after[2:] == [edited_answers(rows)[view] for view in ("per_ad", "per_kind")]


def test_subscribers_over_http_get_the_difference_or_are_told_that_the_view_is_another(tmp_path):
    edited, rows = began(tmp_path)
    app = edited.write(*EDIT)
    with open_state_store(app.state_store, readonly=True) as store:
        seen = store.newest_changes()
    with serve(edited.log, listen="127.0.0.1:0") as serving:

        def subscribe(view):
            url = f"{serving.url}views/{view}/changes?since={seen[view]}"
            return urllib.request.urlopen(url, timeout=60)

        with subscribe("per_kind") as kinds, subscribe("per_ad") as ads:
            deploy(app)
            changes = [next_event(kinds)[1] for _ in per_kind(rows, 3)]
            assert next_event(ads)[0] == "gone"
            assert not ads.read().strip()  # and the subscription has ended
    assert {row["_op"] for row in changes} == {"upsert"}
    assert len({row["_batch_id"] for row in changes}) == 1
    expected = {(kind, weight) for *_, kind, weight in per_kind(rows, 3)}
    assert {(row["kind"], row["weight"]) for row in changes} == expected
    with closing(ms.view("per_ad", edited.log)) as view, pytest.raises(OffsetOutOfRangeError):
        view.changes(since=seen["per_ad"])


def next_event(answer):
    """Return the kind and the content of the next event."""
    kind = None
    for line in answer:
        name, _, value = line.decode().rstrip("\n").partition(": ")
        if name == "event":
            kind = value
        elif name == "data":
            return kind, json.loads(value)
    return None
