"""No output, error, file, state or description of a run has a secret in it, whatever fails."""

from __future__ import annotations

import sqlite3
import sys
from pathlib import Path

import pytest
from http_service import serving

import millstream as ms
from millstream.cli.main import main

# Each is found as it is, percent-encoded, and in Base64.
SECRETS = {
    "API_TOKEN": "hunter2-api-token-secret",
    "QUERY_TOKEN": "hunter2-query-secret",
    "DB_PASSWORD": "hunter2-db-secret",
}
NOWHERE = "127.0.0.1:1"  # a port at which nothing listens
APP = """
from dataclasses import dataclass
import millstream as ms
import polars as pl

@dataclass
class Click:
    user: str

app = ms.App("clicks", log="LOG")
found = ms.http_lookup(
    "SERVICE?user={user}&key={token}",
    headers={"Authorization": "Bearer ${file:FILE}"},
    secrets={"token": "${env:QUERY_TOKEN}"},
    fields={"country": "country"},
)
clicks = app.topic("clicks", Click).stream()
clicks.enrich(found, on="user", schema={"country": pl.String}, retries=0, on_error="dead-letter").view(
    "enriched", key="user"
)
"""


@pytest.fixture
def command(tmp_path, monkeypatch, capfd):
    """Return a function that runs a command in the folder, and returns its code and all that it has printed."""
    for name, secret in SECRETS.items():
        monkeypatch.setenv(name, secret)
    monkeypatch.setenv("MILLSTREAM_LOG", str(tmp_path / "data"))
    monkeypatch.chdir(tmp_path)

    def run_one(*arguments):
        monkeypatch.setattr(sys, "argv", ["millstream", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capfd.readouterr()
        return ended.value.code, out + err

    return run_one


def assert_unseen(text, what):
    for secret in SECRETS.values():
        assert secret not in text, f"{what}: {secret}"


def assert_in_no_file(folder, besides):
    count = 0
    for path in folder.rglob("*"):
        if path.is_file() and path not in besides:
            count += 1
            assert_unseen(path.read_bytes().decode("latin-1"), path)
    assert count > 10, "there are files to search"


def test_a_run_leaves_none_in_its_files_and_says_none_when_it_fails(tmp_path, command):
    secret = tmp_path / "token"
    secret.write_text(SECRETS["API_TOKEN"])
    secret.chmod(0o600)
    asked = []

    def answer(request, _):
        headers = {name.lower(): value for name, value in request.headers.items()}
        asked.append((request.target, headers["authorization"]))
        return 200, {"country": "NO"}

    with serving(answer) as service:
        file = tmp_path / "app.py"
        text = APP.replace("LOG", str(tmp_path / "data")).replace("FILE", str(secret))
        file.write_text(text.replace("SERVICE", service.url))
        with ms.connect(tmp_path / "data") as log:
            log.create_topic("clicks", partitions=1)
            with log.producer() as producer:
                producer.send("clicks", b'{"user": "u1"}').result()
        arguments = ("run", "app.py", "--engine", "local", "--until", "caught-up")
        code, printed = command(*arguments, "--json")
        assert code == 0, printed
        assert_unseen(printed, "run")
        for more in (
            ("plan", "app.py", "--json"),
            ("audit", "clicks", "--json"),
            ("ledger", "clicks", "--json"),
            ("view", "list"),
        ):
            assert_unseen(command(*more)[1], more)
    (path, header) = asked[0]
    assert SECRETS["QUERY_TOKEN"] in path
    assert header == f"Bearer {SECRETS['API_TOKEN']}"
    with ms.connect(tmp_path / "data") as log, log.producer() as producer:
        producer.send("clicks", b'{"user": "u2"}').result()
    assert_unseen(command(*arguments)[1], "run without service")
    with sqlite3.connect(tmp_path / "data/apps/clicks/views.db") as store:
        assert_unseen("\n".join(store.iterdump()), "the state store")
    assert_in_no_file(tmp_path, {secret})


@pytest.mark.parametrize(
    "arguments",
    [
        ("capture", f"postgresql://u:${{env:DB_PASSWORD}}@{NOWHERE}/d", "--check"),
        ("capture", f"mariadb://u:${{env:DB_PASSWORD}}@{NOWHERE}/d", "--check"),
        (
            "view",
            "list",
            "--store",
            f"postgresql://u:${{env:DB_PASSWORD}}@{NOWHERE}/d?connect_timeout=2",
        ),
        (
            "topic",
            "list",
            "--log",
            f"kafka://{NOWHERE}?timeout=1s&sasl.password=${{env:DB_PASSWORD}}",
        ),
        ("source", f"redis://u:${{env:DB_PASSWORD}}@{NOWHERE}/x", "--topic", "s"),
        ("view", "list", "--store", "${env:DB_PASSWORD}"),
        ("capture", "${env:DB_PASSWORD}", "--check"),
        ("source", "${env:DB_PASSWORD}", "--topic", "s"),
    ],
)
def test_a_command_that_cannot_reach_what_it_names_shows_no_password(command, arguments):
    code, printed = command(*arguments)
    assert code in (1, 2)
    assert "millstream: " in printed, "it has failed at what it names"
    assert "Traceback" not in printed
    assert_unseen(printed, arguments)
    assert "Warning" not in printed, "a reference is no password"


def test_a_password_on_the_command_line_is_warned_of_and_not_repeated(command):
    url = f"postgresql://u:{SECRETS['DB_PASSWORD']}@{NOWHERE}/d"
    _, printed = command("capture", url, "--check")
    assert "Warning: argument 2 has a password" in printed
    assert_unseen(printed, "capture")


def test_every_file_is_one_that_the_search_reads(tmp_path):
    """The search finds what is there: a file with a secret fails it."""
    for number in range(12):
        Path(tmp_path / f"{number}").write_text("nothing")
    assert_in_no_file(tmp_path, set())
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep/one").write_bytes(b"\0" + SECRETS["DB_PASSWORD"].encode())
    with pytest.raises(AssertionError, match="deep/one"):
        assert_in_no_file(tmp_path, set())
