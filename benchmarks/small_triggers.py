"""Time per batch of 1,000 events: stateless, one stateful stage and two; cold, and once warm.

Ours reads the log and commits into a view store; the peer is plain Structured Streaming over files
of 1,000 events, upserting into SQLite. Batches follow one another without pause, so the time of one
is the time from commit to commit.

    python benchmarks/small_triggers.py [--batches 450]
"""

from __future__ import annotations

import argparse
import json
import shutil
import sqlite3
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa
from _measure import plain_spark, run_apart, table

CORES = 2
ROWS = 1_000
STAGES = ("stateless", "one stage", "two stages")


@dataclass
class Event:
    id: str
    at: datetime
    user: int


def values(batch: int) -> pa.Array:
    dice = np.random.default_rng(batch)
    number = np.arange(batch * ROWS, (batch + 1) * ROWS)
    frame = pl.DataFrame(
        {
            "id": pl.Series(number).cast(pl.String),
            "at": pl.Series(1_767_225_600_000_000 + number * 1000)
            .cast(pl.Datetime("us"))
            .dt.strftime("%Y-%m-%dT%H:%M:%S%.6fZ"),
            "user": dice.integers(0, 100, ROWS),
        }
    )
    lines = frame.select(pl.struct(pl.all()).struct.json_encode()).to_series()
    return lines.to_arrow(compat_level=pl.CompatLevel.oldest()).cast(pa.binary())


def fill(folder: Path, batches: int) -> None:
    import millstream as ms

    (folder / "files").mkdir()
    with ms.connect(folder / "log") as log, log.producer() as producer:
        log.create_topic("events", partitions=1)
        for batch in range(batches):
            lines = values(batch)
            producer.send_many("events", values=lines)
            (folder / "files" / f"{batch:06}.json").write_bytes(
                b"\n".join(v.as_py() for v in lines)
            )


def ours(folder: Path, stages: int) -> list[float]:
    import millstream as ms

    shutil.rmtree(folder / "log" / "apps", ignore_errors=True)
    app = ms.App("bench", log=folder / "log")
    stream = app.topic("events", Event).stream(time="at", watermark=ms.watermark("2 seconds"))
    if stages == 0:
        stream.filter(pl.col("user") == 7).view("out", key="id")
    elif stages == 1:
        stream.window(ms.tumbling("10 seconds"), by="user").emit("update").agg(n=ms.count()).view(
            "out"
        )
    else:
        first = stream.window(ms.tumbling("1 second"), by="user").agg(n=ms.count())
        first.window(ms.tumbling("10 seconds"), by="n").agg(users=ms.count()).view("out")
    marks: list[float] = []
    app.run(
        until="caught-up",
        cores=CORES,
        rows_per_batch=ROWS,
        on_progress=lambda _: marks.append(time.monotonic()),
    )
    return marks


def peer(folder: Path, stages: int) -> list[float]:
    from pyspark.sql import functions as F

    spark = plain_spark(CORES)
    events = (
        spark.readStream.schema("id string, at timestamp, user long")
        .option("maxFilesPerTrigger", 1)
        .json(str(folder / "files"))
    )
    if stages == 0:
        out, mode = events.where("user = 7").select("id", F.unix_micros("at"), "user"), "append"
    elif stages == 1:
        counted = (
            events.withWatermark("at", "2 seconds")
            .groupBy(F.window("at", "10 seconds"), "user")
            .count()
        )
        out, mode = counted.select(F.unix_micros("window.start"), "user", "count"), "update"
    else:
        first = (
            events.withWatermark("at", "2 seconds")
            .groupBy(F.window("at", "1 second"), "user")
            .agg(F.count("*").alias("n"))
        )
        second = first.groupBy(F.window(F.window_time("window"), "10 seconds"), "n").count()
        out, mode = second.select(F.unix_micros("window.start"), "n", "count"), "append"
    db = sqlite3.connect(folder / f"peer{stages}.db", check_same_thread=False, isolation_level=None)
    db.execute("PRAGMA journal_mode = WAL")
    db.execute("PRAGMA synchronous = FULL")
    db.execute("CREATE TABLE v (a, b, c, PRIMARY KEY (a, b))")
    marks: list[float] = []

    def upsert(frame, _batch_id):
        rows = frame.toArrow().to_pydict().values()
        db.execute("BEGIN")
        db.executemany("INSERT OR REPLACE INTO v VALUES (?, ?, ?)", zip(*rows, strict=True))
        db.execute("COMMIT")
        marks.append(time.monotonic())

    with tempfile.TemporaryDirectory() as checkpoint:
        (
            out.writeStream.outputMode(mode)
            .foreachBatch(upsert)
            .option("checkpointLocation", checkpoint)
            .trigger(availableNow=True)
            .start()
            .awaitTermination()
        )
    return marks


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--batches", type=int, default=450)
    parser.add_argument("--engine", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.engine:
        engine, folder, stages = options.engine
        marks = {"ours": ours, "peer": peer}[engine](Path(folder), int(stages))
        durations = [(after - before) * 1000 for before, after in pairwise(marks)]
        print(json.dumps({"ms": durations}))
        return
    rows = []
    with tempfile.TemporaryDirectory(prefix="millstream-bench-") as name:
        fill(Path(name), options.batches)
        for stages, title in enumerate(STAGES):
            found = {
                engine: run_apart(__file__, engine, name, stages)["ms"]
                for engine in ("ours", "peer")
            }
            for label, part in (("first 50", slice(0, 50)), ("last 50", slice(-50, None))):
                a, b = (quartiles(found[engine][part]) for engine in ("ours", "peer"))
                rows.append([title, label, *a[1:], *b[1:], f"{b[0] / a[0]:.2f}"])
    header = ["pipeline", "batches", "ours p50 ms", "p90", "peer p50 ms", "p90", "peer / ours"]
    table(f"time per batch of {ROWS:,} events ({options.batches} batches)", header, rows)
    sys.stdout.flush()


def quartiles(values: list[float]) -> tuple[float, str, str]:
    middle = statistics.median(values)
    return middle, f"{middle:.0f}", f"{statistics.quantiles(values, n=10)[-1]:.0f}"


if __name__ == "__main__":
    main()
