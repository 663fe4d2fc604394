"""What the demo shows: figures in a line where no terminal is, a picture where one is."""

from __future__ import annotations

import io
from datetime import UTC, date, datetime
from decimal import Decimal

import polars as pl
import pytest
from rich.console import Console

from millstream.demo.display import Display, DisplayFigures, ReadRate, figures_table
from millstream.views.runs.progress import Progress

HOUR = datetime(2019, 11, 24, 5, tzinfo=UTC)
SPEND = pl.DataFrame(
    {
        "client": ["men", "men", "women"],
        "budget_day": [date(2019, 11, 23), date(2019, 11, 24), date(2019, 11, 24)],
        "spent": [Decimal("9.90"), Decimal("0.10"), Decimal("-1.00")],
        "budget": [Decimal("10.00")] * 3,
    }
)
LEFT_OUT = {"late": 2, "duplicate": 3, "dead": 1}


def _progress(read: int = 10, lag: int = 5) -> Progress:
    return Progress(
        app="ads",
        batch_id=0,
        at=HOUR,
        duration_ms=100.0,
        read=read,
        emitted=3,
        held=0,
        late=0,
        filtered=0,
        dead=0,
        duplicate=0,
        watermark=HOUR,
        lag={"ad-events/0": lag, "ad-events/1": 0},
        behind_s=0.1,
        state_bytes=0,
    )


def _text(renderable) -> str:
    console = Console(file=io.StringIO(), width=120, force_terminal=False)
    console.print(renderable)
    return console.file.getvalue()


def test_the_picture_has_each_clients_newest_day_and_the_lag_of_each_partition():
    lag = {"ad-events/0": 7, "ad-events/1": 0}
    counts = DisplayFigures(100, 90, lag, per_s=1234.0, watermark=HOUR, **LEFT_OUT)
    shown = _text(figures_table(counts, SPEND, "http://here"))
    for part in (
        "83",
        "1,234",
        "Sun 24 Nov 05:00",
        "ad-events/0 7",
        "http://here",
        "-1.00",
        "0.10",
    ):
        assert part in shown
    assert "9.90" not in shown
    assert shown.index("men") < shown.index("women")  # the nearest to its budget stands first
    nothing = DisplayFigures(0, 0, {}, per_s=0.0, watermark=None, late=0, duplicate=0, dead=0)
    assert _text(figures_table(nothing, SPEND.clear()))


def test_lines_come_about_once_a_second_and_always_at_the_end():
    now = 0.0
    console = Console(file=io.StringIO(), width=200)
    with Display(console, clock=lambda: now) as display:
        for lag in (9, 8, 7, 6, 0):
            display.show(_progress(lag=lag), SPEND, records=20, arrived=20, left_out=LEFT_OUT)
            now += 0.3
    lines = console.file.getvalue().splitlines()
    assert [line.split(" (")[0] for line in lines[1:]] == ["read 11 of 20", "read 20 of 20"]
    assert "duplicates 3  late 2  dead 1" in lines[1]


def test_a_terminal_gets_a_picture_that_is_redrawn():
    console = Console(file=io.StringIO(), width=120, force_terminal=True)
    with Display(console) as display:
        display.show(_progress(), SPEND, records=20, arrived=20, left_out=LEFT_OUT)
    assert "spent today" in console.file.getvalue()


def test_the_rate_is_over_the_last_seconds():
    now = 0.0
    rates = ReadRate(clock=lambda: now)
    assert rates.add(1_000_000) == 0.0
    for _ in range(20):
        now += 1.0
        rate = rates.add(50)
    assert rate == pytest.approx(50.0)
