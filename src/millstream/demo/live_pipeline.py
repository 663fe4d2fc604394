"""The pipeline of the demo's live part, and the process that runs it, to be killed.

It is the pipeline of `ads_pipeline.py`, with one view more: the minutes in which a client's ads were clicked
as no reader clicks. A window is reported while it is open, and corrected by what comes late, so an alarm is
in the view seconds after the first clicks, and the view is right at the end.

    python -m millstream.demo.live_pipeline FOLDER ENGINE
"""

from __future__ import annotations

import sys
import threading
from contextlib import suppress
from pathlib import Path

import polars as pl

import millstream as ms
from millstream.choices import choose
from millstream.demo.ads_pipeline import (
    AD_CTR,
    APP,
    BUDGETS,
    COST,
    RATE,
    SHOWN,
    STOPPED_ADS,
    TOO_LATE,
    TOP_ADS,
    declare_outputs,
)
from millstream.demo.feed import interrupt_main
from millstream.demo.live_events import CLIENTS, STOP_RULE
from millstream.pipeline.engine_choice import ENGINES, EngineName

CLICK_ALARMS = "click_alarms"
# More than a quarter of the impressions of a minute clicked, and no mere handful of clicks.
ALARM_CLICKS_MIN, ALARM_SHARE = 10, 4


def build(log: Path) -> ms.App:
    """Declare the live pipeline over a log folder."""
    app = ms.App(APP, log=log)
    once = declare_outputs(app, CLIENTS, STOP_RULE)
    add_click_alarms(once)
    add_dashboard(app)
    return app


def add_click_alarms(once: ms.Stream) -> None:
    """Keep the minutes in which too many of a client's impressions were clicked."""
    minutes = once.window(ms.tumbling("1 minute"), by="client").emit("update", early="10 seconds")
    counts = minutes.agg(
        shown=ms.count(pl.col("kind") == "impression"), clicked=ms.count(pl.col("kind") == "click")
    )
    many = pl.col("clicked") >= ALARM_CLICKS_MIN
    counts.filter(many & (pl.col("clicked") * ALARM_SHARE > pl.col("shown"))).view(CLICK_ALARMS)


def add_dashboard(app: ms.App) -> None:
    """Declare the panels of the page."""
    app.dashboard(
        ms.panels.Lines("Impressions per minute", AD_CTR, (SHOWN,), last="2 hours"),
        ms.panels.Lines("Click rate per minute", AD_CTR, (RATE,), last="2 hours"),
        ms.panels.Newest(
            "Alarms: clicked as no reader clicks",
            CLICK_ALARMS,
            by="window_start",
            show=("client", "shown", "clicked"),
            rows=8,
        ),
        BUDGETS,
        ms.panels.Lines("Cost per minute", AD_CTR, (COST,), last="2 hours"),
        TOP_ADS,
        ms.panels.Newest("Stopped ads", STOPPED_ADS, by="stopped_at", show=("ad", "shown")),
        TOO_LATE,
    )


def main(folder: str, engine: str) -> None:
    """Run the pipeline until standard input is closed, which the end of its parent does, too."""
    threading.Thread(target=_interrupt_when_left, daemon=True).start()
    chosen: EngineName = choose("engine", engine, ENGINES)
    with suppress(KeyboardInterrupt):  # before the run has begun to count interrupts
        print(build(Path(folder)).run(engine=chosen, show=False), flush=True)


def _interrupt_when_left() -> None:
    sys.stdin.buffer.read()
    interrupt_main()


if __name__ == "__main__":
    main(*sys.argv[1:])
