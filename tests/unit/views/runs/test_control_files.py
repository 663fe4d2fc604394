import subprocess
import sys

from millstream.views.runs.control_files import ActiveRun, active_runs, hold_run_lock

HOLD = """
import sys
from pathlib import Path
from millstream.views.runs.control_files import hold_run_lock
with hold_run_lock(Path(sys.argv[1]), 7):
    print("marked", flush=True)
    sys.stdin.read()
"""


def test_a_run_is_alive_for_as_long_as_its_block(tmp_path):
    assert active_runs(tmp_path) == []
    with hold_run_lock(tmp_path, 3):
        (alive,) = active_runs(tmp_path)
        assert isinstance(alive, ActiveRun)
        assert alive.run == 3
    assert active_runs(tmp_path) == []
    assert list(tmp_path.iterdir()) == []


def test_a_run_whose_process_was_killed_is_not_alive(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "marked\n"
    (alive,) = active_runs(tmp_path)
    assert (alive.run, alive.pid) == (7, process.pid)
    process.kill()
    process.communicate()
    assert active_runs(tmp_path) == []
    with hold_run_lock(tmp_path, 8):
        assert [path.name for path in tmp_path.iterdir()] == ["running-8.json"]


def test_while_one_run_takes_over_from_another_both_are_alive(tmp_path):
    with hold_run_lock(tmp_path, 1), hold_run_lock(tmp_path, 2):
        assert [running.run for running in active_runs(tmp_path)] == [1, 2]
