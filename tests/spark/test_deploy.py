"""An edited app is deployed between two runs on Spark: what is kept goes on, and what was rebuilt, too."""

import json
from contextlib import suppress
from unittest import mock

import pytest
from edited_app import EDIT, SOURCE, EditedApp, answers, edited_answers, events, per_ad
from state_content import state_content

from millstream.engine.rescale import rescale
from millstream.errors import ConfigError
from millstream.object_store.place import DESCRIPTION, StatePlace
from millstream.ops.deploy import deploy
from millstream.ops.incident import capture_incident
from millstream.ops.plan import plan_change
from millstream.ops.rollback import rollback
from millstream.testing.disk import SimulatedCrash
from millstream.views.state_store.store import StateStore
from millstream.views.store_location import open_state_store


def run(app, spark):
    return app.run(until="caught-up", show=False)


def test_the_next_run_on_spark_goes_on_with_what_was_deployed(tmp_path, spark, in_workers):
    edited = EditedApp(tmp_path, 4)
    edited.create()
    rows = events(400, 1)
    edited.append(rows)
    app = edited.write()
    assert run(app, spark).read == 400
    assert edited.views(app) == answers(rows)
    app = edited.write(*EDIT)
    plan = plan_change(app)
    assert (plan.verdict, plan.records) == ("rebuilds", 400)
    assert plan.seconds is not None
    assert deploy(app, rows_per_batch=90).records == 400
    assert edited.views(app) == edited_answers(rows)
    held = []
    for seed in (2, 3):
        more = events(100, seed, first=len(rows))
        edited.append(more)
        rows += more
        report = run(app, spark)
        assert report.read == 100
        assert json.loads(json.dumps(report.to_dict()))["dead"] == 0
        assert edited.views(app) == edited_answers(rows)
        held.append(state_content(app.state_store, app.name, app.folder / "runs"))
    capture_incident(
        app, edited.file, tmp_path / "incident", 2
    )  # the state before it: by batch 1, as Spark ran it
    state = tmp_path / "incident" / "state"
    assert state_content(state / "views.db", app.name, state / "runs") == held[0] != held[1]
    assert plan_change(app).verdict == "keeps"
    back = edited.write()  # the file as it was
    assert deploy(back).records == 200  # what came since
    assert run(back, spark).read == 0
    assert edited.views(back) == answers(rows)
    another = (
        'per_ad.view("per_ad")\n',
        'per_ad.view("per_ad")\nper_ad.filter(pl.col("n") > 4).view("many")\n',
    )
    app = edited.write(another)
    assert run(app, spark).read == 0  # it is filled by the run, of the rows of the other view
    more = events(60, 4, first=len(rows))
    for expected in (rows, [*rows, *more]):
        many = {row for row in per_ad(expected) if row[3] > 4}
        assert edited.views(app) == answers(expected) | {"many": many}
        edited.append(more if expected is rows else [])
        run(app, spark)


def objects(app):
    """Return the names of the runs of state that are in the object store."""
    with open_state_store(app.state_store, readonly=True) as store:
        place = StatePlace.from_message(store.description(app.name, DESCRIPTION))
    return {*place.open("runs").names()}


@pytest.mark.long
def test_state_in_an_object_store_is_deployed_killed_and_gone_back_to(
    tmp_path, spark, s3_url, monkeypatch
):
    monkeypatch.setenv("MILLSTREAM_CACHE", str(tmp_path / "cache"))
    source = SOURCE.replace("log=LOG", f"log=LOG, state={s3_url!r}")
    edited = EditedApp(tmp_path, 4, source=source)
    edited.create()
    rows = events(200, 1)
    edited.append(rows)
    app = edited.write()
    run(app, spark)
    before = objects(app)
    app = edited.write(*EDIT)
    with (
        mock.patch.object(StateStore, "switch_program", side_effect=SimulatedCrash),
        suppress(SimulatedCrash),
    ):
        deploy(app)
    assert objects(app) > before  # what no manifest names
    assert edited.views(app) == answers(rows)
    assert deploy(app).switched
    assert edited.views(app) == edited_answers(rows)
    for program, seed in ((EDIT, 2), ((), 3), (EDIT, 4)):
        app = edited.write(*program)
        if seed > 2:
            assert rollback(app).records == 50
        more = events(50, seed, first=len(rows))
        edited.append(more)
        rows += more
        assert run(app, spark).read == 50
        assert edited.views(app) == (edited_answers if program else answers)(rows)
    assert not before & objects(app)  # what was replaced is removed


@pytest.mark.long
def test_an_app_that_was_rescaled_is_deployed_once_it_has_run(tmp_path, spark):
    edited = EditedApp(tmp_path, 4)
    edited.create()
    rows = events(200, 1)
    edited.append(rows)
    app = edited.write()
    run(app, spark)
    rescale(app.name, app.folder, buckets=5)
    edit = edited.write(*EDIT)
    with pytest.raises(ConfigError, match="was rescaled, and has not run since"):
        deploy(edit)
    run(edited.write(), spark)
    edit = edited.write(*EDIT)
    assert deploy(edit).records == len(rows)
    assert edited.views(edit) == edited_answers(rows)
    rescale(app.name, app.folder, buckets=3)
    more = events(50, 2, first=len(rows))
    edited.append(more)
    run(edit, spark)
    assert edited.views(edit) == edited_answers([*rows, *more])
    with pytest.raises(ConfigError, match="the app was rescaled since, from 5 buckets to 3"):
        rollback(edited.write())
    assert edited.views(edit) == edited_answers([*rows, *more])
