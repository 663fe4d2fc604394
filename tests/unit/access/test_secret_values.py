"""Secrets that are named: their values, where they stand in URLs, and that no error has one."""

from __future__ import annotations

import logging
from urllib.parse import unquote, urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.access import secret_values
from millstream.access.secret_values import (
    has_reference,
    has_written_secret,
    resolved,
    resolved_url,
)
from millstream.client.address import kafka_address
from millstream.errors import ConfigError
from millstream.lookups.http_lookup import checked_headers
from millstream.views.address import parse_store, postgres_address, split_store_url

SECRET = "p@ss/w:rd?#[100%] ${env:OTHER}"
AS_URL = "p%40ss%2Fw%3Ard%3F%23%5B100%25%5D%20%24%7Benv%3AOTHER%7D"


@pytest.fixture
def secret(tmp_path, monkeypatch):
    """Return references to the same secret: in the environment, and in a file."""
    path = tmp_path / "se cret"
    path.write_text(f"{SECRET}\n")
    path.chmod(0o600)
    monkeypatch.setenv("DB_PASSWORD", SECRET)
    return "${env:DB_PASSWORD}", f"${{file:{path}}}"


def test_a_value_stands_in_the_place_of_its_name_and_is_not_searched_again(secret):
    for one in secret:
        assert resolved(f"Bearer {one}", "a header") == f"Bearer {SECRET}"
        assert resolved_url(f"postgresql://u:{one}@h/d", "x") == f"postgresql://u:{AS_URL}@h/d"
        assert resolved_url(one, "x") == SECRET, "the whole is as it is"
    assert resolved("".join(secret), "x") == SECRET * 2


def test_text_without_a_reference_stays(monkeypatch):
    monkeypatch.delenv("HOME")
    for text in ("", "$HOME ${HOME} ${} $(x) ${Env:X} $${", "postgresql://u:p${x@h/d"):
        assert resolved(text, "x") == text
        assert resolved_url(text, "x") == text
        assert not has_reference(text)


@given(st.text(min_size=1).filter(lambda text: "\0" not in text and text.isprintable()))
def test_any_password_comes_out_of_a_url_as_it_went_in(password):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DB_PASSWORD", password)
        url = resolved_url("postgresql://u:${env:DB_PASSWORD}@h:5432/d", "x")
    parts = urlsplit(url)
    assert (unquote(parts.password), parts.hostname, parts.port) == (password, "h", 5432)


def test_addresses_of_databases_and_brokers_have_them(secret):
    for one in secret:
        address = postgres_address(f"postgresql://u:{one}@h/d")
        assert address.url == f"postgresql://u:{AS_URL}@h/d"
        assert (address.shown, address.redacted(f"no {SECRET}!")) == ("postgresql://h/d", "no ***!")
        stored, schema, _ = split_store_url(f"postgresql://u:{one}@h/d?schema=s")
        assert (stored.url, schema) == (f"postgresql://u:{AS_URL}@h/d", "s")
        assert parse_store(f"postgresql://u:{one}@h/d", what="x") == address.url
        settings = dict(kafka_address(f"kafka://b:9092?sasl.password={one}").settings)
        assert settings["sasl.password"] == SECRET


@pytest.mark.parametrize(
    ("reference", "says"),
    [
        ("${env:NO_SUCH}", "needs the variable NO_SUCH, which is not set. Set it."),
        ("${env:EMPTY}", "needs the variable EMPTY, which is empty"),
        ("${env:}", "names no variable"),
        ("${env:A B}", "names no variable"),
        ("${enw:X}", "Give ${env:NAME} or ${file:/path}"),
        ("${file:relative}", "Give an absolute path"),
        ("${file:/no/such/file}", "cannot be read (No such file or directory)"),
        ("${file:/}", "cannot be read (Is a directory)"),
    ],
)
def test_a_reference_that_leads_nowhere_says_so(monkeypatch, reference, says):
    monkeypatch.setenv("EMPTY", "")
    for read in (resolved, resolved_url):
        with pytest.raises(ConfigError) as refused:
            read(f"x{reference}", "The header")
        assert says in str(refused.value)
        assert str(refused.value).startswith("The header")


@pytest.mark.parametrize(
    "content", [b"", b"\n", b"hunter2\nmore", b"hunter2\0", b"hunter2\xff", b"h" * 70_000]
)
def test_a_file_that_is_no_secret_is_refused_and_not_shown(tmp_path, content):
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as refused:
        resolved(f"${{file:{path}}}", "The header")
    assert "hunter2" not in str(refused.value)
    assert refused.value.__cause__ is None


def test_a_file_that_all_may_read_is_warned_of_once(tmp_path, caplog):
    path = tmp_path / "file"
    path.write_text("hunter2")
    path.chmod(0o644)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert resolved(f"${{file:{path}}}", "x") == "hunter2"
    assert caplog.text.count(f"chmod 600 {path}") == 1
    assert "hunter2" not in caplog.text
    secret_values._warned.discard(path)


def test_what_a_whole_address_became_is_not_shown_where_it_is_none(monkeypatch):
    monkeypatch.setenv("DB", "hunter2 is no URL")
    for call in (
        postgres_address,
        split_store_url,
        lambda url: parse_store(url, what="The store"),
    ):
        with pytest.raises(ConfigError) as refused:
            call("${env:DB}")
        assert "hunter2" not in str(refused.value)


def test_headers_have_them_and_a_bad_value_is_not_shown(monkeypatch):
    monkeypatch.setenv("API", "hunter2\nX-Other: y")
    with pytest.raises(ConfigError) as refused:
        checked_headers({"Authorization": "Bearer ${env:API}"})
    assert "hunter2" not in str(refused.value)
    monkeypatch.setenv("API", "hunter2")
    assert checked_headers({"Authorization": "Bearer ${env:API}"}) == {
        "Authorization": "Bearer hunter2"
    }


@pytest.mark.parametrize(
    ("argument", "written"),
    [
        ("postgresql://u:hunter2@h/d", True),
        ("kafka://h:9092?sasl.username=u&sasl.password=x", True),
        ("--store=postgresql://h/d?password=x", True),
        ("mongodb+srv://u:x@h/d", True),
        ("postgresql://u:${env:PW}@h/d", False),
        ("kafka://h?sasl.password=${file:/run/x}", False),
        ("postgresql://u@h:5432/d", False),
        ("http://127.0.0.1:8400/views", False),
        ("127.0.0.1:9000", False),
        ("select 'a:b@c'", False),
    ],
)
def test_a_password_on_a_command_line_is_noticed(argument, written):
    assert has_written_secret(argument) is written
