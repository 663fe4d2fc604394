"""Who is killed in the demo's chaos."""

from __future__ import annotations

import os
import subprocess
import sys

from millstream.demo.ads_chaos import workers_of


def process(proc, pid, parent, *command, name="python3"):
    folder = proc / str(pid)
    folder.mkdir()
    (folder / "cmdline").write_bytes(b"\0".join(word.encode() for word in command) + b"\0")
    (folder / "stat").write_text(f"{pid} ({name}) S {parent} 1 1 0")


def test_workers_are_found_however_deep_and_only_below_the_driver(tmp_path):
    worker = ("python3", "-m", "millstream.spark.runtime.worker_daemon", "pyspark.worker")
    process(tmp_path, 10, 1, "python3", "-m", "millstream", "demo")
    daemon = "-Dspark.python.daemon.module=millstream.spark.runtime.worker_daemon"
    process(tmp_path, 11, 10, "java", daemon, name="java) S 99 (")
    process(tmp_path, 12, 11, *worker)
    process(tmp_path, 13, 12, *worker)
    process(tmp_path, 14, 11, "python3", "-m", "other")
    process(tmp_path, 15, 12, *worker, name="planner")
    process(tmp_path, 20, 1, *worker)
    (tmp_path / "30").mkdir()  # it has just ended
    (tmp_path / "self").mkdir()
    assert workers_of(10, tmp_path) == [12, 13]
    assert workers_of(99, tmp_path) == []


def test_of_real_processes_those_are_found_that_are_there():
    program = "import sys; sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", program, "-m", "millstream.spark.runtime.worker_daemon"],
        stdin=subprocess.PIPE,
    ) as running:
        assert running.pid in workers_of(os.getpid())
        running.stdin.close()
