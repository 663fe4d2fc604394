"""Watermarks: per partition, the minimum over the active, never back."""

from millstream.kernels.time.log_order import split_number
from millstream.kernels.time.producers import HistoryInterval, ProducerHistory, Producers
from millstream.kernels.time.watermarks import (
    NO_WATERMARK,
    InputClock,
    PartitionProgress,
    SourceTime,
    SplitTime,
    WatermarkRule,
    idle_partitions,
)

RULE = WatermarkRule(delay_us=0, idle_ms=None)


def saw(*reached, idle=(), count=2, behind=(), clock_ms=0, wall_us=None):
    lanes = tuple(SplitTime(partition, split, us) for partition, split, us in reached)
    return SourceTime(lanes, count, frozenset(idle), clock_ms, frozenset(behind), wall_us)


def after(*batches, rule=RULE):
    clock = InputClock.initial()
    for seen in batches:
        clock, _ = clock.advanced(seen, rule, 0)
    return clock


def test_the_watermark_is_the_minimum_over_the_partitions():
    assert after(saw((0, 0, 100), (1, 0, 10))).watermark_us == 10


def test_a_partition_that_has_shown_nothing_holds_the_watermark():
    assert after(saw((0, 0, 100))).watermark_us == NO_WATERMARK


def test_an_idle_partition_is_left_out_and_finds_the_watermark_when_it_returns():
    clock = after(saw((0, 0, 100), (1, 0, 10)), saw(idle=[1]))
    assert clock.watermark_us == 100
    clock, split_watermarks_us = clock.advanced(saw((1, 0, 50)), RULE, 0)
    assert split_watermarks_us[split_number(0, 1, 0)] == 100  # so 50 is late, by 50
    assert clock.watermark_us == 100
    clock, _ = clock.advanced(saw((1, 0, 120), (0, 0, 105)), RULE, 0)
    assert clock.watermark_us == 105


def test_when_all_partitions_are_idle_the_watermark_holds():
    assert after(saw((0, 0, 100), (1, 0, 90)), saw(idle=[0, 1])).watermark_us == 90


def test_a_second_split_is_held_to_what_the_first_had_seen():
    clock = after(saw((0, 0, 95), count=1))
    _, split_watermarks_us = clock.advanced(saw((0, 0, 195), (0, 1, 295), count=1), RULE, 0)
    assert split_watermarks_us == {split_number(0, 0, 0): 95, split_number(0, 0, 1): 195}


def test_a_partition_read_to_its_end_reaches_the_wall_clock_less_what_settles():
    rule = WatermarkRule(delay_us=0, idle_ms=None, settle_us=5)
    assert after(saw((0, 0, 10), (1, 0, 20), wall_us=100), rule=rule).watermark_us == 95
    lagging = saw((0, 0, 10), (1, 0, 20), behind=[1], wall_us=100)
    assert after(lagging, rule=rule).watermark_us == 20


def test_messages_of_several_tasks_merge_in_any_order():
    one, other = saw((0, 1, 7)).to_message(), saw((1, 0, None), (0, 0, 9)).to_message()
    assert SourceTime.merge([one, other]) == SourceTime.merge([other, one])
    assert SourceTime.merge([one, other]).splits[0] == SplitTime(0, 0, 9)


def test_a_clock_survives_its_message():
    clock = after(saw((0, 0, 100), (1, 0, 10)))
    assert InputClock.from_message(clock.to_message()) == clock
    story = ProducerHistory(
        ("a", None),
        (HistoryInterval(), HistoryInterval({0: 5}), HistoryInterval({1: 7}, 6, [0])),
        (1, 2),
    )
    told = SourceTime((SplitTime(0, 0, None, story),), 1, frozenset(), 9)
    assert SourceTime.merge([told.to_message()]) == told
    clock = after(told)
    assert InputClock.from_message(clock.to_message()) == clock


def test_idle_is_counted_in_running_time_and_never_while_records_wait():
    progress = [PartitionProgress(5, 0), PartitionProgress(5, 900), PartitionProgress(5, 0)]
    behind = [False, False, True]
    assert idle_partitions(progress, behind, 1000, 1000) == {0}
    assert idle_partitions(progress, behind, 999, 1000) == set()
    assert idle_partitions(progress, behind, 1_000_000, None) == set()


def hear(producers, clock_ms, **reached):
    """One lane in which each producer in turn begins a stay and gets somewhere."""
    stretches = [HistoryInterval()] + [
        HistoryInterval({stay: us}) for stay, us in enumerate(reached.values())
    ]
    names = tuple(reached)
    story = ProducerHistory(names, tuple(stretches), tuple(range(len(names))))
    return producers.replay(story, clock_ms)


def test_a_new_producer_begins_where_the_partition_is():
    producers = Producers(NO_WATERMARK)
    assert hear(producers, 0, a=100, b=50) == [NO_WATERMARK, 100]
    assert producers.watermark_us == 100  # b's 50 is behind what a alone had reached
    assert hear(producers, 0, a=300, b=200, c=0) == [100, 100, 200]
    assert producers.watermark_us == 200


def test_a_quiet_producer_goes_and_not_while_its_partition_has_unread_records():
    producers = Producers(NO_WATERMARK)
    hear(producers, 0, a=10, b=10)
    hear(producers, 900, a=100)
    for clock_ms, behind, expected in [
        (999, False, 10),
        (1500, True, 10),  # what b has sent may be among the unread
        (2499, False, 10),  # and from then on its time counts again
        (2500, False, 100),
    ]:
        if expected == 100:
            hear(producers, 2500, a=100)
        producers.evict(clock_ms, 1000, behind=behind, producers_max=None)
        assert producers.watermark_us == expected, clock_ms
    assert list(producers.watermarks_us) == ["a"]


def test_who_fell_silent_earlier_goes_earlier_however_much_time_passes_at_once():
    producers = Producers(NO_WATERMARK)
    hear(producers, 0, a=10, b=10, c=10)
    hear(producers, 500, b=50)
    hear(producers, 900, c=90)
    producers.evict(60_000, 1000, behind=False, producers_max=None)
    assert (producers.watermark_us, producers.watermarks_us) == (90, {})


def test_beyond_the_maximum_the_producer_heard_longest_ago_goes_and_is_counted():
    producers = Producers(NO_WATERMARK)
    hear(producers, 0, a=1, b=2, c=3)
    hear(producers, 1, a=4)
    producers.evict(1, None, behind=False, producers_max=2)
    assert list(producers.watermarks_us) == ["c", "a"]
    assert producers.forgotten == 1


def test_when_the_last_producer_has_ended_the_watermark_holds():
    producers = Producers(NO_WATERMARK)
    ending = ProducerHistory(
        ("a", "b"),
        (HistoryInterval(), HistoryInterval({0: 5}), HistoryInterval({1: 9}, None, [0, 1])),
        (1, 2),
    )
    assert producers.replay(ending, 0) == [NO_WATERMARK, 5]
    assert (producers.watermark_us, producers.watermarks_us) == (9, {})
    assert hear(producers, 0, a=20) == [9]
