"""Sessions, case by case: what the rules say of gaps, bridges, closed sessions, panes and cuts."""

import json
import random
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import polars as pl
import pytest

import millstream as ms
from millstream import testing
from millstream.errors import ConfigError
from millstream.kernels.frames import DIFF, TIME
from millstream.kernels.operator import BatchContext
from millstream.kernels.state.operator_state import OperatorState
from millstream.kernels.state.sorted_runs import MemoryRunStore

START = datetime(1970, 1, 1, tzinfo=UTC)
MINUTE_US = 60_000_000


@dataclass
class Event:
    at: datetime
    key: str | None
    n: int = 1
    gap_s: int = 0


def minutes(at, key="a", n=1, gap_s=0):
    return Event(START + timedelta(minutes=at), key, n, gap_s)


def app_with(window, mode="final", *, delay=0, lateness=0, late_policy="drop", **emit):
    app = ms.App("sessions", log="unused")
    stream = app.topic("events", Event, key="key").stream(
        time="at",
        watermark=ms.watermark(timedelta(minutes=delay), idle=None),
        lateness=timedelta(minutes=lateness),
        late=late_policy,
    )
    out = stream.window(window, by="key").emit(mode, **emit).agg(n=ms.count(), total=ms.sum("n"))
    out.view("out", key=["window_start", "window_end", "key"])
    return app, out


def told(row):
    span = [(row[name] - START).total_seconds() / 60 for name in ("window_start", "window_end")]
    return (*span, row["total"])


BATCHINGS = [(1, 0), *((cuts, seed) for cuts in (2, 3, 5, 9) for seed in range(5))][:20]


@pytest.fixture
def in_all_batchings(rows_given):
    """Run in 20 batchings; give what is common to all of them, failing if anything differs."""

    def run(app, rows, partitions=1):
        runs = []
        for cuts, seed in BATCHINGS:
            inputs, options = {"events": rows}, {"partitions": partitions, "seed": seed}
            found = rows_given(app, inputs, batches=cuts, **options)
            late = sum(line["late"] for line in found.books.values())
            rows_out = found.rows["out"].drop("batch", strict=False).to_dicts()
            runs.append((sorted(rows_out, key=str), late))
        assert all(run == runs[0] for run in runs)
        return runs[0]

    return run


@pytest.fixture
def finals(in_all_batchings):
    """Give what comes out for key "a", and how many events were late."""

    def run(app, rows, **options):
        found, late = in_all_batchings(app, rows, **options)
        return [told(row) for row in found if row["key"] == "a"], late

    return run


def test_a_strict_session_takes_such_an_event_for_late(finals):
    app, _ = app_with(ms.session("5 minutes", strict=True))
    rows = [minutes(0), minutes(5), minutes(12, "z"), minutes(9), minutes(60, "z")]
    assert finals(app, rows) == ([(0, 10, 2)], 1)
    alone = [minutes(12, "z"), minutes(9), minutes(11), minutes(60, "z")]
    assert finals(app, alone) == ([(9, 16, 2)], 0)  # there is nothing that it would overlap


def test_an_event_is_late_when_its_own_session_has_expired_and_no_open_one_covers_it(finals):
    app, _ = app_with(ms.session("5 minutes"))
    alone = [minutes(0), minutes(20, "z"), minutes(10), minutes(60, "z")]
    assert finals(app, alone) == ([(0, 5, 1)], 1)
    busy = [*(minutes(at) for at in range(0, 21, 4)), minutes(10), minutes(60, "z")]
    assert finals(app, busy) == ([(0, 25, 7)], 0)


def test_late_events_count_within_the_lateness_and_not_beyond(finals):
    app, _ = app_with(ms.session("5 minutes"), lateness=10)
    rows = [minutes(0), minutes(14.9, "z"), minutes(1), minutes(15, "z"), minutes(0.5)]
    assert finals(app, [*rows, minutes(90, "z")]) == ([(0, 6, 3)], 0)
    rows += [minutes(17, "z"), minutes(1.9)]
    assert finals(app, [*rows, minutes(90, "z")]) == ([(0, 6, 3)], 1)


def test_a_session_is_cut_where_its_longest_length_says(finals):
    app, _ = app_with(ms.session("10 minutes", max_length="1 hour"))
    rows = [minutes(at) for at in range(0, 150, 5)]
    found, late = finals(app, [*rows, minutes(900, "z")])
    assert found == [(0, 60, 12), (60, 120, 12), (120, 155, 6)]
    assert late == 0


def test_keys_that_are_null_have_sessions_too(in_all_batchings):
    app, _ = app_with(ms.session("5 minutes"))
    rows = [minutes(0, None), minutes(3, None), minutes(60, "z")]
    found, _ = in_all_batchings(app, rows)
    assert [(row["key"], *told(row)) for row in found] == [(None, 0, 8, 2)]


def test_rows_that_are_too_late_go_aside_as_they_came():
    app, out = app_with(ms.session("5 minutes"), late_policy="side")
    out.late.view("late", key=["at", "key"])
    rows = [minutes(0), minutes(20, "z"), minutes(10, n=7), minutes(60, "z")]
    for cuts, seed in BATCHINGS:
        out = testing.run(app, {"events": rows}, batches=cuts, seed=seed, partitions=1)
        (row,) = out["late"].to_dicts()
        assert (row["at"], row["n"]) == (START + timedelta(minutes=10), 7)
        assert row["late_by"] == timedelta(minutes=10)
        assert row["late_reason"] == "expired_window"
        assert row["window_end"] == START + timedelta(minutes=15)
        assert out.late == 1


# ── panes, driven from outside: the figures of the book "Streaming Systems", chapter 4 ──────────


class Driven:
    """A session operator whose watermark and running time a test moves by hand."""

    def __init__(self, *, lateness=60, inclusive=True, **emit):
        window = ms.session("1 minute", gap_inclusive=inclusive)
        app, _ = app_with(window, lateness=lateness, **emit)
        self.kernel = app.plan().stages[0].operators[0].kernel
        self.state = OperatorState(MemoryRunStore())
        self.watermark_us = -(2**62)
        self.story = []
        self.rows = []
        self.every = []

    def batch(self, clock, *, watermark=None, rows=()):
        before = self.watermark_us
        self.watermark_us = before if watermark is None else us(watermark)
        table = pl.DataFrame({"key": ["a"] * len(rows), "n": [n for n, _ in rows]})
        times = pl.Series(TIME, [us(time) for _, time in rows], pl.Int64)
        orders = pl.Series("__order", range(len(rows)), pl.Int64)
        arrived = [self.kernel.prepare(table.with_columns(times, orders)).table] if rows else []
        moment = BatchContext(before, self.watermark_us, {}, us(clock) // 1000)
        found = self.kernel.process(self.state, {0: arrived}, moment).rows
        for row in found.to_dicts() if found is not None else ():
            sign = "-" if row.get(DIFF, 1) < 0 else "+"
            self.every.append(row)
            self.rows += [row] if sign == "+" else []
            self.story.append(f"{sign}{row['total']}{row.get('pane_kind', ' ')[0]}")
        message = json.loads(json.dumps(self.state.to_message()))
        self.state = OperatorState.from_message(message, self.state.store)


def us(text):
    whole, seconds = text.split(":")
    return (int(whole) * 60 + int(seconds)) * 1_000_000


BOOK = [
    ("04:59", 5, "00:26"),
    ("05:39", 7, "02:24"),
    ("06:13", 3, "03:39"),
    ("06:39", 4, "04:19"),
    ("07:06", 8, "03:06"),
    ("07:19", 3, "06:39"),
    ("08:19", 9, "01:25"),
    ("08:39", 8, "07:26"),
    ("09:00", 1, "07:46"),
]
WATERMARKS = {"06:00": "02:00", "07:30": "04:00", "07:40": "06:00", "09:30": "08:46"}


def the_book(**emit):
    # As Beam has it: events exactly a gap apart are in two sessions.
    driven = Driven(early="1 minute", late="each", panes=True, inclusive=False, **emit)
    events = {arrival: (value, time) for arrival, value, time in BOOK}
    # At 08:19 a late pane and an early one of another session come at the same moment.
    for second in range(4 * 60, 10 * 60):
        clock = f"{second // 60:02}:{second % 60:02}"
        rows = [events[clock]] if clock in events else []
        driven.batch(clock, watermark=WATERMARKS.get(clock), rows=rows)
    return driven.story


def test_the_books_sessions_retract_what_they_replace():
    story = the_book(mode="retract", suppress_unchanged=False)
    assert " ".join(story) == ("+5e -5e +5o +7e -7e +22e -22e +22o -5o -22o +36l +3e -3e +12o")


def test_the_books_sessions_accumulate_and_what_was_merged_away_is_taken_back():
    story = the_book(mode="update", suppress_unchanged=False)
    assert " ".join(story) == "+5e +5o +7e +22e +22o -22o +36l +3e +12o"


def test_a_pane_that_says_nothing_new_is_left_out():
    assert " ".join(the_book(mode="retract")) == "+5e +7e -7e +22e -5e -22e +36l +3e -3e +12o"


def test_the_books_sessions_discard():
    story = the_book(mode="discard", suppress_unchanged=False)
    assert " ".join(story) == "+5e +0o +7e +15e +0o +9l +3e +9o"
    assert " ".join(the_book(mode="discard")) == "+5e +7e +15e +9l +3e +9o"


def test_pane_indexes_begin_again_when_sessions_become_one():
    driven = Driven(mode="retract", early="each", late="each", panes=True)
    driven.batch("00:00", rows=[(1, "00:00"), (2, "00:10"), (4, "03:00")])
    driven.batch("00:01", rows=[(8, "01:10"), (16, "02:05")])
    said = [(row["total"], row["pane_index"], row["pane_first"]) for row in driven.rows]
    assert said == [(1, 0, True), (3, 1, False), (4, 0, True), (11, 2, False), (31, 0, True)]


@pytest.mark.parametrize(("early", "late"), [(None, "each"), ("5 minutes", None), (None, None)])
def test_no_row_is_late_for_what_follows(early, late):
    dice = random.Random(4)
    driven = Driven(mode="retract", early=early, late=late, lateness=3)
    watermark = 600
    for clock in range(80):
        before, said = driven.kernel.output_watermark(driven.watermark_us), len(driven.every)
        time = dice.randint(watermark - 200, watermark + 80)
        watermark += dice.choice([0, 10, 25, 50])
        driven.batch(at(clock * 60), watermark=at(watermark), rows=[(1, at(time))])
        assert all(row[TIME] >= before for row in driven.every[said:])
    closes_at_once = (early, late) == (None, None)
    assert any(sign.startswith("-") for sign in driven.story) != closes_at_once


def at(seconds):
    return f"{seconds // 60:02}:{seconds % 60:02}"


# ── what is refused ─────────────────────────────────────────────────────────────────────────────


def refused(match):
    return pytest.raises(ConfigError, match=match)


def test_what_cannot_be_a_session_is_refused_where_it_is_declared():
    with refused("session's gap is 0"):
        ms.session("0 minutes")
    with refused("less than its gap"):
        ms.session("2 hours", max_length="1 hour")
    with refused("there is no max_gap"):
        ms.session(pl.duration(seconds="gap_s"))
    with refused("A longest gap is for gaps that an expression gives"):
        ms.session("1 hour", max_gap="2 hours")
    with refused("session's gap is 'soon'"):
        ms.session("soon")
    with refused(r"session's gap is of type Int64.*pl.duration\(seconds"):
        app_with(ms.session(pl.col("gap_s"), max_gap="1 hour"))
    with refused("'gaps'.*Did you mean 'gap_s'"):
        app_with(ms.session(pl.duration(seconds="gaps"), max_gap="1 hour"))
    app = ms.App("names", log="unused")
    stream = app.topic("events", Event, key="key").stream(time="at")
    with refused("'overlaps_closed' is one that"):
        stream.window(ms.session("1 hour"), by="key").agg(overlaps_closed=ms.count())
    retracting = stream.window(ms.session("1 hour"), by="key").emit("retract").agg(n=ms.count())
    with refused("comes after emit.*strict=True"):
        retracting.window(ms.session("1 hour", strict=True), by="key").agg(n=ms.count())
