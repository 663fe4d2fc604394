"""Deploying an edited app: killed at each step, beside an app that runs, resumed, and over a log that has lost records."""

from __future__ import annotations

import json
from contextlib import contextmanager, suppress
from dataclasses import replace
from unittest import mock

import polars as pl
import pytest
from edited_app import (
    EDIT,
    EditedApp,
    answers,
    busy,
    edited_answers,
    events,
    per_ad,
    per_kind,
)

import millstream as ms
from millstream.errors import ConfigError, ConflictError, FencedError, OffsetOutOfRangeError
from millstream.ops import deploy as deployment
from millstream.ops.deploy import deploy
from millstream.ops.plan import plan_change
from millstream.testing.disk import SimulatedCrash
from millstream.views.commit.committer import BatchCommitter
from millstream.views.coverage import partial_note
from millstream.views.runs.control_files import hold_run_lock
from millstream.views.runs.version_folders import NEXT_FOLDER
from millstream.views.schema import JOB, ViewSchema
from millstream.views.state_store import store as state_store
from millstream.views.state_store.program_switch import difference
from millstream.views.state_store.sqlite_store import SqliteStateStore
from millstream.views.state_store.store import StateStore
from millstream.views.store_location import open_state_store

# A step that goes.
BUSY = """busy = per_ad.window(ms.tumbling("1 hour"), by="ad", name="busy").emit("update")
busy.agg(most=ms.max("n")).view("busy")
"""


def began(folder, partitions=4, count=150):
    edited = EditedApp(folder, partitions, rows_per_batch=60)
    edited.create()
    rows = events(count, 5)
    edited.append(rows)
    edited.run(edited.write())
    return edited, rows


@contextmanager
def crash_before(place, name):
    with mock.patch.object(place, name, side_effect=SimulatedCrash), suppress(SimulatedCrash):
        yield


@contextmanager
def crash_after(place, name):
    real = getattr(place, name)

    def done(*args, **options):
        real(*args, **options)
        raise SimulatedCrash

    with mock.patch.object(place, name, done), suppress(SimulatedCrash):
        yield


def crash_in_batch(*_):
    raise SimulatedCrash


CRASHES = {
    "a batch is computed, and not committed": (crash_before, BatchCommitter, "commit", False),
    "a batch is computed": (crash_after, BatchCommitter, "commit", False),
    "before the switch": (crash_before, BatchCommitter, "switch_program", False),
    "the run that switches has its number": (crash_after, StateStore, "begin_run", False),
    "the old version is to be kept": (crash_before, deployment, "keep_previous", False),
    "the old version is kept": (crash_after, deployment, "keep_previous", False),
    "the runs of state are in the folder": (crash_after, deployment, "put_runs", False),
    "within the transaction": (crash_before, state_store, "put_program", False),
    "at the end of the transaction": (crash_after, state_store, "put_program", False),
    "after the transaction": (crash_after, StateStore, "switch_program", True),
    "what was computed is removed": (crash_before, deployment, "kept_until", True),
}


@pytest.mark.parametrize("point", CRASHES)
def test_killed_at_any_step_one_version_is_there_as_a_whole(tmp_path, point):
    edited, rows = began(tmp_path)
    crash, place, name, switched = CRASHES[point]
    app = edited.write(*EDIT)
    with crash(place, name):
        deploy(app, rows_per_batch=40)
    assert edited.views(app) == (edited_answers if switched else answers)(rows)
    # The version that is there goes on.
    more = events(40, 6, first=len(rows))
    edited.append(more)
    edited.run(edited.write(*EDIT) if switched else edited.write())
    rows += more
    assert edited.views(app) == (edited_answers if switched else answers)(rows)
    app = edited.write(*EDIT)
    assert deploy(app, rows_per_batch=40).switched
    assert not (app.folder / NEXT_FOLDER).exists()
    assert edited.views(app) == edited_answers(rows)
    last = events(40, 7, first=len(rows))
    edited.append(last)
    edited.run(app)
    assert edited.views(app) == edited_answers([*rows, *last])


def test_a_switch_that_is_repeated_after_its_commit_is_done(tmp_path, monkeypatch):
    edited, rows = began(tmp_path)
    write = SqliteStateStore._write

    def twice(self, work):  # as over a connection that breaks when the commit is through
        write(self, work)
        return write(self, work)

    app = edited.write(*EDIT)
    with monkeypatch.context() as patched:
        patched.setattr(SqliteStateStore, "switch_program", _repeated(twice))
        assert deploy(app).switched
    assert edited.views(app) == edited_answers(rows)


def _repeated(twice):
    def switch(self, start, made):
        with mock.patch.object(SqliteStateStore, "_write", twice):
            StateStore.switch_program(self, start, made)

    return switch


def test_a_deployment_that_was_stopped_reads_no_record_twice(tmp_path):
    edited, _ = began(tmp_path)
    app = edited.write(*EDIT)
    with suppress(SimulatedCrash):
        deploy(app, crash_in_batch, rows_per_batch=40)
    first = plan_change(app).records - deploy(app, rows_per_batch=40).records
    assert 30 <= first <= 50  # the one batch that was committed


def test_what_was_computed_for_another_edit_is_not_used(tmp_path):
    edited, rows = began(tmp_path)
    with suppress(SimulatedCrash):
        deploy(edited.write(("FACTOR = 2", "FACTOR = 9")), crash_in_batch, rows_per_batch=40)
    app = edited.write(*EDIT)
    assert deploy(app).records == len(rows)
    assert edited.views(app) == edited_answers(rows)


def test_beside_an_app_that_runs_all_is_computed_and_nothing_switched(tmp_path):
    edited, rows = began(tmp_path)
    app = edited.write(*EDIT)
    with hold_run_lock(app.folder, 1):
        result = deploy(app)
        assert (result.switched, result.records) == (False, len(rows))
        assert edited.views(app) == answers(rows)
        more = events(40, 6, first=len(rows))
        edited.append(more)
        edited.run(edited.write())
    result = deploy(edited.write(*EDIT))
    assert (result.switched, result.records) == (True, len(more))  # what it has read since
    assert edited.views(app) == edited_answers([*rows, *more])


def test_an_app_that_has_read_more_at_the_last_moment_keeps_what_it_has(tmp_path, monkeypatch):
    edited, rows = began(tmp_path)
    more = events(40, 6, first=len(rows))
    before = edited.write()
    app = edited.write(*EDIT)

    def run_once(_folder):
        edited.append(more)
        edited.run(before)
        return []

    with monkeypatch.context() as patched:
        patched.setattr(deployment, "active_runs", run_once)
        with pytest.raises(ConflictError, match="read more of the log"):
            deploy(app)
    assert edited.views(app) == answers([*rows, *more])
    assert deploy(app).records == len(more)
    assert edited.views(app) == edited_answers([*rows, *more])


def test_a_run_from_before_the_switch_can_commit_nothing(tmp_path):
    edited, _ = began(tmp_path)
    before = edited.write()
    with open_state_store(before.state_store) as store:
        old = store.newest_run(before.name, JOB)
        app = edited.write(*EDIT)
        deploy(app)
        fence = state_store.Fence(
            before.name, JOB, old, (store.last_batch_id(before.name) or 0) + 1
        )
        with pytest.raises(FencedError):
            store.commit(fence, [], position={}, status={})
    with pytest.raises(ConfigError):  # nor does the program of before
        edited.run(before)


def test_subscribers_get_the_difference_or_are_told_to_read_the_view_again(tmp_path):
    edited, rows = began(tmp_path)
    app = edited.write(*EDIT)
    with open_state_store(app.state_store, readonly=True) as store:
        seen = store.newest_changes()
        deploy(app)
        changes = store.changes("per_kind", since=seen["per_kind"])
        assert {row[3:] for row in changes.iter_rows()} == per_kind(rows, 3)
        assert set(changes["_op"]) == {"upsert"}
        assert store.changes("busy", since=seen["busy"]).is_empty()  # the same rows as before
        with pytest.raises(OffsetOutOfRangeError, match="Read the whole view"):
            store.changes("per_ad", since=seen["per_ad"])  # which has other columns now
        followed = store.newest_changes()["per_ad"]
        assert store.changes("per_ad", since=followed).is_empty()


def test_rows_that_the_new_program_does_not_have_are_deleted(tmp_path):
    edited, rows = began(tmp_path)
    app = edited.write(
        ("per_kind = weighed.window", 'per_kind = weighed.filter(pl.col("weight") > 99).window')
    )
    with open_state_store(app.state_store, readonly=True) as store:
        seen = store.newest_changes()["per_kind"]
        deploy(app)
        assert store.scan("per_kind").is_empty()
        assert set(store.changes("per_kind", since=seen)["_op"]) == {"delete"}
    assert edited.views(app) == answers(rows) | {"per_kind": set()}


def test_a_step_that_was_dropped_and_comes_back_begins_anew(tmp_path):
    edited, rows = began(tmp_path)
    deploy(edited.write((BUSY, "")))
    more = events(40, 6, first=len(rows))
    edited.append(more)
    edited.run(edited.write((BUSY, "")))
    app = edited.write()
    assert plan_change(app).records == len([*rows, *more])
    deploy(app)
    assert edited.views(app)["busy"] == busy([*rows, *more])
    with open_state_store(app.state_store, readonly=True) as store:
        assert partial_note(store.coverage("busy")) is None


def test_what_the_log_has_lost_is_said_and_needs_consent(tmp_path):
    edited, rows = began(tmp_path, partitions=1)
    with ms.connect(edited.log) as log:
        log.delete_records("clicks", 0, 100)
    app = edited.write(*EDIT)
    plan = plan_change(app)
    assert (plan.records, plan.gone, plan.exit_code) == (50, 100, 5)
    with pytest.raises(ConfigError, match="no longer holds 100 records"):
        deploy(app)
    assert edited.views(app) == answers(rows)
    assert deploy(app, gone_ok=True).records == 50
    found = edited.views(app)
    assert found["per_ad"] == edited_answers(rows[100:])["per_ad"]
    assert found["dear"] == answers(rows)["dear"]  # what was kept has all
    with open_state_store(app.state_store, readonly=True) as store:
        assert "is written since" in str(partial_note(store.coverage("per_ad")))
        assert "clicks/0 100" in str(partial_note(store.coverage("per_ad")))
        assert partial_note(store.coverage("dear")) is None


def test_before_the_first_batch_there_is_nothing_to_deploy(tmp_path):
    edited = EditedApp(tmp_path, 1)
    edited.create()
    app = edited.write()
    plan = plan_change(app)
    assert (plan.boundary, plan.verdict, plan.exit_code) == (None, "keeps", 0)
    assert deploy(app).switched
    edited.append(events(20, 1))
    edited.run(app)
    assert edited.views(app)["per_ad"] == per_ad(events(20, 1))


def test_going_back_reads_only_what_came_since(tmp_path):
    edited, rows = began(tmp_path)
    deploy(edited.write(*EDIT, (BUSY, "")))
    for seed in (6, 7):
        more = events(40, seed, first=len(rows))
        edited.append(more)
        edited.run(edited.write(*EDIT, (BUSY, "")))
        rows += more
    app = edited.write()
    assert deploy(app).records == 80
    assert edited.views(app) == answers(rows)
    more = events(40, 8, first=len(rows))
    edited.append(more)
    edited.run(app)
    rows += more
    assert edited.views(app) == answers(rows)
    with open_state_store(app.state_store, readonly=True) as store:
        assert all(partial_note(store.coverage(view)) is None for view in answers(rows))
    # And forward again, to a version that has been kept in its turn.
    app = edited.write(*EDIT, (BUSY, ""))
    assert deploy(app).records == 40
    assert edited.views(app)["per_kind"] == per_kind(rows, 3)


def test_a_third_version_uses_nothing_of_one_that_differs(tmp_path):
    edited, rows = began(tmp_path)
    deploy(edited.write(*EDIT))
    app = edited.write(("FACTOR = 2", "FACTOR = 7"))
    assert deploy(app).records == len(rows)
    assert edited.views(app) == answers(rows) | {"per_kind": per_kind(rows, 7)}


def test_going_back_after_the_log_has_lost_records_needs_them_no_more(tmp_path):
    edited, rows = began(tmp_path, partitions=1)
    deploy(edited.write(*EDIT))
    with ms.connect(edited.log) as log:
        log.delete_records("clicks", 0, 100)
    app = edited.write()
    assert deploy(app, gone_ok=True).records == 0
    assert edited.views(app) == answers(rows)
    with open_state_store(app.state_store, readonly=True) as store:
        assert partial_note(store.coverage("per_ad")) is None


TOPIC = (
    'per_kind.view("per_kind")',
    'per_kind.to("weights", key="kind")',
)


def test_a_step_that_leads_to_a_topic_alone_is_rebuilt_and_the_topic_goes_on(tmp_path):
    edited = EditedApp(tmp_path, 4)
    edited.create()
    with ms.connect(edited.log) as log:
        log.create_topic("weights", partitions=1)
    rows = events(60, 5)
    edited.append(rows)
    edited.run(edited.write(TOPIC))
    app = edited.write(TOPIC, ("FACTOR = 2", "FACTOR = 3"))
    plan = plan_change(app)
    said = {
        part.kind: part for part in plan.change.parts if part.name in ("per_kind", "to(weights)")
    }
    assert said["step"].verdict == "rebuilds"
    assert said["topic"].verdict == "keeps"
    assert "what was written before stays" in said["topic"].why[-1]

    def weights():
        with ms.connect(edited.log) as log:
            values = log.read("weights", 0)["value"].to_pylist()
        return [(row["kind"], row["weight"]) for row in map(json.loads, values)]

    before = weights()
    assert deploy(app).records == len(rows)
    assert weights() == before  # nothing is written again
    more = events(30, 6, first=len(rows))
    edited.append(more)
    edited.run(app)
    last = dict(weights()[len(before) :])
    assert last == {row[2]: row[3] for row in per_kind([*rows, *more], 3)}


def test_after_an_upgrade_only_the_user_can_say_that_code_is_the_same(tmp_path):
    edited, rows = began(tmp_path)
    app = edited.write(("FACTOR = 2", "FACTOR = 3"))  # as if another Python described it so
    with open_state_store(app.state_store) as store:
        program = store.program(app.name, JOB)
        older = replace(program, versions={**program.versions, "Python": "3.10"}).to_json()
        store._write(lambda db: db.execute("UPDATE _programs SET program = ?", (older,)))
    plan = plan_change(app)
    verdicts = {part.name: part.verdict for part in plan.change.parts if part.kind == "step"}
    assert verdicts == {"per_ad": "keeps", "per_kind": "refuses", "busy": "keeps"}
    assert plan.exit_code == 4
    with pytest.raises(ConfigError, match=r"Python was 3\.10"):
        deploy(app)
    assert plan_change(app, same_expressions=True).verdict == "keeps"
    edited.run(app, same_expressions=True)
    assert edited.views(app) == answers(rows)


def test_a_column_with_the_name_of_a_pattern_tells_rows_apart_at_the_switch():
    schema = ViewSchema("v", (("^k.*$", "int"), ("kind", "str")), ("^k.*$",))
    before = pl.DataFrame({"^k.*$": [1, 2], "kind": ["a", "b"]})
    found = difference(schema, before, before[1:].with_columns(kind=pl.lit("c")))
    assert (found.upserts["kind"].to_list(), found.deletes.to_dicts()) == (["c"], [{"^k.*$": 1}])
