"""Click rates by the hour, from a stream with duplicates, disorder and stragglers.

`millstream demo ads` runs this pipeline on a real week of events and checks its answer; here it is
to read, to change, and to run on a log of your own:

    python examples/ads/app.py            or            millstream run examples/ads/app.py

It reads the topic `ad-events` of the log folder `./data` and keeps two views, which
`millstream view show ctr_by_hour` shows while it runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

import polars as pl

import millstream as ms


@dataclass(frozen=True)
class AdEvent:
    """An ad was shown or clicked; or a server only says what time it is."""

    event_id: str
    kind: str  # "impression", "click" or "heartbeat"
    occurred_at: datetime
    campaign: str | None = None
    policy: str | None = None
    ad: int | None = None
    slot: int | None = None
    user: int | None = None


app = ms.App("ads", log="./data")
events = app.topic("ad-events", AdEvent, key="user", partitions=4)

# Events come up to 10 minutes out of order, and some up to 3 hours late. Heartbeats move the
# watermark before they are filtered out; every partition has them, so none is ever idle.
sent = events.stream(
    time="occurred_at", watermark=ms.watermark("10 minutes", idle=None), lateness="3 hours"
).filter(pl.col("kind") != "heartbeat")

# Servers send an event again when they get no answer. Copies have the same id and the same time:
# they meet in one window, and come out of it as one row.
once = (
    sent.window(ms.tumbling("1 hour"), by=["event_id", "kind", "campaign", "policy"])
    .emit("final")
    .agg(copies=ms.count())
)

shown = ms.count(pl.col("kind") == "impression")
clicked = ms.count(pl.col("kind") == "click")
copies = ms.sum("copies")
rate = pl.col("clicked") / pl.col("shown")

(
    once.window(ms.tumbling("1 hour"), by="campaign")
    .emit("update")
    .agg(shown=shown, clicked=clicked, copies=copies)
    .with_columns(rate=rate)
    .view("ctr_by_hour")
)
(
    once.window(ms.tumbling("1 day"), by=["campaign", "policy"])
    .emit("update")
    .agg(shown=shown, clicked=clicked, copies=copies)
    .with_columns(rate=rate)
    .view("totals_by_day")
)

if __name__ == "__main__":
    print(app.run())
