"""Requests per page and hour beside the same hour a week ago, and an alert when one runs away.

    pip install "millstream[spark]"
    python examples/trend.py

Two weeks of made-up requests: each page has its own daily curve, in New York's time, and on the last
day one of them gets twice as many. The weekend between the weeks is the one in which clocks go forward.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from zoneinfo import ZoneInfo

import polars as pl

import millstream as ms

ZONE = ZoneInfo("America/New_York")
FIRST = datetime(2026, 3, 2, tzinfo=ZONE)  # a Monday
DAYS = 14
PAGES = {"/home": 60, "/search": 30}  # requests in the busiest hour
RUNS_AWAY = "/search"
HOUR = timedelta(hours=1)


@dataclass(frozen=True)
class Request:
    """Somebody asked for a page."""

    at: datetime
    page: str


def pipeline(folder: Path | str) -> ms.App:
    """Declare two views: the trend of every page and hour, and the alerts."""
    app = ms.App("trend", log=folder)
    # One partition: with idle=None each of them must have records, and two pages fill two at most.
    requests = app.topic("requests", Request, key="page", partitions=1).stream(
        time="at", watermark=ms.watermark("5 minutes", idle=None)
    )
    hourly = requests.window(ms.tumbling("1 hour"), by="page").agg(n=ms.count())
    trend = hourly.compare("n", to="1 week", zone=ZONE.key)
    trend.view("trend")
    trend.alert(
        when=(pl.col("n_ratio") > 1.3) & (pl.col("n") >= 20),
        recover=pl.col("n_ratio") < 1.1,
        for_windows=2,
    ).view("alerts")
    return app


def requests() -> Iterator[Request]:
    """Make the requests of two weeks, in the order of time."""
    end = (FIRST + timedelta(days=DAYS)).astimezone(UTC)
    hour = FIRST.astimezone(UTC)
    while hour < end:
        local = hour.astimezone(ZONE)
        last_day = local.date() == (FIRST + timedelta(days=DAYS - 1)).date()
        for page, most in PAGES.items():
            count = most * (12 - abs(local.hour - 13)) // 12
            count *= 2 if page == RUNS_AWAY and last_day and 9 <= local.hour < 15 else 1
            for number in range(count):
                yield Request(hour + HOUR * number / count, page)
        hour += HOUR


def main() -> None:
    """Write the requests, run the pipeline over them, and print the alerts."""
    with tempfile.TemporaryDirectory() as folder:
        app = pipeline(folder)
        with ms.connect(folder) as log:
            log.create_topic("requests", partitions=app.topics["requests"].partitions)
            with log.producer() as producer:
                for request in requests():
                    producer.send("requests", request, key=request.page)
        print(app.run(until="caught-up", show=True))
        with pl.Config(tbl_rows=-1, tbl_hide_dataframe_shape=True):
            print(ms.view("alerts", log=folder, app="trend").scan())


if __name__ == "__main__":
    main()
