"""What is shown of events, and when windows close, while partitions lag, fall silent or stop."""

from collections import Counter
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import pytest
from example_counts import some
from hypothesis import given, settings
from hypothesis import strategies as st

import millstream as ms
from millstream import testing
from millstream.errors import ConfigError
from millstream.kernels.time.watermarks import (
    NO_WATERMARK,
    InputClock,
    SourceTime,
    SplitTime,
    WatermarkRule,
)
from millstream.ops.why import why_open

START = datetime(2026, 1, 1, 12, tzinfo=UTC)


@dataclass
class Event:
    at: datetime
    device: str = "d"


def event(at_s, partition=0, device="d"):
    return testing.Row(
        Event(START + timedelta(seconds=at_s), device), partition=partition, at=START
    )


def app_with(mode="update", *, lateness="1 hour", late="drop", by=(), watermark=None, **emission):
    app = ms.App("quiet", log="unused")
    stream = app.topic("events", Event, partitions=2).stream(
        time="at",
        watermark=watermark or ms.watermark("0 seconds", idle=None),
        lateness=lateness,
        late=late,
    )
    windows = stream.window(ms.tumbling("10 seconds"), by=by, name="windows")
    windows.emit(mode, **emission).agg(n=ms.count()).view("out", key="window_start")
    return app


def counts(out):
    starts = (out["out"]["window_start"] - START).dt.total_seconds().to_list()
    return dict(zip(starts, out["out"]["n"].to_list(), strict=True))


# Events that are late in their own partition.


def read_so_far(events, lateness):
    """Count the events by window, but for those too late by what came before them in the partition."""
    reached, shown = {}, Counter()
    for at, partition in events:
        end = at // 10 * 10 + 10
        shown[at // 10 * 10] += reached.get(partition, -(10**9)) < end + lateness
        reached[partition] = max(at, reached.get(partition, at))
    return {start: n for start, n in shown.items() if n}


@settings(deadline=None, max_examples=some(40))
@given(
    events=st.lists(st.tuples(st.integers(0, 80), st.integers(0, 3)), min_size=1, max_size=30),
    lateness=st.sampled_from([1, 15, 100]),
    mode=st.sampled_from(["update", "retract"]),
    late=st.sampled_from(["drop", "side", "correct"]),
    batches=st.integers(1, 5),
    seed=st.integers(0, 99),
)
def test_a_view_that_shows_updates_shows_all_that_has_been_read(
    events, lateness, mode, late, batches, seed
):
    app = app_with(mode, lateness=timedelta(seconds=lateness), late=late)
    rows = [event(at, partition) for at, partition in events]
    out = testing.run(app, {"events": rows}, partitions=4, batches=batches, seed=seed)
    assert counts(out) == read_so_far(events, lateness)


def test_where_rows_tell_their_pane_a_late_event_waits_for_the_one_on_time():
    rows = [event(0, 0), event(60, 1), event(5, 1)]
    close = testing.Watermark("events", at=START + timedelta(seconds=30))
    for tail, expected in (([], 1), ([close], 2)):
        out = testing.run(app_with(panes=True), {"events": rows + tail})
        assert counts(out)[0] == expected


# A watermark that goes on by itself.


def going_on(**words):
    return ms.watermark("5 seconds", idle="20 seconds", idle_advance=True, **words)


def test_final_windows_close_by_running_time_once_all_partitions_are_idle():
    rows = [event(2), event(14, 1), event(9)]
    for passed, expected in ((19, {}), (21, {0: 2, 10: 1})):
        app = app_with("final", lateness="0 seconds", watermark=going_on())
        ticks = [testing.Tick(timedelta(seconds=passed))]
        assert counts(testing.run(app, {"events": [*rows, *ticks]})) == expected


def test_it_goes_as_far_as_time_has_passed_and_no_further():
    rows = [
        event(14),
        event(12, 1),
    ]  # the first has come to 9, and is in no window that ends before 20
    for passed, closed in ((20, {10: 2}), (11, {})):
        ticks = [testing.Tick(timedelta(seconds=passed)), testing.Tick("1 second")]
        app = app_with("final", lateness="0 seconds", watermark=going_on())
        out = testing.run(app, {"events": [*rows, *ticks]})
        assert counts(out) == closed
        expected = START + timedelta(seconds=9 + passed + 1 if closed else 7)
        assert out.watermark == expected


def test_without_it_the_watermark_holds():
    app = app_with(
        "final", lateness="0 seconds", watermark=ms.watermark("5 seconds", idle="20 seconds")
    )
    out = testing.run(app, {"events": [event(2), event(14, 1), testing.Tick("1 hour")]})
    assert counts(out) == {}
    assert out.watermark == START - timedelta(seconds=3)  # that of the slower one


def test_what_comes_back_is_held_to_what_was_reached():
    rows = [event(2), event(14, 1), testing.Tick("30 seconds"), event(16), event(45, 1), event(36)]
    close = testing.Watermark("events", at=START + timedelta(hours=1))
    app = app_with("final", lateness="0 seconds", watermark=going_on())
    out = testing.run(app, {"events": [*rows, close]})
    assert counts(out) == {0: 1, 10: 1, 30: 1, 40: 1}
    assert out.late == 1  # of second 16, as 39 had been reached


def test_a_step_behind_another_goes_on_with_it():
    app = ms.App("quiet", log="unused")
    stream = app.topic("events", Event, partitions=2).stream(time="at", watermark=going_on())
    minutes = stream.window(ms.tumbling("10 seconds")).agg(n=ms.count())
    minutes.window(ms.tumbling("1 minute")).agg(n=ms.sum("n")).view("out", key="window_start")
    rows = [event(2), event(14, 1), testing.Tick("2 minutes"), testing.Tick("1 second")]
    assert counts(testing.run(app, {"events": rows})) == {0: 2}


def test_with_an_input_that_is_active_it_does_not_go_on():
    app = ms.App("quiet", log="unused")
    quiet = app.topic("events", Event, partitions=1).stream(time="at", watermark=going_on())
    other = app.topic("others", Event, partitions=1).stream(
        time="at", watermark=ms.watermark("5 seconds", idle=None)
    )
    both = quiet.union(other).window(ms.tumbling("10 seconds"))
    both.agg(n=ms.count()).view("out", key="window_start")
    inputs = {
        "events": [event(2), testing.Tick("1 hour")],
        "others": [event(4), testing.Tick("1 hour")],
    }
    out = testing.run(app, inputs)
    assert (counts(out), out.watermark) == ({}, START - timedelta(seconds=1))


@settings(deadline=None, max_examples=some(30))
@given(
    sections=st.lists(
        st.tuples(
            st.lists(st.tuples(st.integers(0, 90), st.integers(0, 1)), max_size=4),
            st.sampled_from([0, 5, 19, 20, 40]),
        ),
        min_size=1,
        max_size=5,
    ),
    crash=st.integers(0, 2),
    seed=st.integers(0, 99),
)
def test_a_batch_that_is_run_again_goes_on_as_far(sections, crash, seed):
    rows = []
    for events, passed in sections:
        rows += [event(at, partition) for at, partition in events]
        rows.append(testing.Tick(timedelta(seconds=passed)))
    ran = [
        testing.run(
            app_with("final", lateness="0 seconds", watermark=going_on()),
            {"events": rows},
            crash=crashes,
            seed=seed,
        )
        for crashes in (0, crash)
    ]
    assert counts(ran[0]) == counts(ran[1])
    assert ran[0].watermark == ran[1].watermark


def test_an_input_of_which_nothing_was_seen_does_not_go_on():
    rule = WatermarkRule(delay_us=0, idle_ms=1, idle_advance=True)
    seen = SourceTime((), 2, frozenset([0, 1]), 50, quiet_ms=50)
    clock, _ = InputClock.initial().advanced(seen, rule, 0)
    assert (clock.watermark_us, clock.advances) == (NO_WATERMARK, False)
    told = SourceTime((SplitTime(0, 0, 7),), 2, frozenset([0, 1]), 50, quiet_ms=50)
    clock, _ = clock.advanced(told, rule, 0)
    assert (clock.watermark_us, clock.advances) == (50_007, True)
    assert InputClock.from_message(clock.to_message()) == clock


@pytest.mark.parametrize(
    "words", [{"delay": "1 second", "idle": None}, {"delay": None, "punctuation": "at"}]
)
def test_where_it_cannot_go_on_by_itself_that_is_refused(words):
    with pytest.raises(ConfigError, match=r"idle_advance=True and (idle=None|no delay).*Give both"):
        ms.watermark(**words, idle_advance=True)


# Who holds a window open.


def why(*rows, rule):
    out = testing.run(app_with("final", watermark=rule), {"events": list(rows)})
    (found,) = why_open(out._store, "quiet")
    return found.held_by, " ".join(found.sentences)


def test_the_producer_that_holds_a_window_is_named():
    rule = ms.watermark("0 seconds", idle=None, per="device")
    rows = [event(5, 0, "slow"), event(90, 0, "fast"), event(80, 1, "other"), event(6, 0, "slow")]
    held_by, said = why(*rows, rule=rule)
    assert held_by == ("events/0",)
    assert "Of its producers the slowest: 'slow'." in said


def test_of_many_producers_a_few_are_named_and_the_others_counted():
    rule = ms.watermark("0 seconds", idle=None, per="device")
    rows = [event(5, p, f"d{n}") for p in (0, 1) for n in range(9)]
    _, said = why(*rows, rule=rule)
    assert "'d0', 'd1', 'd2' and 6 others." in said


def test_that_all_is_quiet_is_said_with_what_would_close_the_windows():
    quiet = [event(2), event(14, 1), testing.Tick("1 minute")]
    _, said = why(*quiet, rule=ms.watermark("5 seconds", idle="20 seconds"))
    assert "Every input is idle" in said
    assert "idle_advance=True" in said
    _, said = why(*quiet, rule=going_on())
    assert "it goes on with running time" in said
