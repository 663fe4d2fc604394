"""An app whose state store is in PostgreSQL and whose runs of state are at a URL, both at once."""

import shutil
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from urllib.parse import unquote, urlsplit, urlunsplit

import pytest

import millstream as ms
from millstream.errors import ConfigError
from millstream.object_store.client import ObjectClient
from millstream.ops.reset import find_footprint, reset

psycopg = pytest.importorskip("psycopg", reason="the driver of PostgreSQL is not installed here")

START = datetime(2026, 1, 1, tzinfo=UTC)


@dataclass
class Event:
    user: str
    at: datetime


def declare(folder, store=None, state=None):
    app = ms.App("counts", log=folder, store=store, state=state, buckets=3)
    stream = app.topic("events", Event, key="user", partitions=2).stream(
        time="at", watermark=ms.watermark("30 seconds", idle=None)
    )
    stream.window(ms.tumbling("1 minute"), by="user").agg(n=ms.count()).view("minutes")
    return app


def send(folder, first, end):
    with ms.connect(folder) as log:
        log.create_topic("events", partitions=2, exist_ok=True)
        with log.producer() as producer:
            for i in range(first, end):
                at = (START + timedelta(seconds=i)).isoformat()
                producer.send("events", f'{{"user":"u{i % 37}","at":"{at}"}}', key=f"u{i % 37}")


def expected(count):
    closed = START + timedelta(seconds=count - 31)
    found = {}
    for i in range(count):
        at = START + timedelta(seconds=i)
        window = at.replace(second=0)
        if window + timedelta(minutes=1) <= closed:
            key = (window, f"u{i % 37}")
            found[key] = found.get(key, 0) + 1
    return found


def minutes(store):
    with ms.view("minutes", store=store) as view:
        rows = view.scan().iter_rows(named=True)
        return {(row["window_start"], row["user"]): row["n"] for row in rows}


def copy_of(database, name):
    """Copy a database as a backup does; return the copy's URL."""
    parts = urlsplit(database)
    elsewhere = urlunsplit(parts._replace(path="/postgres"))
    with psycopg.connect(elsewhere, autocommit=True) as session:
        session.execute(f'CREATE DATABASE "{name}" TEMPLATE "{parts.path[1:]}"')
    return urlunsplit(parts._replace(path=f"/{name}"))


def run(folder, store, url):
    return declare(folder, store, url).run(until="caught-up", rows_per_batch=300)


@pytest.mark.timeout(300)
def test_a_backup_is_refused_and_a_reset_by_address_leaves_no_object(
    no_spark, tmp_path, database, s3_url, monkeypatch
):
    monkeypatch.setenv("MILLSTREAM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PGUSER", unquote(urlsplit(database).username))
    monkeypatch.setenv("PGPASSWORD", unquote(urlsplit(database).password))
    folder, older = tmp_path / "log", tmp_path / "older"
    send(folder, 0, 600)
    assert run(folder, database, s3_url).read == 600
    shutil.copytree(folder, older)  # a backup of both, put back as another copy
    (older / "apps/counts/state-store").unlink()
    backup = copy_of(database, f"{urlsplit(database).path[1:]}-backup")
    send(folder, 600, 1200)
    assert run(folder, database, s3_url).read == 600
    assert minutes(database) == expected(1200)
    kept = set(ObjectClient(s3_url).names())
    for _ in range(3):
        with pytest.raises(ConfigError, match="is a backup, or another copy"):
            run(older, backup, s3_url)
    assert set(ObjectClient(s3_url).names()) == kept

    elsewhere = tmp_path / "elsewhere"
    reset(find_footprint("counts", elsewhere, elsewhere, [database]))
    assert list(ObjectClient(s3_url).names()) == []
    with pytest.raises(ConfigError, match="the views hold no batch"):
        run(folder, database, s3_url)
    reset(find_footprint("counts", folder, folder))
    assert list(ObjectClient(s3_url).names()) == []
    assert run(folder, database, s3_url).read == 1200
    assert minutes(database) == expected(1200)
