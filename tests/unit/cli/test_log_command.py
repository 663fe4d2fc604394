from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from millstream.cli.log import log
from millstream.cli.main import COMMANDS, run
from millstream.client import connect
from millstream.errors import ConfigError, FolderOwnedError
from millstream.log.writer import LogWriter


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """An opening tells of damage on standard error, in a log line of its own."""
    logging.disable(logging.ERROR)
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    with LogWriter(folder, background=False) as writer:
        writer.create_topic("clicks", partitions=2, settings={"segment.bytes": "1000"})
    with connect(folder) as opened, opened.producer() as producer:
        for number in range(40):
            producer.send("clicks", b"%d" % number, key=b"k", partition=0)
            producer.flush()
    return folder


def call(*arguments: str | Path, stdin: str = "") -> Result:
    return CliRunner(env={"COLUMNS": "200"}).invoke(
        log, [str(one) for one in arguments], input=stdin
    )


def segment(folder: Path) -> Path:
    return min(folder.glob("t/clicks.*/0/*.log"))


def damage(folder: Path) -> Path:
    path = segment(folder)
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data)
    return path


def test_a_whole_log_verifies_with_exit_code_0(folder: Path) -> None:
    result = call("verify", folder)
    assert (result.exit_code, result.stdout) == (0, f"{folder}: whole\n")
    assert json.loads(call("verify", folder, "--json").stdout) == []
    assert call("repair", folder, "--yes").stdout == f"{folder}: nothing was given up\n"


def test_damage_is_one_line_for_each_finding_and_exit_code_1(folder: Path) -> None:
    path = damage(folder)
    result = call("verify", folder)
    assert result.exit_code == 1
    line, verdict = result.stdout.splitlines()
    assert line.startswith("lost      damage: clicks/0 offsets [1, 2)")
    assert f"{path}, byte" in line
    assert "millstream log repair" in line
    assert verdict == f"{folder}: records are lost or cannot be read in 1 place"
    (found,) = json.loads(call("verify", folder, "--json").stdout)
    assert (found["kind"], found["severity"]) == ("damage", "records lost")
    assert (found["start"], found["end"], found["path"]) == (1, 2, str(path))


def test_what_is_harmless_is_told_with_exit_code_0(folder: Path) -> None:
    (segment(folder).parent / "x.new").touch()
    result = call("verify", folder)
    assert result.exit_code == 0
    assert "harmless  leftover" in result.stdout
    assert "every committed record can be read" in result.stdout


def test_a_repair_says_what_it_will_do_and_does_nothing_without_a_yes(folder: Path) -> None:
    damaged = damage(folder).read_bytes()
    result = call("repair", folder, stdin="n\n")
    assert result.exit_code == 1
    assert "lost      damage: clicks/0 offsets [1, 2)" in result.stdout
    assert "give up 1 offset for good?" in result.stdout
    assert segment(folder).read_bytes() == damaged
    result = call("repair", folder, stdin="y\n")
    assert result.exit_code == 0
    assert "clicks/0: offsets [1, 2) were given up; the file as it was: " in result.stdout
    assert call("verify", folder).exit_code == 0
    with connect(folder) as opened:
        assert opened.read("clicks", 0).num_rows == 39


def test_a_repair_in_a_script_prints_json_alone(folder: Path) -> None:
    damage(folder)
    (given_up,) = json.loads(call("repair", folder, "--yes", "--json").stdout)
    assert (given_up["topic"], given_up["start"], given_up["end"]) == ("clicks", 1, 2)
    assert Path(given_up["quarantined"]).exists()
    assert json.loads(call("repair", folder, "--yes", "--json").stdout) == []


def test_a_repair_that_gives_nothing_up_says_so(folder: Path) -> None:
    (segment(folder).parent / "x.new").touch()
    assert "No offset is given up" in call("repair", folder, stdin="n\n").stdout
    result = call("repair", folder, "--yes")
    assert result.stdout == f"{folder}: repaired; nothing was given up\n"
    assert call("verify", folder).stdout == f"{folder}: whole\n"


def test_stat_shows_what_each_partition_holds(folder: Path) -> None:
    first, second = json.loads(call("stat", folder, "--json").stdout)
    assert (first["topic"], first["partition"], first["start"], first["end"]) == (
        "clicks",
        0,
        0,
        40,
    )
    assert first["segments"] == len(list(folder.glob("t/clicks.*/0/*.log"))) > 2
    assert first["newest_ms"] >= first["oldest_ms"] > 0
    assert (second["end"], second["oldest_ms"], second["damaged"]) == (0, None, [])
    table = call("stat", folder).stdout
    assert "clicks/0" in table
    assert "open transactions" not in table
    damage(folder)
    (folder / "NEEDS_VERIFY").touch()
    LogWriter(folder, background=False).close()
    assert "[1, 2)" in call("stat", folder).stdout


def test_stat_of_a_log_without_topics_says_how_to_make_one(tmp_path: Path) -> None:
    LogWriter(tmp_path, background=False).close()
    assert "millstream topic create" in call("stat", tmp_path).stdout
    assert json.loads(call("stat", tmp_path, "--json").stdout) == []


def test_times_that_no_calendar_has_are_shown_as_they_are(tmp_path: Path) -> None:
    from millstream.log.encoding import SimpleRecord, encode_records

    with LogWriter(tmp_path, background=False) as writer:
        writer.create_topic("t")
        writer.append("t", 0, [encode_records([SimpleRecord(1 << 60, b"k", b"v")])])
    assert f"{1 << 60} ms" in call("stat", tmp_path).stdout


@pytest.mark.parametrize("command", ["verify", "repair", "stat"])
def test_a_folder_that_is_no_log_is_one_sentence(tmp_path: Path, command: str) -> None:
    result = call(command, tmp_path)
    assert isinstance(result.exception, ConfigError)
    assert "is not a log" in str(result.exception)
    assert not list(tmp_path.iterdir())


def test_the_folder_may_come_from_the_environment(folder: Path) -> None:
    result = CliRunner(env={"MILLSTREAM_LOG": str(folder)}).invoke(log, ["verify"])
    assert result.stdout == f"{folder}: whole\n"


def test_a_log_that_is_being_written_is_verified_but_not_repaired(folder: Path) -> None:
    damage(folder)
    with LogWriter(folder, background=False):
        assert call("verify", folder).exit_code == 1
        assert call("stat", folder).exit_code == 0
        assert isinstance(call("repair", folder, "--yes").exception, FolderOwnedError)


@pytest.mark.parametrize("command", [[], ["verify"], ["repair"], ["stat"]])
def test_help_has_an_example(command: list[str]) -> None:
    assert f"millstream log {' '.join(command)}" in call(*command, "--help").stdout


def test_the_command_is_there_and_an_error_is_one_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert "log" in COMMANDS
    assert run(["log", "verify", str(tmp_path)]) == 2
    assert (
        capfd.readouterr().err == f"millstream: {tmp_path} is not a log; name the folder of one\n"
    )


def test_progress_is_shown_on_a_terminal_only(folder: Path) -> None:
    program = (
        "import sys; from millstream.cli.main import run\n"
        "sys.stderr.isatty = lambda: True\n"
        f"sys.exit(run(['log', 'verify', {str(folder)!r}]))"
    )
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert shown.stdout.decode() == f"{folder}: whole\n"
    assert b"reading" in shown.stderr
    quiet = subprocess.run(
        [sys.executable, "-m", "millstream", "log", "verify", str(folder)],
        capture_output=True,
        check=True,
    )
    assert quiet.stderr == b""
