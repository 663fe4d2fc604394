"""An app on a cluster of Spark's own kind: a master and two workers, each a process of its own here.

They share this machine's disk, as machines of a cluster would share a mounted folder; what else differs
between several machines is not tested, and docs/cluster.md says so.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from collections import Counter
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import on_cluster
import polars as pl
import pyspark
import pytest

import millstream as ms
from millstream.spark.java import find_java

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(1800)]
SOURCE = Path(__file__).resolve().parents[2] / "src"
SPARK_CLASS = Path(pyspark.__file__).parent / "bin" / "spark-class"
DEPLOY = "org.apache.spark.deploy"
START_S = 120


def free_ports(count):
    with ExitStack() as held:
        found = [held.enter_context(socket.socket()) for _ in range(count)]
        for each in found:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in found]


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

    def __post_init__(self):
        self.port, self.page = free_ports(2)
        self.environment = {
            **os.environ,
            "JAVA_HOME": str(find_java(os.environ).home),
            "PYTHONPATH": str(SOURCE),
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

    def start(self, name, *command):
        said = self.opened.enter_context((self.folder / f"{name}.log").open("wb"))
        process = subprocess.Popen(
            [str(SPARK_CLASS), *command],
            stdout=said,
            stderr=said,
            env=self.environment,
            start_new_session=True,
        )
        self.opened.callback(end, process)
        return process

    def wait_for(self, workers):
        """Wait until the master knows of so many workers."""
        pause = threading.Event()
        for _ in range(START_S * 5):
            with suppress(OSError), urllib.request.urlopen(self.address) as answer:
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


@pytest.fixture
def cluster(tmp_path):
    folder = tmp_path / "cluster"
    folder.mkdir()
    with ExitStack() as opened:
        yield Cluster(folder, opened)


def send(log, numbers):
    with ms.connect(log) as opened:
        if "clicks" not in opened.topics():
            opened.create_topic("clicks", partitions=4)
        with opened.producer() as producer:
            for number in numbers:
                producer.send("clicks", on_cluster.event(number), key=str(number % 7))


def counted(events):
    """Count the events of each minute and ad."""
    counts = Counter()
    for number in range(events):
        at = on_cluster.NOON + timedelta(milliseconds=5 * number)
        counts[at.replace(second=0, microsecond=0), number % 7] += 1
    return [(at, ad, n) for (at, ad), n in sorted(counts.items())]


def minutes(log):
    return (
        ms.view("minutes", log=log).scan().select("window_start", "ad", "n").sort(pl.all()).rows()
    )


def test_an_app_runs_on_both_workers_of_a_cluster_and_goes_on_when_one_has_died(
    no_spark, cluster, tmp_path
):
    log, program = tmp_path / "data", on_cluster.__file__
    send(log, range(100_000))
    cluster.run(log, program, cluster.master)
    assert minutes(log) == counted(100_000)
    assert ms.view("executors", log=log).scan()["executor"].sort().to_list() == ["0", "1"]
    end(cluster.workers[0])
    cluster.wait_for(1)
    cluster.worker("three")
    cluster.wait_for(2)
    send(log, range(100_000, 200_000))
    cluster.run(log, program, cluster.master)
    assert minutes(log) == counted(200_000)
