"""Who may come to the edge, and what is refused before it starts."""

from __future__ import annotations

import sys

import pytest

import millstream as ms
from millstream.access.tokens import read_token
from millstream.edge.server import EdgeSettings, serve
from millstream.errors import ConfigError, EnvironmentProblem, FolderOwnedError, UnknownTopicError

TOKEN = "0123456789abcdef"


def test_a_token_is_wanted_from_everybody_who_comes(folder, edge_on):
    with edge_on(folder, token=TOKEN) as edge:
        for said in (None, "Bearer ", f"Bearer {TOKEN}x", f"Basic {TOKEN}", TOKEN):
            headers = {} if said is None else {"Authorization": said}
            answer = edge.post("/topics/one", b"1", **headers)
            assert (answer.status, answer.headers["www-authenticate"]) == (401, "Bearer"), said
            assert edge.get("/topics/one/events", **headers).status == 401
            assert edge.get("/status", **headers).status == 401
        assert edge.post("/topics/one", b"1", Authorization=f"bearer {TOKEN}").status == 200
        assert (
            edge.get("/status", Authorization=f"Bearer {TOKEN}", Host="other.example").status == 200
        )


def test_nobody_is_advised_to_let_in_pages_that_do_not_say_where_they_are_from(folder, edge_on):
    with edge_on(folder) as edge:
        refused = edge.post("/topics/one", b"1", Origin="null")
        assert refused.status == 403
        assert refused.json["error"]["message"].endswith(
            "may not send requests here. Serve them from a host."
        )


def test_pages_of_others_may_not_send_and_those_that_were_named_may(folder, edge_on):
    with edge_on(folder, origins=("https://mine.example",)) as edge:
        refused = edge.post("/topics/one", b"1", Origin="https://evil.example")
        assert (refused.status, refused.json["error"]["kind"]) == (403, "OriginRefused")
        before = edge.ask(
            "OPTIONS",
            "/topics/one",
            Origin="https://mine.example",
            Access_Control_Request_Method="POST",
        )
        assert (before.status, before.headers["access-control-allow-origin"]) == (
            204,
            "https://mine.example",
        )
        assert "idempotency-key" in before.headers["access-control-allow-headers"]
        taken = edge.post("/topics/one", b"1", Origin="https://mine.example")
        assert (taken.status, taken.headers["access-control-allow-origin"]) == (
            200,
            "https://mine.example",
        )


def test_a_name_that_was_made_to_lead_here_is_refused(edge):
    assert edge.post("/topics/one", b"1", Host="evil.example").status == 421


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"http": "0.0.0.0:0"}, "--token-file"),
        ({"http": "[::]:0"}, "--token-file"),
        ({"http": None, "statsd": "0.0.0.0:0", "settings": EdgeSettings(token=TOKEN)}, "no token"),
        ({"http": None, "statsd": "127.0.0.1:0"}, "--statsd-topic"),
        ({"http": None}, "nothing to serve"),
        ({"http": "nowhere"}, "Give HOST:PORT"),
        (
            {"statsd": "127.0.0.1:0", "settings": EdgeSettings(statsd_topic="one", read_only=True)},
            "--read-only",
        ),
    ],
)
def test_what_others_could_reach_or_cannot_work_does_not_start(folder, options, says):
    with (
        pytest.raises(ConfigError, match=says),
        serve(folder, **{"http": "127.0.0.1:0", **options}),
    ):
        pass


@pytest.mark.parametrize("settings", [EdgeSettings(token=TOKEN), EdgeSettings(insecure=True)])
def test_with_a_token_or_on_purpose_it_does(folder, settings):
    with serve(folder, http="0.0.0.0:0", settings=settings) as up:
        assert up.url


def test_a_topic_for_metrics_that_is_not_there_is_said_at_once(folder):
    settings = EdgeSettings(statsd_topic="metricks")
    with (
        pytest.raises(UnknownTopicError, match="metricks"),
        serve(folder, http=None, statsd="127.0.0.1:0", settings=settings),
    ):
        pass


def test_a_port_that_is_taken_is_said_to_be(folder):
    settings = EdgeSettings(statsd_topic="metrics")
    with serve(folder, http=None, statsd="127.0.0.1:0", settings=settings) as up:
        taken = pytest.raises(ConfigError, match="is taken by another program")
        with taken, serve(folder, http=None, statsd=up.statsd, settings=settings):
            pass


def test_without_the_extra_it_is_named(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    missing = pytest.raises(EnvironmentProblem, match=r'pip install "millstream\[ui\]"')
    with missing, serve(folder, http="127.0.0.1:0"):
        pass


def test_a_token_is_read_from_a_file_that_has_one(tmp_path):
    path = tmp_path / "token"
    path.write_text(f"{TOKEN}\n")
    assert read_token(path) == TOKEN
    for bad in ("short", "", "two words are not one token", "ä" * 20):
        path.write_text(bad)
        with pytest.raises(ConfigError, match="openssl rand"):
            read_token(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_token(tmp_path / "none")


def test_read_only_it_needs_no_right_to_write(folder, edge_on, owner_elsewhere):
    with edge_on(folder, read_only=True) as edge:
        assert edge.get("/topics").json["topics"][0]["topic"] == "clicks"
        refused = edge.post("/topics/one", b"1")
        assert (refused.status, refused.json["error"]["kind"]) == (403, "ReadOnly")


def test_it_writes_through_the_process_that_owns_the_folder(folder, edge_on, owner_elsewhere):
    with edge_on(folder) as edge:
        assert edge.post("/topics/one", b"1").status == 200
    with ms.connect(folder) as log:
        with pytest.raises(FolderOwnedError):
            log.acquire_ownership()
        assert [record.value for record in log.consumer("one", follow=False)] == [b"1"]


@pytest.fixture
def owner_elsewhere(folder):
    """Have another process own the folder."""
    import subprocess

    program = (
        "import sys, millstream as ms\n"
        "with ms.connect(sys.argv[1]) as log:\n"
        "    log.acquire_ownership()\n"
        "    print('owned', flush=True)\n"
        "    sys.stdin.read()\n"
    )
    owner = subprocess.Popen(
        [sys.executable, "-c", program, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with owner:
        assert owner.stdout.readline() == b"owned\n"
        yield
        owner.stdin.close()


def test_the_public_log_is_as_it_was(folder, edge):
    """What the edge appends, a program reads like any other record."""
    edge.post("/topics/one?key=k", b'{"a": 1}')
    with ms.connect(folder) as log:
        (record,) = log.consumer("one", follow=False)
    assert (record.key, record.json()) == (b"k", {"a": 1})


def test_a_token_is_not_shown():
    assert TOKEN not in repr(EdgeSettings(token=TOKEN))
