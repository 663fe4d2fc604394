"""A pipeline with large stages, of an app whose executors come and go; `millstream run elastic_on_yarn.py --master yarn` runs it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import datetime

import polars as pl

import millstream as ms


@dataclass
class Click:
    id: str
    ad: int
    at: datetime
    text: str


def measured(table):
    """Read the whole text of rows that went through state, so frames have it."""
    return table.with_columns(size=pl.col("text").str.len_bytes())


app = ms.App("elastic", log=os.environ["LOG"], state=os.environ["STATE"], local=os.environ["LOCAL"])
clicks = app.topic("clicks", Click, key="id", partitions=4).stream(
    time="at", watermark=ms.watermark("1 minute", idle=None)
)
once = clicks.dedup("id", within="1 hour").map_frames(measured)
counts = once.window(ms.tumbling("1 minute"), by="ad").emit("update")
counts.agg(n=ms.count(), size=ms.sum("size")).view("minutes")
