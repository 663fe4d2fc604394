"""The demo over a broker: what it says at the end, on made-up events, is equal to the other computation."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("confluent_kafka", reason="the extra `kafka` is not installed here")
from broker.broker_process import AsProcess

SOURCE = Path(__file__).resolve().parents[2] / "src"
OUTPUTS = 7


def check(address: str, folder: Path) -> None:
    """Run the demo on some thousand events; see that all outputs are equal."""
    given = ["--input", "generated", "--rate", "100", "--minutes", "0.5", "--speed", "20"]
    command = [sys.executable, "-m", "millstream", "demo", "ads", "--page", "none", "--no-stay"]
    done = subprocess.run(
        [*command, "--log", address, "--folder", str(folder), *given],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        check=False,
    )
    lines = (done.stdout + done.stderr).splitlines()
    assert done.returncode == 0, lines
    assert sum(": equal: " in line for line in lines) == OUTPUTS, lines


@pytest.mark.thorough
@pytest.mark.timeout(600)
def test_the_demo_over_a_broker_is_right(tmp_path: Path) -> None:
    with AsProcess(tmp_path / "log") as broker:
        check(f"kafka://{broker.address}", tmp_path / "demo")
