"""The demo on a standalone Spark cluster, over Apache Kafka: only two addresses differ.

Master, workers and the node of Kafka are processes of this machine, which share its disk.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from contextlib import ExitStack
from pathlib import Path

import pytest
from contract.logs import wipe
from spark.clusters import Cluster, end
from spark.test_kafka_demo import OUTPUTS

# 40 seconds of feed, in which about 80,000 records come in each: more than the driver reads by itself.
GIVEN = ["--input", "generated", "--rate", "4000", "--minutes", "2", "--speed", "4"]


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    folder = tmp_path / "cluster"
    folder.mkdir()
    with ExitStack() as opened:
        yield Cluster(folder, opened)


def start(cluster: Cluster, address: str, folder: Path, said: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "millstream", "demo", "ads", "--page", "none", "--no-stay"]
    places = ["--log", address, "--folder", str(folder), "--master", cluster.master]
    with said.open("ab") as out:
        return subprocess.Popen(
            [*command, *places, *GIVEN],
            env=cluster.environment,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )


def wait_for_progress(process: subprocess.Popen[bytes], said: Path, count: int) -> None:
    """Wait until the demo has printed its progress so many times."""
    pause = threading.Event()
    while said.read_bytes().count(b"\nread ") < count:
        assert process.poll() is None, said.read_text()
        pause.wait(0.1)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_demo_survives_the_death_of_a_worker_and_of_the_driver(
    held, cluster: Cluster, tmp_path: Path
) -> None:
    folder, said = tmp_path / "demo", tmp_path / "said"
    address = f"kafka://{held.address}"
    said.touch()
    running = start(cluster, address, folder, said)
    try:
        wait_for_progress(running, said, 2)
        end(cluster.workers[0])  # with its executor and that one's Python workers
        wait_for_progress(running, said, 4)
        os.killpg(running.pid, signal.SIGKILL)
        running.wait()
        running = start(cluster, address, folder, said)
        assert running.wait() == 0, said.read_text()
    finally:
        end(running)
        with held.connect() as log:
            wipe(log)
    lines = said.read_text().splitlines()
    assert sum(": equal: " in line for line in lines) == OUTPUTS, lines
    assert any(line.startswith("Going on: ") for line in lines), lines
