"""A pipeline over a broker: the driver is killed around the transaction, and nothing is lost or doubled."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("confluent_kafka", reason="the extra `kafka` is not installed here")
from broker.broker_process import AsProcess
from crash_points import TRANSACTION_POINT
from every_sink import held, rows, send, wanted

import millstream as ms
from millstream import testing

HERE = Path(__file__).parent
SOURCE = Path(testing.__file__).parents[2]
EVENTS = rows(400)


def run(folder: Path, address: str, point: str) -> int:
    """Run the app in a process of its own, dying at the point the second time; give the exit code."""
    (folder / "marks").mkdir(exist_ok=True)
    program = [sys.executable, HERE / "crash_points.py", folder, ""]
    ended = subprocess.run(
        [*program, point, "2", "SIGKILL", "topics", address],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(SOURCE), str(HERE)])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode in (0, -9), ended.stdout + ended.stderr
    return ended.returncode


@pytest.mark.thorough
@pytest.mark.timeout(600)  # three times a JVM
def test_a_driver_that_dies_around_the_transaction_changes_nothing(tmp_path: Path) -> None:
    with AsProcess(tmp_path / "log") as broker:
        address = f"kafka://{broker.address}"
        send(address, EVENTS)
        for point in (TRANSACTION_POINT, "driver after topics"):
            assert run(tmp_path, address, point) == -9, point
        now = held(tmp_path, log=address)
        assert now.doubled() == []
        assert run(tmp_path, address, "") == 0
        now = held(tmp_path, log=address)
        assert now.outputs == wanted(tmp_path, EVENTS)
        assert (now.read, now.balanced) == (len(EVENTS), True)
        with ms.connect(address) as log:
            (writer,) = log.fences("matrix/main/")
            assert log.fence(writer) == log.fences()[writer] > 2
