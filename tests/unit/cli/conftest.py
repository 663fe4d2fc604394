"""What the tests of the log's commands share: a folder, and the command line in this process."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from millstream.cli.main import run


class Answer(NamedTuple):
    code: int
    out: str
    err: str


Call = Callable[..., Answer]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MILLSTREAM_LOG", str(tmp_path / "data"))
    return tmp_path / "data"


@pytest.fixture
def call(folder, capsysbinary, monkeypatch) -> Call:
    """Return a function that runs one command line on the folder."""

    def run_one(*arguments: str, stdin: bytes = b"") -> Answer:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        code = run(arguments)
        out, err = capsysbinary.readouterr()
        return Answer(code, out.decode(), err.decode())

    return run_one


@pytest.fixture
def done(call) -> Callable[..., str]:
    """Return a function that runs one command line, which must succeed, and returns what it says."""

    def run_one(*arguments: str, stdin: bytes = b"") -> str:
        answer = call(*arguments, stdin=stdin)
        assert answer.code == 0, answer
        return answer.out

    return run_one
