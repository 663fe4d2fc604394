"""Time and CPU per batch of 1,000 events: stateless, one, two and three stateful stages.

Ours reads the log and commits into a view store, with two buckets as an app has them by default,
and with one; the peer is plain Structured Streaming over files of 1,000 events, upserting into
SQLite. "Bare" is a query of the shape of ours whose source and stages do next to nothing: what Spark
takes for itself. Batches follow one another without pause, so the time of one is the time from
commit to commit; CPU is that of all processes. All are given cold and once warm.

    python benchmarks/small_triggers.py [--batches 450] [--stages 0 1 2 3] [--scraped]

``--scraped`` compares parts of one run, in turn: 50 batches in which its metrics are scraped, and 50 in which they are not. A scrape
comes with every 15th batch, which is about each second on a quiet machine, so the comparison does not depend on how busy it is.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sqlite3
import statistics
import tempfile
import urllib.request
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa
from _measure import Meter, plain_spark, run_apart, table
from metrics_cost import free_port

CORES = 2
ROWS = 1_000
STAGES = ("stateless", "one stage", "two stages", "three stages")
SIDES = ("ours", "ours-one-bucket", "peer", "bare")
PART = 50  # batches that one figure is for
SCRAPED_EVERY = 15  # batches


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


def ours(folder: Path, stages: int, buckets: int = 4, *, scraped: bool = False) -> Meter:
    import millstream as ms

    shutil.rmtree(folder / "log" / "apps", ignore_errors=True)
    app = ms.App("bench", log=folder / "log", buckets=buckets)
    stream = app.topic("events", Event).stream(time="at", watermark=ms.watermark("2 seconds"))
    if stages == 0:
        stream.filter(pl.col("user") == 7).view("out", key="id")
    elif stages == 1:
        stream.window(ms.tumbling("10 seconds"), by="user").emit("update").agg(n=ms.count()).view(
            "out"
        )
    else:
        counts, by = stream.window(ms.tumbling("1 second"), by="user").agg(n=ms.count()), "n"
        if stages == 3:
            counts = counts.window(ms.tumbling("2 seconds"), by="n").agg(users=ms.count())
            by = "users"
        counts.window(ms.tumbling("10 seconds"), by=by).agg(m=ms.count()).view("out")
    meter, port = Meter(), free_port()

    def mark(_progress: object) -> None:
        meter.mark()
        batch = len(meter.marks)
        if scraped and batch // PART % 2 and batch % SCRAPED_EVERY == 0:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60).read()

    app.run(
        until="caught-up",
        cores=CORES,
        rows_per_batch=ROWS,
        on_progress=mark,
        metrics=f"127.0.0.1:{port}" if scraped else None,
    )
    return meter


def peer(folder: Path, stages: int) -> Meter:
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
        counts = (
            events.withWatermark("at", "2 seconds")
            .groupBy(F.window("at", "1 second"), "user")
            .agg(F.count("*").alias("n"))
        )
        if stages == 3:
            counts = counts.groupBy(F.window(F.window_time("window"), "2 seconds"), "n").agg(
                F.count("*").alias("users")
            )
        last = counts.groupBy(F.window(F.window_time("window"), "10 seconds"), counts.columns[-1])
        out, mode = last.count().select(F.unix_micros("window.start"), "*"), "append"
        out = out.drop("window")
    db = sqlite3.connect(folder / f"peer{stages}.db", check_same_thread=False, isolation_level=None)
    db.execute("PRAGMA journal_mode = WAL")
    db.execute("PRAGMA synchronous = FULL")
    db.execute("CREATE TABLE v (a, b, c, PRIMARY KEY (a, b))")
    meter = Meter()

    def upsert(frame, _batch_id):
        rows = frame.toArrow().to_pydict().values()
        db.execute("BEGIN")
        db.executemany("INSERT OR REPLACE INTO v VALUES (?, ?, ?)", zip(*rows, strict=True))
        db.execute("COMMIT")
        meter.mark()

    with tempfile.TemporaryDirectory() as checkpoint:
        (
            out.writeStream.outputMode(mode)
            .foreachBatch(upsert)
            .option("checkpointLocation", checkpoint)
            .trigger(availableNow=True)
            .start()
            .awaitTermination()
        )
    return meter


def run(side: str, folder: Path, stages: int, batches: int) -> Meter:
    if side == "bare":
        from _spark_baseline import bare

        return bare(folder, stages, batches, CORES)
    if side == "peer":
        return peer(folder, stages)
    return ours(folder, stages, 1 if side == "ours-one-bucket" else 4, scraped=side == "scraped")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--batches", type=int, default=450)
    parser.add_argument("--stages", type=int, nargs="+", default=[0, 1, 2, 3])
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=SIDES)
    parser.add_argument(
        "--scraped", action="store_true", help="what figures cost, and nothing else"
    )
    parser.add_argument("--contender", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.contender:
        side, folder, stages, batches = options.contender
        meter = run(side, Path(folder), int(stages), int(batches))
        print(json.dumps({"marks": meter.marks}))
        return
    with tempfile.TemporaryDirectory(prefix="millstream-bench-") as name:
        fill(Path(name), options.batches)
        if options.scraped:
            show_cost_of_figures(Path(name), options.stages, options.batches)
            return
        rows = []
        for stages in options.stages:
            for side in options.sides:
                marks = run_apart(__file__, side, name, stages, options.batches)["marks"]
                rows.append([STAGES[stages], side, *figures(marks[:PART]), *figures(marks[-PART:])])
    header = ["pipeline", "side", "first 50: p50 ms", "p90", "CPU ms", "last 50: p50 ms", "p90"]
    table(f"batches of {ROWS:,} events ({options.batches} batches)", [*header, "CPU ms"], rows)


def show_cost_of_figures(folder: Path, numbers: list[int], batches: int) -> None:
    """Show the CPU time of a batch in parts that are scraped, and in the parts before them, which are not."""
    rows = []
    for stages in numbers:
        marks = run_apart(__file__, "scraped", str(folder), stages, batches)["marks"]
        ends = [marks[number][1] for number in range(PART - 1, len(marks), PART)]
        cpu_ms = [(after - before) * 1000 / PART for before, after in pairwise(ends)]
        scraped, not_scraped = cpu_ms[::2], cpu_ms[1::2]
        pairs = [after / before for before, after in zip(not_scraped, scraped[1:], strict=False)]
        rows.append([STAGES[stages], *map(spread, (scraped, not_scraped, pairs))])
    header = ["pipeline", "scraped: CPU ms of a batch", "not scraped", "ratio of pairs"]
    table(f"{batches:,} batches of {ROWS:,} events, in parts of {PART}", header, rows)


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):.3g} ({min(values):.3g} to {max(values):.3g})"


def figures(marks: list[tuple[float, float]]) -> tuple[str, str, str]:
    """Median and 90th percentile of the time of a batch, and the mean of its CPU time."""
    took = [(after[0] - before[0]) * 1000 for before, after in pairwise(marks)]
    cpu_ms = (marks[-1][1] - marks[0][1]) * 1000 / len(took)
    p90 = statistics.quantiles(took, n=10)[-1]
    return f"{statistics.median(took):.0f}", f"{p90:.0f}", f"{cpu_ms:.0f}"


if __name__ == "__main__":
    main()
