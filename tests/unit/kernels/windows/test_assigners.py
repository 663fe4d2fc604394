"""Which windows a time is in: the cases of the reference, and Hypothesis against plain Python."""

from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from zoneinfo import ZoneInfo

import numpy as np
import polars as pl
import pytest
from example_counts import some
from hypothesis import given, settings
from hypothesis import strategies as st

import millstream as ms
from millstream import testing
from millstream.errors import ConfigError

ORIGIN = datetime(1970, 1, 1, tzinfo=UTC)
SEEDS = range(20)


@dataclass
class Event:
    at: datetime
    key: str = "a"


def instant(text):
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


def counted(window, times, *, lateness="0 seconds", delay="365 days"):
    """Count events per window through the public surface, alike under batchings and partitions."""
    app = ms.App("assigned", log="unused", buckets=2)
    stream = app.topic("events", Event, key="key").stream(
        time="at", watermark=ms.watermark(delay, idle=None), lateness=lateness
    )
    stream.window(window).emit("update").agg(n=ms.count()).view("out")
    results = []
    for seed in SEEDS:
        partitions = (1, 4, 7)[seed % 3]
        rows = [Event(at) for at in times]
        out = testing.run(
            app, {"events": rows}, batches=1 + seed % 4, partitions=partitions, seed=seed
        )
        found = out["out"].to_dicts()
        results.append([(r["window_start"], r["window_end"], r["n"]) for r in found])
    assert all(result == results[0] for result in results)
    return results[0]


# ── against plain Python ────────────────────────────────────────────────────────────────────────

times = st.integers(-(10**9), 10**9)


@given(st.lists(times, min_size=1), st.integers(1, 50), st.integers(1, 50), st.integers(-60, 60))
def test_hopping_windows_are_those_that_hold_the_time(drawn, size, slide, offset):
    window = ms.hopping(
        timedelta(microseconds=size),
        timedelta(microseconds=slide),
        offset=timedelta(microseconds=offset),
        allow_gaps=True,
    )
    pieces = window.slices(pl.Series(drawn)).to_numpy()
    first, counts = window.first(pieces), window.counts(pieces)
    for at, start, count in zip(drawn, first, counts, strict=True):
        holding = [s for s in range(at - size + 1, at + 1) if (s - offset) % slide == 0]
        assert [start + n * slide for n in range(count)] == holding
    for reached in (drawn[0] - 1, drawn[0], drawn[0] + size):
        passed = window.count_ended(pieces, np.full(len(pieces), reached))
        ends = [
            [start + n * slide + size for n in range(c)]
            for start, c in zip(first, counts, strict=True)
        ]
        assert passed.tolist() == [sum(end <= reached for end in e) for e in ends]
        assert window.end_at_or_before(reached) == max(
            e for e in range(reached - slide, reached + 1) if (e - size - offset) % slide == 0
        )


@given(
    st.lists(times, min_size=1),
    st.integers(1, 12),
    st.integers(1, 7),
    st.integers(-60, 60),
    st.lists(times, min_size=1),
)
def test_cumulating_windows_are_those_that_hold_the_time(drawn, step, steps, offset, reached):
    size = step * steps
    window = ms.cumulating(
        timedelta(microseconds=size),
        timedelta(microseconds=step),
        offset=timedelta(microseconds=offset),
    )
    slices = window.slices(pl.Series(drawn)).to_numpy()
    first, counts = window.first(slices), window.counts(slices)
    for at, cut, label, count in zip(drawn, slices, first, counts, strict=True):
        start = next(s for s in range(at, at - size, -1) if (s - offset) % size == 0)
        holding = [(start, e) for e in range(start + step, start + size + 1, step) if at < e]
        labels = np.array([label + n * step for n in range(count)])
        ends = window.ends(labels)
        assert list(zip(window.starts(labels), ends, strict=True)) == holding
        assert cut <= at < cut + step
        assert window.latest_end(at) == start + size
        for now in (*reached, at, start + size, ends[0], ends[0] - 1):
            ended = window.count_ended(np.array([cut]), np.array([now]))
            assert ended.tolist() == [sum(end <= now for _, end in holding)]
    for now in reached:
        assert window.end_at_or_before(now) == max(
            e for e in range(now - step, now + 1) if (e - offset) % step == 0
        )


def test_cumulating_windows_of_a_day_are_told_apart_by_their_ends():
    app = ms.App("days", log="unused", buckets=2)
    stream = app.topic("events", Event, key="key").stream(time="at", lateness="1 day")
    day = stream.window(ms.cumulating("1 day", "8 hours")).emit("update")
    day.agg(n=ms.count()).view("out")
    rows = [Event(ORIGIN + timedelta(hours=hour)) for hour in (9, 23, 1, 24)]
    out = testing.run(app, {"events": rows})["out"]
    assert out.select("window_start", "window_end", "n").rows() == [
        (ORIGIN + timedelta(hours=start), ORIGIN + timedelta(hours=end), n)
        for start, end, n in [
            *((0, 8, 1), (0, 16, 2), (0, 24, 3)),
            *((24, 32, 1), (24, 40, 1), (24, 48, 1)),
        ]
    ]


ZONES = [
    "America/New_York",
    "Australia/Lord_Howe",
    "America/Havana",
    "Asia/Kathmandu",
    "America/Sao_Paulo",
    "Africa/Cairo",
]


def local_day_start(day, zone):
    """The first instant at which the clocks show a day, minute by minute."""
    at = datetime.combine(day, time(0), UTC) - timedelta(hours=16)
    while at.astimezone(zone).date() < day:
        at += timedelta(minutes=1)
    return at


@settings(deadline=None, max_examples=some(60))
@given(
    st.datetimes(datetime(1990, 1, 1), datetime(2030, 1, 1)),  # noqa: DTZ001
    st.sampled_from(ZONES),
    st.sampled_from(["1 day", "1 week", "1 month", "1 quarter", "1 year"]),
)
def test_calendar_windows_begin_when_clocks_first_show_their_day(naive, zone_name, unit):
    zone, at = ZoneInfo(zone_name), naive.replace(tzinfo=UTC)
    day = at.astimezone(zone).date()
    begins = {
        "1 day": (day, day + timedelta(days=1)),
        "1 week": (day - timedelta(days=day.weekday()), day + timedelta(days=7 - day.weekday())),
        "1 month": (day.replace(day=1), (day.replace(day=1) + timedelta(days=31)).replace(day=1)),
        "1 quarter": _months(day, 3),
        "1 year": (date(day.year, 1, 1), date(day.year + 1, 1, 1)),
    }[unit]
    window = ms.calendar(unit, tz=zone_name)
    at_us = (at - ORIGIN) // timedelta(microseconds=1)
    start = window.slices(pl.Series([at_us]))
    end = window.ends(start.to_numpy())
    expected = [(local_day_start(d, zone) - ORIGIN) // timedelta(microseconds=1) for d in begins]
    assert [start[0], end[0]] == expected


def _months(day, count):
    first = (day.month - 1) // count * count + 1
    after = first + count
    return date(day.year, first, 1), date(day.year + (after > 12), (after - 1) % 12 + 1, 1)


@settings(deadline=None, max_examples=some(60))
@given(
    st.datetimes(datetime(2020, 1, 1), datetime(2027, 1, 1)),  # noqa: DTZ001
    st.sampled_from(ZONES),
    st.sampled_from([15, 60, 120, 180, 720]),
)
def test_parts_of_days_begin_when_clocks_show_a_multiple(naive, zone_name, minutes):
    zone, at = ZoneInfo(zone_name), naive.replace(tzinfo=UTC)
    window = ms.calendar(f"{minutes} minutes", tz=zone_name)
    at_us = (at - ORIGIN) // timedelta(microseconds=1)
    start = window.slices(pl.Series([at_us]))
    begin = ORIGIN + timedelta(microseconds=start[0])
    finish = ORIGIN + timedelta(microseconds=int(window.ends(start.to_numpy())[0]))
    assert begin <= at < finish

    def shown(moment):
        local = moment.astimezone(zone)
        return local.hour * 60 + local.minute

    skips = (
        begin.astimezone(zone).utcoffset()
        != (begin - timedelta(seconds=1)).astimezone(zone).utcoffset()
    )
    assert shown(begin) % minutes == 0 or skips
    inside = begin + timedelta(minutes=1)
    while inside < finish:  # nowhere inside do the clocks show a boundary
        assert shown(inside) % minutes or inside.second
        inside += timedelta(minutes=1)


def test_times_far_beyond_the_calendar_are_in_windows_of_their_own():
    window = ms.calendar("1 day", tz="Europe/Berlin")
    far = [datetime.max.replace(tzinfo=UTC), datetime.min.replace(tzinfo=UTC), ORIGIN]
    at = pl.Series([(t - ORIGIN) // timedelta(microseconds=1) for t in far])
    starts = window.slices(at).to_numpy()
    assert (starts <= at.to_numpy()).all()
    assert (window.ends(starts) > at.to_numpy()).all()


# ── words ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("declare", "words"),
    [
        (lambda: ms.hopping("1 minute", "2 minutes"), "allow_gaps"),
        (lambda: ms.hopping("1 minute", "0 seconds"), "slide is 0"),
        (lambda: ms.cumulating("1 minute", "7 seconds"), "step of 7 seconds does not divide"),
        (lambda: ms.cumulating("1 minute", "2 minutes"), "step of 2 minutes does not divide"),
        (lambda: ms.cumulating("1 minute", "0 seconds"), "step is 0"),
        (lambda: ms.tumbling("0 seconds"), "size is 0"),
        (lambda: ms.tumbling("1 hour", offset="-x"), "offset"),
        (lambda: ms.calendar("2 days", tz="UTC"), "span is '2 days'"),
        (lambda: ms.calendar("5 months", tz="UTC"), "divide a year"),
        (lambda: ms.calendar("7 hours", tz="UTC"), "divide a day"),
        (lambda: ms.calendar("1 day", tz="Mars/Base"), "tz is 'Mars/Base'"),
        (lambda: ms.calendar("1 week", tz="UTC", week_start="lundi"), "week_start"),
        (lambda: ms.after_count(0), "count is 0"),
    ],
)
def test_windows_that_make_no_sense_are_refused(declare, words):
    with pytest.raises(ConfigError, match=words):
        declare()


def test_weeks_begin_when_told():
    times = [instant("2026-01-04T12:00"), instant("2026-01-05T12:00")]  # a Sunday and a Monday
    assert [r[2] for r in counted(ms.calendar("1 week", tz="UTC"), times)] == [1, 1]
    assert [r[2] for r in counted(ms.calendar("1 week", tz="UTC", week_start="sunday"), times)] == [
        2
    ]


def test_times_between_windows_with_gaps_are_filtered():
    app = ms.App("gaps", log="unused")
    stream = app.topic("events", Event, key="key").stream(time="at")
    window = ms.hopping("2 seconds", "5 seconds", allow_gaps=True)
    stream.window(window, by="key").emit("update").agg(n=ms.count()).view("out")
    rows = [Event(ORIGIN + timedelta(seconds=s)) for s in range(10)]
    out = testing.run(app, {"events": rows}, batches=3, partitions=1)
    assert out["out"]["n"].to_list() == [2, 2]
    assert out.ledger.filter(pl.col("step").str.starts_with("hopping"))["filtered"].sum() == 6
