"""A pipeline as a user would write it for YARN; `millstream run on_yarn.py --master yarn` runs it.

Its rows tell on which machine they were processed, by which Python, and whether the driver's folders were there.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import polars as pl

import millstream as ms

DRIVERS = os.environ["DRIVERS_FOLDERS"].split(":")


@dataclass
class Click:
    ad: int
    at: datetime


def located(table):
    """Add the machine, as YARN calls it, the Python's environment, and which folders of the driver it sees."""
    seen = [folder for folder in DRIVERS if Path(folder).exists()]
    return table.with_columns(
        machine=pl.lit(os.environ.get("NM_HOST", "driver")),
        prefix=pl.lit(Path(sys.prefix).name),
        millstream=pl.lit(str(Path(ms.__file__).is_relative_to(sys.prefix))),
        seen=pl.lit(",".join(seen)),
    )


app = ms.App(
    "clicks",
    log=os.environ["LOG"],
    state=os.environ["STATE"],
    store=os.environ["STORE"] or None,
    local=os.environ["LOCAL"],
    buckets=4,
)
clicks = app.topic("clicks", Click, key="ad", partitions=4).stream(
    time="at", watermark=ms.watermark("1 minute", idle=None)
)
where = clicks.map_frames(located)
where.window(ms.tumbling("1 minute"), by="ad").emit("update").agg(n=ms.count()).view("minutes")
PLACE = ("machine", "prefix", "millstream", "seen")
where.select(*PLACE, "at").view("machines", key=PLACE)
