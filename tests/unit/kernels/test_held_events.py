"""What the ledger of state must find: a row or an event that is lost, doubled or changed in it."""

import contextlib
import random
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import polars as pl
import pytest

import millstream as ms
from millstream import testing
from millstream.errors import CorruptionError
from millstream.kernels import sorted_runs
from millstream.kernels.frames import ROWS

START = datetime(2026, 1, 1, tzinfo=UTC)


@dataclass
class Event:
    at: datetime
    key: str
    n: int
    id: str
    gap_s: int = 0


def at(seconds):
    return START + timedelta(seconds=seconds)


def events(count=160, *, seed=3):
    """Give events that are a little out of order, with clock ticks among them."""
    dice = random.Random(seed)
    rows, time = [], 0
    for number in range(count):
        time += dice.choice([0, 1, 1, 2])
        late = dice.choice([0, 0, 0, 0, 1, 4, 9])
        event = Event(
            at(max(0, time - late)),
            dice.choice("abcdef"),
            dice.randint(1, 9),
            f"{number - (number % 7 == 0)}",
            dice.randint(2, 6),
        )
        rows.append(event)
        if number % 20 == 19:
            rows.append(testing.Tick(after="4 seconds"))
    return [*rows, testing.Watermark("events", at=at(10_000))]


def windowed(window, mode="final", **emit):
    def build(stream):
        out = stream.window(window, by="key").emit(mode, **emit)
        return out.agg(rows=ms.count(), total=ms.sum("n"))

    return build


def own_gaps():
    return ms.session(pl.duration(seconds=pl.col("gap_s")), max_gap="6 seconds")


def spent(stream):
    return stream.budget("key", cost="n", limit=pl.lit(40))


def deduplicated(**options):
    return lambda stream: stream.dedup("id", within="20 seconds", **options)


TUMBLING, HOPPING = ms.tumbling("10 seconds"), ms.hopping("12 seconds", "5 seconds")
SESSION = ms.session("3 seconds")
BY_COUNT = {"early": ms.after_count(3), "late": ms.after_count(2)}
BY_TIME = {"early": "6 seconds", "late": "6 seconds"}
KINDS = {
    "final": windowed(TUMBLING),
    "final hopping": windowed(HOPPING),
    "final corrected": windowed(TUMBLING),
    "update": windowed(TUMBLING, "update"),
    "update hopping": windowed(HOPPING, "update"),
    "retract": windowed(HOPPING, "retract", early=None),
    "discard": windowed(TUMBLING, "discard"),
    "update by count": windowed(HOPPING, "update", **BY_COUNT),
    "discard by count": windowed(TUMBLING, "discard", panes=True, **BY_COUNT),
    "update by time": windowed(TUMBLING, "update", **BY_TIME),
    "discard by time": windowed(HOPPING, "discard", **BY_TIME),
    "sessions": windowed(SESSION),
    "sessions update": windowed(SESSION, "update"),
    "sessions strict": windowed(ms.session("3 seconds", strict=True), "retract", early=None),
    "sessions discard": windowed(SESSION, "discard"),
    "sessions by count": windowed(SESSION, "discard", **BY_COUNT),
    "sessions by time": windowed(SESSION, "retract", **BY_TIME),
    "sessions of a length": windowed(ms.session("3 seconds", max_length="10 seconds")),
    "sessions of own gaps": windowed(own_gaps(), "update"),
    "count": windowed(ms.count_window(5, unbounded=True)),
    "count sliding": windowed(ms.count_window(6, slide=2, unbounded=True)),
    "count with timeout": windowed(ms.count_window(4, timeout="7 seconds", unbounded=True)),
    "sliding": windowed(ms.sliding("5 seconds")),
    "sliding update": windowed(ms.sliding("5 seconds"), "update"),
    "dedup": deduplicated(),
    "dedup checked": deduplicated(
        bloom=ms.bloom(expect=50, fpr=0.001, rotate="10 seconds", exact_check=True)
    ),
    "budget": spent,
}


def app_of(kind, buckets=1):
    app = ms.App("held", log="unused", buckets=buckets)
    stream = app.topic("events", Event, key="key").stream(
        time="at",
        watermark=ms.watermark("2 seconds", idle=None),
        lateness="6 seconds",
        late="correct" if "corrected" in kind else "drop",
    )
    KINDS[kind](stream).to("out")
    return app


def said(run):
    """Give what came out as text, whatever the order."""
    return sorted(map(str, run.rows["out"].drop("batch", strict=False).rows()))
