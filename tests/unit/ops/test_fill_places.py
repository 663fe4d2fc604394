"""Steps that are filled where the state is at a URL, or in a database: they are those of a new app in a folder."""

from __future__ import annotations

import os
import shutil
from contextlib import ExitStack, contextmanager, suppress
from unittest import mock

import pytest
from edited_app import EditedApp, texts_of
from step_fills import EDIT, SOURCE, rows_of, tables_in_state

from millstream.engine.stages.executor import _run_names
from millstream.engine.stages.run_files import object_name
from millstream.object_store.client import ObjectClient
from millstream.object_store.place import DESCRIPTION, StatePlace
from millstream.ops.deploy import deploy
from millstream.ops.plan import plan_change
from millstream.ops.rollback import rollback
from millstream.testing.disk import SimulatedCrash
from millstream.views.postgres.state_store import PostgresStateStore
from millstream.views.schema import JOB
from millstream.views.state_store.sqlite_store import SqliteStateStore
from millstream.views.state_store.store import StateStore
from millstream.views.store_location import open_state_store


def run(app, rows_per_batch=17):
    return app.run(until="caught-up", engine="local", rows_per_batch=rows_per_batch, show=None).read


def objects(app):
    """Return the names of the runs of state that are at the URL."""
    with open_state_store(app.state_store, readonly=True) as store:
        place = StatePlace.from_message(store.description(app.name, DESCRIPTION))
    return {*place.open("runs").names()}


def objects_named_by(app):
    """Return the names of those that the app's manifests name."""
    with open_state_store(app.state_store, readonly=True) as store:
        state = store.state_manifests(app.name, JOB)
    return {object_name(name) for each in state.values() for name in _run_names(each)}


class Pair:
    """An app whose state is elsewhere, and one that keeps everything in its folder, and runs as it is edited from the start."""

    def __init__(self, folder, options):
        source = SOURCE.replace("log=LOG", f"log=LOG, {options}")
        self.filled = EditedApp(folder / "filled", 4, source=source)
        self.new = EditedApp(folder / "new", 4, source=SOURCE)
        for one in (self.filled, self.new):
            one.create()

    def append(self, rows):
        for one in (self.filled, self.new):
            one.append(rows)

    def assert_equal(self):
        """The views, and all that the state of tables holds, are equal, up to how a database returns a time."""
        app, new = self.filled.write(*EDIT), self.new.write(*EDIT)
        run(new)
        assert texts_of(self.filled.views(app)) == texts_of(self.new.views(new))
        assert tables_in_state(app) == tables_in_state(new)


@pytest.fixture(
    params=[
        "file",
        *(pytest.param(one, marks=pytest.mark.long) for one in ("s3", "s3 and database")),
    ]
)
def options(request, tmp_path, monkeypatch):
    """Where the state is, as arguments of an app."""
    monkeypatch.setenv("MILLSTREAM_CACHE", str(tmp_path / "cache"))
    if request.param == "file":
        return f"state='file://{tmp_path}/state'"
    state = f"state={request.getfixturevalue('s3_url')!r}"
    if request.param == "s3":
        return state
    return f"{state}, store={request.getfixturevalue('database')!r}"


def test_state_at_a_url_fills_steps_after_a_crash_too_and_is_gone_back_from(tmp_path, options):
    pair = Pair(tmp_path, options)
    pair.append(rows_of(60, 21))
    run(pair.filled.write())
    old = pair.filled.views(pair.filled.write())
    app = pair.filled.write(*EDIT)
    plan = plan_change(app)
    assert (plan.records, plan.replays) == (0, ())
    assert {part.name for part in plan.change.parts if part.filled_from_steps} >= {"kinds", "pairs"}
    before = objects(app)
    with (
        mock.patch.object(StateStore, "switch_program", side_effect=SimulatedCrash),
        suppress(SimulatedCrash),
    ):
        deploy(app)
    assert objects(app) > before  # what no manifest names
    assert pair.filled.views(app) == old
    if "store=" in options:
        shutil.rmtree(app.folder)  # another machine
    result = deploy(app)
    assert (result.records, result.switched) == (0, True)
    pair.assert_equal()
    pair.append(rows_of(40, 22, 60))
    assert run(app) == 40
    pair.assert_equal()
    assert objects(app) == objects_named_by(app)
    app = pair.filled.write()
    rollback(app)
    assert run(app) == 0
    views = pair.filled.views(app)
    new = pair.new.views(pair.new.write(*EDIT))
    assert texts_of({name: views[name] for name in old}) == texts_of({n: new[n] for n in old})
    assert objects(app) == objects_named_by(app)


# ── crashes ─────────────────────────────────────────────────────────────────────────────────

FILES = ("fsync", "fdatasync", "link", "rename", "replace", "unlink", "rmdir", "mkdir")
WRITES = (
    (SqliteStateStore, "_write"),
    (PostgresStateStore, "_write"),
    (ObjectClient, "put"),
    *((os, name) for name in FILES),
)


@contextmanager
def crash_before(number):
    """Crash in front of a step of the block: of transactions, requests and calls that change files. Yield those that are left."""
    left = [number]

    def step(real):
        def taken(*args, **options):
            if f"{os.sep}cache{os.sep}" in str(args):  # what is remembered of objects
                return real(*args, **options)
            left[0] -= 1
            if left[0] == 0:
                raise SimulatedCrash
            return real(*args, **options)

        return taken

    with ExitStack() as patched:
        for owner, name in WRITES:
            patched.enter_context(mock.patch.object(owner, name, step(getattr(owner, name))))
        with suppress(SimulatedCrash):
            yield left


@pytest.mark.long
@pytest.mark.timeout(3000)
def test_crashed_in_front_of_each_write_one_version_is_there_and_can_be_gone_back_from(
    tmp_path, options
):
    pair = Pair(tmp_path, options)
    pair.append(rows_of(60, 23))
    run(pair.filled.write())
    old = texts_of(pair.filled.views(pair.filled.write()))
    run(pair.new.write(*EDIT))
    new = texts_of(pair.new.views(pair.new.write(*EDIT)))
    number, switches = 0, []
    while not switches or not switches[-1][1]:
        number += 1
        app = pair.filled.write(*EDIT)
        with crash_before(number) as left:
            deploy(app)
        views = texts_of(pair.filled.views(app))
        switched = plan_change(app).verdict == "keeps"
        assert views == (new if switched else old), number
        if switched:
            switches.append((number, left[0] > 0))
            assert deploy(app).records == 0  # what the crash has left
            back = pair.filled.write()
            rollback(back)
            there = texts_of(pair.filled.views(back))
            assert {name: there[name] for name in old} == old, number
            old = there
    assert 10 < switches[0][0] < number
    deploy(pair.filled.write(*EDIT))
    pair.append(rows_of(40, 24, 60))
    assert run(pair.filled.write(*EDIT)) == 40
    pair.assert_equal()
