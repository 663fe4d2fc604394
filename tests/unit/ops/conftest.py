"""The command line in this process, for what commands say of an edited app."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from millstream.cli.main import run


class Answer(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def call(capsysbinary):
    """Return a function that runs one command line."""

    def run_one(*arguments: str) -> Answer:
        code = run(arguments)
        out, err = capsysbinary.readouterr()
        return Answer(code, out.decode(), err.decode())

    return run_one
