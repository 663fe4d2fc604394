"""The audit log: what is in it after changes that end, fail, or are cut off by a crash."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from millstream.access.audit_log import CLIENT, ON_BEHALF_OF, Actor, AuditLog
from millstream.access.tokens import Principal
from millstream.errors import ConfigError, ConflictError, MillstreamError

WHO = Actor(user="alice", host="here")


def test_a_change_is_recorded_with_who_what_and_how_it_ended(tmp_path):
    log = AuditLog(tmp_path, "ads")
    with log.recorded(WHO, "deploy", {"file": "app.py"}) as found:
        (begun,) = log.read()
        assert (begun.outcome, begun.details) == ("begun", {"file": "app.py"})
        found["switched"] = True
    with (
        pytest.raises(ConflictError),
        log.recorded(Actor(token="bob", client="10.0.0.1"), "dead replay"),
    ):
        raise ConflictError("another is at work")
    deployed, replayed = log.read()
    assert (deployed.who, deployed.what, deployed.outcome) == (WHO, "deploy", "done")
    assert deployed.details == {"file": "app.py", "switched": True}
    assert deployed.at == begun.at
    assert (replayed.outcome, replayed.reason) == ("failed", "another is at work")
    assert str(replayed.who) == "token bob, from 10.0.0.1"


def test_the_text_of_an_error_that_is_not_ours_is_not_recorded(tmp_path):
    log = AuditLog(tmp_path, "ads")
    with pytest.raises(RuntimeError), log.recorded(WHO, "deploy"):
        raise RuntimeError("postgresql://u:hunter2@h/d")
    assert log.read()[0].reason == "RuntimeError"
    assert "hunter2" not in log.path.read_text()


def test_it_is_only_appended_to_and_many_may_at_a_time(tmp_path):
    def change(number):
        with AuditLog(tmp_path, "ads").recorded(WHO, f"change {number}"):
            pass

    change(0)
    before = AuditLog(tmp_path, "ads").path.read_bytes()
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(change, range(1, 40)))
    after = AuditLog(tmp_path, "ads").path.read_bytes()
    assert after.startswith(before)
    found = AuditLog(tmp_path, "ads").read()
    assert sorted(one.what for one in found) == sorted(f"change {n}" for n in range(40))
    assert {one.outcome for one in found} == {"done"}


def test_a_line_that_a_crash_cut_off_costs_no_other(tmp_path):
    log = AuditLog(tmp_path, "ads")
    with log.recorded(WHO, "one"):
        pass
    whole = log.path.read_bytes()
    log.path.write_bytes(whole + whole[: len(whole) // 4])
    with log.recorded(WHO, "two"):
        pass
    assert [(one.what, one.outcome) for one in log.read()] == [
        ("one", "done"),
        ("line 3", None),
        ("two", "done"),
    ]


def test_a_process_that_is_killed_leaves_what_it_had_begun(tmp_path):
    program = (
        "import os, sys\nfrom pathlib import Path\n"
        "from millstream.access.audit_log import Actor, AuditLog\n"
        "with AuditLog(Path(sys.argv[1]), 'ads').recorded(Actor.of_process(), 'deploy'):\n"
        "    os._exit(9)\n"
    )
    given = {**os.environ, ON_BEHALF_OF: "bob", CLIENT: "10.0.0.1"}
    ended = subprocess.run([sys.executable, "-c", program, str(tmp_path)], env=given, check=False)
    assert ended.returncode == 9
    (found,) = AuditLog(tmp_path, "ads").read()
    assert (found.what, found.outcome) == ("deploy", "begun")
    assert (found.who.token, found.who.client) == ("bob", "10.0.0.1")
    assert found.who.user


def test_what_cannot_be_recorded_is_not_done(tmp_path):
    log = AuditLog(tmp_path, "ads")
    (tmp_path / "audit").write_text("a file in the place of the folder")
    done = []
    with (
        pytest.raises(MillstreamError, match="nothing was begun"),
        log.recorded(WHO, "reset"),
    ):
        done.append(1)
    assert not done


def test_a_link_in_its_place_is_not_followed(tmp_path):
    (tmp_path / "audit").mkdir()
    (tmp_path / "audit" / "ads.jsonl").symlink_to(tmp_path / "other")
    with (
        pytest.raises(MillstreamError, match="cannot be written"),
        AuditLog(tmp_path, "ads").recorded(WHO, "reset"),
    ):
        pass
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("name", ["../ads", "", ".", "a/b", "a\nb", "x" * 201])
def test_names_that_would_lead_elsewhere_are_refused(tmp_path, name):
    with pytest.raises(ConfigError, match="is no name"):
        AuditLog(tmp_path, name)


def test_what_a_proxy_says_of_an_address_is_recorded_only_if_it_is_one(tmp_path):
    log = AuditLog(tmp_path, "ads")
    forged = Actor.of_request(Principal("bob", "operate"), '1.2.3.4\x1b[2J"\n{"who": 1}')
    assert forged.client == "unknown"
    assert Actor.of_request(Principal(None, "operate"), "::1").client == "::1"
    with log.recorded(Actor(token="bob\n"), "x\ny"):
        pass
    assert len(log.path.read_text().splitlines()) == 2
    assert all(json.loads(line) for line in log.path.read_text().splitlines())
