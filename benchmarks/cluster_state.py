"""A job with large state on a cluster whose state is in S3: beside a laptop, and beside plain Structured Streaming.

    python benchmarks/cluster_state.py [--keys 1000000] [--sides laptop ours-2 ours-4 peer-2 peer-4]

One window counts events by key. Batches of ``--rows`` load ``--keys`` keys; then come batches of as many random keys, and
small ones of 1,000. Sides: "laptop" is an app on this machine with its state in a folder; "ours" the same app on a
standalone cluster with so many executors of one core, its state in S3; "peer" a plain windowed aggregation on such a
cluster, with RocksDB state, changelog checkpoints in the same S3 (by S3A: give a folder with the jars of ``hadoop-aws`` by
``--s3a``), and as many shuffle partitions as executors. Input is JSON: in the log, or in files. Each side is a process of its own, with an S3
server (versitygw) on loopback. What a key has counted is thrown away.

Executors are pinned by ``taskset``, one after the other to each core of this machine. Where there are more executors than
cores, several share one: then rows per second say nothing of more machines, and rows per CPU-second what it
costs to divide the work further. CPU is that of all processes, driver and S3 server included. Times of ours are
from when the events are in the log to the commit; the peer's are what Spark says of its trigger.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import statistics
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "spark"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import numpy as np
from _measure import plain_spark, run_apart, spread, table
from clusters import DEPLOY, Cluster
from s3_server import SECRET, USER, environment, s3_server
from state_growth import AppFeeder, Event, Feeder, discard, lines, start, values

import millstream as ms
from millstream.testing.postgres import PostgresServer

SMALL_ROWS = 1_000
SIDES = ("laptop", "ours-2", "ours-4", "peer-2", "peer-4")
NAMES = ("one", "two", "three", "four")
SETTINGS = {
    "spark.driver.host": "127.0.0.1",
    "spark.executor.memory": "1g",
    "spark.scheduler.minRegisteredResourcesRatio": "1.0",
    "spark.scheduler.maxRegisteredResourcesWaitingTime": "120s",
}


@dataclass
class Phase:
    """Batches of one kind: rows, milliseconds and CPU milliseconds of each, and requests to S3, if they are known."""

    name: str
    rows: int = 0
    ms: list[float] = field(default_factory=list)
    cpu_ms: list[float] = field(default_factory=list)
    requests: list[dict[str, int]] = field(default_factory=list)


class PinnedCluster(Cluster):
    """A cluster whose workers have a core each, or share one; with the JVM's own compilers."""

    def worker(self, name):
        core = NAMES.index(name) % (os.cpu_count() or 1)
        size = ("--cores", "1", "--memory", "1g", "--work-dir", str(self.folder / name))
        here = ("--host", "127.0.0.1", *self.at(0, 0))
        return self.start(
            name,
            f"{DEPLOY}.worker.Worker",
            *here,
            *size,
            self.master,
            inside=("taskset", "--cpu-list", str(core)),
            environment={**self.environment, "JDK_JAVA_OPTIONS": ""},
        )


def open_cluster(folder: Path, executors: int, opened: ExitStack) -> str:
    """Start a cluster; return its address."""
    folder.mkdir()
    cluster = PinnedCluster(folder, opened)
    for name in NAMES[2:executors]:
        cluster.worker(name)
    cluster.wait_for(executors)
    return cluster.master


def measured(feeder: AppFeeder | Feeder, options: argparse.Namespace, requests) -> Iterator[Phase]:
    """Run the batches of all kinds. ``requests()`` returns those of the last batch."""
    dice = np.random.default_rng(8)
    order = np.random.default_rng(7).permutation(options.keys)
    loads = [order[at : at + options.rows] for at in range(0, options.keys, options.rows)]
    kinds = {
        "load": loads,
        "update": [dice.integers(0, options.keys, options.rows) for _ in range(options.updates)],
        "warm": [dice.integers(0, options.keys, SMALL_ROWS) for _ in range(options.warm)],
        "small": [dice.integers(0, options.keys, SMALL_ROWS) for _ in range(options.batches)],
    }
    for name, batches in kinds.items():
        phase = Phase(name, len(batches[0]))
        for keys in batches:
            took_ms, cpu_ms = feeder.batch(keys)
            phase.ms.append(took_ms)
            phase.cpu_ms.append(cpu_ms)
            phase.requests.append(requests())
        print(name, [f"{each:.0f}" for each in phase.ms], file=sys.stderr, flush=True)
        yield phase


def ours(folder: Path, options: argparse.Namespace, master: str | None, cores: int) -> list[Phase]:
    place = {} if master is None else {"state": "s3://bucket/state", "local": folder / "local"}
    if master is not None and options.postgres:
        place["store"] = os.environ["BENCH_STORE"]
    app = ms.App("bench", log=folder / "log", buckets=4, **place)
    stream = app.topic("events", Event, partitions=1).stream(time="at")
    windowed = stream.window(ms.tumbling("1000 days"), by="k").emit("update")
    windowed.agg(n=ms.count()).foreach(discard)
    commits: queue.Queue[int] = queue.Queue()
    said, ended = [{}], threading.Event()

    def on_progress(progress) -> None:
        said.append(dict(progress.object_store))
        commits.put(progress.read)

    def run() -> None:
        app.run(
            until=lambda _: ended.is_set(),
            master=master,
            cores=cores,
            rows_per_batch=options.rows,
            show=False,
            on_progress=on_progress,
            settings={} if master is None else SETTINGS,
        )

    with ms.connect(folder / "log") as log, log.producer() as producer:
        log.create_topic("events", partitions=1)

        def send(keys: np.ndarray) -> None:
            producer.send_many("events", values=values(keys)).result()

        running = threading.Thread(target=run)
        running.start()
        phases = list(measured(AppFeeder(commits, send), options, lambda: said[-1]))
        ended.set()
        send(np.arange(1))  # the condition is asked for after a batch
        running.join()
    return phases


def peer(folder: Path, options: argparse.Namespace, master: str, cores: int) -> list[Phase]:
    from pyspark.sql import functions as F

    s3a = "spark.hadoop.fs.s3a"
    settings = SETTINGS | {
        "spark.jars": ",".join(map(str, sorted(Path(options.s3a).glob("*.jar")))),
        f"{s3a}.endpoint": os.environ["AWS_ENDPOINT_URL"],
        f"{s3a}.endpoint.region": "us-east-1",
        f"{s3a}.path.style.access": "true",
        f"{s3a}.access.key": USER,
        f"{s3a}.secret.key": SECRET,
        f"{s3a}.input.stream.type": "classic",
    }
    spark = plain_spark(cores, master=master, settings=settings)
    files = folder / "files"
    files.mkdir()
    events = spark.readStream.schema("at timestamp, k long").json(str(files / "*"))
    keyed = events.withWatermark("at", "0 seconds").groupBy(F.window("at", "1000 days"), "k")
    query = start(keyed.count(), "s3a://bucket/peer", "update")
    number = iter(range(1_000_000))

    def send(keys: np.ndarray) -> None:
        """Give a file to each executor, all at once: a small file of lines is read by one task."""
        made = folder / f"{next(number):06}"
        made.mkdir()
        for core, part in enumerate(np.array_split(keys, cores)):
            to = made / f"{core}.json"
            lines(part).to_frame().write_csv(to, include_header=False, quote_style="never")
        made.rename(files / made.name)

    return list(measured(Feeder(query, send), options, dict))


def run_side(side: str, folder: Path, options: argparse.Namespace) -> list[Phase]:
    engine, _, executors = side.partition("-")
    if engine == "laptop":
        return ours(folder, options, None, 2)
    with ExitStack() as opened:
        (folder / "s3").mkdir()
        port = opened.enter_context(s3_server(folder / "s3", "bucket"))
        os.environ |= environment(port) | {"MILLSTREAM_CACHE": str(folder / "cache")}
        if options.postgres:
            server = opened.enter_context(PostgresServer(fsync="on"))
            os.environ["BENCH_STORE"] = server.url()
        master = open_cluster(folder / "cluster", int(executors), opened)
        return {"ours": ours, "peer": peer}[engine](folder, options, master, int(executors))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--keys", type=int, default=1_000_000)
    parser.add_argument("--rows", type=int, default=500_000, help="of a large batch")
    parser.add_argument("--updates", type=int, default=4, help="large batches of random keys")
    parser.add_argument("--warm", type=int, default=30, help="small batches that do not count")
    parser.add_argument("--batches", type=int, default=20, help="small batches that count")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument(
        "--postgres", action="store_true", help="ours with its state store in PostgreSQL"
    )
    parser.add_argument("--s3a", help="folder with the jars of hadoop-aws, for the peer")
    parser.add_argument("--contender", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.contender:
        side, folder = options.contender
        print(
            json.dumps({"phases": [asdict(each) for each in run_side(side, Path(folder), options)]})
        )
        return
    if options.s3a is None and any(side.startswith("peer") for side in options.sides):
        parser.error("the peer wants --s3a; or leave it out: --sides laptop ours-2 ours-4")
    found = {}
    for side in options.sides:
        with tempfile.TemporaryDirectory(prefix="millstream-bench-") as folder:
            phases = run_apart(__file__, side, folder, *sys.argv[1:])["phases"]
            found[side] = [Phase(**each) for each in phases]
    show(found)


def show(found: dict[str, list[Phase]]) -> None:
    rows = []
    for side, phases in found.items():
        for phase in phases:
            rate = phase.rows / statistics.median(phase.ms) * 1000
            per_cpu_s = phase.rows / statistics.median(phase.cpu_ms) * 1000
            names = {name: None for each in phase.requests for name in each if name != "wait_us"}
            asked = ", ".join(f"{median_of(phase, name):,.0f} {name}" for name in names)
            waited = f"{store_wait_ms(phase):,.1f}" if names else ""
            times = [spread(each, 0) for each in (phase.ms, phase.cpu_ms)]
            rates = [f"{rate:,.0f}", f"{per_cpu_s:,.0f}"]
            rows.append([side, phase.name, *times, *rates, waited, asked])
    header = [
        "side",
        "batches",
        "ms",
        "CPU ms",
        "rows/s",
        "rows per CPU s",
        "S3 ms",
        "S3, of a batch",
    ]
    table("median of a batch (range); S3 ms: waiting for its answers", header, rows)
    small = {
        side: phase for side, phases in found.items() for phase in phases if phase.name == "small"
    }
    if "laptop" in small:
        laptop_ms = statistics.median(small["laptop"].ms)
        for side in (side for side in small if side.startswith("ours")):
            took_ms, waited_ms = statistics.median(small[side].ms), store_wait_ms(small[side])
            print(
                f"A small batch of {side} takes {took_ms:.0f} ms, {waited_ms:.1f} of them waiting for S3: the rest is "
                f"{(took_ms - waited_ms) / laptop_ms:.2f} times the laptop's {laptop_ms:.0f} ms."
            )


def median_of(phase: Phase, name: str) -> float:
    return statistics.median(each.get(name, 0) for each in phase.requests)


def store_wait_ms(phase: Phase) -> float:
    """For how long a batch waits for the object store; that of all tasks, where it has several."""
    return median_of(phase, "wait_us") / 1000


if __name__ == "__main__":
    main()
