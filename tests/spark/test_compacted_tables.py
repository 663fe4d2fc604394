"""Tables of a topic on Spark that is compacted between two runs, read from the beginning after it, and archived."""

from __future__ import annotations

import json
import random

import millstream as ms
from millstream.views.state_store.sqlite_store import SqliteStateStore

KEYS = 30
SETTINGS = {"segment.bytes": "4000", "min.cleanable.dirty.ratio": "0"}


def app_over(folder, name):
    app = ms.App(name, log=folder)
    topic = app.topic("t", {"id": int, "g": str, "n": int}, key="id", partitions=2)
    table = topic.table()
    table.view("rows")
    table.group_by("g").agg(rows=ms.count(), most=ms.max("n")).view("groups")
    return app


def send(folder, dice, rows, numbers):
    """Write rows and tombstones, and apply them to ``rows``."""
    with ms.connect(folder) as log, log.producer() as producer:
        for number in numbers:
            key = dice.randrange(KEYS)
            row = {"id": key, "g": "abc"[number % 3], "n": number}
            if dice.random() < 0.2:
                rows.pop(key, None)
                producer.send("t", None, key=str(key))
            else:
                rows[key] = row
                producer.send("t", json.dumps(row).encode(), key=str(key))
            if number % 20 == 19:
                producer.flush()  # a batch is the least that a segment may have


def records_in(folder):
    with ms.connect(folder) as log:
        return sum(log.read("t", partition).num_rows for partition in range(2))


def views_of(app, batch):
    """Run the app; return the rows of its views."""
    app.run(until="caught-up", rows_per_batch=batch)
    with SqliteStateStore(app.folder / "views.db", readonly=True) as store:
        return [sorted(store.scan(name).rows()) for name in ("rows", "groups")]


def meant(rows):
    groups = {}
    for row in rows.values():
        groups.setdefault(row["g"], []).append(row["n"])
    made = sorted((name, len(numbers), max(numbers)) for name, numbers in groups.items())
    return [sorted((row["id"], row["g"], row["n"]) for row in rows.values()), made]


def test_a_table_is_the_same_after_compaction_and_from_archives(spark, in_turns, tmp_path):
    dice, rows = random.Random(3), {}
    with ms.connect(tmp_path) as log:
        log.create_topic("t", partitions=2, cleanup="compact", settings=SETTINGS)
    send(tmp_path, dice, rows, range(600))
    first = app_over(tmp_path, "first")
    assert views_of(first, 250) == meant(rows)
    send(tmp_path, dice, rows, range(600, 1_400))
    before = records_in(tmp_path)
    with ms.connect(tmp_path) as log:
        log.run_maintenance()
    assert records_in(tmp_path) < before / 2
    assert views_of(first, 300) == meant(rows)  # goes on where it was
    after = app_over(tmp_path, "after")
    assert views_of(after, 100) == meant(rows)
    archived = app_over(tmp_path, "archived")
    reports = archived.topics["t"].archive(close_active=True)
    assert sum(report.rows for report in reports) == records_in(tmp_path)
    assert views_of(archived, 90) == meant(rows)
    assert rows
