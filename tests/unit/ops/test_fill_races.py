"""Steps that are filled while something else happens to the app: a run, another deployment, a rescale. One of the two counts, as a whole."""

from __future__ import annotations

from contextlib import contextmanager
from unittest import mock

import pytest
from edited_app import EditedApp, texts_of
from step_fills import EDIT, MORE, SOURCE, rows_of, tables_in_state

from millstream.engine.rescale import rescale
from millstream.errors import ConfigError, ConflictError
from millstream.ops import deploy as deployment
from millstream.ops import fills
from millstream.ops.deploy import deploy
from millstream.ops.plan import plan_change
from millstream.ops.rollback import rollback


def run(app):
    return app.run(until="caught-up", engine="local", rows_per_batch=17, show=None).read


def began(folder, rows, *edits, source=SOURCE):
    edited = EditedApp(folder, 4, source=source)
    edited.create()
    edited.append(rows)
    run(edited.write(*edits))
    return edited


@contextmanager
def once_before(owner, name, happens):
    """Let something happen before the first call of a function."""
    real, done = getattr(owner, name), []

    def called(*args, **options):
        if not done:
            done.append(True)
            happens()
        return real(*args, **options)

    with mock.patch.object(owner, name, called):
        yield
    assert done


def assert_equals_new_app(edited, app, folder, rows):
    new = began(folder, rows, *EDIT)
    assert texts_of(edited.views(app)) == texts_of(new.views(new.write(*EDIT)))
    assert tables_in_state(app) == tables_in_state(new.write(*EDIT))


def test_a_run_that_begins_while_steps_are_filled_fences_the_deployment(tmp_path):
    rows, more = rows_of(60, 31), rows_of(40, 32, 60)
    edited = began(tmp_path / "filled", rows)
    before, app = edited.write(), edited.write(*EDIT)

    def run_before():
        edited.append(more)
        run(before)

    with (
        once_before(fills.StepFills, "compute", run_before),
        pytest.raises(ConflictError, match="Another run or deployment of ads began"),
    ):
        deploy(app)
    old = began(tmp_path / "old", [*rows, *more])
    assert edited.views(app) == old.views(old.write())
    assert deploy(app).switched
    assert_equals_new_app(edited, app, tmp_path / "new", [*rows, *more])


@pytest.mark.long
def test_a_deployment_that_wakes_up_behind_one_of_another_machine_changes_nothing(
    tmp_path, database
):
    rows, more = rows_of(60, 33), rows_of(40, 34, 60)

    def on(machine):
        places = f"state='file://{tmp_path}/state', store={database!r}, local={str(tmp_path / machine)!r}"
        return "log=LOG", f"log=LOG, {places}"

    edited = began(tmp_path / "filled", rows, on("one"))
    one, two = (edited.write(on(machine), *EDIT) for machine in ("one", "two"))
    pairs = 'latest.distinct("kind", name="only").view("only")\n'
    other = edited.write(on("two"), (MORE, pairs))
    assert one.folder != two.folder

    def deploy_elsewhere():
        deploy(other)
        edited.append(more)
        assert run(other) == len(more)

    with (
        once_before(fills.StepFills, "compute", deploy_elsewhere),
        pytest.raises(ConflictError, match="Another run or deployment of ads began"),
    ):
        deploy(one)
    new = began(tmp_path / "other", [*rows, *more], (MORE, pairs))
    assert texts_of(edited.views(other)) == texts_of(new.views(new.write((MORE, pairs))))
    for machine in (one, two):  # the second has nothing to do
        assert deploy(machine).switched
    assert run(two) == run(one) == 0
    views = texts_of(edited.views(one))
    assert views.pop("only")  # its rows stay
    last = began(tmp_path / "new", [*rows, *more], *EDIT)
    assert views == texts_of(last.views(last.write(*EDIT)))
    assert tables_in_state(one) == tables_in_state(last.write(*EDIT))


def test_an_app_that_is_rescaled_before_and_after_its_steps_are_filled(tmp_path):
    rows, more = rows_of(60, 35), rows_of(40, 36, 60)
    edited = began(tmp_path / "filled", rows)
    before, app = edited.write(), edited.write(*EDIT)
    assert plan_change(app).records == 0
    rescale(app.name, app.folder, buckets=5)
    with pytest.raises(ConfigError, match="was rescaled, and has not run since"):
        deploy(app)
    run(before)

    def rescale_meanwhile():
        with pytest.raises(ConfigError, match="is running"):
            rescale(app.name, app.folder, buckets=3)

    with once_before(fills.StepFills, "compute", rescale_meanwhile):
        assert deploy(app).records == 0
    rescale(app.name, app.folder, buckets=3)
    edited.append(more)
    assert run(app) == len(more)
    assert_equals_new_app(edited, app, tmp_path / "new", [*rows, *more])
    rollback(
        before
    )  # of the tables nothing changes, so nothing begins with what was kept in 5 buckets
    last = rows_of(20, 38, 100)
    edited.append(last)
    assert run(before) == len(last)
    old = began(tmp_path / "old", [*rows, *more, *last])
    tables = {name: edited.views(before)[name] for name in ("latest", "dear")}
    assert tables == old.views(old.write())


@pytest.mark.long
def test_an_app_that_is_rescaled_between_what_was_computed_and_the_switch_is_not_filled(tmp_path):
    rows = rows_of(60, 37)
    edited = began(tmp_path / "filled", rows)
    before, app = edited.write(), edited.write(*EDIT)
    old = edited.views(before)

    def rescale_now():
        rescale(app.name, app.folder, buckets=7)

    with (
        once_before(deployment, "active_runs", rescale_now),
        pytest.raises(ConflictError, match="was rescaled, since its new state was computed"),
    ):
        deploy(app)
    assert edited.views(before) == old
    run(before)
    assert deploy(app).switched
    assert_equals_new_app(edited, app, tmp_path / "new", rows)
