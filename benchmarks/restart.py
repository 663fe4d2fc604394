"""From ``kill -9`` to the next output, with a gigabyte of state: a start of Python and the JVM with it.

The app has run and ended once before, in another folder, as apps have that somebody develops: Java has its
archive of classes then (`--first` leaves that out), and Python what it compiled.

An app holds the events of each key until there are two, which it then shows in a view. It is loaded
with new keys, which show nothing, until its state has the size asked for. Then more events
come, and in the middle of its work the app, its JVM and its workers are killed by ``kill -9``. The
time runs from the start of the next process to the first batch that it has committed, rows of the
view with it.

    python benchmarks/restart.py [--megabytes 1024] [--kills 3] [--first]
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import numpy as np
from _measure import spread, table, tree_cpu_s
from state_growth import LOAD_ROWS, values

CORES = 2
REPEATED = 20_000


@dataclass
class Event:
    at: datetime
    k: int


def app(folder: Path):
    import millstream as ms

    made = ms.App("restart", log=folder / "log")
    stream = made.topic("events", Event, partitions=1).stream(time="at")
    pairs = stream.window(ms.count_window(2, unbounded=True), by="k").agg(n=ms.count())
    pairs.view("seen_twice")
    return made


def run(folder: Path, began: float) -> None:
    """Run until killed; tell of each batch when it was committed, and what came of it."""

    def say(progress) -> None:
        took, used = time.time() - began, tree_cpu_s()
        lag = sum(progress.lag.values())
        print(took, used, progress.read, progress.emitted, lag, progress.state_bytes, flush=True)

    app(folder).run(cores=CORES, rows_per_batch=LOAD_ROWS, on_progress=say)


@dataclass(frozen=True)
class Batch:
    """A batch as the app tells of it: ``seconds`` since its start, CPU seconds, and counts of rows."""

    seconds: float
    cpu_s: float
    read: int
    emitted: int
    lag: int
    state_bytes: int


class Running:
    """The app in a process of its own."""

    def __init__(self, folder: Path) -> None:
        command = [sys.executable, __file__, "--contender", str(folder), str(time.time())]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    def batch(self) -> Batch:
        """Wait for a batch."""
        line = self.process.stdout.readline()
        if not line:
            sys.exit("the app has ended")
        seconds, cpu_s, *counts = line.split()
        return Batch(float(seconds), float(cpu_s), *map(int, counts))

    def read(self, rows: int) -> int:
        """Wait until so many more rows are read; give the bytes of state."""
        while rows > 0:
            batch = self.batch()
            rows -= batch.read
        return batch.state_bytes

    def kill(self) -> None:
        """End the process and all below it, at once."""
        for pid in [self.process.pid, *descendants(self.process.pid)]:
            os.kill(pid, signal.SIGKILL)
        self.process.wait()


def descendants(pid: int) -> list[int]:
    below = []
    for child in Path(f"/proc/{pid}/task").glob("*/children"):
        for number in map(int, child.read_text().split()):
            below += [number, *descendants(number)]
    return below


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--megabytes", type=int, default=1024)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--first", action="store_true")
    parser.add_argument("--contender", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.contender:
        run(Path(options.contender[0]), float(options.contender[1]))
        return
    import millstream as ms

    with tempfile.TemporaryDirectory(prefix="millstream-bench-") as name:
        folder = Path(name)
        with ms.connect(folder / "log") as log, log.producer() as producer:
            log.create_topic("events", partitions=1)

            def send(keys: np.ndarray) -> None:
                producer.send_many("events", values=values(keys)).result()

            if not options.first:
                run_once(folder / "before")
            starts, size = measure(folder, send, options.megabytes << 20, options.kills)
    seconds, cpu_s = zip(*starts, strict=True)
    rows = [[f"{size / 2**20:,.0f}", len(starts), spread(seconds), spread(cpu_s)]]
    header = ["MiB of state", "kills", "s to the first output", "CPU-s until then"]
    table("kill -9 and start again", header, rows)


def run_once(folder: Path) -> None:
    """Run the app to its end over a few events."""
    import millstream as ms

    with ms.connect(folder / "log") as log, log.producer() as producer:
        log.create_topic("events", partitions=1)
        producer.send_many("events", values=values(np.arange(REPEATED))).result()
    app(folder).run(until="caught-up", cores=CORES, show=False)


def measure(
    folder: Path, send, size_wanted: int, kills: int
) -> tuple[list[tuple[float, float]], int]:
    """Load the state; kill the app in mid-batch and start it again, so many times.

    Give what each start took until its first output, in time and in CPU of all processes, and the
    bytes of state.
    """
    running, size, keys = Running(folder), 0, 0
    while size < size_wanted:
        send(np.arange(keys, keys + LOAD_ROWS))
        keys += LOAD_ROWS
        size = running.read(LOAD_ROWS)
    dice, starts = np.random.default_rng(3), []
    for _ in range(kills):
        for _ in range(3):  # three whole batches, then one that is torn
            send(dice.integers(0, keys, REPEATED))
            running.read(REPEATED)
        send(dice.integers(0, keys, REPEATED))
        time.sleep(0.1)
        running.kill()
        send(dice.integers(0, keys, REPEATED))  # the torn batch may have been committed
        running = Running(folder)
        batch = running.batch()
        while not batch.emitted:
            batch = running.batch()
        starts.append((batch.seconds, batch.cpu_s))
        while batch.lag:  # the next kill is to find it at work on what is sent then
            batch = running.batch()
    running.kill()
    return starts, size


if __name__ == "__main__":
    main()
