"""Deduplication against naive models: any disorder, batching, partitions, lateness and filters."""

from collections import defaultdict
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream import testing
from millstream.errors import ConfigError
from millstream.log.murmur2 import partition_of
from millstream.pipeline import App, Stream, bloom, count, tumbling, watermark
from millstream.pipeline.graph import LateNode

START = datetime(1970, 1, 1, tzinfo=UTC)
MINUTE = 60.0


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
    assert books["read"] == len(rows) == exits
    return out


def everywhere(rows, **options):
    """Run under 20 batchings, and 1, 4 and 7 partitions; give the one answer and its books."""
    answers = set()
    for partitions in (1, 4, 7):
        for seed in range(20):
            app, _ = app_with(**options)
            out = run(app, rows, batches=seed % 7 + 1, partitions=partitions, seed=seed)
            ledger = out.ledger
            answers.add(
                (tuple(out["out"]["n"].to_list()), out.late, int(ledger["duplicate"].sum()))
            )
    assert len(answers) == 1
    return answers.pop()


FILTERS = [
    None,
    bloom(fpr=1e-9, rotate="1 minute", expect=1000),
    bloom(fpr=1e-9, rotate="1 minute", expect=1000, exact_check=True),
]
stores = pytest.mark.parametrize("filters", FILTERS, ids=["exact", "bloom", "checked"])


def minutes(*arrivals):
    return [event(at * MINUTE, name, number) for number, (name, at) in enumerate(arrivals)]


# The cases G and D1, through the public surface.


@stores
def test_g1_an_id_passes_again_beyond_the_horizon_wherever_a_batch_ends(filters):
    for rows in (
        minutes(("a", 0), ("a", 30)),
        minutes(("a", 0), ("z", 30), ("a", 30)),
    ):
        kept, late, duplicates = everywhere(rows, within="10 minutes", bloom=filters)
        assert (kept, late, duplicates) == (tuple(range(len(rows))), 0, 0)


def test_g2_the_horizon_is_inclusive_to_the_microsecond():
    rows = minutes(("a", 0), ("a", 10))
    assert everywhere(rows, within="10 minutes") == ((0,), 0, 1)
    rows[1] = replace(rows[1], at=rows[1].at + timedelta(microseconds=1))
    assert everywhere(rows, within="10 minutes") == ((0, 1), 0, 0)


@stores
def test_g3_a_late_repeat_is_late_and_never_a_second_emission(filters):
    rows = minutes(("a", 0), ("z", 21), ("a", 2))
    assert everywhere(rows, within="10 minutes", bloom=filters) == ((0, 1), 1, 0)


@stores
def test_g4_events_without_an_id_are_like_no_other(filters):
    rows = minutes((None, 0), (None, 0), ("a", 0), (None, 1), ("a", 1))
    assert everywhere(rows, within="10 minutes", bloom=filters) == ((0, 1, 2, 3), 0, 1)
    only_ids = everywhere(rows, within="10 minutes", null="drop", bloom=filters)
    assert only_ids == ((2,), 0, 1)


@stores
def test_g5_of_repeats_in_one_batch_the_first_in_the_log_stays(filters):
    rows = [event(0, "a", number) for number in (7, 3, 9)]
    assert everywhere(rows, within="10 minutes", bloom=filters) == ((7,), 0, 2)


@stores
def test_d1_an_event_at_the_watermark_is_in_time_and_one_below_it_is_late(filters):
    rows = minutes(("a", 10), ("b", 10), ("c", 10), ("d", 9), ("e", 11))
    assert everywhere(rows, within="5 minutes", bloom=filters) == ((0, 1, 2, 4), 1, 0)


def test_a_chain_is_judged_by_what_was_kept_and_not_by_what_was_dropped():
    rows = minutes(("a", 0), ("a", 8), ("a", 16), ("a", 24), ("a", 32))
    assert everywhere(rows, within="10 minutes") == ((0, 2, 4), 0, 2)


def test_a_repeat_may_be_earlier_than_what_was_kept():
    rows = minutes(("a", 20), ("a", 12), ("a", 9))
    assert everywhere(rows, within="10 minutes", delay=3600) == ((0, 2), 0, 1)


def test_lateness_lets_events_in_and_holds_ids_for_longer():
    rows = minutes(("a", 0), ("z", 40), ("a", 11), ("a", 10), ("a", 9))
    assert everywhere(rows, within="10 minutes", lateness=30 * 60) == ((0, 1), 2, 1)
    assert everywhere(rows, within="10 minutes", lateness=40 * 60) == ((0, 1, 2), 0, 2)


def test_an_id_of_several_columns_is_the_same_when_all_are_and_none_when_one_is_missing():
    parts = [("a", 1), ("a", 2), ("a", 1), ("a", None), ("a", None), (None, 1)]
    rows = [event(0, one, n, part=two) for n, (one, two) in enumerate(parts)]
    answer = everywhere(rows, ids=["id", "part"], within="1 minute")
    assert answer == ((0, 1, 3, 4, 5), 0, 1)


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


draws = st.lists(
    st.tuples(st.integers(-60, 400), st.sampled_from("abcdef") | st.none(), st.integers(0, 9)),
    max_size=70,
)


def drawn_events(drawn):
    rows = []
    for number, (at, name, device) in enumerate(drawn):
        rows.append(event(at, name, number, device=name or f"device-{device}"))
    return rows


given_events = given(
    drawn=draws,
    within=st.sampled_from([0, 5, 20, 60, 1000]),
    delay=st.sampled_from([0, 20, 300]),
    lateness=st.sampled_from([0, 7, 100]),
    partitions=st.sampled_from([1, 4, 7]),
    batches=st.integers(1, 8),
    seed=st.integers(0, 99),
)


@settings(deadline=None, max_examples=150)
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


@settings(deadline=None, max_examples=80)
@given_events
@pytest.mark.parametrize("exact_check", [False, True])
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
    filters = bloom(
        fpr=1e-12, rotate=timedelta(seconds=rotate), expect=8, exact_check=exact_check
    )
    app, _ = app_with(within=timedelta(seconds=within), bloom=filters, **times)
    out = run(app, rows, partitions=partitions, batches=batches, seed=seed)
    assert out["out"]["n"].to_list() == expected
    assert out.late == late


@settings(deadline=None, max_examples=80)
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
        assert all(b - a > within for a, b in zip(times, times[1:], strict=False))


@settings(deadline=None, max_examples=60)
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
        run(app_with(within=within, delay=delay, bloom=filters)[0], rows, batches=batches, seed=seed)
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
    out = testing.run(
        app, {"events": rows}, batches=batches, partitions=partitions, seed=batches
    )
    starts = (out["counts"]["window_start"] - START).dt.total_seconds().to_list()
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
    Stream(app, LateNode(kept.node), columns).view("late", key="n")
    rows = [event(at, name, n) for n, (at, name) in enumerate(zip((0, 30, 3, 25), "azab", strict=True))]
    out = run(app, rows, batches=batches, partitions=1, seed=batches)
    assert out["out"]["n"].to_list() == [0, 1, 3]
    assert out["late"].select("n", "id", "late_by", "late_reason").rows() == [
        (2, "a", timedelta(seconds=22), "below_watermark")
    ]
    assert out.late == 1


def test_ids_of_every_plain_type_can_be_deduplicated():
    for dtype in (pl.Int64, pl.Float64, pl.Boolean, pl.String, pl.Datetime("us"), pl.Decimal(38, 9)):
        app = App("types", log="unused")
        topic = app.topic("events", Event, key="device")
        stream = topic.stream(time="at").with_columns(key=(pl.col("n") % 2).cast(dtype))
        stream.dedup("key", within="1 hour").view("out", key="n")
        rows = [event(0, "a", n) for n in range(4)]
        assert testing.run(app, {"events": rows}, batches=2)["out"]["n"].to_list() == [0, 1]


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
    with refused("before the first window"):
        stream.window(tumbling("1 hour"), by="device").agg(n=count()).dedup("n", within="1 hour")
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
