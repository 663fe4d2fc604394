"""What docs/demo.md shows of a run on the week, and of two versions side by side, is what comes."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "demo.md").read_text()


@pytest.mark.timeout(1800)
def test_a_run_ends_as_shown_and_two_versions_can_be_asked(no_spark, tmp_path):
    def run(command):
        words = shlex.split(command)
        if words[0] == "millstream":
            words[:1] = ["python", "-m", "millstream"]
        else:
            words[1] = str(ROOT / words[1])
        done = subprocess.run(
            [sys.executable, *words[1:]],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "COLUMNS": "120"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    (shown,) = re.findall(r"(?ms)^```\n(Comparing .+?)^```", TEXT)
    assert shown in run("millstream demo ads --page none --speed 360000")
    beside = TEXT[TEXT.index("## Two versions") :]
    (commands,) = re.findall(r"(?ms)^```sh\n(.*?)^```", beside)
    first, *asked = commands.splitlines()
    assert "second_version.py" in first
    run(first)
    answers = [run(command) for command in asked]
    assert len(answers) == 2
    headings = {"ad", "shown", "clicked", "cost", "rate"}
    assert all(headings <= set(answer.split()) for answer in answers)
    assert answers[0] != answers[1]  # they smooth differently
