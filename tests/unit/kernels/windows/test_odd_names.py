"""Columns may have any name, such as one that polars takes for a pattern."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import polars as pl
import pytest

import millstream as ms
from millstream import testing
from millstream.testing import Watermark

START = datetime(2026, 1, 1, tzinfo=UTC)
NAME = "^a.*$"


@pytest.mark.parametrize("mode", ["update", "retract"])
@pytest.mark.parametrize(
    "window", [ms.session("10 seconds"), ms.sliding("10 seconds"), ms.tumbling("10 seconds")]
)
def test_windows_take_keys_and_aggregates_of_any_name(window, mode):
    app = ms.App("names", log="unused")
    events = app.topic("events", {NAME: str, "ab": int, "at": datetime}, key=NAME).stream(
        time="at", watermark=ms.watermark("0 seconds", idle=None), lateness="1 hour"
    )
    panes = (
        events.window(window, by=NAME).emit(mode).agg(**{"^n.*$": ms.sum("ab"), "n": ms.count()})
    )
    panes.view("rows")
    signed = panes if mode == "retract" else panes.filter(pl.col("n") > 0)
    signed.group_by("n").agg(rows=ms.count()).view("sums")
    rows = [
        {NAME: "x", "ab": value, "at": START + timedelta(seconds=second)}
        for second, value in ((0, 1), (5, 2), (3, 0), (40, 4), (7, 3))
    ]
    inputs = {"events": [*rows, Watermark("events", at=START + timedelta(hours=3))]}
    found = [testing.run(app, inputs, batches=batches, partitions=1) for batches in (1, 5)]
    for view in ("rows", "sums"):
        one, other = (run[view] for run in found)
        assert one.rows() == other.rows()
        assert one.height
