"""Files of tokens: what is in them, who is found by a token, and when a change of the file counts."""

from __future__ import annotations

import logging
import stat
import string
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.access.tokens import (
    Principal,
    ScramKeys,
    TokenFile,
    Tokens,
    digest_of,
    read_token,
    tokens_of,
)
from millstream.errors import ConfigError
from millstream.sql_queries.server.scram import ScramVerifier, prepared

PLAIN = "0123456789abcdef"


@pytest.fixture
def path(tmp_path):
    return tmp_path / "tokens"


def test_a_token_is_found_with_its_role_and_stands_in_no_file(path):
    read, operate = TokenFile(path).add("grafana", "read"), TokenFile(path).add("alice", "operate")
    tokens = TokenFile.opened(path)
    assert tokens.find(read.encode()).principal == Principal("grafana", "read")
    assert tokens.find(operate.encode()).principal == Principal("alice", "operate")
    for unknown in (read[:-1], read + "x", "", read.swapcase(), operate + read):
        assert tokens.find(unknown.encode()) is None
    text = path.read_text()
    assert read not in text
    assert operate not in text
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert read not in repr(tokens.current())


@pytest.mark.parametrize(("role", "may"), [("read", {"read"}), ("operate", {"read", "operate"})])
def test_a_role_allows_itself_and_operate_allows_everything(role, may):
    assert {wanted for wanted in ("read", "operate") if Principal("x", role).may(wanted)} == may


def test_a_server_takes_tokens_that_are_added_and_refuses_those_that_are_removed(path):
    first = TokenFile(path).add("first", "read")
    tokens = TokenFile.opened(path)
    second = TokenFile(path).add("second", "operate")
    assert tokens.find(second.encode()).principal.name == "second"
    TokenFile(path).remove("first")
    assert tokens.find(first.encode()) is None
    TokenFile(path).remove("second")
    assert tokens.find(second.encode()) is None, "a file without tokens refuses everybody"


def test_a_file_that_was_spoilt_leaves_the_tokens_and_says_so_once_without_the_line(path, caplog):
    token = TokenFile(path).add("alice", "operate")
    tokens = TokenFile.opened(path)
    path.write_text(path.read_text() + f"bob:operate:{PLAIN}\n")
    with caplog.at_level(logging.WARNING):
        assert tokens.find(token.encode()).principal.name == "alice"
        assert tokens.find(token.encode()).principal.name == "alice"
    assert caplog.text.count("Line 2 of the file of tokens") == 1
    assert PLAIN not in caplog.text


def test_a_file_may_have_one_token_itself_which_may_do_everything(path):
    path.write_text(f"{PLAIN}\n")
    assert tokens_of(None, path).find(PLAIN.encode()).principal == Principal("token", "operate")
    assert Tokens.of(PLAIN).find(PLAIN.encode()).principal == Principal("token", "operate")
    with pytest.raises(ConfigError, match="Choose another file"):
        TokenFile(path).add("alice", "read")
    assert path.read_text() == f"{PLAIN}\n"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "There is no file of tokens"),
        ("", "has no token"),
        ("# nobody\n", "has no token"),
        ("short", "has 5 characters"),
        ("two words of no token", "without spaces"),
        ("ä" * 20, "is not ASCII"),
        (f"{PLAIN}\n{PLAIN}\n", "Line 1"),
        ("alice:admin:sha256:" + "0" * 64, "Line 1"),
    ],
)
def test_what_is_no_file_of_tokens_is_refused_without_being_shown(path, content, says):
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=says) as refused:
        TokenFile.opened(path)
    assert content is None or len(content) < 8 or content.strip() not in str(refused.value)


@pytest.mark.parametrize("name", ["", "a b", "a:b", "a\nb", "ä", "x" * 129])
def test_names_that_cannot_be_in_a_line_are_refused(path, name):
    with pytest.raises(ConfigError, match="cannot be the name of a token"):
        TokenFile(path).add(name, "read")
    assert not path.exists()


def test_a_name_is_given_once_and_only_what_is_there_is_removed(path):
    TokenFile(path).add("alice", "read")
    with pytest.raises(ConfigError, match="has a token 'alice'"):
        TokenFile(path).add("alice", "operate")
    with pytest.raises(ConfigError, match="there are: alice"):
        TokenFile(path).remove("bob")


def test_of_many_at_a_time_none_is_lost(path):
    with ThreadPoolExecutor(8) as threads:
        made = list(threads.map(lambda n: TokenFile(path).add(f"n{n}", "read"), range(24)))
    tokens = TokenFile.opened(path)
    assert [tokens.find(one.encode()).principal.name for one in made] == [
        f"n{number}" for number in range(24)
    ]


def test_requests_see_old_or_new_tokens_while_the_file_is_changed(path):
    """A reader at any moment of another's changes finds the token that stays."""
    kept = TokenFile(path).add("kept", "read")
    tokens = TokenFile.opened(path)
    end = threading.Event()
    missed = []

    def look():
        while not end.is_set():
            if tokens.find(kept.encode()) is None:
                missed.append(1)

    with ThreadPoolExecutor(2) as threads:
        threads.submit(look)
        threads.submit(look)
        for number in range(30):
            TokenFile(path).add(f"n{number}", "read")
        end.set()
    assert not missed


def test_a_file_that_all_may_read_is_warned_of(path, caplog):
    TokenFile(path).add("alice", "read")
    path.chmod(0o644)
    with caplog.at_level(logging.WARNING):
        TokenFile.opened(path)
    assert f"chmod 600 {path}" in caplog.text
    caplog.clear()
    path.chmod(0o640)
    with caplog.at_level(logging.WARNING):
        TokenFile.opened(path)
    assert not caplog.text


def test_a_change_keeps_the_rights_of_the_file(path):
    TokenFile(path).add("alice", "read")
    path.chmod(0o640)
    TokenFile(path).add("bob", "read")
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert list(path.parent.iterdir()) == [path]


def test_a_client_is_told_that_a_file_has_only_hashes(path):
    TokenFile(path).add("alice", "read")
    with pytest.raises(ConfigError, match="has the hashes of a server's tokens"):
        read_token(path)


def test_a_token_and_a_file_contradict(path):
    with pytest.raises(ConfigError, match="Give one of them"):
        tokens_of(PLAIN, path)
    assert tokens_of(None, None) is None


@given(
    st.text(string.ascii_letters + string.digits + "-_", min_size=1, max_size=60),
    st.binary(min_size=16, max_size=16),
)
def test_the_keys_of_scram_are_those_of_a_password_of_the_same_text(token, salt):
    """By RFC 5802: SaltedPassword, ClientKey, StoredKey and ServerKey, as the SQL server makes them."""
    import hashlib
    import hmac

    assert prepared(token) == token
    salted = hashlib.pbkdf2_hmac("sha256", token.encode(), salt, ScramVerifier.of("x").iterations)
    keys = ScramKeys.of(token, salt)
    client = hmac.new(salted, b"Client Key", hashlib.sha256).digest()
    assert keys.stored_key == hashlib.sha256(client).digest()
    assert keys.server_key == hmac.new(salted, b"Server Key", hashlib.sha256).digest()
    assert digest_of(token.encode()) == hashlib.sha256(token.encode()).digest()
