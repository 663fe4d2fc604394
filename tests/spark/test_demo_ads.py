"""The demo as a user meets it: a command, under attack, on a page, and right at the end."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from urllib.request import urlopen

import pytest

SOURCE = Path(__file__).resolve().parents[2] / "src"
COMPARED = (
    "view ad_ctr",
    "view spend_by_day",
    "view stopped_ads",
    "view late_events",
    "topic decisions",
    "topic budget-events",
    "topic ad-stops",
)


def start(folder, *options):
    command = [sys.executable, "-m", "millstream", "demo", "ads", "--log", str(folder)]
    return subprocess.Popen(
        [*command, "--page", "127.0.0.1:0", "--no-stay", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
    )


@pytest.fixture
def demo(tmp_path):
    """Return a function that runs the demo and gives its exit code and lines; it looks at the page."""
    running = []

    def run(*options, look=lambda url: None):
        process = start(tmp_path / "demo", *options)
        running.append(process)
        lines = []
        for line in process.stdout:
            lines.append(line.rstrip("\n"))
            if line.startswith("The page: "):
                url = line.split()[-1]
            if line.startswith("read ") and look(url):
                look = bool  # it has seen what it was to see
        return process.wait(), lines

    yield run
    for process in running:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.mark.timeout(900)
def test_under_attack_the_answers_are_those_of_one_batch_over_the_raw_log(demo):
    seen = threading.Event()

    def look(url):
        with urlopen(f"{url}views/ad_ctr?order=-window_start&limit=1") as answer:
            rows = json.load(answer)["rows"]
        with urlopen(f"{url}apps/ads/dashboard") as answer:
            panels = json.load(answer)
        if rows and panels:
            seen.set()
        return seen.is_set()

    code, lines = demo(
        "--chaos", "--input", "generated", "--rate", "200", "--minutes", "1", look=look
    )
    said = "\n".join(lines)
    assert code == 0, said
    assert seen.is_set(), said
    for what in COMPARED:
        assert re.search(rf"{what}: equal: [\d,]+ rows", said), said
    killed = re.search(r"Killed: the driver (\d+) times, workers (\d+) times", said)
    assert killed is not None, said
    assert int(killed[1]) >= 2, said
    assert "Going on: " in said
