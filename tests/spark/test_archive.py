"""A job on Spark over a log of which a part is archived gives what it gives over segments."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import polars as pl

import millstream as ms
from millstream.views.state_store.sqlite_store import SqliteStateStore

START = datetime(2026, 1, 1, tzinfo=UTC)
RECORDS = 2_400


@dataclass
class Event:
    at: datetime
    id: int
    text: str


def fill(folder):
    with ms.connect(folder) as log:
        log.create_topic("events", partitions=2, settings={"segment.bytes": "20000"})
        with log.producer() as producer:
            for n in range(RECORDS):
                value = {"at": (START + timedelta(seconds=n)).isoformat(), "id": n, "text": "x" * 9}
                text = json.dumps(value).encode()
                if n < 400 and n % 9 == 0:
                    text = b"{bad" if n % 2 else b'{"at": null}'
                producer.send("events", text, key=str(n))
                if n % 50 == 49:
                    producer.flush()


def app_over(folder):
    app = ms.App("counts", log=folder)
    events = app.topic("events", Event, partitions=2).stream(
        time="at", watermark=ms.watermark("1 minute", idle=None)
    )
    named = events.with_columns(group=pl.col("id") % 5)
    windows = named.window(ms.tumbling("10 minutes"), by="group").emit("update")
    windows.agg(n=ms.count(), s=ms.sum("id")).view("counted")
    named.filter(pl.col("id") % 100 == 7).view("some", key="id")
    return app


def outcome(app):
    with SqliteStateStore(app.folder / "views.db", readonly=True) as store:
        lines = pl.DataFrame(store.ledger(app.name)).drop("batch_id")
        views = {name: store.scan(name) for name in ("counted", "some", "dead_letters")}
    return views, lines.group_by("step").sum().sort("step")


def test_a_job_over_archives_gives_the_same_and_needs_no_segment_for_it(spark, tmp_path):
    fill(tmp_path / "plain")
    shutil.copytree(tmp_path / "plain", tmp_path / "archived")
    over = app_over(tmp_path / "archived")
    reports = over.topics["events"].archive()  # the growing segments are not archived
    assert all(one.segments > 3 for one in reports)
    assert sum(one.undecodable for one in reports) > 30
    damaged = 0
    for path in sorted((tmp_path / "archived").glob("t/*/*/*.parquet"))[::2]:
        if pl.read_parquet(path)["undecodable"].any():
            continue
        with path.with_suffix(".log").open("r+b") as segment:
            segment.seek(3_000)
            segment.write(b"????")
        damaged += 1
    assert damaged > 1
    plain = app_over(tmp_path / "plain")
    for app in (plain, over):
        report = app.run(until="caught-up", rows_per_batch=1_300)
        assert report.read == RECORDS
    (views, ledger), (other_views, other_ledger) = outcome(plain), outcome(over)
    for name, rows in views.items():
        assert rows.height
        order = [name for name in rows.columns if rows.schema[name] != pl.Binary]
        assert rows.sort(order).equals(other_views[name].sort(order)), name
    assert ledger.equals(other_ledger)
