"""Questions per second and their latency: one key out of a million, by 1 and by 8 clients, while the job commits and while it does not.

The job is a group for each key and a window of the keys, run in a process of its own without Spark: the same stages and
commits as a job's. Clients are processes; each has the program and asks in a closed loop, or asks one server over HTTP. The
latency is the client's. Each figure is taken ``--repeat`` times: the median, and the least and most.

Then requests of a topic, in one batch: of the group, and of a function that reads it, beside a job that passes them on.

    python benchmarks/ask.py [--keys 1000000] [--seconds 10] [--repeat 3] [--requests 20000]
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
from typing import Any

import numpy as np
import polars as pl

import millstream as ms
from millstream.engine.local_run import LocalRun

FIRST = datetime(2026, 1, 1, tzinfo=UTC)
TOPIC, REQUESTS, ROWS_PER_BATCH = "events", "requests", 20_000


@dataclass
class Event:
    key: int
    at: datetime


def declare(folder: Path, asked: str | None = None) -> ms.App:
    """Declare the app; with requests for something, or for "nothing": then they are passed on."""
    app = ms.App("asked", log=folder)
    events = app.topic(TOPIC, Event).stream(time="at")
    events.group_by("key").agg(n=ms.count()).view("totals")
    events.window(ms.tumbling("1 day"), by="key").agg(n=ms.count()).view("days")

    @app.question("function")
    def function(state: ms.StateReader, key: int) -> int:
        return int(state.rows("totals", key=key)["n"].sum())

    if asked is not None:
        requests = app.topic(REQUESTS, {"id": int, "key": int}, key="id").stream()
        if asked == "nothing":
            requests.to("answers", key="id")
        else:
            requests.answer(asked, id="id", to="answers", deadline="1 minute")
    return app


def send(folder: Path, keys: np.ndarray, first: int) -> None:
    ats = FIRST + timedelta(milliseconds=first)
    frame = pl.DataFrame({"key": keys}).with_columns(at=pl.lit(ats.isoformat()))
    values = frame.select(pl.struct(pl.all()).struct.json_encode()).to_series().cast(pl.Binary)
    with ms.connect(folder) as log:
        log.create_topic(TOPIC, exist_ok=True)
        with log.producer() as producer:
            producer.send_many(TOPIC, values=values.to_arrow()).result()


def process_all(folder: Path, rows_per_batch: int, asked: str | None = None) -> None:
    app = declare(folder, asked)
    LocalRun(app.plan(), folder, app.folder, app.state_store, rows_per_batch=rows_per_batch).run()


def keep_running(folder: Path, keys: int, stop: Any, batches: Any) -> None:
    """Send and process batches of random keys until told to stop."""
    dice, first = np.random.default_rng(os.getpid()), 1_000_000
    while not stop.is_set():
        send(folder, dice.integers(0, keys, ROWS_PER_BATCH), first)
        process_all(folder, ROWS_PER_BATCH)
        first += 1
        with batches.get_lock():
            batches.value += 1


@dataclass(frozen=True)
class Load:
    """What the clients do: ``slices`` times for so many seconds, with a pause between."""

    folder: Path
    url: str | None
    step: str
    keys: int
    seconds: float
    slices: int


def client(load: Load, together: Any, out: Any) -> None:
    dice, app = np.random.default_rng(os.getpid()), declare(load.folder)

    def ask() -> None:
        key = int(dice.integers(0, load.keys))
        if load.url is None:
            rows = app.ask(load.step, key=key, deadline="1 minute").rows.height
        else:
            rows = len(ms.ask(load.url, load.step, key=key, deadline="1 minute").value)
        assert rows == 1, "every key is there"

    ask()  # the first opens everything
    for number in range(load.slices):
        together.wait()
        took, cpu, ends = [], time.process_time(), time.perf_counter() + load.seconds
        while (began := time.perf_counter()) < ends:
            ask()
            took.append(time.perf_counter() - began)
        out.put((number, took, time.process_time() - cpu))


def measure(load: Load, clients: int) -> list[tuple[float, ...]]:
    """Return of each slice questions per second, p50 and p99 in milliseconds, and CPU of the clients per question."""
    out, together = multiprocessing.Queue(), multiprocessing.Barrier(clients)
    asking = [
        multiprocessing.Process(target=client, args=(load, together, out)) for _ in range(clients)
    ]
    for one in asking:
        one.start()
    found = [out.get() for _ in range(clients * load.slices)]
    for one in asking:
        one.join()
    slices = []
    for number in range(load.slices):
        own = [(took, cpu) for which, took, cpu in found if which == number]
        took = np.concatenate([some for some, _ in own]) * 1000
        cpu_ms = sum(cpu for _, cpu in own) * 1000 / len(took)
        slices.append((len(took) / load.seconds, *np.percentile(took, [50, 99]), cpu_ms))
    return slices


def measure_requests(keys: np.ndarray, asked: str, count: int, repeat: int) -> list[float]:
    """Return the CPU of a job per request in milliseconds, of each batch of so many."""
    dice, found = np.random.default_rng(2), []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for part in np.array_split(keys, max(1, len(keys) // 200_000)):
            send(folder, part, 0)
        with ms.connect(folder) as log:
            log.create_topic(REQUESTS)
        process_all(folder, 200_000, asked)
        for _ in range(repeat):
            with ms.connect(folder) as log, log.producer() as producer:
                for number, key in enumerate(dice.integers(0, len(keys), count).tolist()):
                    producer.send(REQUESTS, {"id": number, "key": key})
            began = time.process_time()
            process_all(folder, count, asked)
            found.append((time.process_time() - began) * 1000 / count)
        with ms.connect(folder) as log:
            ends = [end for _, end in log.offsets("answers")]
        assert sum(ends) >= repeat * count, "each has an answer"
    return found


def show_requests(keys: np.ndarray, count: int, repeat: int) -> None:
    print(f"{count:,} requests of a topic in a batch: CPU ms/request of the whole job")
    for asked in ("nothing", "totals", "function"):
        found = measure_requests(keys, asked, count, repeat)
        print(f"{asked:<9} {statistics.median(found):.4f} ({min(found):.4f}-{max(found):.4f})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--keys", type=int, default=1_000_000)
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--requests", type=int, default=20_000)
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
                            load = Load(
                                folder, url, step, options.keys, options.seconds, options.repeat
                            )
                            found = measure(load, clients)
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
        show_requests(keys, options.requests, options.repeat)
        print(f"load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
