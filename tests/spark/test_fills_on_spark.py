"""Steps that are filled of tables, between runs on Spark: they go on as those of an app that had them from the beginning."""

from __future__ import annotations

import pytest
from edited_app import EditedApp
from step_fills import EDIT, SOURCE, rows_of, tables_in_state

from millstream.ops.deploy import deploy
from millstream.ops.plan import plan_change
from millstream.ops.rollback import rollback


def run(app):
    return app.run(until="caught-up", show=False).read


def assert_is_as_new(edited, app, folder, rows, *edits):
    """Views and tables are those of an app that is new, and reads the whole log at once."""
    other = EditedApp(folder, 4, source=SOURCE)
    other.create()
    other.append(rows)
    new = other.write(*edits)
    other.run(new)
    expected = other.views(new)
    assert {name: edited.views(app)[name] for name in expected} == expected
    assert all(expected.values())
    held = tables_in_state(app)
    assert {name: held[name] for name in tables_in_state(new)} == tables_in_state(new)


@pytest.mark.timeout(3000)
@pytest.mark.parametrize(
    "whole", [False, pytest.param(True, marks=pytest.mark.long)], ids=["on", "back and on"]
)
def test_filled_steps_take_rows_back_and_are_gone_back_from_between_runs_on_spark(
    tmp_path, spark, in_workers, whole
):
    edited = EditedApp(tmp_path / "log", 4, source=SOURCE)
    edited.create()
    rows = rows_of(120, 1)
    edited.append(rows)
    assert run(edited.write()) == len(rows)

    def goes_on(app, seed, *edits):
        more = rows_of(60, seed, len(rows))
        assert any(row["gone"] for row in more)
        edited.append(more)
        rows.extend(more)
        assert run(app) == len(more)
        assert_is_as_new(edited, app, tmp_path / str(seed), rows, *edits)

    app = edited.write(*EDIT)
    assert deploy(app).records == 0
    assert plan_change(app).verdict == "keeps"
    assert_is_as_new(edited, app, tmp_path / "filled", rows, *EDIT)
    goes_on(app, 2, *EDIT)
    if not whole:
        return
    goes_on(app, 3, *EDIT)
    app = edited.write()
    assert rollback(app).switched
    assert_is_as_new(edited, app, tmp_path / "back", rows)
    goes_on(app, 4)
    app = edited.write(*EDIT)
    assert rollback(app).switched
    assert_is_as_new(edited, app, tmp_path / "on", rows, *EDIT)
    goes_on(app, 5, *EDIT)
