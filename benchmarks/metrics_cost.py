"""What figures cost a broker and a pipeline that are at work and scraped, as shares of one CPU.

Both in pairs, in turn which of the two is first: scraped, and not. Broker: a process that a producer keeps busy; CPU for
a million records. Pipeline: one run with ``--metrics`` over a log that gets as many records each second; CPU of its driver,
and of all its processes, for a second. Beside the pairs stands what the servers count themselves
(``millstream_metrics_cpu_seconds_total``), against the clock and against all CPU of the process.

    python benchmarks/metrics_cost.py [--seconds 20] [--every 1] [--rounds 5] [--only broker pipeline]
"""

from __future__ import annotations

import argparse
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path

from _measure import spread, table, tree_cpu_s

VALUES = [
    b'{"n": %d, "user": "u%d", "at": "2026-01-01T00:00:00Z"}' % (n, n % 100) for n in range(1000)
]
WARM_S = 10.0
APP = """
from datetime import datetime

import millstream as ms

app = ms.App("bench", log={log!r})
stream = app.topic("events", {{"n": int, "user": str, "at": datetime}}).stream(time="at")
stream.window(ms.tumbling("1 minute"), by="user").agg(n=ms.count()).view("by_user")
"""


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def cpu_s(pid):
    """CPU seconds of a process with all its threads: to the nanosecond, as clock_getcpuclockid(3) has it on Linux."""
    return time.clock_gettime((~pid << 3) | 2)


def figure(text, name):
    return float(re.search(rf"^{name}\S* (\S+)$", text, re.MULTILINE)[1])


class Scraper(threading.Thread):
    """Asks for figures every so often, from ``with`` to its end; has the first and the last text, and when."""

    def __init__(self, port, every_s=1.0):
        super().__init__(daemon=True)
        self.url, self.ended, self.texts = f"http://127.0.0.1:{port}/metrics", threading.Event(), []
        self.every_s = every_s

    def run(self):
        while not self.ended.wait(self.every_s):
            with urllib.request.urlopen(self.url, timeout=60) as answer:
                self.texts.append((time.monotonic(), answer.read().decode()))

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_):
        self.ended.set()
        self.join()

    def shares(self):
        """What figures took between the first and the last: of the clock, of the CPU of the process; scrapes."""
        (first_s, first), (last_s, last) = self.texts[0], self.texts[-1]

        def grown(name):
            return figure(last, name) - figure(first, name)

        took_s = grown("millstream_metrics_cpu_seconds_total")
        of_process = took_s / grown("process_cpu_seconds_total")
        return took_s / (last_s - first_s), of_process, len(self.texts)


@contextmanager
def process(*arguments, ready):
    """Run a command until the block ends; it has begun when ``ready()``."""
    command = [sys.executable, "-m", "millstream", *map(str, arguments)]
    running = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while not ready():
            assert running.poll() is None
            time.sleep(0.2)
        yield running.pid
    finally:
        running.terminate()
        running.wait()


def answers(port):
    try:
        urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=60).close()
    except OSError:
        return False
    return True


def produce(address, seconds):
    """Send records for so long; return how many."""
    import millstream as ms

    sent, end_s = 0, time.monotonic() + seconds
    with closing(ms.connect(address)) as log:
        log.create_topic("events", partitions=4, exist_ok=True)
        while time.monotonic() < end_s:
            with log.producer() as producer:
                for value in VALUES:
                    producer.send("events", value)
            sent += len(VALUES)
    return sent


def broker(seconds, every_s, *, scraped):
    """CPU seconds of a broker for a million records; with them, what it says that figures took."""
    with tempfile.TemporaryDirectory() as folder:
        port, ready = free_port(), Path(folder) / "ready"
        arguments = ["broker", f"{folder}/log", "--listen", "127.0.0.1:0", "--ready-file", ready]
        with process(*arguments, "--metrics", f"127.0.0.1:{port}", ready=ready.exists) as pid:
            before_s = cpu_s(pid)
            address = f"kafka://{ready.read_text().strip()}"
            if not scraped:
                sent = produce(address, seconds)
                return (cpu_s(pid) - before_s) / sent * 1e6, None
            with Scraper(port, every_s) as scraper:
                sent = produce(address, seconds)
            return (cpu_s(pid) - before_s) / sent * 1e6, scraper.shares()


def produce_evenly(log, seconds):
    """Send 2,000 records each second for so long."""
    import millstream as ms

    begun_s = time.monotonic()
    with closing(ms.connect(log)) as opened, opened.producer() as producer:
        for number in range(int(seconds * 2)):
            time.sleep(max(0.0, begun_s + number / 2 - time.monotonic()))
            for value in VALUES:
                producer.send("events", value)


def has_committed(log):
    """Return whether the app has committed a batch."""
    from millstream.errors import ConfigError
    from millstream.views.reader import state_store_location
    from millstream.views.store_location import open_state_store

    try:
        with open_state_store(state_store_location(log, "bench"), readonly=True) as store:
            return bool(store.status("bench"))
    except ConfigError:  # its store is not there yet
        return False


@contextmanager
def running_pipeline(seconds, every_s):
    """Run an app until the block ends; yield what measures it for so long, scraped or not.

    That returns CPU seconds for a second, of its driver and of all its processes, and what it says that figures took.
    """
    with tempfile.TemporaryDirectory() as folder:
        port, file, log = free_port(), Path(folder) / "app.py", f"{folder}/log"
        file.write_text(APP.format(log=log))
        produce(log, 0.01)
        options = ["--metrics", f"127.0.0.1:{port}"]
        with process("run", file, *options, ready=lambda: has_committed(log)) as pid:

            def measure(scraped):
                before = cpu_s(pid), tree_cpu_s(pid), time.monotonic()
                with Scraper(port, every_s) if scraped else nullcontext() as scraper:
                    produce_evenly(log, seconds)
                took_s = time.monotonic() - before[2]
                spent = ((cpu_s(pid) - before[0]) / took_s, (tree_cpu_s(pid) - before[1]) / took_s)
                return spent, scraper.shares() if scraped else None

            produce_evenly(log, WARM_S)
            yield measure


def shown(shares):
    of_clock, of_process, scrapes = zip(*shares, strict=True)
    middle = [
        f"{statistics.median(one):.2%} ({min(one):.2%} to {max(one):.2%})"
        for one in (of_clock, of_process)
    ]
    return [*middle, f"{statistics.median(scrapes):.0f}"]


def in_pairs(rounds, measure):
    """Return pairs of (scraped, not scraped), in turn which of the two is first."""
    pairs = []
    for number in range(rounds):
        order = (True, False) if number % 2 else (False, True)
        found = {scraped: measure(scraped) for scraped in order}
        pairs.append((found[True], found[False]))
    return pairs


def compare(name, what, pairs):
    """Print two figures of pairs, their ratios and their differences."""
    for said, place in (("scraped", 0), ("not scraped", 1)):
        print(f"{name}, {said}: {spread([pair[place] for pair in pairs], 4)} {what}")
    print(f"  ratio of pairs: {spread([a / b for a, b in pairs], 3)}")
    print(f"  difference of pairs: {spread([a - b for a, b in pairs], 4)}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--every", type=float, default=1, help="seconds between scrapes")
    parser.add_argument(
        "--only", nargs="+", choices=("broker", "pipeline"), default=("broker", "pipeline")
    )
    asked = parser.parse_args()
    print(f"load {os.getloadavg()[0]:.1f}")
    rows = []
    if "broker" in asked.only:
        pairs = in_pairs(
            asked.rounds, lambda scraped: broker(asked.seconds, asked.every, scraped=scraped)
        )
        compare("broker", "CPU s for a million records", [(a[0], b[0]) for a, b in pairs])
        rows.append(["broker", *shown([scraped[1] for scraped, _ in pairs])])
    if "pipeline" in asked.only:
        with running_pipeline(asked.seconds, asked.every) as measure:
            pairs = in_pairs(asked.rounds, measure)
        for place, name in enumerate(("driver", "all processes of the run")):
            compare(name, "CPU s for a second", [(a[0][place], b[0][place]) for a, b in pairs])
        rows.append(["pipeline", *shown([scraped[1] for scraped, _ in pairs])])
    table("what figures took", ["", "of one CPU", "of the process", "scrapes"], rows)


if __name__ == "__main__":
    main()
