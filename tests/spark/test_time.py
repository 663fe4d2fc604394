"""Time on Spark: what only the real planner, its offsets and its empty batches can show."""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import polars as pl

import millstream as ms
from millstream import testing
from millstream.views.state_store.sqlite_store import SqliteStateStore

START = datetime(2026, 1, 1, tzinfo=UTC)


@dataclass
class Event:
    at: datetime
    device: str
    kind: str = "event"


def test_over_processing_time_the_last_window_closes_without_another_event(spark, tmp_path):
    app = ms.App("arrivals", log=tmp_path)
    topic = app.topic("events", Event, partitions=2)
    stream = topic.stream(time=ms.processing_time(settle="0 seconds"))
    stream.window(ms.tumbling("1 second"), by=()).emit("final").agg(n=ms.count()).view("final")
    with ms.connect(tmp_path) as log:
        log.create_topic("events", partitions=2)
        with log.producer() as producer:
            for number in range(10):
                producer.send("events", {"at": START.isoformat(), "device": str(number)})
    emitted = 0

    def closed(progress):
        nonlocal emitted
        emitted += progress.emitted
        return emitted > 0

    report = app.run(until=closed, timeout="2 minutes")
    assert report.reason == "condition"
    with SqliteStateStore(app.folder / "views.db", readonly=True) as store:
        assert store.scan("final")["n"].sum() == 10


def test_producers_are_told_apart_as_in_process(spark):
    app = ms.App("fleet", log="unused")
    rule = ms.watermark("2 seconds", per="device", ends=pl.col("kind") == "bye", idle=None)
    stream = app.topic("events", Event, partitions=2).stream(time="at", watermark=rule)
    window = ms.tumbling("10 seconds")
    stream.window(window, by="device").emit("final").agg(n=ms.count()).view("final")
    lags = {"a": 0, "b": 25, "c": 5}
    rows = [
        testing.Row(
            Event(
                START + timedelta(seconds=at - lags[device]),
                device,
                "bye" if at % 37 == 0 else "event",
            ),
            partition=number % 2,
        )
        for at in range(1, 90)
        for number, device in enumerate("abc")
    ]
    spark = testing.run(app, {"events": rows}, batches=3, engine="spark")
    kernel = testing.run(app, {"events": rows}, batches=5, seed=4)
    assert spark["final"].equals(kernel["final"])
    assert (spark.late, spark.watermark) == (kernel.late, kernel.watermark)
    assert spark["final"].height > 10
