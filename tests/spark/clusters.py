"""A standalone cluster of Spark for tests: a master and two workers, each a process of its own here."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import urllib.request
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pyspark

from millstream.spark.runtime.java import find_java
from millstream.testing.free_ports import free_ports

SOURCE = Path(__file__).resolve().parents[2] / "src"
SPARK_CLASS = Path(pyspark.__file__).parent / "bin" / "spark-class"
DEPLOY = "org.apache.spark.deploy"
START_S = 120


def end(process):
    """End a process and all that it has started: each has a session of its own."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(process.pid, number)
            process.wait(15)


@dataclass
class Cluster:
    """A standalone cluster; what its processes say lies in ``folder``."""

    folder: Path
    opened: ExitStack
    paths: ClassVar = (SOURCE,)  # of the modules of ours that executors import

    def __post_init__(self):
        self.port, self.page = free_ports(2)
        self.environment = {
            **os.environ,
            "JAVA_HOME": str(find_java(os.environ).home),
            "PYTHONPATH": os.pathsep.join(map(str, self.paths)),
            "SPARK_LOCAL_IP": "127.0.0.1",
            "PYSPARK_PYTHON": sys.executable,
            # A dozen JVMs that live for seconds: what the slow compiler would make is never used.
            "JDK_JAVA_OPTIONS": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
        }
        here = ("--host", "127.0.0.1")
        self.start("master", f"{DEPLOY}.master.Master", *here, *self.at(self.port, self.page))
        self.workers = [self.worker(name) for name in ("one", "two")]
        self.wait_for(2)

    @property
    def master(self):
        return f"spark://127.0.0.1:{self.port}"

    def at(self, port, page):
        return ("--port", str(port), "--webui-port", str(page))

    def worker(self, name):
        size = ("--cores", "1", "--memory", "1g", "--work-dir", str(self.folder / name))
        here = ("--host", "127.0.0.1", *self.at(0, 0))
        return self.start(name, f"{DEPLOY}.worker.Worker", *here, *size, self.master)

    def start(self, name, *command, inside=(), environment=None):
        """Start a process of Spark's; ``inside`` is the command that it is started by, if any."""
        said = self.opened.enter_context((self.folder / f"{name}.log").open("wb"))
        process = subprocess.Popen(
            [*inside, str(SPARK_CLASS), *command],
            stdout=said,
            stderr=said,
            env=environment or self.environment,
            start_new_session=True,
        )
        self.opened.callback(end, process)
        return process

    def wait_for(self, workers):
        """Wait until the master knows of so many workers."""
        pause = threading.Event()
        for _ in range(START_S * 5):
            # a master that starts serves its page, in HTML, at every path before it serves JSON
            with (
                suppress(OSError, json.JSONDecodeError),
                urllib.request.urlopen(self.address) as answer,
            ):
                if json.load(answer)["aliveworkers"] == workers:
                    return
            pause.wait(0.2)
        raise AssertionError((self.folder / "master.log").read_text())

    @property
    def address(self):
        return f"http://127.0.0.1:{self.page}/json/"

    def run(self, log, *command):
        """Run a program of ours until it ends well."""
        done = subprocess.run(
            [sys.executable, *command],
            env={**self.environment, "MILLSTREAM_LOG": str(log)},
            capture_output=True,
            text=True,
            check=False,
        )
        said = log / "apps" / "clicks" / "spark.log"
        assert done.returncode == 0, done.stderr + said.read_text()[-5000:]
