"""Processes write to one folder while its owner is killed, or closes the log, again and again.

Nothing that was acknowledged is lost or at another offset; nothing is there twice; what one process
sent to one partition is in order; each transaction is complete or absent.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Self

import pytest
from simulation.ownership_loop import PAIRS, TOPIC, owner_of

from millstream.client import EventLog, connect

PROGRAM = Path(__file__).parent / "ownership_loop.py"
WAIT_S = 60


class Writers:
    """Three writers; a killed process is replaced by the next one of its writer."""

    def __init__(self, folder: Path, work: Path) -> None:
        self.folder = folder
        self.journal, self.stop, self.errors = work / "journal", work / "stop", work / "errors"
        self.starts: Counter[str] = Counter()
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, place: str) -> None:
        self.starts[place] += 1
        name = f"{place}/{self.starts[place]}"
        command = [sys.executable, str(PROGRAM), name, self.folder, self.journal, self.stop]
        with self.errors.open("ab") as errors:
            self.running[place] = subprocess.Popen(command, stderr=errors)

    def end_owner(self, number: signal.Signals) -> None:
        """Kill the owner of the folder, or let it close the log; and start another process."""
        end_s = time.monotonic() + WAIT_S
        while True:
            assert time.monotonic() < end_s, self.errors.read_text()
            owner = owner_of(self.folder)
            for place, process in self.running.items():
                if process.pid == owner:
                    process.send_signal(number)
                    code = process.wait(WAIT_S)
                    assert code == (0 if number == signal.SIGTERM else -number)
                    self.start(place)
                    return
            time.sleep(0.005)

    def wait_for_acknowledgements(self, count: int) -> None:
        """Return when so many more records were acknowledged."""
        before = self._lines()
        end_s = time.monotonic() + WAIT_S
        while self._lines() < before + count:
            assert time.monotonic() < end_s, self.errors.read_text()
            time.sleep(0.005)

    def _lines(self) -> int:
        return self.journal.read_bytes().count(b"\n") if self.journal.exists() else 0

    def end(self) -> None:
        self.stop.touch()
        for process in self.running.values():
            assert process.wait(WAIT_S) == 0, self.errors.read_text()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.running.values():
            if process.poll() is None:
                os.kill(process.pid, signal.SIGKILL)
            process.wait()


def check(log: EventLog, journal: str) -> Counter[str]:
    """Compare the log with the acknowledgements of its writers; return how many lines of each kind."""
    rows = [line.split() for line in journal.splitlines()]
    found = [
        (record.partition, record.offset, record.value.decode())
        for record in log.consumer(TOPIC, follow=False)
    ]
    sent = {(int(row[2]), int(row[3]), row[1]) for row in rows if row[0] == "sent"}
    assert sent <= set(found), sorted(sent - set(found))[:5]
    values = Counter(value for _, _, value in found)
    assert values.most_common(1)[0][1] == 1
    by_writer: dict[tuple[str, int], list[int]] = defaultdict(list)
    for partition, _, value in sorted(found):
        name, number = value.split(":")
        by_writer[name, partition].append(int(number))
    for numbers in by_writer.values():
        assert numbers == sorted(numbers)
    left, right = (
        [record.value.decode() for record in log.consumer(topic, follow=False)] for topic in PAIRS
    )
    assert sorted(left) == sorted(right)
    assert len(set(left)) == len(left)
    assert {row[1] for row in rows if row[0] == "pair"} <= set(left)
    assert set(log.fences()) == set(left)
    return Counter(row[0] for row in rows)


@pytest.mark.thorough
@pytest.mark.timeout(300)
def test_owners_go_and_nothing_is_lost_doubled_or_out_of_order(tmp_path: Path) -> None:
    rng = random.Random(int(os.environ.get("MILLSTREAM_SEED", "1")))
    folder = tmp_path / "data"
    with Writers(folder, tmp_path) as writers:
        for place in "abc":
            writers.start(place)
        writers.wait_for_acknowledgements(50)
        for _ in range(int(os.environ.get("MILLSTREAM_KILLS", "6"))):
            writers.wait_for_acknowledgements(rng.randint(1, 150))
            time.sleep(rng.random() / 100)
            writers.end_owner(rng.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM]))
        writers.wait_for_acknowledgements(50)
        writers.end()
    with connect(folder) as log:
        log.acquire_ownership()
        counts = check(log, writers.journal.read_text())
    assert counts["sent"] > 100
    assert counts["pair"] > 0
    assert writers.errors.read_text() == ""
