"""The logs that the contract is tested on, and what each does not promise."""

from __future__ import annotations

import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Self

from broker.broker_process import InProcess

from millstream.client import EventLog, connect

with warnings.catch_warnings():  # kafka-python warns of its own deprecated calls when imported
    warnings.simplefilter("ignore")
    import kafka.partitioner.default  # noqa: F401

# What a log does not promise, by the name of the test, with the reason; each test must fail there.
_NO_TIME_BEFORE_1970 = "the client takes time 0 for now: it is refused"
DIFFERENCES: dict[str, dict[str, str]] = {
    "folder": {},
    "joined": {},
    "broker": {"test_s3_a_time_may_lie_before_1970": _NO_TIME_BEFORE_1970},
    "kafka": {"test_s3_a_time_may_lie_before_1970": _NO_TIME_BEFORE_1970},
}


class Folder:
    """The embedded log."""

    unit = 1  # how many times larger segments and records are in the tests of keeping

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def connect(self) -> EventLog:
        return connect(self._folder)

    def clean(self, log: EventLog, *, times: int = 1) -> None:
        """Have retention and compaction do what they would do by themselves, later."""
        for _ in range(times):
            log.run_maintenance()


class Owners:
    """A process that owns folders, for as long as the context lasts."""

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate("", timeout=30)

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()
        assert self._process.stdout.readline() == "done\n"

    def own(self, folder: Path) -> None:
        self._tell(f"own {folder}")

    def leave(self, folder: Path) -> None:
        self._tell(f"leave {folder}")


_OWNER = """
import sys
from millstream.client import connect
logs = {}
for line in sys.stdin:
    what, folder = line.rstrip().split(" ", 1)
    if what == "own":
        logs[folder] = connect(folder)
        logs[folder].acquire_ownership()
    else:
        logs.pop(folder).close()
    print("done", flush=True)
"""


class Joined(Folder):
    """The embedded log, which another process owns."""

    def __init__(self, folder: Path, owners: Owners) -> None:
        super().__init__(folder)
        owners.own(folder)


class Broker:
    """The embedded log behind its broker, in a thread of this process."""

    unit = 1

    def __init__(self, running: InProcess) -> None:
        self._running = running

    def connect(self) -> EventLog:
        return connect(f"kafka://{self._running.address}")

    def clean(self, log: EventLog, *, times: int = 1) -> None:
        for _ in range(times):
            self._running.run_maintenance()


class Kafka:
    """Apache Kafka, a node that keeps house every second."""

    unit = 2100  # Kafka takes no segments below 1 MiB

    def __init__(self, address: str) -> None:
        self.address = address

    def connect(self) -> EventLog:
        return connect(f"kafka://{self.address}?timeout=30+seconds")

    def clean(self, log: EventLog, *, times: int = 1) -> None:
        """Wait until nothing has changed for a while, as it happens by itself here."""
        seen, since_s = None, time.monotonic()
        while time.monotonic() - since_s < 2.5:
            now = [log.offsets(topic) for topic in log.topics()]
            if now != seen:
                seen, since_s = now, time.monotonic()
            time.sleep(0.1)


def wipe(log: EventLog) -> None:
    """Remove every topic, and everything that groups have committed, fences too."""
    cluster = log._cluster
    for writer in log.fences():
        log.delete_fences(writer)
    for name in log.topics():
        log.delete_topic(name)
    found = cluster.admin.list_consumer_groups().result(30).valid
    names = [group.group_id for group in found]
    for future in cluster.admin.delete_consumer_groups(names).values() if names else ():
        future.result(30)
