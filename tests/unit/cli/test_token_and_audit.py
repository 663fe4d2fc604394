"""``millstream token`` and ``millstream audit``: tokens are shown once, and changes are listed."""

from __future__ import annotations

import getpass
import json

import pytest

import millstream as ms
from millstream.access.audit_log import AuditLog
from millstream.access.tokens import TokenFile


@pytest.fixture
def app(folder):
    """The folder of a log with an app that has a state."""
    declared = ms.App("sums", log=folder)
    events = declared.topic("events", {"user": str, "n": int}, key="user", partitions=1)
    events.stream().view("kept", key="user")
    with ms.connect(folder) as log:
        log.create_topic("events", partitions=1)
        with log.producer() as producer:
            producer.send("events", b'{"user": "a", "n": 1}').result()
    declared.run(until="caught-up", engine="local")
    return folder


def test_a_token_is_printed_once_and_listed_without_itself(done, call, tmp_path):
    path = tmp_path / "tokens"
    made = call("token", "add", "alice", "--role", "operate", "--token-file", str(path))
    assert made.code == 0
    token = made.out.strip()
    assert token not in made.err
    assert TokenFile.opened(path).find(token.encode()).principal.role == "operate"
    as_json = json.loads(done("token", "add", "bob", "--token-file", str(path), "--json"))
    assert (as_json["name"], as_json["role"]) == ("bob", "read")
    listed = done("token", "list", "--token-file", str(path), "--json")
    assert json.loads(listed) == [
        {"name": "alice", "role": "operate"},
        {"name": "bob", "role": "read"},
    ]
    assert call("token", "remove", "bob", "--token-file", str(path), stdin=b"n\n").code == 130
    done("token", "remove", "bob", "--token-file", str(path), "--yes")
    assert "bob" not in done("token", "list", "--token-file", str(path))
    assert call("token", "remove", "bob", "--token-file", str(path), "--yes").code == 2


def test_what_commands_change_is_listed_with_who_and_outcome_and_survives_a_reset(app, done, call):
    assert done("audit", "sums").startswith("Nothing is recorded of sums")
    done("stop", "sums")
    done("rescale", "sums", "--buckets", "4")
    assert call("rescale", "sums", "--buckets", "2", "--partitions", "9").code == 2
    done("dead", "replay", "sums", "--yes")
    done("reset", "sums", "--yes")
    found = json.loads(done("audit", "sums", "--json"))
    assert [(one["what"], one["outcome"]) for one in found] == [
        ("stop", "done"),
        ("rescale", "done"),
        ("rescale", "failed"),
        ("dead replay", "done"),
        ("reset", "done"),
    ]
    assert {one["who"]["user"] for one in found} == {getpass.getuser()}
    assert found[1]["details"] == {"buckets": 4, "partitions": None}
    assert found[2]["reason"]
    shown = done("audit", "sums", "--limit", "1")
    assert "reset" in shown
    assert "stop" not in shown
    assert not (app / "apps" / "sums").exists()


def test_what_only_reads_is_not_recorded(app, done):
    done("ledger", "sums")
    done("view", "list")
    done("dead", "list", "sums")
    assert not AuditLog(app, "sums").path.exists()


def test_a_deployment_is_recorded_with_its_file(app, done, tmp_path):
    file = tmp_path / "app.py"
    file.write_text(
        "import millstream as ms, polars as pl\n"
        f"app = ms.App('sums', log={str(app)!r})\n"
        "events = app.topic('events', {'user': str, 'n': int}, key='user', partitions=1)\n"
        "events.stream().filter(pl.col('n') > 0).view('kept', key='user')\n"
    )
    done("deploy", str(file))
    (entry,) = AuditLog(app, "sums").read()
    assert (entry.what, entry.outcome) == ("deploy", "done")
    assert entry.details == {"file": str(file), "switched": True}


def test_a_name_that_leads_out_of_the_folder_is_refused(call, app):
    assert call("audit", "../sums").code == 2
