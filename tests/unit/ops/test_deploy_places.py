"""Deploying an app whose state store is in PostgreSQL: the same switch, killed on both sides of its transaction, and back."""

from __future__ import annotations

from contextlib import suppress
from unittest import mock

import pytest
from edited_app import EDIT, SOURCE, EditedApp, answers, edited_answers, events

from millstream.ops import deploy as deployment
from millstream.ops.deploy import deploy
from millstream.ops.rollback import rollback
from millstream.testing.disk import SimulatedCrash
from millstream.views.state_store import store as state_store


@pytest.mark.long
def test_in_postgresql_one_version_is_there_whenever_a_deployment_is_killed(tmp_path, database):
    source = SOURCE.replace("log=LOG", f"log=LOG, store={database!r}")
    edited = EditedApp(tmp_path, 4, source=source)
    edited.create()
    rows = events(60, 5)
    edited.append(rows)
    edited.run(edited.write())
    app = edited.write(*EDIT)
    for place, name, switched in (
        (state_store, "put_program", False),
        (deployment, "kept_until", True),
    ):
        with mock.patch.object(place, name, side_effect=SimulatedCrash), suppress(SimulatedCrash):
            deploy(app)
        assert edited.views(app) == (edited_answers if switched else answers)(rows)
    more = events(20, 6, first=len(rows))
    edited.append(more)
    edited.run(app)
    rows += more
    assert edited.views(app) == edited_answers(rows)
    app = edited.write()
    assert rollback(app).records == len(more)
    assert edited.views(app) == answers(rows)
