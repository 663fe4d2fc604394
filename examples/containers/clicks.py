"""Clicks per ad and minute: the pipeline of compose.yaml. The environment names brokers and database."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import datetime

import millstream as ms


@dataclass(frozen=True)
class Click:
    """An ad was clicked."""

    ad: str
    at: datetime


app = ms.App(
    "clicks",
    log=os.environ["BROKERS"],
    state=os.environ["MILLSTREAM_LOG"],
    views=os.environ.get("MILLSTREAM_VIEWS"),
)
clicks = app.topic("clicks", Click, key="ad").stream(time="at", watermark=ms.watermark("1 minute"))
minutes = clicks.window(ms.tumbling("1 minute"), by="ad").emit("update").agg(n=ms.count())
minutes.view("clicks_by_minute")
