"""Panes, case by case, beside those of `tests/cases`: by running time, by count, corrections, state."""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import polars as pl
import pytest

import millstream as ms
from millstream import testing
from millstream.log.murmur2 import partition_of

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
HOUR = timedelta(hours=1)
SEEDS = range(20)


@dataclass
class Score:
    at: datetime
    key: str
    n: int = 0


def clock(text):
    minutes, seconds = text.split(":")
    return timedelta(minutes=int(minutes), seconds=int(seconds))


def score(at, n, key="team"):
    return Score(NOON + clock(at), key, n)


def timeline(*steps):
    """Rows at times of arrival, with Ticks between them."""
    rows, now = [], timedelta(0)
    for arrival, row in sorted(steps, key=lambda step: clock(step[0])):
        if clock(arrival) > now:
            rows.append(testing.Tick(clock(arrival) - now))
            now = clock(arrival)
        rows.append(row)
    return rows


def scores(*, lateness=HOUR, policy="drop", window="2 minutes", **emit):
    app = ms.App("scores", log="unused", buckets=2)
    stream = app.topic("scores", Score).stream(
        time="at", watermark=ms.watermark(HOUR, idle=None), lateness=lateness, late=policy
    )
    windowed = stream.window(ms.tumbling(window), by="key").emit(**emit)
    windowed.agg(total=ms.sum("n"), count=ms.count()).view("out", key=["window_start", "key"])
    return app


def panes(table, column="total"):
    """What came out for the team: by the window's start in minutes, in order."""
    found = {}
    if not table.width:
        return found
    for row in table.filter(key="team").to_dicts():
        start = (row["window_start"] - NOON) // timedelta(minutes=1)
        value = row[column] * row.get("__diff", 1)
        kind = row.get("pane_kind")
        found.setdefault(start, []).append((value, kind) if kind else value)
    return found


def alike(rows_given, app, rows):
    """Give what comes out, the same under twenty batchings of one partition."""
    results = [
        panes(rows_given(app, {"scores": rows}, batches=1 + seed % 3, seed=seed).rows["out"])
        for seed in SEEDS
    ]
    assert all(result == results[0] for result in results)
    return results[0]


@pytest.mark.parametrize("arrival", ["05:59", "06:00"])
def test_a_pane_by_running_time_has_what_came_before_its_time(rows_given, arrival):
    steps = [
        ("04:59", score("00:26", 5)),
        (arrival, score("00:27", 1)),
        ("07:30", score("09:00", 0)),
    ]
    app = scores(mode="discard", early="1 minute")
    assert alike(rows_given, app, timeline(*steps))[0] == [5, 1]


# ── Beam's transcripts, with other values ───────────────────────────────────────────────────────


def at(second, n=None):
    return Score(NOON + timedelta(seconds=second), "team", second if n is None else n)


def reach(second):
    return Score(NOON + timedelta(seconds=second) + HOUR, "clock")


def test_late_panes_by_count_wait_for_as_many_or_for_the_end(rows_given):  # E11's counts
    rows = [*map(at, (1, 2, 3)), reach(100), *(at(s, 1) for s in (4, 5, 6, 7)), reach(4000)]
    app = scores(mode="update", early=None, late=ms.after_count(3), window="10 seconds", panes=True)
    for seed in SEEDS:
        table = rows_given(app, {"scores": rows}, batches=1 + seed % 5, seed=seed).rows["out"]
        table = table.filter(key="team")
        assert table["total"].to_list() == [6, 9, 10]
        assert table["pane_kind"].to_list() == ["on_time", "late", "late"]
        assert table["pane_last"].to_list() == [False, False, True]


def test_state_goes_when_windows_expire(rows_given):  # E13
    app = scores(mode="update", early="10 seconds", late="10 seconds", window="10 seconds")
    rows = [*map(at, (1, 2, 3, 10, 11, 25)), reach(31), at(8), testing.Tick("1 minute")]
    kept = rows_given(app, {"scores": rows}).engine.states
    assert any(store.tables for state in kept.values() for store in state.stores.values())
    rows += [reach(8000), testing.Tick("1 minute")]
    engine = rows_given(app, {"scores": rows}).engine
    held = [t for s in engine.states.values() for m in s.stores.values() for t in m.tables.values()]
    assert {key for table in held for key in table["key"].to_pylist()} <= {"clock"}


# ── late data ───────────────────────────────────────────────────────────────────────────────────


@dataclass
class Reading:
    at: datetime
    key: str
    n: int


ORIGIN = datetime(2026, 1, 1, tzinfo=UTC)


def reading(at, n, key="a"):
    return Reading(ORIGIN + timedelta(seconds=at), key, n)


def readings(window, *, lateness="0 seconds", policy="drop", mode="final", **emit):
    app = ms.App("readings", log="unused", buckets=2)
    stream = app.topic("readings", Reading, key="key").stream(
        time="at", watermark=ms.watermark("0 seconds", idle=None), lateness=lateness, late=policy
    )
    out = stream.window(window, by="key").emit(mode, **emit).agg(total=ms.sum("n"))
    out.view("out")
    return app, out


def totals(out):
    rows = out["out"].to_dicts()
    return {(int((r["window_start"] - ORIGIN).total_seconds()), r["key"]): r["total"] for r in rows}


@pytest.mark.parametrize("partitions", [1, 4, 7])
def test_corrections_replace_what_was_said_on_time(partitions):
    app, _ = readings(ms.tumbling("10 seconds"), lateness="1 minute", policy="correct")
    keys = {partition_of(k.encode(), partitions): k for k in "abcdefghijklmnop"}
    ends = [reading(12, 0, k) for k in keys.values()]
    rows = [reading(1, 5, keys[0]), *ends, reading(2, 6, keys[0]), reading(200, 0, keys[0])]
    rows.append(reading(3, 7, keys[0]))
    for seed in SEEDS:
        out = testing.run(app, {"readings": rows}, batches=4, partitions=partitions, seed=seed)
        assert totals(out)[0, keys[0]] == 11
        assert out.late == 1


class Own(ms.UserAggregate):
    """The sum of the squares, kept by pickle."""

    result_type = pl.Float64

    def zero(self):
        return 0.0

    def add(self, state, value):
        return state + value * value

    def merge(self, state, other):
        return state + other


EACH = {
    "floats": (ms.sum(pl.col("n").cast(float)), [5.0, 7.0, 0.0]),
    "whole": (ms.sum("n"), [5, 7, 0]),
    "mean": (ms.mean(pl.col("n").cast(float)), [5.0, 7.0, None]),
    "variance": (ms.variance("n", population=True), [0.0, 0.0, None]),
    "least": (ms.min("n"), [5, 7, None]),
    "first": (ms.first("n"), [5, 7, None]),
    "distinct": (ms.distinct("n"), [1, 1, 0]),
    "list": (ms.list("n"), [[5], [7], []]),
    "own": (ms.aggregate(Own(), "n"), [25.0, 49.0, 0.0]),
}


@pytest.mark.parametrize("early", ["batch", "each"])
@pytest.mark.parametrize("told", [True, False])
def test_numbered_panes_of_new_events_alone_say_nothing_of_those_before(early, told, rows_given):
    app = ms.App("scores", log="unused", buckets=2)
    stream = app.topic("scores", Score).stream(time="at", watermark=ms.watermark(HOUR, idle=None))
    windowed = stream.window(ms.tumbling("2 minutes"), by="key").emit(
        "discard", early=early, panes=True, suppress_unchanged=not told
    )
    windowed.agg(**{name: one for name, (one, _) in EACH.items()}).view("out", key=["pane_index"])
    end = testing.Watermark("scores", at=NOON + 2 * HOUR)
    tick = testing.Tick("1 second")
    rows = [score("00:01", 5), tick, score("00:02", 7), tick, end]
    out = rows_given(app, {"scores": rows}).rows["out"].sort("pane_index")
    count = 3 if told else 2
    for name, (_, expected) in EACH.items():
        assert out[name].to_list() == expected[:count], name
    assert out["pane_kind"].to_list() == ["early", "early", "on_time"][:count]
