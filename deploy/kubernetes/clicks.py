"""Clicks per ad and minute: the pipeline of these manifests. The environment says where everything is."""

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
    log=os.environ["LOG"],
    state=os.environ["STATE"],
    store=os.environ["STORE"],
    local=os.environ["MILLSTREAM_LOG"],
    buckets=16,
)
clicks = app.topic("clicks", Click, key="ad", partitions=4).stream(
    time="at", watermark=ms.watermark("1 minute")
)
minutes = clicks.window(ms.tumbling("1 minute"), by="ad").emit("update").agg(n=ms.count())
minutes.view("clicks_by_minute")
