"""Commands on an edited program from the page: who may ask for them, and what they do. They are the real commands."""

from __future__ import annotations

import contextlib
import json
import time
import urllib.error
import urllib.request
from contextlib import closing

import pytest
from broker.broker_process import InProcess
from edited_app import SEED, EditedApp, answers, events, per_kind
from metrics_text import figures

import millstream as ms
from millstream.access.audit_log import Actor
from millstream.cli.version_runs import VersionRuns, parse_programs
from millstream.engine.local_run import LocalRun
from millstream.engine.topic_ids import save_log_brokers
from millstream.errors import ConfigError, ConflictError
from millstream.kernels.state.keyhash import Buckets
from millstream.views.server.server import serve
from millstream.views.store_location import open_state_store

WAIT_S = 600
WHO = Actor(token="alice", client="127.0.0.1")
FACTOR = ("FACTOR = 2", "FACTOR = 3")
ROWS = events(60, 3)


@pytest.fixture
def edited(tmp_path):
    made = EditedApp(tmp_path, 2)
    made.create()
    made.append(ROWS)
    made.run(made.write())
    return made


@pytest.fixture
def runs(edited):
    found = VersionRuns(edited.log, {"ads": str(edited.file)})
    yield found
    found.close()


@pytest.fixture
def url(edited, runs):
    with serve(edited.log, listen="127.0.0.1:0", commands=runs) as serving:
        yield serving.url.rstrip("/")


def post(url, action, value=None, app="ads", **headers):
    given = {"Origin": url, "Content-Type": "application/json"}
    given |= {name.replace("_", "-"): text for name, text in headers.items()}
    body = value if isinstance(value, bytes) else json.dumps(value or {}).encode()
    target = f"{url}/apps/{app}/versions/{action}"
    try:
        with urllib.request.urlopen(
            urllib.request.Request(target, body, given, method="POST"), timeout=60
        ) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read())["error"]["message"]


def program(url):
    with urllib.request.urlopen(f"{url}/apps/ads/operate", timeout=60) as answer:
        return json.loads(answer.read())["program"]


def ended(url):
    deadline_s = time.monotonic() + WAIT_S
    while (found := program(url))["running"] is not False:
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    return found


def test_only_a_page_of_this_server_may_ask_and_only_what_there_is(url, runs):
    assert post(url, "plan", Origin="http://evil.example")[0] == 403
    assert post(url, "plan", Content_Type="text/plain")[0] == 415
    assert post(url, "plan", b"no JSON")[0] == 400
    assert post(url, "plan", {"stop": "yes"})[0] == 400
    status, message = post(url, "reset")
    assert status == 400
    assert "reset" in message
    assert post(url, "plan", app="other")[0] == 404
    assert program(url)["action"] is None, "none of these has begun a command"
    assert runs.read("other") is None
    with pytest.raises(ConfigError, match="--program other=FILE"):
        runs.start("other", "plan", WHO, stop=False)


def test_an_edit_is_planned_and_another_command_waits_for_it(edited, url, runs):
    edited.write(FACTOR)
    assert post(url, "plan")[1]["running"] is True
    with pytest.raises(ConflictError, match="millstream plan runs for ads"):
        runs.start("ads", "compare", WHO, stop=False)
    assert post(url, "deploy")[0] == 409
    found = ended(url)
    assert (found["action"], found["exit_code"], found["file"]) == ("plan", 3, str(edited.file))
    assert "rebuilds  step 'per_kind'" in found["output"]


@pytest.mark.parametrize(
    ("before", "after", "behind"),
    [
        ("", "", ""),  # the only app of the file has another name
        ("", "", ":app"),
        ("app = ms.App(", "other = app = ms.App(", ""),  # so is a variable called, and not the app
        ("app = ms.App(", "other = app = ms.App(", ":other"),
    ],
)
def test_a_file_that_is_of_another_app_is_refused(edited, before, after, behind):
    file = edited.folder / "-app.py"  # no option
    file.write_text(edited.file.read_text().replace(before, after, 1))
    runs = VersionRuns(edited.log, {"other": f"-app.py{behind}"})
    with closing(runs), contextlib.chdir(edited.folder):
        runs.start("other", "plan", WHO, stop=False)
        runs._last["other"].process.wait(WAIT_S)
        found = runs.read("other")
        assert found["exit_code"] not in (0, 3), "it is refused"
        expected = "none is 'other'" if not (after or behind) else "app 'ads', and was named as"
        assert expected in found["output"]


def test_an_app_over_brokers_is_planned_over_its_own_log_and_not_the_folder_that_is_served(
    tmp_path,
):
    pytest.importorskip("confluent_kafka", reason="the extra `kafka` is not installed here")
    edited = EditedApp(tmp_path, 2)
    with InProcess(edited.log) as broker:
        address = f"kafka://{broker.address}"
        with ms.connect(address) as log:
            log.create_topic("clicks", partitions=2)
        edited.append(ROWS)
        state = tmp_path / "state"
        edited.source = edited.source.replace("log=LOG", f"log={address!r}, state={str(state)!r}")
        app = edited.write()
        local = LocalRun(app.plan(Buckets(2, SEED)), address, app.folder, app.state_store)
        local.run()
        with open_state_store(app.state_store) as store:
            save_log_brokers("ads", store, address + "?client.id=secret")
        edited.write(FACTOR)
        runs = VersionRuns(state, {"ads": str(edited.file)})
        with closing(runs), serve(state, listen="127.0.0.1:0", commands=runs) as serving:
            url = serving.url.rstrip("/")
            post(url, "plan")
            found = ended(url)
            assert (found["exit_code"], address in found["output"]) == (3, False), found["output"]
            assert "rebuilds  step 'per_kind'" in found["output"]
            with urllib.request.urlopen(f"{url}/apps/ads/status", timeout=60) as answer:
                assert json.loads(answer.read())["brokers"] == address
            with urllib.request.urlopen(f"{url}/metrics", timeout=60) as answer:
                assert (
                    figures(answer.read().decode())["millstream_metrics_failed", "source=apps"] == 0
                )


def test_a_server_without_programs_offers_nothing(edited):
    with serve(edited.log, listen="127.0.0.1:0") as serving:
        url = serving.url.rstrip("/")
        assert post(url, "plan")[0] == 403
        assert program(url) is None


@pytest.mark.long
def test_an_edit_is_compared_put_in_place_and_taken_back(edited, url):
    app = edited.write(FACTOR)
    post(url, "compare")
    assert "per_kind: " in ended(url)["output"]
    assert edited.views(app)["per_kind"] == per_kind(ROWS), "a comparison changes nothing"
    post(url, "deploy", {"stop": True})
    assert ended(url)["exit_code"] == 0
    assert edited.views(app)["per_kind"] == per_kind(ROWS, 3)
    post(url, "rollback")
    found = ended(url)
    assert found["exit_code"] != 0, "the file is not the app as it was"
    edited.write()
    post(url, "rollback")
    assert ended(url)["exit_code"] == 0
    assert edited.views(app) == answers(ROWS)


def test_what_runs_ends_with_the_server(edited, runs):
    edited.file.write_text("import time\ntime.sleep(1000)\n")
    runs.start("ads", "plan", WHO, stop=False)
    process = runs._last["ads"].process
    runs.close()
    assert process.poll() is not None


def test_a_program_is_an_app_and_a_file_that_is_there(edited):
    file = str(edited.file)
    assert parse_programs([f"ads={file}", f"b={file}:app"]) == {"ads": file, "b": f"{file}:app"}
    for wrong in ([file], [f"={file}"], ["ads=/none/app.py"], [f"ads={file}", f"ads={file}"]):
        with pytest.raises(ConfigError, match="--program"):
            parse_programs(wrong)
