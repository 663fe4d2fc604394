"""Every command line of ours that a document shows is one that the command understands."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest

from millstream.cli.main import millstream

ROOT = Path(__file__).resolve().parents[3]
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


def command_lines():
    for path in DOCUMENTS:
        for kind, block in re.findall(r"(?ms)^```(\w*)\n(.*?)^```", path.read_text()):
            for line in block.splitlines() if kind in ("", "sh") else ():
                yield path.relative_to(ROOT).as_posix(), line.partition(" # ")[0].strip()


OURS = sorted(
    {each for each in command_lines() if re.match(r"(docker compose run |millstream )", each[1])}
)
PROGRAMS = sorted({each for each in command_lines() if each[1].startswith("python ")})


def words_of(line):
    """Split a line as a shell would; what a container is given follows its service."""
    words = shlex.split(line.partition(" < ")[0].partition(" | ")[0])
    if words[:3] == ["docker", "compose", "run"]:
        return words[words.index("page") + 1 :]
    return words[1:] if words[0] == "millstream" else []


@pytest.mark.parametrize(("document", "line"), OURS, ids=lambda value: value)
def test_a_documented_command_is_understood(document, line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "app.py").write_text("")
    command, words = millstream, words_of(line)
    context = click.Context(millstream)
    while words and isinstance(command, click.Group) and not words[0].startswith("-"):
        command = command.get_command(context, words.pop(0))
        assert command is not None, f"{document}: {line}"
    try:
        command.make_context(command.name, words)  # a wrong option or argument is a UsageError
    except click.exceptions.Exit as ended:  # by --help
        assert ended.exit_code == 0


@pytest.mark.parametrize(("document", "line"), PROGRAMS, ids=lambda value: value)
def test_a_documented_program_is_there(document, line):
    program = line.split()[1]
    # app.py is what the reader has saved, or another file of the page; and -m names a module of Python
    saved = f"# {program}\n" in (ROOT / document).read_text()
    assert saved or program in ("app.py", "-m") or (ROOT / program).is_file(), document


def test_there_are_documented_commands():
    assert {document for document, _ in OURS} >= {"README.md", "docs/demo.md", "docs/cluster.md"}
