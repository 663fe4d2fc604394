"""Filters have every id that was added, and are wrong as often as they say."""

import math
from dataclasses import dataclass
from datetime import datetime

import numpy as np
import polars as pl
import pytest
from example_counts import some
from hypothesis import given, settings
from hypothesis import strategies as st
from truncated_hashes import not_when_cut

from millstream import App, bloom
from millstream.kernels.dedup.bloom import BloomShape, combined_rate
from millstream.kernels.dedup.bloom_generations import BloomGenerations, BloomRule
from millstream.kernels.dedup.bloom_loss import generation_count
from millstream.kernels.dedup.event_ids import EventIds
from millstream.kernels.dedup.operator import FALSE_POSITIVE_RATE, Dedup
from millstream.kernels.frames import ORDER, SPLIT, TIME, WATERMARK_SEEN
from millstream.kernels.operator import BatchContext
from millstream.kernels.routing import TaskLedger
from millstream.kernels.state.operator_state import OperatorState
from millstream.kernels.state.sorted_runs import MemoryRunStore
from millstream.kernels.time.watermarks import NO_WATERMARK
from millstream.views.commit.committer import collect_results

pytestmark = not_when_cut("filters go by hashes alone, and count how often they are wrong")

HOUR_US = 3_600_000_000
dice = np.random.default_rng(11)


def hashes(count):
    return dice.integers(0, 2**64, count, np.uint64)


def within_four_sigma(wrong, asked, rate):
    return abs(wrong - asked * rate) <= 4 * math.sqrt(asked * rate) + 1


@settings(deadline=None, max_examples=some(60))
@given(
    st.lists(st.integers(0, 2**64 - 1), max_size=200),
    st.lists(st.integers(0, 2**64 - 1), max_size=200),
    st.integers(1, 500),
    st.sampled_from([0.5, 0.1, 1e-3, 1e-9]),
)
def test_a_filter_has_what_was_added_and_what_it_had(first, second, sized_for, rate):
    shape = BloomShape.for_ids(sized_for, rate)
    first, second = np.array(first, np.uint64), np.array(second, np.uint64)
    before = shape.with_added(shape.empty(), first)
    after = shape.with_added(before, second)
    assert shape.contains(before, first).all()
    assert shape.contains(after, np.concatenate([first, second])).all()
    assert (before == shape.with_added(shape.empty(), first)).all()  # adding left it as it was
    assert not shape.contains(shape.empty(), second).any()


@pytest.mark.parametrize(("ids", "rate"), [(100_000, 0.5), (50_000, 0.05), (200_000, 1e-3)])
def test_a_full_filter_is_wrong_as_often_as_it_was_sized_for(ids, rate):
    shape = BloomShape.for_ids(ids, rate)
    assert shape.rate(ids) <= rate
    assert shape.rate(round(ids * 1.05)) > rate  # and no larger than it need be
    words = shape.with_added(shape.empty(), hashes(ids))
    wrong = int(shape.contains(words, hashes(500_000)).sum())
    assert within_four_sigma(wrong, 500_000, shape.rate(ids))


def test_the_rate_of_several_filters_is_that_of_any_being_wrong():
    one = BloomShape(10 * 1000 // 64 * 64, 7).rate(1000)
    assert combined_rate(one for _ in range(4)) == pytest.approx(0.0324, abs=0.0003)
    other = BloomShape(14 * 1000 // 64 * 64, 9).rate(1000)
    assert combined_rate(other for _ in range(7)) == pytest.approx(0.0085, abs=0.0002)
    assert combined_rate(iter(())) == 0


# Generations in state.


def events(ids, times):
    table = pl.DataFrame({"id": ids, TIME: np.broadcast_to(np.int64(times), len(ids))})
    return EventIds.of(table, ("id",))


def generations_of(rule, *, within_hours=4, lateness_hours=0):
    state = OperatorState(MemoryRunStore())
    held = BloomGenerations(rule, state, within_hours * HOUR_US, lateness_hours * HOUR_US)
    return state, held


def test_the_rate_that_is_reported_is_the_rate_that_is_measured():
    rule = BloomRule(HOUR_US, ids=4_000, rate=2e-3, exact_check=False)
    _, held = generations_of(rule)
    for hour in range(5):
        for start in range(0, 4_000, 500):
            ids = np.arange(start, start + 500) + hour * 4_000
            held.add(events(ids, hour * HOUR_US), NO_WATERMARK)
    stated = held.false_positive_rate()
    assert stated == pytest.approx(5 * 2e-3, rel=0.05)
    fresh = events(np.arange(10**7, 10**7 + 400_000), 4 * HOUR_US)
    assert within_four_sigma(int(held.repeats(fresh).sum()), 400_000, stated)


def test_when_more_ids_come_than_expected_filters_are_added_and_the_rate_rises():
    rule = BloomRule(HOUR_US, ids=10_000, rate=1e-2, exact_check=False)
    state, held = generations_of(rule)
    rates, expected = [], []
    for count in range(1, 5):
        held.add(events(np.arange(10_000) + count * 10_000, 0), NO_WATERMARK)
        rates.append(held.false_positive_rate())
        expected.append(1 - (1 - rule.shape.rate(10_000)) ** count)
    assert rates == pytest.approx(expected)
    assert [run.rows * 8 for run in state.runs("filters").slots[0]] == [rule.shape.size_bytes] * 4
    again = events(np.arange(10_000, 50_000), 0)
    assert held.repeats(again).all()


def test_a_batch_far_larger_than_a_filter_is_taken_in_whole():
    rule = BloomRule(HOUR_US, ids=100, rate=1e-2, exact_check=False)
    state, held = generations_of(rule)
    held.add(events(np.arange(1050), 0), NO_WATERMARK)
    assert [run.events for run in state.runs("filters").slots[0]] == [100] * 10 + [50]
    assert held.repeats(events(np.arange(1050), 0)).all()


def test_a_batch_writes_its_own_ids_and_not_the_filter_they_are_scattered_over():
    rule = BloomRule(HOUR_US, ids=1_000_000, rate=1e-6, exact_check=False)
    state, held = generations_of(rule)
    held.add(events(np.arange(5000), 0), NO_WATERMARK)
    assert state.size_bytes == 5000 * 8 < rule.shape.size_bytes / 50
    assert held.false_positive_rate() == 0


def test_a_generation_goes_when_no_event_in_time_asks_it_and_not_before():
    rule = BloomRule(HOUR_US, ids=100, rate=1e-2, exact_check=False)
    for count in (5, 100):  # recent ids, and a filter
        state, held = generations_of(rule, lateness_hours=2)
        held.add(events(np.arange(count), 0), NO_WATERMARK)
        held.add(EventIds.none(), 7 * HOUR_US - 1)
        oldest_in_time = events(np.arange(count), 5 * HOUR_US - 1)
        assert held.repeats(oldest_in_time).all()
        held.add(EventIds.none(), 7 * HOUR_US)
        assert state.size_bytes == 0
        held.add(events(np.arange(count), 0), 7 * HOUR_US)  # past when it comes
        assert state.size_bytes == 0


def test_generations_survive_their_manifest():
    rule = BloomRule(HOUR_US, ids=1000, rate=1e-2, exact_check=False)
    state, held = generations_of(rule)
    held.add(events(np.arange(1100), 0), NO_WATERMARK)
    held.add(events(np.arange(2000, 2010), 0), NO_WATERMARK)
    again = OperatorState.from_message(state.to_message(), state.store)
    back = BloomGenerations(rule, again, 4 * HOUR_US, 0)
    assert back.repeats(events(np.r_[0:1100, 2000:2010], 0)).all()
    assert back.false_positive_rate() == held.false_positive_rate() > 0


# The whole operator: the case G6, one million ids.


@pytest.mark.not_in_lane(
    "thresholds", "so few ids do not reach a filter there, and runs of two make it slow"
)
def test_g6_a_million_ids_lose_no_more_than_stated_and_let_no_repeat_pass():
    span = 3_700_000_000  # a little more than the horizon of an hour
    filters = bloom(fpr=1e-3, rotate="15 minutes", expect=1_000_000)
    rule = filters.rule(HOUR_US, 0, 1)
    assert generation_count(HOUR_US, 900_000_000) == 5
    kernel = Dedup(
        name="dedup",
        by=("id",),
        lateness_us=0,
        side_output=False,
        types=("Int64",),
        within_us=HOUR_US,
        bloom=rule,
    )
    state = OperatorState(MemoryRunStore())
    ids = np.arange(1_000_000)
    lost, stated, rates = 0, 0.0, []
    kept = np.zeros(len(ids), bool)
    for part in np.array_split(ids, 20):
        outcome = process(kernel, state, part, part * (span // len(ids)))
        lost += outcome.counts["duplicate"]
        kept[outcome.rows["id"].to_numpy()] = True
        stated += len(part) * outcome.gauges[FALSE_POSITIVE_RATE]
        rates.append(outcome.gauges[FALSE_POSITIVE_RATE])
    assert max(rates) <= 1e-3
    assert lost <= 1000 + 4 * math.sqrt(1000)
    assert lost <= stated + 4 * math.sqrt(stated)
    assert lost > 0  # so that there was something to count
    now_us = int(ids[-1]) * (span // len(ids))
    inside = ids[kept & (ids * (span // len(ids)) >= now_us - HOUR_US)]
    outcome = process(kernel, state, inside, np.full(len(inside), now_us))
    assert outcome.counts["emitted"] == 0


def process(kernel, state, ids, times):
    rows = pl.DataFrame(
        {
            "id": ids,
            TIME: times,
            SPLIT: np.zeros(len(ids), np.int64),
            ORDER: np.arange(len(ids)),
            WATERMARK_SEEN: np.full(len(ids), NO_WATERMARK),
        }
    )
    return kernel.process(
        state, {0: [rows]}, BatchContext(NO_WATERMARK, NO_WATERMARK, {0: NO_WATERMARK})
    )


def test_the_largest_rate_of_all_buckets_is_in_the_report_of_a_batch():
    frames = []
    for rate in (0.1, 0.3, 0.2):
        books = TaskLedger()
        books.gauges["dedup(id)"] = {FALSE_POSITIVE_RATE: rate}
        frames.append(books.report_row(0))
    plan = declared_plan()
    assert collect_results(plan, frames).gauges == {"dedup(id)": {FALSE_POSITIVE_RATE: 0.3}}


@dataclass
class Event:
    at: datetime
    id: int


def declared_plan():
    app = App("facts", log="unused")
    app.topic("events", Event).stream(time="at").dedup("id", within="1 hour").view("out", key="id")
    return app.plan()
