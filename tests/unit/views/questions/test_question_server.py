"""Questions over HTTP: what is answered, to whom, and which status says what to do."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
from click.testing import CliRunner
from tests.question_model import ADS, Expected, draw_records, question_app, write_records

import millstream as ms
from millstream.cli.ask import ask as ask_command
from millstream.engine.local_run import LocalRun

TOKEN = "a-token-of-some-length"
LONG = "5 minutes"


@pytest.fixture(scope="module")
def asked(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    records = draw_records(21, 60, 2)
    write_records(folder, records, 2)
    app = question_app(folder)
    LocalRun(app.plan(), folder, app.folder, app.state_store, rows_per_batch=40).run()
    with app.serve_questions("127.0.0.1:0") as serving:
        yield app, serving.url, records
    app.close_questions()


def request(url, body=None, **headers):
    data = body.encode() if isinstance(body, str) else body
    asked = Request(url, data, {"Content-Type": "application/json", **headers})
    try:
        with urlopen(asked, timeout=60) as response:
            return response.status, json.loads(response.read())
    except HTTPError as error:
        return error.code, json.loads(error.read())["error"]


def test_a_key_is_answered_as_json_with_the_position(asked):
    app, url, _ = asked
    status, answer = request(f"{url}ask/minutes?deadline=1m", '{"ad": 3}')
    known = app.ask("minutes", ad=3)
    assert status == 200
    assert (answer["position"], answer["batch_id"]) == (known.position, known.batch_id)
    assert answer["running"] is False
    assert [row["n"] for row in answer["answer"]] == known.rows["n"].to_list()
    assert {*answer["answer"][0]} == {*known.rows.columns}


def test_many_keys_and_questions_are_answered_to_another_program(asked):
    app, url, records = asked
    many = ms.ask(url, "minutes", [{"ad": ad} for ad in ADS], deadline=LONG)
    expected = Expected(records, many.position, 2).rows("minutes")
    assert sorted((row["ad"], row["n"]) for row in many.value) == sorted(
        (row["ad"], row["n"]) for row in expected
    )
    assert ms.ask(url, "city_of", ad=3).value == app.ask("city_of", ad=3).value
    reached = ms.ask(url, "people", user="ann", at_least={"clicks": many.position["clicks"]})
    assert reached.position == many.position


@pytest.mark.parametrize(
    ("path", "body", "status", "kind", "says"),
    [
        ("ask/minuts", '{"ad": 3}', 400, "ConfigError", "Did you mean 'minutes'"),
        ("ask/minutes", '{"ad": "x"}', 400, "ConfigError", "is of type Int64"),
        ("ask/minutes", "[1, 2]", 400, "ConfigError", "The body is no key"),
        ("ask/minutes", "{", 400, "ConfigError", "is not JSON"),
        ("ask/minutes", b'{"ad": "\xff"}', 400, "ConfigError", "is not JSON"),
        ("ask/minutes", "[" * 100_000, 400, "ConfigError", "is not JSON"),
        (
            "ask/minutes",
            '{"ad": ' + "[" * 900 + "]" * 900 + "}",
            400,
            "ConfigError",
            "no such values",
        ),
        ("ask/minutes", '{"ad": {"a": 1}}', 400, "ConfigError", "no such values"),
        ("ask/minutes", '{"\\ud800": 1}', 400, "ConfigError", "the question gives \ud800"),
        ("ask/minutes", '{"ad": [1, true]}', 400, "ConfigError", "true and false are no such"),
        (
            "ask/minutes?at_least={}".format('{"c":5}'),
            '{"ad": 3}',
            400,
            "ConfigError",
            "at_least is",
        ),
        ("ask/minutes?limit=3", "{}", 400, "ConfigError", "'limit' is none of deadline"),
        ("ask/minutes?deadline=soon", '{"ad": 3}', 400, "ConfigError", "deadline is 'soon'"),
        ("ask/city_of", '{"add": 3}', 400, "ConfigError", "takes the arguments ad"),
        (
            "ask/minutes?deadline=300ms&at_least=" + '{"clicks":{"0":9999}}',
            '{"ad": 3}',
            504,
            "DeadlineError",
            "was asked for",
        ),
        ("nothing", None, 404, "UnknownAddress", "Addresses are GET /ask"),
    ],
)
def test_what_is_refused_says_why(asked, path, body, status, kind, says):
    _, url, _ = asked
    got, error = request(url + path, body)
    assert (got, error["kind"]) == (status, kind)
    assert says in error["message"]


def test_a_request_for_another_host_or_of_another_site_is_refused(asked):
    _, url, _ = asked
    assert request(f"{url}ask/minutes", '{"ad": 3}', Host="evil.example")[0] == 421
    assert request(f"{url}ask/minutes", '{"ad": 3}', Origin="http://evil.example")[0] == 403


def test_a_server_with_a_token_answers_those_who_have_it(asked):
    app, _, _ = asked
    with app.serve_questions("127.0.0.1:0", token=TOKEN) as serving:
        with pytest.raises(ms.ConfigError, match="requires the header Authorization"):
            ms.ask(serving.url, "minutes", ad=3)
        assert ms.ask(serving.url, "minutes", token=TOKEN, ad=3).name == "minutes"


def test_an_address_that_other_machines_reach_needs_a_token_or_consent(asked):
    app, _, _ = asked
    with pytest.raises(ms.ConfigError, match="can be reached from other machines"):
        app.serve_questions("0.0.0.0:0").__enter__()


def test_an_address_that_cannot_be_is_refused(asked):
    with pytest.raises(ms.ConfigError, match="is no address of an app's questions"):
        ms.ask("http://127.0.0.1:port", "minutes", ad=3)


def test_nothing_that_responds_is_an_error_that_may_pass(asked, tmp_path):
    app, _, _ = asked
    with app.serve_questions("127.0.0.1:0") as serving:
        url = serving.url
    with pytest.raises(ms.RetriableError, match="Nothing responds"):
        ms.ask(url, "minutes", ad=3)


def test_many_clients_are_answered_at_once(asked):
    app, url, _ = asked
    known = app.ask("minutes", ad=3).rows["n"].to_list()
    with ThreadPoolExecutor(16) as pool:
        answers = pool.map(lambda _: ms.ask(url, "minutes", ad=3, deadline=LONG), range(64))
    assert all([row["n"] for row in answer.value] == known for answer in answers)


def test_too_many_at_once_are_told_to_come_again(asked, monkeypatch):
    app, _, _ = asked
    go_on, service = threading.Event(), app._answers()
    app.questions["waiting"] = lambda _state: go_on.wait(60)
    monkeypatch.setattr(service, "_places", threading.BoundedSemaphore(2))
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(app.ask, "waiting", deadline=LONG) for _ in range(2)]
        while service._places._value:
            pass
        with pytest.raises(ms.RetriableError, match="are worked on or wait"):
            app.ask("minutes", ad=3)
        go_on.set()
        assert all(one.result().value for one in waiting)
    del app.questions["waiting"]


def test_the_command_asks_a_url_and_lists_what_can_be_asked(asked):
    _, url, _ = asked
    runner = CliRunner()
    listed = runner.invoke(ask_command, [url, "--json"], catch_exceptions=False)
    assert {"name": "minutes", "kind": "view", "key": ["ad"]} in json.loads(listed.output)
    answered = runner.invoke(
        ask_command, [url, "city_of", "ad=3", "--json"], catch_exceptions=False
    )
    assert json.loads(answered.output)["name"] == "city_of"
    shown = runner.invoke(ask_command, [url, "minutes", "ad=3"], catch_exceptions=False)
    assert "window_start" in shown.output
    assert "the app does not run" in shown.output
