"""The published cases of panes: the Dataflow book's nine events, Beam's transcripts, late data."""

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


def watermark_at(at):
    """The watermark stands an hour behind the newest event: this row moves it to ``at``."""
    return Score(NOON + clock(at) + HOUR, "clock")


def timeline(*steps):
    """Rows at times of arrival, with Ticks between them."""
    rows, now = [], timedelta(0)
    for arrival, row in sorted(steps, key=lambda step: clock(step[0])):
        if clock(arrival) > now:
            rows.append(testing.Tick(clock(arrival) - now))
            now = clock(arrival)
        rows.append(row)
    return rows


BOOK = [
    ("04:59", score("00:26", 5)), ("05:39", score("02:24", 7)), ("06:13", score("03:39", 3)),
    ("06:39", score("04:19", 4)), ("07:06", score("03:06", 8)), ("07:19", score("06:39", 3)),
    ("08:19", score("01:25", 9)), ("08:39", score("07:26", 8)), ("09:00", score("07:46", 1)),
]  # fmt: skip
# Firings by running time happen at 05:59, 06:39, 07:39 and 08:19, among other times: a Tick ends at each.
MARKS = [(at, Score(NOON, "mark")) for at in ("05:59", "06:39", "07:39", "08:06", "08:19", "12:00")]
HEURISTIC = [("06:00", "02:00"), ("07:30", "04:00"), ("07:40", "06:00"), ("09:30", "08:00")]
PERFECT = [("08:20", "02:00"), ("08:21", "04:00"), ("08:22", "06:00"), ("09:30", "08:00")]


def book(watermarks):
    moves = [(at, watermark_at(to)) for at, to in watermarks]
    return timeline(*BOOK, *moves, *MARKS)


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


EARLY_MINUTE = {"early": "1 minute", "late": "each", "suppress_unchanged": False}


def test_the_books_panels_accumulate(rows_given):
    app = scores(mode="update", panes=True, **EARLY_MINUTE)
    assert alike(rows_given, app, book(HEURISTIC)) == {
        0: [(5, "early"), (5, "on_time"), (14, "late")],
        2: [(10, "early"), (18, "on_time")],
        4: [(4, "early"), (4, "on_time")],
        6: [(3, "early"), (12, "on_time")],
    }


def test_the_books_panels_discard(rows_given):
    app = scores(mode="discard", **EARLY_MINUTE)
    assert alike(rows_given, app, book(HEURISTIC)) == {
        0: [5, 0, 9],
        2: [10, 8],
        4: [4, 0],
        6: [3, 9],
    }


def test_the_books_panels_retract(rows_given):
    app = scores(mode="retract", **EARLY_MINUTE)
    assert alike(rows_given, app, book(HEURISTIC)) == {
        0: [5, -5, 5, -5, 14],
        2: [10, -10, 18],
        4: [4, -4, 4],
        6: [3, -3, 12],
    }


def test_the_books_panels_when_unchanged_panes_are_left_out(rows_given):
    app = scores(mode="retract", early="1 minute", late="each")
    assert alike(rows_given, app, book(HEURISTIC)) == {
        0: [5, -5, 14],
        2: [10, -10, 18],
        4: [4],
        6: [3, -3, 12],
    }


def test_the_books_panels_under_a_perfect_watermark(rows_given):
    app = scores(mode="update", **EARLY_MINUTE)
    assert alike(rows_given, app, book(PERFECT)) == {
        0: [5, 14],
        2: [10, 18, 18],
        4: [4, 4],
        6: [3, 12],
    }


def test_the_books_final_panels_wait_for_the_lateness(rows_given):
    app = scores(mode="final", lateness="3 minutes")
    found = alike(rows_given, app, [*book(HEURISTIC), watermark_at("11:00")])
    assert found == {0: [5], 2: [18], 4: [4], 6: [12]}  # 9@01:25 came when 06:00 was reached
    app = scores(mode="final", lateness="5 minutes")
    found = alike(rows_given, app, [*book(HEURISTIC), watermark_at("13:00")])
    assert found == {0: [14], 2: [18], 4: [4], 6: [12]}


@pytest.mark.parametrize("arrival", ["05:59", "06:00"])
def test_a_pane_by_running_time_has_what_came_before_its_time(rows_given, arrival):
    steps = [
        ("04:59", score("00:26", 5)),
        (arrival, score("00:27", 1)),
        ("07:30", score("09:00", 0)),
    ]
    app = scores(mode="discard", early="1 minute")
    assert alike(rows_given, app, timeline(*steps))[0] == [5, 1]


def test_lateness_bounds_late_panes(rows_given):  # E14
    rows = [
        score("00:26", 5), watermark_at("02:00"), score("00:53", 6),
        watermark_at("06:00"), score("01:25", 9),
    ]  # fmt: skip
    app = scores(mode="update", early=None, late="each", lateness="2 minutes", panes=True)
    assert alike(rows_given, app, rows) == {0: [(5, "on_time"), (11, "late")]}
    assert testing.run(app, {"scores": rows}, partitions=1).late == 1


# ── Beam's transcripts, with other values ───────────────────────────────────────────────────────


def at(second, n=None):
    return Score(NOON + timedelta(seconds=second), "team", second if n is None else n)


def reach(second):
    return Score(NOON + timedelta(seconds=second) + HOUR, "clock")


def test_the_default_emits_on_time_and_again_with_what_is_late(rows_given):  # E10
    rows = [at(s) for s in (1, 2, 4, 11, 13, 27)] + [reach(100), at(6)]
    app = scores(mode="update", early=None, window="10 seconds", panes=True)
    given = rows_given(app, {"scores": rows}, seed=1).rows["out"].filter(key="team")
    found = {}
    for row in given.to_dicts():
        start = (row["window_start"] - NOON) // timedelta(seconds=1)
        found.setdefault(start, []).append((row["total"], row["pane_kind"], row["pane_last"]))
    # In one batch 6 is in the late pane that comes right after the on-time one.
    assert found == {
        0: [(7, "on_time", False), (13, "late", False)],
        10: [(24, "on_time", False)],
        20: [(27, "on_time", False)],
    }


def test_panes_by_count_discard_what_they_told(rows_given):  # E12, one event at a time
    rows = [*map(at, (1, 3, 4)), at(5), at(14), at(6), at(19), at(7), reach(100)]
    app = scores(
        mode="discard", early=ms.after_count(2), window="10 seconds", suppress_unchanged=False
    )
    results = []
    for seed in SEEDS:
        given = rows_given(app, {"scores": rows}, batches=1 + seed % 7, seed=seed)
        table = given.rows["out"].filter(key="team")
        starts = ((table["window_start"] - NOON).dt.total_seconds()).to_list()
        results.append(sorted(zip(starts, table["total"], strict=True), key=lambda row: row[0]))
    assert all(result == results[0] for result in results)
    # The third pair was complete with 7, so the on-time panes of both windows are empty.
    assert results[0] == [(0, 4), (0, 9), (0, 13), (0, 0), (10, 33), (10, 0)]


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


F1 = [reading(12, 1), reading(7, 10), reading(4, 100), reading(60, 0)]
HOP = ms.hopping("10 seconds", "5 seconds")


@pytest.mark.parametrize("mode", ["final", "update"])
def test_an_event_may_be_too_late_for_one_window_and_in_time_for_another(mode):  # F1
    app, _ = readings(HOP, mode=mode)
    for seed in SEEDS:
        out = testing.run(app, {"readings": F1}, batches=1 + seed % 4, partitions=1, seed=seed)
        found = {start: total for (start, _), total in totals(out).items() if start < 50}
        assert found == {5: 11, 10: 1}
        ledger = out.ledger.filter(pl.col("step").str.starts_with("hopping"))
        assert ledger["late"].sum() == 1
        assert ledger["held"].sum() == 3
        assert ledger["windows_missed"].sum() == 3  # both of 4's and one of 7's


def test_rows_that_are_too_late_come_out_aside(rows_given):  # F2
    app, out = readings(HOP, policy="side")
    out.late.with_columns(tens=pl.col("n") // 10).view("late", key=["key", "n"])
    for seed in SEEDS:
        result = testing.run(app, {"readings": F1}, batches=1 + seed % 4, partitions=1, seed=seed)
        assert {s: t for (s, _), t in totals(result).items() if s < 50} == {5: 11, 10: 1}
        assert result.late == 1
        assert result["late"].to_dicts() == [
            {
                "at": ORIGIN + timedelta(seconds=4),
                "key": "a",
                "n": 100,
                "late_by": timedelta(seconds=8),
                "late_reason": "expired_window",
                "window_start": ORIGIN,
                "window_end": ORIGIN + timedelta(seconds=10),
                "tens": 10,
            }
        ]


def test_windows_take_late_events_within_the_lateness(rows_given):  # F3, with other values
    app, _ = readings(ms.tumbling("2 seconds"), lateness="1 second")
    rows = [
        reading(s, n) for s, n in ((0, 3), (1, 4), (2, 5), (1, 6), (0, 7), (3, 8), (0, 9), (5, 1))
    ]
    for seed in SEEDS:
        out = testing.run(app, {"readings": rows}, batches=1 + seed % 4, partitions=1, seed=seed)
        assert totals(out) == {(0, "a"): 20, (2, "a"): 13}  # the 9 came when 3 had been reached
        assert out.late == 1


def test_a_large_jump_of_time_closes_all_windows_at_once():
    app, _ = readings(ms.tumbling("2 seconds"), lateness="1 second")
    rows = [reading(s, n) for s, n in ((0, 3), (1, 4), (30, 5), (1, 6), (33, 0), (99, 0))]
    out = testing.run(app, {"readings": rows}, batches=2, partitions=1)
    assert totals(out) == {(0, "a"): 7, (30, "a"): 5, (32, "a"): 0}
    assert out.late == 1


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
