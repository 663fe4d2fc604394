"""A program of which one task makes 640 MB of rows, for a dataset.

``python large_frames.py MASTER FOLDER`` runs it until it has caught up, and prints how much memory the driver's
Python process took, in KiB.
"""

import resource
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import polars as pl

import millstream as ms

EVENTS = 40
ROWS = 1_600  # of an event
TEXT_BYTES = 10_000


@dataclass
class Event:
    id: int
    at: datetime


def many(table):
    """Make many wide rows of each event; no two are equal."""
    rows = table.with_columns(n=pl.lit(list(range(ROWS)), pl.List(pl.Int64))).explode("n")
    text = pl.format("{} {} ", pl.col("id"), pl.col("n")).str.pad_end(TEXT_BYTES, ".")
    return rows.with_columns(text=text)


def pipeline(folder):
    app = ms.App("large", log=folder)
    stream = app.topic("events", Event, partitions=1).stream(time="at")
    stream.map_frames(many, rows="any").dataset(folder / "rows")
    return app


def send(folder):
    with ms.connect(folder) as log:
        log.create_topic("events", partitions=1)
        with log.producer() as producer:
            for number in range(EVENTS):
                at = datetime(2026, 1, 1, tzinfo=UTC).isoformat()
                producer.send("events", {"id": number, "at": at})


if __name__ == "__main__":
    pipeline(Path(sys.argv[2])).run(
        until="caught-up",
        master=sys.argv[1],
        cores=2,
        settings={
            "spark.driver.host": "127.0.0.1",
            "spark.driver.memory": "512m",
            "spark.executor.memory": "512m",
        },
    )
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
