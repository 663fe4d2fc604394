"""A program as a user would write it for a cluster whose machines share no disk: two streams joined, and counted.

``python on_machines.py MASTER FOLDER HOST [SIGNAL BATCH]`` runs it until it has caught up. Log, state and store are
where the environment says, and how many rows a batch may have, and how late they may be. SIGNAL comes to the driver just before its state store
commits BATCH.
"""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import polars as pl

import millstream as ms

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
VIEWS_PER_MINUTE = 3000
CLICK_AFTER = timedelta(seconds=2)


@dataclass
class Shown:
    id: int
    ad: int
    at: datetime
    note: str


@dataclass
class Click:
    id: int
    at: datetime


def shown_at(number, per_minute=VIEWS_PER_MINUTE):
    return NOON + timedelta(milliseconds=60_000 * number // per_minute)


def word_of(number):
    """Return the word that a note has in it, over and over, as a number."""
    return number * 2_654_435_761 % 2**32


def note_of(number, words):
    """Return a note of 8 characters for each of its words: it is long in the state, and compressed in the log."""
    return f"{word_of(number):08x}" * words


def noted(table):
    """Add up what a note says, in place of the note: its word, and how often it is there."""
    word = pl.col("note").str.head(8)
    times = pl.col("note").str.count_matches(word, literal=True)
    return table.with_columns(mark=word.str.to_integer(base=16) + times).drop("note")


def located(table):
    """Add on which machine the code runs, and which machines' folders it sees."""
    root = Path(os.environ["MACHINES"])
    seen = sorted(path.name for path in root.iterdir())
    return table.with_columns(
        machine=pl.lit(os.environ.get("MACHINE", "")), seen=pl.lit(",".join(seen))
    )


def pipeline(log, state, store, folder):
    app = ms.App("ads", log=log, state=state, store=store, local=folder, buckets=4)
    watermark = ms.watermark(os.environ.get("WATERMARK", "1 minute"), idle=None)
    shown = app.topic("shown", Shown, key="id", partitions=4).stream(time="at", watermark=watermark)
    clicks = app.topic("clicks", Click, key="id", partitions=4).stream(
        time="at", watermark=watermark
    )
    joined = shown.join(clicks, "id", within=("0 seconds", "5 seconds"))
    found = joined.map_frames(noted).map_frames(located)
    windows = found.window(ms.tumbling("1 minute"), by="ad").emit("update")
    windows.agg(n=ms.count(), marks=ms.sum("mark")).view("minutes")
    found.select("machine", "seen", "at").view("machines", key=("machine", "seen"))
    found.select("id", "ad").to("found", partitions=2)
    found.select("id", "ad").dataset(os.environ["DATASET"])
    return app


def send_signal_before_commit(number, batch_id):
    from millstream.views.postgres.state_store import PostgresStateStore

    real = PostgresStateStore.commit

    def commit(self, fence, *given, **named):
        if fence.batch_id == batch_id:
            os.kill(os.getpid(), number)
        return real(self, fence, *given, **named)

    PostgresStateStore.commit = commit


def leave_all_to_executors():
    """These batches are so small that the driver would do all itself."""
    from millstream.engine.stages import executor
    from millstream.spark import frame_blocks, output_tasks

    executor.DRIVER_BYTES_MAX = frame_blocks._FETCHED_BYTES_MAX = -1
    output_tasks.DRIVER_BYTES_MAX = -1
    frame_blocks._NAMED_BYTES_MIN = 256


def say(progress):
    took_s, requests = progress.duration_ms / 1000, dict(progress.object_store)
    print(
        f"batch {progress.batch_id} of {progress.read:,} records took {took_s:.1f} s, with {progress.state_bytes:,} "
        f"bytes of state, by {requests}",
        flush=True,
    )


def run(app, master, host, rows_per_batch):
    """Run an app on a cluster of two small executors until it has caught up."""
    passed = ("AWS_ENDPOINT_URL", "AWS_REGION", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
    return app.run(
        until="caught-up",
        master=master,
        cores=2,
        rows_per_batch=rows_per_batch,
        on_progress=say,
        settings={
            "spark.driver.host": host,
            "spark.driver.bindAddress": host,
            "spark.executor.memory": "768m",
            "spark.executor.cores": "1",
            "spark.cores.max": "2",
            "spark.scheduler.minRegisteredResourcesRatio": "1.0",
            "spark.scheduler.maxRegisteredResourcesWaitingTime": "120s",
            **{f"spark.executorEnv.{name}": os.environ[name] for name in passed},
        },
    )


def main(master, folder, host, *ending):
    leave_all_to_executors()
    if ending:
        send_signal_before_commit(getattr(signal, ending[0]), int(ending[1]))
    app = pipeline(os.environ["LOG"], os.environ["STATE"], os.environ["STORE"], folder)
    run(app, master, host, int(os.environ.get("ROWS_PER_BATCH", "12000")))


if __name__ == "__main__":
    main(*sys.argv[1:])
