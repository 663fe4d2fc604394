from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from millstream.cli.consume import consume
from millstream.cli.produce import produce
from millstream.cli.topic import topic
from millstream.errors import ConfigError, UnknownTopicError

COMMANDS = {"topic": topic, "produce": produce, "consume": consume}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "data"


def call(folder: Path, name: str, *arguments: str, stdin: bytes = b"") -> Result:
    runner = CliRunner(env={"MILLSTREAM_LOG": str(folder)})
    return runner.invoke(COMMANDS[name], arguments, input=stdin)


def done(folder: Path, name: str, *arguments: str, stdin: bytes = b"") -> str:
    result = call(folder, name, *arguments, stdin=stdin)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_topics_are_created_listed_described_and_deleted(folder: Path) -> None:
    assert "no topics" in done(folder, "topic", "list")
    assert "4 partitions" in done(folder, "topic", "create", "clicks", "--partitions", "4")
    done(folder, "produce", "clicks", "--raw", stdin=b"a\nb\n")
    assert json.loads(done(folder, "topic", "list", "--json")) == [
        {"topic": "clicks", "partitions": 4, "records": 2}
    ]
    described = json.loads(done(folder, "topic", "describe", "clicks", "--json"))
    assert sum(row["records"] for row in described) == 2
    assert "clicks" in done(folder, "topic", "list")
    assert call(folder, "topic", "delete", "clicks", stdin=b"n\n").exit_code == 1
    assert "2 records" in done(folder, "topic", "delete", "clicks", "--yes")
    assert json.loads(done(folder, "topic", "list", "--json")) == []


def test_lines_go_in_and_come_out_with_keys_and_positions(folder: Path) -> None:
    done(folder, "topic", "create", "clicks")
    lines = b'{"user": "u1", "n": 1}\n\n{"user": "u2", "n": 2}\r\n'
    assert "2 records" in done(folder, "produce", "clicks", "--key-field", "user", stdin=lines)
    assert "1 record " in done(folder, "produce", "clicks", "--key", "k", "--raw", stdin=b"plain")
    assert done(folder, "consume", "clicks").splitlines() == [
        '{"user": "u1", "n": 1}',
        '{"user": "u2", "n": 2}',
        "plain",
    ]
    found = [json.loads(line) for line in done(folder, "consume", "clicks", "--json").splitlines()]
    assert [(row["offset"], row["key"]) for row in found] == [(0, "u1"), (1, "u2"), (2, "k")]
    assert found[0]["value"] == {"user": "u1", "n": 1}
    assert found[2]["value"] == "plain"
    assert done(folder, "consume", "clicks", "--from", "1", "--count", "1") == (
        '{"user": "u2", "n": 2}\n'
    )
    assert done(folder, "consume", "clicks", "--from", "latest") == ""
    assert len(done(folder, "consume", "clicks", "--from", "2000-01-01").splitlines()) == 3
    assert done(folder, "consume", "clicks", "--from", "2999-01-01T00:00") == ""
    assert len(done(folder, "consume", "clicks", "--follow", "--count", "3").splitlines()) == 3


def test_bytes_that_are_not_text_are_shown_in_base64(folder: Path) -> None:
    done(folder, "topic", "create", "t")
    done(folder, "produce", "t", "--raw", stdin=b"\xff\xfe\n")
    assert json.loads(done(folder, "consume", "t", "--json"))["value_base64"] == "//4="


@pytest.mark.parametrize(
    ("arguments", "stdin", "words"),
    [
        (["produce", "nope"], b"1\n", "no topic 'nope'"),
        (["produce", "t"], b"1\nnot json\n", "line 2 is not JSON"),
        (["produce", "t", "--key-field", "id"], b'{"id": null}\n', "'id'"),
        (["consume", "nope"], b"", "no topic 'nope'"),
        (["consume", "t", "--from", "soon"], b"", "--from is 'soon'"),
        (["consume", "t", "--partition", "3"], b"", "no partition 3"),
        (["topic", "describe", "nope"], b"", "no topic 'nope'"),
        (["topic", "create", "t"], b"", "topic 't' already"),
    ],
)
def test_misuse_raises_an_error_that_names_it(
    folder: Path, arguments: list[str], stdin: bytes, words: str
) -> None:
    done(folder, "topic", "create", "t")
    result = call(folder, arguments[0], *arguments[1:], stdin=stdin)
    assert isinstance(result.exception, ConfigError)
    assert words in str(result.exception)


@pytest.mark.parametrize(
    "options", [["--key", "a", "--key-field", "b"], ["--raw", "--key-field", "b"]]
)
def test_options_that_exclude_each_other_are_a_usage_error(
    folder: Path, options: list[str]
) -> None:
    assert call(folder, "produce", "t", *options).exit_code == 2


def test_producing_to_a_folder_that_is_no_log_leaves_it_alone(folder: Path) -> None:
    assert isinstance(call(folder, "produce", "t", stdin=b"1\n").exception, UnknownTopicError)
    assert not folder.exists()


@pytest.mark.parametrize("name", COMMANDS)
def test_help_has_an_example(folder: Path, name: str) -> None:
    assert f"millstream {name}" in done(folder, name, "--help")
