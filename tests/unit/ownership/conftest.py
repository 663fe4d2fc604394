"""Starts processes that own folders, quickly: one Python that has loaded everything forks each owner."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

PROGRAM = '''
import os, signal, sys, time
from millstream.client import connect
from millstream.ownership import server
from millstream.log.writer import LogWriter

handle_request = server.handle_request
requests_yet = 0


def dying(at, when):
    """Handle requests as always; but at the request of that number, die before or after it is handled."""
    def handled(writer, request):
        global requests_yet
        requests_yet += 1
        if (requests_yet, when) == (at, "before"):
            os._exit(9)
        result = handle_request(writer, request)
        if (requests_yet, when) == (at, "after"):
            os._exit(9)
        return result
    return handled


def serve(kind, folder, at, when):
    if kind == "without socket":
        log = LogWriter(folder)
    else:
        server.handle_request = dying(int(at), when)
        log = connect(folder)
        if kind != "client":
            log.acquire_ownership()
        log.create_topic("t", partitions=2, exist_ok=True)
    if kind == "forking" and os.fork() == 0:
        while os.getppid() != 1 and not os.path.exists(folder + "/../stop"):
            time.sleep(0.01)  # it outlives its parent for a while
        time.sleep(5)
        os._exit(0)
    if kind in ("open", "client"):
        producer = log.producer(transactional_id="owners", linger_ms=0)
        producer.transaction().__enter__()
        producer.send("t", b"never").result()
    ended = []
    signal.signal(signal.SIGTERM, lambda *_: ended.append(1))
    print(os.getpid(), flush=True)
    while not ended:
        signal.pause()
    log.close()
    os._exit(0)


for line in sys.stdin:
    if os.fork() == 0:
        serve(*line.rstrip().split("\\t"))
'''


class Owners:
    """Starts owners, each of which prints its process id once it owns the folder."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.started: list[int] = []

    def start(
        self, folder: Path, kind: str = "serving", *, at: int = 0, when: str = "never"
    ) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{kind}\t{folder}\t{at}\t{when}\n")
        self._process.stdin.flush()
        self.started.append(int(self._process.stdout.readline()))
        return self.started[-1]

    def stop(self, owner: int) -> None:
        """Stop an owner with SIGSTOP; return when none of its threads runs any more."""
        os.kill(owner, signal.SIGSTOP)
        threads = Path(f"/proc/{owner}/task")
        while any(_state(thread) != "T" for thread in threads.iterdir()):
            time.sleep(0.001)


def _state(thread: Path) -> str:
    return (thread / "stat").read_text().rpartition(")")[2].split()[0]


@pytest.fixture(scope="session")
def program() -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", PROGRAM],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        yield process


@pytest.fixture
def owners(program: subprocess.Popen[str]) -> Iterator[Owners]:
    started = Owners(program)
    yield started
    for process in started.started:
        try:
            os.kill(process, signal.SIGKILL)
        except ProcessLookupError:
            continue
