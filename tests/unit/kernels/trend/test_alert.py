"""Alerts with hold and recovery: published cases, and random input against a plain loop."""

from collections import Counter
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

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
from millstream.kernels.windows.assigners import Cumulating

HOUR = timedelta(hours=1)
START = datetime(2026, 1, 12, 10, tzinfo=UTC)
WEEK = timedelta(days=7)


@dataclass
class Event:
    at: datetime
    page: str | None
    n: int


def stream_of(app, **options):
    return app.topic("events", Event, key="page").stream(
        time="at", watermark=ms.watermark("1 hour", idle=None), **options
    )


def over(events):
    last = max(event.at for event in events)
    return testing.Watermark("events", at=last + timedelta(days=100))


BATCHINGS = some(20)


def everything(app, events, batchings=BATCHINGS):
    return testing.replay(app, {"events": [*events, over(events)]}, batchings=batchings)


# ── the published cases ─────────────────────────────────────────────────────────────────────


def trend_app(mode="final", **options):
    """Alert when an hour has 1.3 times as much as a week ago, and no less than 10, two hours long."""
    app = ms.App("alerts", log="unused", buckets=3)
    windowed = stream_of(app, **options).window(ms.tumbling("1 hour"), by="page")
    emitted = windowed.emit(mode) if mode == "final" else windowed.emit(mode, early=None)
    trend = emitted.agg(n=ms.sum("n")).compare("n", to="1 week")
    alerts = trend.alert(
        when=(pl.col("n_ratio") > 1.3) & (pl.col("n") >= 10),
        recover=pl.col("n_ratio") < 1.1,
        for_windows=2,
    )
    alerts.view("alerts")
    alerts.to("out", partitions=1)
    return app


def hours(page, before, now):
    """Events of the same hours of two weeks; None stands for an hour without events."""
    for start, values in ((START - WEEK, before), (START, now)):
        for number, n in enumerate(values):
            if n is not None:
                yield Event(start + number * HOUR, page, n)


def in_time(*series):
    return sorted((e for events in series for e in events), key=lambda e: e.at)


@pytest.fixture(scope="module")
def published():
    hundred = [100] * 6
    events = in_time(
        hours("p5", hundred, [140, 120, 135, 140, 120, 105]),
        hours("p2 small", [0] * 6, [5] * 6),
        hours("p2 large", [0] * 6, [50] * 6),
        hours("p3", [None] * 6, [500] * 6),
        hours("p3 between", [100, None, 100, 100], [140, 140, 140, 105]),
        hours("gap", hundred, [140, None, 140, 120]),
        hours("gap while firing", hundred, [140, 140, None, None, 140, 105]),
    )
    return everything(trend_app(), events)["alerts"].to_dicts()


def of_page(rows, page):
    return [
        ((row["window_start"] - START) // HOUR + 1, row["alert"])
        for row in rows
        if row["page"] == page
    ]


def test_p2_what_is_below_the_least_support_fires_no_alert_though_its_ratio_is_infinite(published):
    assert of_page(published, "p2 small") == []
    assert of_page(published, "p2 large") == [(2, "firing")]


def test_p3_without_an_earlier_window_there_is_no_alert(published):
    assert of_page(published, "p3") == []
    assert of_page(published, "p3 between") == []  # a null begins the count anew


def test_p5_an_alert_fires_at_the_second_window_in_a_row_and_ends_when_it_recovers(published):
    assert of_page(published, "p5") == [(4, "firing"), (6, "resolved")]


def test_a_window_without_a_row_begins_the_count_anew_and_resolves_nothing(published):
    assert of_page(published, "gap") == []
    assert of_page(published, "gap while firing") == [(2, "firing"), (6, "resolved")]


REVISED = [
    {"mode": "retract", "lateness": "10 days"},
    {"mode": "update", "lateness": "10 days"},
    {"late": "correct", "lateness": "10 days"},
]


@pytest.mark.parametrize("options", REVISED)
def test_p6_a_late_correction_takes_the_alert_back(options):
    # 140 becomes 120 on page a; on page b what follows fires only with the correction.
    late = [Event(START + HOUR, "a", -20), Event(START, "b", 30)]
    events = in_time(hours("a", [100] * 3, [140] * 2), hours("b", [100] * 4, [110, 140, 100, 100]))
    events = [*events, *late]
    out = everything(trend_app(**options), events)
    assert of_page(out["alerts"].to_dicts(), "a") == []
    assert of_page(out["alerts"].to_dicts(), "b") == [(2, "firing"), (3, "resolved")]
    given = {"events": [*events, over(events)]}
    runs = [testing.run(trend_app(**options), given, batches=9, seed=n) for n in range(9)]
    topics = [run.topic("out") for run in runs if run.topic("out").height]
    of_a = [topic.filter(pl.col("page") == "a") for topic in topics]
    taken_back = [("firing", 1), ("firing", -1)]
    assert any(rows.select("alert", "_diff").rows() == taken_back for rows in of_a)


# ── random input ────────────────────────────────────────────────────────────────────────────

WINDOWS = [
    ms.tumbling("1 hour"),
    ms.tumbling("5 hours", offset="-2 hours"),
    ms.calendar("1 day", tz="America/New_York"),
    ms.calendar("6 hours", tz="Australia/Lord_Howe"),
    ms.cumulating("6 hours", "2 hours"),
    ms.cumulating("3 hours", "1 hour", offset="-2 hours"),
]
MODES = [
    {},
    {"lateness": "3 hours"},
    {"emit": {"mode": "retract"}, "lateness": "30 hours"},
    {"emit": {"mode": "retract", "early": None}, "lateness": "9 days"},
    {"emit": {"mode": "update", "suppress_unchanged": False}, "lateness": "9 days"},
    {"emit": {"mode": "update", "late": ms.after_count(1)}, "lateness": "9 days"},
    {"late": "correct", "lateness": "30 hours"},
]


def plain_app(window, for_windows, by, emit=None, **options):
    app = ms.App("alerts", log="unused", buckets=3)
    windowed = stream_of(app, **options).window(window, by=by)
    rows = windowed.emit(**(emit or {})).agg(n=ms.sum("n"), most=ms.max("n"))
    rows.view("rows")
    # Nulls come from a division by zero that is none: 0 // 0 of whole numbers.
    alerts = rows.alert(
        when=(pl.col("n") > 2) & (pl.col("most") // pl.col("most") == 1),
        recover=pl.col("n") < 2,
        for_windows=for_windows,
    )
    alerts.view("alerts")
    alerts.to("out", partitions=1)
    return app


@st.composite
def events_near_a_change(draw):
    start = draw(
        st.sampled_from([datetime(2026, 3, 7, tzinfo=UTC), datetime(2026, 4, 4, tzinfo=UTC)])
    )
    events = draw(
        st.lists(
            st.builds(
                lambda hour, page, n: Event(start + hour * HOUR, page, n),
                st.integers(0, 60),
                st.sampled_from(["a", "b", None]),
                st.integers(-2, 4),
            ),
            min_size=1,
            max_size=60,
        )
    )
    if draw(st.booleans()):
        events.sort(key=lambda event: event.at)
    return events


def bag(topic):
    """The rows that are left of those that a topic of one partition adds and takes back, in their order."""
    left = Counter()
    for row in topic.drop("partition", "offset", "key", "timestamp").to_dicts():
        sign = row.pop("_diff", None) or 1
        left[repr(sorted(row.items()))] += sign
        assert left[repr(sorted(row.items()))] >= 0, "a row was taken back that was not there"
    return +left


@settings(max_examples=some(40))
@given(
    events_near_a_change(),
    st.sampled_from(WINDOWS),
    st.integers(1, 3),
    st.sampled_from(["page", ()]),
    st.sampled_from(MODES),
    st.integers(0, 999),
)
def test_alerts_come_as_the_model_says(events, window, for_windows, by, options, seed):
    out = testing.run(
        plain_app(window, for_windows, by, **options),
        {"events": [*events, over(events)]},
        batches=1 + seed % 9,
        partitions=[1, 4, 7][seed % 3],
        seed=seed,
        crash=1,
    )
    expected = model.alerts(
        out["rows"].to_dicts(),
        ["page"] if by else [],
        lambda row: row["n"] > 2 and row["most"] != 0,
        lambda row: row["n"] < 2,
        for_windows,
        timedelta(microseconds=window.slide_us) if isinstance(window, Cumulating) else None,
    )
    found = out["alerts"].to_dicts()
    assert sorted(map(repr, found)) == sorted(map(repr, expected))
    if expected:
        assert sum(bag(out.topic("out")).values()) == len(expected)


# ── what is kept ────────────────────────────────────────────────────────────────────────────


def rows_at(hour, n, pages):
    begin = START + hour * HOUR
    end_us = round((begin + HOUR).timestamp() * 1e6)
    rows = pl.DataFrame(
        {
            "page": pages,
            "n": [n] * len(pages),
            "most": [1] * len(pages),
            "window_start": [begin] * len(pages),
            "window_end": [begin + HOUR] * len(pages),
            "__time": [end_us - 1] * len(pages),
        }
    )
    return rows, BatchContext(end_us - 3_600_000_000, end_us)


def kernel_of(**options):
    app = plain_app(ms.tumbling("1 hour"), 3, "page", **options)
    (operator,) = app.plan().stages[1].operators
    return operator.kernel


def held(state):
    return sum(runs.events for runs in state.families.values())


@pytest.mark.parametrize(
    "options", [{}, {"emit": {"mode": "retract", "early": None}, "lateness": "5 hours"}]
)
def test_keys_that_do_not_fire_are_forgotten_when_their_windows_are_over(options):
    kernel = kernel_of(**options)
    state = OperatorState(MemoryRunStore())
    for hour in range(100):
        rows, context = rows_at(hour, 9, [f"{hour}", f"{hour} again"])
        kernel.process(state, {0: [kernel.prepare(rows).table]}, context)
        assert held(state) <= 8
    kernel.process(state, {}, BatchContext(context.watermark_us, context.watermark_us + 10**11))
    assert held(state) == 0
    assert not state.store.tables


def test_a_key_that_fires_is_one_row_of_state_until_it_is_resolved():
    kernel = kernel_of()
    state = OperatorState(MemoryRunStore())
    for hour in range(50):
        rows, context = rows_at(hour, 9 if hour < 40 else 0, ["a"])
        result = kernel.process(state, {0: [kernel.prepare(rows).table]}, context)
        expected = {2: ["firing"], 40: ["resolved"]}.get(hour)
        assert (result.rows["alert"].to_list() if result.rows is not None else None) == expected
        if hour >= 2:
            assert held(state) == (1 if hour < 40 else 0)
