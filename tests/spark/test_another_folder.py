"""An app whose run goes on in another folder, as on another machine: the state store has all that it needs."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from urllib.parse import unquote, urlsplit

import polars as pl
import pytest

import millstream as ms
from millstream.engine.checkpoint_copy import CheckpointStore
from millstream.errors import FencedError
from millstream.object_store.client import ObjectClient
from millstream.views.postgres.state_store import PostgresStateStore

START = datetime(2026, 1, 1, tzinfo=UTC)
PARTITIONS = 2


@dataclass
class Event:
    id: int
    user: str
    at: datetime


class DiedError(Exception):
    """The driver died."""


@pytest.fixture
def store(database, monkeypatch):
    monkeypatch.setenv("PGUSER", unquote(urlsplit(database).username))
    monkeypatch.setenv("PGPASSWORD", unquote(urlsplit(database).password))
    return database


def declare(log, folder, store, state):
    app = ms.App("counts", log=log, local=folder, store=store, state=state, buckets=3)
    events = app.topic("events", Event, key="user", partitions=PARTITIONS)
    stream = events.stream(time="at", watermark=ms.watermark("30 seconds", idle=None))
    stream.window(ms.tumbling("1 minute"), by="user").agg(n=ms.count()).view("minutes")
    answered = stream.enrich(ask, on="id", schema={"answer": pl.Int64})
    answered.select("id", "answer").to("out", partitions=1)
    return app


def ask(keys):
    with Path(os.environ["ASKED"]).open("a") as asked:
        asked.write("".join(f"{number}\n" for number in keys["id"].to_list()))
    return keys.select("id", answer=pl.col("id") * 7)


def send(log, first, end):
    with ms.connect(log) as opened:
        opened.create_topic("events", partitions=PARTITIONS, exist_ok=True)
        with opened.producer() as producer:
            for i in range(first, end):
                at = (START + timedelta(seconds=i)).isoformat()
                producer.send(
                    "events", f'{{"id":{i},"user":"u{i % 37}","at":"{at}"}}', key=f"u{i % 37}"
                )


def test_a_batch_that_was_begun_is_repeated_as_it_was_planned_in_another_folder(
    spark, tmp_path, store, s3_url, monkeypatch
):
    monkeypatch.setenv("MILLSTREAM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("ASKED", str(tmp_path / "asked"))
    log = tmp_path / "log"
    send(log, 0, 1000)
    real = PostgresStateStore.commit

    def die(self, fence, *given, **named):
        if fence.batch_id == 2:
            raise DiedError
        return real(self, fence, *given, **named)

    with monkeypatch.context() as patch:
        patch.setattr(PostgresStateStore, "commit", die)
        with pytest.raises(DiedError):
            declare(log, tmp_path / "one", store, s3_url).run(until="caught-up", rows_per_batch=300)
    assert [name for name in ObjectClient(s3_url).names() if "/journal/2-" in name]
    assert not list((tmp_path / "one").rglob("journal"))
    send(
        log, 1000, 2000
    )  # of another plan, batch 2 would have more rows, and the topic has it already
    notices = []
    for folder, end in (("two", 2000), ("one", 3000), ("one", 4000)):
        send(log, max(2000, end - 1000), end)
        app = declare(log, tmp_path / folder, store, s3_url)
        app.run(until="caught-up", rows_per_batch=700, on_progress=notices.append)
    assert len(asked := (tmp_path / "asked").read_text().split()) == len(set(asked)) == 4000
    with ms.connect(log) as opened:
        told = opened.read("out", 0, columns=("value",))["value"].to_pylist()
    assert len(told) == len(set(told)) == 4000
    with ms.view("minutes", store=store) as view:
        assert view.scan()["n"].sum() > 3900
    assert not [name for name in ObjectClient(s3_url).names() if "/journal/" in name]


def test_an_older_run_elsewhere_begins_no_batch_once_a_newer_one_has_begun(
    spark, tmp_path, store, s3_url, monkeypatch
):
    monkeypatch.setenv("MILLSTREAM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("ASKED", str(tmp_path / "asked"))
    log, began = tmp_path / "log", []
    send(log, 0, 600)
    real = CheckpointStore.save

    def overtaken(self, batch_id):
        began.append(batch_id)
        if began == [0, 1]:
            store_of_both = self.committer.state_store
            store_of_both.begin_run("counts", "main", store_of_both.checkpoint_id("counts", "main"))
        real(self, batch_id)

    monkeypatch.setattr(CheckpointStore, "save", overtaken)
    with pytest.raises(FencedError):
        declare(log, tmp_path / "one", store, s3_url).run(until="caught-up", rows_per_batch=300)
    asked = (tmp_path / "asked").read_text().split()
    assert 0 < len(asked) < 400, "nobody was asked for the second batch"
    declare(log, tmp_path / "two", store, s3_url).run(until="caught-up", rows_per_batch=300)
    assert sorted(map(int, (tmp_path / "asked").read_text().split())) == list(range(600))
