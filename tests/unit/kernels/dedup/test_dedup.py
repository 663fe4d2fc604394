"""Deduplication against naive models: any disorder, batching, partitions, lateness and filters."""

from collections import defaultdict
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import pairwise

import polars as pl
import pytest
from example_counts import some
from hypothesis import given, settings
from hypothesis import strategies as st
from truncated_hashes import not_when_cut

from millstream import App, Stream, bloom, count, count_window, testing, tumbling, watermark
from millstream import min as min_of
from millstream import sum as sum_of
from millstream.errors import ConfigError
from millstream.log.murmur2 import partition_of
from millstream.pipeline.graph import LateNode
from millstream.pipeline.shape import StreamShape

START = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass
class Event:
    at: datetime
    device: str
    n: int
    id: str | None = None
    part: int | None = None


def event(at_s, event_id, number, device="one", part=None):
    return Event(START + timedelta(seconds=at_s), device, number, event_id, part)


def app_with(ids="id", *, delay=0, lateness=0, **options):
    app = App("dedup", log="unused")
    stream = app.topic("events", Event, key="device").stream(
        time="at",
        watermark=watermark(timedelta(seconds=delay), idle=None),
        lateness=timedelta(seconds=lateness),
    )
    kept = stream.dedup(ids, **options)
    kept.view("out", key="n")
    return app, kept


def run(app, rows, **options):
    """Run, and make sure that nothing is lost uncounted: read = emitted + duplicate + late + filtered."""
    out = testing.run(app, {"events": rows}, **options)
    books = out.ledger.filter(pl.col("step").str.starts_with("dedup(")).sum().to_dicts()[0]
    exits = books["emitted"] + books["duplicate"] + books["late"] + books["filtered"]
    assert books["read"] == exits >= len(rows)
    return out


# Against models, one event after the other in plain Python.


def exact_repeat(at, kept_at, within, _rotate):
    return abs(at - kept_at) <= within


def generation_repeat(at, kept_at, within, rotate):
    return (at - within) // rotate <= kept_at // rotate <= (at + within) // rotate


def model(rows, repeats, *, partitions, within, rotate, delay, lateness):
    seen = defaultdict(lambda: float("-inf"))
    kept = defaultdict(list)
    out, late = [], 0
    for row in rows:
        at = (row.at - START).total_seconds()
        partition = partition_of(row.device.encode(), partitions)
        if at < seen[partition] - delay - lateness:
            late += 1
        elif row.id is None:
            out.append(row.n)
        elif not any(repeats(at, kept_at, within, rotate) for kept_at in kept[row.id]):
            kept[row.id].append(at)
            out.append(row.n)
        seen[partition] = max(seen[partition], at)
    return sorted(out), late


# Few ids and long lists, so that most events have something to repeat.
names = st.sampled_from(["a", "a", "a", "b", "b", "c", None])
draws = st.lists(
    st.tuples(st.integers(-60, 200), names, st.integers(0, 9)), min_size=15, max_size=60
)


def drawn_events(drawn):
    rows = []
    for number, (at, name, device) in enumerate(drawn):
        rows.append(event(at, name, number, device=name or f"device-{device}"))
    return rows


given_events = given(
    drawn=draws,
    within=st.sampled_from([0, 5, 20, 60, 1000]),
    delay=st.sampled_from([0, 50, 300]),
    lateness=st.sampled_from([0, 7, 100]),
    partitions=st.sampled_from([1, 4, 7]),
    batches=st.integers(1, 8),
    seed=st.integers(0, 99),
)


@settings(deadline=None, max_examples=some(70))
@given_events
def test_answers_are_the_models_whatever_the_batches_and_partitions(
    drawn, within, delay, lateness, partitions, batches, seed
):
    rows = drawn_events(drawn)
    times = {"delay": delay, "lateness": lateness}
    expected, late = model(
        rows, exact_repeat, partitions=partitions, within=within, rotate=None, **times
    )
    app, _ = app_with(within=timedelta(seconds=within), **times)
    out = run(app, rows, partitions=partitions, batches=batches, seed=seed)
    assert out["out"]["n"].to_list() == expected
    assert out.late == late


@settings(deadline=None, max_examples=some(40))
@given_events
@pytest.mark.parametrize(
    "exact_check",
    [pytest.param(False, marks=not_when_cut("filters go by hashes alone")), True],
)
def test_filters_without_false_positives_give_the_models_answer(
    exact_check, drawn, within, delay, lateness, partitions, batches, seed
):
    rows = drawn_events(drawn)
    within = max(within, 5)
    times = {"delay": delay, "lateness": lateness}
    rotate = max(5, within // 3)
    expected, late = model(
        rows,
        exact_repeat if exact_check else generation_repeat,
        partitions=partitions,
        within=within,
        rotate=rotate,
        **times,
    )
    filters = bloom(fpr=1e-12, rotate=timedelta(seconds=rotate), expect=8, exact_check=exact_check)
    app, _ = app_with(within=timedelta(seconds=within), bloom=filters, **times)
    out = run(app, rows, partitions=partitions, batches=batches, seed=seed)
    assert out["out"]["n"].to_list() == expected
    assert out.late == late


@settings(deadline=None, max_examples=some(40))
@given_events
def test_no_repeat_inside_the_horizon_passes_a_filter_however_full(
    drawn, within, delay, lateness, partitions, batches, seed
):
    rows = drawn_events(drawn)
    within = max(within, 5)
    filters = bloom(fpr=0.5, rotate=timedelta(seconds=max(5, within // 3)), expect=1)
    app, _ = app_with(
        within=timedelta(seconds=within), bloom=filters, delay=delay, lateness=lateness
    )
    out = run(app, rows, partitions=partitions, batches=batches, seed=seed)
    kept = defaultdict(list)
    for number in out["out"]["n"].to_list():
        kept[rows[number].id].append((rows[number].at - START).total_seconds())
    kept.pop(None, None)
    for times in kept.values():
        times.sort()
        assert all(b - a > within for a, b in pairwise(times))


@settings(deadline=None, max_examples=some(30))
@given(
    st.permutations(range(12)),
    st.sampled_from([0, 5, 20, 60]),
    st.sampled_from([0, 30]),
    st.integers(1, 8),
    st.integers(0, 99),
)
def test_exact_and_checked_agree_when_filters_are_as_good_as_useless(
    order, within, delay, batches, seed
):
    rows = [event(at * 7, "abc"[at % 3], n) for n, at in enumerate(order)]
    within = timedelta(seconds=max(within, 5))
    useless = bloom(fpr=0.5, rotate=within, expect=1, exact_check=True)
    answers = [
        run(
            app_with(within=within, delay=delay, bloom=filters)[0], rows, batches=batches, seed=seed
        )
        for filters in (None, useless)
    ]
    assert answers[0]["out"].equals(answers[1]["out"])


# What comes after, and beside.


@pytest.mark.parametrize("batches", [1, 2, 5])
@pytest.mark.parametrize("partitions", [1, 4])
def test_a_window_after_it_judges_events_as_if_they_came_from_the_source(batches, partitions):
    arrivals = [(0, "a"), (4, "a"), (31, "b"), (9, "c"), (3, "d"), (33, "b"), (70, "z"), (71, "z")]
    rows = [event(at, name, n) for n, (at, name) in enumerate(arrivals)]
    app = App("windows", log="unused")
    stream = app.topic("events", Event, key="device").stream(
        time="at", watermark=watermark("0 seconds", idle=None), lateness="25 seconds"
    )
    stream.dedup("id", within="10 seconds").window(tumbling("10 seconds"), by="device").emit(
        "update"
    ).agg(rows=count()).view("counts")
    out = testing.run(app, {"events": rows}, batches=batches, partitions=partitions, seed=batches)
    starts = (out["counts"]["window_start"] - START).dt.total_seconds().to_list()
    # c comes when its own partition has passed its window, and within the lateness.
    assert dict(zip(starts, out["counts"]["rows"], strict=True)) == {0: 2, 30: 1, 70: 1}
    assert out.late == 1  # d, 3 seconds below what lateness lets in


def test_a_second_dedup_may_follow_the_first():
    app, kept = app_with(within="10 seconds")
    kept.dedup("device", within="1 minute").view("devices", key="n")
    rows = [event(at, name, n) for n, (at, name) in enumerate([(0, "a"), (1, "b"), (70, "c")])]
    for batches in (1, 3):
        out = testing.run(app, {"events": rows}, batches=batches, partitions=1)
        assert out["out"]["n"].to_list() == [0, 1, 2]
        assert out["devices"]["n"].to_list() == [0, 2]


@pytest.mark.parametrize("batches", [1, 2, 4, 5])
def test_late_rows_come_out_at_the_side_with_their_reason(batches):
    app, kept = app_with(within="1 minute", late="side", lateness=5)
    columns = {**kept.columns, "late_by": pl.Duration("us"), "late_reason": pl.String()}
    Stream(
        app, LateNode(kept.node), StreamShape(columns, is_late=True, names=kept.shape.names)
    ).view("late", key="n")
    rows = [
        event(at, name, n) for n, (at, name) in enumerate(zip((0, 30, 3, 25), "azab", strict=True))
    ]
    out = run(app, rows, batches=batches, partitions=1, seed=batches)
    assert out["out"]["n"].to_list() == [0, 1, 3]
    assert out["late"].select("n", "id", "late_by", "late_reason").rows() == [
        (2, "a", timedelta(seconds=22), "below_watermark")
    ]
    assert out.late == 1


def test_ids_of_every_plain_type_can_be_deduplicated():
    for dtype in (
        pl.Int64,
        pl.Float64,
        pl.Boolean,
        pl.String,
        pl.Datetime("us"),
        pl.Decimal(38, 9),
    ):
        app = App("types", log="unused")
        topic = app.topic("events", Event, key="device")
        stream = topic.stream(time="at").with_columns(key=(pl.col("n") % 2).cast(dtype))
        stream.dedup("key", within="1 hour").view("out", key="n")
        rows = [event(0, "a", n) for n in range(4)]
        assert testing.run(app, {"events": rows}, batches=2)["out"]["n"].to_list() == [0, 1]


@pytest.mark.not_in_lane(
    "thresholds", "so few ids do not reach a filter there, and runs of two make it slow"
)
@pytest.mark.long
@pytest.mark.not_in_lane("one_bit_hashes", "filters go by hashes alone")
@pytest.mark.not_in_lane("two_bit_hashes", "filters go by hashes alone")
def test_g6_of_a_million_ids_few_are_lost_and_no_repeat_passes():
    app = App("g6", log="unused")
    stream = app.topic("events", Event, key="device").stream(
        time=pl.from_epoch("n", time_unit="ms"), watermark=watermark("0 seconds", idle=None)
    )
    filters = bloom(fpr=1e-3, rotate="15 minutes", expect=1_000_000)
    through = stream.dedup("id", within="1 hour", bloom=filters, name="filters")
    again = through.dedup("id", within="1 hour", name="exact behind them")
    again.window(tumbling("1 hour"), by="device").emit("update").agg(rows=count()).view("counts")
    value = '{"at":"2026-01-01T00:00:00Z","device":"d","n":%d,"id":"%d"}'
    rows = [(value % (number * 36 // 10, number)).encode() for number in range(1_000_000)]
    repeats = range(0, 1_000_000, 50)
    rows += [(value % (3_600_000, number)).encode() for number in repeats]
    out = testing.run(app, {"events": rows}, batches=6, partitions=4)
    books = {line["step"]: line for line in out.ledger.group_by("step").sum().to_dicts()}
    first, second = books["filters"], books["exact behind them"]
    assert first["read"] == len(rows) == first["emitted"] + first["duplicate"]
    assert 0 < first["duplicate"] - len(repeats) <= 1000 + 4 * 1000**0.5
    assert second["duplicate"] == 0
    assert second["emitted"] == first["emitted"] == out["counts"]["rows"].sum()


# Mistakes show where they are made.


def refused(match):
    return pytest.raises(ConfigError, match=match)


def test_what_cannot_be_deduplicated_is_refused_where_it_is_declared():
    app = App("declared", log="unused")
    stream = app.topic("events", Event, key="device").stream(time="at")
    with refused(r"'ids'.*Did you mean 'id'"):
        stream.dedup("ids", within="1 hour")
    with refused("names no column"):
        stream.dedup([], within="1 hour")
    with refused("dedup's within is 'soon'"):
        stream.dedup("id", within="soon")
    with refused('null is \'keep\'. Choose "pass" or "drop"'):
        stream.dedup("id", within="1 hour", null="keep")
    with refused('late is \'correct\'. Choose "drop" or "side"'):
        stream.dedup("id", within="1 hour", late="correct")
    hourly = stream.window(tumbling("1 hour"), by="device").emit("discard").agg(n=count())
    with refused('comes after emit."discard".*Deduplicate the events before the window'):
        hourly.dedup("n", within="1 hour")
    with refused("a column 'late_by'.*Rename it"):
        stream.with_columns(late_by=pl.col("n")).dedup("id", within="1 hour", late="side")


def test_filters_that_make_no_sense_are_refused_where_they_are_declared():
    app = App("declared", log="unused")
    stream = app.topic("events", Event, key="device").stream(time="at")
    for wrong in (0, 1, -1e-3, "1e-4"):
        with refused("bloom's fpr is"):
            bloom(fpr=wrong, rotate="1 hour", expect=10)
    for wrong in (0, 1.5):
        with refused("bloom's expect is"):
            bloom(fpr=0.1, rotate="1 hour", expect=wrong)
    with refused("bloom's rotate is 'often'"):
        bloom(fpr=0.1, rotate="often", expect=10)
    with refused("rotate is 2 hours, and dedup's within is 1 hour"):
        stream.dedup("id", within="1 hour", bloom=bloom(fpr=0.1, rotate="2 hours", expect=10))
    with refused("makes 3601 generations; at most 256"):
        stream.dedup("id", within="1 hour", bloom=bloom(fpr=0.1, rotate="1 second", expect=10))
    with refused("Make one with ms.bloom"):
        stream.dedup("id", within="1 hour", bloom=0.01)


def test_after_final_windows_an_alert_comes_once(rows_given):
    """Keys whose sum stayed below 2 in three windows running are told of, once a day."""
    app = App("alerts", log="unused")
    stream = app.topic("events", Event, key="device").stream(
        time="at", watermark=watermark("0 seconds", idle=None)
    )
    by_minute = stream.window(tumbling("1 minute"), by="device").agg(total=sum_of("n"))
    low = by_minute.with_columns(low=pl.col("total") < 2)
    runs = low.window(count_window(3, slide=1, unbounded=True), by="device").agg(low=min_of("low"))
    runs.filter("low").dedup("device", within="1 day").view("stopped", key="device")
    start = datetime(2026, 1, 1, tzinfo=UTC)
    totals = {
        "a": [1, 1, 5, 1, 1, 1, 1, 1],
        "b": [1, 1, 2, 1, 1, 2, 1, 1],
        "c": [0, 1, 0, 1, 0, 1, 0, 1],
    }
    rows = [
        Event(start + timedelta(minutes=minute), key, totals[key][minute])
        for minute in range(8)
        for key in "abc"
    ]
    rows.append(Event(start + timedelta(hours=1), "end", 9))
    for seed in range(8):
        run = rows_given(app, {"events": rows}, batches=1 + seed, partitions=1, seed=seed)
        stopped = run.rows["stopped"]
        assert stopped.height == 2
        ends = dict(stopped.select("device", "window_end").iter_rows())
        minutes = {key: (end - start) // timedelta(minutes=1) for key, end in ends.items()}
        assert minutes == {"a": 6, "c": 3}


def test_ids_that_are_kept_exactly_for_longer_than_a_month_are_told_what_they_cost():
    stream = App("a", log="unused").topic("t", {"id": str}).stream()
    with refused("24 bytes each: of 100 new ids a second that is 757 GB of state"):
        stream.dedup("id", within="3652 days")
    with refused("24 bytes each"):
        filters = bloom(fpr=1e-3, rotate="16 days", expect=10**6, exact_check=True)
        stream.dedup("id", within="32 days", bloom=filters)
    stream.dedup("id", within="31 days")
    stream.dedup("id", within="3652 days", unbounded=True)
    stream.dedup("id", within="32 days", bloom=bloom(fpr=1e-3, rotate="16 days", expect=10**6))
