"""Count windows against a naive model, and the cases that their rules are made of."""

from collections import defaultdict
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import pytest
from example_counts import some
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import millstream as ms
from millstream.errors import ConfigError
from millstream.log.murmur2 import partition_of

START = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass
class Event:
    at: datetime
    key: str | None
    n: int = 1


def at(seconds):
    return START + timedelta(seconds=seconds)


def app_with(window, mode="final", **emit):
    app = ms.App("counts", log="unused")
    stream = app.topic("events", Event, key="key").stream(
        time="at", watermark=ms.watermark("0 seconds", idle=None)
    )
    out = stream.window(window, by="key").emit(mode, **emit).agg(rows=ms.count(), total=ms.sum("n"))
    out.view("out")
    return app


def told(row):
    start, end = ((row[name] - START).total_seconds() for name in ("window_start", "window_end"))
    return (row["key"], row["window_number"], row["rows"], row["total"], start, round(end, 3))


def summed(key, number, events):
    latest = max(time for time, _ in events)
    return (key, number, len(events), sum(n for _, n in events), events[0][0], latest)


def by_place(events, count, slide):
    """All windows of one key that have begun: (number, events)."""
    begun = range(0, len(events), slide)
    return [(place // slide, events[place : place + count]) for place in begun]


def by_time(events, count, timeout, watermark):
    """Windows one after another; events are (time, number, what their partition had reached)."""
    windows, opened = [], []
    for time, n, reached in events:
        if opened and opened[0][0] + timeout <= reached:
            windows.append((opened, True))
            opened = []
        opened.append((time, n))
        if len(opened) == count:
            windows.append((opened, True))
            opened = []
    if opened:
        windows.append((opened, opened[0][0] + timeout <= watermark))
    return windows


draws = st.lists(
    st.tuples(st.integers(-20, 60), st.sampled_from("abc"), st.integers(-5, 5)), max_size=50
)
settled = settings(
    deadline=None,
    max_examples=some(30),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@pytest.mark.parametrize("mode", ["final", "update"])
@settled
@given(
    drawn=draws,
    count=st.integers(1, 7),
    slide=st.integers(1, 7),
    partitions=st.sampled_from([1, 4, 7]),
    batches=st.integers(1, 6),
    seed=st.integers(0, 99),
)
def test_windows_hold_the_events_of_their_places(
    mode, drawn, count, slide, partitions, batches, seed, rows_given
):
    slide = min(count, slide)
    by_key = defaultdict(list)
    for time, key, n in drawn:
        by_key[key].append((time, n))
    expected = {
        (key, number): summed(key, number, events)
        for key, found in by_key.items()
        for number, events in by_place(found, count, slide)
        if mode == "update" or len(events) == count
    }
    app = app_with(ms.count_window(count, slide=slide, unbounded=True), mode)
    rows = [Event(at(t), key, n) for t, key, n in drawn]
    run = rows_given(app, {"events": rows}, batches=batches, partitions=partitions, seed=seed)
    said = [told(row) for row in run.rows["out"].to_dicts()]
    assert {row[:2]: row for row in said} == expected
    if mode == "final":
        assert len(said) == len(expected)


@pytest.mark.parametrize("mode", ["final", "update"])
@settled
@given(
    drawn=draws,
    count=st.integers(1, 7),
    timeout=st.sampled_from([1, 8, 30]),
    partitions=st.sampled_from([1, 4, 7]),
    batches=st.integers(1, 6),
    seed=st.integers(0, 99),
)
def test_windows_that_are_timed_out_are_complete_as_they_are(
    mode, drawn, count, timeout, partitions, batches, seed, rows_given
):
    seen, by_key = defaultdict(lambda: -(10**9)), defaultdict(list)
    for time, key, n in drawn:
        partition = partition_of(key.encode(), partitions)
        by_key[key].append((time, n, seen[partition]))
        seen[partition] = max(seen[partition], time)
    watermark = min(seen[p] for p in range(partitions))
    expected = {
        (key, number): summed(key, number, events)
        for key, found in by_key.items()
        for number, (events, over) in enumerate(by_time(found, count, timeout, watermark))
        if over or mode == "update"
    }
    app = app_with(ms.count_window(count, timeout=timedelta(seconds=timeout), unbounded=True), mode)
    rows = [Event(at(t), key, n) for t, key, n in drawn]
    run = rows_given(app, {"events": rows}, batches=batches, partitions=partitions, seed=seed)
    said = [told(row) for row in run.rows["out"].to_dicts()]
    assert {row[:2]: row for row in said} == expected
    if mode == "final":
        assert len(said) == len(expected)


def test_a_window_ends_just_after_its_latest_event(rows_given):
    app = app_with(ms.count_window(2, unbounded=True))
    run = rows_given(app, {"events": [Event(at(9), "a"), Event(at(4), "a")]})
    (row,) = run.rows["out"].to_dicts()
    assert (row["window_start"], row["window_end"]) == (at(9), at(9) + timedelta(microseconds=1))


def test_a_window_whose_timeout_the_watermark_has_reached_comes_without_another_event(rows_given):
    app = app_with(ms.count_window(100, timeout="10 seconds", unbounded=True))
    rows = [Event(at(0), "a"), Event(at(3), "a"), Event(at(10), "z")]
    for seed in range(10):
        run = rows_given(app, {"events": rows}, batches=1 + seed % 4, seed=seed)
        assert [told(row)[:3] for row in run.rows["out"].to_dicts()] == [("a", 0, 2)]


def test_what_cannot_be_a_count_window_is_refused():
    def refused(match):
        return pytest.raises(ConfigError, match=match)

    with refused("count_window's count is 0"):
        ms.count_window(0, unbounded=True)
    with refused("count_window's slide is 5. Give a whole number from 1 to 4"):
        ms.count_window(4, slide=5, unbounded=True)
    with refused("a slide and a timeout"):
        ms.count_window(4, slide=2, timeout="1 hour", unbounded=True)
    with refused("has no late rows"):
        app_with(ms.count_window(4, unbounded=True), "update", late="each")
    app = ms.App("late", log="unused")
    stream = app.topic("events", Event, key="key").stream(time="at", late="side")
    with refused("no event is late"):
        stream.window(ms.count_window(4, unbounded=True), by="key").agg(rows=ms.count())


def test_that_a_row_of_every_key_is_kept_for_ever_must_be_said():
    with pytest.raises(
        ConfigError, match=r"every key that ever came.*count_window\(4, unbounded=True"
    ):
        ms.count_window(4)
    with pytest.raises(ConfigError, match="every key that ever came"):
        ms.count_window(4, timeout="1 hour", unbounded="yes")
