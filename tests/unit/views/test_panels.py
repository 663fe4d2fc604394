"""Panels are checked where they are declared, and come back from the store as they went in."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime

import pytest

import millstream as ms
from millstream.errors import ConfigError
from millstream.views.panels import from_plain, to_plain

N = ms.panels.Measure("N", "n")
EVERY = [
    ms.panels.Lines("a", "counts", (N, ms.panels.Measure("Rows")), last="1 hour"),
    ms.panels.Top("b", "counts", by="ad", measures=(N,), rows=3, time="window_start"),
    ms.panels.Limits("c", "counts", label="ad", value="n", limit="n", unit="€"),
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
    ],
)
def test_a_panel_that_cannot_be_drawn_is_refused_where_it_is_declared(app, panel, said):
    with pytest.raises(ConfigError, match="The panel 'P'") as caught:
        app.dashboard(EVERY[0], panel)
    assert said in str(caught.value)
    assert app.panels == ()
