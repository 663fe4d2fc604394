"""`millstream user`: the file of a broker's users, from the shell."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner, Result

from millstream.broker.security import users
from millstream.broker.security.users import UsersFile
from millstream.cli.main import millstream


@pytest.fixture
def path(tmp_path, monkeypatch):
    monkeypatch.setattr(users, "_COST", 2)
    return tmp_path / "users.txt"


def run(*words: object, given: str = "") -> Result:
    return CliRunner().invoke(millstream, ["user", *map(str, words)], input=given)


def test_a_user_is_added_listed_and_removed(path) -> None:
    done = run("add", "alice", "--users", path, "--stdin", given="secret\n")
    assert done.stdout == f"added user alice to {path}\n"
    assert UsersFile(path).read()["alice"].matches("secret")
    run("add", "bob", "--users", path, "--stdin", given="secret")
    assert run("list", "--users", path).stdout == "alice\nbob\n"
    listed = json.loads(run("list", "--users", path, "--json").stdout)
    assert listed == [{"user": "alice"}, {"user": "bob"}]
    assert run("remove", "bob", "--users", path, "--yes").exit_code == 0
    assert run("list", "--users", path).stdout == "alice\n"


def test_a_password_is_asked_for_twice_and_not_shown(path) -> None:
    done = run("add", "alice", "--users", path, given="secret\nsecret\n")
    assert done.exit_code == 0
    assert "secret" not in done.output
    assert UsersFile(path).read()["alice"].matches("secret")
    done = run("add", "bob", "--users", path, given="one\nother\n")
    assert done.exit_code != 0
    assert set(UsersFile(path).read()) == {"alice"}


def test_a_password_ends_with_its_line_and_nothing_else(path) -> None:
    run("add", "alice", "--users", path, "--stdin", given=" two words \r\nmore\n")
    assert UsersFile(path).read()["alice"].matches(" two words ")


def test_an_empty_password_is_refused(path) -> None:
    done = run("add", "alice", "--users", path, "--stdin", given="")
    assert "1 to" in str(done.exception)
    assert not path.exists()


def test_removing_asks_first(path) -> None:
    run("add", "alice", "--users", path, "--stdin", given="secret\n")
    assert run("remove", "alice", "--users", path, given="n\n").exit_code != 0
    assert set(UsersFile(path).read()) == {"alice"}
    assert run("remove", "alice", "--users", path, given="y\n").exit_code == 0
    assert UsersFile(path).read() == {}
