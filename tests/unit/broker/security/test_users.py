"""The file of users: what is in it, who can read it, and what changes to it leave."""

from __future__ import annotations

import re
import threading

import pytest

from millstream.broker.security import users
from millstream.broker.security.users import NOBODY, PASSWORD_BYTES_MAX, UsersFile, Verifier
from millstream.errors import ConfigError


@pytest.fixture
def file(tmp_path, monkeypatch) -> UsersFile:
    """A file of users whose hashes are quick."""
    monkeypatch.setattr(users, "_COST", 2)
    return UsersFile(tmp_path / "users.txt")


def test_a_password_is_known_again_and_no_other(file) -> None:
    file.put("alice", "secret")
    (verifier,) = file.read().values()
    assert verifier.matches("secret")
    for other in ("Secret", "secret ", "", "s"):
        assert not verifier.matches(other)


def test_a_hash_costs_what_it_is_meant_to() -> None:
    assert (NOBODY.cost, NOBODY.block, NOBODY.parallel) == (32768, 8, 1)
    fresh = Verifier.of("secret", random=lambda size: b"s" * size)
    assert (fresh.cost, fresh.block, len(fresh.salt), len(fresh.key)) == (32768, 8, 16, 32)
    assert fresh.matches("secret")


def test_the_file_holds_neither_a_password_nor_the_same_hash_twice(file) -> None:
    file.put("alice", "secret-word")
    file.put("bob", "secret-word")
    text = file.path.read_text()
    assert "secret-word" not in text
    assert re.fullmatch(r"(\w+:scrypt:2:8:1:[0-9a-f]{32}:[0-9a-f]{64}\n){2}", text)
    one, two = file.read().values()
    assert one.salt != two.salt
    assert one.key != two.key
    assert one.key.hex() not in repr(one)


def test_only_its_owner_reads_it_unless_it_was_opened_to_others(file) -> None:
    file.put("alice", "secret")
    assert file.path.stat().st_mode & 0o777 == 0o600
    file.path.chmod(0o640)
    file.put("bob", "secret")
    assert file.path.stat().st_mode & 0o777 == 0o640
    assert list(file.path.parent.iterdir()) == [file.path]


def test_a_user_is_replaced_only_when_that_is_said(file) -> None:
    file.put("alice", "one")
    with pytest.raises(ConfigError, match="--replace"):
        file.put("alice", "two")
    assert file.read()["alice"].matches("one")
    file.put("alice", "two", replace=True)
    assert file.read()["alice"].matches("two")


def test_a_user_is_removed_and_one_that_is_not_there_is_named(file) -> None:
    file.put("alice", "one")
    with pytest.raises(ConfigError, match=r"no user 'bob'; there are: alice"):
        file.remove("bob")
    file.remove("alice")
    assert file.read() == {}


@pytest.mark.parametrize("name", ["", "a b", "a:b", "a\n", "\u00e4", "a" * 129])
def test_a_name_that_is_none_is_refused(file, name) -> None:
    with pytest.raises(ConfigError, match="name of a user"):
        file.put(name, "secret")
    assert not file.path.exists()


@pytest.mark.parametrize("password", ["", "a\0b", "a" * (PASSWORD_BYTES_MAX + 1)])
def test_a_password_that_is_none_is_refused_and_not_shown(file, password) -> None:
    with pytest.raises(ConfigError, match="password has 1 to") as caught:
        file.put("alice", password)
    assert "aaa" not in str(caught.value)


@pytest.mark.parametrize(
    "line",
    [
        "alice",
        "alice:secret-word",
        "alice:scrypt:2:8:1:00",
        f"alice:scrypt:3:8:1:{'00' * 16}:{'00' * 32}",  # no power of two
        f"alice:scrypt:1:8:1:{'00' * 16}:{'00' * 32}",
        f"alice:scrypt:{1 << 30}:8:1:{'00' * 16}:{'00' * 32}",  # would take all memory
        f"alice:scrypt:2:8:0:{'00' * 16}:{'00' * 32}",
        f"alice:scrypt:2:8:1:{'00' * 16}0:{'00' * 32}",
        f"a b:scrypt:2:8:1:{'00' * 16}:{'00' * 32}",
        f"bob:scrypt:2:8:1:{'00' * 16}:{'00' * 32}",  # is there already
    ],
)
def test_a_line_that_is_none_is_told_by_its_number(file, line) -> None:
    file.put("bob", "secret")
    with file.path.open("a") as more:
        more.write(f"\n# why\n{line}\n")
    with pytest.raises(ConfigError, match=r"Line 4 ") as caught:
        file.read()
    assert "secret-word" not in str(caught.value)


def test_it_is_read_again_when_it_has_changed(file) -> None:
    other = UsersFile(file.path)
    file.put("alice", "secret")
    assert set(other.read()) == {"alice"}
    assert other.read() is other.read()
    file.put("bob", "secret")
    assert set(other.last_read()) == {"alice"}
    assert set(other.read()) == set(other.last_read()) == {"alice", "bob"}


def test_a_file_or_folder_that_is_not_there_is_named(file, tmp_path) -> None:
    with pytest.raises(ConfigError, match="millstream user add"):
        file.read()
    with pytest.raises(ConfigError, match="folder"):
        UsersFile(tmp_path / "none" / "users.txt").put("alice", "secret")
    file.path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="cannot be read"):
        file.read()


def test_changes_at_the_same_time_are_all_there(file) -> None:
    def add(number: int) -> None:
        UsersFile(file.path).put(f"user{number}", "secret")

    threads = [threading.Thread(target=add, args=[number]) for number in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(file.read()) == {f"user{number}" for number in range(20)}


def test_what_a_crash_left_is_replaced(file) -> None:
    file.path.with_name("users.txt.new").write_text("half a li")
    file.put("alice", "secret")
    assert set(file.read()) == {"alice"}
    assert list(file.path.parent.iterdir()) == [file.path]
