"""Stores of several processes on one folder, killed at any moment."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from unit.sourcing.ledger import open_store

import millstream as ms

pytestmark = pytest.mark.thorough

PROGRAM = """
import sys
sys.path.insert(0, sys.argv[1])
from unit.sourcing.ledger import open_store
import millstream as ms
folder, name, count = sys.argv[2], sys.argv[3], int(sys.argv[4])
with ms.connect(folder) as log, open_store(log, partitions=1) as store:
    for at in range(count):
        print(store.handle("hot", [1], command_id=f"{name}-{at}").version, flush=True)
"""
TESTS = Path(__file__).resolve().parents[2]


def start(folder: Path, name: str, count: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(TESTS), str(folder), name, str(count)],
        stdout=subprocess.PIPE,
        text=True,
    )


def test_processes_on_one_hot_stream_lose_no_update(tmp_path: Path) -> None:
    running = [start(tmp_path, name, 60) for name in "abc"]
    versions = [int(line) for one in running for line in one.communicate(timeout=120)[0].split()]
    assert [one.returncode for one in running] == [0, 0, 0]
    assert sorted(versions) == list(range(1, 181))


@pytest.mark.parametrize("after", [5, 40])
def test_a_process_that_is_killed_loses_and_doubles_nothing(tmp_path: Path, after: int) -> None:
    running = {name: start(tmp_path, name, 400) for name in "ab"}
    said = {}
    for one in running.values():
        assert one.stdout is not None
        for _ in range(after):
            one.stdout.readline()
    for name, one in running.items():  # the owner of the folder among them
        one.send_signal(signal.SIGKILL)
        assert one.stdout is not None
        said[name] = after + sum(line.endswith("\n") for line in one.stdout)
        one.wait(timeout=60)
        one.stdout.close()
    with ms.connect(tmp_path) as log, open_store(log, partitions=1) as store:
        for name, count in said.items():
            for at in range(count - 3, count):
                assert store.handle("hot", [1], command_id=f"{name}-{at}").repeated
        ids = [event.metadata.command_id for event in store.history("hot")]
        assert len(ids) == len(set(ids))
        assert store.load("hot").state.total == len(ids)
        for name, count in said.items():
            mine = [command for command in ids if command.startswith(f"{name}-")]
            assert mine == [f"{name}-{at}" for at in range(len(mine))]
            assert len(mine) - count in (0, 1)
