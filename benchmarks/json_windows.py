"""Five million JSON events, from the log to a windowed view, beside plain Structured Streaming.

Both count impressions and clicks and sum the cost per ad and minute, and upsert what changed into
SQLite after every batch. Ours reads the log; the peer reads the same JSON values from text files,
with RocksDB state and as many shuffle partitions as cores. Equal results are checked first.

    python benchmarks/json_windows.py [--events 5000000] [--batch 250000] [--pairs 3]
"""

from __future__ import annotations

import argparse
import json
import shutil
import sqlite3
import statistics
import sys
import tempfile
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa
from _measure import Meter, plain_spark, run_apart, spread, table

CORES = 2
ADS = 500


@dataclass
class AdEvent:
    event_id: str
    kind: str
    at: datetime
    campaign: str
    ad: int
    user: str
    cost: int


def values(count: int, start: int) -> pa.Array:
    """Make events ``[start, start + count)``, 1,000 a second, up to 20 s out of order."""
    dice = np.random.default_rng(start)
    number = np.arange(start, start + count)
    at_us = 1_767_225_600_000_000 + number * 1000 - dice.integers(0, 20_000_000, count)
    frame = pl.DataFrame(
        {
            "event_id": pl.Series(number).cast(pl.String),
            "kind": np.where(dice.random(count) < 0.05, "click", "impression"),
            "at": pl.Series(at_us).cast(pl.Datetime("us")).dt.strftime("%Y-%m-%dT%H:%M:%S%.6fZ"),
            "campaign": dice.choice(["all", "men", "women"], count),
            "ad": dice.zipf(1.3, count) % ADS,
            "user": pl.Series(dice.integers(0, 1_000_000, count)).cast(pl.String),
            "cost": dice.integers(0, 5000, count),
        }
    )
    lines = frame.select(pl.struct(pl.all()).struct.json_encode()).to_series()
    return lines.to_arrow(compat_level=pl.CompatLevel.oldest()).cast(pa.binary())


def fill(folder: Path, events: int, batch: int) -> None:
    """Write the same values to a log and to text files, ``batch`` a file."""
    import millstream as ms

    files = folder / "files"
    files.mkdir()
    with ms.connect(folder / "log") as log, log.producer() as producer:
        log.create_topic("events", partitions=4)
        for start in range(0, events, batch):
            lines = values(min(batch, events - start), start)
            producer.send_many("events", values=lines)
            text = b"\n".join(value.as_py() for value in lines)
            (files / f"{start:012}.json").write_bytes(text)


def ours(folder: Path, batch: int) -> dict:
    import millstream as ms

    shutil.rmtree(folder / "log" / "apps", ignore_errors=True)
    meter = Meter()
    meter.mark()
    app = ms.App("bench", log=folder / "log")
    stream = app.topic("events", AdEvent).stream(
        time="at", watermark=ms.watermark("30 seconds", idle=None)
    )
    counted = stream.window(ms.tumbling("1 minute"), by="ad").emit("update")
    counted.agg(
        shown=ms.count(pl.col("kind") == "impression"),
        clicked=ms.count(pl.col("kind") == "click"),
        cost=ms.sum("cost"),
    ).view("by_ad")
    app.run(
        until="caught-up", cores=CORES, rows_per_batch=batch, on_progress=lambda _: meter.mark()
    )
    rows = ms.view("by_ad", log=folder / "log").scan().drop("window_end")
    rows.sort("window_start", "ad").write_parquet(folder / "ours.parquet")
    return result(meter)


def peer(folder: Path, batch: int) -> dict:  # noqa: ARG001 - the files hold a batch each
    from pyspark.sql import functions as F

    meter = Meter()
    meter.mark()
    spark = plain_spark(CORES)
    schema = "event_id string, kind string, at timestamp, campaign string, ad long, user string, cost long"
    events = (
        spark.readStream.schema(schema).option("maxFilesPerTrigger", 1).json(str(folder / "files"))
    )
    counted = (
        events.withWatermark("at", "30 seconds")
        .groupBy(F.window("at", "1 minute").alias("w"), "ad")
        .agg(
            F.count_if(F.col("kind") == "impression").alias("shown"),
            F.count_if(F.col("kind") == "click").alias("clicked"),
            F.sum("cost").alias("cost"),
        )
        .select(F.unix_micros("w.start").alias("start"), "ad", "shown", "clicked", "cost")
    )
    database = folder / "peer.db"
    database.unlink(missing_ok=True)
    db = sqlite3.connect(database, check_same_thread=False, isolation_level=None)
    db.execute("PRAGMA journal_mode = WAL")
    db.execute("PRAGMA synchronous = FULL")
    db.execute("CREATE TABLE v (start, ad, shown, clicked, cost, PRIMARY KEY (start, ad))")

    def upsert(frame, _batch_id):
        columns = frame.toArrow().to_pydict()
        db.execute("BEGIN")
        db.executemany(
            "INSERT OR REPLACE INTO v VALUES (?, ?, ?, ?, ?)", zip(*columns.values(), strict=True)
        )
        db.execute("COMMIT")
        meter.mark()

    with tempfile.TemporaryDirectory() as checkpoint:
        query = (
            counted.writeStream.outputMode("update")
            .foreachBatch(upsert)
            .option("checkpointLocation", checkpoint)
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()
    found = db.execute("SELECT * FROM v").fetchall()
    frame = pl.DataFrame(
        found, schema=["window_start", "ad", "shown", "clicked", "cost"], orient="row"
    )
    frame = frame.with_columns(pl.from_epoch("window_start", "us").dt.replace_time_zone("UTC"))
    frame.sort("window_start", "ad").write_parquet(folder / "peer.parquet")
    return result(meter)


def result(meter: Meter) -> dict:
    """Whole run, and from the first batch's commit to the last one's."""
    last = len(meter.marks) - 1
    whole, warm = meter.between(0, last), meter.between(1, last)
    return {
        "batches": last,
        "whole_s": whole[0],
        "whole_cpu_s": whole[1],
        "warm_s": warm[0],
        "warm_cpu_s": warm[1],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--events", type=int, default=5_000_000)
    parser.add_argument("--batch", type=int, default=250_000)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--contender", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.contender:
        engine, folder, batch = options.contender
        run = {"ours": ours, "peer": peer}[engine]
        print(json.dumps(run(Path(folder), int(batch))))
        return
    with tempfile.TemporaryDirectory(prefix="millstream-bench-") as name:
        folder = Path(name)
        fill(folder, options.events, options.batch)
        runs: dict[str, list[dict]] = {"ours": [], "peer": []}
        for pair in range(options.pairs):
            for engine in ("ours", "peer") if pair % 2 == 0 else ("peer", "ours"):
                runs[engine].append(run_apart(__file__, engine, folder, options.batch))
            same = pl.read_parquet(folder / "ours.parquet").equals(
                pl.read_parquet(folder / "peer.parquet")
            )
            if not same:
                sys.exit("the results differ: no timing counts")
    report(options.events, runs)


def report(events: int, runs: dict[str, list[dict]]) -> None:
    rows = []
    for figure in ("whole_cpu_s", "whole_s", "warm_cpu_s", "warm_s"):
        a, b = ([run[figure] for run in runs[engine]] for engine in ("ours", "peer"))
        ratio = [y / x for x, y in zip(a, b, strict=True)]
        rows.append([figure, spread(a), spread(b), spread(ratio, 2)])
    warm_share = (runs["ours"][0]["batches"] - 1) / runs["ours"][0]["batches"]
    rate = [events * warm_share / run["warm_cpu_s"] for run in runs["ours"]]
    table(
        f"{events:,} JSON events to a windowed view, {runs['ours'][0]['batches']} batches (results equal)",
        ["figure", "millstream", "plain PySpark", "peer / ours"],
        rows,
    )
    print(f"  ours, warm: {statistics.median(rate):,.0f} events per CPU-second")


if __name__ == "__main__":
    main()
