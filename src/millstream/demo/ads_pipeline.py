"""The demo's pipeline: duplicates collapse, then rates per hour and per day are kept up to date.

The same text, to read and to copy from, is `examples/ads/app.py`.
"""

from __future__ import annotations

from pathlib import Path

import polars as pl

import millstream as ms
from millstream.demo.ads_events import PARTITIONS, TOPIC, AdEvent

APP = "ads"
RATES_BY_HOUR = "ctr_by_hour"
TOTALS_BY_DAY = "totals_by_day"


def build(log: Path | str) -> ms.App:
    """Declare the pipeline over a log folder."""
    app = ms.App(APP, log=log)
    events = app.topic(TOPIC, AdEvent, key="user", partitions=PARTITIONS)

    # Heartbeats move the watermark and are then left out. As every partition has them, none is
    # ever idle (idle=None), and the answer depends on the events alone.
    sent = events.stream(
        time="occurred_at", watermark=ms.watermark("10 minutes", idle=None), lateness="3 hours"
    ).filter(pl.col("kind") != "heartbeat")

    # Copies of an event carry its id and its time, so they meet in one window and become one row.
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
        .view(RATES_BY_HOUR)
    )
    (
        once.window(ms.tumbling("1 day"), by=["campaign", "policy"])
        .emit("update")
        .agg(shown=shown, clicked=clicked, copies=copies)
        .with_columns(rate=rate)
        .view(TOTALS_BY_DAY)
    )
    _declare_dashboard(app)
    return app


def _declare_dashboard(app: ms.App) -> None:
    shown = ms.panels.Measure("Shown", "shown")
    clicked = ms.panels.Measure("Clicked", "clicked")
    rate = ms.panels.Measure("Click rate", "clicked", per="shown", unit="percent")
    app.dashboard(
        ms.panels.Counters("The week so far", TOTALS_BY_DAY, (shown, clicked, rate)),
        ms.panels.Lines("Click rate per hour", RATES_BY_HOUR, (rate,), last="7 days"),
        ms.panels.Lines("Impressions per hour", RATES_BY_HOUR, (shown,), last="7 days"),
        ms.panels.Top(
            "Campaigns", TOTALS_BY_DAY, by="campaign", measures=(shown, clicked, rate), rows=5
        ),
    )
