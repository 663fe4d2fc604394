"""Driver and workers killed at every named point of a batch: nothing lost, nothing doubled."""

import os
import subprocess
import sys
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import polars as pl
import pytest
from crashing import DRIVER_POINTS, WORKER_POINTS

import millstream as ms
from millstream import testing
from millstream.views.store import ViewStore

START = datetime(2026, 1, 1, tzinfo=UTC)
HERE = Path(__file__).parent
SOURCE = HERE.parents[1] / "src"


@dataclass
class Event:
    user: str
    at: datetime
    cost: int


def rows(count):
    return [
        {
            "user": f"u{i % 41}",
            "at": (START + timedelta(seconds=i - 300 * (i % 50 == 0))).isoformat(),
            "cost": i % 7,
        }
        for i in range(count)
    ]


EVENTS = rows(900)


def pipeline(folder):
    app = ms.App("matrix", log=folder)
    events = app.topic("events", Event, key="user", partitions=3)
    stream = events.stream(time="at", watermark=ms.watermark("2 minutes", idle=None))
    by_minute = stream.window(ms.tumbling("1 minute"), by="user").agg(cost=ms.sum("cost"))
    by_minute.view("minutes")
    by_minute.window(ms.tumbling("10 minutes")).emit("update").agg(total=ms.sum("cost")).view(
        "tens"
    )
    stream.filter(pl.col("cost") == 6).view("dear", key=["user", "at"])
    return app


def run(folder, points, number):
    """Run the app, dying at the points; give the exit code."""
    marks = folder / "marks"
    marks.mkdir(exist_ok=True)
    environment = {
        **os.environ,
        "CRASH": f"{marks}|{','.join(points)}|{number}",
        "PYTHONPATH": os.pathsep.join([str(SOURCE), str(HERE)]),
    }
    ended = subprocess.run(
        [sys.executable, str(HERE / "crashing.py"), str(folder)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode in (0, -9), ended.stdout + ended.stderr
    return ended.returncode


def check(folder, events):
    wanted = testing.run(pipeline("unused"), {"events": events})
    with ViewStore(folder / "apps" / "matrix" / "views.db", readonly=True) as store:
        for name in ("minutes", "tens", "dear"):
            found, right = store.scan(name), wanted[name]
            assert found.sort(found.columns).equals(right.sort(right.columns)), name
        ledger = pl.DataFrame(store.ledger("matrix"))
    assert ledger.filter(step="events")["read"].sum() == len(events)
    exits = ledger.select("emitted", "held", "late", "dead", "filtered", "duplicate")
    assert (ledger["read"] == exits.sum_horizontal()).all()


@pytest.fixture
def folder(tmp_path):
    with ms.connect(tmp_path) as log:
        log.create_topic("events", partitions=3)
        with log.producer() as producer:
            for event in EVENTS:
                producer.send("events", event, key=event["user"])
    return tmp_path


@pytest.mark.thorough
@pytest.mark.timeout(900)
def test_workers_that_die_at_any_point_of_a_stage_change_nothing(folder):
    assert run(folder, WORKER_POINTS, 2) == 0  # a worker's death is Spark's to mend
    died = {mark.name.rsplit("-", 1)[0] for mark in (folder / "marks").glob("*-2")}
    assert died == {point.replace(" ", "-") for point in WORKER_POINTS}
    check(folder, EVENTS)


@pytest.mark.thorough
@pytest.mark.timeout(900)
def test_a_driver_that_dies_at_every_point_of_a_batch_changes_nothing(folder):
    for point in DRIVER_POINTS:
        assert run(folder, [point], 1) == -9, point
    assert run(folder, [], 1) == 0
    check(folder, EVENTS)
