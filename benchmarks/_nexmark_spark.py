"""Nexmark on plain PySpark Structured Streaming, as its guide has it, for the same answers.

Files of one batch after another, RocksDB state with changelog checkpoints, as many shuffle partitions
as cores. q7 and q18 are written with ``max_by`` and q8 as a count of both kinds, which is less work
for Spark than the joins and rankings of the original. Results go to the ``noop`` sink.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from _measure import plain_spark
from _nexmark_passes import Spec, run_passes
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

CORES = 2
SCHEMAS = {
    "bids": "auction long, bidder long, price long, channel string, url string, "
    "date_time timestamp, extra string",
    "auctions": "id long, item_name string, initial_bid long, reserve long, date_time timestamp, "
    "expires timestamp, seller long, category long, extra string",
    "persons": "id long, name string, state string, date_time timestamp, extra string",
}
MODES = {"q12": "update", "q17": "update", "q18": "update"}
KEYS = {"q12": ["bidder", "start"], "q17": ["auction", "day"], "q18": ["auction", "bidder"]}


class Queries:
    """The queries over the files."""

    def __init__(self, spark: SparkSession, files: Path) -> None:
        self._spark = spark
        self._files = files

    def events(self, kind: str) -> DataFrame:
        read = self._spark.readStream.schema(SCHEMAS[kind]).option("maxFilesPerTrigger", 2)
        rows = read.json(str(self._files / kind))
        return rows.withWatermark("date_time", "4 seconds")

    @property
    def bids(self) -> DataFrame:
        return self.events("bids")

    def q0(self) -> DataFrame:
        return self.bids

    def q1(self) -> DataFrame:
        euros = (F.lit("0.908").cast("decimal(3,3)") * F.col("price")).cast("decimal(23,3)")
        return self.bids.select("auction", "bidder", euros.alias("price"), "date_time", "extra")

    def q2(self) -> DataFrame:
        return self.bids.where("auction % 123 = 0").select("auction", "price")

    def q5(self) -> DataFrame:
        hop = F.window("date_time", "10 seconds", "2 seconds")
        counts = self.bids.groupBy(hop.alias("w"), "auction").agg(F.count("*").alias("num"))
        ends = counts.groupBy(F.window(F.window_time("w"), "2 seconds").alias("w"))
        lists = ends.agg(F.collect_list(F.struct("auction", "num")).alias("all"))
        most = lists.withColumn("most", F.array_max(F.transform("all", lambda one: one["num"])))
        each = most.select(F.col("w.end").alias("end"), "most", F.explode("all").alias("one"))
        return each.where("one.num = most").select("one.auction", "one.num", "end")

    def q7(self) -> DataFrame:
        window = F.window("date_time", "10 seconds").alias("w")
        bid = F.struct("auction", "bidder", "price", "date_time", "extra")
        highest = self.bids.groupBy(window).agg(F.max_by(bid, "price").alias("bid"))
        return highest.select("bid.*", F.col("w.end").alias("end"))

    def q8(self) -> DataFrame:
        people = self.events("persons").select("id", "name", "date_time", F.lit(0).alias("opened"))
        auctions = self.events("auctions").select(
            F.col("seller").alias("id"),
            F.lit(None).cast("string").alias("name"),
            "date_time",
            F.lit(1).alias("opened"),
        )
        both = people.unionByName(auctions)
        counts = both.groupBy(F.window("date_time", "10 seconds").alias("w"), "id").agg(
            F.max("name").alias("name"),
            F.count_if(F.col("opened") == 0).alias("joined"),
            F.count_if(F.col("opened") == 1).alias("auctions"),
        )
        found = counts.where("joined > 0 and auctions > 0")
        return found.select("id", "name", F.col("w.start").alias("start"))

    def q11(self) -> DataFrame:
        # Spark ends a session before the gap, the others with it; times are whole milliseconds.
        session = F.session_window("date_time", "10001 milliseconds").alias("w")
        counts = self.bids.groupBy(session, "bidder").agg(F.count("*").alias("num"))
        end = F.col("w.end") - F.expr("INTERVAL 1 MILLISECOND")
        return counts.select("bidder", "num", F.col("w.start").alias("start"), end.alias("end"))

    def q12(self) -> DataFrame:
        bids = self.bids.withColumn("now", F.current_timestamp())
        counts = bids.groupBy(F.window("now", "10 seconds").alias("w"), "bidder")
        return counts.agg(F.count("*").alias("num")).select("bidder", "num", "w.start")

    def q17(self) -> DataFrame:
        price = F.col("price")
        day = F.date_trunc("day", "date_time").alias("day")
        return self.bids.groupBy("auction", day).agg(
            F.count("*").alias("total"),
            F.count_if(price < 10_000).alias("rank1"),
            F.count_if((price >= 10_000) & (price < 1_000_000)).alias("rank2"),
            F.count_if(price >= 1_000_000).alias("rank3"),
            F.min("price").alias("min"),
            F.max("price").alias("max"),
            F.floor(F.avg("price")).alias("avg"),
            F.sum("price").alias("sum"),
        )

    def q18(self) -> DataFrame:
        bid = F.struct("price", "channel", "url", "date_time", "extra")
        last = F.max_by(bid, "date_time").alias("bid")
        return self.bids.groupBy("bidder", "auction").agg(last).select("bidder", "auction", "bid.*")


def in_form(rows: DataFrame) -> DataFrame:
    """Give times as milliseconds, under the names of the answers."""
    for old, new in (("date_time", "at"), ("start", "start"), ("end", "end"), ("day", "day")):
        if old in rows.columns:
            rows = rows.withColumn(new, F.unix_millis(old))
    if "price" in rows.columns and rows.schema["price"].dataType.typeName() == "decimal":
        rows = rows.withColumn("price_milli", (F.col("price") * 1000).cast("long"))
    return rows.drop("date_time")


class Kept:
    """Keeps what a query gave: for those that update, the last row of each key."""

    def __init__(self, query: str, out: Path) -> None:
        self._query = query
        self._folder = out / f"{query}-batches"
        self._out = out / f"{query}.parquet"

    def __call__(self, frame: DataFrame, batch_id: int) -> None:
        in_form(frame).write.parquet(str(self._folder / f"{batch_id:06}"))

    def put_together(self) -> None:
        import polars as pl

        parts = [
            pl.read_parquet(part / "*.parquet").with_columns(batch=int(part.name))
            for part in sorted(self._folder.iterdir())
            if any(part.glob("*.parquet"))
        ]
        rows = pl.concat(parts)
        if self._query in KEYS:
            rows = rows.sort("batch").unique(KEYS[self._query], keep="last")
        if self._query == "q12":
            rows = rows.group_by("bidder").agg(pl.col("num").sum())
        rows.write_parquet(self._out)


def main() -> None:
    spec = Spec.read()
    spark = plain_spark(CORES)
    queries = Queries(spark, spec.folder / "spark")

    def run(query: str, number: int, is_kept: bool) -> None:  # noqa: FBT001 - as it is called
        checkpoint = spec.out / f"spark-{query}-{number}"
        shutil.rmtree(checkpoint, ignore_errors=True)
        kept = Kept(query, spec.out)
        writer = getattr(queries, query)().writeStream.outputMode(MODES.get(query, "append"))
        writer = writer.foreachBatch(kept) if is_kept else writer.format("noop")
        writer = writer.option("checkpointLocation", str(checkpoint))
        writer.trigger(availableNow=True).start().awaitTermination()
        if is_kept:
            kept.put_together()

    run_passes(spec, run)
    spark.stop()


if __name__ == "__main__":
    main()
