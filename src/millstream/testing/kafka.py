"""An Apache Kafka node for tests: a real one, in a temporary folder, on free ports of this machine.

Maven fetches its jars once (``maven.py``); otherwise the node needs only Java. It is broker and controller in one, with a replication factor of 1,
small internal topics, and maintenance every second instead of every five minutes.
"""

from __future__ import annotations

import base64
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from millstream.errors import EnvironmentProblem
from millstream.spark.runtime.java import find_java
from millstream.testing.free_ports import free_ports
from millstream.testing.maven import JavaProgram

VERSION = "4.3.1"
_START_S = 60.0
_STOP_S = 20.0
_HEAP = "-Xmx512m"
_KAFKA = JavaProgram(
    f"Apache Kafka {VERSION}",
    f"kafka-{VERSION}",
    (f"org.apache.kafka:kafka_2.13:{VERSION}", "org.slf4j:slf4j-nop:1.7.36"),
)
_SETTINGS = {
    "process.roles": "broker,controller",
    "node.id": "1",
    "controller.listener.names": "CONTROLLER",
    "listener.security.protocol.map": "CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT",
    "auto.create.topics.enable": "false",
    **{
        f"{topic}.{number}": "1"
        for topic in ("offsets.topic", "share.coordinator.state.topic", "transaction.state.log")
        for number in ("replication.factor", "min.isr")
        if (topic, number) != ("offsets.topic", "min.isr")
    },
    "offsets.topic.num.partitions": "4",
    "share.coordinator.state.topic.num.partitions": "4",
    "transaction.state.log.num.partitions": "4",
    "group.initial.rebalance.delay.ms": "0",
    # What waits for minutes elsewhere.
    "log.retention.check.interval.ms": "1000",
    "log.initial.task.delay.ms": "1000",
    "log.cleaner.backoff.ms": "500",
    "log.segment.delete.delay.ms": "1000",
    "transaction.abort.timed.out.transaction.cleanup.interval.ms": "1000",
}


def why_not(env: Mapping[str, str] = os.environ) -> str:
    """Return what is missing on this machine for a node; "" if nothing is."""
    return _KAFKA.why_not(env)


def jars(env: Mapping[str, str] = os.environ) -> Path:
    """Return the folder of Kafka's jars, fetching them the first time (54 MB).

    Raises:
        EnvironmentProblem: Maven is not installed, or could not fetch them; the message has its output.
    """
    return _KAFKA.jars(env)


class ApacheKafka:
    """A node of its own; use it in ``with``. ``address`` is where it listens, ``HOST:PORT``.

    Args:
        settings: Of the node, over those made here.

    Raises:
        EnvironmentProblem: Java, Maven or Kafka's jars are missing, or the node does not start; the
            message has its output.
    """

    def __init__(self, settings: Mapping[str, str] | None = None) -> None:
        self._java = find_java(os.environ).executable
        self._jars = jars()
        self.folder = Path(tempfile.mkdtemp(prefix="millstream-kafka-"))
        self._process: subprocess.Popen[bytes] | None = None
        self.address = ""
        try:
            self._start_somewhere(settings or {})
        except BaseException:
            self.close()
            raise

    def _start_somewhere(self, settings: Mapping[str, str]) -> None:
        for _ in range(3):  # another program may take a port between the look and the start
            if self._start(settings):
                return
        output = (self.folder / "node.log").read_text(errors="replace")[-2000:]
        raise EnvironmentProblem(f"Apache Kafka did not start: {output}")

    def _start(self, settings: Mapping[str, str]) -> bool:
        port, control = free_ports(2)
        self.address = f"127.0.0.1:{port}"
        data = self.folder / f"data-{port}"
        given = {
            **_SETTINGS,
            "controller.quorum.voters": f"1@127.0.0.1:{control}",
            "listeners": f"PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{control}",
            "log.dirs": str(data),
            **settings,
        }
        file = self.folder / "server.properties"
        file.write_text("".join(f"{name}={value}\n" for name, value in given.items()))
        cluster = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
        with (self.folder / "node.log").open("wb") as log:
            formatting = ["kafka.tools.StorageTool", "format", "-t", cluster, "-c", str(file)]
            done = subprocess.run(  # noqa: S603 - the Java that runs Spark, and Kafka's jars
                self._command(formatting), stdout=log, stderr=log, check=False
            )
            if done.returncode:
                return False
            self._process = subprocess.Popen(  # noqa: S603 - as above
                self._command(["kafka.Kafka", str(file)]),
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for the tests
            )
        return self._is_listening(self._process, port)

    def _command(self, program: list[str]) -> list[str]:
        options = [_HEAP, "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"]
        return [str(self._java), *options, "-cp", f"{self._jars}/*", *program]

    def _is_listening(self, process: subprocess.Popen[bytes], port: int) -> bool:
        """Wait until the node accepts connections; False if it ended before."""
        end = time.monotonic() + _START_S
        while process.poll() is None and time.monotonic() < end:
            with socket.socket() as probe:
                probe.settimeout(1)
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    return True
            time.sleep(0.05)
        return False

    @property
    def pid(self) -> int:
        """The number of the node's process."""
        assert self._process is not None, "the node was closed"
        return self._process.pid

    def kill(self) -> None:
        """End the node as a crash would."""
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()

    def close(self) -> None:
        """Stop the node and remove its files."""
        process, self._process = self._process, None
        if process is not None and process.poll() is None:
            process.terminate()
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
