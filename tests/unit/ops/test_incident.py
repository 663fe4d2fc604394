"""A batch that failed becomes a folder that is a failing test, which passes once the code is mended."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys

import pytest
from edited_app import SOURCE, EditedApp, events, plan_batch

import millstream as ms
from millstream.errors import ConfigError, ConflictError, UserCodeError
from millstream.ops.incident import capture_incident
from millstream.ops.incident_replay import replay_batch
from millstream.testing import replay_incident
from millstream.views.runs.control_files import hold_run_lock
from millstream.views.runs.failure import record_failure
from millstream.views.store_location import open_state_store

# It fails on what is in state and in the batch together, and not on either alone.
LIMITED = (
    SOURCE.replace(
        'per_kind.view("per_kind")',
        """

def limited(frame):
    most = frame["weight"].max()
    if most > LIMIT:
        raise ValueError(f"a weight of {most} is too much")
    return frame


kinds = per_kind.select("kind", "weight")
kinds.map_frames(limited, schema={"kind": str, "weight": int}, name="limited").view("per_kind", key="kind")
""",
    )
    .replace("buckets=2)", 'buckets=2, on_error="stop")')
    .replace("FACTOR = 2", "FACTOR = 2\nLIMIT = 500")
)
ERROR = "a weight of 600 is too much"
MENDED = ("LIMIT = 500", "LIMIT = 10_000")


def fail(edited, app):
    """Run the app until its next batch fails; return the number of that batch."""
    batch_id = plan_batch(edited, app)
    with pytest.raises(UserCodeError, match=ERROR), record_failure(app.folder):
        edited.run(app)
    return batch_id


@pytest.fixture
def failed(tmp_path):
    """Return an app whose third batch fails, what its number is, and how many records it has."""
    edited = EditedApp(tmp_path, 4, rows_per_batch=60, source=LIMITED)
    edited.create()
    edited.append(events(110, 5))
    app = edited.write()
    edited.run(app)
    edited.append(events(60, 6, first=110))
    return edited, app, fail(edited, app), 60


def test_the_folder_fails_as_the_batch_did_and_passes_when_the_code_is_mended(failed, tmp_path):
    edited, app, batch_id, count = failed
    folder = tmp_path / "incident"
    done = capture_incident(app, edited.file, folder, batch_id)
    assert (done.batch_id, done.records) == (batch_id, count)
    assert re.search(ERROR, done.failure)
    with ms.connect(edited.log) as log:  # the log is not needed any more
        log.delete_topic("clicks")
    test = runpy.run_path(str(folder / f"test_incident_ads_{batch_id}.py"))
    assert re.search(ERROR, test["__doc__"])
    for _ in range(2):  # it can be run again and again
        with pytest.raises(UserCodeError, match=ERROR):
            test["test_the_batch_runs"]()
    code = folder / "code" / "app.py"
    code.write_text(code.read_text().replace(*MENDED))
    test["test_the_batch_runs"]()


@pytest.mark.thorough
def test_pytest_runs_the_folder(failed, tmp_path):
    edited, app, batch_id, _ = failed
    folder = tmp_path / "incident"
    capture_incident(app, edited.file, folder, batch_id)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 1, done.stdout
    assert re.search(f"UserCodeError.*{ERROR}", done.stdout, re.DOTALL)
    code = folder / "code" / "app.py"
    code.write_text(code.read_text().replace(*MENDED))
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stdout


def test_without_the_state_before_it_the_batch_would_not_fail(failed, tmp_path):
    edited, app, batch_id, _ = failed
    folder = tmp_path / "incident"
    capture_incident(app, edited.file, folder, batch_id)
    with open_state_store(folder / "state" / "views.db") as store:
        store._write(lambda db: db.execute("DELETE FROM _state"))
        store._write(lambda db: db.execute("UPDATE _fences SET position = '{}'"))
    replay_incident(folder, edited.file)


@pytest.mark.parametrize(
    "edit",
    [
        ("* FACTOR", "* 1"),  # the function above the step
        ('weight=ms.sum("weight")', 'weight=ms.sum(pl.col("weight") // 2)'),  # its aggregate
    ],
)
def test_a_program_that_differs_above_or_in_a_step_takes_its_state(failed, tmp_path, edit):
    edited, app, batch_id, _ = failed
    folder = tmp_path / "incident"
    capture_incident(app, edited.file, folder, batch_id)
    with pytest.raises(UserCodeError, match=ERROR):
        replay_batch(folder, edited.write())
    replay_batch(folder, edited.write(edit, MENDED))


def test_a_program_with_other_aggregates_cannot_take_the_state(failed, tmp_path):
    edited, app, batch_id, _ = failed
    folder = tmp_path / "incident"
    capture_incident(app, edited.file, folder, batch_id)
    other = edited.write(("n=ms.count(), cost", "m=ms.count(), n=ms.count(), cost"))
    with pytest.raises(ConfigError, match="step 'per_ad' keeps another state"):
        replay_batch(folder, other)


def test_the_first_batch_can_be_captured(tmp_path):
    edited = EditedApp(tmp_path, 1, source=LIMITED)
    edited.create()
    edited.append(events(50, 1))
    with ms.connect(edited.log) as log:
        log.delete_records("clicks", 0, 10)
    edited.append(events(170, 5, first=50))
    app = edited.write()
    app.folder.mkdir(parents=True)
    with pytest.raises(UserCodeError, match="is too much"):
        edited.run(app)
    plan_batch(edited, app)
    folder = tmp_path / "incident"
    assert capture_incident(app, edited.file, folder).records == 210
    with pytest.raises(UserCodeError, match="is too much"):
        replay_incident(folder, folder / "code" / "app.py")


def test_what_cannot_be_captured_is_said(failed, tmp_path):
    edited, app, batch_id, _ = failed
    folder = tmp_path / "incident"

    def refused(match, number=None, error=ConfigError):
        with pytest.raises(error, match=match):
            capture_incident(app, edited.file, folder, number)
        assert not folder.exists()

    refused(f"has not come to batch {batch_id + 1}", batch_id + 1)
    with hold_run_lock(app.folder, 9):
        refused("Stop it", batch_id, ConflictError)
    with ms.connect(edited.log) as log:
        log.delete_records("clicks", 0, 35)
    refused(r"reads clicks/0 \[28, 43\), and the log no longer holds", batch_id)
    (app.folder / "checkpoint" / "offsets" / str(batch_id)).unlink()
    refused("never begun", batch_id)


def test_of_an_app_that_has_never_run_there_is_no_batch(tmp_path):
    edited = EditedApp(tmp_path, 1)
    edited.create()
    with pytest.raises(ConfigError, match="has never run"):
        capture_incident(edited.write(), edited.file)


def test_the_command_captures_and_says_whether_the_batch_fails_here(failed, tmp_path, call):
    edited, _, batch_id, _ = failed
    folder = tmp_path / "incident"
    answer = call("capture-incident", str(edited.file), "--to", str(folder))
    assert answer.code == 0, answer.err
    assert f"Batch {batch_id} of ads, with 60 records, is in {folder}." in answer.out
    assert re.search(f"fails here, too: UserCodeError: .*{ERROR}", answer.out)
    assert call("capture-incident", str(edited.file), "--to", str(folder)).code == 2
    edited.write(MENDED)
    answer = call("capture-incident", str(edited.file), "--to", str(tmp_path / "other"))
    assert "It runs to its end here" in answer.out


def test_a_file_of_several_apps_and_modules_that_were_imported_before_are_no_hindrance(
    failed, tmp_path
):
    edited, app, _, _ = failed
    folder = tmp_path / "incident"
    (tmp_path / "incident.new").mkdir()  # the user's
    capture_incident(app, edited.file, folder)
    assert (tmp_path / "incident.new").exists()
    file, limits = folder / "code" / "app.py", folder / "code" / "limits_of_ads.py"
    text = file.read_text().replace("LIMIT = 500", "from limits_of_ads import LIMIT")
    file.write_text(f"{text}\nother = ms.App('other', log=LOG)\n".replace("=LOG", "='x'"))
    limits.write_text("LIMIT = 500")
    with pytest.raises(UserCodeError, match=ERROR):
        replay_incident(folder, file)
    limits.write_text("LIMIT = 10_000  # mended")
    replay_incident(folder, file)
    assert "limits_of_ads" not in sys.modules
