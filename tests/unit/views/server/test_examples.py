"""What docs/views.md shows is what curl says."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

TEXT = (Path(__file__).resolve().parents[4] / "docs" / "views.md").read_text()
SHOWN = re.findall(r"(?ms)^```sh\n(curl .+?)\n```\n\n```\w*\n(.*?)^```", TEXT)


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
@pytest.mark.parametrize(("command", "answer"), SHOWN, ids=[command for command, _ in SHOWN])
def test_the_examples_give_what_the_document_shows(ads, server, command, answer):
    ads.commit((0, 7, 1000, 12, "1.50"), (0, 8, 400, 9, "0.75"), (1, 7, 900, 11, "1.40"))
    asked = shlex.split(command.replace("http://127.0.0.1:8400", server.url))
    done = subprocess.run(asked, capture_output=True, text=True, check=False)
    assert done.stdout == answer


def test_there_are_examples():
    assert len(SHOWN) == 4
