"""Time per batch of 20,000 random keys, over 10 thousand, 1 million and 10 million keys in state.

One window holds all; after every batch each key that was touched comes out with its count. Both
sides write to Spark's noop sink, so that only reading, state and checkpoints are in the time: ours
through ``to_spark()``, the peer as a plain windowed aggregation with RocksDB state.

    python benchmarks/state_growth.py [--keys 10000 1000000 10000000] [--batches 25]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import numpy as np
import pyarrow as pa
from _measure import plain_spark, run_apart, table

CORES = 2
BATCH_KEYS = 20_000
LOAD_ROWS = 1_000_000
AT = b'{"at":"2026-01-01T00:00:00Z","k":'


@dataclass
class Event:
    at: datetime
    k: int


def values(keys: np.ndarray) -> pa.Array:
    """JSON values for the keys, made as bytes: this is the feeder, not what is measured."""
    return pa.array([AT + str(key).encode() + b"}" for key in keys.tolist()], pa.binary())


def batches(keys: int, count: int):
    """Yield the keys of every batch: each key once to load the state, then random ones."""
    order = np.random.default_rng(7).permutation(keys)
    for start in range(0, keys, LOAD_ROWS):
        yield order[start : start + LOAD_ROWS]
    dice = np.random.default_rng(8)
    for _ in range(count):
        yield dice.integers(0, keys, BATCH_KEYS)


def ours(folder: Path, keys: int, count: int) -> list[float]:
    import millstream as ms

    app = ms.App("bench", log=folder / "log")
    stream = app.topic("events", Event, partitions=1).stream(time="at")
    windowed = stream.window(ms.tumbling("1000 days"), by="k").emit("update")
    frame = windowed.agg(n=ms.count()).to_spark()
    query = start(frame, folder / "ours-checkpoint", "append")
    with ms.connect(folder / "log") as log, log.producer() as producer:

        def feed(batch: np.ndarray) -> None:
            producer.send_many("events", values=values(batch)).result()

        return timed(query, feed, keys, count)


def peer(folder: Path, keys: int, count: int) -> list[float]:
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

    def feed(batch: np.ndarray) -> None:
        name = f"{next(number):06}.json"
        (folder / name).write_bytes(b"\n".join(v.as_py() for v in values(batch)))
        (folder / name).rename(files / name)

    return timed(query, feed, keys, count)


def start(frame, checkpoint: Path, mode: str):
    writer = frame.writeStream.format("noop").outputMode(mode)
    return writer.option("checkpointLocation", str(checkpoint)).start()


def timed(query, feed, keys: int, count: int) -> list[float]:
    """Feed batch by batch; give the trigger times of the random ones, in milliseconds."""
    times: list[float] = []
    seen = -1
    for batch in batches(keys, count):
        feed(batch)
        progress = query.lastProgress
        while (
            progress is None or progress.batchId <= seen or not progress.durationMs.get("addBatch")
        ):
            if query.exception():
                sys.exit(str(query.exception()))
            time.sleep(0.005)
            progress = query.lastProgress
        seen = progress.batchId
        times.append(progress.durationMs["triggerExecution"])
    query.stop()
    return times[-count:]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--keys", type=int, nargs="+", default=[10_000, 1_000_000, 10_000_000])
    parser.add_argument("--batches", type=int, default=25)
    parser.add_argument("--engine", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.engine:
        engine, folder, keys, count = options.engine
        run = {"ours": ours, "peer": peer}[engine]
        print(json.dumps({"ms": run(Path(folder), int(keys), int(count))}))
        return
    rows = []
    for keys in options.keys:
        with tempfile.TemporaryDirectory(prefix="millstream-bench-") as folder:
            found = [
                run_apart(__file__, engine, folder, keys, options.batches)["ms"]
                for engine in ("ours", "peer")
            ]
        half = [part[len(part) // 2 :] for part in found]  # the JVM is warmer in the second half
        (a, b) = (statistics.median(part) for part in half)
        rows.append(
            [
                f"{keys:,}",
                f"{a:.0f}",
                f"{max(half[0]):.0f}",
                f"{b:.0f}",
                f"{max(half[1]):.0f}",
                f"{b / a:.2f}",
            ]
        )
    header = ["keys held", "ours p50 ms", "max", "peer p50 ms", "max", "peer / ours"]
    table(f"time per batch of {BATCH_KEYS:,} random keys ({options.batches} batches)", header, rows)


if __name__ == "__main__":
    main()
