"""Outputs that tasks write, as on a cluster: the same as the driver writes, with either way of frames."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import polars as pl
import pytest

import millstream as ms
from millstream.engine import frame_files
from millstream.spark import frame_blocks, job, output_tasks
from millstream.spark.output_tasks import OutputTasks

psycopg = pytest.importorskip("psycopg", reason="the driver of PostgreSQL is not installed here")

START = datetime(2026, 1, 1, tzinfo=UTC)
EVENTS = 4000


@dataclass
class Event:
    id: int
    user: str
    at: datetime


def declare(folder, database):
    app = ms.App("out", log=folder, store=database, buckets=3)
    events = app.topic("events", Event, key="user", partitions=2)
    stream = events.stream(time="at", watermark=ms.watermark("30 seconds", idle=None))
    stream.view("newest", key="user")  # rows of a key come from both partitions
    stream.with_columns(k=pl.col("id") % 3).dataset(folder / "events", partition_by="k")
    minutes = stream.window(ms.tumbling("1 minute"), by="user").agg(n=ms.count())
    minutes.view("minutes").dataset(folder / "minutes")
    minutes.view("minutes_there", store=database)
    fives = minutes.window(ms.tumbling("5 minutes"), by="n").emit("update").agg(users=ms.count())
    fives.view("fives").dataset(folder / "fives")
    stream.filter(pl.col("id") % 50 == 0).view("few", store=database, key="id")
    return app


def send(folder):
    with ms.connect(folder) as log:
        log.create_topic("events", partitions=2)
        with log.producer() as producer:
            for i in range(EVENTS):
                at = (START + timedelta(seconds=i // 8)).isoformat()
                event = {"id": i, "user": f"u{i % 37}", "at": at}
                producer.send("events", event, partition=i // 5 % 2)


def held(folder, database):
    out = {}
    for name in ("newest", "minutes", "fives", "minutes_there", "few"):
        app = None if name in ("minutes_there", "few") else "out"
        with ms.view(
            name, log=folder, store=database, **({} if app is None else {"app": app})
        ) as view:
            rows = view.scan()
            out[name] = sorted(rows.select(sorted(rows.columns)).rows())
    for name in ("events", "minutes", "fives"):
        rows = ms.dataset(folder / name).scan().collect()
        out[f"dataset {name}"] = sorted(rows.select(sorted(rows.columns)).rows())
    return out


@pytest.fixture(params=["files", "blocks"])
def in_tasks(request, monkeypatch):
    """Have tasks write every output, however small, and frames go one way or the other."""
    if request.param == "blocks":
        monkeypatch.setattr(job, "shares_disk", lambda *_: False)
        monkeypatch.setattr(frame_blocks, "_NAMED_BYTES_MIN", 3000)
        monkeypatch.setattr(frame_blocks, "_FETCHED_BYTES_MAX", -1)
    else:
        monkeypatch.setattr(frame_files, "_BYTES_MIN", 3000)
    monkeypatch.setattr(job, "tasks_write_outputs", lambda _: True)
    monkeypatch.setattr(output_tasks, "DRIVER_BYTES_MAX", -1)
    monkeypatch.setattr(output_tasks, "_STAGED_BYTES_MAX", 20_000)


@pytest.fixture
def staged(monkeypatch, tmp_path, database):
    """Which outputs were staged, by batch. Of two batches, something staged is lost before the commit."""
    seen = []
    real = OutputTasks.stage

    def stage(self, batch_id, rows):
        left, found = real(self, batch_id, rows)
        seen.append(set(found))
        if batch_id == 0:
            name = "dataset(events)"
            (tmp_path / "events" / found[name].parts[0].files[0].path).unlink()
        if batch_id == 1:
            with psycopg.connect(database) as connection:
                table = found["newest"].parts[0].tables.rows
                connection.execute(f"TRUNCATE millstream_out.{table}")
        return left, found

    monkeypatch.setattr(OutputTasks, "stage", stage)
    return seen


@pytest.fixture(scope="module")
def expected(spark, tmp_path_factory, postgres_server):
    folder, database = tmp_path_factory.mktemp("driver"), postgres_server.url("by_driver")
    send(folder)
    declare(folder, database).run(until="caught-up", rows_per_batch=1500)
    return held(folder, database)


@pytest.mark.timeout(300)
def test_tasks_write_what_the_driver_writes(spark, tmp_path, database, expected, in_tasks, staged):
    send(tmp_path)
    report = declare(tmp_path, database).run(until="caught-up", rows_per_batch=1500)
    assert held(tmp_path, database) == expected
    assert report.batches == len(staged) > 2
    assert set.union(*staged) == {
        *("newest", "minutes", "fives", "minutes_there", "few"),
        *(sink.name for sink in declare(tmp_path, database).plan().sinks),
    }


@pytest.mark.parametrize(
    ("master", "written_by_tasks"),
    [
        (None, False),
        ("local[4]", False),
        ("local-cluster[2,1,1024]", True),
        ("spark://host:7077", True),
        ("yarn", True),
        ("k8s://https://host:443", True),
    ],
)
def test_one_decision_says_who_writes_large_outputs(master, written_by_tasks):
    assert job.tasks_write_outputs(master) is written_by_tasks
