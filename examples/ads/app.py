"""Ads: click rates, budgets, and ads to stop, from a stream with duplicates, disorder and stragglers.

`millstream demo ads` runs this pipeline on a real week of events and checks its answer; here it is
to read, to change, and to run on a log of your own, or on the demo's:

    python examples/ads/app.py            or            millstream run examples/ads/app.py

It reads the topic `ad-events` of the log folder `./demo-data`, keeps four views, such as `ad_ctr`, and
writes three topics, such as `ad-stops`. A second version of it is in `second.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal

import polars as pl

import millstream as ms

LOG = "./demo-data"

# Who pays: time zone, price of a click and budget of a day, in millionths of a euro.
CLIENTS = pl.DataFrame(
    [
        ("all-bts", "Asia/Tokyo", 400_000, 6_000_000),
        ("all-random", "America/New_York", 350_000, 4_500_000),
        ("men-bts", "Europe/Berlin", 600_000, 10_000_000),
        ("men-random", "UTC", 500_000, 8_500_000),
        ("women-bts", "Asia/Tokyo", 550_000, 7_500_000),
        ("women-random", "Europe/London", 450_000, 12_000_000),
    ],
    schema=["client", "zone", "click_micros", "budget_micros"],
    orient="row",
)


@dataclass(frozen=True)
class AdEvent:
    """An ad was shown or clicked, or a click was paid back; or a server only says what time it is.

    A device's own clock says when the event occurred and was sent; it may be wrong.
    """

    event_id: str
    kind: str  # "impression", "click", "refund" or "heartbeat"
    occurred_at: datetime
    received_at: datetime
    sent_at: datetime | None = None
    client: str | None = None
    ad: int | None = None
    slot: int | None = None
    user: int | None = None
    cost_micros: int | None = None  # below zero for a refund


def read(app: ms.App) -> ms.Stream:
    """Read the events, each once. They come up to a minute out of order, some up to an hour late.

    Heartbeats move the watermark before they are filtered out; every partition has them, so none is
    ever idle. Servers send an event again when they get no answer; copies have its id.
    """
    topic = app.topic("ad-events", AdEvent, key="client", partitions=4)
    sent = topic.stream(
        time=ms.device_time("occurred_at", "sent_at", "received_at"),
        watermark=ms.watermark("1 minute", idle=None),
        lateness="1 hour",
        late="side",
    ).filter(pl.col("kind") != "heartbeat")
    return sent.dedup("event_id", within="30 minutes")


def rate_of(usual: float, weight: int) -> pl.Expr:
    """Smooth a click rate: with few impressions it is near the usual one."""
    return (pl.col("clicked") + usual * weight) / (pl.col("shown") + weight)


def counted(windows: ms.Windowed, rate: pl.Expr) -> ms.Stream:
    """Count what there is to count of ads."""
    return windows.agg(
        shown=ms.count(pl.col("kind") == "impression"),
        clicked=ms.count(pl.col("kind") == "click"),
        cost=ms.sum("cost_micros"),
    ).with_columns(cost=euros("cost"), rate=rate)


def euros(micros: str) -> pl.Expr:
    """Return an amount in euros, exactly."""
    return pl.col(micros) * pl.lit(Decimal("0.000001"))


def per_minute(once: ms.Stream, rate: pl.Expr) -> ms.Stream:
    """Count by minute and ad: early, on time, and again for what comes within the hour."""
    return counted(
        once.window(ms.tumbling("1 minute"), by="ad").emit("update", early="10 seconds"), rate
    )


def unloved(once: ms.Stream, rate: pl.Expr, floor: float) -> ms.Stream:
    """Find ads whose rate was below the floor in five half days in a row, each with 60 impressions."""
    halves = counted(once.window(ms.tumbling("12 hours"), by="ad").emit("final"), rate)
    in_a_row = halves.filter(pl.col("shown") >= 60).window(
        ms.count_window(5, slide=1, unbounded=True), by="ad"
    )
    told = in_a_row.agg(rate_max=ms.max("rate"), shown=ms.sum("shown"), clicked=ms.sum("clicked"))
    once_each = told.filter(pl.col("rate_max") < floor).dedup("ad", within="30 days")
    return once_each.rename({"window_end": "stopped_at"}).select(
        "ad", "stopped_at", "rate_max", "shown", "clicked"
    )


def decided(once: ms.Stream) -> ms.Stream:
    """Decide on each event whether its client's budget of the day, in its own zone, still has it."""
    client, names = pl.col("client"), CLIENTS["client"]
    about = {
        column: client.replace_strict(names, CLIENTS[column], default=unknown)
        for column, unknown in (("budget_micros", 0), ("click_micros", 0), ("zone", "UTC"))
    }
    return once.with_columns(**about).budget(
        "client",
        cost="cost_micros",
        limit="budget_micros",
        least="click_micros",  # who cannot pay for one click is better not shown
        zone=pl.col("zone"),
    )


app = ms.App("ads", log=LOG)
events = read(app)
late = events.late.select("event_id", "kind", "client", "ad", "occurred_at", "late_by")
late.view("late_events", key="event_id")

RATE = rate_of(usual=0.005, weight=200)
per_minute(events, RATE).view("ad_ctr")

spent = decided(events)
served = pl.when(pl.col("decision") == "granted").then(pl.lit("served")).otherwise("decision")
shown = spent.filter(pl.col("kind") == "impression")
shown.select("event_id", "client", "ad", decision=served).to("decisions", key="client")
told = spent.filter(pl.col("budget_event").is_not_null())
told.select("client", "budget_day", "budget_event", "event_id").to("budget-events", key="client")
days = spent.select("client", "budget_day", spent=euros("spent"), budget=euros("budget_micros"))
days.view("spend_by_day", key=("client", "budget_day"))

stops = unloved(events, RATE, floor=0.0042)
stops.view("stopped_ads", key="ad")
stops.to("ad-stops", key="ad")

if __name__ == "__main__":
    print(app.run(until="caught-up"))
