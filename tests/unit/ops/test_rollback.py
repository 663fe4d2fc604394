"""Going back to the version before: from what is kept of it, until its time has run out, and to no other version."""

from __future__ import annotations

import json
import shutil
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from unittest import mock

import pytest
from edited_app import EDIT, SOURCE, EditedApp, answers, edited_answers, events

import millstream as ms
from millstream.engine.local_run import LocalRun
from millstream.errors import ConfigError
from millstream.log.files import DISK
from millstream.ops.deploy import deploy
from millstream.ops.plan import plan_change
from millstream.ops.reset import find_footprint
from millstream.ops.rollback import rollback
from millstream.testing.disk import SimulatedCrash
from millstream.views.coverage import partial_note
from millstream.views.runs.control_files import hold_deployment, hold_run_lock
from millstream.views.runs.version_folders import (
    PREVIOUS_FOLDER,
    PREVIOUS_NEW_FOLDER,
    drop_expired,
    remove_version,
    write_kept_until,
)
from millstream.views.state_store.store import StateStore
from millstream.views.store_location import open_state_store

NOW = datetime(2026, 5, 1, 12, tzinfo=UTC)


def at(days=0.0):
    return lambda: NOW + timedelta(days=days)


@pytest.fixture
def deployed(tmp_path):
    """Return an app of which an edit was deployed a while ago, and its events."""
    edited = EditedApp(tmp_path, 4)
    edited.create()
    rows = events(150, 5)
    edited.append(rows)
    edited.run(edited.write())
    result = deploy(edited.write(*EDIT), keep="3 days", clock=at())
    assert result.kept_until == NOW + timedelta(days=3)
    more = events(40, 6, first=len(rows))
    edited.append(more)
    edited.run(edited.write(*EDIT))
    return edited, [*rows, *more]


def test_a_rollback_reads_what_came_since_and_can_be_undone(deployed):
    edited, rows = deployed
    app = edited.write()
    assert plan_change(app).kept_until == NOW + timedelta(days=3)
    done = rollback(app, clock=at(2.9))
    assert (done.switched, done.records) == (True, 40)
    assert done.kept_until == NOW + timedelta(days=9.9)  # of the version that was left
    assert edited.views(app) == answers(rows)
    more = events(30, 7, first=len(rows))
    edited.append(more)
    edited.run(app)
    assert edited.views(app) == answers([*rows, *more])
    app = edited.write(*EDIT)
    assert rollback(app, clock=at(3)).records == 30
    assert edited.views(app) == edited_answers([*rows, *more])


@pytest.mark.parametrize("dropped_by", ["rollback", "deploy", "a run"])
def test_a_version_whose_time_has_run_out_is_dropped(deployed, dropped_by):
    edited, rows = deployed
    app = edited.write(*EDIT)
    if dropped_by == "deploy":
        deploy(app, clock=at(3))
    elif dropped_by == "a run":
        drop_expired(app.folder, NOW + timedelta(days=3))
    with pytest.raises(ConfigError, match="time for which the version before was kept has run out"):
        rollback(edited.write(), clock=at(3))
    assert plan_change(edited.write()).kept_until is None
    assert not [*app.folder.glob(f"{PREVIOUS_FOLDER}*")]
    assert edited.views(app) == edited_answers(rows)


def test_only_the_version_before_is_gone_back_to(deployed):
    edited, rows = deployed
    with pytest.raises(ConfigError, match=r"runs this program now"):
        rollback(edited.write(*EDIT), clock=at(1))
    app = edited.write(("FACTOR = 2", "FACTOR = 7"))
    with pytest.raises(
        ConfigError, match=r"differs in: step 'per_kind'.*the code of its functions"
    ):
        rollback(app, clock=at(1))
    app = edited.write(('pl.col("cost") > 3', 'pl.col("cost") > 4'))
    with pytest.raises(ConfigError, match=r"output 'dear'"):
        rollback(app, clock=at(1))
    assert edited.views(app) == edited_answers(rows)


def test_without_the_start_of_the_log_a_rollback_is_possible_and_without_what_came_since_not(
    tmp_path,
):
    edited = EditedApp(tmp_path, 1)
    edited.create()
    rows = events(150, 5)
    edited.append(rows)
    edited.run(edited.write())
    deploy(edited.write(*EDIT), clock=at())
    with ms.connect(edited.log) as log:
        log.delete_records("clicks", 0, 140)
    app = edited.write()
    assert rollback(app, clock=at(1)).records == 0
    assert edited.views(app) == answers(rows)
    more = events(40, 6, first=len(rows))
    edited.append(more)
    edited.run(app)
    with ms.connect(edited.log) as log:
        log.delete_records("clicks", 0, 170)
    with pytest.raises(ConfigError, match="no longer holds all records that were read since"):
        rollback(edited.write(*EDIT), clock=at(2))
    assert edited.views(app) == answers([*rows, *more])


def test_a_crash_while_a_version_is_dropped_leaves_it_whole_or_not_at_all(deployed):
    edited, rows = deployed
    app = edited.write()
    with (
        mock.patch(
            "millstream.views.runs.version_folders.shutil.rmtree",
            side_effect=[None, SimulatedCrash],
        ),
        suppress(SimulatedCrash),
    ):
        remove_version(app.folder, PREVIOUS_FOLDER)
    assert (app.folder / "previous.dropped").exists()
    with pytest.raises(ConfigError, match="No version of ads is kept"):
        rollback(app, clock=at(1))
    assert deploy(app, clock=at(1)).records == len(rows)
    assert edited.views(app) == answers(rows)
    assert not (app.folder / "previous.dropped").exists()


def test_a_deployment_that_is_killed_after_its_transaction_can_be_gone_back_from(deployed):
    edited, rows = deployed
    app = edited.write(("FACTOR = 2", "FACTOR = 7"))
    with (
        mock.patch("millstream.ops.deploy.settle_previous", side_effect=[None, SimulatedCrash]),
        suppress(SimulatedCrash),
    ):
        deploy(app, clock=at(1))
    assert rollback(edited.write(*EDIT), clock=at(2)).records == 0
    assert edited.views(app) == edited_answers(rows)


def test_what_a_killed_deployment_has_kept_is_there_after_a_run_with_other_outputs(deployed):
    edited, rows = deployed
    with (
        mock.patch("millstream.ops.deploy.settle_previous", side_effect=[None, SimulatedCrash]),
        suppress(SimulatedCrash),
    ):
        deploy(edited.write(("FACTOR = 2", "FACTOR = 7")), clock=at(1))
    edited.run(edited.write(("FACTOR = 2", "FACTOR = 7"), ('"cost") > 3', '"cost") > 4')))
    app = edited.write(*EDIT)
    assert rollback(app, clock=at(2)).records == 0
    assert edited.views(app) == edited_answers(rows)


BUSY = """busy = per_ad.window(ms.tumbling("1 hour"), by="ad", name="busy").emit("update")
busy.agg(most=ms.max("n")).view("busy")
"""


def test_a_step_that_was_dropped_comes_back_with_all_that_is_on_its_path(tmp_path):
    edited = EditedApp(tmp_path, 4)
    edited.create()
    rows = events(150, 5)
    edited.append(rows)
    edited.run(edited.write())
    deploy(edited.write((BUSY, "")), clock=at())
    more = events(40, 6, first=len(rows))
    edited.append(more)
    edited.run(edited.write((BUSY, "")))
    app = edited.write()
    assert rollback(app, clock=at(1)).records == len(more)
    assert edited.views(app) == answers([*rows, *more])


MORE_VIEWS = """
per_ad.filter(pl.col("n") > 2).view("few")
per_ad.map_frames(lambda rows: rows.with_columns(one=pl.lit(1)), name="ones").view("ones")
stream.dedup("at", within="1 day").select("at", "cost").view("once", key="at")
"""
LEFT_OUT = {
    "rows of a topic": 'stream.filter(pl.col("cost") > 3).select("ad", "at", "cost").view("dear", key=["ad", "at"])\n',
    "a step that goes on": 'per_ad.view("per_ad")\n',
    "rows of a step and a function": """per_ad.map_frames(lambda rows: rows.with_columns(one=pl.lit(1)), name="ones").view("ones")
""",
    "what can be filled": 'per_ad.filter(pl.col("n") > 2).view("few")\n',
    "a step that is dropped": 'stream.dedup("at", within="1 day").select("at", "cost").view("once", key="at")\n',
}


@pytest.mark.parametrize(
    ("name", "runs"),
    [
        ("rows of a topic", True),
        ("a step that goes on", True),
        *(pytest.param(name, False, marks=pytest.mark.long) for name in LEFT_OUT),
        *(pytest.param(name, True, marks=pytest.mark.long) for name in list(LEFT_OUT)[2:]),
    ],
)
def test_a_view_that_the_new_program_left_out_has_all_rows_after_a_rollback(tmp_path, name, runs):
    source = SOURCE + MORE_VIEWS
    edited, fresh = (EditedApp(tmp_path / one, 4, source=source) for one in ("edited", "fresh"))
    rows = events(190, 5)
    for one in (edited, fresh):
        one.folder.mkdir()
        one.create()
    fresh.append(rows)
    fresh.run(fresh.write())
    edited.append(rows[:120])
    edited.run(edited.write())
    edit = [(LEFT_OUT[name], ""), ("FACTOR = 2", "FACTOR = 3")]
    deploy(edited.write(*edit))
    edited.append(rows[120:160])
    if runs:
        edited.run(edited.write(*edit))
    rollback(edited.write())
    edited.append(rows[160:])
    edited.run(edited.write())
    found = edited.views(edited.write())
    assert found == fresh.views(fresh.write())
    for view in found:
        assert ms.view(view, edited.log).partial_note is None


def test_a_view_that_was_kept_in_part_is_gone_back_to_with_its_coverage(tmp_path):
    edited = EditedApp(tmp_path, 1)
    edited.create()
    rows = events(150, 5)
    edited.append(rows)
    edited.run(edited.write(('per_ad.view("per_ad")\n', "")))
    more = events(40, 6, first=len(rows))
    edited.append(more)
    edited.run(edited.write())
    with open_state_store(edited.write().state_store, readonly=True) as store:
        note = partial_note(store.coverage("per_ad"))
    assert "is written since" in note
    deploy(edited.write(EDIT[0]), clock=at())
    app = edited.write()
    assert rollback(app, clock=at(1)).records == 0
    with open_state_store(app.state_store, readonly=True) as store:
        assert partial_note(store.coverage("per_ad")) == note


NARROW = ('per_ad.view("per_ad")', 'per_ad.drop("cost").view("per_ad")')


@pytest.mark.parametrize(
    ("first", "edit"),
    [  # the step is as before in both, and what is there could be gone on with
        ((NARROW,), ()),
        ((), (('busy.agg(most=ms.max("n"))', 'busy.agg(most=ms.max("n"), least=ms.min("n"))'),)),
    ],
    ids=["a view that could be filled", "a view that is as before"],
)
def test_what_a_deployment_computed_of_a_part_of_the_log_is_gone_back_from(tmp_path, first, edit):
    edited = EditedApp(tmp_path, 1)
    edited.create()
    rows = events(150, 5)
    edited.append(rows)
    edited.run(edited.write(*first))
    before = edited.views(edited.write(*first))
    with ms.connect(edited.log) as log:
        log.delete_records("clicks", 0, 100)
    assert deploy(edited.write(*edit), gone_ok=True, clock=at()).switched
    assert len(edited.views(edited.write(*edit))["per_ad"]) < len(before["per_ad"])
    app = edited.write(*first)
    assert rollback(app, clock=at(1)).records == 0
    assert edited.views(app) == before
    with open_state_store(app.state_store, readonly=True) as store:
        assert partial_note(store.coverage("per_ad")) is None
    more = events(40, 6, first=len(rows))
    edited.append(more)
    edited.run(app)
    every = answers([*rows, *more])
    if first:
        every["per_ad"] = {row[:-1] for row in every["per_ad"]}
    assert edited.views(app) == every


def test_a_program_that_differs_from_the_one_that_runs_in_outputs_is_not_said_to_run(deployed):
    edited, _ = deployed
    with pytest.raises(ConfigError, match=r"differs from it in view 'dear'.*millstream run"):
        rollback(edited.write(*EDIT, ('pl.col("cost") > 3', 'pl.col("cost") > 4')), clock=at(1))


def test_an_app_that_was_restored_is_not_said_to_lack_records(deployed, tmp_path):
    edited, rows = deployed
    app = edited.write(("FACTOR = 2", "FACTOR = 7"))
    backup = tmp_path / "backup.db"
    shutil.copy(app.state_store, backup)
    more = events(30, 7, first=len(rows))
    edited.append(more)
    edited.run(edited.write(*EDIT))
    deploy(app, clock=at(1))
    with open_state_store(backup) as old, open_state_store(app.state_store) as store:
        position = json.dumps(old.position(app.name))
        store._write(lambda db: db.execute("UPDATE _fences SET position = ?", (position,)))
    with pytest.raises(ConfigError, match="was restored to a time before it was left"):
        rollback(edited.write(*EDIT), clock=at(2))


def test_a_rollback_that_is_killed_as_it_begins_says_later_what_the_kept_view_lacks(tmp_path):
    edited = EditedApp(tmp_path, 1)
    edited.create()
    rows = events(150, 5)
    edited.append(rows)
    edited.run(edited.write(('per_ad.view("per_ad")\n', "")))
    edited.append(events(40, 6, first=len(rows)))
    edited.run(edited.write())
    deploy(edited.write(EDIT[0]), clock=at())
    app = edited.write()
    for place, name in ((LocalRun, "begin_from"), (StateStore, "register_program")):
        with mock.patch.object(place, name, side_effect=SimulatedCrash), suppress(SimulatedCrash):
            rollback(app, clock=at(1))
    assert rollback(app, clock=at(1)).records == 0
    with open_state_store(app.state_store, readonly=True) as store:
        assert "is written since" in partial_note(store.coverage("per_ad"))


def test_a_rollback_that_is_killed_before_its_transaction_has_changed_nothing(deployed):
    edited, rows = deployed
    app = edited.write()
    with (
        mock.patch.object(StateStore, "switch_program", side_effect=SimulatedCrash),
        suppress(SimulatedCrash),
    ):
        rollback(app, clock=at(1))
    assert edited.views(app) == edited_answers(rows)
    assert rollback(app, clock=at(1)).records == 0  # by what was computed
    assert edited.views(app) == answers(rows)


@pytest.mark.parametrize("keep", ["a week", "-1 day", "9000 weeks"])
def test_how_long_to_keep_a_version_is_a_duration_of_at_most_100_years(deployed, keep):
    edited, _ = deployed
    with pytest.raises(ConfigError, match="keep"):
        deploy(edited.write(), keep=keep)


def test_the_command_goes_back(deployed, call):
    edited, rows = deployed
    edited.write()
    answer = call("deploy", str(edited.file), "--keep", "1 hour")
    assert answer.code == 0, answer.err
    assert "is kept until" in answer.out
    edited.write(*EDIT)
    said = call("plan", str(edited.file)).out
    assert "millstream rollback goes back to it" in said
    answer = call("rollback", str(edited.file), "--json")
    assert answer.code == 0, answer.err
    assert '"switched": true' in answer.out
    assert edited.views(edited.write(*EDIT)) == edited_answers(rows)
    answer = call("rollback", str(edited.file))
    assert answer.code == 2
    assert "runs this program now" in answer.err


def test_a_rollback_does_not_go_on_with_what_was_read_without_lost_records(deployed):
    edited, rows = deployed
    with ms.connect(edited.log) as log:
        for partition in range(4):
            log.delete_records("clicks", partition, 42)
    app = edited.write()
    with hold_run_lock(app.folder, 99):  # so that it is computed and not put in place
        assert not deploy(app, gone_ok=True, clock=at(1)).switched
    with pytest.raises(ConfigError, match="no longer holds all records that were read since"):
        rollback(app, clock=at(1))
    assert edited.views(edited.write(*EDIT)) == edited_answers(rows)


def test_an_app_is_not_reset_while_a_deployment_is_at_work(tmp_path):
    folder = tmp_path / "apps" / "ads"
    folder.mkdir(parents=True)
    with (
        hold_deployment(folder),
        pytest.raises(
            ConfigError, match=r"deployment or comparison of ads is at work, and nothing was"
        ),
    ):
        find_footprint("ads", tmp_path, tmp_path / "log")
    find_footprint("ads", tmp_path, tmp_path / "log")


def test_until_when_a_version_is_kept_is_durable_before_it_is_there(tmp_path):
    (tmp_path / PREVIOUS_NEW_FOLDER).mkdir()
    with mock.patch.object(type(DISK), "sync", autospec=True, side_effect=type(DISK).sync) as sync:
        write_kept_until(tmp_path, NOW, 3)
    assert sync.call_count == 1
