"""The demo as a user meets it: a command, killed at bad moments, started again, and right."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[2] / "src"
KILLS = 6  # the named points of a batch have tests of their own
LATEST_S = 30.0  # a start takes some 20 s to its first batch, the week at this speed as long again
SPEED = "20"


@pytest.mark.timeout(1500)
def test_a_demo_killed_at_half_a_dozen_random_moments_goes_on_to_the_same_answer(tmp_path):
    folder = tmp_path / "demo"
    command = [sys.executable, "-m", "millstream", "demo", "ads", "--log", str(folder)]
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    seed = random.SystemRandom().randrange(1 << 32)
    dice = random.Random(seed)
    print(f"kill moments by seed {seed}")
    finished = 0
    for _ in range(KILLS):
        with subprocess.Popen(
            [*command, "--speed", SPEED], stdout=subprocess.DEVNULL, env=environment
        ) as process:
            # Nothing is waited for: the moment is what the test is about.
            with suppress(subprocess.TimeoutExpired):
                finished += process.wait(dice.uniform(0.5, LATEST_S)) == 0
            process.kill()
    last = subprocess.run(
        [*command, "--speed", "500"], capture_output=True, env=environment, text=True, check=False
    )
    assert last.returncode == 0, last.stdout + last.stderr
    # A run that was complete before the last kill makes the next one begin anew.
    assert finished or "Going on: " in last.stdout
    assert "ctr_by_hour: equal: 504 rows" in last.stdout
    assert "totals_by_day: equal: 42 rows" in last.stdout
    assert "late 122  duplicates 1816" in last.stdout
