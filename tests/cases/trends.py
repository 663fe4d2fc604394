"""P1 to P7 of the semantics in one pipeline: windows beside those of a week ago, alerts, and parts beside parts.

P2 to P6 are pages of their own. All hours are those of New York. P6's correction comes last, and is late by days. Where a
window has to be closed, a clock passes: events of 0 on pages of its own, so many that each partition has some.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import polars as pl

import millstream as ms

ZONE = "America/New_York"
HOUR, WEEK = timedelta(hours=1), timedelta(days=7)
CLOCKS = 60


def local(month, day, hour):
    return datetime(2026, month, day, hour, tzinfo=ZoneInfo(ZONE)).astimezone(UTC)


START = local(1, 12, 10)


@dataclass
class Event:
    at: datetime
    page: str
    n: int


def app():
    """Declare the pipeline."""
    made = ms.App("trends", log="unused", buckets=3)
    events = made.topic("events", Event, key="page").stream(
        time="at",
        watermark=ms.watermark("1 hour", idle=None),
        late="correct",
        lateness="10 days",
    )
    hourly = events.window(ms.tumbling("1 hour"), by="page").agg(n=ms.sum("n"))
    trend = hourly.compare("n", to="1 week", zone=ZONE)
    trend.view("trend")
    alerts = trend.alert(
        when=(pl.col("n_ratio") > 1.3) & (pl.col("n") >= 10),
        recover=pl.col("n_ratio") < 1.1,
        for_windows=2,
    )
    alerts.view("alerts")
    parts = events.window(ms.cumulating("1 hour", "30 minutes"), by="page").agg(n=ms.sum("n"))
    parts.compare("n", to="1 week", zone=ZONE).view("parts")
    return made


def hours(page, before, now):
    """Events of the same hours of two weeks; None stands for an hour without events."""
    for start, values in ((START - WEEK, before), (START, now)):
        for number, n in enumerate(values):
            if n is not None:
                yield Event(start + number * HOUR, page, n)


def clock(at):
    """Events that take the watermark of every partition to a time."""
    return [Event(at + HOUR, f"clock {number}", 0) for number in range(CLOCKS)]


def inputs():
    hundred = [100] * 6
    events = [
        *hours("p1", [100], [140]),
        *hours("p2 small", [0] * 6, [5] * 6),
        *hours("p2 large", [0] * 6, [50] * 6),
        *hours("p3", [None] * 6, [500] * 6),
        *hours("p5", hundred, [140, 120, 135, 140, 120, 105]),
        *hours("p6", [100] * 3, [140] * 2),
        *(Event(local(3, 8, 0) + n * HOUR, "p4", n + 1) for n in range(6)),  # 0:00, 1:00, 3:00, …
        *(Event(local(3, 15, hour), "p4", 100) for hour in range(4)),
        Event(local(1, 5, 10), "p7", 50),
        Event(local(1, 5, 10) + HOUR / 2, "p7", 50),
        Event(local(1, 12, 10), "p7", 60),
        Event(local(1, 12, 10) + HOUR / 2, "p7", 80),
    ]
    correction = Event(START + HOUR, "p6", -20)
    early = sorted((e for e in events if e.at.month == 1), key=lambda e: e.at)
    march = sorted((e for e in events if e.at.month == 3), key=lambda e: e.at)
    between = clock(START + timedelta(days=2))
    end = clock(local(3, 15, 0) + timedelta(days=100))
    return {"events": [*early, *between, correction, *march, *end]}


def check(out):
    """Make sure that the views have what was published."""
    trend = {
        (row["page"], row["window_start"]): (row["n"], row["n_before"], row["n_ratio"])
        for row in out["trend"].to_dicts()
    }
    assert trend["p1", START] == (140, 100, 1.4)
    assert trend["p2 small", START] == (5, 0, float("inf"))
    assert trend["p3", START] == (500, None, None)
    # A week ago the clocks skipped 2:00, so the third hour then was 3:00.
    assert [trend["p4", local(3, 15, hour)][1] for hour in range(4)] == [1, 2, None, 3]
    alerts = {}
    for row in out["alerts"].sort("window_start").to_dicts():
        number = (row["window_start"] - START) // HOUR + 1
        if row["page"] != "p4":  # which grows so much that it fires
            alerts.setdefault(row["page"], []).append((number, row["alert"]))
    assert alerts == {"p2 large": [(2, "firing")], "p5": [(4, "firing"), (6, "resolved")]}
    parts = {
        (row["window_end"] - row["window_start"]) / HOUR: (row["n_before"], row["n_ratio"])
        for row in out["parts"].to_dicts()
        if row["page"] == "p7" and row["window_start"] == START
    }
    assert parts == {0.5: (50, 1.2), 1.0: (100, 1.4)}
