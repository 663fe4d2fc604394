"""A program as a user would write it for a cluster: events, a pipeline, and where it ran.

``python on_cluster.py MASTER`` runs it until it has caught up. The log is where the environment says.
"""

import os
import sys
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import polars as pl

import millstream as ms

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


@dataclass
class Click:
    ad: int
    at: datetime


def event(number):
    return {"ad": number % 7, "at": (NOON + timedelta(milliseconds=5 * number)).isoformat()}


def located(table):
    """Add where the code runs: an executor's working folder is named by the executor's number."""
    return table.with_columns(executor=pl.lit(Path.cwd().name))


def pipeline(log):
    app = ms.App("clicks", log=log)
    clicks = app.topic("clicks", Click, key="ad").stream(time="at")
    where = clicks.map_frames(located)
    where.window(ms.tumbling("1 minute"), by="ad").emit("update").agg(n=ms.count()).view("minutes")
    where.select("executor", "at").view("executors", key="executor")
    return app


app = pipeline(os.environ.get("MILLSTREAM_LOG", "data"))

if __name__ == "__main__":
    from millstream.engine.stages import executor

    executor.DRIVER_BYTES_MAX = (
        -1
    )  # these batches are so small that the driver would take the stages itself
    app.run(
        until="caught-up",
        master=sys.argv[1],
        cores=2,
        rows_per_batch=50_000,
        settings={
            "spark.driver.host": "127.0.0.1",
            "spark.executor.memory": "1g",
            # It begins with both executors.
            "spark.scheduler.minRegisteredResourcesRatio": "1.0",
            "spark.scheduler.maxRegisteredResourcesWaitingTime": "120s",
        },
    )
