from __future__ import annotations

import importlib.util
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest

from millstream.log.reader import LogReader
from millstream.log.writer import LogWriter

PROGRAM = Path(__file__).with_name("kill_loop.py")
SOURCE = Path(__file__).parents[2] / "src"


def program() -> ModuleType:
    spec = importlib.util.spec_from_file_location("kill_loop", PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


loop = program()


class Processes:
    """The owner and the senders; any of them is killed and started again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        for name in ("owner", *(str(n) for n in range(loop.SENDERS))):
            self.start(name)

    def start(self, name: str) -> None:
        socket = str(self.folder / "socket")
        arguments = (
            ["owner", str(self.folder / "log"), socket]
            if name == "owner"
            else ["sender", name, str(self.journal(name)), socket, str(self.folder / "stop")]
        )
        self.running[name] = subprocess.Popen(
            [sys.executable, str(PROGRAM), *arguments],
            env={**os.environ, "PYTHONPATH": str(SOURCE)},
        )

    def journal(self, name: str) -> Path:
        return self.folder / f"journal-{name}"

    def response_count(self) -> int:
        journals = [self.journal(str(n)) for n in range(loop.SENDERS)]
        return sum(path.read_bytes().count(b"\n") for path in journals if path.exists())

    def kill(self, name: str) -> None:
        process = self.running[name]
        assert process.poll() is None, f"{name} ended by itself"
        process.send_signal(signal.SIGKILL)
        process.wait()

    def stop(self) -> None:
        (self.folder / "stop").touch()
        for name, process in self.running.items():
            if name != "owner":
                process.wait(60)
        self.kill("owner")


@contextmanager
def processes(folder: Path) -> Iterator[Processes]:
    started = Processes(folder)
    try:
        yield started
    finally:
        for process in started.running.values():
            process.kill()
            process.wait()


def kill_and_check(folder: Path, kills: int, seed: int) -> None:
    rng = random.Random(seed)
    with processes(folder) as started:
        for _ in range(kills):
            before = started.response_count()
            deadline = time.monotonic() + 60
            while started.response_count() < before + 5:
                assert time.monotonic() < deadline, "nothing is acknowledged any more"
                time.sleep(0.005)
            time.sleep(rng.random() * 0.03)
            name = rng.choice(["owner", "owner", *(str(n) for n in range(loop.SENDERS))])
            started.kill(name)
            started.start(name)
        started.stop()
        check(folder, started)


def check(folder: Path, started: Processes) -> None:
    with LogWriter(folder / "log"):
        pass  # recovers what the last owner left
    reader = LogReader(folder / "log")
    for sender in range(loop.SENDERS):
        partition = loop.partition_of(sender)
        start, end = reader.offsets(loop.TOPIC)[partition]
        found: list[tuple[int, bytes]] = []
        for batch in reader.read(loop.TOPIC, partition, start, end, columns=("offset", "value")):
            pairs = zip(batch["offset"].to_pylist(), batch["value"].to_pylist(), strict=True)
            found += [pair for pair in pairs if pair[1].startswith(b"%d/" % sender)]
        offsets = [int(line) for line in started.journal(str(sender)).read_bytes().split()]
        sent = [
            value for number in range(len(offsets) + 1) for value in loop.values_of(sender, number)
        ]
        values = [value for _, value in found]
        assert values == sent[: len(values)], f"sender {sender}: not each once, in order"
        first_of_batch = {offset for offset, value in found if b"/0 " in value[:40]}
        assert set(offsets) <= first_of_batch, f"sender {sender}: an acknowledged record is missing"
        acknowledged = sum(len(loop.values_of(sender, number)) for number in range(len(offsets)))
        assert len(values) >= acknowledged, f"sender {sender}: acknowledged records are missing"


def test_four_senders_and_the_owner_are_killed_and_every_record_is_there_once(
    tmp_path: Path,
) -> None:
    kill_and_check(tmp_path, kills=6, seed=1)


@pytest.mark.thorough
def test_a_hundred_kills_lose_and_double_nothing(tmp_path: Path) -> None:
    kill_and_check(tmp_path, kills=100, seed=2)
