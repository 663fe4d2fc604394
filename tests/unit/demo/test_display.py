"""What the demo shows: figures in a line where no terminal is, a picture where one is."""

from __future__ import annotations

import io
from datetime import UTC, datetime, timedelta

import polars as pl
import pytest
from rich.console import Console

from millstream.demo.display import Counts, Display, Rates, duplicates, picture
from millstream.views.progress import Progress

HOUR = datetime(2019, 11, 24, 5, tzinfo=UTC)
BY_HOUR = pl.DataFrame(
    {
        "window_start": [HOUR, HOUR, HOUR + timedelta(hours=1)],
        "campaign": ["men", "women", "men"],
        "shown": [100, 50, 10],
        "clicked": [1, 0, 5],
        "copies": [104, 50, 15],
        "rate": [0.01, 0.0, 0.5],
    }
)


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


def test_duplicates_are_copies_beyond_the_first_of_each_event():
    assert duplicates(BY_HOUR) == 3
    assert duplicates(BY_HOUR.clear()) == 0


def test_the_picture_has_the_latest_hours_first_and_the_lag_of_each_partition():
    counts = Counts(100, 90, {"ad-events/0": 7, "ad-events/1": 0}, 2, 1234.0, HOUR)
    shown = _text(picture(counts, BY_HOUR))
    for part in ("83", "1,234", "Sun 24 Nov 05:00", "ad-events/0 7", "50.00%  5 of 10"):
        assert part in shown
    assert shown.index("Sun 24 Nov 06:00") < shown.rindex("Sun 24 Nov 05:00")
    assert _text(picture(Counts(0, 0, {}, 0, 0.0, None), BY_HOUR.clear()))


def test_lines_come_about_once_a_second_and_always_at_the_end():
    now = 0.0
    console = Console(file=io.StringIO(), width=200)
    with Display(console, clock=lambda: now) as display:
        for lag in (9, 8, 7, 6, 0):
            display.show(_progress(lag=lag), BY_HOUR, records=20, arrived=20, late=1)
            now += 0.3
    lines = console.file.getvalue().splitlines()
    assert [line.split(" (")[0] for line in lines[1:]] == ["read 11 of 20", "read 20 of 20"]
    assert "late 1  duplicates 3  hours 2" in lines[1]


def test_a_terminal_gets_a_picture_that_is_redrawn():
    console = Console(file=io.StringIO(), width=120, force_terminal=True)
    with Display(console) as display:
        display.show(_progress(), BY_HOUR, records=20, arrived=20, late=1)
    assert "click rate by campaign" in console.file.getvalue()


def test_the_rate_is_over_the_last_seconds():
    now = 0.0
    rates = Rates(clock=lambda: now)
    assert rates.add(1_000_000) == 0.0
    for _ in range(20):
        now += 1.0
        rate = rates.add(50)
    assert rate == pytest.approx(50.0)
