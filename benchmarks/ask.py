"""Questions per second and their latency: one key out of a million, by 1 and by 8 clients, while the job commits and while it does not.

The job is a group for each key and a window of the keys, run in a process of its own without Spark: the same stages and
commits as a job's. Clients are processes; each has the program and asks in a closed loop, or asks one server over HTTP. The
latency is the client's. Each figure is taken ``--repeat`` times: the median, and the least and most.

    python benchmarks/ask.py [--keys 1000000] [--seconds 10] [--repeat 3]
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import tempfile
import time
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import polars as pl

import millstream as ms
from millstream.engine.local_run import LocalRun

FIRST = datetime(2026, 1, 1, tzinfo=UTC)
TOPIC, ROWS_PER_BATCH = "events", 20_000


@dataclass
class Event:
    key: int
    at: datetime


def declare(folder: Path) -> ms.App:
    app = ms.App("asked", log=folder)
    events = app.topic(TOPIC, Event, partitions=1).stream(time="at")
    events.group_by("key").agg(n=ms.count()).view("totals")
    events.window(ms.tumbling("1 day"), by="key").agg(n=ms.count()).view("days")
    return app


def send(folder: Path, keys: np.ndarray, first: int) -> None:
    ats = FIRST + timedelta(milliseconds=first)
    frame = pl.DataFrame({"key": keys, "at": [ats.isoformat()]})
    values = frame.select(pl.struct(pl.all()).struct.json_encode()).to_series().cast(pl.Binary)
    with ms.connect(folder) as log:
        log.create_topic(TOPIC, partitions=1, exist_ok=True)
        with log.producer() as producer:
            producer.send_many(TOPIC, values=values.to_arrow()).result()


def process_all(folder: Path, rows_per_batch: int) -> None:
    app = declare(folder)
    LocalRun(app.plan(), folder, app.folder, app.state_store, rows_per_batch=rows_per_batch).run()


def keep_running(folder: Path, keys: int, stop: object, batches: object) -> None:
    """Send and process batches of random keys until told to stop."""
    dice, first = np.random.default_rng(os.getpid()), 1_000_000
    while not stop.is_set():  # type: ignore[attr-defined]
        send(folder, dice.integers(0, keys, ROWS_PER_BATCH), first)
        process_all(folder, ROWS_PER_BATCH)
        first += 1
        with batches.get_lock():  # type: ignore[attr-defined]
            batches.value += 1  # type: ignore[attr-defined]


def client(
    folder: Path, url: str | None, step: str, keys: int, seconds: float, out: object
) -> None:
    dice, app, took = np.random.default_rng(os.getpid()), declare(folder), []
    began_cpu, ends = time.process_time(), 0.0
    while not took or time.perf_counter() < ends:
        key, began = int(dice.integers(0, keys)), time.perf_counter()
        if url is None:
            rows = app.ask(step, key=key, deadline="1 minute").rows.height
        else:
            rows = len(ms.ask(url, step, key=key, deadline="1 minute").value)
        took.append(time.perf_counter() - began)
        assert rows == 1, "every key is there"
        if not ends:  # the first opens everything
            took, ends = [0.0], time.perf_counter() + seconds
            began_cpu = time.process_time()
    out.put((took[1:], time.process_time() - began_cpu))  # type: ignore[attr-defined]


def measure(
    folder: Path, url: str | None, step: str, keys: int, clients: int, seconds: float
) -> tuple[float, ...]:
    """Return questions per second, p50 and p99 in milliseconds, and CPU of the clients per question, in milliseconds."""
    out = multiprocessing.Queue()
    asking = [
        multiprocessing.Process(target=client, args=(folder, url, step, keys, seconds, out))
        for _ in range(clients)
    ]
    for one in asking:
        one.start()
    found = [out.get() for _ in asking]
    for one in asking:
        one.join()
    took = np.concatenate([times for times, _ in found]) * 1000
    cpu = sum(cpu for _, cpu in found) * 1000 / len(took)
    return len(took) / seconds, *np.percentile(took, [50, 99]), cpu


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--keys", type=int, default=1_000_000)
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    multiprocessing.set_start_method("spawn")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        keys = np.random.default_rng(1).permutation(options.keys)
        for part in np.array_split(keys, max(1, options.keys // 200_000)):
            send(folder, part, 0)
        process_all(folder, 200_000)
        print(f"{options.keys:,} keys, load {os.getloadavg()[0]:.1f}")
        print(
            "job      way     step    clients  per second  p50 ms  p99 ms  CPU ms/question (clients)"
        )
        app = declare(folder)
        with app.serve_questions("127.0.0.1:0") as serving:
            for runs in (False, True):
                stop, batches = multiprocessing.Event(), multiprocessing.Value("i", 0)
                job = multiprocessing.Process(
                    target=keep_running, args=(folder, options.keys, stop, batches)
                )
                if runs:
                    job.start()
                for way, url in (("direct", None), ("http", serving.url)):
                    for step in ("totals", "days"):
                        for clients in (1, 8):
                            found = [
                                measure(folder, url, step, options.keys, clients, options.seconds)
                                for _ in range(options.repeat)
                            ]
                            shown = [
                                f"{statistics.median(f):.1f} ({min(f):.1f}-{max(f):.1f})"
                                for f in zip(*found, strict=True)
                            ]
                            state = "runs" if runs else "stands"
                            print(
                                f"{state:<8} {way:<7} {step:<7} {clients:>7}  {'  '.join(shown)}",
                                flush=True,
                            )
                if runs:
                    stop.set()
                    job.join()
                    print(
                        f"the job has committed {batches.value} batches of {ROWS_PER_BATCH:,} meanwhile"
                    )
        print(f"load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
