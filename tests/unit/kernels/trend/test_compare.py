"""Windows beside earlier ones: published cases, and random input against a naive model."""

import math
import random
from collections import Counter
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import polars as pl
import pytest
import trend_model as model
from example_counts import some
from hypothesis import given, settings
from hypothesis import strategies as st

import millstream as ms
from millstream import testing
from millstream.kernels.operator import BatchContext
from millstream.kernels.state.operator_state import OperatorState
from millstream.kernels.state.sorted_runs import MemoryRunStore
from millstream.kernels.trend.compare import ratio_of

NEW_YORK = "America/New_York"
HOUR, DAY = timedelta(hours=1), timedelta(days=1)


@dataclass
class Event:
    at: datetime
    page: str | None
    n: int | None


def app_of(
    window,
    to="1 week",
    zone=NEW_YORK,
    mode="final",
    late="drop",
    lateness="0 seconds",
    by="page",
    **emit,
):
    app = ms.App("trend", log="unused", buckets=3)
    topic = app.topic("events", Event, key="page")
    stream = topic.stream(
        time="at", watermark=ms.watermark("1 hour", idle=None), late=late, lateness=lateness
    )
    if mode != "final":
        emit["early"] = None
    rows = stream.window(window, by=by).emit(mode, **emit).agg(n=ms.sum("n"))
    rows.view("rows")
    trend = rows.compare("n", to=to, zone=zone)
    trend.view("trend")
    trend.to("out", partitions=1)
    return app


def local(year, month, day, hour=0, zone=NEW_YORK, fold=0):
    return datetime(year, month, day, hour, tzinfo=ZoneInfo(zone), fold=fold).astimezone(UTC)


def over(events):
    last = max(event.at for event in events)
    return testing.Watermark("events", at=last + timedelta(days=800))


BATCHINGS = some(20)


def everything(app, events, batchings=BATCHINGS):
    return testing.replay(app, {"events": [*events, over(events)]}, batchings=batchings)


def rows_of(out, view="trend"):
    return [
        (row["window_start"], row["n"], row["n_before"], row["n_ratio"])
        for row in out[view].to_dicts()
    ]


# ── the published cases ─────────────────────────────────────────────────────────────────────

HOURLY = ms.tumbling("1 hour")


@pytest.fixture(scope="module")
def year():
    """Hours of a year, under many divisions into batches and partitions."""
    events = [
        Event(local(2026, 1, 5, 10), "a", 100),
        Event(local(2026, 1, 5, 11), "a", 7),
        Event(local(2026, 1, 12, 10), "a", 140),
        Event(local(2026, 1, 12, 10), "b", 3),
        *(Event(local(2026, 3, 8) - 2 * HOUR + n * HOUR, "a", n + 1) for n in range(8)),
        *(Event(local(2026, 3, 15, hour), "a", 100) for hour in range(4)),
        Event(local(2026, 10, 25, 1), "a", 10),
        Event(local(2026, 11, 1, 1), "a", 20),
        Event(local(2026, 11, 1, 1, fold=1), "a", 40),
        Event(local(2026, 11, 8, 1), "a", 80),
    ]
    rows = everything(app_of(HOURLY), events)["trend"].to_dicts()
    return {
        (row["page"], row["window_start"]): (row["n"], row["n_before"], row["n_ratio"])
        for row in rows
    }


def test_p1_an_hour_is_compared_with_the_same_hour_a_week_ago(year):
    assert year["a", local(2026, 1, 12, 10)] == (140, 100, 1.4)


def test_p3_without_an_earlier_window_there_is_no_ratio(year):
    assert year["a", local(2026, 1, 5, 10)] == (100, None, None)
    assert year["b", local(2026, 1, 12, 10)] == (3, None, None)  # another key has one


def test_p4_an_hour_that_the_clocks_skipped_a_week_ago_has_no_counterpart(year):
    before = [year["a", local(2026, 3, 15, hour)][1] for hour in range(4)]
    # 00:00 and 01:00 EST are the third and fourth; 03:00 EDT is the fifth.
    assert before == [3, 4, None, 5]


def test_an_hour_that_is_shown_twice_a_week_ago_is_compared_with_its_first_showing(year):
    assert year["a", local(2026, 11, 1, 1)] == (20, 10, 2.0)
    assert year["a", local(2026, 11, 1, 1, fold=1)] == (40, 10, 4.0)
    assert year["a", local(2026, 11, 8, 1)] == (80, 20, 4.0)


def test_p7_half_an_hour_is_compared_with_half_of_the_hour_a_week_ago():
    week_ago, now = local(2026, 1, 5, 10), local(2026, 1, 12, 10)
    events = [
        Event(week_ago, "a", 50),
        Event(week_ago + timedelta(minutes=40), "a", 50),
        Event(now + timedelta(minutes=10), "a", 60),
        Event(now + timedelta(minutes=59), "a", 90),
    ]
    out = everything(app_of(ms.cumulating("1 hour", "30 minutes")), events)["trend"]
    of_now = out.filter(pl.col("window_start") == now)
    assert of_now.select("n", "n_before", "n_ratio").rows() == [(60, 50, 1.2), (150, 100, 1.5)]


def test_an_alert_fires_before_the_hour_is_over():
    week_ago, now = local(2026, 1, 5, 10), local(2026, 1, 12, 10)
    quarter = timedelta(minutes=15)
    events = [Event(week_ago + n * quarter, "a", 10) for n in range(8)]
    events += [Event(now + n * quarter, "a", cost) for n, cost in enumerate([10, 40, 1, 1, 9, 1])]
    app = ms.App("trend", log="unused")
    stream = app.topic("events", Event, key="page").stream(time="at")
    parts = stream.window(ms.cumulating("1 hour", "15 minutes"), by="page").agg(n=ms.sum("n"))
    trend = parts.compare("n", to="1 week")
    trend.alert(when=pl.col("n_ratio") > 1.25, recover=pl.col("n_ratio") < 1, for_windows=3).view(
        "alerts"
    )
    alerts = testing.replay(app, {"events": [*events, over(events)]}, batchings=10)["alerts"]
    # 1.0 2.5 1.7 1.3 of the first hour, 0.9 0.5 of the next
    assert alerts.select("window_start", "window_end", "n", "alert").rows() == [
        (now, now + HOUR, 52, "firing"),
        (now + HOUR, now + HOUR + quarter, 9, "resolved"),
    ]


# ── parts of windows, beside the same part of the earlier one ───────────────────────────────


def parts_of(out):
    """Say of each window that cumulates: how long it is, in hours, and what it is beside."""
    return {
        (row["page"], row["window_start"], (row["window_end"] - row["window_start"]) / HOUR): (
            row["n"],
            row["n_before"],
            row["n_ratio"],
        )
        for row in out["trend"].to_dicts()
    }


def test_p7_half_of_an_hour_is_compared_with_half_of_the_earlier_one():
    ten, half = local(2026, 1, 5, 10), HOUR / 2
    events = [
        Event(ten, "a", 50),
        Event(ten + half, "a", 50),
        Event(ten + 7 * DAY, "a", 60),
        Event(ten + 7 * DAY + half, "a", 80),
    ]
    app = app_of(ms.cumulating("1 hour", "30 minutes"))
    found = parts_of(everything(app, events))
    assert found["a", ten + 7 * DAY, 0.5] == (60, 50, 1.2)  # not 60/100
    assert found["a", ten + 7 * DAY, 1.0] == (140, 100, 1.4)
    assert found["a", ten, 0.5] == (50, None, None)


@pytest.mark.parametrize(
    ("mode", "late"), [("final", "drop"), ("update", "drop"), ("final", "correct")]
)
def test_parts_are_compared_where_the_earlier_window_began_at_the_same_local_time(mode, late):
    # On 2026-03-08 clocks in New York go forward: 02:00 to 04:00 local time is one hour of event time.
    rng = random.Random(7)
    first = local(2026, 3, 4)
    events = [
        Event(first + rng.randrange(0, 10 * 24 * 12) * timedelta(minutes=5), page, rng.randrange(9))
        for page in "ab"
        for _ in range(250)
    ]
    size, step = 2 * HOUR, HOUR / 2
    app = app_of(ms.cumulating(size, step), to="3 days", mode=mode, late=late, lateness="100 days")
    found = parts_of(everything(app, events, batchings=5))
    values, expected = Counter(), {}
    epoch = datetime(1970, 1, 1, tzinfo=UTC)
    for event in events:
        start = event.at - (event.at - epoch) % size
        for number in range(1, 5):
            if event.at < start + number * step:
                values[event.page, start, number / 2] += event.n
    back = model.days_back(3)
    for (page, start, hours), now in values.items():
        earlier = model.earlier_instant(start, back, NEW_YORK)
        before = values.get((page, earlier, hours), None)
        expected[page, start, hours] = (now, before, model.ratio(now, before))
    assert found == expected
    assert any(before is not None for _, before, _ in expected.values())


@pytest.mark.parametrize(
    ("now", "before", "ratio"),
    [
        (5, 0, math.inf),
        (-5, 0, -math.inf),
        (0, 0, None),
        (0, 5, 0.0),
        (None, 5, None),
        (5, None, None),
    ],
)
def test_the_ratio_to_a_zero_is_infinite_and_one_with_a_null_is_null(now, before, ratio):
    found = ratio_of(pl.Series([now], dtype=pl.Int64), pl.Series([before], dtype=pl.Int64))
    assert found.to_list() == [ratio]


def test_the_second_showing_is_compared_with_the_second_one_where_both_days_have_two():
    days = (local(2021, 11, 7, 1), local(2027, 11, 7, 1))
    events = [
        Event(at, "a", n + 1) for n, at in enumerate(t for day in days for t in (day, day + HOUR))
    ]
    out = everything(app_of(HOURLY, to="6 years"), events, 3)
    assert [row[1:3] for row in rows_of(out)] == [(1, None), (2, None), (3, 1), (4, 2)]


@pytest.mark.parametrize("to", ["1 month", "1 year"])
def test_a_day_that_the_earlier_month_does_not_have_has_no_counterpart(to):
    back = {"1 month": (2026, 2), "1 year": (2025, 3)}[to]
    events = [Event(local(*back, 28, 10), "a", 1), Event(local(*back, 27, 10), "a", 2)]
    events += [Event(local(2026, 3, day, 10), "a", 10) for day in (27, 28, 29, 30, 31)]
    events += [Event(local(2024, 2, 29, 10), "a", 5), Event(local(2023, 2, 28, 10), "a", 6)]
    events.sort(key=lambda event: event.at)
    out = everything(app_of(HOURLY, to=to), events, 3)
    march = [row[2] for row in rows_of(out) if row[1] == 10]
    assert march == [2, 1, None, None, None]
    assert {row[1]: row[2] for row in rows_of(out)}[5] is None


def test_days_are_compared_by_their_date_also_where_midnight_is_skipped():
    zone = "America/Sao_Paulo"  # 2018-11-04 began at 01:00
    days = [
        local(2018, 10, 28, 12, zone),
        local(2018, 11, 4, 12, zone),
        local(2018, 11, 11, 12, zone),
    ]
    events = [Event(at, "a", 10 * (n + 1)) for n, at in enumerate(days)]
    out = everything(app_of(ms.calendar("1 day", tz=zone), zone=None), events, 3)
    assert [row[1:] for row in rows_of(out)] == [(10, None, None), (20, 10, 2.0), (30, 20, 1.5)]


@pytest.mark.parametrize("span", ["1 month", "1 year"])
def test_months_are_compared_with_those_of_a_year_ago(span):
    events = [Event(local(2025, 2, 3, 4), "a", 2), Event(local(2026, 2, 9, 4), "a", 3)]
    out = everything(app_of(ms.calendar(span, tz=NEW_YORK), to="1 year", zone=None), events, 3)
    assert rows_of(out)[-1][1:] == (3, 2, 1.5)


@pytest.mark.parametrize(
    "options",
    [
        {"mode": "retract", "lateness": "10 days"},
        {"mode": "update", "lateness": "10 days"},
        {"late": "correct", "lateness": "10 days"},
    ],
)
def test_p6_a_correction_of_either_window_corrects_the_comparison(options):
    then, now = local(2026, 1, 5, 10), local(2026, 1, 12, 10)
    events = [Event(at, page, n) for at, n in ((then, 100), (now, 140)) for page in "ab"]
    events += [Event(now + 5 * HOUR, page, 1) for page in "ab"]
    events += [Event(now, "a", -20), Event(then, "b", 25)]
    out = everything(app_of(HOURLY, **options), events)
    compared = out["trend"].filter(pl.col("n_before").is_not_null())
    assert compared.select("page", "window_start", "n", "n_before", "n_ratio").rows() == [
        ("a", now, 120, 100, 1.2),
        ("b", now, 140, 125, 1.12),
    ]
    given = {"events": [*events, over(events)]}
    runs = [testing.run(app_of(HOURLY, **options), given, batches=9, seed=n) for n in range(9)]
    topics = [run.topic("out").filter(pl.col("n_ratio").is_not_null()) for run in runs]
    of_a = [topic.filter(pl.col("page") == "a").select("n_ratio", "_diff") for topic in topics]
    assert any(rows.rows() == [(1.4, 1), (1.4, -1), (1.2, 1)] for rows in of_a)


def test_an_earlier_window_that_only_late_events_make_is_compared_once_it_is_there():
    then, now = local(2026, 1, 11, 10), local(2026, 1, 12, 10)
    events = [Event(now, "a", 30), Event(now + 5 * HOUR, "a", 1), Event(then, "a", 20)]
    out = everything(app_of(HOURLY, to="1 day", mode="retract", lateness="10 days"), events, 3)
    assert rows_of(out)[1] == (now, 30, 20, 1.5)


# ── random input ────────────────────────────────────────────────────────────────────────────

CHANGES = {  # of clocks, and an instant near them
    NEW_YORK: [local(2026, 3, 8, 3), local(2026, 11, 1, 1)],
    "Europe/London": [
        local(2026, 3, 29, 2, "Europe/London"),
        local(2026, 10, 25, 1, "Europe/London"),
    ],
    "Australia/Lord_Howe": [
        datetime(2026, 4, 4, 15, tzinfo=UTC),
        datetime(2026, 10, 3, 15, tzinfo=UTC),
    ],
    "UTC": [datetime(2026, 3, 1, tzinfo=UTC)],
}
SPANS = {
    "1 day": model.days_back(1),
    "1 week": model.days_back(7),
    "1 month": model.months_back(1),
}
MODES = [
    {},
    {"lateness": "3 hours"},
    {"mode": "retract", "lateness": "30 hours"},
    {"mode": "retract", "lateness": "12 days", "suppress_unchanged": False},
    {"mode": "update", "lateness": "12 days"},
    {"late": "correct", "lateness": "30 hours"},
]


@st.composite
def histories(draw):
    zone = draw(st.sampled_from(sorted(CHANGES)))
    change = draw(st.sampled_from(CHANGES[zone]))
    days = draw(st.sampled_from([[-7, 0, 7], [-1, 0, 1], [-31, -28, -30, 0, 28, 31]]))
    events = draw(
        st.lists(
            st.builds(
                lambda day, quarters, page, n: Event(
                    change + day * DAY + quarters * timedelta(minutes=15), page, n
                ),
                st.sampled_from(days),
                st.integers(-16, 16),
                st.sampled_from(["a", "b", None]),
                st.integers(-1, 3),
            ),
            min_size=1,
            max_size=40,
        )
    )
    if draw(st.booleans()):
        events.sort(key=lambda event: event.at)
    return zone, events


def bag(topic):
    """The rows that are left of those that a topic of one partition adds and takes back, in their order."""
    left = Counter()
    for row in topic.drop("partition", "offset", "key", "timestamp").to_dicts():
        sign = row.pop("_diff", None) or 1
        left[repr(sorted(row.items()))] += sign
        assert left[repr(sorted(row.items()))] >= 0, "a row was taken back that was not there"
    return +left


def check(app, events, window_earlier, seed, by=("page",), compared=model.compared):
    out = testing.run(
        app,
        {"events": [*events, over(events)]},
        batches=1 + seed % 9,
        partitions=[1, 4, 7][seed % 3],
        seed=seed,
        crash=1,
    )
    expected = compared(out["rows"].to_dicts(), by, "n", window_earlier)
    assert out["trend"].to_dicts() == expected
    assert sum(bag(out.topic("out")).values()) == len(expected)


@settings(max_examples=some(40))
@given(histories(), st.sampled_from(sorted(SPANS)), st.sampled_from(MODES), st.integers(0, 999))
def test_hours_are_compared_as_the_model_says(history, to, options, seed):
    zone, events = history
    dice = random.Random(seed)
    window = dice.choice([HOURLY, ms.calendar("1 hour", tz=zone)])
    by = dice.choice([("page",), ("page",), ()])
    earlier = lambda start: model.earlier_instant(start, SPANS[to], zone)  # noqa: E731
    check(app_of(window, to, zone, by=by, **options), events, earlier, seed, by)


@settings(max_examples=some(20))
@given(histories(), st.sampled_from(sorted(SPANS)), st.sampled_from(MODES), st.integers(0, 999))
def test_days_are_compared_by_their_dates(history, to, options, seed):
    zone, events = history

    def earlier(start):
        date = SPANS[to](model.shown(start, zone).replace(hour=0))
        return None if date is None else date.replace(tzinfo=ZoneInfo(zone)).astimezone(UTC)

    app = app_of(ms.calendar("1 day", tz=zone), to, None, **options)
    check(app, events, earlier, seed)


@settings(max_examples=some(30))
@given(histories(), st.sampled_from(sorted(SPANS)), st.sampled_from(MODES), st.integers(0, 999))
def test_parts_of_windows_are_compared_with_parts_as_long(history, to, options, seed):
    zone, events = history
    sizes = [("1 hour", "15 minutes"), ("4 hours", "1 hour"), ("1 day", "6 hours")]
    window = ms.cumulating(*random.Random(seed).choice(sizes))
    earlier = lambda start: model.earlier_instant(start, SPANS[to], zone)  # noqa: E731
    app = app_of(window, to, zone, **options)
    check(app, events, earlier, seed, compared=model.compared_parts)


# ── what is kept ────────────────────────────────────────────────────────────────────────────


def compare_kernel(**options):
    (operator,) = app_of(HOURLY, to="1 day", **options).plan().stages[1].operators
    return operator.kernel


@pytest.mark.parametrize("options", [{}, {"mode": "retract", "lateness": "5 hours"}])
def test_values_are_kept_for_as_long_as_they_are_compared_with_and_no_longer(options):
    kernel = compare_kernel(**options)
    state = OperatorState(MemoryRunStore())
    start, most = datetime(2026, 1, 1, tzinfo=UTC), 0
    for hour in range(24 * 20):
        begin = start + hour * HOUR
        end_us = round((begin + HOUR).timestamp() * 1e6)
        rows = pl.DataFrame(
            {
                "n": [hour],
                "page": ["a"],
                "window_start": [begin],
                "window_end": [begin + HOUR],
                "__time": [end_us - 1],
            },
            schema_overrides={"window_start": pl.Datetime("us", "UTC")},
        ).with_columns(pl.col("window_end").cast(pl.Datetime("us", "UTC")))
        context = BatchContext(end_us - 3_600_000_000, end_us)
        result = kernel.process(state, {0: [kernel.prepare(rows).table]}, context)
        assert result.rows["n_before"].to_list() == [hour - 24 if hour >= 24 else None]
        most = max(most, sum(runs.events for runs in state.families.values()))
    assert most <= 24 * 7  # a day, the slack for changes of zones, a slot, and the window's end
    later = BatchContext(end_us, end_us + 10 * 86_400_000_000)
    kernel.process(state, {}, later)
    assert sum(runs.events for runs in state.families.values()) == 0
    assert not state.store.tables
