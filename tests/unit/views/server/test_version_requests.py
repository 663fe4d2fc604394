"""Commands on an edited program from the page: who may ask for them, and what they do. They are the real commands."""

from __future__ import annotations

import contextlib
import json
import time
import urllib.error
import urllib.request
from contextlib import closing

import pytest
from edited_app import EditedApp, answers, events, per_kind

from millstream.cli.version_runs import VersionRuns, parse_programs
from millstream.errors import ConfigError, ConflictError
from millstream.views.server.server import serve

WAIT_S = 600
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
        runs.start("other", "plan", stop=False)


def test_an_edit_is_planned_and_another_command_waits_for_it(edited, url, runs):
    edited.write(FACTOR)
    assert post(url, "plan")[1]["running"] is True
    with pytest.raises(ConflictError, match="millstream plan runs for ads"):
        runs.start("ads", "compare", stop=False)
    assert post(url, "deploy")[0] == 409
    found = ended(url)
    assert (found["action"], found["exit_code"], found["file"]) == ("plan", 3, str(edited.file))
    assert "rebuilds  step 'per_kind'" in found["output"]


def test_the_only_app_of_a_file_is_not_taken_for_the_one_that_was_asked_for(edited):
    edited.file.rename(edited.folder / "-app.py")
    runs = VersionRuns(edited.log, {"other": "-app.py"})
    with closing(runs), contextlib.chdir(edited.folder):
        runs.start("other", "plan", stop=False)
        runs._last["other"].process.wait(WAIT_S)
        assert "none is 'other'" in runs.read("other")["output"]


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
    runs.start("ads", "plan", stop=False)
    process = runs._last["ads"].process
    runs.close()
    assert process.poll() is not None


def test_a_program_is_an_app_and_a_file_that_is_there(edited):
    file = str(edited.file)
    assert parse_programs([f"ads={file}", f"b={file}:app"]) == {"ads": file, "b": f"{file}:app"}
    for wrong in ([file], [f"={file}"], ["ads=/none/app.py"], [f"ads={file}", f"ads={file}"]):
        with pytest.raises(ConfigError, match="--program"):
            parse_programs(wrong)
