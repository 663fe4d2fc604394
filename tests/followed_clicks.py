"""An app with a step of each kind, and clicks for it, some of them late: what tests follow records through."""

from __future__ import annotations

import random
from datetime import UTC, datetime, timedelta

START = datetime(2026, 1, 1, 12, tzinfo=UTC)
MINUTE = timedelta(minutes=1)

SOURCE = """
from datetime import datetime

import polars as pl

import millstream as ms

app = ms.App("ads", log=LOG, buckets=2)
fields = {"ad": str, "id": str, "cost": int, "at": datetime}
clicks = app.topic("clicks", fields)
stream = clicks.stream(time="at", watermark=ms.watermark("10 seconds"))

costly = stream.filter(pl.col("cost") > 0, name="costly")
minutes = costly.window(ms.tumbling("1 minute"), by="ad", name="minutes")
minutes.agg(n=ms.count(), cost=ms.sum("cost")).view("minutes")
stream.dedup("id", within="1 hour", name="once").select("id", "ad", "cost").view("firsts", key="id")
stream.table("ad", name="newest").select("ad", "id", "cost").view("newest")
stream.top(2, by=[("cost", "desc"), "id"], per="ad", rank="place", name="best").view("best")
pairs = costly.join(stream.select("id", other="cost"), "id", within=("0 seconds", "5 seconds"), name="pairs")
pairs.select("id", "cost", "other").view("pairs", key=["id", "cost", "other"])
"""


def clicks(count, seed):
    dice = random.Random(seed)
    rows = [
        {
            "ad": f"a{dice.randrange(3)}",
            "id": "",
            "cost": dice.randrange(4),
            "at": START + timedelta(seconds=7 * number - dice.choice((0, 0, 0, 90))),
        }
        for number in range(count)
    ]
    for row in rows:  # an id is of one ad, and so of one partition
        row["id"] = f"{row['ad']}-{dice.randrange(4)}"
    return rows
