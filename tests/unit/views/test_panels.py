"""Panels are checked where they are declared, and come back from the store as they went in."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import date, datetime
from decimal import Decimal

import polars as pl
import pytest

import millstream as ms
from millstream.errors import ConfigError
from millstream.views.panels import from_plain, to_plain
from millstream.views.schema import Fence
from millstream.views.server.panel_data import panel_data
from millstream.views.state_store.sqlite_store import SqliteStateStore
from millstream.views.state_store.store import ViewChange, ViewSchema

N = ms.panels.Measure("N", "n")
EVERY = [
    ms.panels.Lines("a", "counts", (N, ms.panels.Measure("Rows")), last="1 hour"),
    ms.panels.Top("b", "counts", by="ad", measures=(N,), rows=3, time="window_start"),
    ms.panels.Limits("c", "counts", "ad", "n", "n", unit="€", newest="window_start", places=2),
    ms.panels.Counters("d", "counts", (ms.panels.Measure("N", "n", per="n", unit="percent"),)),
    ms.panels.Newest("e", "counts", by="window_start", show=("ad",)),
]


@dataclass
class Event:
    ad: str
    at: datetime


@pytest.fixture
def app(tmp_path):
    app = ms.App("app", log=tmp_path)
    stream = app.topic("events", Event).stream(time="at")
    counts = stream.window(ms.tumbling("1 minute"), by="ad").agg(n=ms.count())
    counts.view("counts")
    counts.view("elsewhere", store="postgresql://localhost/db")
    return app


def test_panels_come_back_as_they_were_declared(app):
    app.dashboard(*EVERY)
    stored = json.loads(json.dumps([to_plain(panel) for panel in app.panels]))
    assert [from_plain(plain) for plain in stored] == EVERY
    assert from_plain({**stored[0], "labels": ["more"], "number": 0}) == EVERY[0]


@pytest.mark.parametrize(
    ("panel", "said"),
    [
        (ms.panels.Counters("P", "nope", (N,)), "view 'nope'; the app has counts"),
        (ms.panels.Counters("P", "elsewhere", (N,)), "view 'elsewhere'; the app has counts"),
        (ms.panels.Lines("P", "counts", (N,), time="t"), "column 't' of the view 'counts'"),
        (ms.panels.Lines("P", "counts", (N,), last="5"), "'P': last is '5'"),
        (ms.panels.Lines("P", "counts", ()), "'P' has no measures"),
        (ms.panels.Top("P", "counts", by="ad", measures=(N,), rows=0), "rows=0. Allowed are 1 to"),
        (ms.panels.Newest("P", "counts", by="m", show=()), "column 'm'"),
        (ms.panels.Limits("P", "counts", "ad", "n", "n", newest="d"), "column 'd'"),
        (ms.panels.Limits("P", "counts", "ad", "n", "n", places=-1), "places=-1. Allowed are 0"),
        (ms.panels.Lines("P", "counts", (ms.panels.Measure("N", "n", places=13),)), "places=13"),
    ],
)
def test_a_panel_that_cannot_be_drawn_is_refused_where_it_is_declared(app, panel, said):
    with pytest.raises(ConfigError, match="The panel 'P'") as caught:
        app.dashboard(EVERY[0], panel)
    assert said in str(caught.value)
    assert app.panels == ()


def test_of_limits_the_newest_row_of_each_label_counts_and_amounts_are_rounded(tmp_path):
    rows = pl.DataFrame(
        {
            "client": ["a", "a", "b"],
            "day": [date(2026, 1, 31), date(2026, 2, 1), date(2026, 1, 31)],
            "spent": [Decimal("9.000000"), Decimal("1.004999"), Decimal("5.005001")],
            "budget": [Decimal("10.000000")] * 3,
        }
    )
    with SqliteStateStore(tmp_path / "views.db") as store:
        store.declare(ViewSchema.of("days", rows, ("client", "day")))
        run, batch_id = store.begin_run("app", "main", "c")
        fence = Fence("app", "main", run, batch_id)
        store.commit(fence, [ViewChange("days", rows)], position={}, status={})
        limits = ms.panels.Limits("P", "days", "client", "spent", "budget", newest="day", places=2)
        shown = panel_data(store, limits)["rows"]
        assert [[client, float(spent)] for client, spent, _ in shown] == [["b", 5.01], ["a", 1.0]]
        everything = panel_data(store, ms.panels.Limits("P", "days", "client", "spent", "budget"))
        assert [row[1] for row in everything["rows"]] == ["9.000000", "5.005001", "1.004999"]
        sums = ms.panels.Counters("P", "days", (ms.panels.Measure("S", "spent", places=1),))
        assert [float(n) for n in panel_data(store, sums)["rows"][0]] == [15.0]
