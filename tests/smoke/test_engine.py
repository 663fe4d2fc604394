"""The engine on whichever PySpark is installed: the kernels' answers, through every layer once."""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import millstream as ms
from millstream import testing


@dataclass
class Event:
    id: str
    at: datetime
    ad: int


def test_two_stages_on_spark_give_the_answers_of_the_kernels():
    app = ms.App("smoke", log="unused")
    events = app.topic("events", Event, key="ad", partitions=3)
    stream = events.stream(time="at", watermark=ms.watermark("30 seconds", idle=None))
    once = stream.window(ms.tumbling("1 minute"), by=["id", "ad"]).agg(copies=ms.count())
    by_ad = once.window(ms.tumbling("1 minute"), by="ad").emit("update")
    by_ad.agg(n=ms.count(), copies=ms.sum("copies")).view("by_ad")
    start = datetime(2026, 1, 1, tzinfo=UTC)
    rows = [
        {"id": f"e{i}", "at": (start + timedelta(seconds=i)).isoformat(), "ad": i % 5}
        for i in range(300)
        for _ in range(1 + (i % 4 == 0))
    ]
    on_spark = testing.run(app, {"events": rows}, batches=3, engine="spark")["by_ad"]
    assert on_spark.height > 0
    assert on_spark.equals(testing.run(app, {"events": rows})["by_ad"])
