"""Rows that pass an operator come out of buckets, and are put into the order of the log again."""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import polars as pl
import pytest

import millstream as ms
from millstream import testing

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


@dataclass
class Event:
    at: datetime
    id: str
    key: str
    n: int


ROWS = [Event(NOON + timedelta(seconds=n), f"id {n}", "the only one", n) for n in range(9)]
AHEAD = Event(NOON + timedelta(days=9), "ahead", "another", 99)


def events(late="drop"):
    app = ms.App("a", log="unused", buckets=3)
    return app.topic("t", Event, partitions=1).stream(time="at", late=late)


def run(stream, rows, seed):
    return testing.run(stream.app, {"t": rows}, partitions=1, seed=seed)


PASSING = {
    "dedup": lambda stream: stream.dedup("id", within="1 minute"),
    "budget": lambda stream: stream.budget("id", cost="n", limit=pl.lit(100)),
    "both": lambda stream: stream.dedup("id", within="1 minute").budget(
        "key", cost="n", limit=pl.lit(100)
    ),
}


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("passed", PASSING.values(), ids=PASSING)
def test_of_rows_that_replace_one_another_the_last_in_the_log_stays(passed, seed):
    stream = passed(events())
    stream.view("last", key="key")
    stream.to("out", partitions=1)
    out = run(stream, ROWS, seed)
    assert out["last"]["n"].to_list() == [8]
    assert out.topic("out")["n"].to_list() == [*range(9)]


def windows(window):
    return lambda stream: stream.window(window, by="id").agg(n=ms.count())


ASIDE = {
    "tumbling": windows(ms.tumbling("1 minute")),
    "panes": lambda s: s.window(ms.tumbling("1 minute"), by="id").emit("update").agg(n=ms.count()),
    "session": windows(ms.session("1 second")),
    "sliding": windows(ms.sliding("1 second")),
    "dedup": PASSING["dedup"],
    "budget": PASSING["budget"],
}


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("judged", ASIDE.values(), ids=ASIDE)
def test_of_late_rows_that_replace_one_another_the_last_in_the_log_stays(judged, seed):
    stream = judged(events("side"))
    stream.late.view("late", key="key")
    assert run(stream, [AHEAD, *ROWS], seed)["late"]["n"].to_list() == [8]
