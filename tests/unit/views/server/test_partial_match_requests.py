"""Partial matches at the page's server: what the command lists, who may ask for it, and what cannot be asked."""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from datetime import timedelta

import pytest
from edited_app import EditedApp
from partial_match_app import GREATEST, MARKUP, SOURCE, START, click

from millstream.access.tokens import TokenFile
from millstream.cli.version_runs import VersionRuns
from millstream.errors import ConfigError, ConflictError
from millstream.views.server.partial_match_requests import ROWS_SHOWN
from millstream.views.server.server import serve


@pytest.fixture
def edited(tmp_path):
    """An app with a long partial match of the key a0, and one of a key that is markup."""
    made = EditedApp(tmp_path, 1, source=SOURCE)
    made.create()
    long = [click(second, n=second) for second in range(ROWS_SHOWN + 5)]
    made.append([*long, click(40, MARKUP, GREATEST), click(60, "last", kind="show")])
    made.run(made.write())
    return made


@pytest.fixture
def runs(edited):
    found = VersionRuns(edited.log, {"carts": str(edited.file)})
    yield found
    found.close()


def post(url, value, app="carts", **headers):
    given = {"Origin": url, "Content-Type": "application/json"}
    given |= {name.replace("_", "-"): text for name, text in headers.items()}
    given = {name: text for name, text in given.items() if text is not None}
    body = value if isinstance(value, bytes) else json.dumps(value).encode()
    target = f"{url}/apps/{app}/partial-matches"
    request = urllib.request.Request(target, body, given, method="POST")
    try:
        with urllib.request.urlopen(request, timeout=600) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read())["error"]["message"]


@pytest.fixture
def url(edited, runs):
    with serve(edited.log, listen="127.0.0.1:0", commands=runs) as serving:
        yield serving.url.rstrip("/")


def test_what_the_command_lists_is_shown_with_exact_numbers_and_not_all_rows(url):
    status, found = post(url, {})
    assert status == 200, found
    assert (found["batch_id"], found["more"]) == (0, False)
    by_key = {match["key"]["ad"]: match for match in reversed(found["partial_matches"])}
    one, first = by_key[MARKUP], by_key["a0"]  # of the key a0, the oldest
    assert (one["row_count"], one["since"]) == (1, (START + timedelta(seconds=40)).isoformat())
    assert one["rows"][0]["values"] == {"ad": MARKUP, "n": str(GREATEST), "share": "Infinity"}
    assert (first["row_count"], len(first["rows"])) == (ROWS_SHOWN + 5, ROWS_SHOWN)
    shown = [row["values"]["n"] for row in first["rows"]]
    assert shown == [0, *range(6, ROWS_SHOWN + 5)], "the first one, and the last ones"


@pytest.mark.long
def test_a_step_and_a_key_are_arguments_and_never_options(url):
    (one,) = post(url, {"step": "unpaid", "key": [f"ad={MARKUP}"]})[1]["partial_matches"]
    assert one["key"] == {"ad": MARKUP}
    status, message = post(url, {"step": "--help", "key": ["--json"]})
    assert status == 400
    assert "no pattern '--help'" in message or "not COLUMN=VALUE" in message


def test_what_is_not_understood_begins_no_process(url, runs, monkeypatch):
    monkeypatch.setattr(runs, "partial_matches", None)
    for wrong in (b"no", b"[]", {"step": 7}, {"key": "ad=x"}, {"key": [1]}, {"key": ["a=\0"]}):
        status, message = post(url, wrong)
        assert status == 400, wrong
        assert "is not of the form" in message
    for wrong in ({"step": "\ud800"}, {"key": ["x" * 20_000]}, {"key": ["a=b"] * 200}):
        assert post(url, wrong)[0] == 400
    assert post(url, {}, app="other")[0] == 404
    assert post(url, {}, Content_Type="text/plain")[0] == 415
    assert post(url, {}, Origin="http://evil.example")[0] == 403
    assert post(url, {}, Origin=None)[0] == 403


def test_a_reader_may_look_and_learns_no_path_of_the_program(edited, runs, tmp_path, monkeypatch):
    monkeypatch.setattr(runs, "partial_matches", lambda *_: {"partial_matches": [], "more": False})
    tokens = TokenFile(tmp_path / "tokens")
    given = {"Authorization": f"Bearer {tokens.add('anna', 'read')}"}
    with serve(
        edited.log, listen="127.0.0.1:0", commands=runs, token_file=tmp_path / "tokens"
    ) as serving:
        url = serving.url.rstrip("/")
        assert post(url, {}, **given, Origin=None)[0] == 200
        assert post(url, {})[0] == 401
        request = urllib.request.Request(f"{url}/apps/carts/operate", headers=given)
        with urllib.request.urlopen(request, timeout=60) as answer:
            found = json.loads(answer.read())
    assert (found["can_look"], found["program"]) == (True, None)
    assert found["patterns"] == ["paid", "unpaid"]


def test_a_server_without_programs_cannot_look(edited):
    with serve(edited.log, listen="127.0.0.1:0") as serving:
        status, message = post(serving.url.rstrip("/"), {})
    assert (status, "only reads" in message) == (403, True)


def test_one_is_looked_for_at_a_time_and_ends_with_the_server(edited):
    edited.file.write_text("import time\ntime.sleep(1000)\n")
    runs = VersionRuns(edited.log, {"carts": str(edited.file)})
    ended = []

    def look():
        with pytest.raises(ConfigError, match="has ended with"):
            runs.partial_matches("carts", None, ())
        ended.append(True)

    thread = threading.Thread(target=look)
    thread.start()
    while runs._look is None:
        thread.join(0.05)
    with pytest.raises(ConflictError, match="being looked for"):
        runs.partial_matches("carts", None, ())
    runs.close()
    thread.join()
    assert ended
    with pytest.raises(ConfigError, match="--program other=FILE"):
        runs.partial_matches("other", None, ())


@pytest.mark.long
def test_a_program_that_prints_is_named_as_the_reason(edited, runs):
    edited.file.write_text(edited.file.read_text() + "\nprint('hello')\n")
    with pytest.raises(ConfigError, match="prints text of its own"):
        runs.partial_matches("carts", None, ())
