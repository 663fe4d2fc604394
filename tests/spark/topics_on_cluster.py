"""A program whose batches are large outputs to a topic: ``python topics_on_cluster.py MASTER ADDRESS FOLDER``."""

import sys

import polars as pl

import millstream as ms

FAN_OUT = 1000


def fan_out(events):
    """Make many rows of each event."""
    ids = pl.int_ranges(pl.col("id") * FAN_OUT, (pl.col("id") + 1) * FAN_OUT)
    rows = events.with_columns(id=ids).explode("id")
    return rows.with_columns(name=pl.format("row {}", pl.col("id").cast(pl.String).str.zfill(12)))


def pipeline(address, folder):
    app = ms.App("large", log=address, state=folder, buckets=4)
    events = app.topic("events", {"id": int}, key="id", partitions=4)
    events.stream().map_frames(fan_out, rows="any").to("rows", key="id", partitions=6)
    return app


if __name__ == "__main__":
    pipeline(*sys.argv[2:]).run(
        until="caught-up",
        master=sys.argv[1],
        cores=2,
        settings={
            "spark.driver.host": "127.0.0.1",
            "spark.executor.memory": "1g",
            "spark.speculation": "true",
            "spark.speculation.interval": "50ms",
            "spark.speculation.multiplier": "1.0",
            "spark.speculation.quantile": "0.3",
            "spark.scheduler.minRegisteredResourcesRatio": "1.0",
            "spark.scheduler.maxRegisteredResourcesWaitingTime": "120s",
        },
    )
