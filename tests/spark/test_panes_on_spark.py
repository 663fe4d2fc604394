"""Panes of sliding windows and of count windows with a timeout on Spark: those that the kernels give in process."""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import pytest

import millstream as ms
from millstream import testing

START = datetime(2026, 1, 1, tzinfo=UTC)


@dataclass
class Event:
    at: datetime
    key: str
    n: int


@pytest.mark.long
def test_panes_by_count_are_those_of_the_kernels(spark, in_turns):
    app = ms.App("panes", log="unused")
    stream = app.topic("events", Event, key="key").stream(
        time="at", watermark=ms.watermark("0 seconds", idle=None), lateness="8 seconds"
    )
    sliding = ms.sliding("10 seconds", rank="place")
    aggregates = {"rows": ms.count(), "total": ms.sum("n"), "values": ms.list("n")}
    for name, emit in {
        "by_count": {"early": ms.after_count(2), "late": ms.after_count(2)},
        "each": {"early": "each", "late": "each"},
        "once": {"early": ms.once(ms.after_count(2))},
    }.items():
        windowed = stream.window(sliding, by="key", name=name).emit("retract", panes=True, **emit)
        windowed.agg(**aggregates).view(name)
    counted = ms.count_window(4, timeout="9 seconds", unbounded=True)
    windowed = stream.window(counted, by="key", name="counts")
    windowed.emit("retract", early=ms.after_count(3), panes=True).agg(**aggregates).view("counts")
    rows = [
        Event(START + timedelta(seconds=n * 7 % 30 + n // 4), "adbé"[n * n % 4], n)
        for n in range(90)
    ]
    given = {
        "events": [*rows, Event(START + timedelta(hours=1), "a", 0)]
    }  # the watermark passes all
    on_spark = testing.run(app, given, partitions=1, batches=3, engine="spark")
    in_process = testing.run(app, given, partitions=1, batches=5, seed=4)
    assert set(on_spark.views) == set(in_process.views) == {"by_count", "each", "once", "counts"}
    for name in on_spark.views:
        keys = ["key", "window_start", "place" if name != "counts" else "window_number"]
        found, expected = (run[name].sort(keys) for run in (on_spark, in_process))
        assert found.equals(expected), name
        assert found.height > 5
