"""Where batches end: everything is read once, fairly, and a batch is a function of its offsets."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.engine.source.alignment import Paces
from millstream.engine.source.offsets import (
    LogSnapshot,
    SourceOffset,
    check_declared,
    divide,
    planned_offset,
    with_declared,
)
from millstream.engine.source.offsets import next_offset as next_offset_of
from millstream.errors import ConfigError
from millstream.kernels.plan import SourcePlan
from millstream.kernels.time.watermarks import PartitionProgress, WatermarkRule

IDLE_MS = 1000


def next_offset(start, ends, sources, *, clock_ms, rows_max, **options):
    """Plan with a clock and the ends of the log, and nothing else to go by."""
    seen, paces = options.pop("event_times", {}), options.pop("paces", {})
    look = LogSnapshot(clock_ms, options.pop("wall_ms", 0), ends, seen, paces)
    return next_offset_of(start, look, sources, rows_max=rows_max, **options)


def source(name="s", topic="t", idle_ms=IDLE_MS, **rule):
    rule = WatermarkRule(0, idle_ms, **rule)
    return SourcePlan(0, name, topic, (), None, rule, (), ())


def at(*offsets, clock_ms=0, active_ms=0):
    progress = tuple(PartitionProgress(offset, active_ms) for offset in offsets)
    return SourceOffset(clock_ms, {"t": progress}, {})


@pytest.mark.parametrize("producers_max", [None, 3])
def test_another_idle_time_matters_where_producers_are_told_apart(producers_max):
    def plan(idle_ms):
        told_apart = source(idle_ms=idle_ms, producers_max=producers_max)
        return SimpleNamespace(sources=[told_apart], program=SimpleNamespace(given={}))

    kept = with_declared(replace(at(3), idle={"s": frozenset()}).to_json(), plan(10))
    check_declared(kept, plan(10))
    if producers_max is None:
        check_declared(kept, plan(20))
    else:
        with pytest.raises(ConfigError, match="another name, topic, idle or"):
            check_declared(kept, plan(20))


def test_with_nothing_new_the_offset_stays_and_no_batch_is_made():
    start = at(3, 4)
    assert next_offset(start, {"t": [3, 4]}, [source()], clock_ms=500, rows_max=10) is start


def test_a_batch_takes_what_there_is_up_to_its_limit_in_proportion():
    start = at(0, 0, 0)
    ends = {"t": [100, 300, 0]}
    assert next_offset(start, ends, [source()], clock_ms=5, rows_max=400).offsets("t") == [
        100,
        300,
        0,
    ]
    assert next_offset(start, ends, [source()], clock_ms=5, rows_max=40).offsets("t") == [10, 30, 0]


def test_what_rows_are_looked_up_in_is_read_before_them():
    start = SourceOffset(
        0, {"t": (PartitionProgress(0, 0),), "rates": (PartitionProgress(0, 0),) * 2}, {}
    )
    sources = [source(), replace(source("rates", "rates"), number=1, looked_up=1)]
    ends = {"t": [50], "rates": [30, 10]}
    first = next_offset(start, ends, sources, clock_ms=5, rows_max=20)
    assert (first.offsets("rates"), first.offsets("t")) == ([15, 5], [0])
    second = next_offset(first, ends, sources, clock_ms=6, rows_max=25)
    assert (second.offsets("rates"), second.offsets("t")) == ([30, 10], [5])


def test_a_table_is_read_before_the_rows_that_are_the_table_of_the_next_look_up():
    topics = ("t", "rates", "places")
    at = SourceOffset(0, {topic: (PartitionProgress(0, 0),) for topic in topics}, {})
    sources = [
        replace(source(topic, topic), number=number, looked_up=number)
        for number, topic in enumerate(topics)
    ]
    ends = {"t": [10], "rates": [10], "places": [10]}
    read = []
    for _ in range(4):
        at = next_offset(at, ends, sources, clock_ms=5, rows_max=8)
        read.append(tuple(at.offsets(topic)[0] for topic in topics))
    assert read == [(0, 0, 8), (0, 6, 10), (4, 10, 10), (10, 10, 10)]


def test_a_partition_that_becomes_idle_makes_a_batch_without_records():
    start = at(3, 4, active_ms=100)
    ends = {"t": [3, 4]}
    quiet = next_offset(start, ends, [source()], clock_ms=1099, rows_max=10)
    assert quiet is start
    idle = next_offset(start, ends, [source()], clock_ms=1100, rows_max=10)
    assert idle.idle == {"s": frozenset({0, 1})}
    assert next_offset(idle, ends, [source()], clock_ms=9999, rows_max=10) is idle


def test_a_partition_with_unread_records_is_not_idle():
    start = at(0, 0)
    later = next_offset(start, {"t": [1000, 0]}, [source()], clock_ms=5000, rows_max=10)
    assert later.idle == {"s": frozenset({1})}


def test_a_partition_that_is_added_is_read_from_its_beginning():
    grown = next_offset(at(5), {"t": [5, 7]}, [source()], clock_ms=1, rows_max=100)
    assert grown.offsets("t") == [5, 7]


def test_an_offset_survives_sparks_log():
    start = next_offset(at(1, 2), {"t": [9, 2]}, [source()], clock_ms=2000, rows_max=99)
    assert SourceOffset.from_json(start.to_json()) == start


counts = st.lists(st.integers(0, 5000), min_size=1, max_size=9)


@settings(deadline=None)
@given(counts, st.integers(1, 2000))
def test_repeated_batches_read_everything_and_never_too_much(ends, rows_max):
    position = at(*([0] * len(ends)))
    for _ in range(20_000):
        following = next_offset(
            position, {"t": ends}, [source(idle_ms=None)], clock_ms=0, rows_max=rows_max
        )
        if following is position:
            break
        taken = sum(following.offsets("t")) - sum(position.offsets("t"))
        assert 0 < taken < rows_max + len(ends)
        position = following
    assert position.offsets("t") == ends


@given(counts, counts, st.integers(1, 5), st.integers(0, 3000))
def test_tasks_cover_a_batch_exactly_once(starts, more, tasks, rows_min):
    size = min(len(starts), len(more))
    before = at(*starts[:size])
    after = at(*(s + m for s, m in zip(starts, more, strict=False)))
    divided = divide(before, after, [source(), source("other")], tasks=tasks, rows_min=rows_min)
    assert 1 <= len(divided) <= tasks
    for index in (0, 1):
        for partition in range(size):
            splits = [
                s for task in divided for s in task if (s.source, s.partition) == (index, partition)
            ]
            assert [s.number for s in splits] == list(range(len(splits)))
            covered = [offset for s in splits for offset in range(s.start, s.end)]
            assert covered == list(range(starts[partition], starts[partition] + more[partition]))


def test_what_is_left_unread_is_noted_with_the_batch():
    start = at(0, 0)
    planned = next_offset(start, {"t": [1000, 1]}, [source()], clock_ms=5, rows_max=10)
    assert planned.behind == {"t": {0}}
    assert planned.time_of(source()).behind == {0}
    rest = next_offset(planned, {"t": [1000, 1]}, [source()], clock_ms=6, rows_max=1000)
    assert rest.behind == {"t": frozenset()}


def test_time_alone_makes_a_batch_where_something_may_wait_for_it():
    start = at(3, clock_ms=100)
    ends = {"t": [3]}
    ask = {"rows_max": 10, "heartbeat_ms": 1000, "wall_ms": 7}
    assert next_offset(start, ends, [source(idle_ms=None)], clock_ms=1099, **ask) is start
    beat = next_offset(start, ends, [source(idle_ms=None)], clock_ms=1100, **ask)
    assert (beat.clock_ms, beat.wall_ms, beat.offsets("t")) == (1100, 7, [3])


def test_a_sources_own_heartbeat_ends_when_all_of_it_is_idle():
    followed = source(idle_ms=20_000, producers_max=5)
    start = at(3, clock_ms=0)
    ends = {"t": [3]}
    beat = next_offset(start, ends, [followed], clock_ms=2_000, rows_max=10)
    assert beat is not start
    assert next_offset(start, ends, [followed], clock_ms=2_000, rows_max=10, beats=False) is start
    idle = next_offset(beat, ends, [followed], clock_ms=20_000, rows_max=10)
    assert idle.idle == {"s": {0}}
    assert next_offset(idle, ends, [followed], clock_ms=90_000, rows_max=10) is idle
    asked = next_offset(idle, ends, [followed], clock_ms=90_000, rows_max=10, heartbeat_ms=50)
    assert asked is not idle


def test_a_source_that_goes_on_by_itself_is_told_how_long_it_has_been_quiet():
    followed = source(idle_advance=True)
    ends = {"t": [3, 4]}
    start = at(3, 4, clock_ms=100, active_ms=100)
    idle = next_offset(start, ends, [followed], clock_ms=1200, rows_max=10)
    assert idle.time_of(followed).quiet_ms == 1100
    assert next_offset(idle, ends, [followed], clock_ms=2199, rows_max=10) is idle
    beat = next_offset(idle, ends, [followed], clock_ms=2200, rows_max=10)
    assert beat.time_of(followed).quiet_ms == 2100
    assert next_offset(idle, ends, [followed], clock_ms=9999, rows_max=10, beats=False) is idle
    more = next_offset(beat, {"t": [3, 5]}, [followed], clock_ms=2300, rows_max=10)
    assert (more.idle, more.time_of(followed).quiet_ms) == ({"s": frozenset({0})}, 0)
    assert SourceOffset.from_json(beat.to_json()).time_of(followed) == beat.time_of(followed)


def test_the_wall_clock_of_a_batch_never_goes_back():
    start = SourceOffset(0, at(3).topics, {}, {}, wall_ms=50)
    later = next_offset(start, {"t": [9]}, [source()], clock_ms=1, rows_max=10, wall_ms=20)
    assert later.wall_ms == 50
    over_arrivals = source(settle_us=0)
    assert later.time_of(over_arrivals).wall_us == 50_000
    assert later.time_of(source()).wall_us == 50_000


def test_partitions_that_are_apart_are_read_to_one_time_while_there_is_a_backlog():
    aligned = source(align_us=100)
    ends = {"t": [10_000, 10_000, 10_000, 500]}
    start = at(0, 0, 0, 500)
    seen = {"t": {0: 1_000, 1: 1_050, 2: 1_101, 3: 5}}  # 3 is read to its end: it holds nobody up
    paces = {("t", 0): 8.0, ("t", 1): 4.0, ("t", 2): 2.0}
    ask = {"clock_ms": 1, "rows_max": 1000, "event_times": seen, "paces": paces}
    trickle = 4
    # Up to 1_100 there are 100 * 8 of one and 50 * 4 of another: what is left of the batch goes by
    # that, and the one that is past it gets nothing but its trickle.
    read = next_offset(start, ends, [aligned], **ask).offsets("t")
    assert read == [792 + trickle, 198 + trickle, trickle, 500]
    in_proportion = [334, 334, 334, 500]
    assert next_offset(start, ends, [source()], **ask).offsets("t") == in_proportion
    near = {**ask, "event_times": {"t": {0: 1_000, 1: 1_050, 2: 1_100, 3: 5}}}
    assert next_offset(start, ends, [aligned], **near).offsets("t") == in_proportion
    unknown = {**ask, "paces": {("t", 0): 8.0}}
    assert next_offset(start, ends, [aligned], **unknown).offsets("t") == in_proportion
    everything = {**ask, "rows_max": 30_000}
    assert next_offset(start, ends, [aligned], **everything).offsets("t") == ends["t"]


@pytest.mark.parametrize("rows_max", [1, 2, 5, 100])
def test_a_partition_is_slowed_and_never_stopped(rows_max):
    aligned = source(align_us=0)
    ends, seen = {"t": [300, 300]}, {"t": {0: 0, 1: 10**15}}
    position, paces = at(0, 0), {("t", 0): 1e9, ("t", 1): 1e-9}
    ask = {"clock_ms": 1, "rows_max": rows_max, "event_times": seen, "paces": paces}
    for _ in range(600):
        before = position.offsets("t")
        position = next_offset(position, ends, [aligned], **ask)
        read = [now - then for now, then in zip(position.offsets("t"), before, strict=True)]
        assert sum(read) <= rows_max + 4
        assert all(read) or position.offsets("t")[read.index(0)] == 300
        if position.offsets("t") == ends["t"]:
            break
    assert position.offsets("t") == ends["t"]


def drift(times, align_us, rows_max):
    """Read two backlogs until one is at its end; how far apart in event time do they get?"""
    position, worst, seen, paces = at(0, 0), 0, {"t": {}}, Paces()
    ends = {"t": [len(times[0]), len(times[1])]}
    plan = source(idle_ms=None, align_us=align_us)
    while position.offsets("t") != ends["t"]:
        paces.update({"t": position.offsets("t")}, seen)
        ask = {"clock_ms": 0, "rows_max": rows_max, "event_times": seen, "paces": paces.known}
        position = next_offset(position, ends, [plan], **ask)
        read = position.offsets("t")
        seen = {"t": {p: times[p][read[p] - 1] for p in times}}
        if all(read[p] < ends["t"][p] for p in times):
            worst = max(worst, abs(seen["t"][0] - seen["t"][1]))
    return worst


def test_aligned_reading_keeps_an_hour_and_a_day_of_as_many_records_in_step():
    times = {0: range(0, 3_600, 1), 1: range(0, 86_400, 24)}
    assert drift(times, None, 100) > 80_000
    assert drift(times, 600, 100) < 600 + 100 * 24  # what is allowed, and what one batch may add


def test_partitions_that_go_alike_stay_in_step_when_a_batch_is_far_longer_than_what_is_allowed():
    year = 365 * 86_400
    times = {0: range(0, year, 100), 1: range(50, year, 101)}
    batch = 50_000 * 50  # seconds of event time, when both partitions are read
    assert drift(times, 600, 50_000) < batch / 20


def test_over_processing_time_a_partition_is_not_cut():
    before, after = at(0, 0), at(1000, 10)
    arrivals = source(settle_us=0)
    tasks = divide(before, after, [arrivals], tasks=4, rows_min=0)
    assert [[(s.partition, s.start, s.end) for s in task] for task in tasks if task] == [
        [(0, 0, 1000)],
        [(1, 0, 10)],
    ]


def test_the_latest_arrivals_travel_with_the_offset():
    known = at(5, 6).with_arrival_times("t", [100, 50]).with_arrival_times("t", [70, 80])
    assert [progress.arrived_ms for progress in known.topics["t"]] == [100, 80]
    grown = next_offset(known, {"t": [9, 9]}, [source()], clock_ms=1, rows_max=100)
    assert SourceOffset.from_json(grown.to_json()).topics == grown.topics
    splits = divide(known, grown, [source(settle_us=0)], tasks=1, rows_min=0)[0]
    assert [split.arrived_ms for split in splits] == [100, 80]


def test_where_a_batch_was_planned_to_end_is_in_the_offset_log_of_spark(tmp_path):
    offsets = tmp_path / "offsets"
    offsets.mkdir()
    (offsets / "3").write_text(
        'v1\n{"batchWatermarkMs":0}\n{"clock_ms":1,"topics":{},"wall_ms":1500}'
    )
    assert planned_offset(tmp_path, 3) == {"clock_ms": 1, "topics": {}, "wall_ms": 1500}
    (offsets / "4").write_text("v1\n{}\n-")
    assert planned_offset(tmp_path, 4) is None
    assert planned_offset(tmp_path, 5) is None
