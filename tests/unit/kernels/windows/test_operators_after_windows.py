"""Operators behind a window, whose rows have no place in the log, and operators whose side output is unused."""

import json
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import polars as pl
import pytest

import millstream as ms
from millstream import testing

START = datetime(2026, 1, 1, tzinfo=UTC)


@dataclass
class Event:
    key: str
    n: int
    at: datetime


def at(seconds):
    return START + timedelta(seconds=seconds)


ROWS = [
    *(Event("ab"[n % 2], n * 7 % 11, at(n)) for n in range(30)),
    testing.Watermark("events", at=at(9999)),
]
AGGREGATES = {
    "first": (ms.first("n"), lambda values: values[0]),
    "last": (ms.last("n"), lambda values: values[-1]),
    "list": (ms.list("n"), lambda values: values),
    "least": (ms.min_by("n", "n"), min),
    "most": (ms.max_by("n", "n"), max),
}
WINDOWS = {
    "session": (ms.session("6 seconds"), [list(range(6))]),
    "count": (ms.count_window(2, unbounded=True), [[0, 1], [2, 3], [4, 5]]),
}


@pytest.mark.parametrize("name", AGGREGATES)
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("batches", [1, 4, 31])
def test_what_goes_by_order_is_told_behind_a_window_by_the_order_of_time(name, window, batches):
    aggregate, answer = AGGREGATES[name]
    shape, groups = WINDOWS[window]
    app = ms.App("behind", log="unused")
    stream = app.topic("events", Event, key="key").stream(
        time="at", watermark=ms.watermark("0 seconds", idle=None)
    )
    first = stream.window(ms.tumbling("5 seconds"), by="key").agg(n=ms.sum("n"))
    first.window(shape, by="key").agg(told=aggregate).view("out", key=["key", "window_start"])
    out = testing.run(app, {"events": ROWS}, partitions=1, batches=batches)["out"]
    events = [row for row in ROWS if isinstance(row, Event)]
    for key in "ab":
        sums = [
            sum(e.n for e in events if e.key == key and s <= (e.at - START).seconds < s + 5)
            for s in range(0, 30, 5)
        ]
        expected = [answer([sums[place] for place in group]) for group in groups]
        found = out.filter(pl.col("key") == key).sort("window_start")["told"].to_list()
        # A view keeps a list as JSON.
        assert [json.loads(told) if name == "list" else told for told in found] == expected


@pytest.mark.parametrize("early", [ms.after_count(2), "each"])
@pytest.mark.parametrize("batches", [1, 5, 31])
def test_panes_by_count_behind_a_window_follow_the_order_of_time(early, batches):
    app = ms.App("behind", log="unused")
    stream = app.topic("events", Event, key="key").stream(
        time="at", watermark=ms.watermark("0 seconds", idle=None)
    )
    first = stream.window(ms.tumbling("5 seconds"), by="key").agg(n=ms.sum("n"))
    parts = first.window(ms.session("6 seconds"), by="key").emit("discard", early=early, panes=True)
    parts.agg(told=ms.list("n")).view("out")
    out = testing.run(app, {"events": ROWS}, partitions=1, batches=batches)["out"]
    told = [
        json.loads(row["told"])
        for row in out.filter(pl.col("key") == "a").sort("pane_index").to_dicts()
    ]
    sums = first_sums("a")
    size = 2 if early != "each" else 1
    assert told == [sums[at : at + size] for at in range(0, 6, size)]


def first_sums(key):
    events = [row for row in ROWS if isinstance(row, Event) and row.key == key]
    return [
        sum(e.n for e in events if s <= (e.at - START).seconds < s + 5) for s in range(0, 30, 5)
    ]


@pytest.mark.parametrize("window", [ms.session("6 seconds"), ms.tumbling("6 seconds")])
def test_rows_of_a_topic_and_of_a_window_may_come_into_one(window):
    app = ms.App("behind", log="unused")
    stream = app.topic("events", Event, key="key").stream(
        time="at", watermark=ms.watermark("0 seconds", idle=None)
    )
    sums = stream.window(ms.tumbling("5 seconds"), by="key").agg(n=ms.sum("n"))
    both = stream.select("key", "n").union(sums.select("key", "n"))
    both.window(window, by="key").agg(rows=ms.count()).view("out", key=["key", "window_start"])
    out = testing.run(app, {"events": ROWS}, partitions=1, batches=3)["out"]
    assert out["rows"].sum() == 30 + 12


# ── side outputs ────────────────────────────────────────────────────────────────────────────────


def into_session(stream):
    return stream.window(ms.session("6 seconds"), by="key").agg(rows=ms.count())


def into_session_by_count(stream):
    windowed = stream.window(ms.session("6 seconds"), by="key")
    return windowed.emit("update", early="each").agg(rows=ms.count())


def into_tumbling(stream):
    return stream.window(ms.tumbling("6 seconds"), by="key").agg(rows=ms.count())


def into_panes(stream):
    windowed = stream.window(ms.hopping("6 seconds", "3 seconds"), by="key")
    return windowed.emit("update", early="each").agg(rows=ms.count())


def into_sliding(stream):
    return stream.window(ms.sliding("6 seconds"), by="key").agg(rows=ms.count())


def into_dedup(stream):
    return stream.dedup("key", within="6 seconds")


def into_budget(stream):
    return stream.budget("key", cost=pl.lit(1), limit=pl.lit(10))


STEPS = [
    into_session,
    into_session_by_count,
    into_tumbling,
    into_panes,
    into_sliding,
    into_dedup,
    into_budget,
]
LATE = [*ROWS[:30], Event("a", 5, at(-100_000)), testing.Watermark("events", at=at(9999))]


@pytest.mark.parametrize("used", ["neither", "late", "a column of late", "both"])
@pytest.mark.parametrize("step", STEPS)
def test_a_side_output_may_be_used_or_not_and_any_part_of_it(step, used):
    app = ms.App("aside", log="unused")
    stream = app.topic("events", Event, key="key").stream(
        time="at", watermark=ms.watermark("0 seconds", idle=None), late="side"
    )
    out = step(stream)
    if used in ("neither", "both"):
        out.view("out", key="key")
    if used in ("late", "both"):
        out.late.view("late", key="key")
    if used == "a column of late":
        out.late.select("key", "late_by").view("late", key="key")
    result = testing.run(app, {"events": LATE}, partitions=1, batches=2)
    assert result.late == 1
    if used != "neither":
        assert result["late"]["key"].to_list() == ["a"]
