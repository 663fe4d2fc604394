"""The flights example as a user runs it: a year on Spark, equal to a plain batch, row by row."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.timeout(900)  # half a minute of two cores; a busy machine may take ten times as long
def test_a_year_of_flights_comes_to_what_a_plain_batch_comes_to(tmp_path):
    ended = subprocess.run(
        [sys.executable, ROOT / "examples" / "flights.py", "--folder", tmp_path / "log"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), *sys.path[1:]])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "664,122 of 664,122 events written" in ended.stdout
    assert "late 0, dead 0, duplicate 0, filtered 8,259" in ended.stdout
    assert "delays: 21,148 rows, equal to the batch's" in ended.stdout
    assert "tours: 171,858 rows, equal to the batch's" in ended.stdout
