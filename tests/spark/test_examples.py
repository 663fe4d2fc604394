"""The examples of joins and tables as a user runs them, on Spark: each compares itself with a plain batch."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(name, *options):
    """Run an example to its end, and return what it prints."""
    ended = subprocess.run(
        [sys.executable, ROOT / "examples" / name, *options],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), *sys.path[1:]])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.mark.timeout(900)  # a minute and a half of a busy machine
def test_a_year_of_flights_is_joined_to_all_that_is_known_of_them(tmp_path):
    said = run("flights_joined.py", "--folder", tmp_path / "log")
    assert "late 0, dead 0, duplicate 0, filtered 5" in said  # the clock's
    assert "The weather of 1,032 flights is not known" in said
    assert "flights: 336,776 rows, equal to the batch's" in said
    assert "delays: 46 rows, equal to the batch's" in said


@pytest.mark.timeout(600)
def test_queries_are_joined_with_clicks_although_some_are_missing_for_a_while(tmp_path):
    said = run("photon.py")
    assert said.count("late 0, dead 0, duplicate 0") == 2
    assert "never clicked was at 12:08" in said  # half an hour before the clicks that are missing
    assert "Equal to the plain computation." in said


@pytest.mark.timeout(600)
def test_the_timelines_of_a_small_network_are_maintained(tmp_path):
    said = run(
        "timeline.py", "--folder", tmp_path / "log", "--people", "1000", "--follows", "20000"
    )
    assert "equal to the batch's" in said


@pytest.mark.timeout(600)
def test_the_page_that_runs_away_is_told(tmp_path):
    said = run("trend.py")
    assert "firing" in said
    assert "resolved" in said


@pytest.mark.timeout(600)
def test_the_reach_of_pages_is_asked_of_the_state(tmp_path):
    said = run(
        "reach.py",
        *("--folder", tmp_path / "log", "--people", "500", "--follows", "3000", "--shares", "300"),
    )
    assert said.rstrip().endswith("equal")
