"""A pipeline that asks a service, and a run of it that is killed at named points.

``python enrichment_kills.py FOLDER SERVICE POINT NUMBER STAGES`` kills the driver, or the Python worker, with
SIGKILL the NUMBER-th time that it comes to POINT. STAGES is "driver" or "workers": where the service is asked.
"""

import os
import sys
from dataclasses import dataclass
from pathlib import Path

import polars as pl
from crash_points import DyingRunner, come_to, wrap

import millstream as ms
from millstream.engine.stages import executor
from millstream.engine.stages.journal_files import JournalFiles
from millstream.kernels.enrichment.answers import decode_answers
from millstream.views.commit.committer import BatchCommitter
from millstream.views.sinks.topics import TopicsSink
from millstream.views.state_store.store import StateStore

ROWS_PER_BATCH = 40


@dataclass
class Click:
    user: str
    id: int


def pipeline(folder, service):
    app = ms.App("asking", log=folder, buckets=4)
    clicks = app.topic("clicks", Click, key="user", partitions=3).stream()
    lookup = ms.http_lookup(service + "/users/{user}", headers={"Authorization": "secret-word"})
    found = clicks.enrich(lookup, on="user", schema={"answer": pl.Int64}, cache="1 hour")
    found.view("seen", key="id")
    found.to("found", partitions=2)
    return app


def journal_of(folder):
    """The answers in the journal on disk, by user."""
    files = Path(folder).rglob("journal/*")
    entries = [decode_answers(file.read_bytes()) for file in files if file.suffix != ".draft"]
    return dict(pl.concat(entries).select("k0", "a0").rows()) if entries else {}


def main(folder, service, point, number, stages):
    os.environ["CRASH"] = f"{folder}/marks|{point}|{number}|SIGKILL|{os.getpid()}"
    if stages == "workers":
        executor.StageRunner = DyingRunner
        executor.DRIVER_BYTES_MAX = -1
    wrap(JournalFiles, "write", before="driver before journal", after="driver after journal")
    wrap(TopicsSink, "commit", after="driver after topics")
    wrap(StateStore, "_apply", after="driver in commit")
    wrap(BatchCommitter, "commit", after="driver after commit")
    come_to("start")
    report = pipeline(folder, service).run(until="caught-up", rows_per_batch=ROWS_PER_BATCH)
    print("ended", report.reason, flush=True)


if __name__ == "__main__":
    DyingRunner.__module__ = "crash_points"
    main(*sys.argv[1:])
