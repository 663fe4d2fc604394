"""The kit, the log and the views on whichever versions of the libraries are installed; no Java."""

import json
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal

import polars as pl
import pytest

import millstream as ms
from millstream import testing
from millstream.testing import Tick, Watermark

START = datetime(2026, 1, 1, 12, tzinfo=UTC)


@dataclass
class Click:
    id: str
    user: str
    at: datetime
    cost: Decimal
    tags: list[str]


def rows(count=60):
    return [
        Click(
            f"e{n % 50}", f"u{n % 3}", START + timedelta(seconds=7 * n), Decimal(n) / 4, ["a", "b"]
        )
        for n in range(count)
    ]


def stream(app, **options):
    topic = app.topic("clicks", Click, key="user", metadata=("partition", "offset"))
    return topic.stream(time="at", **options)


END = Watermark("clicks", at=START + timedelta(days=1))


@pytest.mark.parametrize(
    "window",
    [
        ms.tumbling("1 minute"),
        ms.hopping("2 minutes", "1 minute"),
        ms.calendar("1 day", tz="Europe/Berlin"),
        ms.session("30 seconds"),
        ms.sliding("1 minute"),
        ms.count_window(5, unbounded=True),
    ],
    ids=str,
)
def test_every_kind_of_window_counts_every_event_however_batches_and_crashes_fall(window):
    app = ms.App("windows", log="unused")
    counted = (
        stream(app)
        .window(window, by="user")
        .agg(n=ms.count(), cost=ms.sum("cost"), newest=ms.max("at"), users=ms.distinct("id"))
    )
    counted.view("v")
    inputs = {"clicks": [*rows(), Tick(after="1 second"), END]}
    whole = testing.run(app, inputs, partitions=2, seed=1)["v"]
    assert whole.height > 0
    parts = testing.run(app, inputs, partitions=2, seed=1, batches=4, crash=1)["v"]
    assert parts.sort(parts.columns).equals(whole.sort(whole.columns))


def test_steps_dedup_budget_dead_letters_and_retractions():
    app = ms.App("steps", log="unused")
    kept = stream(app).filter(pl.col("cost") > 0).with_columns(day=pl.col("at").dt.date())
    once = kept.dedup("id", within="1 day")
    once.view("once", key="id")
    once.explode("tags").map_frames(lambda frame: frame).view("tags", key=("id", "tags"))
    decided = once.budget("user", cost="cost", limit=pl.lit(Decimal(40)))
    decided.view("decided", key=("partition", "offset"))
    minutes = once.window(ms.tumbling("1 minute"), by="user").emit("retract").agg(n=ms.count())
    minutes.window(ms.tumbling("1 hour")).emit("update").agg(n=ms.sum("n")).view("hours")
    out = testing.run(app, {"clicks": [*rows(), b"no JSON", END]}, partitions=1, batches=3)
    assert out["once"].height == 50
    assert out["tags"].height == 100
    assert out["hours"]["n"].sum() == 50
    assert out["decided"].height == 50
    assert out.dead.height == 1


def test_the_log_takes_records_and_tables_and_gives_them_back(tmp_path):
    with ms.connect(tmp_path) as log, log.producer(compression="zstd") as producer:
        log.create_topic("t", partitions=2)
        producer.send("t", rows(1)[0], key="u").result()
        frame = pl.DataFrame({"user": ["a", "b"], "n": [1, 2], "at": [START, START]})
        assert producer.send_many("t", rows=frame, key="user").result() == 2
        assert producer.send_many("t", rows=frame.to_arrow()).result() == 2
        with log.consumer("t", group="g", follow=False) as consumer:
            found = [record.json() for record in consumer]
        assert len(found) == 5
        assert sum(log.read("t", number).num_rows for number in range(2)) == 5
        assert [row.behind for row in log.lag("g")] == [0, 0]
    assert json.loads(json.dumps(found))
