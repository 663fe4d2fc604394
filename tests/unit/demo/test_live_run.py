"""The live part of the demo, with real processes: killed while events arrive, and stopped by Ctrl-C."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from millstream.demo.live_run import PipelineProcess
from millstream.errors import JobFailedError

SOURCE = Path(__file__).resolve().parents[3] / "src"
PROGRAM = """
import sys
from pathlib import Path
from rich.console import Console
from millstream.demo.live_run import LiveOptions, run_live
options = LiveOptions(Path(sys.argv[1]), "127.0.0.1:0", "local", seconds=float(sys.argv[2]))
sys.exit(run_live(options, Console(width=200)))
"""


def start(folder, seconds):
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(folder), str(seconds)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
    )


def processes_of(folder):
    """Return the ids of the pipelines that run in a folder."""
    found = []
    for each in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = each.read_bytes().split(b"\0")
        except OSError:  # it has ended meanwhile
            continue
        if b"millstream.demo.live_pipeline" in words and str(folder / "live").encode() in words:
            found.append(int(each.parent.name))
    return found


def test_killed_and_stopped_by_ctrl_c_the_results_are_those_of_one_batch(tmp_path):
    lines = []
    with start(tmp_path, 600) as running:
        for line in running.stdout:
            lines.append(line.rstrip())
            if "a bot begins" in line:
                (pipeline,) = processes_of(tmp_path)
                os.kill(pipeline, 0)
            if "alarm: cinema" in line and "the events end here" not in "".join(lines):
                running.send_signal(signal.SIGINT)
    said = "\n".join(lines)
    assert running.returncode == 0, said
    assert "the events end here" in said
    assert said.count(": equal: ") == 8, said
    assert re.search(r"bots +caught after \d+\.\d s; \d+ alarms", said), said
    assert "8 views and topics: 0 too many, 0 missing" in said
    assert processes_of(tmp_path) == []


@pytest.mark.long
def test_by_itself_it_ends_after_its_time_with_a_kill_that_was_made_up_for(tmp_path):
    with start(tmp_path, 60) as running:
        said = running.communicate()[0]
    assert running.returncode == 0, said
    assert re.search(r"kill -9 of the pipeline, process \d+", said), said
    assert re.search(r"kills +1; all was in the views again after", said), said
    assert said.count(": equal: ") == 8, said


def test_the_pipeline_ends_when_its_parent_is_killed(tmp_path):
    with start(tmp_path, 60) as running:
        while "Now live" not in running.stdout.readline():
            pass
        while not processes_of(tmp_path):
            time.sleep(0.05)
        running.kill()
    while processes_of(tmp_path):
        time.sleep(0.05)


def test_a_pipeline_that_ends_by_itself_is_told_with_what_it_said(tmp_path):
    process = PipelineProcess(tmp_path, "spork", tmp_path / "said.txt")
    with process, pytest.raises(JobFailedError, match=r"(?s)exit code 1.*no engine.*spork|spork"):
        while True:
            process.check()
            time.sleep(0.05)
