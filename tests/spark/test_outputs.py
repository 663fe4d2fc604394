"""Every kind of output on Spark: the kernels' answers, failing functions, owners and newer runs."""

import json
import subprocess
import sys
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import polars as pl
import pytest

import millstream as ms
from millstream import testing
from millstream.errors import FencedError, UserCodeError
from millstream.views.state_store.sqlite_store import SqliteStateStore

START = datetime(2026, 1, 1, tzinfo=UTC)


@dataclass
class Event:
    at: datetime
    ad: int


def rows(count, *, start=0):
    return [
        {"at": (START + timedelta(seconds=i / 4)).isoformat(), "ad": i % 11}
        for i in range(start, start + count)
    ]


def keep(path):
    """Make a function that keeps each key with its rows, in a file, and so works once."""

    def kept(frame, context):
        place = Path(path) / context.key.replace("/", "-")
        with Path(path).with_suffix(".calls").open("a") as calls:
            calls.write(context.key + "\n")
        if not place.exists():
            new = place.with_suffix(".new")
            new.write_text(json.dumps([[str(v) for v in row] for row in frame.rows()]))
            new.rename(place)

    return kept


def everything(log):
    """A pipeline with one of each kind of output."""
    log = Path(log)
    app = ms.App("every", log=log)
    events = app.topic("events", Event, key="ad", partitions=2)
    stream = events.stream(time="at", watermark=ms.watermark("0 seconds", idle=None))
    stream.filter(pl.col("ad") == 3).to("threes", key="ad", partitions=2)
    counted = stream.window(ms.tumbling("5 seconds"), by="ad").agg(n=ms.count())
    counted.view("counts").view("home", store="sqlite").dataset(log / "out")
    counted.to("counts", key="ad", partitions=2)
    (log / "kept").mkdir(exist_ok=True, parents=True)
    counted.foreach(keep(log / "kept"), name="keep")
    return app


def send(folder, events):
    with ms.connect(folder) as log:
        if "events" not in log.topics():
            log.create_topic("events", partitions=2)
        with log.producer() as producer:
            for event in events:
                producer.send("events", event, key=str(event["ad"]))


def held(folder):
    """Everything that came out, in an order that does not depend on batches."""
    out = {}
    with ms.view("counts", log=folder) as view:
        out["view"] = sorted(view.scan().rows())
    with ms.view("home", log=folder) as view:
        out["home"] = sorted(view.scan().rows())
    out["dataset"] = sorted(ms.dataset(folder / "out").scan().collect().rows())
    with ms.connect(folder) as log:
        for topic in ("threes", "counts"):
            values = [log.read(topic, p, columns=("value",))["value"].to_pylist() for p in (0, 1)]
            out[topic] = sorted(value for part in values for value in part)
    files = [path for path in (folder / "kept").iterdir() if path.suffix != ".new"]
    out["kept"] = sorted(row for path in files for row in json.loads(path.read_text()))
    with SqliteStateStore(folder / "apps" / "every" / "views.db", readonly=True) as store:
        ledger = pl.DataFrame(store.ledger("every"))
    out["read"] = ledger.filter(step="events")["read"].sum()
    return out


def test_both_engines_give_the_same_outputs(spark, tmp_path):
    def outputs(engine, batches):
        app = everything(tmp_path / engine)
        out = testing.run(app, {"events": rows(200)}, batches=batches, engine=engine)
        frames = [out["counts"], out["home"], out.dataset("out"), out.topic("threes")["ad", "at"]]
        frames.append(out.topic("counts")["ad", "n", "window_start"])
        return [sorted(frame.rows()) for frame in frames]

    assert outputs("kernel", 5) == outputs("spark", 3)
    assert len((tmp_path / "spark" / "kept.calls").read_text().split()) > 0


def test_a_failing_function_ends_the_job_with_the_users_own_line(spark, tmp_path):
    def explode(frame, context):
        return 1 / (frame.height - frame.height)

    app = ms.App("failing", log=tmp_path)
    app.topic("events", Event, key="ad", partitions=2).stream(time="at").foreach(explode)
    send(tmp_path, rows(10))
    line = explode.__code__.co_firstlineno + 1
    with pytest.raises(
        UserCodeError, match=rf"test_outputs\.py:{line}: ZeroDivisionError"
    ) as caught:
        app.run(until="caught-up")
    assert "java" not in str(caught.value).lower()
    assert "py4j" not in repr(caught.value.__cause__)


def test_an_app_with_topics_joins_the_owner_of_the_folder_and_goes_on_without(spark, tmp_path):
    app = everything(tmp_path)
    send(tmp_path, rows(20))
    holder = "import sys, millstream as ms; l = ms.connect(sys.argv[1]); l.acquire_ownership(); print(1, flush=True); sys.stdin.read()"  # fmt: skip
    with subprocess.Popen(
        [sys.executable, "-c", holder, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        process.stdout.readline()
        assert app.run(until="caught-up").read == 20
        assert process.poll() is None
    send(tmp_path, rows(20, start=20))
    assert app.run(until="caught-up").read == 20


def test_a_newer_run_fences_an_older_one_off_everywhere(spark, tmp_path):
    send(tmp_path, rows(80))
    app = everything(tmp_path)

    def usurp(progress):
        with SqliteStateStore(app.folder / "views.db") as store:
            identity = (app.folder / "checkpoint" / "millstream-checkpoint-id").read_text()
            store.begin_run("every", "main", identity)

    with pytest.raises(FencedError):
        app.run(until="caught-up", rows_per_batch=20, on_progress=usurp)
    before = held(tmp_path)
    everything(tmp_path).run(until="caught-up")
    assert held(tmp_path)["read"] == 80 > before["read"]
