"""The commands on an edited app: what they print, and their exit codes."""

from __future__ import annotations

import json

import pytest
from edited_app import EditedApp, answers, events, per_kind

from millstream.views.runs.control_files import hold_run_lock
from millstream.views.schema import JOB
from millstream.views.store_location import open_state_store

FACTOR = ("FACTOR = 2", "FACTOR = 3")


@pytest.fixture
def edited(tmp_path):
    made = EditedApp(tmp_path, 2)
    made.create()
    made.append(events(60, 3))
    made.run(made.write())
    return made


def test_an_app_as_it_was_keeps_everything(edited, call):
    answer = call("plan", str(edited.file))
    assert answer.code == 0
    assert answer.out.splitlines()[-1] == "A run resumes where the last one stopped."
    assert "keeps     step 'per_ad'" in answer.out


def test_a_plan_says_what_is_rebuilt_and_what_that_costs(edited, call):
    edited.write(FACTOR)
    answer = call("plan", str(edited.file))
    assert answer.code == 3
    lines = answer.out.splitlines()
    at = lines.index("rebuilds  step 'per_kind'")
    assert "weigh" in lines[at + 1]
    assert "Read again: 60 records (clicks/0 [0, 30), clicks/1 [0, 30))." in lines
    assert "How long that takes is not known: no batch of the app was measured yet." in lines


def test_the_time_is_that_of_the_largest_batch(edited, call):
    app = edited.write(FACTOR)
    with open_state_store(app.state_store) as store:
        status = store.status(app.name, JOB)
        status["largest_batch"] = {"batch_id": 0, "read": 20, "duration_ms": 1000.0}
        store._write(lambda db: db.execute("UPDATE _fences SET status = ?", (json.dumps(status),)))
    assert "about 3 seconds, at 20 records a second" in call("plan", str(edited.file)).out
    assert json.loads(call("plan", str(edited.file), "--json").out)["seconds"] == 3.0


def test_a_plan_as_json_has_every_number(edited, call):
    edited.write(FACTOR)
    answer = call("plan", str(edited.file), "--json")
    values = json.loads(answer.out)
    assert (answer.code, values["exit_code"]) == (3, 3)
    assert (values["verdict"], values["records"], values["records_gone"]) == ("rebuilds", 60, 0)
    assert {part["name"]: part["verdict"] for part in values["parts"]} == {
        **dict.fromkeys(("per_ad", "busy", "dear"), "keeps"),
        "per_kind": "rebuilds",
    }
    assert values["read_again"][1] == {
        "topic": "clicks",
        "partition": 1,
        "start": 0,
        "end": 30,
        "gone": 0,
    }


def test_a_refusal_is_said_and_has_a_code_of_its_own(edited, call):
    edited.write(("buckets=2", "buckets=5"))
    answer = call("plan", str(edited.file))
    assert answer.code == 4
    assert "refuses   the app: the state is divided into 2 buckets" in answer.out
    assert call("deploy", str(edited.file)).code == 2


def test_before_the_first_run_a_plan_says_so(tmp_path, call):
    made = EditedApp(tmp_path, 1)
    made.create()
    made.write()
    answer = call("plan", str(made.file))
    assert answer.code == 0
    assert answer.out == "ads has no state yet: its first run reads the log from its start.\n"


def test_a_deployment_is_reported_and_the_app_goes_on_with_it(edited, call):
    app = edited.write(FACTOR)
    answer = call("deploy", str(edited.file), "--records-per-second", "100000")
    assert answer.code == 0
    assert "ads is deployed (read 60 records). Its next run goes on with it." in answer.out
    assert edited.views(app) == answers(events(60, 3)) | {"per_kind": per_kind(events(60, 3), 3)}
    assert call("plan", str(edited.file)).code == 0
    assert json.loads(call("deploy", str(edited.file), "--json").out)["records"] == 0


def test_an_app_that_runs_is_not_switched_and_says_how_to_go_on(edited, call):
    app = edited.write(FACTOR)
    with hold_run_lock(app.folder, 1):
        answer = call("deploy", str(edited.file))
        assert answer.code == 3
        assert "Stop it (millstream stop ads) and do this again" in answer.out
        assert edited.views(app) == answers(events(60, 3))
        late = call("deploy", str(edited.file), "--stop", "--timeout", "1 second")
        assert late.code == 1
        assert "has not stopped within 1 second" in late.err
    assert call("deploy", str(edited.file), "--stop").code == 0


def test_the_log_is_read_no_faster_than_asked(edited, call, monkeypatch):
    waited = []
    monkeypatch.setattr("millstream.cli.deploy.time.sleep", waited.append)
    edited.write(FACTOR)
    call("deploy", str(edited.file), "--records-per-second", "2")
    assert sum(waited) > 20  # 60 records take 30 seconds, less what has passed
