"""The demo as a user meets it: a command, killed at a bad moment, started again, and right."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[2] / "src"


@pytest.mark.timeout(600)
def test_a_demo_killed_on_the_way_goes_on_to_the_same_answer(tmp_path):
    folder = tmp_path / "demo"
    command = [sys.executable, "-m", "millstream", "demo", "ads", "--log", str(folder)]
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    first = subprocess.Popen(
        [*command, "--speed", "5"], stdout=subprocess.PIPE, env=environment, text=True
    )
    reports = (line for line in first.stdout if line.startswith("read "))
    # The second report comes while events arrive and windows are open.
    assert [next(reports) for _ in range(2)]
    first.send_signal(signal.SIGKILL)
    first.wait()
    first.stdout.close()
    again = subprocess.run(
        [*command, "--speed", "500"], capture_output=True, env=environment, text=True, check=False
    )
    assert again.returncode == 0, again.stdout + again.stderr
    assert "Going on: " in again.stdout
    assert "ctr_by_hour: equal: 504 rows" in again.stdout
    assert "totals_by_day: equal: 42 rows" in again.stdout
    assert "late 122  duplicates 1816" in again.stdout
