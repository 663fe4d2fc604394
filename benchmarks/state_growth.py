"""State as it grows: a batch of 20,000 random keys, a million random updates, and the memory.

One query loads keys up to each level in turn. At each level batches of 20,000 random keys are timed
over what is held; at ``--updates-at`` keys, batches of a million random keys as well. One window
holds all; after every batch each key that was touched comes out with its count, and is thrown away: by a function
that does nothing, on the driver, in ours, which is an app as any, by Spark's noop sink in the peer, a
plain windowed aggregation with RocksDB state. So reading, state and checkpoints are in the time. Ours is from
when the events are in the log to the batch's commit, the peer's what Spark says of its trigger. Memory is what all
processes of a side together hold (each page shared by several is counted once), with the
memory-mapped copies of runs, and with the feeder. The first level is "none": it is no more than a
batch.

    python benchmarks/state_growth.py [--keys 20000 1000000 10000000 50000000] [--batches 25]
"""

from __future__ import annotations

import argparse
import json
import queue
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa
from _measure import MemoryWatch, plain_spark, run_apart, spread, table, tree_cpu_s

CORES = 2
BATCH_KEYS = 20_000
LOAD_ROWS = 1_000_000
UPDATE_BATCHES = 12
WATCH_S = 5.0  # a look at the memory of gigabytes of mapped pages takes an eighth of a second


@dataclass
class Event:
    at: datetime
    k: int


@dataclass
class Level:
    """What was measured with so many keys held: milliseconds and CPU milliseconds per batch."""

    keys: int
    ms: list[float] = field(default_factory=list)
    cpu_ms: list[float] = field(default_factory=list)
    update_ms: list[float] = field(default_factory=list)
    update_cpu_ms: list[float] = field(default_factory=list)
    load_s: float = 0.0
    memory_mib: int = 0  # now, at the end of the level
    memory_mib_max: int = 0  # so far


def lines(keys: np.ndarray) -> pl.Series:
    """JSON for the keys, made as bytes in one go: this is the feeder, not what is measured."""
    made = pl.select(
        pl.concat_str(pl.lit('{"at":"2026-01-01T00:00:00Z","k":'), pl.Series(keys), pl.lit("}"))
    )
    return made.to_series()


def values(keys: np.ndarray) -> pa.Array:
    return lines(keys).to_arrow(compat_level=pl.CompatLevel.oldest()).cast(pa.binary())


@dataclass
class AppFeeder:
    """Feeds an app that runs batch by batch and waits for each commit."""

    commits: queue.Queue[int]
    send: Callable[[np.ndarray], None]

    def batch(self, keys: np.ndarray) -> tuple[float, float]:
        """Feed one batch; give its milliseconds and CPU milliseconds."""
        self.send(keys)
        cpu_s, began, left = tree_cpu_s(), time.monotonic(), len(keys)
        while left > 0:
            left -= self.commits.get(timeout=1800)
        return (time.monotonic() - began) * 1000, (tree_cpu_s() - cpu_s) * 1000


@dataclass
class Feeder:
    """Feeds a query of Spark's batch by batch and waits for each."""

    query: object
    send: Callable[[np.ndarray], None]
    seen: int = -1

    def batch(self, keys: np.ndarray) -> tuple[float, float]:
        """Feed one batch; give its trigger's milliseconds, and its CPU milliseconds."""
        self.send(keys)
        cpu_s = tree_cpu_s()
        progress = self._next()
        return progress.durationMs["triggerExecution"], (tree_cpu_s() - cpu_s) * 1000

    def _next(self):
        while True:
            progress = self.query.lastProgress
            if progress and progress.batchId > self.seen and progress.durationMs.get("addBatch"):
                self.seen = progress.batchId
                return progress
            if self.query.exception():
                sys.exit(str(self.query.exception()))
            time.sleep(0.02)


def measured(
    feeder: AppFeeder | Feeder, options: argparse.Namespace, levels: list[int]
) -> Iterator[Level]:
    """Load up to each level, and measure there."""
    dice, held, memory = np.random.default_rng(8), 0, MemoryWatch(WATCH_S)
    with memory:
        for keys in levels:
            level, began = Level(keys), time.monotonic()
            order = np.random.default_rng(7).permutation(np.arange(held, keys))
            for start in range(0, keys - held, LOAD_ROWS):
                feeder.batch(order[start : start + LOAD_ROWS])
            level.load_s = time.monotonic() - began
            for _ in range(0 if held else options.warm):  # the JVM compiles what runs often
                feeder.batch(dice.integers(0, keys, BATCH_KEYS))
            for _ in range(options.batches):
                took = feeder.batch(dice.integers(0, keys, BATCH_KEYS))
                level.ms.append(took[0])
                level.cpu_ms.append(took[1])
            for _ in range(UPDATE_BATCHES if keys == options.updates_at else 0):
                took = feeder.batch(dice.integers(0, keys, LOAD_ROWS))
                level.update_ms.append(took[0])
                level.update_cpu_ms.append(took[1])
            held = keys
            level.memory_mib, level.memory_mib_max = memory.now_mib(), memory.mib_max
            print(level, file=sys.stderr, flush=True)
            yield level


def discard(_rows: pl.DataFrame, _context: object) -> None:
    """Do nothing with the rows."""


def ours(folder: Path, options: argparse.Namespace) -> list[Level]:
    import millstream as ms

    app = ms.App("bench", log=folder / "log")
    stream = app.topic("events", Event, partitions=1).stream(time="at")
    windowed = stream.window(ms.tumbling("1000 days"), by="k").emit("update")
    windowed.agg(n=ms.count()).foreach(discard)
    commits: queue.Queue[int] = queue.Queue()
    ended = threading.Event()
    with ms.connect(folder / "log") as log, log.producer() as producer:
        log.create_topic("events", partitions=1)

        def send(keys: np.ndarray) -> None:
            producer.send_many("events", values=values(keys)).result()

        def run() -> None:
            app.run(
                until=lambda _: ended.is_set(),
                cores=CORES,
                rows_per_batch=LOAD_ROWS,
                show=False,
                on_progress=lambda progress: commits.put(progress.read),
            )

        running = threading.Thread(target=run)
        running.start()
        feeder = AppFeeder(commits, send)
        levels = list(measured(feeder, options, options.keys))
        ended.set()
        send(np.arange(1))  # the condition is asked for after a batch
        running.join()
    return levels


def peer(folder: Path, options: argparse.Namespace) -> list[Level]:
    from pyspark.sql import functions as F

    spark = plain_spark(CORES)
    files = folder / "files"
    files.mkdir()
    events = spark.readStream.schema("at timestamp, k long").json(str(files))
    counted = (
        events.withWatermark("at", "0 seconds").groupBy(F.window("at", "1000 days"), "k").count()
    )
    query = start(counted, folder / "peer-checkpoint", "update")
    number = iter(range(1_000_000))

    def send(keys: np.ndarray) -> None:
        name = f"{next(number):06}.json"
        lines(keys).to_frame().write_csv(folder / name, include_header=False, quote_style="never")
        (folder / name).rename(files / name)

    levels = [keys for keys in options.keys if keys <= options.peer_keys_max]
    return list(measured(Feeder(query, send), options, levels))


def start(frame, checkpoint: Path | str, mode: str):
    writer = frame.writeStream.format("noop").outputMode(mode)
    return writer.option("checkpointLocation", str(checkpoint)).start()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    default = [BATCH_KEYS, 1_000_000, 10_000_000, 50_000_000]
    parser.add_argument("--keys", type=int, nargs="+", default=default)
    parser.add_argument("--batches", type=int, default=25)
    parser.add_argument("--warm", type=int, default=60, help="batches before the first timed one")
    parser.add_argument("--updates-at", type=int, default=10_000_000)
    parser.add_argument("--peer-keys-max", type=int, default=10_000_000)
    parser.add_argument("--contender", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.contender:
        engine, folder = options.contender
        levels = {"ours": ours, "peer": peer}[engine](Path(folder), options)
        print(json.dumps({"levels": [asdict(level) for level in levels]}))
        return
    given = sys.argv[1:]
    with tempfile.TemporaryDirectory(prefix="millstream-bench-") as folder:
        found = {
            engine: [
                Level(**each) for each in run_apart(__file__, engine, folder, *given)["levels"]
            ]
            for engine in ("ours", "peer")
        }
    show(found)


def show(found: dict[str, list[Level]]) -> None:
    rows, updates, memory = [], [], []
    for engine, levels in found.items():
        for level in levels:
            middle = statistics.median(level.ms)
            more = middle - statistics.median(levels[0].ms)
            cpu = statistics.median(level.cpu_ms)
            more_cpu = cpu - statistics.median(levels[0].cpu_ms)
            keys = f"{level.keys:,}"
            rows.append(
                [
                    engine,
                    keys,
                    f"{middle:.0f}",
                    f"{more:+.0f}",
                    f"{max(level.ms):.0f}",
                    f"{cpu:.0f}",
                    f"{more_cpu:+.0f}",
                ]
            )
            memory.append(
                [
                    engine,
                    keys,
                    f"{level.memory_mib:,}",
                    f"{level.memory_mib_max:,}",
                    f"{level.load_s:.0f}",
                ]
            )
            if level.update_ms:
                rates = [LOAD_ROWS / ms / 1000 for ms in level.update_ms]
                sustained = LOAD_ROWS / statistics.mean(level.update_ms) / 1000
                spent = statistics.mean(level.update_cpu_ms) / 1000
                updates.append([engine, keys, f"{sustained:.2f}", spread(rates, 2), f"{spent:.2f}"])
    header = ["side", "keys held", "p50 ms", "more", "max", "CPU ms p50", "more"]
    table(f"batches of {BATCH_KEYS:,} random keys", header, rows)
    header = ["side", "keys held", "million updates/s", "by batch", "CPU s per million"]
    table(f"batches of {LOAD_ROWS:,} random keys", header, updates)
    header = ["side", "keys held", "MiB of all processes", "most so far", "s to load"]
    table("memory", header, memory)


if __name__ == "__main__":
    main()
